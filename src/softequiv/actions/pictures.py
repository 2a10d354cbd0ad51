"""How does a picture move? (g x)(p) = x(g^-1 p), p a pixel's place from the centre, to the right and upwards.

Quarter turns, flips and shifts move pixels to pixels exactly; other turns resample. The orientation is that of
`reps.grid`: a positive angle turns counter-clockwise as seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.actions.base import Acts, working_dtype
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.groups import SO, C, D, Element, Group, O, Reflection, Shifts, Step
from softequiv.groups.rotations import mirror

Interpolation = Literal["bicubic", "bilinear", "nearest"]
Padding = Literal["zeros", "border", "reflection"]

# A turn this near to quarters is one: it is off by rounding alone, and moves no pixel of any picture visibly.
QUARTER_TOLERANCE = 1e-9

# How far inside the outermost pixel centres a place must lie so that all pixels which its sample reads exist.
FOOTPRINT: dict[Interpolation, float] = {"nearest": -0.5, "bilinear": 0.0, "bicubic": 1.0}


@dataclass(frozen=True)
class Pictures(Acts):
    """Pictures (..., H, W) under SO(2), O(2), C(n), D(n), Reflection and Shifts(H, W), about their middle.

    Quarter turns, flips and shifts are exact whatever the interpolation. Other turns read x between pixels; `padding`
    says what lies outside: `fill` ("zeros"), the nearest pixel ("border"), or the mirrored picture ("reflection").
    Label masks take interpolation="nearest" and a fill such as their ignore index. The inverse action brings a
    segmentation of a moved picture back to where it came from: `acts(model(acts(x, g)), g.inverse)`.

    >>> from softequiv import SO, degrees
    >>> x, g = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), SO(2).element(degrees(90))
    >>> Pictures()(x, g), torch.equal(Pictures()(Pictures()(x, g), g.inverse), x)
    (tensor([[2., 4.], [1., 3.]]), True)
    """

    interpolation: Interpolation = "bicubic"
    padding: Padding = "zeros"
    fill: float = 0.0

    def __post_init__(self) -> None:
        for what, value, known in (
            ("interpolation", self.interpolation, get_args(Interpolation)),
            ("padding", self.padding, get_args(Padding)),
        ):
            if value not in known:
                raise SoftEquivError(f"unknown {what} {value!r}; choose one of {', '.join(known)}")
        if not isinstance(self.fill, (int, float)) or not math.isfinite(self.fill):
            raise SoftEquivError(f"what lies outside a picture must be a finite number; got fill={self.fill!r}")
        if self.fill and self.padding != "zeros":
            raise SoftEquivError(f"padding={self.padding!r} leaves nothing to fill with {self.fill}; use 'zeros'")

    def check(self, group: Group, x: Tensor) -> None:
        if x.ndim < 2 or min(x.shape[-2:]) < 2:
            raise RepresentationError(f"a picture is (..., H, W) of at least 2 x 2 pixels; got {tuple(x.shape)}")
        size = tuple(x.shape[-2:])
        if isinstance(group, Shifts):
            if group.sizes != size:
                raise RepresentationError(
                    f"{group} shifts pictures of its own size; got {size[0]} x {size[1]}: use Shifts{size}"
                )
        elif not (isinstance(group, (C, D, Reflection)) or group in (SO(2), O(2))):
            raise RepresentationError(
                f"{group} does not act on pictures; SO(2), O(2), C(n), D(n), Reflection and Shifts(H, W) do"
            )
        if isinstance(group, (C, D)) and group.n % 4 == 0:  # some of its elements are quarter turns
            _check_square(size)
        if not _moves_pixels_to_pixels(group):
            self._check_readable(x)

    def _check_readable(self, x: Tensor) -> None:
        """Whether pixels of this type can be read between their places."""
        if x.is_complex() or not (x.is_floating_point() or self.interpolation == "nearest"):
            raise SoftEquivError(
                f"{self.interpolation} interpolation mixes pixels and needs a floating-point picture; got {x.dtype}: "
                "convert it, or use interpolation='nearest' for labels"
            )
        if not x.is_floating_point() and torch.tensor(self.fill).to(x.dtype).item() != self.fill:
            raise SoftEquivError(f"a picture of {x.dtype} cannot hold fill={self.fill}; choose a value that it can")

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        self.check(g.group, x)
        if isinstance(g.group, Shifts):
            return x.roll(_shifts(g), (-2, -1))
        turn = _quarters(g.matrix)
        if turn is None:
            return self._resampled(x, g)
        quarters, flipped = turn
        if quarters % 2:
            _check_square(tuple(x.shape[-2:]))
        return (x.flip(-1) if flipped else x).rot90(quarters, (-2, -1))

    def valid(self, x: Tensor, g: Element) -> Tensor | None:
        """(H, W) bool: where all pixels that the sample reads lie inside the picture; None for exact moves."""
        self.check(g.group, x)
        if isinstance(g.group, Shifts) or _quarters(g.matrix) is not None:
            return None
        places = _sources(g, *x.shape[-2:])
        edge = torch.tensor([x.shape[-1] - 1, x.shape[-2] - 1], dtype=torch.float64) / 2
        return (places.abs() <= edge - FOOTPRINT[self.interpolation]).all(-1).to(x.device)

    def _resampled(self, x: Tensor, g: Element) -> Tensor:
        lead, (height, width) = x.shape[:-2], x.shape[-2:]
        dtype = working_dtype(x.dtype)
        # grid_sample has the frame from -1 to 1 along each axis, rows downwards
        scale = torch.tensor([2 / width, -2 / height], dtype=torch.float64)
        places = (_sources(g, height, width) * scale).to(x.device, dtype)

        def sampled(batch: Tensor) -> Tensor:
            return functional.grid_sample(
                batch,
                places.expand(len(batch), -1, -1, -1),
                mode=self.interpolation,
                padding_mode=self.padding,
                align_corners=False,
            )

        moved = sampled(x.reshape(math.prod(lead[:1]), math.prod(lead[1:]), height, width).to(dtype))
        if self.fill:
            outside = 1 - sampled(moved.new_ones(1, 1, height, width))
            inside = self.valid(x, g)
            if inside is not None and self.interpolation != "nearest":  # weights sum to 1 up to rounding only
                outside = outside.masked_fill(inside, 0.0)
            moved = moved + self.fill * outside
        return moved.reshape(x.shape).to(x.dtype)


def _moves_pixels_to_pixels(group: Group) -> bool:
    """Whether no element of the group resamples."""
    return isinstance(group, (Reflection, Shifts)) or (isinstance(group, (C, D)) and 4 % group.n == 0)


def _shifts(g: Element) -> tuple[int, int]:
    """Places moved down and to the right."""
    down, right = (sum(move.count for move in g.word if isinstance(move, Step) and move.index == j) for j in (0, 1))
    return down, right


def _quarters(matrix: Tensor) -> tuple[int, bool] | None:
    """(k, flipped) where the element flips left to right if flipped, then makes k quarter turns; None elsewhere."""
    flipped = bool(torch.linalg.det(matrix) < 0)
    turn = matrix @ mirror(2) if flipped else matrix
    quarters = math.atan2(float(turn[1, 0]), float(turn[0, 0])) / (math.pi / 2)
    return (round(quarters) % 4, flipped) if abs(quarters - round(quarters)) <= QUARTER_TOLERANCE else None


def _check_square(size: tuple[int, ...]) -> None:
    if size[0] != size[1]:
        raise RepresentationError(
            f"a quarter turn of a picture of {size[0]} x {size[1]} pixels has another shape: pad or crop it to a "
            "square, or keep to smaller angles of SO(2)"
        )


def _sources(g: Element, height: int, width: int) -> Tensor:
    """Where each pixel of g x reads x: g^-1 p in pixels from the middle, to the right and upwards, (H, W, 2)."""
    right = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    up = (height - 1) / 2 - torch.arange(height, dtype=torch.float64)
    places = torch.stack(torch.meshgrid(right, up, indexing="xy"), -1)
    return places @ torch.linalg.inv(g.matrix).mT
