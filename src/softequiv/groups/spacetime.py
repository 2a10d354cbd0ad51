"""The Lorentz group: rotations and boosts of (t, x, y, z) with metric diag(1, -1, -1, -1); not compact.

Unit of time: one radian for a rotation, rapidity one for a boost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from softequiv._linalg import stack
from softequiv.errors import GroupError
from softequiv.groups.angles import Angle
from softequiv.groups.base import Element, Flow, Group, Step, Word
from softequiv.groups.rotations import SO, flow_of, plane_generators

TIME_REVERSAL = torch.diag(torch.tensor([-1.0, 1, 1, 1], dtype=torch.float64))
PARITY = -TIME_REVERSAL


@dataclass(frozen=True)
class Lorentz(Group):
    """SO+(1,3), connected; SO(1,3), with -1; O(1,3), with parity and time reversal.

    >>> Lorentz("O").name, len(Lorentz("O").lie)
    ('O(1,3)', 6)
    """

    kind: Literal["SO+", "SO", "O"] = "SO"

    def __post_init__(self) -> None:
        if self.kind not in ("SO+", "SO", "O"):
            raise GroupError(f"the Lorentz group comes as 'SO+', 'SO' or 'O'; got {self.kind!r}")

    @property
    def name(self) -> str:
        return f"{self.kind}(1,3)"

    @property
    def lie(self) -> Tensor:
        rotations = torch.zeros(3, 4, 4, dtype=torch.float64)
        rotations[:, 1:, 1:] = plane_generators(3)
        boosts = torch.zeros(3, 4, 4, dtype=torch.float64)
        axes = torch.arange(3)
        boosts[axes, 0, axes + 1] = boosts[axes, axes + 1, 0] = 1
        return torch.cat([rotations, boosts])

    @property
    def steps(self) -> Tensor:
        reversals = {"SO+": [], "SO": [PARITY @ TIME_REVERSAL], "O": [PARITY, TIME_REVERSAL]}
        return stack(reversals[self.kind], 4)

    @property
    def unit(self) -> str:
        return "one radian, or rapidity one, or one reversal"

    @property
    def covering_radius(self) -> float:
        return math.inf

    @property
    def periods(self) -> tuple[float | None, ...]:
        return (2 * math.pi,) * 3 + (None,) * 3

    @property
    def relations(self) -> tuple[Word, ...]:
        m = len(self.steps)
        squares: tuple[Word, ...] = tuple((Step(j, 2),) for j in range(m))
        return squares + (((Step(0), Step(1), Step(0), Step(1)),) if m == 2 else ())

    def element_of(self, matrix: Tensor) -> Element:
        """Polar decomposition: a boost, then a rotation, then reversals."""
        forward, proper = bool(matrix[0, 0] > 0), bool(torch.linalg.det(matrix) > 0)
        steps: tuple[Step, ...]
        if self.kind == "O":
            parity, reversal = forward != proper, not forward
            steps = ((Step(0),) if parity else ()) + ((Step(1),) if reversal else ())
        else:
            steps = () if forward else (Step(0),)
        for step in steps:
            matrix = matrix @ self.steps[step.index]
        energy, direction = matrix[0, 0], matrix[1:, 0]
        size = direction.norm()
        rapidity = torch.asinh(size)
        boost = direction / size * rapidity if size > 0 else direction
        flat = torch.linalg.matrix_exp(torch.einsum("k,kab->ab", -boost, self.lie[3:])) @ matrix
        word: Word = (Flow((0.0, 0.0, 0.0, *boost.tolist())),) if energy > 1 and size > 0 else ()
        turn = flow_of(flat[1:, 1:], SO(3).lie)
        return Element(
            self, word + tuple(Flow((*move.coords, 0.0, 0.0, 0.0)) for move in turn if isinstance(move, Flow)) + steps
        )

    def _haar(self, generator: torch.Generator | None) -> Element:
        flow: Word = (Flow(tuple(torch.randn(6, dtype=torch.float64, generator=generator).tolist())),)
        flips = torch.randint(2, (len(self.steps),), generator=generator).tolist()
        return Element(self, flow + tuple(Step(j) for j, flip in enumerate(flips) if flip))

    def _angle_reach(self, angle: Angle) -> float:
        return float(angle)
