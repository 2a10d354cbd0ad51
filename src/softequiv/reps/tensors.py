"""Representations every matrix group has: its vectors and their tensor powers; regular ones; a user's matrices;
products of groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softequiv._linalg import IDENTITY_TOLERANCE, Frozen, expm, is_orthogonal, is_skew, stack
from softequiv.errors import NotARepresentationError, RepresentationError
from softequiv.groups import SO, C, DirectProduct, Group, Step, evaluate, matrix_key
from softequiv.reps.base import Decomposition, Piece, Rep, Trivial, tensor_product


@dataclass(frozen=True)
class Vector(Rep):
    """The defining representation."""

    group: Group

    @property
    def dim(self) -> int:
        return self.group.lie.shape[-1]

    @property
    def name(self) -> str:
        return "V"

    @property
    def orthogonal(self) -> bool:
        return self.group.orthogonal

    def lie(self) -> Tensor:
        return self.group.lie

    def steps(self) -> Tensor:
        return self.group.steps

    @cached_property
    def normal(self) -> bool:
        return are_normal(torch.cat([self.lie(), self.steps()]))

    def decomposition(self) -> Decomposition | None:
        """A plane that only turns is a piece already."""
        if self.group == SO(2) or isinstance(self.group, C):
            return Decomposition(None, (Piece(self.rates(), torch.arange(2)[None]),))
        return None


def are_normal(matrices: Tensor) -> bool:
    """Whether each matrix commutes with its transpose."""
    return bool(torch.allclose(matrices @ matrices.mT, matrices.mT @ matrices, atol=IDENTITY_TOLERANCE))


def vector(group: Group) -> Rep:
    """The defining representation of a group.

    >>> from softequiv import O
    >>> vector(O(5)).dim
    5
    """
    return Vector(group)


def tensor(group: Group, p: int, q: int = 0) -> Rep:
    """T(p, q): the tensor product of p vectors and q dual vectors; T(0) is the scalar.

    >>> from softequiv import SO
    >>> tensor(SO(3), 4).dim
    81
    """
    if min(p, q) < 0:
        raise RepresentationError(f"tensor ranks cannot be negative; got ({p}, {q})")
    v = vector(group)
    return tensor_product(Trivial(group), *([v] * p), *([v.T] * q))


@dataclass(frozen=True)
class Regular(Rep):
    """A finite group permuting its own elements by multiplication from the left."""

    group: Group

    @cached_property
    def _elements(self) -> dict[bytes, int]:
        return {matrix_key(g.matrix): i for i, g in enumerate(self.group.elements())}

    @property
    def dim(self) -> int:
        return len(self._elements)

    @property
    def name(self) -> str:
        return "regular"

    def lie(self) -> Tensor:
        return stack([], self.dim)

    @cached_property
    def _steps(self) -> Tensor:
        matrices = [g.matrix for g in self.group.elements()]
        steps = torch.zeros(len(self.group.steps), self.dim, self.dim, dtype=torch.float64)
        for j, step in enumerate(self.group.steps):
            images = [self._elements[matrix_key(step @ matrix)] for matrix in matrices]
            steps[j, images, torch.arange(self.dim)] = 1
        return steps

    def steps(self) -> Tensor:
        return self._steps


def regular(group: Group) -> Rep:
    """The regular representation of a finite group.

    >>> from softequiv import D
    >>> regular(D(4)).dim
    8
    """
    return Regular(group)


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
        return self.lie_matrices.value

    def steps(self) -> Tensor:
        return self.step_matrices.value


def representation(
    group: Group, lie: Sequence[Tensor] | Tensor = (), steps: Sequence[Tensor] | Tensor = (), *, name: str = "custom"
) -> Rep:
    """A representation from the user's matrices, one per generator of the group, checked against its brackets and
    relations.

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
    matrices = [torch.as_tensor(matrix) for matrix in (*lie, *steps)]
    if not matrices:
        raise RepresentationError(
            f"{group} has no generators, so matrices cannot tell a representation; use scalar(group)"
        )
    for matrix in matrices:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape != matrices[0].shape:
            raise RepresentationError(
                f"all matrices must be square and of one size; got {[tuple(m.shape) for m in matrices]}"
            )
        if matrix.is_complex() or matrix.dtype == torch.bool:
            raise RepresentationError(
                f"matrices must be real; got {matrix.dtype}: write a complex one as [[Re, -Im], [Im, Re]]"
            )
        if not torch.isfinite(matrix).all():
            raise RepresentationError("a matrix of the representation has entries that are not finite numbers")
    dim = matrices[0].shape[0]
    flows, jumps = stack(matrices[: len(lie)], dim), stack(matrices[len(lie) :], dim)
    rep = Matrices(group, Frozen(flows), Frozen(jumps), name)
    check_representation(rep)
    return rep


def check_representation(rep: Rep) -> None:
    """Raise `NotARepresentationError` naming the first bracket or relation of the group that the generators break."""
    group, lie, steps = rep.group, rep.lie(), rep.steps()
    scale = max([1.0, *torch.cat([lie, steps]).abs().flatten(1).amax(1).tolist()])

    def hold(left: Tensor, right: Tensor, what: str) -> None:
        residual = float((left - right).abs().max())
        if residual > 1e-6 * scale**2:
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
    def orthogonal(self) -> bool:
        return self.base.orthogonal

    @property
    def exact(self) -> bool:
        return self.base.exact

    @property
    def normal(self) -> bool:
        return self.base.normal

    def _placed(self, kind: str, rest: Tensor) -> Tensor:
        batches = []
        for index, factor in enumerate(self.group.factors):
            own: Tensor = getattr(self.base, kind)()
            batches.append(own if index == self.factor else rest.expand(len(getattr(factor, kind)), -1, -1))
        return torch.cat(batches)

    def lie(self) -> Tensor:
        return self._placed("lie", torch.zeros(self.dim, self.dim, dtype=torch.float64))

    def steps(self) -> Tensor:
        return self._placed("steps", torch.eye(self.dim, dtype=torch.float64))


def lift(rep: Rep, group: Group, factor: int) -> Rep:
    """A representation of the factor with that number, seen as one of the whole product.

    >>> from softequiv import SO, S
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

    >>> from softequiv import SO, S
    >>> outer(vector(S(4)), vector(SO(3))).group.name
    'S4xSO(3)'
    """
    group = a.group * b.group
    if isinstance(a.group, DirectProduct) or isinstance(b.group, DirectProduct):
        raise RepresentationError(
            f"outer() takes representations of simple factors; lift those of {a.group} and {b.group} into {group}"
        )
    return lift(a, group, 0) @ lift(b, group, 1)
