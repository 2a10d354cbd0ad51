"""How does an n x n square of pixels turn?

Rotations of a picture as matrices on its pixels: skew generators, the paper's bilinear resampling, and an orthonormal
basis of discrete circular harmonics on which whole turns and quarter turns are exact.

Pictures are flattened row by row. A positive angle turns counter-clockwise as seen, so a quarter turn P is
``torch.rot90(x, 1, (-2, -1))``; the flip F is ``x.flip(-1)``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import canonical_signs, column_signs, skew, symmetric

# Frequencies below this are zeros of the generator: far above rounding, far below the smallest that is not zero (0.8).
NULL_TOLERANCE = 1e-9

# The constant in the covariance of pictures. Plain grey varies without bound under a 1/f^2 law: any large value does.
# Well above log(2 n^2) it keeps C positive.
GREY_VARIANCE = 1e2

# A generator A as the map (left, right) -> left^T A right for sparse bases of two sectors: all that is needed of it.
_Block = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Harmonics:
    """An orthonormal real basis of pixel space in which turning is a list of integer frequencies.

    With A' the exact generator: ``A' cosine = m sine``, ``A' sine = -m cosine``, ``A' zero = 0``.

    Attributes:
        zero: (n^2, n0) pictures that stay as they are, F-even or F-odd as ``zero_parity`` says.
        zero_parity: (n0,) the sign +1 or -1 that F gives them.
        cosine: (n^2, n1) first picture of each turning pair, F-even where ``mirrored``.
        sine: (n^2, n1) second picture of each pair, F-odd.
        frequency: (n1,) positive integers m.
        mirrored: (n1,) False where cosine and sine are both F-odd. No representation of O(2) restricts to the pixel
            permutations when n is even: F and the transposition PF would be conjugate, yet their traces are 0 and n.
            The n/2 F-odd pictures in excess (P = -1) therefore turn among themselves, at frequency 2.
        leftover: the column of ``zero`` that no real representation can contain (n = 2 mod 4, where det P = -1).
            A quarter turn changes its sign, so it belongs at level 2 of a Laplacian and not at level 0.
    """

    zero: Tensor
    zero_parity: Tensor
    cosine: Tensor
    sine: Tensor
    frequency: Tensor
    mirrored: Tensor
    leftover: int | None


def central_generator(n: int) -> Tensor:
    """A = D (x) X - X (x) D with central differences D and pixel coordinates X: (n^2, n^2), skew.

    >>> a = central_generator(5)
    >>> torch.equal(a, -a.T)
    True
    """
    half = torch.full((n - 1,), 0.5, dtype=torch.float64)
    return _angular(half.diag(1) - half.diag(-1), _coordinates(n).diag())


def su2_generator(n: int) -> Tensor:
    """A = c (p (x) q - q (x) p) with p = -i J_y, q = J_z of spin j = (n - 1) / 2: (n^2, n^2), skew.

    p / sqrt(j (j + 1)) differentiates at the centre and sqrt(1 - x^2 / j^2) times slower at x. Hence
    c = (3 pi / 8) / sqrt(j (j + 1)): one radian per unit of time in least squares over the square.

    >>> a, turn = su2_generator(5), quarter_turn(5)
    >>> torch.allclose(a, a[turn][:, turn])
    True
    """
    return _angular(*su2_axis(n))


def su2_axis(n: int) -> tuple[Tensor, Tensor]:
    """c p and q of `su2_generator` along one axis: (n, n) each.

    >>> derivative, position = su2_axis(3)
    >>> torch.equal(derivative, -derivative.T), position.diagonal().tolist()
    (True, [-1.0, 0.0, 1.0])
    """
    j = (n - 1) / 2
    m = _coordinates(n)[:-1]
    # The entries of p are 1/2 sqrt(j (j + 1) - m (m + 1)).
    neighbour = 3 * math.pi / 16 * torch.sqrt(1 - m * (m + 1) / max(j * (j + 1), 0.5))
    return neighbour.diag(1) - neighbour.diag(-1), _coordinates(n).diag()


def bilinear_rotation(n: int, angle: float) -> Tensor:
    """The paper's resampling matrix: pixel p reads the picture at R(-angle) p bilinearly, zeros outside: (n^2, n^2).

    >>> x = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    >>> torch.allclose(bilinear_rotation(3, math.pi / 2) @ x.flatten(), x.rot90().flatten())
    True
    """
    row, column = torch.meshgrid(_coordinates(n), _coordinates(n), indexing="ij")
    # Rows run downwards, hence the signs: a counter-clockwise turn is clockwise in (column, row).
    source_row = (math.cos(angle) * row + math.sin(angle) * column).flatten() + (n - 1) / 2
    source_column = (math.cos(angle) * column - math.sin(angle) * row).flatten() + (n - 1) / 2
    pixel = torch.arange(n, dtype=torch.float64)
    rows = (1 - (source_row[:, None] - pixel).abs()).clamp(min=0)
    columns = (1 - (source_column[:, None] - pixel).abs()).clamp(min=0)
    return (rows[:, :, None] * columns[:, None, :]).flatten(1)


def quarter_turn(n: int) -> Tensor:
    """The permutation p of a quarter turn, ``x.rot90(1, (-2, -1)).flatten() == x.flatten()[p]``: (n^2,), long.

    >>> quarter_turn(2)
    tensor([1, 3, 0, 2])
    """
    return torch.arange(n * n).reshape(n, n).rot90(1, (0, 1)).flatten()


def picture_generator(n: int) -> Tensor:
    """The skew A that best foretells how pictures start to turn: (n^2, n^2).

    Photographs have a power spectrum near 1/f^2, so two pixels at distance d (in pixels) have the covariance
    C = constant - log(1 + d^2). With K = E[dx/dt x^T] the covariance of a turning picture's rate of change with the
    picture, the skew A that minimises E |A x - dx/dt|^2 solves the Lyapunov equation A C + C A = 2 K.

    >>> a, turn = picture_generator(5), quarter_turn(5)
    >>> torch.allclose(a, a[turn][:, turn])
    True
    """
    everything = torch.eye(n * n, dtype=torch.float64).to_sparse()
    return skew(_foretell(_covariances(n), everything, everything))


@cached
def harmonics(n: int) -> Harmonics:
    """Discrete circular harmonics of the n x n square, made from :func:`picture_generator`.

    That generator commutes with P and anti-commutes with F. Where P acts as i^k, each frequency is replaced by the
    nearest integer m = k mod 4, so that exp(2 pi A') = I and exp(pi/2 A') = P (but for the leftover).

    >>> harmonics(3).frequency
    tensor([1., 2., 3.], dtype=torch.float64)
    """
    return _rounded(n, partial(_foretell, _covariances(n)))


def _coordinates(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64) - (n - 1) / 2


def _angular(derivative: Tensor, position: Tensor) -> Tensor:
    """D (x) X - X (x) D."""
    return torch.kron(derivative, position) - torch.kron(position, derivative)


def _covariances(n: int) -> tuple[Tensor, Tensor]:
    """C = E[x x^T] and K = E[dx/dt x^T] of pictures with a 1/f^2 spectrum that turn by one radian per unit of time."""
    row, column = (axis.flatten() for axis in torch.meshgrid(_coordinates(n), _coordinates(n), indexing="ij"))
    distance2 = (row[:, None] - row).square() + (column[:, None] - column).square()
    # dx/dt at (row, column) is the slope of x along (column, -row).
    along = row[:, None] * column - column[:, None] * row
    return GREY_VARIANCE - torch.log1p(distance2), -2 * along / (1 + distance2)


def _foretell(covariances: tuple[Tensor, Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Block left^T A right of the solution of A C + C A = 2 K, for sparse bases of spaces that C preserves."""
    covariance, change = covariances
    left_variance, u = torch.linalg.eigh(_between(left, covariance, left))
    right_variance, v = torch.linalg.eigh(_between(right, covariance, right))
    foreseen = u.T @ _between(left, change, right) @ v
    block: Tensor = u @ (2 * foreseen / (left_variance[:, None] + right_variance)) @ v.T
    return block


def _between(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """left^T matrix right for sparse bases."""
    return (right.T @ (left.T @ matrix).T).T


class _Pairs(NamedTuple):
    """Turning pairs of pictures along the last axis, with their frequencies before (omega) and after rounding."""

    omega: Tensor
    frequency: Tensor
    cosine: Tensor
    sine: Tensor
    mirrored: Tensor


def _rounded(n: int, block: _Block) -> Harmonics:
    """Harmonics of a skew generator A that commutes with P and anti-commutes with F, its frequencies omega rounded."""
    whole, even, odd = _real_pairs(block, _sector(n, 1, 1), _sector(n, 1, -1), residue=0)
    half, half_even, half_odd = _real_pairs(block, _sector(n, -1, 1), _sector(n, -1, -1), residue=2)
    # Where P = -1 a picture with omega = 0 cannot stay still: it turns at frequency 2 with one of like smoothness.
    tied, excess = half_even.shape[1], half_odd[:, half_even.shape[1] :]
    couples = excess.shape[1] // 2
    leftover = excess[:, 2 * couples :]
    groups = [
        whole,
        half,
        _twos(half_even, half_odd[:, :tied], mirrored=True),
        _twos(excess[:, 0 : 2 * couples : 2], excess[:, 1 : 2 * couples : 2], mirrored=False),
        _quarter_pairs(block, n),
    ]
    pairs = _Pairs(*(torch.cat(parts, dim=-1) for parts in zip(*groups, strict=True)))
    still, turning = _select(pairs, pairs.frequency == 0), _select(pairs, pairs.frequency > 0)
    zeros = [(even, 1), (odd, -1), (still.cosine, 1), (still.sine, -1), (leftover, -1)]
    return Harmonics(
        zero=torch.cat([pictures for pictures, _ in zeros], dim=1),
        zero_parity=torch.cat([pictures.new_full(pictures.shape[1:], sign) for pictures, sign in zeros]),
        cosine=turning.cosine,
        sine=turning.sine,
        frequency=turning.frequency,
        mirrored=turning.mirrored,
        leftover=n * n - 2 * len(turning.frequency) - 1 if leftover.shape[1] else None,
    )


def _select(pairs: _Pairs, mask: Tensor) -> _Pairs:
    """The pairs under the mask, by frequency and then by omega."""
    chosen = mask.nonzero().flatten()
    chosen = chosen[pairs.omega[chosen].argsort(stable=True)]
    chosen = chosen[pairs.frequency[chosen].argsort(stable=True)]
    return _Pairs(*(part[..., chosen] for part in pairs))


def _twos(cosine: Tensor, sine: Tensor, mirrored: bool) -> _Pairs:
    """Pairs that the generator leaves still, turned at frequency 2."""
    omega = cosine.new_zeros(cosine.shape[1])
    return _Pairs(omega, omega + 2, cosine, sine, torch.full_like(omega, mirrored, dtype=torch.bool))


def _real_pairs(block: _Block, even: Tensor, odd: Tensor, residue: int) -> tuple[_Pairs, Tensor, Tensor]:
    """Pairs where P = +1 (residue 0) or P = -1 (residue 2), and the F-even and F-odd pictures with omega = 0.

    A maps F-even to F-odd pictures by a block B = U diag(omega) V^T, hence A v = omega u and A u = -omega v.
    """
    u, omega, vh = torch.linalg.svd(block(odd, even))
    rank = int((omega > NULL_TOLERANCE).sum())
    omega, v = omega[:rank], vh.T
    sign = column_signs(v[:, :rank])
    pairs = _Pairs(
        omega,
        4 * torch.round((omega - residue) / 4) + residue,
        even @ (v[:, :rank] * sign),
        odd @ (u[:, :rank] * sign),
        torch.ones_like(omega, dtype=torch.bool),
    )
    return pairs, _smoothest_first(even, v[:, rank:]), _smoothest_first(odd, u[:, rank:])


def _quarter_pairs(block: _Block, n: int) -> _Pairs:
    """Pairs where P^2 = -1.

    P carries F-even to F-odd pictures, and P^-1 A is symmetric on the F-even ones: A v = omega P v. A negative
    m = 1 mod 4 is the frequency -m with the sine turned round.
    """
    even, turn = _sector(n, 0, 1), quarter_turn(n)
    omega, v = torch.linalg.eigh(symmetric(block(even.index_select(0, turn), even)))
    cosine = even @ (v * column_signs(v))
    m = 4 * torch.round((omega - 1) / 4) + 1
    return _Pairs(omega, m.abs(), cosine, cosine[turn] * m.sign(), torch.ones_like(omega, dtype=torch.bool))


def _smoothest_first(sector: Tensor, vectors: Tensor) -> Tensor:
    """The span of ``vectors`` as pictures in order of their energy of pixel differences, which fixes a basis of it."""
    n = math.isqrt(sector.shape[0])
    pictures = (sector @ vectors).reshape(n, n, -1)
    slopes = torch.cat([pictures.diff(dim=0).flatten(0, 1), pictures.diff(dim=1).flatten(0, 1)])
    vectors = vectors @ torch.linalg.eigh(slopes.T @ slopes).eigenvectors
    return sector @ canonical_signs(vectors)


def _sector(n: int, quarter: int, flip: int) -> Tensor:
    """Sparse orthonormal basis (n^2, k) of the pictures with P x = quarter x and F x = flip x.

    For quarter = 0, of those with P^2 x = -x and F x = flip x. Each is a signed sum over an orbit of pixels.
    """
    images, characters = _symmetries(n, quarter, flip)
    first = (images.amin(0) == images[0]).nonzero().flatten()
    orbit = images[:, first]
    # The sum vanishes where a symmetry fixes the pixel and has character -1; otherwise this counts those that fix it.
    fixed = ((orbit == first) * characters[:, None]).sum(0)
    orbit, fixed = orbit[:, fixed > 0], fixed[fixed > 0]
    weight = characters[:, None] / torch.sqrt(len(characters) * fixed)
    column = torch.arange(orbit.shape[1]).expand_as(orbit)
    entries, shape = torch.stack([orbit.flatten(), column.flatten()]), (n * n, orbit.shape[1])
    return torch.sparse_coo_tensor(entries, weight.flatten(), shape, check_invariants=False).coalesce()


def _symmetries(n: int, quarter: int, flip: int) -> tuple[Tensor, Tensor]:
    """Where each symmetry of a sector sends each pixel, (h, n^2), identity first, and its character, (h,)."""
    turn, identity = quarter_turn(n), torch.arange(n * n)
    step, character, count = (turn, quarter, 4) if quarter else (turn[turn], -1, 2)
    images, characters = [], []
    for image, sign in ((identity, 1), (identity.reshape(n, n).flip(-1).flatten(), flip)):
        for _ in range(count):
            images.append(image)
            characters.append(sign)
            image, sign = step[image], sign * character
    return torch.stack(images), torch.tensor(characters, dtype=torch.float64)
