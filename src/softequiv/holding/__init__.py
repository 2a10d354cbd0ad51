"""What keeps the whole network at its target? Prices, noise, limits and mixtures, each alone and together."""

from softequiv.asking import total_variation
from softequiv.holding.gain import GainLimit, freeze_rest, limit_gain, untouched
from softequiv.holding.held import HeldByMeasurement
from softequiv.holding.mixture import Mixture
from softequiv.holding.noise import noisy
from softequiv.holding.orbit import OrbitMean
from softequiv.holding.split import split_target
from softequiv.holding.trainer import HeldCallback

__all__ = [
    "GainLimit",
    "HeldByMeasurement",
    "HeldCallback",
    "Mixture",
    "OrbitMean",
    "freeze_rest",
    "limit_gain",
    "noisy",
    "split_target",
    "total_variation",
    "untouched",
]
