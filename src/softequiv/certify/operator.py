"""How much can a group element change the map that a weight stands for, in operator norm? Rigorous: singular values are
computed in full, since an iteration that converges from below would be no guarantee.

With L_i W = W d rho_X(A_i) - d rho_Y(A_i) W (a step: W rho_X(s) - rho_Y(s) W), every g on a path of length r obeys

    ||W rho_X(g) - rho_Y(g) W||_op <= min(kappa r sqrt(sum_i ||L_i W||_op^2), 2 ||W - P_0 W||_op, ||.||_F bound),

the second where the representation is orthogonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._linalg import identity_like
from softequiv.reps import Hom, Rep, TensorProduct, tensor_product, terms_of
from softequiv.reps.base import is_dual
from softequiv.spectrum import Spectrum

LARGEST_GENERATOR = 4096  # those of a larger space would take more than 134 MB each; the other two bounds remain
SOLVER_SLACK = 1e-9  # eigenvalues of a Gram matrix of this library's sizes are right to 1e-12, relative to the largest


@dataclass(frozen=True)
class LinearMap:
    """A weight as the linear maps it stands for, (blocks, rows, columns): one, or one for each group of channels.

    `moved` holds L_i W for every generator, (k + m, blocks, rows, columns), or None where the space is too large for
    them; `moving` is W - P_0 W.
    """

    matrix: Tensor
    moved: Tensor | None
    moving: Tensor


def spectral_norm(matrices: Tensor) -> float:
    """The largest singular value of any of (..., m, n) real or complex matrices, not less than it is.

    >>> round(spectral_norm(torch.diag(torch.tensor([3.0, -4.0]))), 6)
    4.0
    """
    if matrices.numel() == 0:
        return 0.0
    scale = float(matrices.abs().amax())
    if scale == 0:
        return 0.0
    if not math.isfinite(scale):
        return math.inf
    x = matrices / scale
    gram = x @ x.mH if x.shape[-2] <= x.shape[-1] else x.mH @ x
    largest = float(torch.linalg.eigvalsh(gram)[..., -1].amax())
    return scale * math.sqrt(max(largest, 0.0)) * (1 + SOLVER_SLACK)


def times_generators(x: Tensor, rep: Rep, *, transposed: bool = False) -> Tensor:
    """x D_i, or x D_i^T, with D_i = d rho(A_i), then rho(s_j) - I: (..., dim) to (k + m, ..., dim), by terms of a sum.

    These are not `rep.rates()`: rates count some pictures that rest as moving, and what they add can cancel motion.
    """
    parts, start = [], 0
    for term, copies in terms_of(rep):
        width = term.dim * copies
        part = x[..., start : start + width].unflatten(-1, (copies, term.dim))
        steps = term.steps()
        generators = torch.cat([term.lie(), steps - identity_like(steps)])
        generators = generators.mT if transposed else generators
        parts.append(torch.einsum("...d,kde->k...e", part, generators).flatten(-2))
        start += width
    return torch.cat(parts, -1)


def largest_term(rep: Rep) -> int:
    """The size of the largest generator that a space needs."""
    return max(term.dim for term, _ in terms_of(rep))


def as_hom(rep: Rep) -> Hom | None:
    """The maps that a weight's space consists of: itself, or those on patches for kernels between typed fields."""
    if isinstance(rep, Hom):
        return rep
    if isinstance(rep, TensorProduct) and isinstance(rep.factors[0], Hom) and rep.orthogonal:
        maps = rep.factors[0]
        return tensor_product(maps.source, *rep.factors[1:]) >> maps.target
    return None


def linear_map(view: Tensor, of: Spectrum, blocks: int = 1) -> LinearMap | None:
    """The map behind a weight (..., *rep.shape) in float64; None for one that is no map.

    A weight between spaces is its own matrix. A weight on a grid, (rows, channels, *grid), is the map from patches or
    flattened pictures (channels x grid) to numbers that stand still. `blocks` maps may lie along the first axis.
    """
    rep = of.rep
    still = of.scale(view, (of.levels == 0).to(torch.float64))
    maps = as_hom(rep)
    if maps is not None:
        shape = (-1, maps.target.dim, maps.source.dim)
        matrix, moving = view.reshape(shape), (view - still).reshape(shape)
        if max(largest_term(maps.source), largest_term(maps.target)) > LARGEST_GENERATOR:
            return LinearMap(matrix, None, moving)
        moved = times_generators(matrix, maps.source) - times_generators(matrix.mT, maps.target, transposed=True).mT
        return LinearMap(matrix, moved, moving)
    if view.ndim <= len(rep.shape):
        return None
    rows = view.shape[0] // blocks
    shape = (blocks, rows, -1)
    matrix, moving = view.reshape(shape), (view - still).reshape(shape)
    if rep.dim > LARGEST_GENERATOR:
        return LinearMap(matrix, None, moving)
    flat = view.reshape(-1, rep.dim)  # in a dual, w rho(s) - w needs no inverse of rho(s)
    moved = times_generators(flat, rep.T) if is_dual(rep) else times_generators(flat, rep, transposed=True)
    return LinearMap(matrix, moved.reshape(len(moved), *shape), moving)


def operator_change(of: Spectrum, linear: LinearMap, within: float, frobenius: float) -> float:
    """A bound on sup ||W rho_X(g) - rho_Y(g) W||_op over elements of path length up to `within`.

    `frobenius` bounds the same in Frobenius norm, which is never smaller.
    """
    bounds = [frobenius]
    if linear.moved is not None:
        reach = of.rep.group.reach(within)
        bounds.append(of.kappa(reach) * reach * math.hypot(*(spectral_norm(moved) for moved in linear.moved)))
    if of.rep.orthogonal:
        bounds.append(2 * spectral_norm(linear.moving))
    return min(bounds)
