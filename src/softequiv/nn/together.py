"""What if the error targets of all weights were solved at once, before they are used?

At each access a weight with an error target solves an equation of its own, by some 150 operations so small that telling
a GPU of them takes longer than doing them. Here the equations of all weights are one table.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from softequiv.gains import Cone
from softequiv.nn.weight import FilteredWeight, Prepared, nearest_in_cones, soft_weights


def solved_together(model: nn.Module) -> SolvedTogether:
    """A context in which the error targets of all weights in "parametrize" mode have been solved for, together: put it
    around the forward passes and the backward pass of a training step.

    Values and gradients are those without it, but that a weight which no loss uses has a gradient of 0. There is one
    backward pass, as the solution is recorded once; activations are checkpointed with `use_reentrant=False`. A weight
    whose Theta or gain changes inside is filtered at each access again; only what is written through `theta.data` goes
    unseen. Keep the context for a whole training: it looks for the weights once. Compiled models solve in their own
    graph and gain nothing.

    >>> import softequiv as se
    >>> layers = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 5))
    >>> net = se.soften(layers, "SO(2)", error=0.1, within=se.degrees(30))
    >>> together = solved_together(net)
    >>> with together:
    ...     net(torch.randn(1, 3, 16, 16)).square().mean().backward()
    """
    return SolvedTogether(model)


class SolvedTogether:
    """The context of `solved_together`."""

    def __init__(self, model: nn.Module) -> None:
        self.chains: list[tuple[Any, FilteredWeight]] = []  # a weight's list of parametrisations, and ours in it
        for weight in soft_weights(model):
            if weight.filtered.mode == "parametrize":
                lists: Any = weight.module.parametrizations
                if lists[weight.attribute][0] is weight.filtered:  # nothing comes before it
                    self.chains.append((lists[weight.attribute], weight.filtered))
        self.hook: RemovableHandle | None = None

    def __enter__(self) -> None:
        if self.hook is not None or torch.compiler.is_compiling():
            return
        cones: dict[torch.device, list[tuple[Tensor, FilteredWeight]]] = {}
        for chain, filtered in self.chains:
            theta: Tensor = chain.original
            whole = not hasattr(theta, "full_tensor") and not theta.is_inference()  # not sharded, and with a version
            learns = theta.requires_grad or not torch.is_grad_enabled()  # the frozen have no part in a recorded table
            fits = (theta.dtype, theta.device) == filtered.fitted
            if whole and learns and fits and isinstance(filtered.filter, Cone):
                cones.setdefault(theta.device, []).append((theta, filtered))
        for members in cones.values():
            for (theta, filtered), weight in zip(members, nearest_in_cones(members), strict=True):
                filtered.ready = Prepared(weight, theta, theta._version, filtered.fitted)
        # a fused optimiser leaves no trace in the version of what it changes
        self.hook = register_optimizer_step_post_hook(lambda *_: self.forget())

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
