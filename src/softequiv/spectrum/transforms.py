"""Orthogonal changes of basis that never build the matrix they stand for: along an axis, in pairs, in blocks, or dense.

Each acts on the last axis of a flattened weight (..., D): `forward` gives coordinates, `inverse` goes back.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

LARGEST_SUM = 2**25  # numbers: 128 MB for a moment
UNROLLED = 9  # terms of a compiled sum that are written out; a reduction so short leaves most threads of a GPU idle


class Transform(ABC):
    """An orthogonal map of R^D."""

    @abstractmethod
    def apply(self, x: Tensor, back: bool) -> Tensor:
        """The map, or its inverse, of (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        """Coordinates of x, (..., D) to (..., D)."""
        return self.apply(x, back=False)

    def inverse(self, y: Tensor) -> Tensor:
        """The x that has coordinates y."""
        return self.apply(y, back=True)


def moved(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A dataclass, tuple or tensor with its floating tensors in another dtype and all tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, tuple):
        return tuple(moved(item, dtype, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), dtype, device) for f in fields(value)})
    return value


def tf32_allowed(x: Tensor) -> bool:
    """Whether a product of float32 matrices may keep three digits only."""
    return x.is_cuda and x.dtype == torch.float32 and _tf32_on()


def _tf32_on() -> bool:
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9 and later
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


# what torch.compiler.assume_constant_result sets; to call that imports the compiler, which takes most of two seconds
_tf32_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b to the precision of its dtype, whatever the user allows elsewhere: the filter carries the guarantee."""
    return (a.double() @ b.double()).float() if tf32_allowed(a) else a @ b


@dataclass(frozen=True)
class Dense(Transform):
    """y = basis^T x with an explicit orthogonal (D, D) basis."""

    basis: Tensor

    def apply(self, x: Tensor, back: bool) -> Tensor:
        return product(x, self.basis.mT if back else self.basis)


@dataclass(frozen=True)
class AxisBlock:
    """`copies` of one (size, size) basis next to each other on an axis; None for the identity."""

    copies: int
    size: int
    basis: Tensor | None


@dataclass(frozen=True)
class AlongAxis(Transform):
    """A block-diagonal basis applied along the middle axis of (before, axis, after)."""

    before: int
    after: int
    blocks: tuple[AxisBlock, ...]

    def apply(self, x: Tensor, back: bool) -> Tensor:
        if all(block.basis is None for block in self.blocks):
            return x
        lead = x.shape[:-1]
        parts = x.reshape(*lead, self.before, -1, self.after).split([b.copies * b.size for b in self.blocks], dim=-2)
        out = []
        for part, block in zip(parts, self.blocks, strict=True):
            if block.basis is None:
                out.append(part)
            else:
                matrix = block.basis if back else block.basis.mT
                split = part.reshape(*lead, self.before, block.copies, block.size, self.after)
                # the last axis as one large product: many products with a single column are far slower
                last = self.after == 1
                turned = product(split[..., 0], matrix.mT)[..., None] if last else product(matrix, split)
                out.append(turned.reshape(part.shape))
        return torch.cat(out, dim=-2).reshape(x.shape)


@dataclass(frozen=True)
class Butterfly(Transform):
    """Products of two turning pairs become pairs that turn at the sum and at the difference of their rates.

    Of four coordinates cc, cs, sc, ss (index (4, n)): (cc - ss, cs + sc) turns at the sum, (cc + ss, sc - cs) at the
    difference, each divided by sqrt 2; they are stored at the places of (cc, cs) and (ss, sc).
    """

    index: Tensor

    def apply(self, x: Tensor, back: bool) -> Tensor:
        a = -1.0 if back else 1.0  # the 4 x 4 mixing, or its transpose
        cc, cs, sc, ss = (x[..., i] for i in self.index)
        mixed = torch.stack([cc - a * ss, cs + a * sc, sc - a * cs, ss + a * cc], -2) / math.sqrt(2)
        return x.index_copy(-1, self.index.flatten(), mixed.reshape(*x.shape[:-1], -1))


@dataclass(frozen=True)
class Block:
    """One small orthogonal basis (p, p) for many sets of coordinates, index (sets, p)."""

    index: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Blocks(Transform):
    """Small bases on disjoint sets of coordinates that together cover all."""

    blocks: tuple[Block, ...]

    def apply(self, x: Tensor, back: bool) -> Tensor:
        parts = [product(x[..., b.index], b.basis.mT if back else b.basis) for b in self.blocks]
        order = torch.cat([b.index.flatten() for b in self.blocks])
        return torch.empty_like(x).index_copy(
            -1, order, torch.cat([part.reshape(*x.shape[:-1], -1) for part in parts], -1)
        )


@dataclass(frozen=True)
class Pairs(Transform):
    """Small bases for maps between copies of small spaces, X = + m_i V_i and Y = + n_j U_j.

    Every copy of (U_j, V_i) in a weight (dim Y, dim X) shares one matrix of size dim U_j dim V_i, `bases[j][i]`; None
    for the identity. `rows` and `columns` hold (copies, size) of the terms of Y and X.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    bases: tuple[tuple[Tensor | None, ...], ...]

    @cached_property
    def dim(self) -> int:
        """D = dim Y dim X."""
        return starts(self.rows)[-1] * starts(self.columns)[-1]

    def apply(self, x: Tensor, back: bool) -> Tensor:
        return self.by_copies(
            x, map_table(self.bases, lambda basis: lambda part: times(part, basis.mT if back else basis))
        )

    def by_copies(self, x: Tensor, maps: Table[SmallMap]) -> Tensor:
        """Put every copy of a pair, flattened to (..., dim U dim V), through the map of its pair."""
        widths = [copies * size for copies, size in self.columns]
        heights = [copies * size for copies, size in self.rows]
        strips = x.reshape(-1, sum(heights), sum(widths)).split(heights, -2)
        out = []
        for strip, rows, of_row in zip(strips, self.rows, maps, strict=True):
            parts = strip.split(widths, -1) if len(widths) > 1 else (strip,)
            mapped = [
                part if own is None else each_copy(part, own, rows, columns)
                for part, columns, own in zip(parts, self.columns, of_row, strict=True)
            ]
            out.append(torch.cat(mapped, -1) if len(mapped) > 1 else mapped[0])
        return (torch.cat(out, -2) if len(out) > 1 else out[0]).reshape(x.shape)


T = TypeVar("T")
U = TypeVar("U")
Table = tuple[tuple[T | None, ...], ...]
SmallMap = Callable[[Tensor], Tensor]


def map_table(table: Table[T], change: Callable[[T], U]) -> Table[U]:
    """Change every entry that is there."""
    return tuple(tuple(None if entry is None else change(entry) for entry in row) for row in table)


def each_copy(part: Tensor, act: SmallMap, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Put each of n x m small maps in a block (..., n high, m wide), flattened to (..., high wide), through `act`."""
    if isinstance(act, Multiple):
        return act(part)
    (n, high), (m, wide) = rows, columns
    lead = part.shape[:-2]
    copies = part.reshape(*lead, n, high, m, wide).transpose(-3, -2).reshape(*lead, n, m, high * wide)
    return act(copies).reshape(*lead, n, m, high, wide).transpose(-3, -2).reshape(part.shape)


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """x @ matrix for a small matrix; as a sum where TF32 would take the product's digits, and in compiled passes, which
    fuse it with the cast of the weight, so that nothing more is launched."""
    compiling = torch.compiler.is_compiling()
    if compiling and len(matrix) <= UNROLLED:
        return reduce(torch.add, (x[..., k, None] * row for k, row in enumerate(matrix)))
    summed = compiling or (tf32_allowed(x) and x.numel() * len(matrix) <= LARGEST_SUM)
    return (x[..., None, :] * matrix.mT).sum(-1) if summed else product(x, matrix)


class Core(ABC):
    """What a filter does to coordinates: a symmetric map of R^D that is cheap to apply."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""


@dataclass(frozen=True)
class Scale(Core):
    """Multiply each coordinate by its own gain."""

    gains: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.gains


@dataclass(frozen=True)
class Multiple(Core):
    """Multiply all coordinates by one gain."""

    amount: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.amount if self.amount else torch.zeros_like(x)


@dataclass(frozen=True)
class Matrix(Core):
    """A small symmetric matrix (D, D)."""

    matrix: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return times(x, self.matrix)

    @staticmethod
    def of(basis: Tensor, gains: Tensor) -> Matrix:
        """basis diag(gains) basis^T."""
        return Matrix((basis * gains) @ basis.mT)


@dataclass(frozen=True)
class PairMatrices(Core):
    """One small symmetric matrix or one gain per pair of terms, for all its copies; None where nothing changes."""

    pairs: Pairs
    maps: Table[Matrix | Multiple]

    def __call__(self, x: Tensor) -> Tensor:
        """A weight as it is stored will do: (..., D) or (..., dim Y, dim X)."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.pairs.by_copies(x, self.maps)
        # written in place: half the operations of cutting a weight up and joining its parts again
        x = x.contiguous()
        y = torch.empty_like(x) if self.one_matrix else x.clone()
        dim = self.pairs.dim
        for size, stride, start, act in self.places:
            size, stride = (x.numel() // dim, *size), (dim, *stride)
            own = y.as_strided(size, stride, start)
            if isinstance(act, Matrix):
                copies = x.as_strided(size, stride, x.storage_offset() + start).reshape(-1, act.matrix.shape[0])
                own.copy_(act(copies).view(size))
            elif act.amount:
                own.mul_(act.amount)
            else:
                own.zero_()
        return y

    @cached_property
    def one_matrix(self) -> bool:
        """Whether a single matrix changes all of a weight."""
        return len(self.maps) == len(self.maps[0]) == 1 and isinstance(self.maps[0][0], Matrix)

    @cached_property
    def places(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int, Matrix | Multiple]]:
        """Of each pair that changes: size, stride and start of its copies (n, m, high, wide), and its map."""
        rows, columns = starts(self.pairs.rows), starts(self.pairs.columns)
        width = columns[-1]
        return [
            ((n, m, high, wide), (high * width, wide, width, 1), top * width + left, act)
            for top, (n, high), of_row in zip(rows, self.pairs.rows, self.maps, strict=False)
            for left, (m, wide), act in zip(columns, self.pairs.columns, of_row, strict=False)
            if act is not None
        ]

    @staticmethod
    def of(pairs: Pairs, gains: Tensor) -> PairMatrices:
        """basis diag(gains) basis^T of every pair, with the gains of its first copy."""
        columns = starts(pairs.columns)
        table = gains.unflatten(0, (-1, columns[-1]))
        rows = []
        for top, (_, high), of_row in zip(starts(pairs.rows), pairs.rows, pairs.bases, strict=False):
            row: list[Matrix | Multiple | None] = []
            for left, (_, wide), basis in zip(columns, pairs.columns, of_row, strict=False):
                own = table[top : top + high, left : left + wide].flatten()
                if bool((own == own[0]).all()):
                    row.append(None if own[0] == 1 else Multiple(float(own[0])))
                else:
                    row.append(Matrix.of(torch.eye(len(own), dtype=own.dtype) if basis is None else basis, own))
            rows.append(tuple(row))
        return PairMatrices(pairs, tuple(rows))


def starts(terms: tuple[tuple[int, int], ...]) -> list[int]:
    """Where each term's (copies, size) begin, and where the last one ends."""
    return list(itertools.accumulate((copies * size for copies, size in terms), initial=0))


@dataclass(frozen=True)
class Paired(Core):
    """A butterfly, gains and the butterfly back, as one sum: own * x + other * x[partner]."""

    own: Tensor
    other: Tensor
    partner: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.own + x.index_select(-1, self.partner) * self.other

    @staticmethod
    def of(butterfly: Butterfly, gains: Tensor) -> Paired:
        """With gains s of the sums and d of the differences: cc' = (d + s)/2 cc + (d - s)/2 ss, and so on."""
        cc, cs, sc, ss = butterfly.index
        own, other, partner = gains.clone(), torch.zeros_like(gains), torch.arange(len(gains))
        sums, differences = gains[cc], gains[ss]
        for places, opposite, sign in ((cc, ss, 1), (ss, cc, 1), (cs, sc, -1), (sc, cs, -1)):
            own[places] = (differences + sums) / 2
            other[places] = sign * (differences - sums) / 2
            partner[places] = opposite
        return Paired(own, other, partner)


@dataclass(frozen=True)
class BlockMatrices(Core):
    """One small symmetric matrix per kind of block, after sorting the coordinates by block."""

    order: Tensor
    back: Tensor
    counts: tuple[int, ...]
    matrices: tuple[Tensor, ...]

    def __call__(self, x: Tensor) -> Tensor:
        parts = x.index_select(-1, self.order).split(list(self.counts), -1)
        mixed = [
            part * matrix[0, 0]
            if len(matrix) == 1
            else times(part.reshape(*part.shape[:-1], -1, len(matrix)), matrix).reshape(part.shape)
            for part, matrix in zip(parts, self.matrices, strict=True)
        ]
        return torch.cat(mixed, -1).index_select(-1, self.back)

    @staticmethod
    def of(blocks: Blocks, gains: Tensor) -> BlockMatrices:
        """basis diag(gains) basis^T of every block."""
        order = torch.cat([block.index.flatten() for block in blocks.blocks])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        matrices = tuple((block.basis * gains[block.index[0]]) @ block.basis.mT for block in blocks.blocks)
        return BlockMatrices(order, back, tuple(block.index.numel() for block in blocks.blocks), matrices)
