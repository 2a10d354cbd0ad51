"""How much of each level stays? Hard, smooth, the paper's Schur rule, softness, and the least distortion for a
target.
"""

from softequiv.gains.base import Gain, Kept, LevelGain, WeightFilter
from softequiv.gains.cone import Cone
from softequiv.gains.cone import LeastDistortion as least_distortion
from softequiv.gains.cutoff import Hard as hard
from softequiv.gains.cutoff import Smooth as smooth
from softequiv.gains.cutoff import Softness as softness
from softequiv.gains.schur import Composed
from softequiv.gains.schur import Schur as schur

__all__ = [
    "Composed",
    "Cone",
    "Gain",
    "Kept",
    "LevelGain",
    "WeightFilter",
    "hard",
    "least_distortion",
    "schur",
    "smooth",
    "softness",
]
