"""Where does the shape of the computation itself break a symmetry? Strides that do not cover a picture evenly.

A window of size k, stride s, padding p and dilation d covers n pixels symmetrically exactly when s divides n + 2p -
d(k-1) - 1.
Otherwise the last rows and columns are left out on one side only, and no choice of weights makes the layer turn with
the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)


@dataclass(frozen=True)
class Uneven:
    """A layer that does not cover its input evenly, and the nearest input sizes that it would."""

    name: str
    size: int
    stride: int
    left_out: int

    def __str__(self) -> str:
        fitting = self.size - self.left_out
        return (
            f"{self.name}: stride {self.stride} leaves {self.left_out} of {self.size} pixels out on one side, so it "
            f"cannot turn with the picture; {fitting} or {fitting + self.stride} pixels there are covered evenly"
        )


def pair(value: Any) -> int:
    """The first entry of a size that torch keeps as a number or a pair."""
    return int(value[0]) if isinstance(value, (tuple, list)) else int(value)


def left_out(module: nn.Module, size: int) -> int:
    """How many pixels at the end of `size` no window reaches."""
    window: Any = module
    kernel, stride = pair(window.kernel_size), pair(window.stride if window.stride is not None else window.kernel_size)
    if isinstance(window.padding, str):
        return 0 if window.padding == "same" else (size - kernel) % stride
    reach = pair(getattr(window, "dilation", 1)) * (kernel - 1) + 1
    return (size + 2 * pair(window.padding) - reach) % stride


def uneven_layers(model: nn.Module, example: Tensor) -> list[Uneven]:
    """Walk an input of this shape through the model without computing, and list the layers that break its symmetry."""
    seen: list[Uneven] = []
    handles = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            size = int(inputs[0].shape[-1])
            missing = left_out(module, size)
            if missing:
                stride: Any = module.stride
                seen.append(Uneven(name, size, pair(stride), missing))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, WINDOWS):
            handles.append(module.register_forward_pre_hook(watch(name)))
    try:
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.no_grad(), mode:
            model(torch.empty(example.shape, dtype=example.dtype))
    finally:
        for handle in handles:
            handle.remove()
    return seen
