"""What do engineers try first? Training on moved samples, which changes no weight's meaning and promises nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.actions import Moves
from softequiv.errors import SoftEquivError


@dataclass(frozen=True)
class Augmented:
    """A transform of batches: (x_i, y_i) becomes (g_i x_i, g_i y_i), with an element of its own drawn for each sample.

    Simard, Steinkraus and Platt 2003, "Best practices for convolutional neural networks applied to visual document
    analysis", with elements of a group in place of distortions. Any objective can follow; with the task's loss alone
    it costs one forward pass, as plain training does. `targets` moves what is to be answered where it moves with the
    input: labels of pixels, forecasts; it holds the same elements, as `moves.on(...)` does. Without it targets stand
    still.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> x, y = torch.eye(2)[None], torch.tensor([7])
    >>> quarter = Moves(Pictures(), C(4), elements=list(C(4).elements())[1:2])
    >>> Augmented(quarter)(x, y)
    (tensor([[[0., 1.], [1., 0.]]]), tensor([7]))
    """

    moves: Moves
    targets: Moves | None = None

    def __post_init__(self) -> None:
        if self.targets is not None and self.targets.elements != self.moves.elements:
            raise SoftEquivError(
                f"inputs move by {self.moves} and targets by other elements of {self.targets}; make the targets' from "
                "the inputs', such as moves.on(Pictures('nearest', fill=255))"
            )

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        chosen = self.moves.draw(len(x), generator)
        return self.moves(x, chosen), y if self.targets is None else self.targets(y, chosen)
