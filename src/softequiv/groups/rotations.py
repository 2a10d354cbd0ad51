"""Rotations and reflections of flat space, SO(n) and O(n).

Unit of time: one radian in a coordinate plane, one step for a reflection. The reflection is diag(-1, 1, ..., 1), which
flips a picture left to right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import runs, skew, stack, symmetric
from softequiv.errors import GroupError
from softequiv.groups.angles import Angle
from softequiv.groups.base import Element, Flow, Group, Step, Word

ROUNDING = 1e-14  # coordinates below this are rounding of the identity


def rotation(angle: float) -> Tensor:
    """Counter-clockwise rotation of the plane, (2, 2)."""
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


def mirror(n: int) -> Tensor:
    """diag(-1, 1, ..., 1), (n, n)."""
    matrix = torch.eye(n, dtype=torch.float64)
    matrix[0, 0] = -1
    return matrix


@cached
def plane_generators(n: int) -> Tensor:
    """One generator per coordinate plane, turning e_i towards e_j by one radian per unit of time: (n (n-1) / 2, n,
    n).
    """
    planes = [(1, 2), (2, 0), (0, 1)] if n == 3 else [(i, j) for i in range(n) for j in range(i + 1, n)]
    matrices = []
    for i, j in planes:
        matrix = torch.zeros(n, n, dtype=torch.float64)
        matrix[j, i], matrix[i, j] = 1, -1
        matrices.append(matrix)
    return stack(matrices, n)


def orthogonal_log(matrix: Tensor) -> Tensor:
    """The shortest skew logarithm of a rotation, with all angles in [-pi, pi].

    The symmetric part separates the cosines; inside each of its eigenspaces the skew part has the sines i sin(theta).
    Where both signs of a half turn meet, any pairing of the eigenspace is shortest.
    """
    cosines, basis = torch.linalg.eigh(symmetric(matrix))
    log = torch.zeros_like(matrix)
    for run in runs(cosines, 1e-7):
        space = basis[:, run]
        sines, vectors = torch.linalg.eigh(-1j * (space.T @ skew(matrix) @ space))
        angles = torch.atan2(sines, (vectors.abs() ** 2).T @ cosines[run])
        half_turns = (sines.abs() < 1e-12) & (angles.abs() > 1)
        turning, turned = vectors[:, ~half_turns], vectors[:, half_turns]
        part = (turning * (1j * angles[~half_turns])) @ turning.mH
        pairs = torch.linalg.eigh((turned @ turned.mH).real)[1][:, vectors.shape[1] - turned.shape[1] :]
        first, second = pairs[:, ::2], pairs[:, 1::2]
        log += space @ (part.real + math.pi * (second @ first.T - first @ second.T)) @ space.T
    return skew(log)


def haar_orthogonal(n: int, generator: torch.Generator | None) -> Tensor:
    """A Haar-random orthogonal matrix, (n, n)."""
    q, r = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    return q * torch.diagonal(r).sign()


def checked_dimension(kind: str, n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise GroupError(f"{kind}(n) needs a whole number n of at least 1; got {n!r}")


@dataclass(frozen=True)
class SO(Group):
    """Rotations of n-dimensional space.

    >>> SO(3).covering_radius
    3.141592653589793
    """

    n: int

    def __post_init__(self) -> None:
        checked_dimension("SO", self.n)

    @property
    def name(self) -> str:
        return f"SO({self.n})"

    @property
    def lie(self) -> Tensor:
        return plane_generators(self.n).clone()  # the caller's own

    @property
    def unit(self) -> str:
        return "one radian in a coordinate plane"

    @property
    def covering_radius(self) -> float:
        """pi sqrt(floor(n/2)): every rotation plane can be half a turn away."""
        return math.pi * math.sqrt(self.n // 2)

    @property
    def order(self) -> float:
        return 1 if self.n == 1 else math.inf

    @property
    def central(self) -> bool:
        return True

    @property
    def periods(self) -> tuple[float | None, ...]:
        return (2 * math.pi,) * len(self.lie)

    def element_of(self, matrix: Tensor) -> Element:
        return Element(self, flow_of(matrix, self.lie))

    def shortened(self, g: Element) -> Element:
        """A flow of at most a half turn is a shortest path, as most draws are."""
        return g if len(g.word) <= 1 and g.length <= math.pi else super().shortened(g)

    def _haar(self, generator: torch.Generator | None) -> Element:
        matrix = haar_orthogonal(self.n, generator)
        return self.element_of(matrix @ mirror(self.n) if torch.linalg.det(matrix) < 0 else matrix)

    def _angle_reach(self, angle: Angle) -> float:
        return float(angle)


def flow_of(matrix: Tensor, lie: Tensor) -> Word:
    """The shortest flow that leads to a rotation."""
    if matrix.shape[-1] == 2:
        coords = torch.atan2(matrix[1, 0], matrix[0, 0])[None]
    else:
        coords = torch.einsum("kab,ab->k", lie, orthogonal_log(matrix)) / 2
    return (Flow(tuple(coords.tolist())),) if bool((coords.abs() > ROUNDING).any()) else ()


@dataclass(frozen=True)
class O(Group):  # noqa: E742  (the group's own name)
    """Rotations and reflections of n-dimensional space.

    >>> O(2).element(0.5, 1).length == math.hypot(0.5, 1)
    True
    """

    n: int

    def __post_init__(self) -> None:
        checked_dimension("O", self.n)

    @property
    def name(self) -> str:
        return f"O({self.n})"

    @property
    def lie(self) -> Tensor:
        return plane_generators(self.n).clone()  # the caller's own

    @property
    def steps(self) -> Tensor:
        return mirror(self.n)[None]

    @property
    def unit(self) -> str:
        return "one radian in a coordinate plane, or one reflection"

    @property
    def covering_radius(self) -> float:
        """A half turn in every plane and one reflection."""
        return math.hypot(SO(self.n).covering_radius, 1.0)

    @property
    def periods(self) -> tuple[float | None, ...]:
        return (2 * math.pi,) * len(self.lie)

    @property
    def relations(self) -> tuple[Word, ...]:
        return ((Step(0, 2),),)

    @property
    def order(self) -> float:
        return 2 if self.n == 1 else math.inf

    def element_of(self, matrix: Tensor) -> Element:
        if torch.linalg.det(matrix) < 0:
            return Element(self, (*flow_of(matrix @ mirror(self.n), self.lie), Step(0)))
        return Element(self, flow_of(matrix, self.lie))

    def _haar(self, generator: torch.Generator | None) -> Element:
        return self.element_of(haar_orthogonal(self.n, generator))

    def _angle_reach(self, angle: Angle) -> float:
        return math.hypot(angle, 1.0)
