"""How does a group element act on data? Pictures, tokens, vectors, points, and what the group leaves alone.

An action is a value: `acts(x, g)` is g x, `acts(y, g.inverse)` takes it back, and `acts.valid(x, g)` marks what came
from inside x. `Moves` moves the samples of a batch each by its own element.
"""

from softequiv.actions.base import Acts, Still
from softequiv.actions.linear import Points, Vectors
from softequiv.actions.moves import Moves
from softequiv.actions.pictures import Interpolation, Padding, Pictures, in_disc
from softequiv.actions.tokens import Tokens

__all__ = [
    "Acts",
    "Interpolation",
    "Moves",
    "Padding",
    "Pictures",
    "Points",
    "Still",
    "Tokens",
    "Vectors",
    "in_disc",
]
