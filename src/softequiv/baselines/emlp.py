"""What does an exactly equivariant multilayer perceptron between tensor representations look like?

Finzi, Welling, Wilson (2021), "A Practical Method for Constructing Equivariant Multilayer Perceptrons for Arbitrary
Matrix Groups". A block is a linear map, a bilinear layer beside it, and gates:

    y = L x,     x' = gate(y + B(y) y),     B(y) a matrix whose blocks T_p -> T_q are features of type T_(p+q) in y,

on channels shared out evenly over the ranks T_0, T_1, T_2, ... What we changed: strict maps are the library's own
filter at softness 0 instead of coefficients of a basis (the same functions); bilinear features are the first copies of
a type instead of drawn ones, which random maps before them make alike; their weights start with variance 1 / terms;
leftover copies of mixed ranks are shared out instead of drawn. How a linear map is made is an argument: strict, soft,
with a residual pathway (`EMLPRPP`), or free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from softequiv.baselines.rpp import RPPLinear
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.nn import Bilinear, Gated, SoftLinear, gated
from softequiv.reps import Rep, direct_sum, tensor, vector

Linear = Callable[[Rep, Rep], nn.Module]


def uniform(group: Group, channels: int) -> Rep:
    """About as many channels for each rank T_0, T_1, ..., `channels` in all; the highest rank is the largest that fits.

    Under a group that is not orthogonal, rank r is shared out over T(k, r - k) by binomial coefficients.

    >>> from softequiv import O
    >>> print(uniform(O(5), 384))
    134[1]+25[V]+5[V@V]
    """
    checked_channels(channels)
    d = vector(group).dim
    copies: dict[int, int] = {}
    while channels:
        top = highest_rank(channels, d)
        for rank in range(top + 1):
            copies[rank] = copies.get(rank, 0) + d ** (top - rank)
        channels -= (top + 1) * d**top
    terms: list[tuple[Rep, int]] = []
    for rank, count in sorted(copies.items()):
        upper = [count] if group.orthogonal else shares(count, rank)
        terms += [(tensor(group, rank - k, k), share) for k, share in enumerate(upper) if share]
    return direct_sum(terms)


def checked_channels(channels: int) -> None:
    """A layer has at least one channel."""
    if not isinstance(channels, int) or channels < 1:
        raise SoftEquivError(f"a layer needs at least one channel, a whole number; got {channels!r}")


def highest_rank(channels: int, d: int) -> int:
    """The largest r with (r + 1) d^r <= channels: room for ranks 0 to r of d^r channels each."""
    rank = 0
    while (rank + 2) * d ** (rank + 1) <= channels:
        rank += 1
    return rank


def shares(count: int, rank: int) -> list[int]:
    """`count` copies shared out as the binomial coefficients of `rank`, by largest remainders, the first ones first."""
    wanted = [count * math.comb(rank, k) / 2**rank for k in range(rank + 1)]
    out = [math.floor(share) for share in wanted]
    for k in sorted(range(rank + 1), key=lambda k: out[k] - wanted[k])[: count - sum(out)]:
        out[k] += 1
    return out


class Block(nn.Module):
    """x -> gate(y + B(y) y) with y = L x."""

    def __init__(self, source: Rep, target: Rep, linear: Linear) -> None:
        super().__init__()
        self.linear = linear(source, gated(target))
        self.bilinear = Bilinear(gated(target), gated(target))
        self.gate = Gated(target)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        gates: Tensor = self.gate(y + self.bilinear(y))
        return gates


class EMLP(nn.Module):
    """`layers` blocks of `channels` and a linear map: vectors (..., *source.shape) to (..., *target.shape).

    Exactly equivariant with the default `linear`; `partial(SoftLinear, gain=softness(0.5))` makes the same body soft,
    and `lambda X, Y: nn.Linear(X.dim, Y.dim)` free. In float32, features of 384 channels under S(5) are off by 6e-7 of
    their size after every block, and answers by up to 5e-6 of their usual size; the scale of the weights has no part in
    it. An answer whose terms cancel is off by as much, which may be a thousandth of itself.

    >>> import torch
    >>> from softequiv import O, scalar, vector
    >>> EMLP(2 * vector(O(5)), scalar(O(5)), channels=64, layers=2)(torch.zeros(8, 10)).shape
    torch.Size([8, 1])
    """

    def __init__(
        self, source: Rep, target: Rep, channels: int = 384, layers: int = 3, *, linear: Linear = SoftLinear
    ) -> None:
        super().__init__()
        checked_layers(layers)
        self.source, self.target = source, target
        hidden = uniform(source.group, channels)
        blocks = [Block(source if i == 0 else hidden, hidden, linear) for i in range(layers)]
        self.body = nn.Sequential(*blocks, linear(hidden, target))

    def forward(self, x: Tensor) -> Tensor:
        return shaped(self.body, self.source, self.target, x)


class EMLPRPP(EMLP):
    """The same body whose linear maps have a free path beside the strict one (`rpp`); mix 0 is the EMLP.

    >>> import torch
    >>> from softequiv import O, scalar, vector
    >>> EMLPRPP(2 * vector(O(5)), scalar(O(5)), channels=64, layers=2, mix=0.5)(torch.zeros(8, 10)).shape
    torch.Size([8, 1])
    """

    def __init__(
        self,
        source: Rep,
        target: Rep,
        channels: int = 384,
        layers: int = 3,
        *,
        mix: float = 1.0,
        learned: bool = False,
    ) -> None:
        super().__init__(source, target, channels, layers, linear=partial(RPPLinear, mix=mix, learned=learned))


class MLP(nn.Module):
    """The plain network of the same widths: linear maps and x sigmoid(x).

    >>> import torch
    >>> from softequiv import O, scalar, vector
    >>> MLP(2 * vector(O(5)), scalar(O(5)), channels=64)(torch.zeros(8, 10)).shape
    torch.Size([8, 1])
    """

    def __init__(self, source: Rep, target: Rep, channels: int = 384, layers: int = 3) -> None:
        super().__init__()
        checked_layers(layers)
        self.source, self.target = source, target
        checked_channels(channels)
        widths = [source.dim] + [channels] * layers
        hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.SiLU())]
        self.body = nn.Sequential(*hidden, nn.Linear(channels, target.dim))

    def forward(self, x: Tensor) -> Tensor:
        return shaped(self.body, self.source, self.target, x)


def checked_layers(layers: int) -> None:
    """A network has at least one hidden layer."""
    if not isinstance(layers, int) or layers < 1:
        raise SoftEquivError(f"a network needs at least one hidden layer; got layers={layers!r}")


def shaped(body: nn.Module, source: Rep, target: Rep, x: Tensor) -> Tensor:
    """A body on flat vectors, given those of `source` and giving those of `target` in their own shapes."""
    if tuple(x.shape[max(x.ndim - len(source.shape), 0) :]) != source.shape:
        raise SoftEquivError(
            f"vectors of {source} have the trailing shape {source.shape}; got a tensor of {tuple(x.shape)}"
        )
    flat: Tensor = body(x.flatten(x.ndim - len(source.shape)))
    return flat.reshape(*flat.shape[:-1], *target.shape)
