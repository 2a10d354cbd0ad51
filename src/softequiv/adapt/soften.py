"""The call that users come for: make a model as equivariant as asked, in place, and turn the dial later."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import nn

from softequiv.adapt.plan import Error, Plan, Scope, Softness, matching, plan
from softequiv.errors import GainError, WeightError
from softequiv.gains import Gain
from softequiv.gains import softness as softness_gain
from softequiv.gains.cone import LeastDistortion
from softequiv.groups import Group
from softequiv.groups.angles import range_of
from softequiv.nn import Mode, SoftWeight, filtered_together, set_gain, soft_weights, soften_weight, softenable
from softequiv.reps import Action

Model = TypeVar("Model", bound=nn.Module)


def soften(
    model: Model,
    group: Group | str,
    *,
    softness: Softness | None = None,
    error: Error | None = None,
    within: float | str | None = None,
    gain: Gain | None = None,
    scope: Scope = "layer",
    data: Any = None,
    mode: Mode = "parametrize",
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> Model:
    """Filter every weight of a model that lives on a grid, in place, and return the model.

    `softness` 0 is equivariant and 1 leaves the model as it is; `error`, `within` ask for a certified relative change
    of every weight it touches over a range such as degrees(30) or "30deg", with the least change to the pretrained
    values. Both are one number, or one for each name or pattern, `error={"conv1": 0.05, "layer*": 0.2}`, and weights
    that are not named stay as they are. With `scope` "network" the error is the classifier's own, a mean KL in nats,
    measured on the samples in `data` and shared out among the weights; it holds for the model as it is now, the errors
    of its weights through training too. `mode` "parametrize" filters in the forward pass; "project" keeps plain modules
    and needs `hold(model, optimizer)`; a tensor that several layers share is refused there. The other arguments are
    those of `plan`.

    >>> import torch, softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=0.1, within=se.degrees(30))
    >>> round(se.spectrum(se.grid(se.SO(2), 5, 5)).error(net.weight, se.degrees(30)), 4)
    0.1
    """
    todo = plan(
        model,
        group,
        softness=softness,
        error=error,
        within=within,
        gain=gain,
        scope=scope,
        data=data,
        only=only,
        skip=skip,
        grids=grids,
        action=action,
    )
    carry_out(model, todo, mode)
    return model


def carry_out(model: nn.Module, todo: Plan, mode: Mode = "parametrize") -> None:
    """Do what a plan of this model says, in place."""
    for weight in todo.weights:  # all are checked before the first is touched
        softenable(model.get_submodule(weight.found.module), weight.found.attribute, mode, weight.found.name)
    if mode == "project":
        refuse_shared(model, todo)
    for weight in todo.weights:
        soften_weight(model.get_submodule(weight.found.module), weight.found.attribute, weight.soft, mode)
    filtered_together(model)


def refuse_shared(model: nn.Module, todo: Plan) -> None:
    """What is stored is filtered in project mode, so that layers cannot share it and be filtered each as planned."""
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules():  # a layer that stands in two places comes once
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
    for weight in todo.weights:
        shared = names[model.get_parameter(weight.found.name)]
        if len(shared) > 1:
            raise WeightError(
                f"{' and '.join(shared)} are one tensor, which mode='project' would filter for all of them, and once "
                "for each; use mode='parametrize', where every layer has a filter of its own"
            )


def set_softness(model: nn.Module, softness: float, only: Iterable[str] | None = None) -> None:
    """Turn the dial of a soft model, or of the weights that `only` names.

    A softness takes the place of an error target, which is then no longer kept, and a warning says so.

    >>> import softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.0)
    >>> se.set_softness(net, 1.0)
    """
    weights = chosen(model, only)
    targets = [weight.name for weight in weights if isinstance(weight.soft.gain, LeastDistortion)]
    for weight in weights:
        set_gain(weight, softness_gain(softness))
    if targets:
        warnings.warn(
            f"{targets[0]}{f' and {len(targets) - 1} other weights' if targets[1:] else ''} had an error target, which "
            "a softness does not keep; set_error gives another target",
            stacklevel=2,
        )


def set_error(model: nn.Module, error: float, within: float | str, only: Iterable[str] | None = None) -> None:
    """Give a soft model, or the weights that `only` names, another error target, such as one that falls over training.

    In mode "project" the stored weights are taken to their nearest ones at once.

    >>> import softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=0.5, within="30deg")
    >>> se.set_error(net, 0.1, "30deg")
    >>> round(se.spectrum(se.grid(se.SO(2), 5, 5)).error(net.weight, se.degrees(30)), 4)
    0.1
    """
    gain = LeastDistortion(error, cast(float, range_of(within)))
    for weight in chosen(model, only):
        set_gain(weight, gain)


def chosen(model: nn.Module, only: Iterable[str] | None) -> list[SoftWeight]:
    """The soft weights of a model, or those that `only` names."""
    weights = {weight.name: weight for weight in soft_weights(model)}
    if not weights:
        raise GainError("this model has no soft weights; call soften first")
    names = matching(weights, only) if only is not None else set(weights)
    return [weight for name, weight in weights.items() if name in names]
