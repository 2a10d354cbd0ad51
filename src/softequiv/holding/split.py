"""How is a target of the whole network shared out among its layers? So that the last bit of error costs each of them
alike, at the level where the measured network meets the target.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.adapt.plan import Planned, plan, range_of
from softequiv.errors import SoftEquivError
from softequiv.gains import least_distortion
from softequiv.measure.answers import asked, at_home, evaluating
from softequiv.measure.functional import kl_divergence
from softequiv.reps import Action
from softequiv.spectrum import spectrum

BATCH = 256
HALVINGS = 12  # of the logarithm of the price, between no limit and the tightest
TIGHTEST = 1e-3  # of what a weight's error is now
SMALLEST = 1e-30
LARGEST = 1.999  # an error target lies below 2


def split_target(
    model: nn.Module,
    target: float,
    x: Tensor,
    moves: Moves,
    within: float | str,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> dict[str, float]:
    """Errors {weight: eta} for which a plain classifier, softened by them, has E = mean KL[F(x) || F(g x)] at `target`.

    Let e_l be the certified error of weight l within the range, E the network's error on x (N, ...), E_-l that without
    the moving part of weight l (W becomes P_0 W), E_+l that with it alone, E_0 that without any. To first order, weight
    l contributes c_l = ((E - E_-l) + (E_+l - E_0)) / 2, for two weights exactly (Shapley), and d_l = mean KL[F || F_-l]
    is what its moving part means for the answers. Then eta_l = t_l e_l with

        min -sum_l d_l log t_l   where   sum_l c_l t_l <= level:    t_l = min(1, d_l / (price c_l)),

    so that all limited weights pay the same marginal cost per error. The price is found by bisection such that the
    softened network, measured, meets the target: first order decides between the weights, not on the level. It holds
    before training; what training does to it is another matter (`HeldByMeasurement`). 2 L + 14 measurements of two
    forward passes over x, on a copy of the model.

    >>> import softequiv as se
    >>> from softequiv.actions import Pictures
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> x, moves = 20 * torch.randn(64, 1, 8, 8), Moves(Pictures(), se.C(4))
    >>> errors = split_target(net, 1e-3, x, moves, se.degrees(90))
    >>> list(errors), all(error > 0 for error in errors.values())
    (['0.weight', '2.weight'], True)
    """
    if not (isinstance(target, (int, float)) and 0 < target < math.inf):
        raise SoftEquivError(
            f"the target is a finite KL above 0, in nats; got {target!r}: for 0, soften with softness=0"
        )
    reach = range_of(within)
    chosen = plan(model, moves.group, error=1.0, within=reach, only=only, skip=skip, grids=grids, action=action).weights
    twin = copy.deepcopy(model)
    with evaluating(twin):
        network = _Network(twin, chosen, at_home(twin, x), moves, float(reach or 0))
        whole = network.error()
        if whole <= target:
            return network.errors([1.0] * len(chosen))
        contributions, costs = network.sensitivities(whole)
        return network.errors(_level(network, contributions, costs, target))


def _level(network: _Network, contributions: list[float], costs: list[float], target: float) -> list[float]:
    """The shares t_l at the lowest price whose measured error is at most the target."""
    least = max(TIGHTEST * sum(contributions), SMALLEST)
    ratios = [cost / max(part, least) for cost, part in zip(costs, contributions, strict=True)]

    def shares(log_price: float) -> list[float]:
        return [min(1.0, max(TIGHTEST, ratio / math.exp(log_price))) for ratio in ratios]

    low, high = (math.log(max(end, SMALLEST)) for end in (min(ratios), max(ratios) / TIGHTEST))
    network.limit(shares(high))
    left = network.error()
    if left > target:
        raise SoftEquivError(
            f"with every weight at its tightest the network's error is still {left:.3g}, above the target {target:g}: "
            "the rest comes from weights that are not filtered, or from resampling; measure.attribute tells where"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        network.limit(shares(middle))
        low, high = (low, middle) if network.error() <= target else (middle, high)
    return shares(high)


class _Network:
    """A copy of the model whose weights are changed, and measured."""

    def __init__(self, model: nn.Module, chosen: tuple[Planned, ...], x: Tensor, moves: Moves, within: float) -> None:
        self.model, self.chosen, self.x, self.moves, self.within = model, chosen, x, moves, within
        self.places = [model.get_parameter(weight.found.name) for weight in chosen]
        self.plain = [place.detach().clone() for place in self.places]
        self.views = [w.soft.layout.read(value, w.soft.rep) for w, value in zip(chosen, self.plain, strict=True)]
        self.own = [spectrum(w.soft.rep).error(view, within) for w, view in zip(chosen, self.views, strict=True)]
        self.numbers = moves.cycle(0, len(x))

    def answers(self, x: Tensor) -> Tensor:
        """F(x), in batches."""
        return torch.cat([asked(self.model, part) for part in x.split(BATCH)])

    def error(self) -> float:
        """mean KL[F(x) || F(g x)]."""
        return float(kl_divergence(self.answers(self.x), self.answers(self.moves(self.x, self.numbers)), 1).mean())

    def write(self, number: int, view: Tensor) -> None:
        """Give a weight other values on its group axes."""
        soft = self.chosen[number].soft
        self.places[number].copy_(soft.layout.write(self.plain[number], view, soft.rep))

    def still(self, number: int) -> Tensor:
        """P_0 W."""
        of = spectrum(self.chosen[number].soft.rep)
        return of.scale(self.views[number], (of.levels == 0).to(self.views[number]))

    def limit(self, shares: list[float]) -> None:
        """The nearest weights with these shares of their errors."""
        for number, (weight, view, eta) in enumerate(
            zip(self.chosen, self.views, self.errors(shares).values(), strict=True)
        ):
            self.write(number, least_distortion(eta, self.within)(view, weight.soft.rep))

    def errors(self, shares: list[float]) -> dict[str, float]:
        """{weight: share of its own error}, as error targets can be."""
        named = zip(self.chosen, self.own, shares, strict=True)
        return {w.found.name: min(max(own * share, TIGHTEST**2), LARGEST) for w, own, share in named}

    def sensitivities(self, whole: float) -> tuple[list[float], list[float]]:
        """c_l and d_l of every weight."""
        numbers = range(len(self.chosen))
        without, costs, answers = [], [], self.answers(self.x)
        for number in numbers:
            self.write(number, self.still(number))
            without.append(self.error())
            costs.append(float(kl_divergence(answers, self.answers(self.x), 1).mean()))
            self.write(number, self.views[number])
        for number in numbers:
            self.write(number, self.still(number))
        none, alone = self.error(), []
        for number in numbers:
            self.write(number, self.views[number])
            alone.append(self.error())
            self.write(number, self.still(number))
        parts = [max(0.0, (whole - a + b - none) / 2) for a, b in zip(without, alone, strict=True)]
        return parts, costs
