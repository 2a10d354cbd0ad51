"""The regular representation of a finite group: the group permuting its own elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import stack
from softequiv.errors import RepresentationError
from softequiv.groups import Group, matrix_key
from softequiv.reps.base import Rep


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

    @cached
    def steps(self) -> Tensor:
        matrices = [g.matrix for g in self.group.elements()]
        steps = torch.zeros(len(self.group.steps), self.dim, self.dim, dtype=torch.float64)
        for j, step in enumerate(self.group.steps):
            images = [self._elements[matrix_key(step @ matrix)] for matrix in matrices]
            steps[j, images, torch.arange(self.dim)] = 1
        return steps


def regular(group: Group) -> Rep:
    """The regular representation of a finite group.

    >>> from softequiv import D
    >>> regular(D(4)).dim
    8
    """
    if not math.isfinite(group.order):
        raise RepresentationError(
            f"the regular representation permutes the elements of a finite group, and {group} has no end of them; take "
            "C(8) or its like, or frequencies of SO(2)"
        )
    return Regular(group)
