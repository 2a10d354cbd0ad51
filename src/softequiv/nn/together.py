"""What if all weights were filtered at once, before they are used?

At each access a weight is filtered by itself: by one small operation, or, where it has an error target, by some 150
that solve an equation. Telling a GPU of them takes longer than doing them. Here those of all weights are done together,
and between two steps, when the GPU is busy with what it was told before.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from softequiv.gains import Cone
from softequiv.nn.weight import FilteredWeight, Sharing, nearest_in_cones, sharing, soft_weights, through_linear
from softequiv.spectrum import Filter


def filtered_together(model: nn.Module) -> FilteredTogether:
    """A context in which all weights in "parametrize" mode have been filtered, together, and are again after each step
    of an optimiser: put it around a training.

    Values and gradients are those without it, but that a weight with an error target which no loss uses has a gradient
    of 0. Several forward passes may come before a backward pass; a second backward pass before the next step solves for
    error targets at each access. Activations are checkpointed with `use_reentrant=False`. A weight whose Theta or gain
    changes inside is filtered at each access, until the next step; only what is written through `theta.data` goes
    unseen. Compiled models filter in their own graph and gain nothing.

    >>> import softequiv as se
    >>> layers = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 5))
    >>> net = se.soften(layers, "SO(2)", error=0.1, within=se.degrees(30))
    >>> optimizer = torch.optim.AdamW(net.parameters())
    >>> with filtered_together(net):
    ...     for x in torch.randn(2, 1, 3, 16, 16):
    ...         net(x).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    """
    return FilteredTogether(model)


class FilteredTogether:
    """The context of `filtered_together`."""

    def __init__(self, model: nn.Module) -> None:
        self.chains: list[tuple[Any, FilteredWeight]] = []  # a weight's list of parametrisations, and ours in it
        for weight in soft_weights(model):
            if weight.filtered.mode == "parametrize":
                lists: Any = weight.module.parametrizations
                if lists[weight.attribute][0] is weight.filtered:  # nothing comes before it
                    self.chains.append((lists[weight.attribute], weight.filtered))
        self.hook: RemovableHandle | None = None
        self.filters: list[Sharing] = []
        self.grouped: list[tuple[torch.dtype, torch.device]] = []  # `fitted` of the weights that these filters are for

    def __enter__(self) -> None:
        if self.hook is None and not torch.compiler.is_compiling():
            self.prepare()
            self.hook = register_optimizer_step_post_hook(self.after_step)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Prepare again where an optimiser may have changed a weight; a fused one leaves no trace in its version."""
        own = {id(chain.original) for chain, _ in self.chains}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self.prepare()

    def prepare(self) -> None:
        """Filter all weights for their next use."""
        self.forget()
        thetas: list[Tensor] = []
        linear: list[tuple[FilteredWeight, Filter]] = []
        cones: dict[torch.device, list[tuple[Tensor, FilteredWeight]]] = {}
        recording = torch.is_grad_enabled()
        for chain, filtered in self.chains:
            theta: Tensor = chain.original
            whole = not hasattr(theta, "full_tensor") and not theta.is_inference()  # not sharded, and with a version
            learns = theta.requires_grad or not recording  # the frozen have no part in a recorded table
            fits = (theta.dtype, theta.device) == filtered.fitted
            if not (whole and learns and fits):
                continue
            apply = filtered.filter
            if isinstance(apply, Filter):
                if apply.side != "identity":
                    thetas.append(theta)
                    linear.append((filtered, apply))
            elif isinstance(apply, Cone):
                cones.setdefault(theta.device, []).append((theta, filtered))
        if linear:
            weights = _Linear.apply(self.grouping(linear), *thetas)  # type: ignore[no-untyped-call]
            for theta, (filtered, _), weight in zip(thetas, linear, weights, strict=True):
                filtered.ready.fill(weight, theta, filtered.fitted)
        for members in cones.values():
            for (theta, filtered), weight in zip(members, nearest_in_cones(members), strict=True):
                filtered.ready.fill(weight, theta, filtered.fitted)
                if weight.requires_grad:  # what was recorded serves one backward pass
                    weight.register_hook(lambda _, spent=filtered.ready: spent.clear())

    def grouping(self, linear: Sequence[tuple[FilteredWeight, Filter]]) -> list[Sharing]:
        """Which of these weights go together; to find that out takes longer than to filter them."""
        fitted = [filtered.fitted for filtered, _ in linear]
        if len(fitted) != len(self.grouped) or any(map(operator.is_not, fitted, self.grouped)):
            self.grouped = fitted
            self.filters = sharing((apply, filtered.soft, *filtered.fitted) for filtered, apply in linear)
        return self.filters

    def forget(self) -> None:
        """Filter at each access from now on."""
        for _, filtered in self.chains:
            filtered.ready.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget()
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class _Linear(torch.autograd.Function):
    """Many weights through their linear filters; each filter is its own transpose, so nothing is kept for gradients."""

    @staticmethod
    def forward(ctx: Any, filters: list[Sharing], *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.filters = filters
        ctx.set_materialize_grads(False)  # a weight that no loss uses has no gradient
        return tuple(through_linear(weights, filters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_Linear.apply(ctx.filters, *gradients))  # type: ignore[no-untyped-call]
