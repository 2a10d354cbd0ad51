"""How can later layers be kept from reading what a soft layer lets through? By noise of its size, in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from softequiv.adapt.plan import matching
from softequiv.errors import SoftEquivError, WeightError, checked_amount
from softequiv.groups.angles import range_of
from softequiv.nn import SoftWeight, soft_weights
from softequiv.nn.hooks import GoesWithFilters, Hooks
from softequiv.spectrum import Spectrum, spectrum

LARGEST = 2.001  # no error of an orthogonal action exceeds 2, but for rounding


def noisy(model: nn.Module, within: float | str, scale: float = 1.0, *, skip: Iterable[str] = ()) -> Hooks:
    """Add noise to the output of every module with soft weights, in training mode only:

        y -> y + scale * error(W, within) * rms(y) * n,   n ~ N(0, 1) for each entry,

    where error(W, within) bounds ||W_g - W||_F / ||W||_F over the range, as `certify` does. For inputs without a
    direction of their own (white) rms((W_g - W) x) / rms(W x) is exactly that ratio: at scale 1 the noise is as long as
    the most that a group element can do to the layer's output. It is spread over all n entries of a sample's output,
    though, and a later layer that looks along the one direction of the residual meets 1 / sqrt(n) of it: only at a
    scale of sqrt(n) is the residual hidden from every reader. Of a module with more than one soft weight the largest
    error counts. A table that a module adds inside, such as positions, is
    counted as a weight of that module; one of the model itself (timm's `pos_embed`) must be skipped, by name or
    pattern, as noise on the answers is something else.

    Errors and rms are taken of the current weight and the current batch, without gradients: nothing is remembered, and
    a training taken up again goes on with the same noise. It costs one more filter of each soft weight a step. Eval
    mode is untouched, and so is a layer that is exactly equivariant. `bake` gives the model without noise. A weight
    whose error is above 2 or not known, as where an action cannot be undone, is refused and must be skipped.

    >>> import softequiv as se
    >>> net, x = se.soften(nn.Conv2d(1, 4, 3), "C4", softness=1.0), torch.randn(2, 1, 5, 5)
    >>> handle = noisy(net, within=se.degrees(90))
    >>> torch.equal(net(x), net(x)), torch.equal(net.eval()(x), net(x))
    (False, True)
    >>> handle.remove()
    """
    times = float(checked_amount(scale, "the scale of the noise"))
    reach = cast(float, range_of(within))
    found = {weight.name: weight for weight in soft_weights(model)}
    left_out = matching(found, skip, kind="soft weight")
    weights: dict[nn.Module, list[SoftWeight]] = {}
    for name, weight in found.items():
        if name in left_out:
            continue
        if weight.module is model and any(name != "parametrizations" for name, _ in model.named_children()):
            raise WeightError(
                f"{weight.name} belongs to the model itself, whose output are the answers: noise after it would not be "
                f"noise after the weight; leave it out with skip=[{weight.name!r}]"
            )
        error = float(_Residual(weight, reach)())
        if not error <= LARGEST:  # nor where it is NaN
            raise WeightError(
                f"{weight.name} has a certified error of {error:.3g} within {within}, and 2 is the most that an action "
                f"which keeps lengths can do: noise of such a size would drown the layer; leave it out with "
                f"skip=[{weight.name!r}], or narrow the range"
            )
        weights.setdefault(weight.module, []).append(weight)
    if not weights:
        raise WeightError("this model has no soft weights after which to add noise; call soften first, or skip fewer")
    return Hooks(
        tuple(
            module.register_forward_hook(_Noise([_Residual(weight, reach) for weight in own], times))
            for module, own in weights.items()
        )
    )


class _Residual:
    """The certified error of one weight as it is now, as a tensor where the weight is: no wait for the device."""

    def __init__(self, weight: SoftWeight, within: float) -> None:
        self.weight, self.within = weight, within
        self.of: Spectrum | None = None

    def __call__(self) -> Tensor:
        view = self.weight.group_view().detach()
        wide = view if view.dtype == torch.float64 else view.float()
        if self.of is None or self.of.levels.device != wide.device or self.of.levels.dtype != wide.dtype:
            self.of = spectrum(self.weight.soft.rep).to(wide.dtype, wide.device)
            self.chord_square = self.of.chord(self.within).to(wide) ** 2
        energies = self.of.energies(wide)
        total = energies.sum().clamp(min=torch.finfo(energies.dtype).tiny)
        change = (energies * self.chord_square).sum() / total
        if self.of.rep.orthogonal:
            change = torch.minimum(change, 4 * energies[self.of.levels > 0].sum() / total)
        return change.sqrt()


class _Noise(GoesWithFilters):
    """A forward hook."""

    def __init__(self, residuals: Iterable[_Residual], scale: float) -> None:
        self.residuals, self.scale = list(residuals), scale

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not module.training or self.scale == 0:
            return output
        if not isinstance(output, Tensor):
            raise SoftEquivError(
                f"{type(module).__name__} gives {type(output).__name__} and no tensor to which noise could be added; "
                f"leave {self.residuals[0].weight.name!r} out with skip=[...]"
            )
        with torch.no_grad():
            residual = torch.stack([error() for error in self.residuals]).amax()
            rms = output.detach().float().square().mean().sqrt()
            noise = torch.randn_like(output) * (self.scale * residual * rms).to(output)
        return output + noise
