"""Where does the shape of the computation itself break a symmetry? Strides, padding and windows that lie lopsided.

A window of size k, stride s, padding p and dilation d covers n pixels symmetrically exactly when s divides n + 2p -
d(k-1) - 1. Otherwise the last rows and columns are left out on one side only, and no choice of weights makes the layer
turn with the picture. A group that exchanges rows and columns asks for the same window on both.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from softequiv.groups import C, D, Group, Reflection, Scaling, Shifts
from softequiv.reps.grids import kernels
from softequiv.spectrum import spectrum

# what torch calls the arguments of functions that slide a window, in their order
SLIDING = {
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation"),
    "conv_transpose2d": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "max_pool2d_with_indices": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "avg_pool2d": ("input", "kernel_size", "stride", "padding", "ceil_mode"),
    "lp_pool2d": ("input", "norm_type", "kernel_size", "stride", "ceil_mode"),
    "unfold": ("input", "kernel_size", "dilation", "padding", "stride"),
}
MAKING_MAPS = re.compile("conv|pool|interpolate|pad")  # functions whose results are maps (N, C, H, W)
FLATTENING = ("flatten", "reshape", "view")
TRANSPOSING = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "__get__")  # the last is that of x.mT
SHUFFLING = ("pixel_shuffle", "pixel_unshuffle")
WAVES = ("sin", "cos")
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


@dataclass(frozen=True)
class Padded:
    """A tensor that was padded more on one side of some axes, and where; holding it keeps its id from being used
    again.
    """

    tensor: Tensor
    name: str
    pads: Mapping[int, Pad]


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
    """The window of a call of one of the functions in `SLIDING`, by its arguments."""
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


@dataclass(frozen=True)
class Flattened:
    """What a linear layer does that takes the places of a picture as features, and a remedy with room for its name."""

    why: str
    remedy: str

    def uneven(self, name: str) -> Uneven:
        """The layer of this name that does so."""
        return Uneven(name, self.why, self.remedy.format(name=repr(name)))


class Walk(TorchFunctionMode):
    """Follows one forward pass: which module is running, which tensors were padded lopsided, which layers are uneven.

    Functions are seen whether a module or other code calls them. Padding that a window consumes is judged together with
    it, any other on its own. `told` are layers of which it is known what they do: linear ones on grids, positions that
    are fixed; `values` are the tensors behind those that have shapes only, by their id.
    """

    def __init__(self, group: Group, told: Collection[str] = (), values: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.group, self.turned = group, sides(group)
        self.told, self.values = told, values or {}
        self.modules: dict[str, nn.Module] = {}
        self.maps: set[tuple[int, ...]] = set()  # shapes (C, H, W)
        self.flattened: dict[tuple[int, ...], Flattened] = {}  # by the shape that a linear layer would meet
        self.transposed: dict[tuple[int, ...], Flattened] = {}  # the same with both axes exchanged
        self.running: list[str] = []
        self.placing: set[str] = set()  # modules that have made rows and columns
        self.pending: dict[int, Padded] = {}
        self.seen: list[Uneven] = []

    def watch(self, model: nn.Module) -> None:
        """Follow this model, for good."""
        self.modules = dict(model.named_modules())
        for name, module in self.modules.items():
            module.register_forward_pre_hook(self.entering(name))
            module.register_forward_hook(self.leaving(name))

    def entering(self, name: str) -> Any:
        """The hook before a module of this name."""

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.running.append(name)

        return hook

    def leaving(self, name: str) -> Any:
        """The hook after a module of this name."""

        def hook(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
            self.running.pop()
            self.note(uneven_shift(name, module))

        return hook

    def note(self, uneven: Uneven | None) -> None:
        """Keep what was found, once."""
        if uneven is not None and uneven not in self.seen:
            self.seen.append(uneven)

    def finish(self) -> list[Uneven]:
        """Everything found, with the padding that no window consumed."""
        for padded in self.pending.values():
            pad = next(iter(padded.pads.values()))
            self.note(pad.uneven(padded.name, "choose a size that needs no padding there"))
        return self.seen

    def slide(self, name: str, given: Mapping[str, Any], transposed: bool) -> None:
        """Judge a window on its input."""
        x, window = given["input"], window_of(given)
        padded = None if transposed else self.pending.pop(id(x), None)
        found = uneven_axes(name, window) if self.turned.exchanged else None
        for axis in self.turned.reversed:
            if found is None and transposed:
                found = uneven_transposed(name, window, axis)
            elif found is None:
                found = uneven_window(name, window, axis, int(x.shape[axis]), padded.pads.get(axis) if padded else None)
        self.note(found or self.unfiltered(name, given.get("weight")))

    def unfiltered(self, name: str, kernel: Tensor | None) -> Uneven | None:
        """Whether a kernel tells directions apart that no convolution holds, so that it is not among the weights."""
        value = self.values.get(id(kernel))
        if value is None or max(value.shape[-2:]) == 1 or isinstance(self.modules.get(name), nn.modules.conv._ConvNd):
            return None
        if spectrum(kernels(self.group, *value.shape[-2:])).largest_error(value.detach().double()) < SAME_PICTURE:
            return None
        why = f"it convolves with a {value.shape[-2]} x {value.shape[-1]} kernel of its own, which is not filtered"
        return Uneven(name, why, "make it the weight of a convolution, such as nn.Conv2d")

    def flatten(self, source: Tensor, result: Tensor) -> None:
        """Remember a map that was flattened, its channels too or not."""
        if source.ndim != 4 or tuple(source.shape[1:]) not in self.maps:
            return
        channels, height, width = map(int, source.shape[1:])
        shape, places = tuple(result.shape[1:]), height * width
        if places == 1:
            return
        if shape == (channels * places,):
            remedy = f"say so, grids={{{{{{name}}: ({channels}, {height}, {width})}}}}, or pool the map before it"
            self.flattened[shape] = Flattened(f"it is a linear layer on {height} x {width} places", remedy)
        elif shape == (channels, places) and channels != places:
            self.flattened[shape] = Flattened(
                f"it is a linear layer that mixes {height} x {width} places", "mix them by convolutions or attention"
            )

    def unfold(self, kernel: tuple[int, int], result: Tensor) -> None:
        """Remember patches (N, C h w, places) that a linear layer would meet as (N, places, C h w)."""
        self.transposed[tuple(result.shape[1:])] = Flattened(
            f"it is a linear layer on patches of {kernel[0]} x {kernel[1]} pixels", "cut them by a strided convolution"
        )

    def transpose(self, source: tuple[int, ...], result: tuple[int, ...]) -> None:
        """Follow what was flattened while both axes behind the first are exchanged."""
        if len(source) == 2 and result == source[::-1]:
            if source in self.flattened:
                self.transposed[result] = self.flattened.pop(source)
            elif source in self.transposed:
                self.flattened[result] = self.transposed[source]

    def linear(self, name: str, x: Tensor) -> None:
        """Judge a linear layer on its input."""
        flattened = self.flattened.pop(tuple(x.shape[1:]), None)
        if flattened is not None and name not in self.told:
            self.note(flattened.uneven(name))

    def pad(self, name: str, source: Tensor, result: Tensor, pads: Any) -> None:
        """Remember which axes were padded more on one side, or before were."""
        earlier = self.pending.pop(id(source), None)
        lopsided = {
            -1 - axis: Pad(int(source.shape[-1 - axis]), int(before), int(after))
            for axis, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True))
            if before != after
        }
        if lopsided:
            self.pending[id(result)] = Padded(result, name, lopsided)
        elif earlier is not None:
            self.pending[id(result)] = Padded(result, earlier.name, earlier.pads)
        unequal = source.ndim == 4 and len(pads) == 4 and sum(pads[:2]) != sum(pads[2:])
        if self.turned.exchanged and unequal and not lopsided:
            why = f"the height is padded by {sum(pads[2:])} pixels and the width by {sum(pads[:2])}"
            self.note(Uneven(name, why, "pad both alike"))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, called = self.running[-1] if self.running else "", getattr(func, "__name__", "")
        given = {**dict(zip(SLIDING.get(called, ()), args, strict=False)), **kwargs}
        if called in SLIDING and func is not Tensor.unfold:
            self.slide(name, given, called == "conv_transpose2d")
        result = func(*args, **kwargs)
        picture = result[0] if isinstance(result, tuple) else result
        if MAKING_MAPS.search(called) and isinstance(picture, Tensor) and picture.ndim == 4:
            self.maps.add(tuple(picture.shape[1:]))
        if called in FLATTENING:
            self.flatten(args[0], result)
        elif called in TRANSPOSING and isinstance(result, Tensor):
            self.transpose(tuple(args[0].shape[1:]), tuple(result.shape[1:]))
        elif called == "meshgrid":
            self.placing.add(name)
        elif called in WAVES and name in self.placing - set(self.told):
            why = "it makes waves of rows and columns as it runs, with nothing to filter"
            self.note(Uneven(name, why, "learn a table of positions instead, which is filtered"))
        elif func is nn.functional.unfold:
            self.unfold(pair(given["kernel_size"]), result)
        elif func is nn.functional.linear:
            self.linear(name, args[0])
        elif called in SHUFFLING:
            why = "it exchanges channels and the pixels of a block in an order that tells directions apart"
            self.note(Uneven(name, why, "use a transposed or a strided convolution instead"))
        elif func is nn.functional.pad:
            self.pad(name, args[0], result, args[1])
        elif func is nn.functional.interpolate:
            self.note(uneven_resizing(name, functools.partial(func, **kwargs), tuple(args[0].shape), self.turned))
        return result


def weightless(model: nn.Module) -> tuple[nn.Module, dict[int, Tensor]]:
    """A copy in eval mode whose tensors have shapes but no values, and the values by the ids of these tensors: running
    it costs nothing and leaves no trace.
    """
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=False)
    return copy.deepcopy(model, memo).eval(), {id(memo[id(tensor)]): tensor for tensor in tensors}


def uneven_layers(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, group: Group, told: Collection[str] = ()
) -> tuple[list[Uneven], str]:
    """Walk an input of this shape through a copy of the model without computing: the layers that break its symmetry
    under the group, but for layers of which that was told, and what stopped the walk, if anything did.
    """
    walk, stopped = Walk(group, told), ""
    other_sizes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    kwargs = {"interpolate_pos_encoding": True} if other_sizes else {}
    try:
        shadow, walk.values = weightless(model)
        walk.watch(shadow)
        walk.maps.add(shape[1:])
        with torch.no_grad(), walk:
            shadow(torch.empty(shape, dtype=dtype, device="meta"), **kwargs)
    except Exception as problem:  # any model may come, and a dry run is a courtesy
        stopped = f"{type(problem).__name__}: {problem}"
    return walk.finish(), stopped
