"""How does a picture move? (g x)(p) = x(g^-1 p), p a pixel's place from the centre, to the right and upwards.

Quarter turns, flips and shifts move pixels to pixels exactly; other turns resample. The orientation is that of
`reps.grid`: a positive angle turns counter-clockwise as seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.actions.base import Acts, moving_group, working_dtype
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.groups import SO, C, D, Element, Group, O, Reflection, Shifts, Step
from softequiv.groups.rotations import mirror

Interpolation = Literal["bicubic", "bilinear", "nearest"]
Padding = Literal["zeros", "border", "reflection"]
Turn = tuple[int, bool]

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
        if isinstance(group, Shifts) and group.sizes != size:
            raise RepresentationError(
                f"{group} shifts pictures of its own size; got {size[0]} x {size[1]}: use Shifts{size}"
            )
        _check_moves_pictures(group)
        if isinstance(group, (C, D)) and group.n % 4 == 0:  # some of its elements are quarter turns
            _check_square(size)
        if not self.exact(group):
            self._check_readable(x)

    def exact(self, group: Group) -> bool:
        """Whether every element moves pixels to pixels: quarter turns, flips and shifts do."""
        return isinstance(group, (Reflection, Shifts)) or (isinstance(group, (C, D)) and 4 % group.n == 0)

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
        self.check(moving_group(g), x)
        return self.by(g)(x)

    def by(self, g: Element) -> Callable[[Tensor], Tensor]:
        _check_moves_pictures(moving_group(g))
        if isinstance(g.group, Shifts):
            return partial(torch.roll, shifts=_shifts(g), dims=(-2, -1))
        turn = _quarters(g.matrix)
        if turn is None:
            return partial(self._resampled, matrices=g.matrix[None])
        return partial(_turned, quarters=turn[0], flipped=turn[1])

    def valid(self, x: Tensor, g: Element) -> Tensor | None:
        """(H, W) bool: where all pixels that the sample reads lie inside the picture; None for exact moves."""
        self.check(moving_group(g), x)
        if isinstance(g.group, Shifts) or _quarters(g.matrix) is not None:
            return None
        return self._inside(_sources(g.matrix[None], *x.shape[-2:]))[0].to(x.device)

    def stacked(self, elements: Sequence[Element]) -> Tensor:
        """The elements' matrices, (len(elements), 2, 2); of shifts the places moved down and right, (len, 2)."""
        if isinstance(elements[0].group, Shifts):
            return torch.tensor([_shifts(g) for g in elements])
        return torch.stack([g.matrix for g in elements])

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        """Exact where the element is; all samples that resample are read by one call."""
        self.check(group, x[0])
        if isinstance(group, Shifts):
            return _rolled(x, stack)

        def moved(part: Tensor, turn: Turn | None, matrices: Tensor) -> Tensor:
            return self._resampled(part, matrices) if turn is None else _turned(part, *turn)

        numbers: dict[Turn | None, list[int]] = {}
        for i, turn in enumerate(_all_quarters(stack)):
            numbers.setdefault(turn, []).append(i)
        if len(numbers) == 1:
            return moved(x, next(iter(numbers)), stack)
        parts, order = [], []
        for turn, alike in numbers.items():
            rows = torch.tensor(alike)
            parts.append(moved(x[rows.to(x.device, non_blocking=True)], turn, stack[rows]))
            order += alike
        return torch.cat(parts)[torch.tensor(order).argsort().to(x.device, non_blocking=True)]

    def valid_each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor | None:
        """(N, H, W) bool."""
        self.check(group, x[0])
        if isinstance(group, Shifts):
            return None
        exact = torch.tensor([turn is not None for turn in _all_quarters(stack)])
        if exact.all():
            return None
        home = _float64_home(x.device)
        inside = self._inside(_sources(stack.to(home, non_blocking=True), *x.shape[-2:]))
        return (inside | exact.to(home, non_blocking=True)[:, None, None]).to(x.device)

    def _inside(self, places: Tensor) -> Tensor:
        """Whether all pixels that are read at places (..., H, W, 2) exist: (..., H, W) bool."""
        height, width = places.shape[-3:-1]
        right, up = places.abs().unbind(-1)
        footprint = FOOTPRINT[self.interpolation]
        return (right <= (width - 1) / 2 - footprint) & (up <= (height - 1) / 2 - footprint)

    def _resampled(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x (..., H, W) moved by one matrix (1, 2, 2), or sample by sample by as many, (N, 2, 2)."""
        lead, (height, width) = x.shape[:-2], x.shape[-2:]
        dtype = working_dtype(x.dtype)
        sources = _sources(matrices.to(_float64_home(x.device), non_blocking=True), height, width)
        # grid_sample has the frame from -1 to 1 along each axis, rows downwards
        places = torch.stack([sources[..., 0] * (2 / width), sources[..., 1] * (-2 / height)], -1).to(x.device, dtype)

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
            outside = 1 - sampled(moved.new_ones(len(places), 1, height, width))
            if self.interpolation != "nearest":  # weights sum to 1 up to rounding only
                outside = outside.masked_fill(self._inside(sources)[:, None].to(x.device), 0.0)
            moved = moved + self.fill * outside
        return moved.reshape(x.shape).to(x.dtype)


def in_disc(x: Tensor, fill: float = 0.0) -> Tensor:
    """Pictures (..., H, W) with `fill` outside the circle inscribed in the frame: no turn takes pixels out of it.

    >>> in_disc(torch.ones(4, 4))
    tensor([[0., 1., 1., 0.], [1., 1., 1., 1.], [1., 1., 1., 1.], [0., 1., 1., 0.]])
    """
    if x.ndim < 2:
        raise RepresentationError(f"a picture is (..., H, W); got {tuple(x.shape)}")
    height, width = x.shape[-2:]
    outside = _places(height, width, _float64_home(x.device)).square().sum(-1) > (min(height, width) / 2) ** 2
    return x.masked_fill(outside.to(x.device), fill)


def _shifts(g: Element) -> tuple[int, int]:
    """Places moved down and to the right."""
    down, right = (sum(move.count for move in g.word if isinstance(move, Step) and move.index == j) for j in (0, 1))
    return down, right


def _quarters(matrix: Tensor) -> Turn | None:
    """(k, flipped) where the element flips left to right if flipped, then makes k quarter turns; None elsewhere."""
    return _all_quarters(matrix[None])[0]


def _all_quarters(matrices: Tensor) -> list[Turn | None]:
    """`_quarters` of each of (N, 2, 2)."""
    flipped = torch.linalg.det(matrices) < 0
    turns = torch.where(flipped[:, None, None], matrices @ mirror(2), matrices)
    quarters = torch.atan2(turns[:, 1, 0], turns[:, 0, 0]) / (math.pi / 2)
    exact = (quarters - quarters.round()).abs() <= QUARTER_TOLERANCE
    found = zip((quarters.round().long() % 4).tolist(), flipped.tolist(), exact.tolist(), strict=True)
    return [(count, flip) if whole else None for count, flip, whole in found]


def _check_moves_pictures(group: Group) -> None:
    if not (isinstance(group, (C, D, Reflection, Shifts)) or group in (SO(2), O(2))):
        raise RepresentationError(
            f"{group} does not act on pictures; SO(2), O(2), C(n), D(n), Reflection and Shifts(H, W) do"
        )


def _check_square(size: tuple[int, ...]) -> None:
    if size[0] != size[1]:
        raise RepresentationError(
            f"a quarter turn of a picture of {size[0]} x {size[1]} pixels has another shape: pad or crop it to a "
            "square, or keep to smaller angles of SO(2)"
        )


def _turned(x: Tensor, quarters: int, flipped: bool) -> Tensor:
    """Pictures flipped left to right if flipped, then turned by so many quarters."""
    if quarters % 2:
        _check_square(tuple(x.shape[-2:]))
    return (x.flip(-1) if flipped else x).rot90(quarters, (-2, -1))


def _rolled(x: Tensor, shifts: Tensor) -> Tensor:
    """Sample i of x (N, ..., H, W) rolled by shifts[i] places down and to the right."""
    height, width = x.shape[-2:]
    down, right = shifts.to(x.device, non_blocking=True).T[..., None]  # (N, 1) each
    rows = (torch.arange(height, device=x.device) - down) % height  # (N, H)
    columns = (torch.arange(width, device=x.device) - right) % width  # (N, W)
    sample = torch.arange(len(x), device=x.device)[:, None, None]
    picture = x.reshape(len(x), -1, height, width).permute(0, 2, 3, 1)
    return picture[sample, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2).reshape(x.shape)


def _float64_home(device: torch.device) -> torch.device:
    """Where places are computed: on the device itself, but for Apple's, which has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _places(height: int, width: int, device: torch.device) -> Tensor:
    """Each pixel's place p from the middle, in pixels to the right and upwards: (H, W, 2) float64."""
    right = torch.arange(width, dtype=torch.float64, device=device) - (width - 1) / 2
    up = (height - 1) / 2 - torch.arange(height, dtype=torch.float64, device=device)
    return torch.stack(torch.meshgrid(right, up, indexing="xy"), -1)


def _sources(matrices: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel of g x reads x: g^-1 p for each g of (N, 2, 2), (N, H, W, 2)."""
    # g is orthogonal, so that its inverse needs no solver, and no wait for the device
    return _places(height, width, matrices.device) @ matrices[:, None]
