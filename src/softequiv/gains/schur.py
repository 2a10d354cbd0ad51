"""The paper's Schur rule, faithfully: blocks are judged by the sum of their rates, and generators are composed one
after another.

It keeps a strict subset of what the exact rule keeps at the same cut-off. With several generators that do not commute
the composition is not a projection, as the paper says; `Schur.approximate` tells where.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import LEVEL_TOLERANCE, Frozen
from softequiv.errors import RepresentationError
from softequiv.gains.base import Gain, WeightFilter, checked_cutoff, checked_decay, settle
from softequiv.groups import group_from
from softequiv.reps import Hom, Matrices, Rep, Sum, TensorProduct, direct_sum, tensor_product
from softequiv.spectrum import Filter, Scale, Spectrum, characters, summed_rates

ONE_GENERATOR = group_from(lie=[torch.zeros(1, 1)], name="one generator")


@dataclass(frozen=True)
class Composed:
    """Filters applied one after another."""

    filters: tuple[Filter, ...]

    def to(self, dtype: torch.dtype, device: torch.device) -> Composed:
        """The same filters for another dtype or device."""
        return Composed(tuple(single.to(dtype, device) for single in self.filters))

    def __call__(self, weight: Tensor) -> Tensor:
        for single in self.filters:
            weight = single(weight)
        return weight


@dataclass(frozen=True)
class Schur(Gain):
    """Per pair of Schur blocks with rates lambda_S, lambda_T: keep all if lambda_S + lambda_T <= b, else the
    commuting part.

    With `s`, the rest is scaled by exp(-(lambda_S + lambda_T) / s^2) instead of dropped.

    >>> import torch, softequiv as se
    >>> rep = se.vector(se.SO(2)) >> se.vector(se.SO(2))
    >>> se.schur(1.5)(torch.tensor([[2.0, 3.0], [-1.0, 4.0]]), rep)
    tensor([[ 3.0000,  2.0000],
            [-2.0000,  3.0000]])
    """

    b: float
    s: float | None = None

    def __post_init__(self) -> None:
        settle(self, "b")
        checked_cutoff(self.b)
        if self.s is not None:
            settle(self, "s")
            checked_decay(self.s)

    def approximate(self, rep: Rep) -> bool:
        """Whether composing the generators' filters differs from filtering by all of them together."""
        return not rep.group.abelian

    def on(self, rep: Rep) -> WeightFilter:
        if not rep.normal:
            raise RepresentationError(
                f"the Schur rule needs normal generators, and those of {rep} are not; use hard() or smooth()"
            )
        count = len(rep.group.lie) + len(rep.group.steps)
        return Composed(tuple(self._single(rep, i) for i in range(count)))

    def constraint(self, rep: Rep) -> WeightFilter:
        """With a decay nothing is excluded for good, as with every fractional gain."""
        return self.on(rep) if self.s is None else Composed(())

    def _single(self, rep: Rep, generator: int) -> Filter:
        levels, rates = single_generator(rep, generator)
        tolerance = LEVEL_TOLERANCE * max(1.0, float(rates.max()))
        kept = (rates <= self.b + tolerance) | (levels.levels[levels.level_of] == 0)
        rest = torch.zeros_like(rates) if self.s is None else torch.exp(-rates / self.s**2)
        gains = torch.where(kept, 1.0, rest)
        return Filter(rep, gains, "all", levels.transforms, Scale(gains))


@cached
def single_generator(rep: Rep, generator: int) -> tuple[Spectrum, Tensor]:
    """The spectrum of one generator alone, and the sum of block rates at each of its coordinates."""
    alone = restricted(rep, generator)
    return characters(alone), summed_rates(alone)


def restricted(rep: Rep, generator: int) -> Rep:
    """A representation of one generator: its rate (d rho(A), or rho(s) - I) taken as a Lie generator, sums and axes
    kept.
    """
    if isinstance(rep, Hom):
        return Hom(restricted(rep.source, generator), restricted(rep.target, generator))
    if isinstance(rep, Sum):
        return direct_sum([(restricted(term, generator), copies) for term, copies in rep.terms])
    if isinstance(rep, TensorProduct) and any(isinstance(factor, Hom) for factor in rep.factors):
        return tensor_product(*(restricted(factor, generator) for factor in rep.factors))
    return Matrices(
        ONE_GENERATOR, Frozen(rep.rates()[generator][None]), Frozen(torch.zeros(0, rep.dim, rep.dim)), rep.name
    )
