"""How much of each level stays? A gain gamma(sigma) turns a spectrum into a filter of weights, W = sum_sigma
gamma(sigma) Theta_sigma.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from softequiv._linalg import LEVEL_TOLERANCE
from softequiv.errors import GainError, WeightError, checked_number
from softequiv.reps import Rep
from softequiv.spectrum import Spectrum, spectrum


class WeightFilter(Protocol):
    """What a gain becomes on a representation: a map of weights (..., *rep.shape), for one dtype and device."""

    def __call__(self, weight: Tensor) -> Tensor: ...

    def to(self, dtype: torch.dtype, device: torch.device) -> WeightFilter: ...


class Gain(ABC):
    """A rule that says how much of each level stays; subclasses are frozen dataclasses."""

    @abstractmethod
    def on(self, rep: Rep) -> WeightFilter:
        """The filter for weights (..., *rep.shape)."""

    def constraint(self, rep: Rep) -> WeightFilter:
        """The projection onto all weights that the gain can give: what a training step must not leave."""
        return self.on(rep)

    def __call__(self, weight: Tensor, rep: Rep) -> Tensor:
        """Filter one weight, which must be finite."""
        if not torch.isfinite(weight).all():
            raise WeightError(f"the weight of {rep} has entries that are not finite: mend it first")
        return self.on(rep)(weight)


class LevelGain(Gain):
    """A gain that depends on the levels alone, so that its filter is a fixed linear operator."""

    @abstractmethod
    def gamma(self, of: Spectrum) -> Tensor:
        """The gain of each level, (levels,) float64."""

    def on(self, rep: Rep) -> WeightFilter:
        levels = spectrum(rep)
        return levels.filter(self.gamma(levels))

    def constraint(self, rep: Rep) -> WeightFilter:
        """Levels with gain zero stay out; a fractional gain is a starting point and constrains nothing."""
        levels = spectrum(rep)
        return levels.filter((self.gamma(levels) > 0).to(torch.float64))

    def kept(self, of: Spectrum) -> Kept:
        """Which cut-off this is on a spectrum, and how many of how many directions it keeps."""
        gamma = self.gamma(of)
        partial = torch.nonzero(gamma < 1)
        cutoff = float(of.levels[partial[0, 0]]) if len(partial) else math.inf
        return Kept(cutoff, float((gamma * of.counts).sum()), int(of.counts.sum()))


@dataclass(frozen=True)
class Kept:
    """What a gain leaves: every level below `cutoff` whole, `directions` of `total` in all (a scaled level counts by
    its gain).
    """

    cutoff: float
    directions: float
    total: int

    def __str__(self) -> str:
        return f"keeps {self.directions:g} of {self.total} directions, whole below level {self.cutoff:g}"


def below(levels: Tensor, b: float) -> Tensor:
    """sigma < b, where a level that equals b up to rounding does not count as below."""
    tolerance = LEVEL_TOLERANCE * max(1.0, float(levels[-1]) if len(levels) else 0.0)
    return levels < b - tolerance


def settle(gain: Gain, *names: str) -> None:
    """Refuse settings that are no numbers; those of numpy and torch become Python's own, so that they can be saved."""
    for name in names:
        what = f"{name} of the gain {type(gain).__name__}"
        object.__setattr__(gain, name, checked_number(getattr(gain, name), what, GainError))


def checked_cutoff(b: float) -> None:
    """A cut-off is a number of at least zero."""
    if not b >= 0:
        raise GainError(f"a cut-off is a level of at least 0, in units of the generators; got {b!r}")


def checked_decay(s: float) -> None:
    """A decay is a positive number."""
    if not (s > 0 and math.isfinite(s)):
        raise GainError(f"the decay s of a smooth gain is a positive number; got {s!r}")
