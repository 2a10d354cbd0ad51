"""Representations that every matrix group has: its vectors, their tensor powers, and its determinant."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softequiv._linalg import IDENTITY_TOLERANCE, are_normal
from softequiv.errors import RepresentationError
from softequiv.groups import SO, C, Group
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


def vector(group: Group) -> Rep:
    """The defining representation of a group.

    >>> from softequiv import O
    >>> vector(O(5)).dim
    5
    """
    return Vector(group)


@dataclass(frozen=True)
class Determinant(Rep):
    """The determinant of the defining representation: a sign."""

    group: Group

    @property
    def dim(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return "det"

    def lie(self) -> Tensor:
        return torch.zeros(len(self.group.lie), 1, 1, dtype=torch.float64)

    def steps(self) -> Tensor:
        return signs(self.group)[:, None, None]


def signs(group: Group) -> Tensor:
    """The sign of the determinant of each step, (m,)."""
    return torch.linalg.det(group.steps).sign()


def determinant(group: Group) -> Rep:
    """The number that changes its sign where the group reflects, as a pseudoscalar does; the scalar where it never
    does. `determinant(group) @ vector(group)` is the pseudovector.

    >>> from softequiv import O, spectrum
    >>> V = vector(O(3))
    >>> spectrum(V @ V >> determinant(O(3)) @ V).invariants  # the cross product
    1
    """
    stretch = group.lie.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.det(group.steps).abs() - 1
    if any(bool((excess.abs() > IDENTITY_TOLERANCE).any()) for excess in stretch):
        raise RepresentationError(
            f"{group} changes volumes, so that its determinant is no sign; say how the number changes with "
            "representation(group, lie=..., steps=...)"
        )
    return Trivial(group) if bool((signs(group) > 0).all()) else Determinant(group)


def tensor(group: Group, p: int, q: int = 0) -> Rep:
    """T(p, q): the tensor product of p vectors and q dual vectors; T(0) is the scalar.

    >>> from softequiv import SO
    >>> tensor(SO(3), 4).dim
    81
    """
    if not all(isinstance(rank, int) and rank >= 0 for rank in (p, q)):
        raise RepresentationError(f"tensor ranks are whole numbers of at least 0; got ({p!r}, {q!r})")
    v = vector(group)
    return tensor_product(Trivial(group), *([v] * p), *([v.T] * q))
