"""What if breaking the symmetry costs something? Training with a penalty on the equivariance error of the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from softequiv.actions import Acts, Moves, Pictures, Still
from softequiv.asking import kl_divergence
from softequiv.asking.answers import tensor_of
from softequiv.asking.scores import check_class_scores
from softequiv.errors import SoftEquivError, checked_amount

Divergence = Literal["squared", "kl"]


@dataclass(frozen=True)
class Penalised:
    """A training objective: loss(F(x), y) + strength * mean D(F(g x), g F(x)), an element drawn for each sample.

    Elhag et al. 2024, "Relaxed equivariance via multitask learning", with a constant strength instead of weights that
    follow the gradients' sizes. D compares vectors of answers: (N, K) along K, pixel scores (N, K, H, W) along K,
    forecasts (N, steps, d) along d. It is

        squared:  ||F(g x) - g F(x)||^2                 kl:  KL[softmax(g F(x)) || softmax(F(g x))], as iErr does;

    the mean is over samples and over what stays inside the frame, so a strength means the same at all sizes. Kim et al.
    2023, "Regularizing towards soft equivariance under mixed symmetries", put such a penalty on the layers instead.
    Two forward passes, and none is spent on a strength of 0, which is plain training bit for bit.

    >>> from softequiv import C
    >>> mean = lambda answers, targets: (answers - targets).square().mean()
    >>> x, moves = torch.randn(2, 1, 3, 3), Moves(Pictures(), C(4))
    >>> penalised = Penalised(moves, strength=10.0, outputs=Pictures())
    >>> penalised(nn.Identity(), x, x, mean)  # commutes with all turns, and is right
    tensor(0.)
    """

    moves: Moves
    strength: float
    outputs: Acts = field(default=Still())
    divergence: Divergence = "squared"

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", checked_amount(self.strength, "the strength of a penalty"))
        if self.divergence not in get_args(Divergence):
            raise SoftEquivError(
                f"unknown divergence {self.divergence!r}; choose one of {', '.join(get_args(Divergence))}"
            )

    @cached_property
    def _answers(self) -> Moves:
        return self.moves.on(self.outputs)  # kept, as a pool is stacked once

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        answers = tensor_of(model(x))
        if self.strength == 0:
            return loss(answers, y)
        chosen = self.moves.draw(len(x), generator)
        moved_answers = tensor_of(model(self.moves(x, chosen)))
        return loss(answers, y) + self.strength * self.penalty(answers, moved_answers, chosen)

    def penalty(self, answers: Tensor, moved_answers: Tensor, chosen: Tensor) -> Tensor:
        """mean D(F(g x), g F(x)) of F(x) and F(g x), g the elements of the chosen numbers."""
        outputs = self._answers
        if isinstance(self.outputs, Pictures) and answers.ndim != 4:
            raise SoftEquivError(f"answers that turn as pictures are (N, K, H, W); got {tuple(answers.shape)}")
        if isinstance(self.moves.acts, Pictures) and isinstance(self.outputs, Still) and answers.ndim == 4:
            raise SoftEquivError(
                f"answers of {tuple(answers.shape)} are maps, which move as the pictures do, and were to stand still; "
                "say how they move with outputs=..., such as Pictures(), or flatten them where they are no maps"
            )
        if self.divergence == "kl":
            check_class_scores(answers, self.outputs)
        expected, axis = outputs(answers, chosen), 1 if isinstance(self.outputs, Pictures) else -1
        if self.divergence == "kl":
            found = kl_divergence(expected, moved_answers, axis)
        else:
            found = (moved_answers - expected).square().sum(axis)
        inside = outputs.valid(answers, chosen)
        if inside is None:
            return found.mean()
        real = inside if isinstance(self.outputs, Pictures) else inside.squeeze(-1)
        if real.shape != found.shape:
            raise SoftEquivError(
                f"answers are vectors along their last axis, of which {self.outputs} must mask each as a whole, "
                f"{(*found.shape, 1)}; got a mask of {tuple(inside.shape)}: maps (N, K, H, W) move by Pictures()"
            )
        return (found * real).sum() / real.sum().clamp(min=1)
