"""What is done to one weight? Its representation, its gain, and where in the stored tensor the group acts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.errors import GainError
from softequiv.gains import Gain, WeightFilter
from softequiv.reps import Rep
from softequiv.spectrum import Filter
from softequiv.spectrum.base import full_precision


@dataclass(frozen=True)
class Layout:
    """Where the axes on which a group acts lie in a stored tensor; by default they are its last ones.

    `axis`: the stored axis that holds the flattened space, `channels` copies of it; `skip` and `behind`: entries at its
    start and end that the group leaves alone (class and register tokens); `groups`: the number of independent maps that
    the first axis holds (grouped convolution); `swap`: the first two axes are exchanged (transposed convolution).

    >>> import softequiv as se
    >>> Layout(axis=1, skip=1).read(torch.zeros(1, 50, 16), se.grid(se.C(4), 7, 7)).shape  # a table of positions
    torch.Size([1, 16, 1, 7, 7])
    """

    axis: int | None = None
    skip: int = 0
    channels: int = 1
    groups: int = 1
    swap: bool = False
    behind: int = 0

    def read(self, stored: Tensor, rep: Rep) -> Tensor:
        """The stored tensor as (..., *rep.shape)."""
        if self.axis is not None:
            part = stored.narrow(self.axis, self.skip, self.channels * rep.dim).movedim(self.axis, -1)
            return part.unflatten(-1, (self.channels, *rep.shape))
        if self.groups > 1:
            stored = stored.unflatten(0, (self.groups, -1))
        return stored.transpose(-len(rep.shape), 1 - len(rep.shape)) if self.swap else stored

    def write(self, stored: Tensor, part: Tensor, rep: Rep) -> Tensor:
        """A tensor like `stored` with its group axes replaced by `part`."""
        if self.axis is not None:
            flat = part.flatten(part.ndim - len(rep.shape) - 1).movedim(-1, self.axis)
            if not (self.skip or self.behind):
                return flat
            first = stored.narrow(self.axis, 0, self.skip)
            last = stored.narrow(self.axis, stored.shape[self.axis] - self.behind, self.behind)
            return torch.cat([first, flat, last], self.axis)
        part = part.transpose(-len(rep.shape), 1 - len(rep.shape)) if self.swap else part
        return part.flatten(0, 1) if self.groups > 1 else part


PLAIN = Layout()


@dataclass(frozen=True)
class Soft:
    """What is done to one weight: its representation, its gain, and where its axes lie.

    >>> import softequiv as se
    >>> Soft(se.grid(se.C(4), 5, 5), se.softness(0.5)).rep.shape
    (5, 5)
    """

    rep: Rep
    gain: Gain
    layout: Layout = PLAIN

    def __post_init__(self) -> None:
        if not isinstance(self.gain, Gain):
            raise GainError(f"a gain is softness(0.5), hard(1.0) or their like; got {self.gain!r}")


def through(apply: WeightFilter, soft: Soft, weight: Tensor) -> Tensor:
    """A stored tensor with its group axes filtered, in full precision inside autocast too."""
    if weight.is_meta or (isinstance(apply, Filter) and apply.side == "identity"):
        return weight
    with full_precision(weight):
        if soft.layout == PLAIN:
            return apply(weight)
        return soft.layout.write(weight, apply(soft.layout.read(weight, soft.rep)), soft.rep)


def times_matrix(weight: Tensor, matrix: Tensor) -> Tensor:
    """Each row of d numbers in a weight times (d, d), with as few calls as possible: Python takes longer than mm."""
    kind = weight.device.type
    autocast = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, False)
    try:
        return torch.mm(weight.reshape(-1, matrix.shape[0]), matrix)
    finally:
        torch.set_autocast_enabled(kind, autocast)
