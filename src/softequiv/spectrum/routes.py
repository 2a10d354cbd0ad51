"""The cheapest exact way to a spectrum: characters where generators commute, small blocks where they do not, dense
as the last resort.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import LEVEL_TOLERANCE, Frozen, canonical_signs, identity_like, is_orthogonal, level_basis
from softequiv.errors import PerformanceWarning, TooLargeError
from softequiv.reps import LARGEST_SQUARE, Dual, Hom, Rep, Square, Sum, TensorProduct, product_rates, scalar, terms_of
from softequiv.spectrum.base import SMALL_OPERATOR, Spectrum
from softequiv.spectrum.decompose import UNDIVIDED, Axis, DecompositionError, axis
from softequiv.spectrum.oscillator import oscillator
from softequiv.spectrum.transforms import AlongAxis, AxisBlock, Block, Blocks, Butterfly, Dense, Pairs, Transform

SLOW_DENSE = 1500  # a dense SVD of this size takes about five seconds
LARGEST_DENSE = 6000  # and of this size minutes and gigabytes
LARGEST_BLOCK = 3000  # one irreducible block
LARGEST_STACK = 8 << 30  # bytes of all generators as matrices
SMALL_STACK = 1 << 22  # up to this one product of all of them is faster than sums of many
UNCERTAIN = 1e-6  # of the largest square: the root of a smaller one is not known to the tolerance of levels
# sizes and numbers of pairs of terms up to which one matrix a pair is faster than one basis an axis, where such a basis
# leaves blocks, and where it leaves characters
PAIRS_OR_BLOCKS, PAIRS_OR_CHARACTERS = (256, 36), (SMALL_OPERATOR, 16)


@cached
def spectrum(rep: Rep) -> Spectrum:
    """Levels and basis of the group Laplacian on a weight's space, cached by value.

    >>> import softequiv as se
    >>> se.spectrum(se.grid(se.SO(2), 3, 3)).counts.tolist()
    [3, 2, 2, 2]
    """
    if isinstance(rep, Square) and rep.n > LARGEST_SQUARE:
        return oscillator(rep)
    try:
        if copies_of_small_pairs(rep):
            return pairs(rep)
        if rep.group.abelian and rep.normal and steps_keep_lengths(rep) and not small_with_multiplicities(rep):
            return characters(rep)
        if closed_under_transposition(rep):
            return small_blocks(rep)
    except DecompositionError:
        pass
    return dense(rep)


def steps_keep_lengths(rep: Rep) -> bool:
    """Whether every step is orthogonal, so that W rho_X(s) - rho_Y(s) W and rho_W(s) W - W have one length."""
    bases = [space.base if isinstance(space, Dual) else space for space in rep.axes]
    return rep.orthogonal or all(is_orthogonal(base.steps()) for base in bases)


def small_with_multiplicities(rep: Rep) -> bool:
    """Whether a weight maps between copies of small spaces without a closed form: one matrix per pair will do."""
    terms = [term for space in rep.axes for term, _ in terms_of(space)]
    return (
        rep.orthogonal
        and len(rep.axes) == 2
        and all(term.dim <= UNDIVIDED for term in terms)
        and any(term.dim > 1 and term.decomposition() is None for term in terms)
    )


def closed_under_transposition(rep: Rep) -> bool:
    """Whether the generators' transposes lie in the algebra they generate, so that pieces are orthogonal to each
    other.
    """
    if isinstance(rep, Dual):
        return closed_under_transposition(rep.base)
    if isinstance(rep, Sum):
        return all(closed_under_transposition(term) for term, _ in rep.terms)
    if isinstance(rep, TensorProduct) or rep.axes != (rep,):
        return all(closed_under_transposition(space) for space in rep.axes)
    if rep.orthogonal:
        return True
    lie, steps = rep.lie(), rep.steps()
    asymmetry = torch.stack([part.flatten(1).abs().amax(1) for part in (lie - lie.mT, lie + lie.mT)])
    flat = bool((asymmetry.amin(0) < 1e-12).all())  # each Lie generator is symmetric or skew
    return flat and bool(torch.allclose(steps @ steps, identity_like(steps))) and bool(torch.allclose(steps, steps.mT))


def copies_of_small_pairs(rep: Rep) -> bool:
    """Whether a weight maps copies of few small spaces to copies of few small spaces, or lies in copies of them."""
    if not isinstance(rep, (Hom, Sum)):
        return False
    rows, columns = row_and_column_terms(rep)
    size = max(term.dim for term, _ in rows) * max(term.dim for term, _ in columns)
    largest, most = PAIRS_OR_CHARACTERS if rep.group.abelian else PAIRS_OR_BLOCKS
    return size <= largest and len(rows) * len(columns) <= most and max(copies for _, copies in rows + columns) > 1


def row_and_column_terms(rep: Rep) -> tuple[tuple[tuple[Rep, int], ...], tuple[tuple[Rep, int], ...]]:
    """The terms of Y and X of a space of maps; a vector of Y is a map from a single number."""
    if isinstance(rep, Hom):
        return terms_of(rep.target), terms_of(rep.source)
    return terms_of(rep), ((scalar(rep.group), 1),)


def pairs(rep: Rep) -> Spectrum:
    """Hom(+ m_i V_i, + n_j U_j) is m_i n_j copies of each Hom(V_i, U_j): the spectra of these serve all copies."""
    rows, columns = row_and_column_terms(rep)
    maps = isinstance(rep, Hom)  # else vectors, which have rates of their own: as maps from a number, others
    small = [[spectrum(V >> U if maps else U) for V, _ in columns] for U, _ in rows]
    sigma = [
        [
            own.levels[own.level_of].reshape(1, U.dim, 1, V.dim).expand(n, -1, m, -1).reshape(n * U.dim, m * V.dim)
            for own, (V, m) in zip(of_row, columns, strict=True)
        ]
        for of_row, (U, n) in zip(small, rows, strict=True)
    ]
    bases = tuple(tuple(own.basis() if own.transforms else None for own in of_row) for of_row in small)
    high, wide = (tuple((copies, term.dim) for term, copies in terms) for terms in (rows, columns))
    return Spectrum.of(rep, (Pairs(high, wide, bases),), torch.cat([torch.cat(row, 1) for row in sigma]).flatten())


@dataclass(frozen=True)
class Characters:
    """How each coordinate of a space of commuting generators turns: still places, and pairs of places (cosine, sine).

    Values (places, k + m) are complex: rates for Lie generators, rates + 1 (eigenvalues) for steps.
    """

    dim: int
    still: Tensor
    still_values: Tensor
    cosine: Tensor
    sine: Tensor
    pair_values: Tensor

    def levels(self, k: int) -> Tensor:
        """sqrt(sum |lambda|^2 + sum |mu - 1|^2) of every coordinate, (dim,)."""
        sigma = torch.empty(self.dim, dtype=torch.float64)
        sigma[self.still] = level(self.still_values, k)
        sigma[self.cosine] = sigma[self.sine] = level(self.pair_values, k)
        return sigma


def characters(rep: Rep) -> Spectrum:
    """Joint eigenbasis along each axis; products of pairs by butterflies: level^2 = sum |lambda|^2 + sum |mu - 1|^2."""
    k = len(rep.group.lie)
    spaces = leaves(rep)
    axes = [axis(space, True) for space in spaces]
    transforms = along_axes(axes)
    total: Characters | None = None
    for part, after in zip(axes, products_after(axes), strict=True):
        own = characters_of(part, k)
        if total is None:
            total = own
        else:
            total, mixing = combined(total, own, k)
            if mixing.numel():
                places = mixing[..., None] * after + torch.arange(after)
                transforms.append(Butterfly(places.flatten(1)))
    assert total is not None
    return Spectrum.of(rep, tuple(transforms), total.levels(k))


def summed_rates(rep: Rep) -> Tensor:
    """For every coordinate of `characters(rep)`, the sum over the axes of the eigenvalues' magnitudes: (D,)."""
    k, total = len(rep.group.lie), torch.zeros(1, dtype=torch.float64)
    for space in leaves(rep):
        total = (total[:, None] + characters_of(axis(space, True), k).levels(k)).flatten()
    return total


def leaves(rep: Rep) -> list[Rep]:
    """The finest tensor factors of a space, in the order of its axes."""
    parts = rep.axes
    if len(parts) == 1:
        return [rep]
    return [leaf for part in parts for leaf in leaves(part)]


def products_after(axes: list[Axis]) -> list[int]:
    """For each axis, the number of coordinates behind it."""
    return [math.prod(later.dim for later in axes[i + 1 :]) for i in range(len(axes))]


def single_block(axes: list[Axis]) -> AxisBlock | None:
    """The block of a single axis that is one space without copies."""
    blocks = axes[0].blocks
    return blocks[0] if len(axes) == len(blocks) == blocks[0].copies == 1 else None


def along_axes(axes: list[Axis]) -> list[Transform]:
    """The bases of all axes; a single one without copies as a plain dense basis."""
    alone = single_block(axes)
    if alone is not None and alone.basis is not None:
        return [Dense(alone.basis)]
    before = [math.prod(earlier.dim for earlier in axes[:i]) for i in range(len(axes))]
    return [
        AlongAxis(b, after, part.blocks)
        for part, b, after in zip(axes, before, products_after(axes), strict=True)
        if any(block.basis is not None for block in part.blocks)
    ]


def characters_of(part: Axis, k: int) -> Characters:
    """Characters of one decomposed axis."""
    count = part.pieces[0].rates.shape[0]
    eigenvalue = torch.tensor([0.0] * k + [1.0] * (count - k), dtype=torch.complex128)
    still = [torch.zeros(0, dtype=torch.long)]
    pairs = [torch.zeros(0, 2, dtype=torch.long)]
    still_values = [torch.zeros(0, count, dtype=torch.complex128)]
    pair_values = [torch.zeros(0, count, dtype=torch.complex128)]
    for piece in part.pieces:
        copies, size = piece.index.shape
        rates = piece.rates.to(torch.complex128)
        if size == 2 and bool((piece.rates[:, 0, 1].abs() > LEVEL_TOLERANCE).any()):
            pairs.append(piece.index)
            pair_values.append((rates[:, 0, 0] + 1j * rates[:, 1, 0] + eigenvalue).expand(copies, -1))
        else:  # a line, or a plane with two real eigenvectors
            for column in range(size):
                still.append(piece.index[:, column])
                still_values.append((rates[:, column, column] + eigenvalue).expand(copies, -1))
    pair = torch.cat(pairs)
    return Characters(
        part.dim, torch.cat(still), torch.cat(still_values), pair[:, 0], pair[:, 1], torch.cat(pair_values)
    )


def combined(a: Characters, b: Characters, k: int) -> tuple[Characters, Tensor]:
    """Characters of the tensor product, and the places (4, n) of cc, cs, sc, ss that a butterfly must mix for it."""

    def places(first: Tensor, second: Tensor) -> Tensor:
        return (first[:, None] * b.dim + second).flatten()

    def values(first: Tensor, second: Tensor) -> Tensor:
        added, multiplied = first[:, None] + second, first[:, None] * second
        return torch.cat([added[..., :k], multiplied[..., k:]], -1).flatten(0, 1)

    cc, cs = places(a.cosine, b.cosine), places(a.cosine, b.sine)
    sc, ss = places(a.sine, b.cosine), places(a.sine, b.sine)
    product = Characters(
        a.dim * b.dim,
        places(a.still, b.still),
        values(a.still_values, b.still_values),
        torch.cat([places(a.still, b.cosine), places(a.cosine, b.still), cc, ss]),
        torch.cat([places(a.still, b.sine), places(a.sine, b.still), cs, sc]),
        torch.cat(
            [
                values(a.still_values, b.pair_values),
                values(a.pair_values, b.still_values),
                values(a.pair_values, b.pair_values),
                values(a.pair_values, b.pair_values.conj()),
            ]
        ),
    )
    return product, torch.stack([cc, cs, sc, ss])


def level(values: Tensor, k: int) -> Tensor:
    """sqrt(sum |lambda|^2 + sum |mu - 1|^2) from the values of each place."""
    return torch.cat([values[:, :k], values[:, k:] - 1], -1).abs().square().sum(-1).sqrt()


def small_blocks(rep: Rep) -> Spectrum:
    """Decompose each axis into pieces; every combination of pieces is a small problem, shared by all its copies."""
    k = len(rep.group.lie)
    axes = [axis(space, False) for space in rep.axes]
    strides = products_after(axes)
    sigma = torch.empty(rep.dim, dtype=torch.float64)
    solved: dict[tuple[Frozen, ...], tuple[Tensor, Tensor]] = {}
    blocks = []
    for pieces in itertools.product(*(part.pieces for part in axes)):
        rates = [piece.rates for piece in pieces]
        size = math.prod(rate.shape[-1] for rate in rates)
        if size > LARGEST_BLOCK:
            raise DecompositionError(f"an irreducible block of {size} dimensions")
        key = tuple(map(Frozen, rates))
        if key not in solved:
            solved[key] = product_levels(rates, k)
        values, basis = solved[key]
        index = product_index([piece.index for piece in pieces], strides)
        sigma[index] = values.expand(index.shape)
        blocks.append(Block(index, basis))
    if (alone := single_block(axes)) is not None:
        return Spectrum.of(rep, (Dense(merged(alone.basis, blocks, rep.dim)),), sigma)
    return Spectrum.of(rep, (*along_axes(axes), Blocks(tuple(blocks))), sigma)


def product_levels(rates: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """`level_basis` of a tensor product of pieces.

    Where there are many generators (S(n) has n(n-1)/2), which as matrices would take gigabytes, the products of two
    pieces are summed over the generators as they are multiplied.
    """
    sizes = [rate.shape[-1] for rate in rates]
    if len(rates) == 1 or len(rates[0]) * math.prod(sizes) ** 2 * 8 <= SMALL_STACK:
        return level_basis(product_rates(rates, k))
    cut = min(range(1, len(rates)), key=lambda i: max(math.prod(sizes[:i]), math.prod(sizes[i:])))
    a, b = (product_rates(part, k) for part in (rates[:cut], rates[cut:]))
    (p, q), eye = (a.shape[-1], b.shape[-1]), identity_like

    def summed(left: Tensor, right: Tensor) -> Tensor:
        """The sum over generators of the Kronecker products."""
        return torch.einsum("gab,gcd->acbd", left, right).reshape(p * q, p * q)

    flow_a, flow_b, step_a, step_b = a[:k], b[:k], a[k:] + eye(a[k:]), b[k:] + eye(b[k:])
    crossed = summed(flow_a.mT, flow_b) - summed(step_a, step_b)
    gram = crossed + crossed.mT + summed(step_a.mT @ step_a, step_b.mT @ step_b) + summed(eye(step_a), eye(step_b))
    gram += summed(flow_a.mT @ flow_a, eye(flow_b)) + summed(eye(flow_a), flow_b.mT @ flow_b)
    squares, basis = torch.linalg.eigh(gram)
    basis, sigma = canonical_signs(basis), squares.clamp(min=0).sqrt()
    small = int((squares <= UNCERTAIN * squares[-1].clamp(min=1.0)).sum())
    vectors = basis[:, :small].T.reshape(-1, p, q)  # their levels are measured, not roots of rounding errors
    moved = torch.zeros(small, dtype=torch.float64)
    for x, y in zip(flow_a, flow_b, strict=True):
        moved += (x @ vectors + vectors @ y.mT).square().sum((1, 2))
    for x, y in zip(step_a, step_b, strict=True):
        moved += (x @ vectors @ y.mT - vectors).square().sum((1, 2))
    sigma[:small] = moved.sqrt()
    return sigma, basis


def merged(basis: Tensor | None, blocks: list[Block], dim: int) -> Tensor:
    """One dense basis from an axis basis and the small bases inside its pieces."""
    small = torch.zeros(dim, dim, dtype=torch.float64)
    for block in blocks:
        for index in block.index:
            small[index[:, None], index] = block.basis
    return small if basis is None else basis @ small


def product_index(indices: list[Tensor], strides: list[int]) -> Tensor:
    """Places (sets, p) in the flat weight of a combination of pieces, from their places (copies, p_i) on each axis."""
    total = torch.zeros(1, 1, dtype=torch.long)
    for index, stride in zip(indices, strides, strict=True):
        total = total[:, None, :, None] + stride * index[None, :, None, :]
        total = total.flatten(0, 1).flatten(1)
    return total


def dense(rep: Rep, largest: int = LARGEST_DENSE) -> Spectrum:
    """Levels and basis by a singular value decomposition of the stacked generators on the whole space.

    It is the last resort of `spectrum`, and what its faster routes are tested against.

    >>> import softequiv as se
    >>> [round(level, 6) for level in dense(se.vector(se.SO(3)) >> se.vector(se.SO(3))).levels.tolist()]
    [0.0, 1.414214, 2.44949]
    """
    if rep.dim > largest:
        raise TooLargeError(
            f"{rep} under {rep.group} has {rep.dim} dimensions and no structure to use; the dense route ends at "
            f"{largest}: use an orthogonal representation, fewer dimensions, or multiplicities"
        )
    count = len(rep.group.lie) + len(rep.group.steps)
    if count * rep.dim**2 * 8 > LARGEST_STACK:
        raise TooLargeError(
            f"the {count} generators of {rep.group} as matrices of {rep.dim} x {rep.dim} on {rep} would take "
            f"{count * rep.dim**2 * 8 / 2**30:.0f} GB, more than the {LARGEST_STACK >> 30} that the dense route takes: "
            "use fewer dimensions, or multiplicities"
        )
    if rep.dim > SLOW_DENSE:
        warnings.warn(
            f"dense SVD of {rep.dim} dimensions for {rep} under {rep.group}: this may take minutes",
            PerformanceWarning,
            stacklevel=3,
        )
    rates = rep.rates()
    if len(rates) == 0:
        return Spectrum.of(rep, (), torch.zeros(rep.dim, dtype=torch.float64))
    try:
        _, values, right = torch.linalg.svd(rates.reshape(-1, rep.dim), full_matrices=False)
    except RuntimeError:  # LAPACK's divide and conquer gives up on some highly degenerate spectra
        values, basis = level_basis(rates)
        return Spectrum.of(rep, (Dense(basis),), values)
    return Spectrum.of(rep, (Dense(canonical_signs(right.flip(0).T)),), values.flip(0))
