"""How does training keep the whole network at its target? By a price on the measured error, which rises while the error
is above the target and falls to nothing below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, distributed, nn

from softequiv.actions import Acts, Moves, Still
from softequiv.asking.answers import in_eval_mode, tensor_of
from softequiv.baselines.penalty import Divergence, Penalised
from softequiv.errors import SoftEquivError, check_amount

MEMORY = 0.9  # of the running error, per measurement
STEEPEST = 1.0  # an error of twice the target or more raises the price no faster: it has a long way to fall back
STATE = ("price", "error", "calls")


class HeldByMeasurement:
    """A training objective that holds the error of the answers at a target, by a primal-dual multiplier:

        min_theta max_{price >= 0}  loss(F(x), y) + price * (e / target - 1),   e = mean D(F(g x), g F(x)),
        price <- max(0, price + rate * min(e / target - 1, 1))                  at each measurement,

    with D as in `Penalised`: "kl" as iErr has it, or "squared". The price is in units of the loss, and so means the
    same for every target and divergence; an error below the target costs nothing, and training is then plain. The error
    is measured at every call, on the first `share` of the batch, upright and moved: 1 + 2 share forward passes a step,
    1.25 by default. A little at every step holds better than much at some: clipping of gradients and Adam both cut a
    rare large term down. Measured are training batches, in evaluation mode: in training mode dropout would add to the
    error, and batch norms would see moved samples by statistics of their own, which the deployed model has not. What
    data not seen in training have must be measured on them.

    `price`, the running mean `error` and the number of `calls` are its state: `state_dict` and `load_state_dict` carry
    it over an interruption. Where there are many processes they share one price, that of their mean error.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> held = HeldByMeasurement(Moves(Pictures(), C(4)), target=0.1, share=0.5)
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
        share: float = 0.125,
        rate: float = 0.05,
        divergence: Divergence = "kl",
        outputs: Acts | None = None,
    ) -> None:
        nothing = "; for an error of 0, constrain the weights (softness=0)"
        check_amount("the target", target, positive=True, remedy=nothing)
        check_amount("the rate", rate, positive=True)
        if not 0 < share <= 1:
            raise SoftEquivError(f"share is the part of a batch that is measured, above 0 and up to 1; got {share!r}")
        self.moves, self.target, self.share, self.rate = moves, float(target), float(share), rate
        self._measured = Penalised(moves, 1.0, Still() if outputs is None else outputs, divergence)
        self.price, self.error, self.calls = 0.0, math.nan, 0

    def __repr__(self) -> str:
        return f"HeldByMeasurement(target={self.target:g}, price={self.price:.3g}, error={self.error:.3g})"

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        return loss(tensor_of(model(x)), y) + self.term(model, x, generator)

    def term(self, model: nn.Module, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What a loop of your own adds to its loss; to be called once a step."""
        self.calls += 1
        count = math.ceil(self.share * len(x))
        chosen = self.moves.draw(count, generator)
        with in_eval_mode(model):
            answers = tensor_of(model(torch.cat([x[:count], self.moves(x[:count], chosen)])))
        error = self._measured.penalty(answers[:count], answers[count:], chosen)
        self._follow(_mean_over_processes(error))
        if self.price == 0:
            return error.new_zeros(())
        return self.price * (error / self.target - 1)

    def _follow(self, error: float) -> None:
        """The price after a measurement."""
        if not math.isfinite(error):
            raise SoftEquivError(
                f"the measured error became {error} at call {self.calls}; lower the learning rate, or clip gradients"
            )
        self.error = error if math.isnan(self.error) else MEMORY * self.error + (1 - MEMORY) * error
        self.price = max(0.0, self.price + self.rate * min(error / self.target - 1, STEEPEST))

    def state_dict(self) -> dict[str, Tensor]:
        """Price, running error and calls, as float64."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        if set(state) != set(STATE):
            raise SoftEquivError(f"the state of a held target has {', '.join(STATE)}; got {', '.join(state) or 'none'}")
        self.price, self.error, self.calls = float(state["price"]), float(state["error"]), int(state["calls"])


def _mean_over_processes(error: Tensor) -> float:
    """The mean of what each process of a distributed training measured."""
    value = error.detach().double()
    if distributed.is_available() and distributed.is_initialized():
        value = value.clone()
        distributed.all_reduce(value)
        value /= distributed.get_world_size()
    return float(value)
