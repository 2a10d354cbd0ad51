"""What does the paper's fast rule cost? Its Schur construction in plain Python, as the paper states it, to be timed.

The library's own is `softequiv.schur`, which computes the same in a few products.
"""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

Array = NDArray[Any]


def schur_rule(A: Array, theta: Array, b: float) -> Array:
    """The paper's construction: real Schur form of A, then block by block keep, Sym or zero."""
    import scipy.linalg  # for tests and benchmarks alone

    form, U = scipy.linalg.schur(A, output="real")
    theta = U.T @ theta @ U
    blocks = diagonal_blocks(form)
    rates = [abs(complex(form[s, s][0, 0], form[s, s][0, -1] if s.stop - s.start == 2 else 0)) for s in blocks]
    W = numpy.zeros_like(theta)
    for S, rate_S in zip(blocks, rates, strict=True):
        for T, rate_T in zip(blocks, rates, strict=True):
            if rate_S + rate_T <= b:
                W[S, T] = theta[S, T]
            elif abs(rate_S - rate_T) < 1e-9 and theta[S, T].shape in ((1, 1), (2, 2)):
                W[S, T] = sym(form[S, S], form[T, T], theta[S, T])
    filtered: Array = U @ W @ U.T
    return filtered


def diagonal_blocks(form: Array) -> list[slice]:
    """Where the 1 x 1 and 2 x 2 blocks of a real Schur form lie."""
    blocks, start = [], 0
    while start < len(form):
        size = 2 if start + 1 < len(form) and abs(form[start + 1, start]) > 1e-9 else 1
        blocks.append(slice(start, start + size))
        start += size
    return blocks


def sym(S: Array, T: Array, block: Array) -> Array:
    """The part of a block that commutes; LAPACK gives 2 x 2 blocks of either orientation, which must be heeded."""
    if block.shape == (1, 1):
        return block
    (a, b), (c, d) = block
    sign = numpy.sign(S[0, 1] * T[0, 1])
    p, q = (a + sign * d) / 2, (b - sign * c) / 2
    return numpy.array([[p, q], [-sign * q, sign * p]])
