"""Back to a plain model: the filtered weights written in, the original classes, keys and dtypes, and a check that
nothing moved.
"""

from __future__ import annotations

import copy as copying
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv.adapt.checkpoint import stored_tensors
from softequiv.adapt.positions import dotted
from softequiv.asking import evaluating
from softequiv.errors import SoftEquivError
from softequiv.nn import FilteredWeight, soft_weights
from softequiv.nn.constraints import left_behind, projected_weights
from softequiv.nn.hooks import GoesWithFilters, without_hooks
from softequiv.nn.weight import MARK

Model = TypeVar("Model", bound=nn.Module)
log = logging.getLogger("softequiv")
OFF = 1e-4  # relative distance from a constraint that many steps of rounding may add up to


def bake(model: Model, *, copy: bool = False, example: Any = None) -> Model:
    """Write the filtered weights into the model and drop the filters, and noise that goes with them; with `copy`, leave
    the original untouched.

    With an `example` input the outputs before and after are compared and the largest difference is logged; more than
    rounding is an error. The weights themselves are always compared, and in project mode with their constraints, which
    weights that were loaded or trained without `hold` may have left. Parametrisations that know no filter, such as
    torch's weight_norm, stay where they are. Layers that share one tensor still do if they are filtered alike; a
    warning is logged where they are not.

    >>> import softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.0)
    >>> plain = se.bake(net, copy=True)
    >>> type(plain).__name__, torch.equal(plain.weight, net.weight)
    ('Conv2d', True)
    """
    expected = {weight.name: weight.value().detach().clone() for weight in soft_weights(model)}
    for name, value in expected.items():
        if not torch.isfinite(value).all():
            raise SoftEquivError(
                f"{name} has entries that are not finite: training diverged; bake an earlier checkpoint"
            )
    check_written_out(model)
    refuse_left_behind(model)
    before = outputs(model, example)
    plain = copying.deepcopy(model) if copy else model
    tied = shared_names(plain)
    for module, weights in plain_parameters(plain, expected).items():
        unparametrize(module, weights)
    for module in plain.modules():
        module.__dict__.pop(MARK, None)
        without_hooks(module, lambda hook: isinstance(hook, GoesWithFilters))
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, value in expected.items():
        if not torch.equal(parameters[name], value):
            raise SoftEquivError(f"baking changed {name}; this is a bug: please report it with the model's class")
    for names in tied:
        if len({parameters[name] for name in names if name in parameters}) > 1:
            log.warning("%s shared one tensor but not one filter: each has its own tensor now", " and ".join(names))
    after = outputs(plain, example)
    if before is not None and after is not None:
        difference = float((before - after).abs().max())
        log.info("baked %d weights; largest change of an output: %.1e", len(expected), difference)
        if difference > 1e-4 * max(1.0, float(before.abs().max())):
            raise SoftEquivError(
                f"the baked model's output differs by {difference:.1e}; keep the soft model and report this"
            )
    return plain


def plain_parameters(model: nn.Module, values: Mapping[str, Tensor]) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """A parameter for each filtered weight, by module and attribute; one for all that share a tensor and a value."""
    written: dict[nn.Module, dict[str, nn.Parameter]] = {}
    first: dict[nn.Parameter, nn.Parameter] = {}
    for weight in soft_weights(model):
        if weight.filtered.mode == "parametrize":
            stored, value = weight.stored, values[weight.name]
            laid_out = torch.empty_strided(value.shape, stored.stride(), dtype=value.dtype, device=value.device)
            own = nn.Parameter(laid_out.copy_(value), requires_grad=stored.requires_grad)
            shared = first.setdefault(stored, own)
            written.setdefault(weight.module, {})[weight.attribute] = shared if torch.equal(shared, own) else own
    return written


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names, in the plain model, of parameters that share one tensor."""
    names: dict[int, list[str]] = {}
    for name, value in stored_tensors(model).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(id(value), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def check_written_out(model: nn.Module) -> None:
    """Raise a sentence where a filter is part of another parametrisation, which baking would pass over."""
    for prefix, module in model.named_modules():
        lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
        for attribute, steps in lists.items():
            for step in steps:
                if not isinstance(step, FilteredWeight) and any(isinstance(p, FilteredWeight) for p in step.modules()):
                    raise SoftEquivError(
                        f"{dotted(prefix, attribute)} is made by {type(step).__name__}, of which a "
                        "filter is only a part, so baking cannot write it out; do that first, for residual pathways "
                        "by softequiv.baselines.merged(model)"
                    )


def refuse_left_behind(model: nn.Module) -> None:
    """Raise a sentence where a weight in project mode was changed and not projected: the model is not what it says."""
    for weight in projected_weights(model):
        distance = left_behind(weight)
        if distance > OFF + 2 * torch.finfo(weight.stored.dtype).eps:
            raise SoftEquivError(
                f"{weight.name} is {distance:.2g} of its norm away from what its gain admits: it was loaded, averaged "
                "or trained without hold(model, optimizer); project(model) puts it there, which changes the model"
            )


def outputs(model: nn.Module, example: Any) -> Tensor | None:
    """All tensors that a model returns in eval mode, flattened into one."""
    if example is None:
        return None
    with evaluating(model):
        try:
            result: Any = model(**example) if isinstance(example, Mapping) else model(example)
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as problem:
            raise SoftEquivError(
                f"the model cannot take the example ({type(problem).__name__}: {' '.join(str(problem).split())}); give "
                "one that it was made for"
            ) from problem
    if isinstance(result, Tensor):
        result = [result]
    values = result.values() if isinstance(result, Mapping) else result
    tensors = [value.flatten().float() for value in values if isinstance(value, Tensor)]
    return torch.cat(tensors) if tensors else None


def unparametrize(module: nn.Module, weights: dict[str, nn.Parameter]) -> None:
    """Replace the parametrised weights of one module by these plain parameters.

    torch's own removal edits the dynamic class, which a deep copy shares with its original; here only the instance
    changes.
    """
    lists: Any = module.parametrizations
    for attribute, steps in lists.items():
        if len(steps) > 1 or not isinstance(steps[0], FilteredWeight):
            raise SoftEquivError(
                f"{type(module).__name__}.{attribute} has other parametrisations; remove them before baking"
            )
    order = max((steps[0].order for steps in lists.values()), key=len)  # as it was before the first was parametrised
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    every = {**module._parameters, **weights}
    module._parameters.clear()
    for name in sorted(every, key=order.index):
        module.register_parameter(name, every[name])
