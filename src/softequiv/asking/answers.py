"""How is any model asked for its one tensor? On its own device and in its own precision, in eval mode, and a result
that is no tensor is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.actions import Acts, Pictures, Still
from softequiv.errors import SoftEquivError
from softequiv.nn.module import check_module

ALONE = 1e-2  # of the spread of the answers: far above what rounding does in a batch of the same size


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode without gradients; every module's own mode is restored afterwards."""
    check_module(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SoftEquivError("the model is on the meta device, where weights have no values; load them first")
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():  # derivatives are asked for below
            yield
    finally:
        for module, training in modes:
            module.training = training


def at_home(model: nn.Module, x: Tensor) -> Tensor:
    """A copy of the input on the model's device and in its precision; NaN and infinity are refused."""
    own = next((tensor for tensor in [*model.parameters(), *model.buffers()] if tensor.is_floating_point()), x)
    found = x.to(own.device, own.dtype, copy=True)  # a tensor made in inference mode has no derivatives
    check_finite(found, "inputs", "look for broken samples")
    return found


def tensor_of(result: Any) -> Tensor:
    """A model's result as one tensor: itself, or its logits."""
    if isinstance(result, Tensor):
        return result
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    keys = f" with the keys {', '.join(map(str, result))}" if isinstance(result, Mapping) else ""
    raise SoftEquivError(
        f"the model returned {type(result).__name__}{keys}, which has no tensor of logits; wrap the model in a module "
        "that returns that tensor"
    )


def asked(model: nn.Module, x: Tensor) -> Tensor:
    """F(x), (N, ...), of a copy of x, as the first layer may write into it."""
    try:
        y = tensor_of(model(x.clone()))
    except (SoftEquivError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as problem:
        raise SoftEquivError(
            f"the model cannot take inputs of shape {tuple(x.shape)}; give them the size that it was made for "
            f"({type(problem).__name__}: {problem})"
        ) from problem
    if not y.is_floating_point():
        raise SoftEquivError(f"answers must be floating point, such as class scores; the model gave {y.dtype}")
    if y.shape[:1] != x.shape[:1]:
        raise SoftEquivError(
            f"{len(x)} samples gave an answer of shape {tuple(y.shape)}; the first axis must be the samples'"
        )
    return y


def check_alone(model: nn.Module, x: Tensor, y: Tensor, but: str) -> None:
    """Raise a sentence where the answers y to a batch x, at its first and last sample, depend on the other samples;
    `but` ends it, with what that means and the remedy.

    Beside copies of itself a sample must be answered alike; the batch keeps its size, and kernels their rounding.
    """
    if len(x) == 1:
        return
    tolerance = ALONE * float((y - y.mean()).abs().max()) + 4 * torch.finfo(y.dtype).eps * float(y.abs().max())
    for place in (0, -1):
        among_copies = asked(model, x[place].expand_as(x))[place]
        if not float((among_copies - y[place]).abs().max()) <= tolerance:
            raise SoftEquivError(
                "the answer to a sample changed with the others of its batch, as under a batch norm without running "
                f"statistics, or from call to call: {but}"
            )


def at_size_of(x: Tensor, y: Tensor) -> Tensor:
    """Scores per pixel, (N, K, h, w), at the size of the pictures x; other answers as they are.

    >>> at_size_of(torch.zeros(2, 3, 8, 8), torch.zeros(2, 5, 4, 4)).shape
    torch.Size([2, 5, 8, 8])
    """
    if y.ndim != 4 or x.ndim != 4 or y.shape[-2:] == x.shape[-2:]:
        return y
    return functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)


def check_finite(
    outputs: Tensor, what: str, remedy: str = "look for overflow in the model, for instance in half precision"
) -> None:
    """Raise a sentence where outputs hold NaN or infinity, which every mean would spread over all figures."""
    bad = ~torch.isfinite(outputs)
    if bool(bad.any()):
        raise SoftEquivError(f"{what} hold NaN or infinity in {int(bad.sum())} of {outputs.numel()} entries; {remedy}")


def default_target(acts: Acts, y: Tensor) -> Acts:
    """How answers move where the user did not say: class scores stand still, maps of scores move as the pictures."""
    if isinstance(acts, Pictures) and y.ndim == 2:
        return Still()
    if isinstance(acts, Pictures) and y.ndim == 4:
        return Pictures(acts.interpolation)
    raise SoftEquivError(
        f"how does the group act on answers of shape {tuple(y.shape)}? Say it with target=..., such as Still() for "
        "what stays, Points() or Vectors(rep)"
    )
