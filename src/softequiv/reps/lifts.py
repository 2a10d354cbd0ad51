"""Representations of products of groups, from those of the factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._linalg import identity_like
from softequiv.errors import RepresentationError
from softequiv.groups import DirectProduct, Group
from softequiv.reps.base import Rep


@dataclass(frozen=True)
class Lift(Rep):
    """A representation of one factor of a product; the other factors do nothing."""

    base: Rep
    group: DirectProduct
    factor: int

    @property
    def dim(self) -> int:
        return self.base.dim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def name(self) -> str:
        return f"{self.base}[{self.base.group}]"

    @property
    def parts(self) -> tuple[Rep, ...]:
        return (self.base,)

    def _placed(self, kind: str, rest: Tensor) -> Tensor:
        batches = []
        for index, factor in enumerate(self.group.factors):
            own: Tensor = getattr(self.base, kind)()
            batches.append(own if index == self.factor else rest.expand(len(getattr(factor, kind)), -1, -1))
        return torch.cat(batches)

    def rates(self) -> Tensor:
        """The base's own rates, which may differ from its generators on grids."""
        k, own = len(self.base.group.lie), self.base.rates()
        lie, steps = self.lie(), self.steps()
        before = sum(len(factor.lie) for factor in self.group.factors[: self.factor])
        lie[before : before + k] = own[:k]
        return torch.cat([lie, steps - identity_like(steps)])

    def lie(self) -> Tensor:
        return self._placed("lie", torch.zeros(self.dim, self.dim, dtype=torch.float64))

    def steps(self) -> Tensor:
        return self._placed("steps", torch.eye(self.dim, dtype=torch.float64))


def lift(rep: Rep, group: Group, factor: int) -> Rep:
    """A representation of the factor with that number, seen as one of the whole product.

    >>> from softequiv import SO, S, vector
    >>> points = lift(vector(S(4)), S(4) * SO(3), 0) @ lift(vector(SO(3)), S(4) * SO(3), 1)
    >>> points.dim
    12
    """
    if (
        not isinstance(group, DirectProduct)
        or not 0 <= factor < len(group.factors)
        or group.factors[factor] != rep.group
    ):
        raise RepresentationError(f"{rep} represents {rep.group}, which is not factor {factor} of {group}")
    return Lift(rep, group, factor)


def outer(a: Rep, b: Rep) -> Rep:
    """The outer tensor product: a representation of the product of the two groups.

    >>> from softequiv import SO, S, vector
    >>> outer(vector(S(4)), vector(SO(3))).group.name
    'S4xSO(3)'
    """
    group = a.group * b.group
    if isinstance(a.group, DirectProduct) or isinstance(b.group, DirectProduct):
        raise RepresentationError(
            f"outer() takes representations of simple factors; lift those of {a.group} and {b.group} into {group}"
        )
    return lift(a, group, 0) @ lift(b, group, 1)
