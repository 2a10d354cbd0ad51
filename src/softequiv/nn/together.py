"""How are all weights filtered at once, before a forward pass uses them?

Filtering a weight at its access takes one small operation, or some 150 to solve an equation where it has an error
target. A GPU takes longer to launch them than to run them, so those of all weights are batched here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.gains import Cone
from softequiv.nn.hooks import GoesWithFilters, Hooks, without_hooks
from softequiv.nn.several import Sharing, nearest_in_cones, sharing, through_linear
from softequiv.nn.weight import FilteredWeight, Fitted, SoftWeight, soft_weights
from softequiv.spectrum import Filter
from softequiv.spectrum.base import traced_or_transformed


def filtered_together(model: nn.Module) -> Hooks:
    """Filter all weights in "parametrize" mode at once at the start of each forward pass; `soften` arranges this.

    Values and gradients are the same as with a filter at each access. That is still used outside a pass of this very
    module (when a part of it is called alone), in passes that are compiled, traced or transformed, and where several
    processes train together, since DDP sends each gradient as soon as it is ready. What is written through a
    parameter's `.data` during a pass counts from the next pass on. Returns hooks; their `remove()` undoes it.

    >>> from softequiv import SO, scalar, vector
    >>> from softequiv.nn import SoftLinear
    >>> space = 4 * scalar(SO(3)) + 4 * vector(SO(3))
    >>> net = nn.Sequential(SoftLinear(space, space), SoftLinear(space, space))
    >>> x = torch.randn(5, space.dim)
    >>> apart = net(x)
    >>> hooks = filtered_together(net)
    >>> torch.allclose(net(x), apart, atol=1e-6)
    True
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile returns filters in its own graph
    at_once = AtOnce(weight for weight in soft_weights(model) if weight.filtered.mode == "parametrize")
    without_hooks(model, lambda hook: isinstance(hook, AtOnce))  # which may know fewer weights
    if not at_once.chains:
        return Hooks(())
    return Hooks((model.register_forward_pre_hook(at_once), model.register_forward_hook(at_once, always_call=True)))


class AtOnce(GoesWithFilters):
    """The hook of `filtered_together`, called before a pass, and with its result after it."""

    def __init__(self, weights: Iterable[SoftWeight]) -> None:
        self.chains: list[tuple[Any, FilteredWeight]] = []  # a weight's list of parametrisations, and ours in it
        for weight in weights:
            lists: Any = weight.module.parametrizations
            if lists[weight.attribute][0] is weight.filtered:  # nothing comes before it
                self.chains.append((lists[weight.attribute], weight.filtered))
        self.under_way = False
        # `fitted` of the weights, and their groups; assigned in one step, as other threads may regroup at the same time
        self.grouped: tuple[list[Fitted], list[Sharing]] = ([], [])

    def __call__(self, model: nn.Module, inputs: Any, *result: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled pass filters in its own graph
            return
        if result:
            self.under_way = False
            for _, filtered in self.chains:
                filtered.ready.end(self)
        elif not (traced_or_transformed() or trained_by_several()):
            self.under_way = True
            self.prepare()

    def prepare(self) -> None:
        """Filter all weights for this pass."""
        thetas: list[Tensor] = []
        linear: list[tuple[FilteredWeight, Fitted, Filter]] = []
        cones: dict[torch.device, list[tuple[FilteredWeight, Fitted, Tensor, Cone]]] = {}
        recording = torch.is_grad_enabled()
        for chain, filtered in self.chains:
            theta: Tensor = chain.original
            whole = not hasattr(theta, "full_tensor") and not theta.is_inference()  # not sharded, and has a version
            learns = theta.requires_grad or not recording  # a frozen weight takes no part in a recorded operation
            fitted = filtered.fitted
            fits = (theta.dtype, theta.device) == fitted
            if not (whole and learns and fits) or filtered.ready.during_another(self):
                continue
            apply = filtered.filter
            if isinstance(apply, Filter):
                if apply.side != "identity":
                    thetas.append(theta)
                    linear.append((filtered, fitted, apply))
            elif isinstance(apply, Cone):
                cones.setdefault(theta.device, []).append((filtered, fitted, theta, apply))
        if linear:
            weights = _Linear.apply(self.grouping(linear, thetas), *thetas)  # type: ignore[no-untyped-call]
            for theta, (filtered, fitted, _), weight in zip(thetas, linear, weights, strict=True):
                filtered.ready.fill(weight, theta, fitted, self)
        for members in cones.values():
            found = nearest_in_cones((cone, theta, filtered.soft) for filtered, _, theta, cone in members)
            for (filtered, fitted, theta, _), weight in zip(members, found, strict=True):
                filtered.ready.fill(weight, theta, fitted, self)

    def grouping(
        self, linear: Sequence[tuple[FilteredWeight, Fitted, Filter]], thetas: Sequence[Tensor]
    ) -> list[Sharing]:
        """Which of these weights go together: remembered, as finding out takes longer than filtering them."""
        own = [fitted for _, fitted, _ in linear]
        known, filters = self.grouped
        if len(own) != len(known) or any(map(operator.is_not, own, known)):
            filters = sharing(
                (apply, filtered.soft, theta.numel(), *fitted)
                for (filtered, fitted, apply), theta in zip(linear, thetas, strict=True)
            )
            self.grouped = own, filters
        return filters


def trained_by_several() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class _Linear(torch.autograd.Function):
    """Many weights through their linear filters. Each filter is its own transpose, so nothing is saved for backward."""

    @staticmethod
    def forward(ctx: Any, filters: list[Sharing], *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.filters = filters
        ctx.set_materialize_grads(False)  # a weight that no loss uses has no gradient
        return tuple(through_linear(weights, filters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not traced_or_transformed():
            return (None, *_Linear.apply(ctx.filters, *gradients))  # type: ignore[no-untyped-call]
        return (None, *through_linear(gradients, ctx.filters))
