"""The small building blocks by name: frequencies of plane rotations, and spins of space rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._linalg import stack
from softequiv.errors import RepresentationError, checked_number
from softequiv.groups import SO, SU2, C, D, Group, O
from softequiv.groups.rotations import mirror, rotation
from softequiv.reps.base import Decomposition, Piece, Rep, Trivial


@dataclass(frozen=True)
class Frequency(Rep):
    """Turns m times as fast as the plane; a reflection acts as on the plane."""

    group: Group
    m: int

    @property
    def dim(self) -> int:
        return 2

    @property
    def name(self) -> str:
        return f"F{self.m}"

    def lie(self) -> Tensor:
        return self.m * self.group.lie

    def steps(self) -> Tensor:
        if isinstance(self.group, (C, D)):
            return torch.stack([rotation(2 * math.pi * self.m / self.group.n), mirror(2)][: len(self.group.steps)])
        return self.group.steps

    def decomposition(self) -> Decomposition:
        return Decomposition(None, (Piece(self.rates(), torch.arange(2)[None]),))


def frequency(group: Group, m: int) -> Rep:
    """Frequency m of a group of plane rotations; frequency 0 is the scalar, frequency 1 the vector.

    >>> frequency(SO(2), 3).drho([1.0]).tolist()
    [[0.0, -3.0], [3.0, 0.0]]
    """
    if group not in (SO(2), O(2)) and not isinstance(group, (C, D)):
        raise RepresentationError(f"frequencies belong to SO(2), O(2), C(n) and D(n); {group} has none")
    if not isinstance(m, int) or m < 0:
        raise RepresentationError(f"a frequency is a whole number of at least 0; got {m!r}")
    return Trivial(group) if m == 0 else Frequency(group, m)


def angular_momentum(two_l: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hermitian J_x, J_y, J_z of spin two_l / 2 in the basis m = l, ..., -l; complex128."""
    l = two_l / 2
    m = torch.arange(two_l, -1, -1, dtype=torch.float64) - l
    lowering = torch.diag(torch.sqrt(l * (l + 1) - m[1:] * (m[1:] + 1)), -1).to(torch.complex128)
    raising = lowering.mH
    return (raising + lowering) / 2, (raising - lowering) / 2j, torch.diag(m).to(torch.complex128)


def real_harmonics(l: int) -> Tensor:
    """The unitary from the basis m = l, ..., -l to real spherical harmonics; (2l + 1, 2l + 1)."""
    size = 2 * l + 1
    unitary = torch.zeros(size, size, dtype=torch.complex128)
    unitary[l, l] = 1
    for m in range(1, l + 1):
        plus, minus = l - m, l + m  # columns of +m and -m
        sign = (-1) ** m
        unitary[l + m, plus], unitary[l + m, minus] = sign / math.sqrt(2), 1 / math.sqrt(2)
        unitary.imag[l - m, plus], unitary.imag[l - m, minus] = -sign / math.sqrt(2), 1 / math.sqrt(2)
    return unitary


@dataclass(frozen=True)
class Spin(Rep):
    """The irreducible representation of spin two_l / 2, real; half-integer spins of SU(2) as [[Re, -Im], [Im, Re]]."""

    group: Group
    two_l: int

    @property
    def dim(self) -> int:
        return self.two_l + 1 if self.two_l % 2 == 0 else 2 * (self.two_l + 1)

    @property
    def name(self) -> str:
        return f"l{self.two_l // 2}" if self.two_l % 2 == 0 else f"l{self.two_l}/2"

    def lie(self) -> Tensor:
        generators = torch.stack([-1j * j for j in angular_momentum(self.two_l)])
        if self.two_l % 2 == 0:
            unitary = real_harmonics(self.two_l // 2)
            return (unitary @ generators @ unitary.mH).real
        top = torch.cat([generators.real, -generators.imag], -1)
        return torch.cat([top, torch.cat([generators.imag, generators.real], -1)], -2)

    def steps(self) -> Tensor:
        return stack([], self.dim)


def spin(group: Group, l: float) -> Rep:
    """Spin l of SO(3) (whole l) or SU(2) (whole or half l); spin 0 is the scalar.

    >>> spin(SO(3), 2).dim, spin(SU2(), 0.5).dim
    (5, 4)
    """
    if group not in (SO(3), SU2()):
        types = "; its types are made of vector(group), tensor(group, p) and, for parity, determinant(group)"
        raise RepresentationError(
            f"spins belong to SO(3) and SU(2); {group} has none{types if isinstance(group, O) else ''}"
        )
    l = checked_number(l, "a spin", RepresentationError)
    two_l = round(2 * l) if math.isfinite(l) else -1
    if two_l != 2 * l or two_l < 0 or (group == SO(3) and two_l % 2):
        raise RepresentationError(f"spin {l!r} is not one of {group}: SO(3) takes 0, 1, 2, ..., SU(2) also halves")
    return Trivial(group) if two_l == 0 else Spin(group, two_l)
