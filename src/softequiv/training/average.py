"""What is the average of the weights along a training? a <- d a + (1 - d) W after every step, d growing to a decay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from softequiv.gains import Cone
from softequiv.nn.constraints import filter_all, projected_weights


class Average:
    """An exponential average of all weights and buffers; whole numbers are taken as they are. After t steps the decay
    is min(decay, (1 + t) / (10 + t)): the first weights are forgotten in short trainings too.

    Weights that are held to an error target form a cone, which their averages may leave: these are projected too.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(0.0)
    >>> average = Average(net, 0.75)
    >>> _ = net.weight.data.fill_(1.0)
    >>> average.update(2)
    >>> with average.worn():
    ...     net.weight.item()
    0.75
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.soft = projected_weights(model)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after so many steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, value in self.model.state_dict().items():
            own = self.values[name]
            if own.is_floating_point():
                own.lerp_(value, 1 - decay)
            else:
                own.copy_(value)
        filter_all((self.values[w.name], w.filtered) for w in self.soft if isinstance(w.filtered.held, Cone))

    @contextmanager
    def worn(self) -> Iterator[None]:
        """The model with the average as its weights; its own come back afterwards."""
        self.wear()
        try:
            yield
        finally:
            self.wear()

    @torch.no_grad()
    def wear(self) -> None:
        """Exchange the model's weights with the average."""
        state = self.model.state_dict()
        own = {name: value.detach().clone() for name, value in state.items()}  # all first: names may share a tensor
        for name, value in state.items():
            value.copy_(self.values[name])
        self.values = own
