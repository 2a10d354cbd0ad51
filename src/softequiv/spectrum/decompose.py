"""How one space falls apart into small pieces that the group does not mix: closed form, joint eigenbasis, or a
random commuting matrix.

The pieces of a direct sum are those of its terms, so multiplicities cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import LEVEL_TOLERANCE, canonical_signs, runs, skew, symmetric
from softequiv.reps import Decomposition, Piece, Rep, terms_of
from softequiv.reps.base import action_rates
from softequiv.spectrum.transforms import AxisBlock

NEARLY_EQUAL = 1e-6  # eigenvalues closer than this are refined together, so that rounding cannot mix distinct ones
UNDIVIDED = 8  # a space this small is a piece as it is: a change of basis would cost more than it saves
SEED = 20260101  # of the random commuting matrix; any generic one gives the same spectrum
ITERATIONS = 400  # conjugate gradients need one per distinct level, a few dozen for the groups in use


class DecompositionError(RuntimeError):
    """No decomposition was found; the dense route is left."""


@dataclass(frozen=True)
class Axis:
    """One axis of a weight: its bases term by term, and all its pieces with places on the whole axis."""

    dim: int
    blocks: tuple[AxisBlock, ...]
    pieces: tuple[Piece, ...]


@cached
def axis(rep: Rep, commuting: bool) -> Axis:
    """Decompose a space term by term."""
    blocks, pieces = [], []
    offset = 0
    for term, copies in terms_of(rep):
        found = decompose(term, commuting)
        blocks.append(AxisBlock(copies, term.dim, found.basis))
        starts = offset + term.dim * torch.arange(copies)
        pieces += [Piece(p.rates, (starts[:, None, None] + p.index).flatten(0, 1)) for p in found.pieces]
        offset += term.dim * copies
    return Axis(rep.dim, tuple(blocks), tuple(pieces))


@cached
def decompose(rep: Rep, commuting: bool) -> Decomposition:
    """The pieces of one space. With `commuting`, the generators commute and the pieces have one or two dimensions."""
    known = rep.decomposition()
    if known is not None:
        return known
    rates = action_rates(rep)  # products are made of these, where those of a dual or of maps may be transposed
    if rep.dim == 1 or len(rates) == 0:
        return Decomposition(None, (Piece(rates[:, :1, :1], torch.arange(rep.dim)[:, None]),))
    if not commuting and rep.dim <= UNDIVIDED:
        return Decomposition(None, (Piece(rates, torch.arange(rep.dim)[None]),))
    return joint_eigenbasis(rates) if commuting else irreducible_pieces(rates)


def joint_eigenbasis(rates: Tensor) -> Decomposition:
    """Pieces of commuting normal matrices (k, d, d): real eigenvectors, and planes a + ib for complex pairs.

    A generic combination of the skew parts separates what turns from what does not; what is nearly equal is refined by
    each matrix in turn. A combination in which two speeds happen to cancel is noticed by the residual, and redrawn.
    """
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(3):
        weights = 1 + torch.rand(len(rates), dtype=torch.float64, generator=generator)
        found = eigenbasis_from(rates, torch.einsum("k,kab->ab", weights, skew(rates)))
        if residual(rates, found) <= 1e-9 * max(1.0, float(rates.abs().max())):
            return found
    raise DecompositionError("the generators have no joint eigenbasis")


def eigenbasis_from(rates: Tensor, turning: Tensor) -> Decomposition:
    """The joint eigenbasis, if this combination of the skew parts is generic."""
    speed, vectors = torch.linalg.eigh(-1j * turning)
    scale = max(1.0, float(speed.abs().max()))
    moving = vectors[:, speed > LEVEL_TOLERANCE * scale]
    resting = real_basis(vectors[:, speed.abs() <= LEVEL_TOLERANCE * scale])
    operators = [*symmetric(rates).to(torch.complex128), *(-1j * skew(rates))]
    moving = refine(moving, speed[speed > LEVEL_TOLERANCE * scale], operators if len(rates) > 1 else operators[:1])
    resting = refine(resting, torch.zeros(resting.shape[1], dtype=torch.float64), list(symmetric(rates)))
    resting = canonical_signs(resting)
    pieces = [Piece((v @ rates @ v)[:, None, None], torch.tensor([[i]])) for i, v in enumerate(resting.T)]
    values = torch.einsum("ai,kab,bi->ki", moving.conj(), rates.to(torch.complex128), moving)
    count, rest = moving.shape[1], resting.shape[1]
    for i in range(count):
        a, b = values[:, i].real, values[:, i].imag
        # u = (c - i s)/sqrt 2 with N u = (a + ib) u means N c = a c + b s, N s = a s - b c
        matrix = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)
        pieces.append(Piece(matrix, torch.tensor([[rest + i, rest + count + i]])))
    root = 2**0.5
    return Decomposition(torch.cat([resting, root * moving.real, -root * moving.imag], 1), tuple(pieces))


def residual(rates: Tensor, found: Decomposition) -> float:
    """Largest entry by which the pieces fail to add up to the whole."""
    if rates.numel() == 0 or found.basis is None:
        return 0.0
    rebuilt = torch.zeros_like(rates)
    for piece in found.pieces:
        for index in piece.index:
            rebuilt[:, index[:, None], index] = piece.rates
    return float((found.basis.T @ rates @ found.basis - rebuilt).abs().max())


def real_basis(vectors: Tensor) -> Tensor:
    """A real orthonormal basis of a space that is closed under conjugation."""
    projector = (vectors @ vectors.mH).real
    return torch.linalg.eigh(projector)[1][:, projector.shape[0] - vectors.shape[1] :]


def refine(vectors: Tensor, values: Tensor, operators: list[Tensor]) -> Tensor:
    """Rotate columns with nearly equal values into joint eigenvectors of Hermitian operators that commute."""
    if not operators or vectors.shape[1] < 2:
        return vectors
    order = values.argsort()
    vectors, values = vectors[:, order], values[order]
    out = []
    for run in runs(values, NEARLY_EQUAL):
        part = vectors[:, run]
        if part.shape[1] > 1:
            inner, rotation = torch.linalg.eigh(part.mH @ operators[0] @ part)
            part = refine(part @ rotation, inner, operators[1:])
        out.append(part)
    return torch.cat(out, 1)


def irreducible_pieces(rates: Tensor) -> Decomposition:
    """Irreducible pieces of a set of matrices that is closed under transposition.

    A random symmetric matrix that commutes with all of them has the irreducible subspaces as eigenspaces; a second one
    connects equivalent subspaces and so aligns their bases.
    """
    dim = rates.shape[-1]
    generator = torch.Generator().manual_seed(SEED)
    first, second = (
        commuting_matrix(rates, torch.randn(dim, dim, dtype=torch.float64, generator=generator)) for _ in range(2)
    )
    values, vectors = torch.linalg.eigh(symmetric(first))
    spaces = [vectors[:, run] for run in runs(values, 1e-8 * float(values.abs().max()))]
    classes: list[list[Tensor]] = []
    for space in spaces:
        for members in classes:
            bridge = members[0].T @ second @ space
            size = torch.linalg.matrix_norm(bridge, 2) if bridge.shape[0] == bridge.shape[1] else torch.tensor(0.0)
            if size > 1e-6:
                members.append(space @ (bridge / size).T)
                break
        else:
            classes.append([space])
    pieces, offset = [], 0
    for members in classes:
        p = members[0].shape[1]
        pieces.append(Piece(members[0].T @ rates @ members[0], offset + torch.arange(len(members) * p).reshape(-1, p)))
        offset += len(members) * p
    found = Decomposition(torch.cat([space for members in classes for space in members], 1), tuple(pieces))
    error = residual(rates, found)
    if error > 1e-9 * max(1.0, float(rates.abs().max())):
        raise DecompositionError(f"the pieces do not add up: residual {error:.1e}")
    return found


def commuting_matrix(rates: Tensor, start: Tensor) -> Tensor:
    """The orthogonal projection of a matrix onto those that commute with all `rates`, by conjugate gradients on the
    Laplacian.

    The Laplacian X -> sum_i L_i^T L_i X, L_i X = X D_i - D_i X, has few distinct eigenvalues, so few steps are needed.
    """

    def laplacian(x: Tensor) -> Tensor:
        moved = x @ rates - rates @ x
        return (moved @ rates.mT - rates.mT @ moved).sum(0)

    solution = torch.zeros_like(start)
    residual = laplacian(start)
    direction, energy = residual, residual.square().sum()
    goal = (1e-15 * start.norm() * max(1.0, float(rates.square().sum()) / start.shape[0])) ** 2
    for _ in range(ITERATIONS):
        if energy <= goal:
            break
        image = laplacian(direction)
        step = energy / (direction * image).sum()
        solution, residual = solution + step * direction, residual - step * image
        energy, previous = residual.square().sum(), energy
        direction = residual + energy / previous * direction
    return start - solution
