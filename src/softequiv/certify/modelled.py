"""How far is the modelled action on a grid of pixels from a true rotation of the user's images? A certificate is about
the model, so this is measured and stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.actions import Pictures
from softequiv.asking import check_finite
from softequiv.certify.located import Located
from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Group
from softequiv.reps import Rep, Square, TensorProduct

PATCHES = 512  # of each size; the relative error of so many is steady to a few percent
RING = 3  # pixels that a bicubic filter may want beyond the circle round a patch


@dataclass(frozen=True)
class ActionGap:
    """||rho(g) p - g p|| / ||g p|| over patches p of images, g p their bicubic rotation with true surroundings.

    `edge` is for the far end of the range, `half` for half of it, None where the images are too small; `path` is the
    length of the far one.
    """

    grid: str
    patches: int
    path: float
    edge: float | None
    half: float | None

    def __str__(self) -> str:
        if self.edge is None or self.half is None:
            return f"{self.grid}: not compared, the images are smaller than its surroundings"
        return (
            f"{self.grid}: differs from a bicubic rotation by {self.edge:.3g} at path length {self.path:.4g} and by "
            f"{self.half:.3g} half-way ({self.patches} patches)"
        )


def action_gaps(weights: Sequence[Located], images: Any, reach: float) -> tuple[ActionGap, ...]:
    """One comparison for each distinct square grid: patches of the images for kernels, whole images for tables."""
    if not isinstance(images, Tensor):
        kind = type(images).__name__
        raise SoftEquivError(
            f"images are a tensor (n, channels, H, W); got {str(images)[:60]!r}, a {kind}: read pictures into one first"
        )
    if images.ndim != 4 or not images.is_floating_point() or not images.numel():
        raise SoftEquivError(
            f"images are floating-point numbers of shape (n, channels, H, W), at least one; got {images.dtype} of "
            f"shape {tuple(images.shape)}"
        )
    check_finite(images, "images", "look for broken pictures")
    pictures = images.detach().to("cpu", torch.float64).mean(1, keepdim=True)
    seen: dict[tuple[Square, bool], ActionGap] = {}
    for weight in weights:
        for square in squares(weight.rep):
            key = (square, weight.is_map)
            if key not in seen and square.n > 1:
                seen[key] = gap(square, pictures if weight.is_map else framed(pictures, square.n), reach)
    return tuple(seen.values())


def squares(rep: Rep) -> list[Square]:
    """The squares of pixels in a space; other grids move by exact permutations or along one axis."""
    if isinstance(rep, Square):
        return [rep]
    parts = rep.factors if isinstance(rep, TensorProduct) else rep.parts
    return list(dict.fromkeys(square for part in parts for square in squares(part)))


def margin(n: int) -> int:
    """The ring round an n x n patch that no rotation of it looks beyond."""
    return math.ceil(n * (math.sqrt(2) - 1) / 2) + RING


def framed(pictures: Tensor, n: int) -> Tensor:
    """Pictures resized so that their middle n x n pixels have true surroundings."""
    return functional.interpolate(pictures, size=n + 2 * margin(n), mode="area")


def gap(square: Square, pictures: Tensor, reach: float) -> ActionGap:
    """The comparison on one grid."""
    n, ring = square.n, margin(square.n)
    outer = n + 2 * ring
    height, width = pictures.shape[-2:]
    if min(height, width) < outer:
        return ActionGap(str(square), 0, reach, None, None)
    generator = torch.Generator().manual_seed(0)
    total = PATCHES if min(height, width) > outer else len(pictures)
    which = torch.arange(total) % len(pictures)
    rows, columns = (torch.randint(size - outer + 1, (total,), generator=generator) for size in (height, width))
    crops = torch.stack(
        [pictures[i, :, r : r + outer, c : c + outer] for i, r, c in zip(which, rows, columns, strict=True)]
    )
    crops = crops - crops.mean()  # a constant turns without error
    inner = (..., slice(ring, ring + n), slice(ring, ring + n))
    errors = []
    for g in (turn(square.group, reach), turn(square.group, reach / 2)):
        true = Pictures()(crops, g)[inner]
        modelled = (crops[inner].flatten(-2) @ square.rho(g).mT).unflatten(-1, (n, n))
        size = float(true.norm())
        errors.append(float((modelled - true).norm()) / size if size else 0.0)
    return ActionGap(str(square), total, reach, *errors)


def turn(group: Group, length: float) -> Element:
    """The turn of that path length, or the longest one below it."""
    time = length if len(group.lie) else math.floor(length + 1e-9)
    return group.element(time, *[0] * (len(group.lie) + len(group.steps) - 1))
