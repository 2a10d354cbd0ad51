"""Where does the shape of the computation itself break a symmetry? Strides, padding and windows that lie lopsided.

A window of size k, stride s, padding p and dilation d covers n pixels symmetrically exactly when s divides n + 2p -
d(k-1) - 1.
Otherwise the last rows and columns are left out on one side only, and no choice of weights makes the layer turn with
the picture.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


@dataclass(frozen=True)
class Uneven:
    """A layer that does not treat all sides of its input alike, why, and what to do about it."""

    name: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}, so it cannot turn with the picture; {self.remedy}"


@dataclass(frozen=True)
class Padded:
    """A tensor that was padded more on one side, and where; holding it keeps its id from being used again."""

    tensor: Tensor
    name: str
    size: int
    before: int
    after: int

    def uneven(self, name: str, remedy: str) -> Uneven:
        """What this padding does to the layer of that name."""
        return Uneven(name, f"{self.size} pixels are padded by {self.before} before and {self.after} after", remedy)


def pair(value: Any) -> int:
    """The first entry of a size that torch keeps as a number or a pair."""
    return int(value[0]) if isinstance(value, (tuple, list)) else int(value)


def left_out(module: nn.Module, size: int) -> int:
    """How many pixels at the end of `size` no window reaches."""
    window: Any = module
    if window.padding == "same":
        return 0
    padding = 0 if window.padding == "valid" else pair(window.padding)
    spare = size + 2 * padding - reach(window)
    return 0 if spare < 0 and getattr(window, "ceil_mode", False) else spare % pair(window.stride)


def reach(window: Any) -> int:
    """How many pixels a window spans."""
    return pair(getattr(window, "dilation", 1)) * (pair(window.kernel_size) - 1) + 1


def uneven_window(name: str, module: nn.Module, size: int, padded: Padded | None) -> Uneven | None:
    """Whether a window lies lopsided on an input of this size, which may have been padded just before."""
    window: Any = module
    stride, missing = pair(window.stride), left_out(module, size)
    if window.padding == "same" and reach(window) % 2 == 0:
        half = reach(window) // 2
        return Uneven(name, f"'same' padding is {half - 1} before and {half} after", "use a kernel of odd size")
    if padded is not None:
        if padded.after - missing == padded.before:  # what is left out is the excess of padding
            return None
        near = f"{padded.size - 1} or {padded.size + 1} pixels there are covered evenly"
        return padded.uneven(name, near if stride == 2 else "pad both sides alike, or choose a size that needs none")
    if not missing:
        return None
    fitting = size - missing
    why = f"stride {stride} leaves {missing} of {size} pixels out on one side"
    return Uneven(name, why, f"{fitting} or {fitting + stride} pixels there are covered evenly")


def uneven_shift(name: str, module: nn.Module) -> Uneven | None:
    """Shifted windows (Swin) lie symmetrically when the shift is half a window."""
    window, shift = getattr(module, "window_size", None), getattr(module, "shift_size", None)
    if not isinstance(window, (int, tuple)) or not isinstance(shift, (int, tuple)) or pair(shift) == 0:
        return None
    if 2 * pair(shift) == pair(window):
        return None
    why = f"windows of {pair(window)} are shifted by {pair(shift)}, which is not half of it"
    return Uneven(name, why, "only windows of even size lie symmetrically when shifted")


class Walk(TorchFunctionMode):
    """Follows one forward pass: which module is running, which tensors were padded lopsided, which layers are uneven.

    Padding that a window consumes is judged together with it, any other on its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.pending: dict[int, Padded] = {}
        self.seen: list[Uneven] = []

    def watch(self, model: nn.Module) -> None:
        """Follow this model, for good."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self.entering(name))
            module.register_forward_hook(self.leaving(name))

    def entering(self, name: str) -> Any:
        """The hook before a module of this name."""

        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.running.append(name)
            if isinstance(module, WINDOWS):
                x: Tensor = inputs[0]
                self.note(uneven_window(name, module, int(x.shape[-1]), self.pending.pop(id(x), None)))

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
            self.note(padded.uneven(padded.name, "choose a size that needs no padding there"))
        return self.seen

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.pad:
            source: Tensor = args[0] if args else kwargs["input"]
            pads: Any = args[1] if len(args) > 1 else kwargs["pad"]
            earlier = self.pending.pop(id(source), None)
            lopsided = [axis for axis in range(len(pads) // 2) if pads[2 * axis] != pads[2 * axis + 1]]
            if lopsided:
                axis, name = lopsided[0], self.running[-1] if self.running else ""
                size = int(source.shape[-1 - axis])
                self.pending[id(result)] = Padded(result, name, size, int(pads[2 * axis]), int(pads[2 * axis + 1]))
            elif earlier is not None:
                self.pending[id(result)] = earlier
        return result


def weightless(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose tensors have shapes but no values: running it costs nothing and leaves no trace."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(memo[id(parameter)], requires_grad=False)
    return copy.deepcopy(model, memo).eval()


def uneven_layers(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Uneven], str]:
    """Walk an input of this shape through a copy of the model without computing: the layers that break its symmetry,
    and what stopped the walk, if anything did.
    """
    walk, stopped = Walk(), ""
    other_sizes = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters
    kwargs = {"interpolate_pos_encoding": True} if other_sizes else {}
    try:
        shadow = weightless(model)
        walk.watch(shadow)
        with torch.no_grad(), walk:
            shadow(torch.empty(shape, dtype=dtype, device="meta"), **kwargs)
    except Exception as problem:  # any model may come, and a dry run is a courtesy
        stopped = f"{type(problem).__name__}: {problem}"
    return walk.finish(), stopped
