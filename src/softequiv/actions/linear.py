"""How do vectors and points move? By a matrix: of a representation, or the defining one about a centre."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

from softequiv.actions.base import Acts, moving_group, working_dtype
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.groups import DirectProduct, Element, Group, Shifts
from softequiv.reps import Rep

Centre = Literal["origin", "mean"]


@dataclass(frozen=True)
class Vectors(Acts):
    """Vectors of a representation, (..., *rep.shape): g x = rho(g) x.

    >>> from softequiv import C, vector
    >>> Vectors(vector(C(4)))(torch.tensor([1.0, 0.0]), C(4).element(1)).round()
    tensor([0., 1.])
    """

    rep: Rep

    def check(self, group: Group, x: Tensor) -> None:
        if group != self.rep.group:
            raise RepresentationError(
                f"{self.rep} represents {self.rep.group}, and {group} does not act on it; build it for {group}"
            )
        shape = self.rep.shape
        if tuple(x.shape[max(x.ndim - len(shape), 0) :]) != shape:
            raise RepresentationError(
                f"vectors of {self.rep} have the trailing shape {shape}; got a tensor of {tuple(x.shape)}"
            )
        _check_floating(x, "vectors")

    def exact(self, group: Group) -> bool:
        return self.rep.exact

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        self.check(moving_group(g), x)
        return self._moved(x, self.rep.rho(g))

    def stacked(self, elements: Sequence[Element]) -> Tensor:
        return torch.stack([self.rep.rho(g) for g in elements])

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        self.check(group, x[0])
        return self._moved(x, stack)

    def _moved(self, x: Tensor, matrix: Tensor) -> Tensor:
        lead = x.shape[: x.ndim - len(self.rep.shape)]
        return _times(matrix, x.reshape(*lead, self.rep.dim)).reshape(x.shape)


@dataclass(frozen=True)
class Points(Acts):
    """Trajectories and point sets, (..., points, d): g p = c + g (p - c) with the defining matrix of g, (d, d).

    The centre c is the origin, a given point, or the mean over the points axis. With "mean" every set turns about
    its own middle: a forecast and the past it continues turn together only about one given centre, or the origin.

    >>> from softequiv import SO, degrees
    >>> Points("mean")(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), SO(2).element(degrees(90))).round()
    tensor([[ 1., -1.], [ 1., 1.]])
    """

    centre: Centre | tuple[float, ...] = "origin"

    def __post_init__(self) -> None:
        if not (_is_point(self.centre) or self.centre in get_args(Centre)):
            raise SoftEquivError(
                f"unknown centre {self.centre!r}; choose 'origin', 'mean', or the finite coordinates of a point"
            )

    def check(self, group: Group, x: Tensor) -> None:
        dim = group.lie.shape[-1]
        factors = group.factors if isinstance(group, DirectProduct) else (group,)
        if any(isinstance(factor, Shifts) for factor in factors):  # its matrices stand for circles of places
            raise RepresentationError(f"{group} shifts the places of a grid, not points in space; use Pictures")
        if x.ndim < 2 or x.shape[-1] != dim:
            raise RepresentationError(
                f"{group} acts on points of {dim} coordinates, (..., points, {dim}); got a tensor of {tuple(x.shape)}"
            )
        if not isinstance(self.centre, str) and len(self.centre) != dim:
            raise RepresentationError(f"points of {dim} coordinates need a centre of as many; got {self.centre}")
        _check_floating(x, "points")

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        self.check(moving_group(g), x)
        return self._moved(x, g.matrix)

    def stacked(self, elements: Sequence[Element]) -> Tensor:
        return torch.stack([g.matrix for g in elements])

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        self.check(group, x[0])
        return self._moved(x, stack)

    def _moved(self, x: Tensor, matrix: Tensor) -> Tensor:
        if self.centre == "origin":
            return _times(matrix, x)
        wide = x.to(working_dtype(x.dtype))
        if isinstance(self.centre, str):
            centre = wide.mean(-2, keepdim=True)
        else:
            centre = torch.tensor(self.centre, dtype=wide.dtype).to(x.device, non_blocking=True)
        return (centre + _times(matrix, wide - centre)).to(x.dtype)


def _is_point(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(part, (int, float)) and isfinite(part) for part in value)


def _check_floating(x: Tensor, what: str) -> None:
    if not x.is_floating_point():
        raise SoftEquivError(f"{what} are moved by real matrices and must be floating point; got {x.dtype}")


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix x for x (..., d), or matrix i for sample i; computed in at least float32 whatever autocast says."""
    dtype = working_dtype(x.dtype)
    turned = matrix.to(x.device, dtype, non_blocking=True).mT  # (d, d) or (N, d, d)
    with torch.autocast(x.device.type, enabled=False):
        if matrix.ndim == 2:
            return (x.to(dtype) @ turned).to(x.dtype)
        return torch.bmm(x.to(dtype).reshape(len(x), -1, x.shape[-1]), turned).reshape(x.shape).to(x.dtype)
