"""What multiplies features with each other? A bilinear layer between tensors, for any group: products of vectors are
where scalars come from that know of them.

As in Finzi, Welling, Wilson (2021), "A Practical Method for Constructing Equivariant Multilayer Perceptrons for
Arbitrary Matrix Groups".
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from softequiv.errors import SoftEquivError
from softequiv.reps import Rep, TensorProduct, Trivial, tensor, terms_of, vector
from softequiv.reps.tensors import Vector

SHARE = 0.1  # of the bilinear layer beside the linear one, as in the original

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
            ranks: flat.new_zeros(len(flat), self.d ** sum(ranks), copies)
            for ranks, copies in copies_by_rank(self.outputs).items()
        }
        for (after, before, feature, used), weight in zip(self.products, self.weights, strict=True):
            u, blocks = fields[before], self._blocks(fields[feature][..., :used], after, before)
            rows, columns = blocks.shape[1:3]
            if weight.shape[0] * columns < weight.shape[2] * rows:  # the smaller way to one sum
                mixed = u.flatten(0, 1) @ weight.permute(2, 1, 0).flatten(1)
                part = blocks.flatten(2) @ mixed.reshape(len(flat), columns * used, weight.shape[0])
            else:
                turned = blocks.mT.flatten(1, 2) @ u
                together = turned.reshape(len(flat) * rows, used * weight.shape[2])
                part = (together @ weight.flatten(1).mT).unflatten(0, (len(flat), rows))
            sums[after] = sums[after] + part
        out = []
        for ranks, copies in self.outputs:
            out.append(sums[ranks][..., :copies].mT.flatten(1))
            sums[ranks] = sums[ranks][..., copies:]
        joined = torch.cat(out, 1).mul(SHARE)
        return joined.reshape(*x.shape[:-1], joined.shape[1])

    def _by_rank(self, flat: Tensor) -> dict[Ranks, Tensor]:
        """All features of a type together, (samples, coordinates, copies)."""
        parts: dict[Ranks, list[Tensor]] = {}
        place = 0
        for ranks, copies in self.inputs:
            dim = self.d ** sum(ranks)
            part = flat[:, place : place + copies * dim].reshape(-1, copies, dim)
            parts.setdefault(ranks, []).append(part)
            place += copies * dim
        return {ranks: torch.cat(found, 1).mT for ranks, found in parts.items()}

    def _blocks(self, features: Tensor, after: Ranks, before: Ranks) -> Tensor:
        """Features T(p' + q, q' + p) as matrices from T(p, q) to T(p', q'): (samples, rows, columns, copies)."""
        sizes = [self.d**rank for rank in (after[0], before[1], after[1], before[0])]
        opened = features.unflatten(1, sizes).permute(0, 1, 3, 4, 2, 5)
        return opened.reshape(len(features), self.d ** sum(after), self.d ** sum(before), features.shape[2])


def copies_by_rank(terms: list[tuple[Ranks, int]]) -> dict[Ranks, int]:
    """How many copies of each type there are in all."""
    total: dict[Ranks, int] = {}
    for ranks, copies in terms:
        total[ranks] = total.get(ranks, 0) + copies
    return total
