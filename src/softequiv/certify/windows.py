"""What does an operation that slides a window over pixels do to the bounds of its input?"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softequiv.certify.call import Call, Rule, outcome, picture, refuse_lopsided, refuse_unbatched
from softequiv.certify.convolution import convolution_norm, windows_over_a_pixel
from softequiv.certify.signals import Padded, Signal, Still
from softequiv.groups import Shifts


def per_axis(value: Any, axes: int) -> list[int]:
    """A size for each axis from a number, one entry or all."""
    values = [value] if isinstance(value, int) else list(value)
    return [int(values[0])] * axes if len(values) == 1 else [int(v) for v in values]


@dataclass(frozen=True)
class Geometry:
    """How a convolution lies on its picture: `before` and `after` are zeros at the ends, unless it is `circular`."""

    sizes: tuple[int, ...]
    spans: list[int]
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    circular: bool


def geometry(call: Call, weight: Tensor) -> tuple[Signal, Geometry]:
    """The input of a convolution and how it lies there, with a border that was made for it just before."""
    axes = weight.ndim - 2
    stride, dilation = per_axis(call["stride"], axes), per_axis(call["dilation"], axes)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    given = call["padding"]
    if isinstance(given, str):
        total = [span - 1 if given == "same" else 0 for span in spans]
        before, after = [t // 2 for t in total], [t - t // 2 for t in total]
    else:
        before = after = per_axis(given, axes)
    x = call["input"]
    if isinstance(x, Signal) and isinstance(x.how, Padded):
        refuse_unbatched(call, x)
        border, exact = x.how.border, set(stride) == {1} and not any(before)
        if x.how.mode == "constant":
            before = [p + extra for p, (extra, _) in zip(before, border, strict=True)]
            after = [p + extra for p, (_, extra) in zip(after, border, strict=True)]
            return x, Geometry(x.how.inside.sizes, spans, stride, dilation, before, after, False)
        halves = [(span - 1) / 2 for span in spans]
        if x.how.mode == "circular" and exact and border == tuple(zip(halves, halves, strict=True)):
            return x, Geometry(x.how.inside.sizes, spans, stride, dilation, before, after, True)
    x = call.x
    return x, Geometry(picture(call, x).sizes, spans, stride, dilation, before, after, False)


def refuse_geometry(call: Call, lies: Geometry) -> None:
    """A convolution must lie on its picture so that the group can move it."""
    alike = (lies.spans, lies.stride, lies.dilation, lies.before)
    if call.elements.swaps_axes and any(len(set(values)) > 1 for values in alike):
        raise call.refuse("its window differs between the axes, so it cannot make a quarter turn")
    plain = set(lies.spans) == set(lies.stride) == {1}
    if isinstance(call.elements.group, Shifts) and not (lies.circular or plain):
        raise call.refuse("it shifts with the picture only with stride 1 and circular padding of half its size")
    if not lies.circular:
        every = zip(lies.sizes, lies.spans, lies.stride, lies.before, lies.after, strict=True)
        excess = [a - (n + b + a - k) % s - b for n, k, s, b, a in every]
        refuse_lopsided(call, excess, f"stride {lies.stride} on {list(lies.sizes)} pixels")


def convolution(call: Call) -> Signal:
    """dev' <= ||K|| dev + ||K_(kappa o g - kappa)|| size; a bias is the same everywhere."""
    weight: Tensor = call["weight"].to(torch.float64)
    axes, space = weight.ndim - 2, call.spaces.get("weight")
    if space is not None and len(space.shape) > axes:
        raise call.refuse(f"its channels carry {space}; only plain channels are known here")
    x, lies = geometry(call, weight)
    moves = outcome(call)
    still = math.prod(lies.sizes) == 1 and isinstance(moves, Still)  # nothing moves, so nothing can go wrong
    if not still:
        refuse_geometry(call, lies)
    norm_of = functools.partial(
        convolution_norm,
        sizes=lies.sizes,
        stride=lies.stride,
        dilation=lies.dilation,
        groups=int(call["groups"]),
        circular=lies.circular,
    )
    bias = call.get("bias")
    ground = 0.0 if bias is None else float(bias.to(torch.float64).norm()) * math.sqrt(math.prod(call.shape[2:]))
    out = x.through(call.shape, moves, norm_of(weight), ground)
    if still or isinstance(call.elements.group, Shifts):
        return out  # a circular convolution commutes with shifts whatever its kernel
    assert call.elements.elements is not None  # groups that permute pixels and are not shifts have at most 8
    defect = max(norm_of(call.elements.moved(weight, g, axes) - weight) for g in call.elements.elements)
    return out.adding(call.where, x.size * defect)


def pad(call: Call) -> Signal:
    x, pads = call.x, list(call["pad"])
    mode = call.get("mode", "constant")
    how = picture(call, x)
    if mode == "constant" and float(call.get("value") or 0):
        raise call.refuse("only padding with zeros is known")
    border = [(pads[2 * i], pads[2 * i + 1]) if 2 * i < len(pads) else (0, 0) for i in range(len(how.sizes))][::-1]
    if len(pads) > 2 * len(how.sizes) or min(pads) < 0:
        raise call.refuse("it pads channels or crops")
    return x.through(call.shape, Padded(how, tuple(border), mode), 1.0)


@dataclass(frozen=True)
class Window:
    """A pooling window that covers its picture evenly; `covers` is the number of windows in which a pixel can lie."""

    kernel: list[int]
    padding: list[int]
    covers: int


def window(call: Call) -> Window:
    """The window of a pooling operation."""
    sizes = picture(call, call.x).sizes
    kernel, stride, padding, dilation = (
        per_axis(value, len(sizes))
        for value in (
            call["kernel_size"],
            call.get("stride") or call["kernel_size"],
            call.get("padding", 0),
            call.get("dilation", 1),
        )
    )
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if any(span > n for span, n in zip(spans, sizes, strict=True)):
        raise call.refuse(f"its window of {spans} is larger than the picture of {list(sizes)} pixels")
    refuse_geometry(call, Geometry(sizes, spans, stride, dilation, padding, padding, False))
    every = zip(sizes, spans, stride, padding, strict=True)
    if call.get("ceil_mode", False) and any((n + 2 * p - k) % s for n, k, s, p in every):
        raise call.refuse("with ceil_mode its last windows are smaller than the others")
    return Window(
        kernel, padding, math.prod(windows_over_a_pixel(*axis) for axis in zip(kernel, stride, dilation, strict=True))
    )


def max_pool(call: Call) -> Signal:
    """|max a - max b| <= max |a - b|, and a pixel lies in so many windows."""
    covers = window(call).covers
    return call.x.through(call.shape, outcome(call), math.sqrt(covers))


def avg_pool(call: Call) -> Signal:
    """A mean of k entries is at most their norm over sqrt k."""
    if call.get("divisor_override") is not None:
        raise call.refuse("a divisor of its own is not known")
    own = window(call)
    outside = [0 if call.get("count_include_pad", True) else p for p in own.padding]
    inside = math.prod(k - p for k, p in zip(own.kernel, outside, strict=True))
    return call.x.through(call.shape, outcome(call), math.sqrt(own.covers / inside))


def adaptive_avg_pool(call: Call) -> Signal:
    x = call.x
    if isinstance(x.how, Still) and x.shape == call.shape:
        return x
    how = picture(call, x)
    sizes = call.shape[2:]
    if any(n % m for n, m in zip(how.sizes, sizes, strict=True)):
        raise call.refuse(f"{how.sizes} pixels do not divide into {sizes}")
    if isinstance(call.elements.group, Shifts) and math.prod(sizes) > 1:
        raise call.refuse("its windows do not shift with the picture")
    return x.through(call.shape, outcome(call), math.sqrt(math.prod(sizes) / math.prod(how.sizes)))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d"), convolution),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool2d_with_indices"), max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d"), avg_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d"), adaptive_avg_pool),
}
