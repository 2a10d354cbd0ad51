"""Guarantee first: the nearest weight that changes by at most a given fraction within a given range.

The admissible weights form the cone {W : sum ||w_sigma||^2 c(sigma)^2 <= eta^2 ||W||^2}. The nearest point to Theta is

    gamma(sigma) = 1 / (1 + mu (c(sigma)^2 - eta^2)),   0 <= mu < 1 / (eta^2 - c_min^2),

with one scalar mu for which the target holds with equality. Only the energy per level enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from softequiv.errors import GainError
from softequiv.gains.base import Gain, WeightFilter, settle
from softequiv.reps import Rep
from softequiv.spectrum import Spectrum, spectrum
from softequiv.spectrum.base import is_eager

POINTS, ROUNDS, STEPS = 64, 2, 3  # of the solver: tables, then Newton's method
DERIVATIVES = 2  # that are exact: a Hessian is the last that trainings ask for
ROUNDING = 1e-12  # a weight on the boundary of the cone is inside, and so is a level that just meets the target
LEAST_ERROR = 1e-12  # below it a target is less than the rounding of float64 weights
FARTHEST = 69.0  # log of the largest share 1e30 that the solver can reach


@dataclass(frozen=True)
class Cone:
    """The projection onto weights whose certified change is at most the target, recomputed from each weight.

    Differentiable. A weight inside is returned as it is. Where nothing of a weight lies at admissible levels (c < eta),
    it becomes zero, which is admissible though no nearest point is then unique.
    """

    of: Spectrum
    ratio: Tensor  # (c(sigma) / eta)^2 of each level

    def to(self, dtype: torch.dtype, device: torch.device) -> Cone:
        """The same cone for weights of another dtype or device."""
        return Cone(self.of.to(dtype, device), self.ratio.to(device))

    def __call__(self, weight: Tensor) -> Tensor:
        (found,) = nearest([(self, weight)])
        return found


def nearest(weights: Sequence[tuple[Cone, Tensor]]) -> list[Tensor]:
    """Each weight's nearest one in its cone; all on one device, so that their equations are solved together."""
    if not any(is_eager(weight) for _, weight in weights):
        return Solution.of(weights).weights(weights)
    cones, own = zip(*weights, strict=True)
    return list(_Nearest.apply(cones, *own))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Solution:
    """Coordinates of weights, and the energies, ratios and gains of their levels, a row for each weight."""

    coordinates: list[Tensor]
    energies: Tensor
    ratios: Tensor
    gains: Tensor

    @staticmethod
    def of(weights: Sequence[tuple[Cone, Tensor]]) -> Solution:
        """The equations of these weights, solved."""
        coordinates = [cone.of.analyse(weight) for cone, weight in weights]
        squares = [scaled(y).square() for y in coordinates]
        energies = rows([cone.of.level_sums(own) for (cone, _), own in zip(weights, squares, strict=True)])
        ratios = rows([cone.ratio.to(energies) for cone, _ in weights])
        return Solution(coordinates, energies, ratios, least_distortion_gain(energies, ratios))

    def weights(self, like: Sequence[tuple[Cone, Tensor]]) -> list[Tensor]:
        """The nearest weights."""
        return [
            cone.of.synthesise(y * gamma.to(y.dtype).index_select(0, cone.of.level_of), weight)
            for (cone, weight), y, gamma in zip(like, self.coordinates, self.gains, strict=True)
        ]

    def gradients(self, cones: Sequence[Cone], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of Theta from those of W. With v and y the coordinates of both, a = (r - 1) gamma^2 and e as below,

            gamma v - y a (sum_sigma a (v, y)_sigma) / (sum_sigma e (r - 1)^2 gamma^3),

        as the energies move the solution; inside its cone a weight has gamma = 1 and no second term.
        """
        units = [scaled(y) for y in self.coordinates]
        moved = [None if g is None else cone.of.analyse(g) for cone, g in zip(cones, gradients, strict=True)]
        products = [torch.zeros_like(y) if v is None else v * y for v, y in zip(moved, units, strict=True)]
        pulls = rows([cone.of.level_sums(p) for cone, p in zip(cones, products, strict=True)])
        above = self.ratios - 1
        slopes = above * self.gains.square()
        steep = (self.energies * above.square() * self.gains**3).sum(-1, keepdim=True)
        amounts = (slopes * pulls).sum(-1, keepdim=True) / torch.where(steep > 0, steep, 1.0)
        inside = (self.gains == 1).all(-1, keepdim=True)
        found: list[Tensor | None] = []
        for cone, g, v, y, gamma, change in zip(
            cones, gradients, moved, units, self.gains, torch.where(inside, 0.0, slopes * amounts), strict=True
        ):
            if g is None or v is None:
                found.append(None)
                continue
            own = v * gamma.index_select(0, cone.of.level_of) - y * change.index_select(0, cone.of.level_of)
            found.append(cone.of.synthesise(own.to(v.dtype), g))
        return found


class _Nearest(torch.autograd.Function):
    """Weights that are solved for together, and differentiated each by itself: one that no loss uses has no gradient,
    and losses of separate parts of a model have separate backward passes, as with a filter for each.

    Nothing is saved for it, so that activations which are computed again save as many tensors as the first time.
    """

    @staticmethod
    def forward(ctx: Any, cones: tuple[Cone, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        members = list(zip(cones, weights, strict=True))
        ctx.members, ctx.versions, ctx.solution = members, [w._version for w in weights], Solution.of(members)
        return tuple(ctx.solution.weights(members))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.members[0][1].device.type, enabled=False):
            if torch.is_grad_enabled():
                return (None, *_Nearest.recorded(ctx, gradients))
            return (None, *ctx.solution.gradients([cone for cone, _ in ctx.members], gradients))

    @staticmethod
    def recorded(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients that will be differentiated themselves, from recorded steps."""
        if [weight._version for _, weight in ctx.members] != ctx.versions:
            raise RuntimeError(
                "a weight with an error target was changed in place before its second derivative was taken; take the "
                "optimiser's step after all backward passes"
            )
        used = [n for n, gradient in enumerate(gradients) if gradient is not None and ctx.needs_input_grad[n + 1]]
        found: list[Tensor | None] = [None] * len(gradients)
        members = [ctx.members[n] for n in used]
        if members:
            again, weights = Solution.of(members).weights(members), [weight for _, weight in members]
            own = torch.autograd.grad(again, weights, [gradients[n] for n in used], create_graph=True)
            for n, gradient in zip(used, own, strict=True):
                found[n] = gradient
        return found


def rows(parts: Sequence[Tensor]) -> Tensor:
    """Vectors as the rows of a matrix, filled up with zeros: levels that a weight does not have hold no energy."""
    longest = max(len(part) for part in parts)
    return torch.stack([pad(part, (0, longest - len(part))) if len(part) < longest else part for part in parts])


def scaled(coordinates: Tensor) -> Tensor:
    """Coordinates in float64, up to a common factor."""
    wide = coordinates.double()
    if coordinates.dtype == torch.float64 and wide.numel():  # squares of these may overflow or vanish
        wide = wide / wide.detach().abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    return wide


def least_distortion_gain(energies: Tensor, ratio: Tensor) -> Tensor:
    """gamma = 1 / (1 + x (r - 1)) with r = c^2 / eta^2 and x = mu eta^2 such that sum e (r - 1) gamma^2 = 0, or 1 if
    that sum is negative at gamma = 1; for each row of (..., levels), differentiable in e.

    With y = 1 - x (1 - r_min) in (0, 1), gamma = (1 - r_min) / d where d = r - r_min + y (1 - r) below the target and
    1 - r_min + (1 - y) (r - 1) above it, both free of cancellation. In t = log(y / (1 - y)) no gain changes faster than
    e^t, and the sum grows: tables enclose its root and Newton's method finds it, in a fixed and small number of
    operations, since a GPU takes longer to be told of one than to do it.
    """
    ratio = torch.where((ratio - 1).abs() < ROUNDING, 1 - ROUNDING, ratio)
    present, above = energies > 0, ratio > 1
    lowest = torch.where(present, ratio, torch.inf).amin(-1, keepdim=True)
    reachable = lowest < 1
    room = torch.where(reachable, 1 - lowest, 1.0)
    base = torch.where(above, room, torch.where(present, ratio - 1 + room, 1.0))
    distance, side = (ratio - 1).abs(), torch.where(above, -1.0, 1.0).to(energies)

    def gain(t: Tensor) -> Tensor:
        return room / (base + torch.sigmoid(side * t) * distance)

    pull, push = energies * side * distance, energies.detach() * distance.square()

    def excess(gamma: Tensor) -> Tensor:
        return -(pull * gamma.square()).sum(-1, keepdim=True)

    def slope(gamma: Tensor, t: Tensor) -> Tensor:
        """The derivative of the excess in t."""
        change = torch.sigmoid(t) * torch.sigmoid(-t)
        steep = 2 * (push * gamma**3).sum(-1, keepdim=True) * change / room
        return torch.where(steep > 0, steep, 1.0)

    with torch.no_grad():
        low, width = torch.full_like(room, -FARTHEST), 2 * FARTHEST
        table = torch.linspace(0, 1, POINTS, dtype=room.dtype, device=room.device).view(-1, *[1] * room.ndim)
        for _ in range(ROUNDS):
            below = (excess(gain(low + width * table)) < 0).sum(0)
            width = width / (POINTS - 1)
            low = low + width * (below - 1).clamp(min=0)
        t = low + width / 2
        for _ in range(STEPS):
            gamma = gain(t)
            t = torch.clamp(t - excess(gamma) / slope(gamma, t), low, low + width)
        gamma = gain(t)
        steep = slope(gamma, t)
        inside = excess(torch.ones_like(energies)) <= ROUNDING * energies.sum(-1, keepdim=True)
    # each further step changes nothing but that the solution carries one more derivative with respect to the energies
    for _ in range(DERIVATIVES):
        change = excess(gamma)
        t = t - (change - change.detach()) / steep
        gamma = gain(t)
    found = torch.where(present & reachable, gamma, 0.0)
    return torch.where(inside, torch.ones_like(energies), found)


@dataclass(frozen=True)
class LeastDistortion(Gain):
    """The nearest weight with certified error at most `error` within `within`: a constraint, kept after every step.

    Nearest by the levelwise bound sum ||w_sigma||^2 c(sigma)^2; where the group does not keep levels (O(n), D(n)), the
    bound 2 ||W - P_0 W|| that `Spectrum.error` also knows may admit a nearer weight.

    >>> import torch, softequiv as se
    >>> rep = se.grid(se.SO(2), 7, 7)
    >>> W = se.least_distortion(0.1, within=se.degrees(30))(torch.randn(64, 7, 7), rep)
    >>> round(se.spectrum(rep).error(W, se.degrees(30)), 5)
    0.1
    """

    error: float
    within: float

    def __post_init__(self) -> None:
        settle(self, "error", "within")
        if 0 < self.error < LEAST_ERROR:
            raise GainError(
                f"an error target of {self.error:g} is less than rounding, which is about {LEAST_ERROR:g}; use "
                "softness(0) for an exactly equivariant weight"
            )
        if not 0 < self.error < 2:
            raise GainError(
                f"an error target lies between 0 and 2, since no weight changes by more than 2; got "
                f"{self.error!r}: use softness(0) for 0"
            )
        if not self.within > 0:
            raise GainError(
                f"the range {self.within!r} is empty; give a positive path length or angle, such as degrees(30)"
            )

    def on(self, rep: Rep) -> WeightFilter:
        levels = spectrum(rep)
        return Cone(levels, (levels.chord(self.within) / self.error) ** 2)
