"""Which transformer reads pictures? A ViT, plain or with tokens that carry representations, so that softness is a dial
of the whole network.

Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words". One class: a group and a gain turn the plain network into the
soft one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softequiv.errors import RepresentationError, SoftEquivError, check_count
from softequiv.gains import Gain
from softequiv.groups import C, Group
from softequiv.networks.steerable import fields
from softequiv.networks.transformer import Layer, norm, times
from softequiv.nn import Lengths, SoftConv2d, SoftLinear, SoftTable
from softequiv.nn.layers import EXACT
from softequiv.reps import Rep, grid, scalar

FREQUENCIES = 2  # the highest that tokens carry


class VisionTransformer(nn.Module):
    """A classifier, (N, channels, size, size) to (N, classes): patches, positions, layers x + attention(norm x),
    x + mlp(norm x), a hidden layer on every token, their mean, and a linear head.

    Without a group it is the plain network: nn.Conv2d, nn.Linear, LayerNorm, GELU. With a group and a gain, each head
    has as many copies of the frequencies 0, 1 and 2. The gain filters the patch embedding, the table of positions and
    every linear map up to the mean; what lies between commutes with the group. So softness 0 is exactly invariant under
    the quarter turns (and flips) of the group, and softness 1 leaves all weights free.

    Args:
        size: pixels of a side, which `patch` divides.
        width: numbers per token, shared out among the heads.
        group: C(4), D(4), SO(2), O(2): what turns pictures. None is the plain network.
        gain: without it `softness(0)`.

    >>> import softequiv as se
    >>> net = VisionTransformer(16, 4, 10, width=40, layers=1, group=se.C(4))
    >>> x = torch.randn(2, 1, 16, 16)
    >>> torch.allclose(net(x), net(x.rot90(1, (-2, -1))), atol=1e-5)
    True
    """

    def __init__(
        self,
        size: int,
        patch: int,
        classes: int,
        *,
        channels: int = 1,
        width: int = 80,
        layers: int = 4,
        heads: int = 4,
        group: Group | None = None,
        gain: Gain | None = None,
    ) -> None:
        super().__init__()
        if group is None and gain is not None:
            raise SoftEquivError(f"{gain} filters by a group, and none is given; name it, such as group=C(4)")
        for name, number in {"size": size, "patch": patch, "width": width, "layers": layers, "heads": heads}.items():
            check_count(name, number)
        if size % patch:
            raise SoftEquivError(f"patches of {patch} pixels do not cover {size}; choose a patch that divides the size")
        side, gain, typed = size // patch, gain or EXACT, group is not None
        head = head_type(group, width, heads)
        stream = times(heads, head)

        def maps(source: Rep, target: Rep) -> nn.Linear:
            return SoftLinear(source, target, gain) if typed else nn.Linear(source.dim, target.dim)

        if group is None:
            self.patches: nn.Module = nn.Conv2d(channels, stream.dim, patch, stride=patch)
            self.positions: nn.Module = Table(stream.dim, side)
        else:
            self.patches = SoftConv2d(channels * scalar(group), stream, patch, gain, stride=patch)
            self.positions = SoftTable(stream @ grid(group, side, side), 1, gain)
        self.layers = nn.Sequential(*(Layer(head, heads, maps, typed) for _ in range(layers)))
        lengths = [Lengths(stream)] if typed else []
        seen = lengths[0].target if typed else stream
        last = maps(seen, stream.dim * scalar(stream.group))
        self.read = nn.Sequential(norm(stream, typed), *lengths, last, nn.GELU())
        self.head = nn.Linear(stream.dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (self.patches(x) + self.positions()).flatten(2).transpose(1, 2)
        answers: Tensor = self.head(self.read(self.layers(tokens)).mean(1))
        return answers


class Table(nn.Module):
    """A learned vector for every place."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(1, channels, side, side))

    def forward(self) -> Tensor:
        table: Tensor = self.weight
        return table


def head_type(group: Group | None, width: int, heads: int) -> Rep:
    """The features of one head: as many copies of each frequency; of a plain network scalars.

    >>> import softequiv as se
    >>> head_type(se.SO(2), 40, 4).dim
    10
    """
    unit = scalar(C(1)) if group is None else fields(group, 1, FREQUENCIES)
    if width % (heads * unit.dim):
        raise RepresentationError(
            f"a width of {width} does not give each of {heads} heads as many copies of {unit}; choose a multiple of "
            f"{heads * unit.dim}"
        )
    return times(width // (heads * unit.dim), unit)
