"""What does each operation of a network do to the bounds of its input? One rule an operation; what has none is refused
with its reason, since a guess would be no guarantee.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.certify.convolution import convolution_norm, windows_over_a_pixel
from softequiv.certify.operator import spectral_norm
from softequiv.certify.signals import (
    NOTHING,
    Affine,
    How,
    Moving,
    Padded,
    Pixels,
    Range,
    Signal,
    Still,
    UnboundedError,
)
from softequiv.groups import Shifts
from softequiv.nn.layers import is_scalar
from softequiv.reps import Hom, Rep

# |f(a) - f(b)| <= constant |a - b|; f(0) is 0 unless `AT_ZERO` says otherwise
LIPSCHITZ = {
    "relu": 1.0,
    "relu6": 1.0,
    "tanh": 1.0,
    "abs": 1.0,
    "hardtanh": 1.0,
    "sigmoid": 0.25,
    "hardsigmoid": 1 / 6,
    "gelu": 1.13,  # largest slope 1.12890 at sqrt 2; the form with tanh stays below 1.1290
    "silu": 1.1,  # largest slope 1.09984
    "mish": 1.09,  # largest slope 1.08850
    "hardswish": 1.5,
    "selu": 1.7581,  # scale times alpha
    "neg": 1.0,
}
AT_ZERO = {"sigmoid": 0.5, "hardsigmoid": 0.5}
SAME = ("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "_to_copy", "to", "dropout", "feature_dropout")
RESHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "_unsafe_view")
NO_CONSTANT = {
    "layer_norm": "layer norm enlarges small inputs without a limit that says anything",
    "native_layer_norm": "layer norm enlarges small inputs without a limit that says anything",
    "group_norm": "group norm enlarges small inputs without a limit that says anything",
    "instance_norm": "instance norm enlarges small inputs without a limit that says anything",
    "rms_norm": "RMS norm enlarges small inputs without a limit that says anything",
    "scaled_dot_product_attention": "attention multiplies activations by activations",
    "softmax": "attention multiplies activations by activations",
    "_softmax": "attention multiplies activations by activations",
    "matmul": "activations are multiplied by activations",
    "bmm": "activations are multiplied by activations",
}


@dataclass(frozen=True)
class Call:
    """One operation of the graph: its arguments by name, where it stands, and the shape of its result."""

    op: str
    args: Mapping[str, Any]
    where: str
    shape: tuple[int, ...]
    elements: Range
    spaces: Mapping[str, Rep]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that some forms of an operation do not have."""
        return self.args.get(name, default)

    @property
    def x(self) -> Signal:
        """The first argument, which must be a signal, without a border that awaits a convolution."""
        return settled(next(iter(self.args.values())), self)

    def refuse(self, why: str) -> UnboundedError:
        """The refusal that names this operation."""
        return UnboundedError(f"{self.op} in {self.where}: {why}")


Rule = Callable[[Call], Signal]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def settled(signal: Any, call: Call) -> Signal:
    """A padded picture as a picture of its own, if it moves as one; the border may repeat pixels."""
    if not isinstance(signal, Signal):
        raise call.refuse("its first argument does not depend on the input")
    how = signal.how
    if not isinstance(how, Padded):
        return signal
    if isinstance(call.elements.group, Shifts):
        raise call.refuse(f"a {how.mode} border does not shift with the picture")
    refuse_lopsided(call, [before - after for before, after in how.border], "its padding")
    every = [(n, before, after) for n, (before, after) in zip(how.inside.sizes, how.border, strict=True)]
    repeats = math.prod(copies(*axis, how.mode) for axis in every)
    moves = as_picture(call, how.inside.channels, tuple(map(sum, every)))
    return signal.through(signal.shape, moves, math.sqrt(repeats))


def copies(n: int, before: int, after: int, mode: str) -> int:
    """How often padding an axis repeats a pixel at most."""
    if mode == "constant" or not (before or after):
        return 1
    places = functional.pad(torch.arange(float(n))[None, None], (before, after), mode=mode).long().flatten()
    return int(torch.bincount(places).max())


def refuse_lopsided(call: Call, excess: Sequence[int], what: str) -> None:
    """An axis that the group turns round must look alike from both ends."""
    turned = call.elements.reversed_axes[-len(excess) :]
    for axis, (surplus, turns) in enumerate(zip(excess, turned, strict=True)):
        if turns and surplus:
            raise call.refuse(f"{what} leaves pixels over at one end of axis {axis}, {abs(surplus)}; it cannot turn")


def per_axis(value: Any, axes: int) -> list[int]:
    """A size for each axis from a number, one entry or all."""
    values = [value] if isinstance(value, int) else list(value)
    return [int(values[0])] * axes if len(values) == 1 else [int(v) for v in values]


def refuse_unbatched(call: Call, x: Signal) -> None:
    """conv2d takes samples, channels and two axes of pixels; torch lets the first one be left out."""
    axes = re.search(r"\d(?=d)", call.op)
    if axes is not None and len(x.shape) != 2 + int(axes[0]):
        raise call.refuse(f"its input has shape {x.shape}; give an example with samples and channels before the pixels")


def picture(call: Call, x: Signal) -> Pixels:
    """The picture that an operation on pixels needs."""
    refuse_unbatched(call, x)
    if isinstance(x.how, Pixels) and not x.how.flat:
        return x.how
    if isinstance(x.how, Still) and len(x.shape) > 2 and math.prod(x.shape[2:]) == 1:
        return Pixels(x.shape[1], x.shape[2:])
    if isinstance(x.how, Moving) and not x.how.flat:
        raise refuse_mixing(call)
    raise call.refuse(f"it takes pictures, and its input {x.how}")


def refuse_mixing(call: Call) -> UnboundedError:
    """Turns by other angles than quarters mix pixels."""
    return call.refuse(f"{call.elements.group} does not permute pixels, and no such operation commutes with it")


def as_picture(call: Call, channels: int, sizes: tuple[int, ...]) -> How:
    """How a picture that an operation on pixels has made moves."""
    how = call.elements.picture(channels, sizes)
    if isinstance(how, Moving):
        raise refuse_mixing(call)
    return how


def outcome(call: Call) -> How:
    """How the result of an operation on pixels moves, from its shape."""
    return as_picture(call, call.shape[1], call.shape[2:])


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


RULES.update({"conv1d": convolution, "conv2d": convolution})


@rule("linear")
def linear(call: Call) -> Signal:
    """dev' <= ||W|| dev + ||W rho_X - rho_Y W|| size + ||c - rho_Y c||."""
    x, weight = call.x, call["weight"].to(torch.float64)
    space = call.spaces.get("weight")
    target = space.target if isinstance(space, Hom) and not is_scalar(space.target) else None
    source = x.how
    if isinstance(space, Hom) and not fits(space.source, source, call.elements):
        raise call.refuse(f"its weight is for {space.source}, and its input {source}")
    if not isinstance(source, Still):
        if isinstance(source, Padded) or not source.flat:
            raise call.refuse(f"it acts on the last axis of a tensor that {source}")
        if len(x.shape) != 2:
            raise call.refuse(f"it takes vectors, (samples, entries); its input has shape {x.shape}")
    how: How = Still() if target is None else Moving(target)
    bias = call.get("bias")
    repeated = math.sqrt(x.entries / x.shape[-1])
    ground = float(bias.to(torch.float64).norm()) * repeated if bias is not None else 0.0
    out = x.through(call.shape, how, spectral_norm(weight), ground)
    out = out.adding(call.where, x.size * call.elements.map_change(weight, source, target))
    if bias is not None:
        out = out.adding(call.where, Affine(0.0, call.elements.vector_change(bias.to(torch.float64), how)))
    return out


def fits(space: Rep, how: How, elements: Range) -> bool:
    """Whether a weight's source is what its input really is."""
    if isinstance(how, Still):
        return is_scalar(space)
    if isinstance(how, Moving):
        return how.channels * how.rep == space
    if isinstance(how, Pixels) and how.flat:
        return how.channels * elements.grid(how.sizes) == space
    return False


@rule("batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
def batch_norm(call: Call) -> Signal:
    """In evaluation: a (x - mean) + b for each channel."""
    x = call.x
    if call.get("training", False):
        raise call.refuse("in training it depends on the whole batch")
    if not isinstance(x.how, Still):
        picture(call, x)
    mean, var = (call[name].to(torch.float64) for name in ("running_mean", "running_var"))
    scale = (var + float(call["eps"])).rsqrt()
    if call.get("weight") is not None:
        scale = scale * call["weight"].to(torch.float64)
    shift = -mean * scale
    if call.get("bias") is not None:
        shift = shift + call["bias"].to(torch.float64)
    ground = float(shift.norm()) * math.sqrt(x.entries / x.shape[1])
    return x.through(x.shape, x.how, float(scale.abs().max()), ground)


def entries(call: Call) -> Signal:
    """The input of a function of single entries, which the group must permute or fix."""
    if not call.x.permuted:
        raise call.refuse(f"it acts on single entries, which the group mixes: its input {call.x.how}")
    return call.x


def pointwise(call: Call) -> Signal:
    """|f(a) - f(b)| <= L |a - b|."""
    x, constant = entries(call), LIPSCHITZ[call.op]
    if call.op == "hardtanh" and not float(call.get("min_val", -1)) <= 0 <= float(call.get("max_val", 1)):
        raise call.refuse("its bounds do not contain zero")
    return x.through(x.shape, x.how, constant, AT_ZERO.get(call.op, 0.0) * math.sqrt(x.entries))


RULES.update(dict.fromkeys(LIPSCHITZ, pointwise))


@rule("softplus")
def softplus(call: Call) -> Signal:
    """log(1 + exp(b x)) / b, and x itself where b x is beyond the threshold t: a jump of log(1 + exp(-t)) / b."""
    x, beta, threshold = entries(call), float(call.get("beta", 1)), float(call.get("threshold", 20))
    if beta <= 0 or threshold < 0:
        raise call.refuse(f"beta {beta:g} with threshold {threshold:g} is not known")
    spread = math.sqrt(x.entries) / beta
    out = x.through(x.shape, x.how, 1.0, math.log(2) * spread)
    if x.total == NOTHING:
        return out
    return out.adding(call.where, Affine(0.0, math.log1p(math.exp(-threshold)) * spread))


@rule("leaky_relu")
def leaky_relu(call: Call) -> Signal:
    x = entries(call)
    return x.through(x.shape, x.how, max(1.0, abs(float(call.get("negative_slope", 0.01)))))


@rule("elu")
def elu(call: Call) -> Signal:
    x = entries(call)
    alpha, scale, inner = (float(call.get(name, 1)) for name in ("alpha", "scale", "input_scale"))
    if inner < 0:
        raise call.refuse("with a negative input_scale it grows without limit")
    return x.through(x.shape, x.how, abs(scale) * max(1.0, abs(alpha * inner)))


def unchanged(call: Call) -> Signal:
    if call.get("train", False):
        raise call.refuse("dropout is random in training")
    return call.x


RULES.update(dict.fromkeys(SAME, unchanged))


def reshaped(call: Call) -> Signal:
    x = call.x
    if call.get("dtype") is not None:
        raise call.refuse("it reads the bits of activations as other numbers")
    if call.shape[:1] != x.shape[:1]:
        raise call.refuse("it mixes samples")
    if isinstance(x.how, Still):
        return x.through(call.shape, x.how, 1.0)
    if call.shape == x.shape:
        return x
    if isinstance(x.how, (Pixels, Moving)) and not x.how.flat and len(call.shape) == 2:
        flat: How
        if isinstance(x.how, Pixels):
            flat = Pixels(x.how.channels, x.how.sizes, flat=True)
        else:
            flat = Moving(x.how.rep, x.how.channels)
        return x.through(call.shape, flat, 1.0)
    raise call.refuse(
        f"it takes a tensor that {x.how} from shape {x.shape} to {call.shape}, where its action is not known"
    )


RULES.update(dict.fromkeys(RESHAPES, reshaped))


@rule("add", "sub")
def add(call: Call) -> Signal:
    """Sums of tensors that move alike, or of a tensor and a constant."""
    first, second, alpha = call["self"], call["other"], abs(float(call.get("alpha", 1)))
    if isinstance(first, Signal) and isinstance(second, Signal):
        a, b = settled(first, call), settled(second, call)
        if a.how != b.how or a.shape != b.shape:
            raise call.refuse(f"it adds a tensor that {a.how} and one that {b.how}")
        change = dict(a.change)
        for name, part in b.change.items():
            change[name] = change.get(name, NOTHING) + part * alpha
        return Signal(a.shape, a.how, a.size + b.size * alpha, change)
    signal, constant, factor = (first, second, alpha) if isinstance(first, Signal) else (second, first, 1.0)
    x = settled(signal, call)
    scale = 1.0 if isinstance(first, Signal) else alpha
    value = constant_sample(call, constant, x) * factor
    out = x.through(x.shape, x.how, scale, float(value.norm()))
    return out.adding(call.where, Affine(0.0, call.elements.vector_change(value, x.how)))


def constant_sample(call: Call, constant: Any, x: Signal) -> Tensor:
    """A constant as it meets one sample."""
    value = torch.as_tensor(constant).to(torch.float64)
    if call.shape != x.shape:
        raise call.refuse("its constant is larger than the tensor")
    if value.ndim == len(x.shape) and value.shape[0] > 1:
        raise call.refuse("its constant differs from sample to sample")
    return value.expand(1, *x.shape[1:])[0]


@rule("mul", "div")
def mul(call: Call) -> Signal:
    """Multiples by a constant that the group leaves alone."""
    first, second = call["self"], call["other"]
    if call.get("rounding_mode") is not None:
        raise call.refuse(f"with rounding_mode {call['rounding_mode']!r} it jumps")
    if isinstance(first, Signal) and isinstance(second, Signal):
        raise call.refuse("activations are multiplied by activations: no global constant exists")
    if call.op == "div" and not isinstance(first, Signal):
        raise call.refuse("a constant divided by activations has no global constant")
    x = settled(first if isinstance(first, Signal) else second, call)
    value = constant_sample(call, second if isinstance(first, Signal) else first, x)
    value = 1 / value if call.op == "div" else value
    if isinstance(x.how, Moving) and value.unique().numel() > 1:
        raise call.refuse(f"it scales entries that the group mixes: its input {x.how}")
    if isinstance(x.how, Pixels) and bool((value.reshape(x.how.channels, -1).diff(dim=1) != 0).any()):
        raise call.refuse("it scales pixels differently from place to place")
    return x.through(x.shape, x.how, float(value.abs().max()))


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Signal:
    """Tensors side by side; channels of pictures with one size."""
    signals = [settled(part, call) for part in call["tensors"]]
    axis = int(call.get("dim", 0)) % len(call.shape)
    still = all(isinstance(signal.how, Still) for signal in signals)
    if axis == 0 or not (still or (axis == 1 and all(isinstance(s.how, Pixels) and not s.how.flat for s in signals))):
        raise call.refuse("it joins tensors along an axis on which the group acts, or that move differently")
    size = Affine(math.hypot(*(s.size.slope for s in signals)), math.hypot(*(s.size.offset for s in signals)))
    change: dict[str, Affine] = {}
    for signal in signals:
        for name, part in signal.change.items():
            change[name] = change.get(name, NOTHING) + part
    return Signal(call.shape, Still() if still else outcome(call), size, change)


@rule("pad", "constant_pad_nd")
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


@rule("max_pool1d", "max_pool2d", "max_pool2d_with_indices")
def max_pool(call: Call) -> Signal:
    """|max a - max b| <= max |a - b|, and a pixel lies in so many windows."""
    covers = window(call).covers
    return call.x.through(call.shape, outcome(call), math.sqrt(covers))


@rule("avg_pool1d", "avg_pool2d")
def avg_pool(call: Call) -> Signal:
    """A mean of k entries is at most their norm over sqrt k."""
    if call.get("divisor_override") is not None:
        raise call.refuse("a divisor of its own is not known")
    own = window(call)
    outside = [0 if call.get("count_include_pad", True) else p for p in own.padding]
    inside = math.prod(k - p for k, p in zip(own.kernel, outside, strict=True))
    return call.x.through(call.shape, outcome(call), math.sqrt(own.covers / inside))


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d")
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


@rule("mean")
def mean(call: Call) -> Signal:
    """A mean over all pixels stands still."""
    x, dims = call.x, call.get("dim")
    axes = {int(d) % len(x.shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])} if dims else set()
    if not axes or 0 in axes:
        raise call.refuse("it mixes samples")
    factor = 1 / math.sqrt(math.prod(x.shape[axis] for axis in axes))
    if isinstance(x.how, Still):
        return x.through(call.shape, x.how, factor)
    if axes >= set(range(2, len(x.shape))) and isinstance(picture(call, x), Pixels):
        return x.through(call.shape, Still(), factor)
    raise call.refuse("it averages over some axes of a picture and not over others")
