"""Gains by a cut-off: hard and smooth as in the paper, and softness, the dial from 0 (equivariant) to 1 (free)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.errors import GainError
from softequiv.gains.base import LevelGain, below, checked_cutoff, checked_decay, settle
from softequiv.spectrum import Spectrum

ROUNDING = 1e-12  # of a number of directions: what it leaves of a level would count as part of it


@dataclass(frozen=True)
class Hard(LevelGain):
    """gamma = 1 if sigma < b, else 0; level 0 always stays. A constraint: training cannot leave the kept subspace.

    >>> import torch, softequiv as se
    >>> rep = se.vector(se.SO(2)) >> se.vector(se.SO(2))
    >>> se.hard(1.5)(torch.tensor([[2.0, 3.0], [-1.0, 4.0]]), rep)
    tensor([[ 3.,  2.],
            [-2.,  3.]])
    """

    b: float

    def __post_init__(self) -> None:
        settle(self, "b")
        checked_cutoff(self.b)

    def gamma(self, of: Spectrum) -> Tensor:
        return (below(of.levels, self.b) | (of.levels == 0)).to(torch.float64)


@dataclass(frozen=True)
class Smooth(LevelGain):
    """gamma = 1 if sigma < b, else exp(-sigma^2 / s^2). A starting point: training can grow back what is scaled, not
    what is zero.

    >>> import softequiv as se
    >>> se.smooth(0.5, 1.0).gamma(se.spectrum(se.grid(se.SO(2), 3, 3))).tolist()
    [1.0, 0.367..., 0.018...]
    """

    b: float
    s: float

    def __post_init__(self) -> None:
        settle(self, "b", "s")
        checked_cutoff(self.b)
        checked_decay(self.s)

    def gamma(self, of: Spectrum) -> Tensor:
        whole = below(of.levels, self.b) | (of.levels == 0)
        return torch.where(whole, 1.0, torch.exp(-((of.levels / self.s) ** 2)))


@dataclass(frozen=True)
class Softness(LevelGain):
    """Keep n_0 + s (N - n_0) of N directions, lowest levels first: s = 0 is exactly equivariant, s = 1 the identity.

    The level on which the count falls is never split: all of it is scaled by the fraction that it should contribute, so
    the dial is continuous and the result has a meaning for the group. Whole levels are constraints, the scaled one is a
    starting point.

    >>> import softequiv as se
    >>> print(se.softness(0.5).kept(se.spectrum(se.grid(se.SO(2), 3, 3))))
    keeps 6 of 9 directions, whole below level 2
    """

    s: float

    def __post_init__(self) -> None:
        settle(self, "s")
        if not 0 <= self.s <= 1:
            raise GainError(f"softness runs from 0 (equivariant) to 1 (unconstrained); got {self.s!r}")

    def gamma(self, of: Spectrum) -> Tensor:
        counts = of.counts.to(torch.float64)
        if self.s == 1:
            return torch.ones_like(counts)
        target = of.invariants + self.s * (counts.sum() - of.invariants)
        before = counts.cumsum(0) - counts
        wanted = target - before  # directions of each level
        wanted = torch.where((wanted - wanted.round()).abs() < ROUNDING * counts.sum(), wanted.round(), wanted)
        return (wanted / counts).clamp(0, 1)
