"""What if all weights were filtered at once, before they are used?

At each access a weight is filtered by itself: by one small operation, or, where it has an error target, by some 150
that solve an equation. Telling a GPU of them takes longer than doing them. Here those of all weights are done together,
and between two steps, when the GPU is busy with what it was told before.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from softequiv.gains import Cone
from softequiv.nn.weight import FilteredWeight, Prepared, Soft, nearest_in_cones, soft_weights, through_linear
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
        linear: list[tuple[Tensor, FilteredWeight, Filter]] = []
        cones: dict[torch.device, list[tuple[Tensor, FilteredWeight]]] = {}
        for chain, filtered in self.chains:
            theta: Tensor = chain.original
            whole = not hasattr(theta, "full_tensor") and not theta.is_inference()  # not sharded, and with a version
            learns = theta.requires_grad or not torch.is_grad_enabled()  # the frozen have no part in a recorded table
            fits = (theta.dtype, theta.device) == filtered.fitted
            if not (whole and learns and fits):
                continue
            if isinstance(filtered.filter, Cone):
                cones.setdefault(theta.device, []).append((theta, filtered))
            elif isinstance(filtered.filter, Filter) and filtered.filter.side != "identity":
                linear.append((theta, filtered, filtered.filter))
        if linear:
            filters = [(apply, filtered.soft) for _, filtered, apply in linear]
            weights = _Linear.apply(filters, *(theta for theta, *_ in linear))  # type: ignore[no-untyped-call]
            for (theta, filtered, _), weight in zip(linear, weights, strict=True):
                filtered.ready = Prepared(weight, theta, theta._version, filtered.fitted)
        for members in cones.values():
            for (theta, filtered), weight in zip(members, nearest_in_cones(members), strict=True):
                filtered.ready = Prepared(weight, theta, theta._version, filtered.fitted)
                if weight.requires_grad:  # what was recorded serves one backward pass
                    weight.register_hook(lambda _, spent=filtered: setattr(spent, "ready", None))

    def forget(self) -> None:
        """Filter at each access from now on."""
        for _, filtered in self.chains:
            filtered.ready = None

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
    def forward(ctx: Any, filters: Sequence[tuple[Filter, Soft]], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.filters = filters
        ctx.set_materialize_grads(False)  # a weight that no loss uses has no gradient
        return tuple(through_linear(weights, filters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        found: Sequence[Tensor] = _Linear.apply(  # type: ignore[no-untyped-call]
            [ctx.filters[number] for number in used], *(gradients[number] for number in used)
        )
        by_number = dict(zip(used, found, strict=True))
        return (None, *(by_number.get(number) for number in range(len(gradients))))
