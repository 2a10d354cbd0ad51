"""How does a group element act on data? Pictures, tokens, vectors, points, and what the group leaves alone.

An action is a value: `acts(x, g)` is g x, `acts(y, g.inverse)` takes it back, and `acts.valid(x, g)` marks what came
from inside x.
"""

from softequiv.actions.base import Acts, Still
from softequiv.actions.linear import Points, Vectors
from softequiv.actions.pictures import Interpolation, Padding, Pictures
from softequiv.actions.tokens import Tokens

__all__ = ["Acts", "Interpolation", "Padding", "Pictures", "Points", "Still", "Tokens", "Vectors"]
