"""Which directions does it move, and how fast? Levels and bases of the group Laplacian, by the cheapest exact route."""

from softequiv.spectrum.base import Filter, Spectrum
from softequiv.spectrum.routes import characters, dense, spectrum, summed_rates
from softequiv.spectrum.transforms import Scale

__all__ = ["Filter", "Scale", "Spectrum", "characters", "dense", "spectrum", "summed_rates"]
