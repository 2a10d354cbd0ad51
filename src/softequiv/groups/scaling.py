"""Positive dilations, x -> e^t x: not compact, one generator, unit of time one e-fold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.groups.base import Element, Flow, Group


@dataclass(frozen=True)
class Scaling(Group):
    """Positive dilations.

    >>> Scaling().element(math.log(2)).matrix.item()
    2.0
    """

    @property
    def name(self) -> str:
        return "Scaling"

    @property
    def lie(self) -> Tensor:
        return torch.ones(1, 1, 1, dtype=torch.float64)

    @property
    def unit(self) -> str:
        return "one e-fold of size"

    @property
    def covering_radius(self) -> float:
        return math.inf

    def element_of(self, matrix: Tensor) -> Element:
        time = float(matrix.log())
        return Element(self, (Flow((time,)),) if time else ())

    def _haar(self, generator: torch.Generator | None) -> Element:
        return self.element(float(torch.randn((), dtype=torch.float64, generator=generator)))
