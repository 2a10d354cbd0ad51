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

import torch
from torch import Tensor, nn

from softequiv.baselines.rpp import RPPLinear
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.nn import Gated, SoftLinear, gated
from softequiv.reps import Rep, TensorProduct, Trivial, direct_sum, tensor, terms_of, vector
from softequiv.reps.tensors import Vector

BILINEAR_SHARE = 0.1  # of the bilinear layer beside the linear one, as in the original

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


Ranks = tuple[int, int]


def tensor_ranks(rep: Rep) -> Ranks:
    """(p, q) of T(p, q)."""
    if isinstance(rep, Trivial):
        return 0, 0
    factors = rep.factors if isinstance(rep, TensorProduct) else (rep,)
    upper = sum(isinstance(factor, Vector) for factor in factors)
    if rep != tensor(rep.group, upper, len(factors) - upper):
        raise SoftEquivError(f"a bilinear layer multiplies tensors T(p, q); {rep} is none: use tensor(group, p, q)")
    return upper, len(factors) - upper


class Bilinear(nn.Module):
    """x -> 0.1 B(x) x: each block T(p, q) -> T(p', q') of B is a mixture of features of type T(p' + q, q' + p) in x.

    Features contract with others over upper and lower indices, which is equivariant for any group. The mixtures are
    the parameters: of at most as many copies as the feature has coordinates, and of no scalars.

    >>> from softequiv import SO, scalar, vector
    >>> fields = 4 * scalar(SO(3)) + 2 * vector(SO(3))
    >>> layer = Bilinear(fields, fields)
    >>> layer(torch.zeros(7, 10)).shape, [tuple(weight.shape) for weight in layer.weights]
    (torch.Size([7, 10]), [(4, 2, 2), (2, 2, 4)])
    """

    def __init__(self, source: Rep, target: Rep) -> None:
        super().__init__()
        self.d = vector(source.group).dim
        self.inputs, self.outputs = ([(tensor_ranks(term), n) for term, n in terms_of(rep)] for rep in (source, target))
        own, out = copies_by_rank(self.inputs), copies_by_rank(self.outputs)
        self.products: list[tuple[Ranks, Ranks, Ranks, int]] = []  # output, input, feature, copies of it
        for after, before in itertools.product(out, own):
            upper, lower = after[0] + before[1], after[1] + before[0]
            # an orthogonal group does not tell lower indices from upper ones
            feature = (upper + lower, 0) if source.group.orthogonal else (upper, lower)
            if feature in own and feature != (0, 0):
                self.products.append((after, before, feature, min(own[feature], self.d ** sum(feature))))
        terms = {
            ranks: sum(own[before] * used for after, before, _, used in self.products if after == ranks)
            for ranks in out
        }
        self.weights = nn.ParameterList(
            torch.randn(out[after], used, own[before]) / math.sqrt(terms[after])
            for after, before, _, used in self.products
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        fields = self._by_rank(flat)
        sums = {
            ranks: flat.new_zeros(len(flat), copies, self.d ** sum(ranks))
            for ranks, copies in copies_by_rank(self.outputs).items()
        }
        for (after, before, feature, used), weight in zip(self.products, self.weights, strict=True):
            u, blocks = fields[before], self._blocks(fields[feature][:, :used], after, before)
            if weight.shape[0] * blocks.shape[3] < weight.shape[2] * blocks.shape[2]:  # the smaller way to one sum
                part = torch.einsum("zmcj,zcij->zmi", torch.einsum("mcn,znj->zmcj", weight, u), blocks)
            else:
                part = torch.einsum("mcn,zcni->zmi", weight, torch.einsum("zcij,znj->zcni", blocks, u))
            sums[after] = sums[after] + part
        out = []
        for ranks, copies in self.outputs:
            out.append(sums[ranks][:, :copies].flatten(1))
            sums[ranks] = sums[ranks][:, copies:]
        joined = torch.cat(out, 1).mul(BILINEAR_SHARE)
        return joined.reshape(*x.shape[:-1], joined.shape[1])

    def _by_rank(self, flat: Tensor) -> dict[Ranks, Tensor]:
        """All features of a type together, (samples, copies, coordinates)."""
        parts: dict[Ranks, list[Tensor]] = {}
        place = 0
        for ranks, copies in self.inputs:
            dim = self.d ** sum(ranks)
            part = flat[:, place : place + copies * dim].reshape(-1, copies, dim)
            parts.setdefault(ranks, []).append(part)
            place += copies * dim
        return {ranks: torch.cat(found, 1) for ranks, found in parts.items()}

    def _blocks(self, features: Tensor, after: Ranks, before: Ranks) -> Tensor:
        """Features T(p' + q, q' + p) as matrices from T(p, q) to T(p', q'): (samples, copies, rows, columns)."""
        sizes = [self.d**rank for rank in (after[0], before[1], after[1], before[0])]
        opened = features.reshape(*features.shape[:2], *sizes).permute(0, 1, 2, 4, 5, 3)
        return opened.reshape(*features.shape[:2], self.d ** sum(after), self.d ** sum(before))


def copies_by_rank(terms: list[tuple[Ranks, int]]) -> dict[Ranks, int]:
    """How many copies of each type there are in all."""
    total: dict[Ranks, int] = {}
    for ranks, copies in terms:
        total[ranks] = total.get(ranks, 0) + copies
    return total


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
