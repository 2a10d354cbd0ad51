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
                out.append((matrix @ split).reshape(part.shape))
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
