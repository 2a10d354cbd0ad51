"""Guarantee first: the nearest weight that changes by at most a given fraction within a given range.

The admissible weights form the cone {W : sum ||w_sigma||^2 c(sigma)^2 <= eta^2 ||W||^2}. The nearest point to Theta is

    gamma(sigma) = 1 / (1 + mu (c(sigma)^2 - eta^2)),   0 <= mu < 1 / (eta^2 - c_min^2),

with one scalar mu for which the target holds with equality. Only the energy per level enters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.errors import GainError
from softequiv.gains.base import Gain, WeightFilter, settle
from softequiv.reps import Rep
from softequiv.spectrum import Spectrum, spectrum

NEWTON_STEPS = 24  # with bisection as a safeguard; five or six suffice as a rule
ROUNDING = 1e-12  # a weight on the boundary of the cone is inside, and so is a level that just meets the target
LEAST_ERROR = 1e-12  # below it a target is less than the rounding of float64 weights
SMALLEST = -69.0  # log of the smallest share 1e-30 that the solver can reach


@dataclass(frozen=True)
class Cone:
    """The projection onto weights whose certified change is at most the target, recomputed from each weight.

    Differentiable. A weight inside is returned as it is. Where nothing of a weight lies at admissible levels (c <
    eta), it
    becomes zero, which is admissible though no nearest point is then unique.
    """

    of: Spectrum
    ratio: Tensor  # (c(sigma) / eta)^2 of each level

    def to(self, dtype: torch.dtype, device: torch.device) -> Cone:
        """The same cone for weights of another dtype or device."""
        return Cone(self.of.to(dtype, device), self.ratio.to(device))

    def __call__(self, weight: Tensor) -> Tensor:
        # only the direction matters: without its size, squares neither overflow nor vanish
        least = torch.finfo(weight.dtype).tiny if weight.is_floating_point() else 1.0
        size = weight.detach().double().abs().amax().clamp(min=least) if weight.numel() else 1.0
        return self.of.scale(weight, self.gamma(self.of.energies(weight / size)))

    def gamma(self, energies: Tensor) -> Tensor:
        """The gain of each level for a weight with these energies, (levels,) to (levels,), differentiable."""
        return least_distortion_gain(energies, self.ratio.to(energies))


def least_distortion_gain(energies: Tensor, ratio: Tensor) -> Tensor:
    """gamma = 1 / (1 + x (r - 1)) with r = c^2 / eta^2 and x = mu eta^2 such that sum e (r - 1) gamma^2 = 0, or 1 if
    that sum is negative.

    With y = 1 - x (1 - r_min) in (0, 1], gamma = (1 - r_min) / (r - r_min + y (1 - r)), free of cancellation as y ->
    0. The
    logarithms of what is above and below the target are nearly linear in log y, where Newton's method is at home.
    """
    ratio = torch.where((ratio - 1).abs() < ROUNDING, 1 - ROUNDING, ratio)
    present = energies > 0
    lowest = torch.where(present, ratio, torch.inf).min()
    reachable = lowest < 1
    lowest = torch.where(reachable, lowest, 0.0)
    room = 1 - lowest
    tiny = torch.finfo(energies.dtype).tiny

    def gain(log_y: Tensor) -> Tensor:
        return torch.where(present, room / (ratio - lowest + log_y.exp() * (1 - ratio)), 0.0)

    def balance(log_y: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """log(energy above the target / below it), and its derivative in log y."""
        gamma = gain(log_y)
        weighed = e * (ratio - 1) * gamma**2
        slope = -2 * weighed * gamma * (1 - ratio) * log_y.exp() / room
        high, low = weighed.clamp(min=0).sum().clamp(min=tiny), (-weighed).clamp(min=0).sum().clamp(min=tiny)
        above = ratio > 1
        return high.log() - low.log(), torch.where(above, slope, 0).sum() / high + torch.where(
            above, 0, slope
        ).sum() / low

    with torch.no_grad():
        excess = (energies * (ratio - 1)).sum()
        low, high = energies.new_tensor(SMALLEST), energies.new_tensor(0.0)
        log_y = energies.new_tensor(-1.0)
        for _ in range(NEWTON_STEPS):
            value, slope = balance(log_y, energies)
            low, high = torch.where(value < 0, log_y, low), torch.where(value < 0, high, log_y)
            newton = log_y - value / slope
            inside = ((newton >= low) & (newton <= high)) | ((newton - log_y).abs() < 1e-9)
            log_y = torch.where(inside, newton, (low + high) / 2)
        log_y = torch.nan_to_num(log_y, nan=0.0)
    # one more step outside no_grad carries the derivative of the solution with respect to the energies
    value, slope = balance(log_y, energies)
    solved = log_y - (value - value.detach()) / slope.detach()
    gamma = torch.where(reachable, gain(solved), torch.zeros_like(energies))
    return torch.where(excess <= ROUNDING * energies.sum(), torch.ones_like(energies), gamma)


@dataclass(frozen=True)
class LeastDistortion(Gain):
    """The nearest weight with certified error at most `error` within the range `within`: a constraint, kept after
    every step.

    Nearest by the levelwise bound sum ||w_sigma||^2 c(sigma)^2; where the group does not keep levels (O(n), D(n)),
    the bound
    2 ||W - P_0 W|| that `Spectrum.error` also knows may admit a nearer weight.

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
