"""What do engineers try first? Training on moved samples, which changes no weight's meaning and promises nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.errors import SoftEquivError
from softequiv.measure.answers import tensor_of


@dataclass(frozen=True)
class Augmented:
    """A training objective: the loss of F(g_i x_i) against g_i y_i, with an element of its own drawn for each sample.

    One forward pass, as in plain training. `targets` moves what is to be answered where it moves with the input:
    labels of pixels, forecasts; it holds the same elements, as `moves.on(...)` does. Without it targets stand still.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> objective = Augmented(Moves(Pictures(), C(4)))
    >>> mean = lambda answers, targets: (answers - targets).square().mean()
    >>> objective(nn.Flatten(), torch.ones(2, 1, 3, 3), torch.zeros(2, 9), mean)
    tensor(1.)
    """

    moves: Moves
    targets: Moves | None = None

    def __post_init__(self) -> None:
        if self.targets is not None and self.targets.elements != self.moves.elements:
            raise SoftEquivError(
                f"inputs move by {self.moves} and targets by other elements of {self.targets}; make the targets' from "
                "the inputs', such as moves.on(Pictures('nearest', fill=255))"
            )

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        chosen = self.moves.draw(len(x), generator)
        moved_targets = y if self.targets is None else self.targets(y, chosen)
        return loss(tensor_of(model(self.moves(x, chosen))), moved_targets)
