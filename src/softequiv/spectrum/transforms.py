"""Orthogonal changes of basis that never build the matrix they stand for: along an axis, in pairs, in blocks, or dense.

Each acts on the last axis of a flattened weight (..., D): `forward` gives coordinates, `inverse` goes back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


class Transform(ABC):
    """An orthogonal map of R^D."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Coordinates of x, (..., D) to (..., D)."""

    @abstractmethod
    def inverse(self, y: Tensor) -> Tensor:
        """The x that has coordinates y."""


def moved(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A dataclass, tuple or tensor with its floating tensors in another dtype and all tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, tuple):
        return tuple(moved(item, dtype, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), dtype, device) for f in fields(value)})
    return value


@dataclass(frozen=True)
class Dense(Transform):
    """y = basis^T x with an explicit orthogonal (D, D) basis."""

    basis: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.basis

    def inverse(self, y: Tensor) -> Tensor:
        return y @ self.basis.mT


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

    def _apply(self, x: Tensor, transpose: bool) -> Tensor:
        if all(block.basis is None for block in self.blocks):
            return x
        lead = x.shape[:-1]
        parts = x.reshape(*lead, self.before, -1, self.after).split([b.copies * b.size for b in self.blocks], dim=-2)
        out = []
        for part, block in zip(parts, self.blocks, strict=True):
            if block.basis is None:
                out.append(part)
            else:
                matrix = block.basis.mT if transpose else block.basis
                split = part.reshape(*lead, self.before, block.copies, block.size, self.after)
                # the last axis as one large product: many products with a single column are far slower
                turned = (split[..., 0] @ matrix.mT)[..., None] if self.after == 1 else matrix @ split
                out.append(turned.reshape(part.shape))
        return torch.cat(out, dim=-2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self._apply(x, transpose=True)

    def inverse(self, y: Tensor) -> Tensor:
        return self._apply(y, transpose=False)


@dataclass(frozen=True)
class Butterfly(Transform):
    """Products of two turning pairs become pairs that turn at the sum and at the difference of their rates.

    Of four coordinates cc, cs, sc, ss (index (4, n)): (cc - ss, cs + sc) turns at the sum, (cc + ss, sc - cs) at the
    difference, each divided by sqrt 2; they are stored at the places of (cc, cs) and (ss, sc).
    """

    index: Tensor

    def _mix(self, x: Tensor, a: float) -> Tensor:
        """a = 1 forward; a = -1 transposes the 4 x 4 mixing."""
        cc, cs, sc, ss = (x[..., i] for i in self.index)
        mixed = torch.stack([cc - a * ss, cs + a * sc, sc - a * cs, ss + a * cc], -2) / math.sqrt(2)
        return x.index_copy(-1, self.index.flatten(), mixed.flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(x, 1.0)

    def inverse(self, y: Tensor) -> Tensor:
        return self._mix(y, -1.0)


@dataclass(frozen=True)
class Block:
    """One small orthogonal basis (p, p) for many sets of coordinates, index (sets, p)."""

    index: Tensor
    basis: Tensor


@dataclass(frozen=True)
class Blocks(Transform):
    """Small bases on disjoint sets of coordinates that together cover all."""

    blocks: tuple[Block, ...]

    def _apply(self, x: Tensor, transpose: bool) -> Tensor:
        parts = [x[..., b.index] @ (b.basis.mT if transpose else b.basis) for b in self.blocks]
        order = torch.cat([b.index.flatten() for b in self.blocks])
        return torch.empty_like(x).index_copy(-1, order, torch.cat([part.flatten(-2) for part in parts], -1))

    def forward(self, x: Tensor) -> Tensor:
        return self._apply(x, transpose=False)

    def inverse(self, y: Tensor) -> Tensor:
        return self._apply(y, transpose=True)


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
class Matrix(Core):
    """A small symmetric matrix, (D, D)."""

    matrix: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a fused sum: vendor kernels are slow on rows of 9 or 49 numbers
            return (x[..., None, :] * self.matrix).sum(-1)
        return x @ self.matrix


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
            part * matrix[0, 0] if len(matrix) == 1 else (part.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)
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
