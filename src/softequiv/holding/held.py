"""How does training keep the whole network at its target? By a price on the measured error, which rises while the error
is above the target and falls to nothing below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributed, nn

from softequiv.actions import Acts, Moves, Still
from softequiv.asking.answers import tensor_of
from softequiv.baselines.penalty import Divergence, Penalised
from softequiv.errors import SoftEquivError, checked_amount, checked_number

MEMORY = 0.9  # of the running error, per measurement
STEEPEST = 1.0  # an error of twice the target or more raises the price no faster: it has a long way to fall back
STATE = ("level", "error", "calls")


class HeldByMeasurement:
    """A training objective that holds the error of the answers at a target, by a primal-dual multiplier:

        min_theta max_{price >= 0}  loss(F(x), y) + price * (e - target),   e = mean D(F(g x), g F(x)),
        level <- max(0, level + rate * over),   price = max(0, level + over),   over = min(error / target - 1, 1)

    at each measurement, with `error` the running mean of e and D as in `Penalised`: "kl" of class scores, as iErr has
    it, or "squared", which answers of any other kind need.
    The price multiplies a penalty. It starts at 1, which is natural if loss and D are both in nats or both squares,
    follows the present error at once, and integrates what remains slowly. An error below the target soon costs nothing.
    The error is measured at every step, on the first `share` of the batch, whose moved copies go through the model
    together with the batch: 1 + share forward passes. A smaller share is cheaper and costs accuracy. Measuring little
    at every step works better than much at some, as gradient clipping and Adam both shrink a rare large term.

    `outputs` says how answers move: not at all by default, as class scores; `Pictures()` for maps, as in segmentation.
    `targets` says how targets move: `Still()` for classes. With it, the loss is also taken on the moved samples, which
    are computed anyway: augmentation and a held target in one.

    The error is that of training batches, in training mode; the error on unseen data must be measured on them. Batch
    norms see upright and moved samples in one batch, so their statistics add nothing to the error; dropout does.

    `level`, the running `error` and the number of `calls` are its state: `state_dict` and `load_state_dict` carry it
    over an interruption. Several processes share one price, that of their mean error.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> held = HeldByMeasurement(Moves(Pictures(), C(4)), target=0.1)
    >>> net, x, y = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), 9 * torch.randn(64, 1, 2, 2), torch.zeros(64).long()
    >>> objective = held(net, x, y, nn.functional.cross_entropy)
    >>> held.price > 0, held.error > held.target
    (True, True)
    """

    def __init__(
        self,
        moves: Moves,
        target: float,
        *,
        share: float = 1.0,
        rate: float = 0.03,
        divergence: Divergence = "kl",
        outputs: Acts | None = None,
        targets: Acts | None = None,
    ) -> None:
        nothing = "; for an error of 0, constrain the weights (softness=0)"
        if not isinstance(moves, Moves):
            raise SoftEquivError(
                f"samples are moved by Moves(acts, group), such as Moves(Pictures(), 'C4'); got {str(moves)[:60]!r}, a "
                f"{type(moves).__name__}"
            )
        self.moves = moves
        self.target = float(checked_amount(target, "the target", positive=True, remedy=nothing))
        self.rate = checked_amount(rate, "the rate", positive=True)
        self.share = float(checked_number(share, "share", SoftEquivError))
        if not 0 < self.share <= 1:
            raise SoftEquivError(f"share is the part of a batch that is measured, above 0 and up to 1; got {share!r}")
        self._measured = Penalised(moves, 1.0, Still() if outputs is None else outputs, divergence)
        self._targets = None if targets is None else moves.on(targets)
        self.level, self.error, self.calls = 0.0, math.nan, 0

    def __repr__(self) -> str:
        return f"HeldByMeasurement(target={self.target:g}, price={self.price:.3g}, error={self.error:.3g})"

    @property
    def over(self) -> float:
        """By which part of the target the running error is above it; `fit` keeps weights for which that is little."""
        return self.error / self.target - 1

    @property
    def price(self) -> float:
        """What a unit of the error costs now, in units of the loss."""
        return 0.0 if self.calls == 0 else max(0.0, self.level + min(self.over, STEEPEST))

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        moved, chosen = self._moved(x, generator)
        answers = tensor_of(model(torch.cat([x, moved])))
        learnt, known = answers[: len(x)], y
        if self._targets is not None:
            learnt, known = answers, torch.cat([y, self._targets(y[: len(moved)], chosen)])
        return loss(learnt, known) + self._priced(answers[: len(moved)], answers[len(x) :], chosen)

    def term(self, model: nn.Module, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The term that a training loop of your own adds to its loss, once a step. It evaluates the measured share
        again, upright and moved: 1 + 2 share forward passes in all.
        """
        moved, chosen = self._moved(x, generator)
        answers = tensor_of(model(torch.cat([x[: len(moved)], moved])))
        return self._priced(answers[: len(moved)], answers[len(moved) :], chosen)

    def _moved(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The measured samples, moved, and by what."""
        if not len(x):
            raise SoftEquivError(f"a batch of {tuple(x.shape)} has no sample on which to measure; leave it out")
        count = math.ceil(self.share * len(x))
        chosen = self.moves.draw(count, generator)
        return self.moves(x[:count], chosen), chosen

    def _priced(self, answers: Tensor, moved_answers: Tensor, chosen: Tensor) -> Tensor:
        """Measure, let the price follow, and charge it."""
        error = self._measured.penalty(answers, moved_answers, chosen)
        self._follow(_mean_over_processes(error))
        if self.price == 0:
            return error.new_zeros(())
        return self.price * (error - self.target)

    def _follow(self, error: float) -> None:
        """The state after a measurement."""
        self.calls += 1
        if not math.isfinite(error):
            raise SoftEquivError(
                f"the measured error became {error} at call {self.calls}; lower the learning rate, or clip gradients"
            )
        self.error = error if math.isnan(self.error) else MEMORY * self.error + (1 - MEMORY) * error
        self.level = max(0.0, self.level + self.rate * min(self.over, STEEPEST))

    def state_dict(self) -> dict[str, Tensor]:
        """Level, running error and calls, as float64."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        if set(state) != set(STATE):
            raise SoftEquivError(f"the state of a held target has {', '.join(STATE)}; got {', '.join(state) or 'none'}")
        self.level, self.error, self.calls = float(state["level"]), float(state["error"]), int(state["calls"])


def _mean_over_processes(error: Tensor) -> float:
    """The mean of what each process of a distributed training measured."""
    value = error.detach().double()
    if distributed.is_available() and distributed.is_initialized():
        value = value.clone()
        distributed.all_reduce(value)
        value /= distributed.get_world_size()
    return float(value)
