"""What is exactly equivariant on pictures? Convolutions over C(n) and D(n) (Cohen and Welling 2016, "Group Equivariant
Convolutional Networks"), and a strict classifier made of them.

A feature map has an axis for the group, (N, C, |G|, H, W), in the order of `group.elements()`, and moves by
(u f)(x, h) = f(u^-1 x, u^-1 h). The kernel from h to g is the stored filter, turned and looked up,

    K(g, h) = rho(g) psi(g^-1 h)        lifting from a plain picture: K(g) = rho(g) psi,

What we changed: from quarter turns and flips to all C(n) and D(n), rho being the library's own rotation of pixels
(Weiler and Cesa 2019, "General E(2)-Equivariant Steerable CNNs", turn filters in a steerable basis). So all |G|^2
kernels cost one matrix product a forward pass, and for C(1), C(2), C(4), D(1), D(2), D(4), whose elements move pixels
to pixels, equivariance is exact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv._cache import cached
from softequiv.baselines.rpp import pathways
from softequiv.errors import GroupError, SoftEquivError, check_count
from softequiv.gains import LevelGain
from softequiv.groups import C, D, Group, matrix_key
from softequiv.groups.rotations import mirror
from softequiv.nn import Soft, soft_weights
from softequiv.reps import Action, Square
from softequiv.reps.pixels import bilinear_rotation
from softequiv.spectrum import spectrum


@cached
def kernel_turns(group: Group, size: int, action: Action = "exact") -> Tensor:
    """rho(g) on pictures of size x size for every element, (|G|, size^2, size^2) float64.

    A bilinear turn is resampled once per element: powers of one small turn would blur, and have no inverse.

    >>> kernel_turns(C(4), 3).shape
    torch.Size([4, 9, 9])
    """
    if action not in get_args(Action):
        raise SoftEquivError(f"unknown action {action!r}; choose one of {', '.join(get_args(Action))}")
    space = Square(checked_plane(group), size, action)
    if action != "bilinear" or space.permutes:
        return torch.stack([space.rho(g) for g in group.elements()])
    turns = []
    for g in group.elements():
        flipped = bool(torch.linalg.det(g.matrix) < 0)
        turn = g.matrix @ mirror(2) if flipped else g.matrix
        picture = bilinear_rotation(size, math.atan2(float(turn[1, 0]), float(turn[0, 0])))
        turns.append(picture @ space.steps()[1] if flipped else picture)
    return torch.stack(turns)


@cached
def left_division(group: Group) -> Tensor:
    """The number of g^-1 h for the elements of numbers g and h, (|G|, |G|) int64.

    >>> left_division(C(3))
    tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]])
    """
    matrices, number = numbered(group)
    return torch.tensor([[number[matrix_key(torch.linalg.inv(g) @ h)] for h in matrices] for g in matrices])


def numbered(group: Group) -> tuple[list[Tensor], dict[bytes, int]]:
    """The matrices of a finite group's elements in their order, and the number of each."""
    matrices = [g.matrix for g in group.elements()]
    return matrices, {matrix_key(matrix): number for number, matrix in enumerate(matrices)}


def checked_plane(group: Group) -> Group:
    """C(n) and D(n) have an element axis on pictures; other groups are told what to use instead."""
    if not isinstance(group, (C, D)):
        raise GroupError(
            f"group convolutions are over C(n) and D(n); got {group}: take one of these, such as C(8), "
            "or steerable_cnn for SO(2) and O(2)"
        )
    return group


class _ElementConv2d(nn.Module, ABC):
    """What the convolutions over a group share: one bank of stored filters, expanded and applied as an ordinary
    convolution.

    `sources`: how many elements the input has, 1 for a plain picture or |G|.
    """

    turns: Tensor
    lookup: Tensor

    def __init__(
        self,
        group: Group,
        sources: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        action: Action = "exact",
    ) -> None:
        super().__init__()
        for what, value, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("kernel_size", kernel_size, 1),
            ("stride", stride, 1),
            ("padding", padding, 0),
        ):
            check_count(what, value, least)
        self.group, self.action = checked_plane(group), action
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel_size
        self.stride, self.padding = stride, padding
        turns = kernel_turns(group, kernel_size, action)
        self.order, self.sources = len(turns), sources
        lookup = left_division(group) if sources > 1 else torch.zeros(self.order, 1, dtype=torch.int64)
        self.register_buffer("lookup", lookup, persistent=False)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, sources, kernel_size, kernel_size))
        self.register_buffer("turns", turns.to(self.weight), persistent=False)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.turns = kernel_turns(self.group, self.kernel_size, self.action).to(self.weight)  # not as they were rounded
        return self

    def expanded(self) -> Tensor:
        """The kernel of the ordinary convolution, (out |G|, in sources, k, k): entry (o g, i h) is rho(g)
        psi_oi(g^-1 h).
        """
        filters = self.weight.flatten(3)[:, :, self.lookup]  # (out, in, g, h, k^2)
        turned = torch.einsum("gpq,oighq->ogihp", self.turns.to(filters.dtype), filters)
        kernel: Tensor = turned.flatten(2, 3).flatten(0, 1).unflatten(-1, (self.kernel_size, self.kernel_size))
        return kernel

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution with an expanded kernel, and one bias a channel: (N, out, |G|, H', W')."""
        flat = self.flattened(x)
        check_centred(flat, self.kernel_size, self.stride, self.padding)
        spread = None if bias is None else bias.repeat_interleave(self.order)
        y: Tensor = functional.conv2d(flat, kernel, spread, self.stride, self.padding).unflatten(1, (-1, self.order))
        return y

    @abstractmethod
    def flattened(self, x: Tensor) -> Tensor:
        """The input as an ordinary one, (N, in sources, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.expanded(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"{self.group}, {self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}"
        )


def check_centred(x: Tensor, kernel_size: int, stride: int, padding: int) -> None:
    """A strided convolution keeps the middle of a picture only where it reads as much on the left as on the right."""
    for size in x.shape[-2:]:
        spare = size + 2 * padding - kernel_size
        if spare < 0:
            raise SoftEquivError(
                f"a kernel of {kernel_size} does not fit into {size} pixels with padding {padding}; pad by more"
            )
        if spare % stride:
            raise SoftEquivError(
                f"stride {stride} over {size} pixels (kernel {kernel_size}, padding {padding}) leaves {spare % stride} "
                f"unread on one side, so the answer would not turn with the picture: pad the picture to "
                f"{size + stride - spare % stride} pixels, or use stride 1 and CentredHalving"
            )


class LiftingConv2d(_ElementConv2d):
    """From plain pictures to feature maps on the group: out(x, g) = sum_z (rho(g) psi)(z) f(x + z).

    (N, in, H, W) to (N, out, |G|, H', W'), exactly equivariant for quarter turns and flips.

    >>> LiftingConv2d(C(4), 3, 8, 5, padding=2)(torch.randn(2, 3, 9, 9)).shape
    torch.Size([2, 8, 4, 9, 9])
    """

    def __init__(self, group: Group, in_channels: int, out_channels: int, kernel_size: int, **options: Any) -> None:
        super().__init__(group, 1, in_channels, out_channels, kernel_size, **options)

    def flattened(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise SoftEquivError(f"pictures are (N, {self.in_channels}, H, W); got {tuple(x.shape)}")
        return x


class GroupConv2d(_ElementConv2d):
    """From feature maps to feature maps on the group: out(x, g) = sum_h sum_z (rho(g) psi(g^-1 h))(z) f(x + z, h).

    (N, in, |G|, H, W) to (N, out, |G|, H', W'). It stores in out |G| k^2 numbers: |G| times fewer than a plain
    convolution between as many maps (in |G| and out |G|), |G| times more than one between in and out channels.

    >>> GroupConv2d(D(4), 3, 8, 5, padding=2)(torch.randn(2, 3, 8, 9, 9)).shape
    torch.Size([2, 8, 8, 9, 9])
    """

    def __init__(self, group: Group, in_channels: int, out_channels: int, kernel_size: int, **options: Any) -> None:
        super().__init__(group, int(checked_plane(group).order), in_channels, out_channels, kernel_size, **options)

    def flattened(self, x: Tensor) -> Tensor:
        if x.ndim != 5 or tuple(x.shape[1:3]) != (self.in_channels, self.order):
            raise SoftEquivError(
                f"feature maps on {self.group} are (N, {self.in_channels}, {self.order}, H, W); got {tuple(x.shape)}: "
                "a plain picture goes through LiftingConv2d first"
            )
        return x.flatten(1, 2)


class CentredHalving(nn.Module):
    """Means over 2 x 2 pixels where a size is even, over 3 x 3 about every second pixel where it is odd: (..., H, W) to
    (..., ceil(H / 2), ceil(W / 2)).

    Both read the picture alike from all sides, so quarter turns and flips commute with them; they are means over the
    pixels that exist, so a border is not darkened.

    >>> CentredHalving()(torch.arange(9.0).reshape(1, 3, 3))
    tensor([[[2., 3.], [5., 6.]]])
    """

    def forward(self, x: Tensor) -> Tensor:
        odd = [size % 2 for size in x.shape[-2:]]
        pictures = x.reshape(-1, 1, *x.shape[-2:])
        means = functional.avg_pool2d(pictures, [2 + o for o in odd], 2, odd, count_include_pad=False)
        return means.reshape(*x.shape[:-2], *means.shape[-2:])


Layer = Callable[..., nn.Module]


class GroupCNN(nn.Module):
    """A strict classifier: lifting, group convolutions, mean over the picture, maximum over the group, linear head.

    Every convolution is followed by a batch norm, whose statistics all elements and pixels of a channel share, a ReLU,
    and, but for the last, `CentredHalving`. Invariant to rounding under C(1), C(2), C(4), D(1), D(2), D(4) at even and
    odd sizes; for other n as nearly as pixels turn. `lifting` and `convolution` may be replaced by layers that take
    the same arguments.

    Numbers to learn, for widths c_0 (pictures), c_1, c_2, ...: k^2 (c_0 c_1 + |G| c_1 c_2 + ...) and the head's. A
    plain CNN of the same widths has 1 / |G| of the inner ones, a plain CNN with as many feature maps |G| times as many.

    >>> GroupCNN(C(4), 1, 10, widths=(4, 8))(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group,
        in_channels: int,
        classes: int,
        widths: Sequence[int] = (16, 32, 64),
        kernel_size: int = 5,
        *,
        lifting: Layer = LiftingConv2d,
        convolution: Layer = GroupConv2d,
        action: Action = "exact",
    ) -> None:
        super().__init__()
        if not widths:
            raise SoftEquivError("a group CNN needs the width of one layer at least, such as widths=(16, 32)")
        if not isinstance(kernel_size, int) or kernel_size % 2 == 0:
            raise SoftEquivError(f"layers that keep the picture's size need an odd kernel_size; got {kernel_size!r}")
        options = {"padding": kernel_size // 2, "bias": False, "action": action}  # the norm has its own bias
        layers = [lifting(group, in_channels, widths[0], kernel_size, **options)]
        for before, after in pairwise(widths):
            layers.append(convolution(group, before, after, kernel_size, **options))
        stages = [
            nn.Sequential(layer, nn.BatchNorm3d(width), nn.ReLU()) for layer, width in zip(layers, widths, strict=True)
        ]
        self.group = group
        self.features = nn.Sequential(*[part for stage in stages for part in (stage, CentredHalving())][:-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).mean((-2, -1)).amax(-1))
        return scores


def free_parameters(model: nn.Module) -> int:
    """How many numbers training can choose: of a soft weight the directions that its gain keeps, of others all.

    A weight with residual pathways has those of both, of which some are redundant as soon as its mix is above 0; a free
    path that is held at mix 0 counts for nothing.

    >>> free_parameters(LiftingConv2d(C(4), 3, 8, 5)), free_parameters(GroupConv2d(C(4), 3, 8, 5))
    (608, 2408)
    """
    total = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total -= sum(dropped(weight.soft, weight.stored) for weight in soft_weights(model))
    for own, strict, free in pathways(model):
        total -= dropped(own.strict.soft, strict)
        if not own.learned and own.mix_held == 0 and free.requires_grad:
            total -= free.numel()
    return total


def dropped(soft: Soft, stored: nn.Parameter) -> int:
    """How many directions of a stored weight that learns its gain sets to zero."""
    if not (stored.requires_grad and isinstance(soft.gain, LevelGain)):
        return 0
    levels = spectrum(soft.rep)
    copies = soft.layout.read(stored, soft.rep).numel() // soft.rep.dim
    return copies * int(levels.counts[soft.gain.gamma(levels) == 0].sum())
