"""What does each operation of a network do to the bounds of its input? One rule an operation; what has none is refused
with its reason, since a guess would be no guarantee.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from softequiv.certify import windows
from softequiv.certify.call import Call, Rule, outcome, picture, settled
from softequiv.certify.operator import spectral_norm
from softequiv.certify.signals import NOTHING, Affine, How, Moving, Padded, Pixels, Range, Signal, Still, merged
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
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm"), "layer norm enlarges small inputs without a limit that says anything"
    ),
    "group_norm": "group norm enlarges small inputs without a limit that says anything",
    "instance_norm": "instance norm enlarges small inputs without a limit that says anything",
    "rms_norm": "RMS norm enlarges small inputs without a limit that says anything",
    **dict.fromkeys(
        ("scaled_dot_product_attention", "softmax", "_softmax"), "attention multiplies activations by activations"
    ),
    **dict.fromkeys(("matmul", "bmm"), "activations are multiplied by activations"),
}


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


def leaky_relu(call: Call) -> Signal:
    x = entries(call)
    return x.through(x.shape, x.how, max(1.0, abs(float(call.get("negative_slope", 0.01)))))


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
        return x.through(call.shape, replace(x.how, flat=True), 1.0)
    raise call.refuse(
        f"it takes a tensor that {x.how} from shape {x.shape} to {call.shape}, where its action is not known"
    )


def add(call: Call) -> Signal:
    """Sums of tensors that move alike, or of a tensor and a constant."""
    first, second, alpha = call["self"], call["other"], abs(float(call.get("alpha", 1)))
    if isinstance(first, Signal) and isinstance(second, Signal):
        a, b = settled(first, call), settled(second, call)
        if a.how != b.how or a.shape != b.shape:
            raise call.refuse(f"it adds a tensor that {a.how} and one that {b.how}")
        b = b.through(b.shape, b.how, alpha)
        return Signal(a.shape, a.how, a.size + b.size, merged(a.change, b.change))
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


def cat(call: Call) -> Signal:
    """Tensors side by side; channels of pictures with one size."""
    signals = [settled(part, call) for part in call["tensors"]]
    axis = int(call.get("dim", 0)) % len(call.shape)
    still = all(isinstance(signal.how, Still) for signal in signals)
    if axis == 0 or not (still or (axis == 1 and all(isinstance(s.how, Pixels) and not s.how.flat for s in signals))):
        raise call.refuse("it joins tensors along an axis on which the group acts, or that move differently")
    size = Affine(math.hypot(*(s.size.slope for s in signals)), math.hypot(*(s.size.offset for s in signals)))
    return Signal(call.shape, Still() if still else outcome(call), size, merged(*(s.change for s in signals)))


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


RULES: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(("batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), batch_norm),
    **dict.fromkeys(LIPSCHITZ, pointwise),
    "softplus": softplus,
    "leaky_relu": leaky_relu,
    "elu": elu,
    **dict.fromkeys(SAME, unchanged),
    **dict.fromkeys(RESHAPES, reshaped),
    **dict.fromkeys(("add", "sub"), add),
    **dict.fromkeys(("mul", "div"), mul),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "mean": mean,
    **windows.RULES,
}
