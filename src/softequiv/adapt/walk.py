"""Which layers of this model break a symmetry by their shape? Found on one forward pass that computes nothing."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from softequiv.adapt.geometry import (
    SAME_PICTURE,
    Pad,
    Uneven,
    pair,
    sides,
    uneven_axes,
    uneven_resizing,
    uneven_shift,
    uneven_transposed,
    uneven_window,
    window_of,
)
from softequiv.groups import Group
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


@dataclass(frozen=True)
class Padded:
    """A tensor that was padded more on one side of some axes, and where; holding it keeps its id from being used
    again.
    """

    tensor: Tensor
    name: str
    pads: Mapping[int, Pad]


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
        # what is uneven about a linear layer that takes places as features, by the shape that it would meet
        self.flattened: dict[tuple[int, ...], Callable[[str], Uneven]] = {}
        self.transposed: dict[tuple[int, ...], Callable[[str], Uneven]] = {}  # the same with both axes exchanged
        self.running: list[str] = []
        self.placing: set[str] = set()  # modules that have made rows and columns
        self.pending: dict[int, Padded] = {}
        self.seen: list[Uneven] = []

    def watch(self, model: nn.Module) -> None:
        """Follow this model, for good."""
        self.modules = dict(model.named_modules())
        for name, module in self.modules.items():
            module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
            module.register_forward_hook(lambda module, *_, name=name: self.leave(name, module))

    def leave(self, name: str, module: nn.Module) -> None:
        """After a module of this name."""
        self.running.pop()
        self.note(uneven_shift(name, module))

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
            self.flattened[shape] = lambda name: Uneven(
                name,
                f"it is a linear layer on {height} x {width} places",
                f"say so, grids={{{name!r}: ({channels}, {height}, {width})}}, or pool the map before it",
            )
        elif shape == (channels, places) and channels != places:
            why = f"it is a linear layer that mixes {height} x {width} places"
            self.flattened[shape] = lambda name: Uneven(name, why, "mix them by convolutions or attention")

    def unfold(self, kernel: tuple[int, int], result: Tensor) -> None:
        """Remember patches (N, C h w, places) that a linear layer would meet as (N, places, C h w)."""
        why = f"it is a linear layer on patches of {kernel[0]} x {kernel[1]} pixels"
        self.transposed[tuple(result.shape[1:])] = lambda name: Uneven(name, why, "cut them by a strided convolution")

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
            self.note(flattened(name))

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
    """The layers that break the symmetry of an input of this shape, but for those in `told`, and what stopped the walk.

    It goes through a copy of the model in which nothing is computed; the second answer is empty if it got to the end.
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
