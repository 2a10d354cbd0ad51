"""Where does the shape of the computation itself break a symmetry? Strides, padding and windows that lie lopsided.

A window of size k, stride s, padding p and dilation d covers n pixels symmetrically exactly when s divides n + 2p -
d(k-1) - 1. Otherwise the last rows and columns are left out on one side only, and no choice of weights makes the layer
turn with the picture. A group that exchanges rows and columns asks for the same window on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.groups import C, D, Group, Reflection, Scaling, Shifts

SAME_PICTURE = 1e-6  # a picture resized from one side differs by as much as its pixels do


@dataclass(frozen=True)
class Sides:
    """What a group does to the axes of a picture: which of the last two it reverses, and whether it exchanges them."""

    reversed: tuple[int, ...]
    exchanged: bool


def sides(group: Group) -> Sides:
    """What a group does to the axes of a picture.

    >>> sides(C(4)), sides(Reflection())
    (Sides(reversed=(-1, -2), exchanged=True), Sides(reversed=(-1,), exchanged=False))
    """
    if isinstance(group, Reflection):
        return Sides((-1,), False)
    keeps_axes = isinstance(group, (Shifts, Scaling)) or (isinstance(group, (C, D)) and group.n <= 2)
    return Sides((-1, -2), not keeps_axes)


@dataclass(frozen=True)
class Uneven:
    """A layer that does not treat all sides of its input alike, why, and what to do about it."""

    name: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name or 'the model'}: {self.why}, so it cannot turn with the picture; {self.remedy}"


@dataclass(frozen=True)
class Pad:
    """How an axis of so many pixels was padded."""

    size: int
    before: int
    after: int

    def uneven(self, name: str, remedy: str) -> Uneven:
        """What this padding does to the layer of that name."""
        return Uneven(name, f"{self.size} pixels are padded by {self.before} before and {self.after} after", remedy)


def pair(value: Any) -> tuple[int, int]:
    """Both entries of a size that torch keeps as a number or a pair."""
    entries = value if isinstance(value, (tuple, list)) else (value,)
    return int(entries[0]), int(entries[-1])


@dataclass(frozen=True)
class Window:
    """What slides over a picture, along its height and its width; `same` padding keeps the size."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    output_padding: tuple[int, int]
    same: bool
    ceil_mode: bool

    def reach(self, axis: int) -> int:
        """How many pixels it spans."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def left_out(self, axis: int, size: int) -> int:
        """How many pixels at the end of `size` no window reaches."""
        spare = size + 2 * self.padding[axis] - self.reach(axis)
        return 0 if self.same or (spare < 0 and self.ceil_mode) else spare % self.stride[axis]


def window_of(given: Mapping[str, Any]) -> Window:
    """The window of a call of one of torch's functions that slide one, by its arguments."""
    weight, padding = given.get("weight"), given.get("padding", 0)
    kernel = pair(given["kernel_size"]) if weight is None else pair(tuple(weight.shape[-2:]))
    step = given.get("stride")
    return Window(
        kernel,
        pair(step) if step else kernel if weight is None else (1, 1),
        (0, 0) if isinstance(padding, str) else pair(padding),
        pair(given.get("dilation", 1)),
        pair(given.get("output_padding", 0)),
        padding == "same",
        bool(given.get("ceil_mode", False)),
    )


def uneven_axes(name: str, window: Window) -> Uneven | None:
    """Whether a window is another one along the other axis."""
    for field in fields(window):
        value = getattr(window, field.name)
        if isinstance(value, tuple) and value[0] != value[1]:
            what = field.name.replace("_", " ")
            why = f"its {what} is {value[0]} along the height and {value[1]} along the width"
            return Uneven(name, why, f"give both the same {what}, or take a group that keeps the axes, as Reflection")
    return None


def uneven_window(name: str, window: Window, axis: int, size: int, pad: Pad | None) -> Uneven | None:
    """Whether a window lies lopsided on an axis of this size, which may have been padded just before."""
    stride, missing = window.stride[axis], window.left_out(axis, size)
    if window.same and window.reach(axis) % 2 == 0:
        half = window.reach(axis) // 2
        return Uneven(name, f"'same' padding is {half - 1} before and {half} after", "use a kernel of odd size")
    if pad is not None:
        if pad.after - missing == pad.before:  # what is left out is the excess of padding
            return None
        near = f"{pad.size - 1} or {pad.size + 1} pixels there are covered evenly"
        return pad.uneven(name, near if stride == 2 else "pad both sides alike, or choose a size that needs none")
    if not missing:
        return None
    fitting = size - missing
    why = f"stride {stride} leaves {missing} of {size} pixels out on one side"
    return Uneven(name, why, f"{fitting} or {fitting + stride} pixels there are covered evenly")


def uneven_transposed(name: str, window: Window, axis: int) -> Uneven | None:
    """Whether a transposed convolution has more pixels on one side."""
    extra = window.output_padding[axis]
    if not extra:
        return None
    larger = f"a kernel of {window.kernel[axis] + extra} and " if window.dilation[axis] == 1 else ""
    return Uneven(name, f"output_padding adds {extra} pixels on one side", f"use {larger}output_padding=0")


def uneven_resizing(name: str, resize: Any, shape: tuple[int, ...], turned: Sides) -> Uneven | None:
    """Whether resizing pictures of this shape counts from one side, tried on a picture of noise."""
    if len(shape) != 4:
        return None
    picture = torch.rand(1, 1, *shape[-2:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    resized: Tensor = resize(picture)
    sizes = [f"{before} pixels are resized to {after}" for before, after in zip(shape, resized.shape, strict=True)]
    if turned.exchanged and shape[-1] == shape[-2] and resized.shape[-1] != resized.shape[-2]:
        return Uneven(
            name, f"{sizes[-2]} along the height and to {resized.shape[-1]} along the width", "resize both alike"
        )
    for axis in turned.reversed:
        if not torch.allclose(resize(picture.flip(axis)), resized.flip(axis), atol=SAME_PICTURE):
            remedy = "resize by a whole factor, or bilinearly to a size=... without scale_factor"
            return Uneven(name, f"{sizes[axis]}, counted from one side", remedy)
    return None


def uneven_shift(name: str, module: nn.Module) -> Uneven | None:
    """Shifted windows (Swin) lie symmetrically when the shift is half a window."""
    window, shift = getattr(module, "window_size", None), getattr(module, "shift_size", None)
    if not isinstance(window, (int, tuple)) or not isinstance(shift, (int, tuple)):
        return None
    width, by = pair(window)[0], pair(shift)[0]
    if by in (0, width / 2):
        return None
    why = f"windows of {width} are shifted by {by}, which is not half of it"
    return Uneven(name, why, "only windows of even size lie symmetrically when shifted")
