"""How are several small networks trained at once? Stacked into one, each on data of its own.

A step of a small network is mostly overhead, which stacked networks share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from softequiv.tasks.base import Examples, Held
from softequiv.tasks.regression import Regression


class SideBySide(nn.Module):
    """Networks of one architecture as one: (N, networks, ...) to (N, networks, ...), network i given its own inputs.

    A mean loss over all answers trains each as if it were alone, since no parameter is shared.

    >>> both = SideBySide([nn.Linear(3, 2), nn.Linear(3, 2)])
    >>> x = torch.randn(5, 2, 3)
    >>> torch.allclose(both(x)[:, 1], both.apart()[1](x[:, 1]), atol=1e-6)
    True
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks).requires_grad_(False)
        stacked, _ = torch.func.stack_module_state(list(networks))
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(stacked[name].detach()) for name in self.names)

    def forward(self, x: Tensor) -> Tensor:
        first = self.networks[0]

        def one(values: dict[str, Tensor], own: Tensor) -> Tensor:
            answers: Tensor = torch.func.functional_call(first, values, (own,))
            return answers

        values = dict(zip(self.names, self.stacked, strict=True))
        answers: Tensor = torch.vmap(one, in_dims=(0, 1), out_dims=1)(values, x)
        return answers

    @torch.no_grad()
    def apart(self) -> list[nn.Module]:
        """The networks, each with the parameters it has now."""
        for number, own in enumerate(self.networks):
            parameters = dict(own.named_parameters())
            for name, values in zip(self.names, self.stacked, strict=True):
                parameters[name].copy_(values[number])
        return list(self.networks)


def together(tasks: Sequence[Regression]) -> Regression:
    """Several draws of one problem as one: example i holds the i-th of each, for `SideBySide`."""

    def stacked(examples: Iterable[Examples]) -> Held:
        inputs, targets = zip(*(one.batch(torch.arange(len(one))) for one in examples), strict=True)
        return Held(torch.stack(inputs, 1), torch.stack(targets, 1))

    return replace(
        tasks[0],
        train=stacked(task.train for task in tasks),
        validation=stacked(task.validation for task in tasks),
        test=stacked(task.test for task in tasks),
    )
