"""What is a transformer layer whose tokens carry representations? Attention and an MLP, plain or between types.

Typed, every linear map is filtered and all that lies between commutes with the group, so that the gain of the maps is
the dial of the network.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from softequiv.nn import CopyNorm, Gated, Lengths, gated
from softequiv.reps import Rep, direct_sum, terms_of

EXPANSION = 4  # hidden features per feature of the stream

Maps = Callable[[Rep, Rep], nn.Linear]


def times(count: int, rep: Rep) -> Rep:
    """So many copies of a type, each of its terms in one block.

    >>> import softequiv as se
    >>> print(times(4, 2 * se.scalar(se.SO(2)) + se.vector(se.SO(2))))
    8[1]+4[V]
    """
    return direct_sum([(term, count * copies) for term, copies in terms_of(rep)])


def norm(stream: Rep, typed: bool) -> nn.Module:
    """What tokens are normalised by."""
    return CopyNorm(stream) if typed else nn.LayerNorm(stream.dim)


class Layer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x), on tokens (N, T, stream.dim) whose stream has `heads` copies of the
    type of one head. `maps` makes the linear maps; between types the MLP also reads the lengths of what turns.
    """

    def __init__(self, head: Rep, heads: int, maps: Maps, typed: bool, *, causal: bool = False) -> None:
        super().__init__()
        stream = times(heads, head)
        hidden = times(EXPANSION, stream)
        self.heads, self.causal = heads, causal
        self.before = norm(stream, typed)
        self.query, self.key, self.value = (maps(stream, heads * head) for _ in range(3))
        self.out = maps(heads * head, stream)
        between: list[nn.Module]
        if typed:
            lengths = Lengths(stream)
            between = [lengths, maps(lengths.target, gated(hidden)), Gated(hidden)]
        else:
            between = [maps(stream, hidden), nn.GELU()]
        self.mlp = nn.Sequential(norm(stream, typed), *between, maps(hidden, stream))

    def forward(self, x: Tensor) -> Tensor:
        read = self.before(x)
        # a head's features are orthogonal, so that no group element changes its inner products
        query, key, value = (self._split(part(read)) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        grown: Tensor = x + self.mlp(x)
        return grown

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, heads * head.dim) to (N, heads, T, head.dim)."""
        split: Tensor = x.unflatten(-1, (self.heads, -1))
        return split.transpose(1, 2)
