"""How large can a convolution or a window over pixels make its input? Upper bounds on operator norms, the least of
several that hold, for kernels (out, in / groups, *k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from softequiv.certify.operator import spectral_norm

MOST_WORK = 2e9  # cubes of sides, summed over frequencies: some seconds of eigenvalues on one core


def windows_over_a_pixel(kernel: int, stride: int, dilation: int) -> int:
    """In how many windows of an axis one pixel can lie."""
    return math.ceil(kernel / stride) if dilation == 1 else kernel


def convolution_norm(
    kernel: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    circular: bool = False,
) -> float:
    """A bound on ||x -> kernel * x||_op for inputs of these sizes, zeros outside, or `circular` with stride 1.

    The least of: the matrix of 1-norms of the kernels (Young); the map on patches times the root of the number of
    windows over a pixel; the largest singular value over the frequencies of a circle on which nothing wraps round.

    >>> round(convolution_norm(torch.ones(1, 1, 3, dtype=torch.float64), [100], [1], [1]), 2)
    3.0
    """
    maps = kernel.to(torch.float64).unflatten(0, (groups, -1))  # (groups, out, in, *k)
    spans = maps.shape[3:]
    if not bool(maps.any()):
        return 0.0
    if math.prod(spans) == 1:
        return spectral_norm(maps.flatten(2))
    young = spectral_norm(maps.abs().flatten(3).sum(-1))
    covers = math.prod(windows_over_a_pixel(*axis) for axis in zip(spans, stride, dilation, strict=True))
    bounds = [young, spectral_norm(maps.flatten(2)) * math.sqrt(covers)]
    lengths = [n if circular else n + d * (k - 1) for n, d, k in zip(sizes, dilation, spans, strict=True)]
    side = min(maps.shape[1:3])
    if math.prod(lengths) * groups * side**3 <= MOST_WORK:
        bounds.append(spectral_peak(maps, lengths, dilation))
    return min(bounds)


def spectral_peak(maps: Tensor, lengths: Sequence[int], dilation: Sequence[int]) -> float:
    """max over the frequencies of a circle of ||sum_j maps[..., j] exp(-2 pi i f j)||_2."""
    *outer, last = [phases(k, m, d) for k, m, d in zip(maps.shape[3:], lengths, dilation, strict=True)]
    last = last[: lengths[-1] // 2 + 1]  # the kernel is real: the other half is conjugate
    rows = torch.einsum("goi...k,mk->mgoi...", maps.to(torch.complex128), last)
    if not outer:
        return spectral_norm(rows)
    return max(spectral_norm(torch.einsum("mgoik,k->mgoi", rows, phase)) for phase in outer[0])


def phases(k: int, length: int, dilation: int) -> Tensor:
    """exp(-2 pi i f d j / m), (m, k)."""
    turns = torch.outer(torch.arange(length), dilation * torch.arange(k)).to(torch.float64) % length / length
    return torch.polar(torch.ones_like(turns), -2 * math.pi * turns)
