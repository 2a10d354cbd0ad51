"""Which directions does it move, and how fast? Levels and bases of the group Laplacian, by the cheapest exact route."""

from softequiv.spectrum.base import Filter, Spectrum
from softequiv.spectrum.routes import characters, dense, spectrum, summed_rates

__all__ = ["Filter", "Spectrum", "characters", "dense", "spectrum", "summed_rates"]
