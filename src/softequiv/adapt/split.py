"""How is a target of the whole network shared out among its weights? So that the last bit of error costs each of them
alike, at the level where the measured network meets the target.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.adapt.find import Found
from softequiv.asking import asked, at_home, evaluating, kl_divergence
from softequiv.errors import SoftEquivError, checked_number
from softequiv.gains import least_distortion
from softequiv.spectrum import spectrum

BATCH = 256
FEW = 8  # elements in a pool, each of which then moves every sample
HALVINGS = 12  # of the logarithm of the price, between no limit and the tightest
TIGHTEST = 1e-3  # of what a weight's error is now
SMALLEST = 1e-30
LARGEST = 1.999  # an error target lies below 2


@dataclass(frozen=True)
class Split:
    """Errors {weight: eta}, and the network's error on the samples before and after softening by them."""

    errors: Mapping[str, float]
    before: float
    after: float


def split(model: nn.Module, found: Sequence[Found], target: float, x: Tensor, moves: Moves, within: float) -> Split:
    """Errors eta_l of the found weights for which a plain classifier has E = mean KL[F(x) || F(g x)] at `target`.

    Let e_l be the certified error of weight l within the range, E the network's error on x (N, ...), E_-l that without
    the moving part of weight l (W becomes P_0 W), E_+l that with it alone, E_0 that without any. To first order, weight
    l contributes c_l = ((E - E_-l) + (E_+l - E_0)) / 2, for two weights exactly (Shapley), and d_l = mean KL[F || F_-l]
    is what its moving part means for the answers. Then eta_l = t_l e_l with

        min -sum_l d_l log t_l   where   sum_l c_l t_l <= level:    t_l = min(1, d_l / (price c_l)),

    so that all limited weights pay the same marginal cost per error. The price is found by bisection such that the
    softened network, measured, meets the target: first order decides between the weights, not on the level.

    Every sample is moved by every element of a pool of up to 8, the identity left out; from larger ones elements are
    drawn for each sample, and more than one where samples are few. 2 L + 15 measurements on a copy of the model, each
    of as many forward passes over x as moves of a sample, and one.
    """
    target = checked_number(target, "the target", SoftEquivError)
    if not 0 < target < math.inf:
        raise SoftEquivError(
            f"the target is a finite KL above 0, in nats; got {target!r}: for 0, soften with softness=0"
        )
    twin = copy.deepcopy(model)
    with evaluating(twin):
        network = _Network(twin, found, at_home(twin, x), moves, within)
        whole = network.error()
        if whole <= target:
            return Split(network.errors([1.0] * len(found)), whole, whole)
        shares, left = _level(network, *network.sensitivities(whole), target)
        return Split(network.errors(shares), whole, left)


def _level(
    network: _Network, contributions: list[float], costs: list[float], target: float
) -> tuple[list[float], float]:
    """The shares t_l at the lowest price whose measured error is at most the target, and that error."""
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
            "the rest comes from weights that are not filtered, or from resampling; attribute(...) tells where"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        network.limit(shares(middle))
        error = network.error()
        low, high, left = (low, middle, error) if error <= target else (middle, high, left)
    return shares(high), left


class _Network:
    """A copy of the model whose weights are changed, and measured."""

    def __init__(self, model: nn.Module, found: Sequence[Found], x: Tensor, moves: Moves, within: float) -> None:
        self.model, self.found, self.x, self.within = model, found, x, within
        self.moved = torch.cat([moves(x, chosen) for chosen in _rounds(moves, len(x))])
        self.plain = [model.get_parameter(weight.name).detach().clone() for weight in found]
        self.places = [value.clone() for value in self.plain]
        for weight, place in zip(found, self.places, strict=True):  # its own, as softening unties what others share
            setattr(model.get_submodule(weight.module), weight.attribute, nn.Parameter(place))
        self.views = [w.layout.read(value, w.rep) for w, value in zip(found, self.plain, strict=True)]
        self.own = [spectrum(w.rep).error(view, within) for w, view in zip(found, self.views, strict=True)]

    def answers(self, x: Tensor) -> Tensor:
        """F(x), (N, K), in batches."""
        y = torch.cat([asked(self.model, part) for part in x.split(BATCH)])
        if y.ndim != 2 or y.shape[1] < 2:
            raise SoftEquivError(
                f"a target of the network is on the KL of class scores (N, K); this model answers with "
                f"{tuple(y.shape)}: give the weights their errors, scope='layer'"
            )
        return y.double()  # targets may be finer than float32

    def error(self) -> float:
        """mean KL[F(x) || F(g x)]."""
        upright, moved = self.answers(self.x), self.answers(self.moved)
        return float(kl_divergence(upright.repeat(len(moved) // len(upright), 1), moved, 1).mean())

    def write(self, number: int, view: Tensor) -> None:
        """Give a weight other values on its group axes."""
        found = self.found[number]
        self.places[number].copy_(found.layout.write(self.plain[number], view, found.rep))

    def still(self, number: int) -> Tensor:
        """P_0 W."""
        of = spectrum(self.found[number].rep)
        return of.scale(self.views[number], (of.levels == 0).to(self.views[number]))

    def limit(self, shares: list[float]) -> None:
        """The nearest weights with these shares of their errors."""
        for number, eta in enumerate(self.errors(shares).values()):
            self.write(number, least_distortion(eta, self.within)(self.views[number], self.found[number].rep))

    def errors(self, shares: list[float]) -> dict[str, float]:
        """{weight: share of its own error}, as error targets can be."""
        named = zip(self.found, self.own, shares, strict=True)
        return {w.name: min(max(own * share, TIGHTEST**2), LARGEST) for w, own, share in named}

    def sensitivities(self, whole: float) -> tuple[list[float], list[float]]:
        """c_l and d_l of every weight."""
        numbers = range(len(self.found))
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


def _rounds(moves: Moves, samples: int) -> list[Tensor]:
    """Which element moves each sample, (samples,), round after round: never the identity, which asks for nothing."""
    moving = torch.tensor([number for number, g in enumerate(moves.elements) if g.length > 0])
    if not len(moving):
        raise SoftEquivError("the moves hold the identity alone, which changes no answer; give other elements")
    if len(moving) <= FEW:
        return [number.expand(samples) for number in moving]
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(moving), (math.ceil(BATCH / samples), samples), generator=generator)
    return list(moving[draws])
