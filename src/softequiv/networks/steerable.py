"""What is equivariant on pictures without an axis for the group? A CNN of typed fields (Weiler and Cesa 2019, "General
E(2)-Equivariant Steerable CNNs"): scalars and frequencies of C(n), D(n), SO(2) or O(2).

A kernel between fields of types X and Y is kept where rho_Y(g) K(g^-1 z) rho_X(g)^-1 = K(z), level 0 of the library's
own spectrum. What we changed: kernels live on pixels, under the library's rotation of them, not on sampled circles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from softequiv.baselines.group_cnn import CentredHalving
from softequiv.errors import SoftEquivError, check_count
from softequiv.gains import Gain
from softequiv.groups import C, D, Group
from softequiv.nn import CopyBatchNorm, Gated, SoftConv2d, gated
from softequiv.nn.layers import EXACT
from softequiv.reps import Action, Rep, direct_sum, frequency, scalar


def fields(group: Group, width: int, frequencies: int) -> Rep:
    """`width` copies of each frequency from 0 to `frequencies`, as far as the group tells them apart.

    >>> fields(C(4), 3, 5).dim
    15
    """
    highest = min(frequencies, group.n // 2) if isinstance(group, (C, D)) else frequencies
    return direct_sum([(frequency(group, m), width) for m in range(highest + 1)])


def steerable_cnn(
    group: Group,
    in_channels: int,
    classes: int,
    widths: Sequence[int] = (8, 16, 32),
    kernel_size: int = 5,
    *,
    frequencies: int = 2,
    gain: Gain = EXACT,
    action: Action = "exact",
) -> nn.Sequential:
    """A classifier, (N, in, H, W) to (N, classes), strict by default: typed convolutions, batch norm by copies, gates,
    centred halving; the last layer has scalars only, as many as feature maps of its width, whose mean over the picture
    goes through a linear head. Another gain lets types leak into each other.

    Exactly invariant under the quarter turns (and flips) of its group at even and odd sizes, under other turns as
    nearly as pixels turn. With all frequencies up to 2, a layer between widths c and c' has about 5 c 5 c' k^2 / |G|
    numbers to learn (an eighth for SO(2)), where a plain one between as many feature maps has 5 c 5 c' k^2.

    >>> import softequiv as se, torch
    >>> steerable_cnn(se.SO(2), 1, 10, widths=(4, 8))(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    if not widths:
        raise SoftEquivError("a steerable CNN needs the width of one layer at least, such as widths=(8, 16)")
    if not isinstance(kernel_size, int) or kernel_size % 2 == 0:
        raise SoftEquivError(f"layers that keep the picture's size need an odd kernel_size; got {kernel_size!r}")
    for width in widths:
        check_count("a width", width)
    check_count("kernel_size", kernel_size)
    if not isinstance(frequencies, int) or frequencies < 0:
        raise SoftEquivError(f"frequencies run from 0 up to a whole number; got {frequencies!r}")
    typed = [fields(group, width, frequencies) for width in widths]
    types = [in_channels * scalar(group), *typed[:-1], typed[-1].dim * scalar(group)]
    parts: list[nn.Module] = []
    for source, target in pairwise(types):
        if parts:
            parts.append(CentredHalving())
        wide = gated(target)
        parts.append(SoftConv2d(source, wide, kernel_size, gain, padding=kernel_size // 2, action=action))
        parts += [CopyBatchNorm(wide, dim=1), Gated(target, dim=1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(types[-1].dim, classes))
