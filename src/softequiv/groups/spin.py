"""SU(2), the double cover of SO(3), as the real 4 x 4 matrices of left multiplication by unit quaternions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.groups.angles import Angle
from softequiv.groups.base import Element, Flow, Group

# left multiplication by i, j, k on (1, i, j, k); half of each turns SO(3) by one radian
QUATERNION_UNITS = torch.tensor(
    [
        [[0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, -1], [0, 0, 1, 0]],
        [[0, 0, -1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, -1, 0, 0]],
        [[0, 0, 0, -1], [0, 0, -1, 0], [0, 1, 0, 0], [1, 0, 0, 0]],
    ],
    dtype=torch.float64,
)


@dataclass(frozen=True)
class SU2(Group):
    """Unit quaternions; a full turn is -1, so the covering radius is 2 pi.

    >>> SU2().element(0.0, 0.0, 2 * math.pi).matrix.round().diagonal().tolist()
    [-1.0, -1.0, -1.0, -1.0]
    """

    @property
    def name(self) -> str:
        return "SU(2)"

    @property
    def lie(self) -> Tensor:
        return QUATERNION_UNITS / 2

    @property
    def unit(self) -> str:
        return "one radian of the rotation that it covers"

    @property
    def covering_radius(self) -> float:
        return 2 * math.pi

    @property
    def central(self) -> bool:
        return True

    @property
    def periods(self) -> tuple[float | None, ...]:
        return (4 * math.pi,) * 3

    def element_of(self, matrix: Tensor) -> Element:
        real, imaginary = matrix[0, 0], matrix[1:, 0]
        size = imaginary.norm()
        angle = 2 * torch.atan2(size, real)
        if size > 1e-14:
            return Element(self, (Flow(tuple((imaginary / size * angle).tolist())),))
        return Element(self, () if real > 0 else (Flow((0.0, 0.0, 2 * math.pi)),))

    def _haar(self, generator: torch.Generator | None) -> Element:
        q = torch.randn(4, dtype=torch.float64, generator=generator)
        q = q / q.norm()
        units = torch.cat([torch.eye(4, dtype=torch.float64)[None], QUATERNION_UNITS])
        return self.element_of(torch.einsum("k,kab->ab", q, units))

    def _angle_reach(self, angle: Angle) -> float:
        return float(angle)
