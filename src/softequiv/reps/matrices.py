"""A user's own representation: matrices of the generators, checked against the brackets and relations of the group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softequiv._linalg import (
    FLOAT32_ROUNDING,
    LEVEL_TOLERANCE,
    ROUNDED,
    Frozen,
    are_normal,
    checked_generators,
    expm,
    is_orthogonal,
    is_skew,
)
from softequiv.errors import NotARepresentationError, RepresentationError
from softequiv.groups import Group, Step, evaluate
from softequiv.reps.base import Rep


@dataclass(frozen=True)
class Matrices(Rep):
    """A representation given by its generators' matrices; build it with `representation`."""

    group: Group
    lie_matrices: Frozen
    step_matrices: Frozen
    label: str = "custom"

    @property
    def dim(self) -> int:
        return self.lie_matrices.value.shape[-1]

    @property
    def name(self) -> str:
        return self.label

    @cached_property
    def orthogonal(self) -> bool:
        return is_skew(self.lie()) and is_orthogonal(self.steps())

    @cached_property
    def normal(self) -> bool:
        return are_normal(torch.cat([self.lie(), self.steps()]))

    def lie(self) -> Tensor:
        return self.lie_matrices.value.clone()  # the caller's own

    def steps(self) -> Tensor:
        return self.step_matrices.value.clone()


def representation(
    group: Group, lie: Sequence[Tensor] | Tensor = (), steps: Sequence[Tensor] | Tensor = (), *, name: str = "custom"
) -> Rep:
    """A representation from the user's matrices, one per generator of the group, checked against its brackets and
    relations; give them in float64, as levels are told apart to nine digits.

    >>> from softequiv import SO
    >>> turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]])
    >>> representation(SO(2), lie=[turn]).dim
    2
    """
    if (len(lie), len(steps)) != (len(group.lie), len(group.steps)):
        raise RepresentationError(
            f"{group} has {len(group.lie)} Lie generators and {len(group.steps)} steps; got matrices for "
            f"{len(lie)} and {len(steps)}"
        )
    if not len(lie) + len(steps):
        raise RepresentationError(
            f"{group} has no generators, so matrices cannot tell a representation; use scalar(group)"
        )
    flows, jumps = checked_generators(lie, steps, f"a representation of {group}", RepresentationError)
    rep = Matrices(group, Frozen(flows), Frozen(jumps), name)
    check_representation(rep)
    return rep


def check_representation(rep: Rep) -> None:
    """Raise `NotARepresentationError` naming the first bracket or relation of the group that the generators break."""
    group, lie, steps = rep.group, rep.lie(), rep.steps()

    def hold(left: Tensor, right: Tensor, what: str) -> None:
        residual = float((left - right).abs().max())
        scale = max(1.0, float(right.abs().max()))
        if LEVEL_TOLERANCE * scale < residual <= FLOAT32_ROUNDING * scale:
            raise NotARepresentationError(
                f"these matrices do not quite represent {group}: {what} fails by {residual:.2g}; {ROUNDED}"
            )
        if residual > FLOAT32_ROUNDING * scale:
            raise NotARepresentationError(
                f"these matrices do not represent {group}: {what} fails by {residual:.2g}; check the matrices "
                f"or name another group"
            )

    for i, j in itertools.combinations(range(len(lie)), 2):
        coords = coordinates(group, group.lie[i] @ group.lie[j] - group.lie[j] @ group.lie[i])
        hold(lie[i] @ lie[j] - lie[j] @ lie[i], torch.einsum("k,kab->ab", coords, lie), f"the bracket [A{i}, A{j}]")
    for j, step in enumerate(group.steps):
        for i, generator in enumerate(group.lie):
            coords = coordinates(group, step @ generator @ torch.linalg.inv(step))
            hold(
                steps[j] @ lie[i], torch.einsum("k,kab->ab", coords, lie) @ steps[j], f"the conjugation of A{i} by s{j}"
            )
    for i, j in itertools.combinations(range(len(steps)), 2):
        if torch.allclose(group.steps[i] @ group.steps[j], group.steps[j] @ group.steps[i]):
            hold(steps[i] @ steps[j], steps[j] @ steps[i], f"s{i} s{j} = s{j} s{i}")
    eye = torch.eye(rep.dim, dtype=torch.float64)
    for i, period in enumerate(group.periods):
        if period is not None:
            hold(expm(period * lie[i]), eye, f"exp({period:.4g} A{i}) = 1")
    for word in group.relations:
        text = " ".join(f"s{move.index}^{move.count}" for move in word if isinstance(move, Step))
        hold(evaluate(word, lie, steps), eye, f"the relation {text} = 1")


def coordinates(group: Group, matrix: Tensor) -> Tensor:
    """The coordinates of a Lie-algebra element of the defining representation."""
    solution: Tensor = torch.linalg.lstsq(group.lie.flatten(1).T, matrix.flatten()[:, None]).solution
    return solution[:, 0]
