"""BlurPool: the binomial filter as its authors define it, and as a gain of the shift spectrum (Remark 1 of the
paper)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from digits import ABOVE_CHANCE, accuracy_on_digits, digits
from softequiv.baselines.blurpool import BlurGain, BlurPool2d, MaxBlurPool2d, binomial, blurred_kernel
from softequiv.errors import GainError, SoftEquivError
from softequiv.spectrum import spectrum

EXACT = 1e-10
odd_filters = st.sampled_from([1, 3, 5, 7])
LIMITED = settings(max_examples=25)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def circular(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    """sum_z K(z) x(p + z) with places modulo the picture's size, the kernel as large as the picture, z from its
    middle: term by term."""
    height, width = x.shape[-2:]
    out = torch.zeros(len(x), len(kernel), height, width, dtype=x.dtype)
    for a in range(height):
        for b in range(width):
            moved = x.roll((height // 2 - a, width // 2 - b), (-2, -1))
            out += torch.einsum("oi,nihw->nohw", kernel[:, :, a, b], moved)
    return out[..., ::stride, ::stride]


def blurred_reference(x: Tensor, filter_size: int, stride: int = 1) -> Tensor:
    """sum_ab t_a t_b x(p + (a, b) - (f - 1) // 2), modulo the size, at every stride-th pixel."""
    taps = [math.comb(filter_size - 1, i) / 2 ** (filter_size - 1) for i in range(filter_size)]
    middle = (filter_size - 1) // 2
    total = torch.zeros_like(x)
    for a, first in enumerate(taps):
        for b, second in enumerate(taps):
            total += first * second * x.roll((middle - a, middle - b), (-2, -1))
    return total[..., ::stride, ::stride]


@LIMITED
@given(st.integers(1, 6), st.integers(1, 3), st.integers(7, 10), st.integers(7, 10))
def test_blurpool_is_the_formula(filter_size: int, stride: int, height: int, width: int) -> None:
    x = noise(2, 3, height, width)
    found = BlurPool2d(3, filter_size, stride, "circular").double()(x)
    assert torch.allclose(found, blurred_reference(x, filter_size, stride), atol=EXACT)


@LIMITED
@given(st.integers(1, 3), st.integers(7, 10))
def test_max_blur_pool_is_the_blurred_maximum(window: int, size: int) -> None:
    x = noise(2, 3, size, size)
    middle = (window - 1) // 2
    shifts = [x.roll((middle - a, middle - b), (-2, -1)) for a in range(window) for b in range(window)]
    expected = blurred_reference(torch.stack(shifts).amax(0), 3, 2)
    found = MaxBlurPool2d(3, window, border="circular").double()(x)
    assert torch.allclose(found, expected, atol=EXACT)


def test_blur_keeps_constants_at_mirrored_borders() -> None:
    assert torch.allclose(BlurPool2d(2, 5)(torch.ones(1, 2, 9, 9)), torch.ones(()))


@given(st.integers(1, 12), odd_filters)
def test_the_gain_is_the_transfer_function_of_the_filter(places: int, filter_size: int) -> None:
    """Every eigenvector of the shift spectrum is one of the blur's, with the gain as eigenvalue."""
    rep = se.grid(se.Shifts(places), places)
    levels = spectrum(rep)
    basis = levels.basis()  # (places, D)
    taps, middle = binomial(filter_size), (filter_size - 1) // 2
    blurred = sum(tap * basis.roll(middle - i, 0) for i, tap in enumerate(taps))
    assert torch.allclose(blurred, basis * BlurGain(filter_size).gamma(levels)[levels.level_of], atol=EXACT)


@LIMITED
@given(st.integers(5, 8), st.integers(5, 8), st.sampled_from([3, 5]), st.sampled_from([1, 2]))
def test_the_shift_filter_contains_blurpool(height: int, width: int, filter_size: int, stride: int) -> None:
    """conv(x, gamma W) = BlurPool(conv(x, W)) = conv(blur x, W), circular: Remark 1 with the binomial's own gain."""
    x, kernel = noise(2, 2, height, width), noise(3, 2, height, width, seed=1)
    through_gain = circular(x, blurred_kernel(kernel, filter_size), stride)
    after = BlurPool2d(3, filter_size, stride, "circular").double()(circular(x, kernel))
    before = circular(BlurPool2d(2, filter_size, 1, "circular").double()(x), kernel, stride)
    size = float(after.norm())
    assert float((through_gain - after).norm()) <= EXACT * size
    assert float((through_gain - before).norm()) <= EXACT * size


def test_a_small_convolution_followed_by_blurpool_is_one_convolution() -> None:
    """A 3 x 3 kernel with a rim of zeros, wide enough for the blur, needs no circle: 3 + 3 - 1 = 5 pixels."""
    x, conv = noise(2, 2, 8, 8), nn.Conv2d(2, 4, 3, bias=False).double()
    kernel = blurred_kernel(functional.pad(conv.weight.detach(), (1, 1, 1, 1)), 3)
    around = functional.pad(x, (1, 1, 1, 1), mode="circular")
    two_steps = BlurPool2d(4, border="circular").double()(functional.conv2d(around, conv.weight))
    one_step = functional.conv2d(functional.pad(x, (2, 2, 2, 2), mode="circular"), kernel, stride=2)
    assert torch.allclose(one_step, two_steps, atol=EXACT)


def test_the_papers_gains_are_low_pass_filters_too() -> None:
    """A hard cut-off keeps the Fourier coefficients below it, as an ideal low-pass filter does."""
    rep = se.grid(se.Shifts(12), 12)
    weight = noise(5, 12)
    frequency = 2  # sigma = 2 sin(pi k / 12)
    between = 2 * math.sin(math.pi * (frequency + 0.5) / 12)
    coefficients = torch.fft.rfft(weight)
    coefficients[:, frequency + 1 :] = 0
    assert torch.allclose(se.hard(between)(weight, rep), torch.fft.irfft(coefficients, 12), atol=EXACT)


def shift_error(model: nn.Module, x: Tensor) -> float:
    """The mean change of an answer when the picture moves by one pixel, as a share of the answer."""
    with torch.no_grad():
        y = model(x)
        moved = [model(x.roll(step, axis)) for step in (1, -1) for axis in (-2, -1)]
    changes = [((z - y).norm(dim=-1) / y.norm(dim=-1)).mean() for z in moved]
    return float(torch.stack(changes).mean())


def strided(last: Callable[[int], nn.Module]) -> nn.Module:
    """Two circular convolutions, each followed by its way of halving, and means over the picture."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for before, after in ((1, 16), (16, 16)):
        parts += [nn.Conv2d(before, after, 3, padding=1, padding_mode="circular"), nn.ReLU(), last(after)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_blur_makes_strided_convolutions_consistent_under_shifts() -> None:
    pictures = digits()[0][:256]
    skipped = shift_error(strided(lambda channels: nn.MaxPool2d(1, 2)), pictures)
    blurred = shift_error(strided(lambda channels: BlurPool2d(channels, 3, border="circular")), pictures)
    largest = shift_error(strided(lambda channels: nn.MaxPool2d(2, 2)), pictures)
    both = shift_error(strided(lambda channels: MaxBlurPool2d(channels, border="circular")), pictures)
    assert blurred < skipped / 2
    assert both < largest / 2


def test_a_network_with_blurpool_learns_digits() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), MaxBlurPool2d(16)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), BlurPool2d(32), nn.Flatten(), nn.Linear(128, 10)),
    )
    assert accuracy_on_digits(model, 8, 5e-3) > ABOVE_CHANCE


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: BlurPool2d(0), SoftEquivError, "channels is a whole number of at least 1; got 0"),
        (lambda: BlurPool2d(2, 0), SoftEquivError, "filter_size is a whole number"),
        (lambda: BlurPool2d(2, stride=0), SoftEquivError, "stride is a whole number"),
        (lambda: BlurPool2d(2, border="zeros"), SoftEquivError, "unknown border 'zeros'"),  # type: ignore[arg-type]
        (lambda: BlurPool2d(2)(torch.zeros(1, 3, 8, 8)), SoftEquivError, r"\(N, 2, H, W\); got \(1, 3, 8, 8\)"),
        (lambda: BlurPool2d(2, 7)(torch.zeros(1, 2, 3, 3)), SoftEquivError, "too wide for a picture of 3 x 3"),
        (lambda: BlurPool2d(2)(torch.ones(1, 2, 8, 8, dtype=torch.uint8)), SoftEquivError, "needs a floating-point"),
        (lambda: MaxBlurPool2d(2)(torch.ones(1, 2, 8, 8).long()), SoftEquivError, "needs a floating-point"),
        (lambda: MaxBlurPool2d(2, 0), SoftEquivError, "kernel_size is a whole number"),
        (lambda: BlurGain(4), GainError, "half a pixel, which no gain does; use 5 taps"),
        (lambda: BlurGain(3).on(se.grid(se.Shifts(4, 4), 4, 4)), GainError, "filter a picture axis by axis"),
        (lambda: BlurGain(3).on(se.grid(se.C(4), 4, 4)), GainError, "under C4"),
    ],
)
def test_bad_input_is_a_sentence(attempt: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()
