"""Large squares: the su2 rotation of n x n pixels conserves the total number of quanta of a finite oscillator.

In the eigenbasis of J_x along each axis (discrete Hermite functions, numbered k = 0 .. n - 1) the generator
p (x) q - q (x) p moves one quantum from one axis to the other. So it falls apart into 2n - 1 blocks of constant
k_1 + k_2, of size at most n: O(n^3) numbers instead of O(n^4).
"""

from __future__ import annotations

import torch

from softequiv._linalg import level_basis
from softequiv.reps import Square
from softequiv.reps.pixels import su2_axis
from softequiv.spectrum.base import Spectrum
from softequiv.spectrum.transforms import AlongAxis, AxisBlock, Block, Blocks


def oscillator(rep: Square) -> Spectrum:
    """The spectrum of a picture under SO(2) with the su2 action, exactly, for squares of any size."""
    n = rep.n
    derivative, position = su2_axis(n)
    # J_x is the commutator of the other two; its eigenvectors, highest first, number the quanta
    quanta = torch.linalg.eigh(derivative @ position - position @ derivative)[1].flip(1)
    p, q = quanta.T @ derivative @ quanta, quanta.T @ position @ quanta
    sigma = torch.empty(rep.dim, dtype=torch.float64)
    blocks = []
    for total in range(2 * n - 1):
        first = torch.arange(max(0, total - n + 1), min(total, n - 1) + 1)
        second = total - first
        along, across = (first[:, None], first), (second[:, None], second)
        block = p[along] * q[across] - q[along] * p[across]
        sigma_block, basis = level_basis(block[None])
        index = (first * n + second)[None]
        sigma[index] = sigma_block
        blocks.append(Block(index, basis))
    rows, columns = AlongAxis(1, n, (AxisBlock(1, n, quanta),)), AlongAxis(n, 1, (AxisBlock(1, n, quanta),))
    return Spectrum.of(rep, (rows, columns, Blocks(tuple(blocks))), sigma)
