"""How does a plain module keep its constraints? In mode "project" its stored weights, and their gradients, are filtered
at every step of the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.errors import SoftEquivError
from softequiv.gains import Cone
from softequiv.nn.hooks import Hooks
from softequiv.nn.several import nearest_in_cones, sharing, through_linear
from softequiv.nn.soft import Soft
from softequiv.nn.weight import MARK, FilteredWeight, SoftWeight, replace_stored, soft_weights, whole
from softequiv.spectrum import Filter


@torch.no_grad()
def filter_all(tensors: Iterable[tuple[Tensor, FilteredWeight]]) -> None:
    """Project each tensor onto its own constraint, in place: linear ones of a kind together, and all cones together."""
    linear: list[tuple[Tensor, Filter, Soft]] = []
    cones: dict[torch.device, list[tuple[Cone, Tensor, Soft]]] = {}
    for tensor, filtered in tensors:
        filtered.fit(tensor.dtype, tensor.device)  # a plain module's `to` does not reach its marks
        held = filtered.held
        if isinstance(held, Filter) and held.side == "identity":
            continue
        if hasattr(tensor, "full_tensor") or not isinstance(held, (Cone, Filter)):  # or sharded
            replace_stored(tensor, filtered.projected)
        elif isinstance(held, Cone):
            cones.setdefault(tensor.device, []).append((held, tensor, filtered.soft))
        else:
            linear.append((tensor, held, filtered.soft))
    if linear:
        targets = [tensor for tensor, *_ in linear]
        filters = sharing((held, soft, tensor.numel(), tensor.dtype, tensor.device) for tensor, held, soft in linear)
        torch._foreach_copy_(targets, through_linear(targets, filters))
    for members in cones.values():
        for (_, tensor, _), found in zip(members, nearest_in_cones(members), strict=True):
            tensor.copy_(found)


def left_behind(weight: SoftWeight) -> float:
    """How far a stored weight is from its constraint, relative to its norm: rounding, where it was held."""
    stored = whole(weight.stored.detach())
    stored = stored.to(torch.promote_types(stored.dtype, torch.float32))
    distance, norm = (weight.filtered.projected(stored) - stored).norm(), stored.norm()
    return float(distance / norm) if norm else 0.0


def projected_weights(model: nn.Module) -> list[SoftWeight]:
    """The soft weights of a model that are in project mode."""
    return [weight for weight in soft_weights(model) if weight.filtered.mode == "project"]


def project(model: nn.Module) -> None:
    """Project every stored weight of a model in project mode onto its constraint, in place.

    >>> import softequiv as se
    >>> layer = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0, mode="project")
    >>> _ = layer.weight.data.normal_()
    >>> project(layer)
    >>> torch.allclose(layer.weight, layer.weight.rot90(1, (-2, -1)), atol=1e-6)
    True
    """
    filter_all((weight.stored, weight.filtered) for weight in projected_weights(model))


def project_gradients(weights: Iterable[SoftWeight]) -> None:
    """Remove from each gradient what a linear constraint forbids.

    An optimiser that rescales entries (Adam) would otherwise turn the forbidden part into an allowed one, and end up
    elsewhere than in "parametrize" mode.
    """
    filter_all(
        (weight.stored.grad, weight.filtered)
        for weight in weights
        if weight.stored.grad is not None and not isinstance(weight.filtered.held, Cone)
    )


def hold(model: nn.Module, optimizer: torch.optim.Optimizer) -> Hooks:
    """Keep a model in project mode on its constraints: gradients are projected before each step, weights after it.

    >>> import softequiv as se
    >>> layer = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0, mode="project")
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> held = hold(layer, optimizer)
    """
    weights = projected_weights(model)  # looked up once: a walk over all modules takes longer than the projection
    stepping = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that steps
    refuse_unheld(weights, stepping)

    def still_soft() -> list[SoftWeight]:
        return [w for w in weights if w.module.__dict__.get(MARK, {}).get(w.attribute) is w.filtered]

    def project_now() -> None:
        project_gradients(still_soft())

    before = stepping.register_step_pre_hook(lambda _, args, kwargs: before_step(args, kwargs, project_now))
    after = stepping.register_step_post_hook(lambda *_: filter_all((w.stored, w.filtered) for w in still_soft()))
    return Hooks((before, after))


def before_step(
    args: tuple[Any, ...], kwargs: dict[str, Any], project_now: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Project the gradients that a step will use: those that are there, and those that its closure will make."""
    project_now()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs

    def projected_closure() -> Any:
        loss = closure()
        project_now()
        return loss

    return args[:1], kwargs | {"closure": projected_closure}


def refuse_unheld(weights: Sequence[SoftWeight], optimizer: torch.optim.Optimizer) -> None:
    """Spell out why an optimiser cannot be held to the constraints of these weights."""
    learning = [weight for weight in weights if weight.stored.requires_grad]
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if learning and not any(id(weight.stored) in given for weight in learning):
        raise SoftEquivError(
            f"this optimiser has none of the model's soft weights, such as {learning[0].name}, so nothing would be "
            "held; give the one that was made from model.parameters() after softening and wrapping"
        )
    cones = [weight for weight in weights if isinstance(weight.filtered.held, Cone)]
    if cones and isinstance(optimizer, torch.optim.LBFGS):
        raise SoftEquivError(
            f"LBFGS goes on from weights that it has seen, and the error target of {cones[0].name} moves them between; "
            "soften with mode='parametrize', or use another optimiser"
        )
