"""What is done about shifts? Blur before skipping pixels (Zhang 2019, "Making Convolutional Networks Shift-Invariant
Again"), and the same blur as a gain of this library.

Our shift filter contains it. Under circular shifts of n places the weights cos and sin(theta i) have the level
sigma = 2 sin(theta / 2), and the binomial filter of f taps multiplies them by cos(theta / 2)^(f - 1), that is, by

    gamma(sigma) = (1 - sigma^2 / 4)^((f - 1) / 2),

a gain of levels alone: `BlurGain(f)`. As convolutions commute, a kernel filtered by this gain along both axes gives
conv(x, gamma W) = blur(conv(x, W)) = conv(blur(x), W), and kept at every second pixel, BlurPool. The paper's hard gain
is the ideal low-pass filter in its place; the softness dial is its cut-off. Exact for circular padding.
What we changed: borders may be circular, and maxima are of a padded picture, so that sizes halve.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.errors import GainError, SoftEquivError, check_count
from softequiv.gains import LevelGain
from softequiv.groups import Shifts
from softequiv.reps import grid
from softequiv.spectrum import Spectrum

Border = Literal["reflect", "circular"]


def binomial(filter_size: int) -> Tensor:
    """The taps comb(f - 1, i) / 2^(f - 1) of the binomial filter, (f,) float64.

    >>> binomial(3)
    tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    check_count("filter_size", filter_size)
    taps = [comb(filter_size - 1, i) / 2 ** (filter_size - 1) for i in range(filter_size)]
    return torch.tensor(taps, dtype=torch.float64)


class BlurPool2d(nn.Module):
    """Every `stride`-th pixel of the blurred picture, (N, C, H, W) to (N, C, ceil(H / stride), ceil(W / stride)).

    `border`: what lies outside, the mirrored picture as in the paper, or the other side ("circular"), for which the
    blur before skipping commutes with shifts exactly.

    >>> BlurPool2d(8)(torch.randn(2, 8, 28, 28)).shape
    torch.Size([2, 8, 14, 14])
    """

    taps: Tensor

    def __init__(self, channels: int, filter_size: int = 3, stride: int = 2, border: Border = "reflect") -> None:
        super().__init__()
        check_count("channels", channels)
        check_count("stride", stride)
        if border not in get_args(Border):
            raise SoftEquivError(f"unknown border {border!r}; choose one of {', '.join(get_args(Border))}")
        self.channels, self.filter_size, self.stride, self.border = channels, filter_size, stride, border
        self.register_buffer("taps", binomial(filter_size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise SoftEquivError(f"this layer takes pictures (N, {self.channels}, H, W); got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise SoftEquivError(f"a blur mixes pixels and needs a floating-point picture; got {x.dtype}: convert it")
        kernel = torch.outer(self.taps, self.taps).to(x.dtype).expand(self.channels, 1, -1, -1)
        wide = padded(x, self.filter_size, self.border)
        return functional.conv2d(wide, kernel, stride=self.stride, groups=self.channels)

    def extra_repr(self) -> str:
        return f"{self.channels}, filter_size={self.filter_size}, stride={self.stride}, border={self.border!r}"


def padded(x: Tensor, window: int, border: Border) -> Tensor:
    """The picture with what a window of so many pixels reads about each of them, (..., H + window - 1, W + window - 1).

    An even window reads one pixel more on the right and below.
    """
    before, after = (window - 1) // 2, window // 2
    if min(x.shape[-2:]) <= after:
        raise SoftEquivError(
            f"a window of {window} pixels is too wide for a picture of {x.shape[-2]} x {x.shape[-1]}: use a smaller one"
        )
    return functional.pad(x, (before, after, before, after), mode=border)


class MaxBlurPool2d(nn.Module):
    """Max-pooling in two steps: the maximum about every pixel, then BlurPool in place of skipping.

    >>> MaxBlurPool2d(8)(torch.randn(2, 8, 28, 28)).shape
    torch.Size([2, 8, 14, 14])
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 2,
        filter_size: int = 3,
        stride: int = 2,
        border: Border = "reflect",
    ) -> None:
        super().__init__()
        check_count("kernel_size", kernel_size)
        self.kernel_size = kernel_size
        self.blur = BlurPool2d(channels, filter_size, stride, border)

    def forward(self, x: Tensor) -> Tensor:
        largest = functional.max_pool2d(padded(x, self.kernel_size, self.blur.border), self.kernel_size, stride=1)
        blurred: Tensor = self.blur(largest)
        return blurred


@dataclass(frozen=True)
class BlurGain(LevelGain):
    """gamma = (1 - sigma^2 / 4)^((f - 1) / 2): the binomial filter of f taps, f odd, as a gain under shifts of an axis.

    >>> from softequiv import spectrum
    >>> BlurGain(3).gamma(spectrum(grid(Shifts(4), 4)))
    tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    filter_size: int = 3

    def __post_init__(self) -> None:
        check_count("filter_size", self.filter_size)
        if self.filter_size % 2 == 0:
            raise GainError(
                f"a filter of {self.filter_size} taps moves pictures by half a pixel, which no gain does; "
                f"use {self.filter_size + 1} taps"
            )

    def gamma(self, of: Spectrum) -> Tensor:
        group = of.rep.group
        if not isinstance(group, Shifts) or len(group.sizes) != 1 or of.rep != grid(group, *group.sizes):
            raise GainError(
                f"the binomial filter is a gain under the shifts of one axis, grid(Shifts(n), n), not on {of.rep} "
                f"under {group}; filter a picture axis by axis, as blurred_kernel does"
            )
        return (1 - of.levels**2 / 4).clamp(min=0) ** ((self.filter_size - 1) // 2)


def blurred_kernel(kernel: Tensor, filter_size: int = 3) -> Tensor:
    """A kernel (..., H, W) on a circular grid, filtered by `BlurGain` along one axis and then the other.

    >>> blurred_kernel(torch.eye(5)[None, 2] * torch.eye(5)[:, 2:3])[1:4, 1:4] * 16
    tensor([[1., 2., 1.], [2., 4., 2.], [1., 2., 1.]])
    """
    gain = BlurGain(filter_size)
    for size in (kernel.shape[-1], kernel.shape[-2]):
        kernel = gain(kernel, grid(Shifts(size), size)).mT
    return kernel
