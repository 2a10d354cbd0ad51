"""Finite groups of the plane: the rotations C(n), the symmetries D(n) of the n-gon, and the single reflection.

One step is the smallest rotation, or the reflection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.errors import GroupError
from softequiv.groups.angles import Angle
from softequiv.groups.base import Element, Group, Step, Word
from softequiv.groups.rotations import checked_dimension, mirror, rotation

FINEST = 10**6  # turns: the levels of finer ones lie within the tolerance of level 0, and all would seem equivariant


def checked_turns(kind: str, n: int) -> None:
    """A number of turns whose steps can be told from standing still."""
    checked_dimension(kind, n)
    if n > FINEST:
        raise GroupError(f"{kind}(n) has at most {FINEST} turns, as finer ones are lost in rounding; use SO(2) or O(2)")


def signed_count(count: int, n: int) -> int:
    """The representative of count modulo n nearest to zero."""
    return (count + (n - 1) // 2) % n - (n - 1) // 2


@dataclass(frozen=True)
class C(Group):
    """The n rotations of the plane by multiples of 2 pi / n; one step is the smallest of them.

    >>> C(18).element(17).length
    1.0
    """

    n: int

    def __post_init__(self) -> None:
        checked_turns("C", self.n)

    @property
    def name(self) -> str:
        return f"C{self.n}"

    @property
    def steps(self) -> Tensor:
        return rotation(2 * math.pi / self.n)[None]

    @property
    def unit(self) -> str:
        return f"one turn by {360 / self.n:g} degrees"

    @property
    def covering_radius(self) -> float:
        return float(self.n // 2)

    @property
    def order(self) -> float:
        return self.n

    @property
    def relations(self) -> tuple[Word, ...]:
        return ((Step(0, self.n),),)

    def element_of(self, matrix: Tensor) -> Element:
        return Element(self, turn_of(matrix, self.n))

    def _haar(self, generator: torch.Generator | None) -> Element:
        return self.element(int(torch.randint(self.n, (), generator=generator)))

    def _angle_reach(self, angle: Angle) -> float:
        return float(steps_within(angle, self.n))


def turn_of(matrix: Tensor, n: int) -> Word:
    """The steps of 2 pi / n that lead to a rotation of the plane."""
    angle = math.atan2(float(matrix[1, 0]), float(matrix[0, 0]))
    count = signed_count(round(angle * n / (2 * math.pi)), n)
    return (Step(0, count),) if count else ()


def steps_within(angle: float, n: int) -> int:
    """How many steps of 2 pi / n fit into an angle; an angle on a step counts."""
    return math.floor(min(angle / (2 * math.pi), 1) * n + 1e-9)


@dataclass(frozen=True)
class D(Group):
    """The symmetries of the regular n-gon: steps are the turn by 2 pi / n and the reflection.

    >>> sum(1 for _ in D(4).elements())
    8
    """

    n: int

    def __post_init__(self) -> None:
        checked_turns("D", self.n)

    @property
    def name(self) -> str:
        return f"D{self.n}"

    @property
    def steps(self) -> Tensor:
        return torch.stack([rotation(2 * math.pi / self.n), mirror(2)])

    @property
    def unit(self) -> str:
        return f"one turn by {360 / self.n:g} degrees, or one reflection"

    @property
    def covering_radius(self) -> float:
        return math.hypot(self.n // 2, 1.0)

    @property
    def order(self) -> float:
        return 2 * self.n

    @property
    def relations(self) -> tuple[Word, ...]:
        return ((Step(0, self.n),), (Step(1, 2),), (Step(0), Step(1), Step(0), Step(1)))

    def element_of(self, matrix: Tensor) -> Element:
        if torch.linalg.det(matrix) < 0:
            return Element(self, (*turn_of(matrix @ mirror(2), self.n), Step(1)))
        return Element(self, turn_of(matrix, self.n))

    def _haar(self, generator: torch.Generator | None) -> Element:
        turns, flips = (int(torch.randint(n, (), generator=generator)) for n in (self.n, 2))
        return self.element(turns, flips)

    def holds(self, g: Element, within: float) -> bool:
        turned = int(g.times[0])
        return super().holds(g, within) and (not isinstance(within, Angle) or turned <= steps_within(within, self.n))

    def _angle_reach(self, angle: Angle) -> float:
        return math.hypot(steps_within(angle, self.n), 1.0)


@dataclass(frozen=True)
class Reflection(Group):
    """The group of order two: left and right exchanged.

    >>> Reflection().covering_radius
    1.0
    """

    @property
    def name(self) -> str:
        return "Reflection"

    @property
    def steps(self) -> Tensor:
        return mirror(2)[None]

    @property
    def unit(self) -> str:
        return "one reflection"

    @property
    def covering_radius(self) -> float:
        return 1.0

    @property
    def order(self) -> float:
        return 2

    @property
    def relations(self) -> tuple[Word, ...]:
        return ((Step(0, 2),),)

    def element_of(self, matrix: Tensor) -> Element:
        return Element(self, (Step(0),) if torch.linalg.det(matrix) < 0 else ())

    def _haar(self, generator: torch.Generator | None) -> Element:
        return self.element(int(torch.randint(2, (), generator=generator)))
