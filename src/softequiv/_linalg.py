"""Small linear algebra in float64 that the floors share: values that can be hashed, clustering of levels, signs,
Kronecker sums.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Levels closer than this, relative to the largest, are one level: LAPACK separates equal singular values by about
# 1e-13 at these sizes, and distinct levels of groups in use lie 1e-5 apart or more.
LEVEL_TOLERANCE = 1e-9

# What moves less than this in a unit of time comes too near to level 0.
SLOWEST = 1e-6

# A matrix identity (bracket, relation, orthogonality) holds when its residual is below this, relative to the matrices.
IDENTITY_TOLERANCE = 1e-8

# Float64 keeps skew and orthogonal matrices to the first, relative to the matrices, and float32 to the second.
FLOAT64_ROUNDING, FLOAT32_ROUNDING = 1e-12, 1e-6
ROUNDED = "the matrices look rounded to float32, in which nothing is exactly at level 0; build them in float64"


@dataclass(frozen=True, eq=False)
class Frozen:
    """A float64 tensor that compares and hashes by value.

    >>> Frozen(torch.eye(2)) == Frozen(torch.eye(2))
    True
    """

    value: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", torch.as_tensor(self.value).detach().to("cpu", torch.float64).clone())

    @cached_property
    def digest(self) -> bytes:
        """Hash of shape and entries; adding zero makes -0.0 and 0.0 alike."""
        return hashlib.sha256(repr(tuple(self.value.shape)).encode() + (self.value + 0.0).numpy().tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def stack(matrices: Sequence[Tensor], dim: int) -> Tensor:
    """Stack (k matrices of dim x dim) into (k, dim, dim), also when there are none."""
    return torch.stack(tuple(matrices)) if matrices else torch.zeros(0, dim, dim, dtype=torch.float64)


def block_diag(a: Tensor, b: Tensor) -> Tensor:
    """Batched direct sum: (k, m, m) and (k, n, n) to (k, m + n, m + n)."""
    m, n = a.shape[-1], b.shape[-1]
    out = a.new_zeros(a.shape[0], m + n, m + n)
    out[:, :m, :m] = a
    out[:, m:, m:] = b
    return out


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Batched Kronecker product: (k, m, m) and (k, n, n) to (k, mn, mn)."""
    m, n = a.shape[-1], b.shape[-1]
    return torch.einsum("kab,kcd->kacbd", a, b).reshape(-1, m * n, m * n)


def kron_sum(a: Tensor, b: Tensor) -> Tensor:
    """Batched Kronecker sum a (x) I + I (x) b."""
    eye_a, eye_b = identity_like(a), identity_like(b)
    return kron(a, eye_b) + kron(eye_a, b)


def identity_like(a: Tensor) -> Tensor:
    """Identities of the shape of a batch of square matrices."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)


def symmetric(a: Tensor) -> Tensor:
    """(a + a^T) / 2."""
    return (a + a.mT) / 2


def skew(a: Tensor) -> Tensor:
    """(a - a^T) / 2."""
    return (a - a.mT) / 2


def is_orthogonal(a: Tensor) -> bool:
    """Whether each matrix of a batch is orthogonal."""
    return a.numel() == 0 or float((a @ a.mT - identity_like(a)).abs().max()) <= IDENTITY_TOLERANCE


def is_skew(a: Tensor) -> bool:
    """Whether each matrix of a batch is skew, as its own size goes."""
    if a.numel() == 0:
        return True
    excess, sizes = (part.abs().flatten(-2).amax(-1) for part in (a + a.mT, a))
    return bool((excess <= IDENTITY_TOLERANCE * sizes.clamp(min=1.0)).all())


def expm(a: Tensor) -> Tensor:
    """Matrix exponential of one (n, n) matrix; of a skew one by its eigenbasis, which keeps it orthogonal to the
    last digit.
    """
    if not is_skew(a):
        exponential: Tensor = torch.linalg.matrix_exp(a)
        return exponential
    omega, basis = torch.linalg.eigh(-1j * a)
    return ((basis * torch.exp(1j * omega)) @ basis.mH).real


def are_normal(matrices: Tensor) -> bool:
    """Whether each matrix commutes with its transpose."""
    if matrices.numel() == 0:
        return True
    excess = (matrices @ matrices.mT - matrices.mT @ matrices).abs().flatten(1).amax(1)
    return bool((excess <= IDENTITY_TOLERANCE * matrices.square().flatten(1).sum(1)).all())


def checked_matrices(matrices: Sequence[Tensor], what: str, error: type[Exception]) -> list[Tensor]:
    """Real, finite, square matrices of one size in float64, or an error that says which of these fails."""
    checked = [torch.as_tensor(matrix) for matrix in matrices]
    for matrix in checked:
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not square or matrix.shape != checked[0].shape:
            shapes = sorted({tuple(m.shape) for m in checked})
            raise error(f"the matrices of {what} must be square and of one size, at least 1 x 1; got {shapes}")
        if matrix.is_complex() or matrix.dtype == torch.bool:
            raise error(f"the matrices of {what} must be real; got {matrix.dtype}: write [[Re, -Im], [Im, Re]]")
        if not torch.isfinite(matrix).all():
            raise error(f"a matrix of {what} has entries that are not finite numbers")
    return [matrix.to(torch.float64) for matrix in checked]


def checked_generators(
    lie: Sequence[Tensor] | Tensor, steps: Sequence[Tensor] | Tensor, what: str, error: type[Exception]
) -> tuple[Tensor, Tensor]:
    """Lie generators (k, n, n) and steps (m, n, n) in float64, at least one in all, or an error saying what is wrong.

    Also refused are generators that move something, but too little to be told from rounding (their levels would count
    as level 0), and those that are skew or orthogonal but for the rounding of another precision.
    """
    matrices, flows = checked_matrices([*lie, *steps], what, error), len(lie)
    for index, matrix in enumerate(matrices):
        flow, eye = index < flows, torch.eye(len(matrix), dtype=torch.float64)
        rate = float((matrix if flow else matrix - eye).abs().max())
        if 0 < rate < SLOWEST:
            raise error(
                f"generator {index} of {what} moves by {rate:.1g} in a unit of time, which is lost in rounding; take a "
                f"larger unit, so that it is near 1, or leave the generator out"
            )
        excess = float((matrix + matrix.mT if flow else matrix @ matrix.mT - eye).abs().max())
        scale = max(1.0, float(matrix.abs().max())) if flow else 1.0
        if FLOAT64_ROUNDING * scale < excess <= FLOAT32_ROUNDING * scale:
            kind = "skew" if flow else "orthogonal"
            raise error(f"generator {index} of {what} fails to be {kind} by {excess:.1g}: {ROUNDED}")
    dim = len(matrices[0])
    return stack(matrices[:flows], dim), stack(matrices[flows:], dim)


def column_signs(basis: Tensor) -> Tensor:
    """The sign of each column's entry of largest magnitude (the first of several): (n, k) to (k,)."""
    if basis.numel() == 0:
        return basis.new_ones(basis.shape[1])
    magnitude = basis.abs()
    first = (magnitude >= magnitude.amax(0, keepdim=True) * (1 - LEVEL_TOLERANCE)).to(torch.int8).argmax(0)
    signs = basis.gather(0, first[None])[0].sign()
    return torch.where(signs == 0, 1.0, signs)


def canonical_signs(basis: Tensor) -> Tensor:
    """Flip columns so that the entry of largest magnitude is positive."""
    return basis * column_signs(basis)


def runs(ordered: Tensor, gap: float) -> list[slice]:
    """Where neighbours in an ascending sequence lie no more than `gap` apart, run after run.

    >>> runs(torch.tensor([0.0, 0.1, 1.0]), 0.5)
    [slice(0, 2, None), slice(2, 3, None)]
    """
    bounds = [0, *(torch.nonzero(ordered.diff() > gap).flatten() + 1).tolist(), len(ordered)]
    return [slice(*ends) for ends in itertools.pairwise(bounds)]


def level_basis(rates: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending singular values and right singular vectors of the stacked matrices, through their Gram matrix.

    The values are norms ||D v||, not roots of eigenvalues: those would turn a zero into the root of a rounding error.
    """
    gram = (rates.mT @ rates).sum(0)
    basis = canonical_signs(torch.linalg.eigh(gram)[1])
    return (rates @ basis).square().sum((0, 1)).sqrt(), basis


def cluster(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct levels, ascending, and the level index of every entry of `sigma`.

    Neighbours closer than `LEVEL_TOLERANCE` times the largest value (or one) belong together; so near zero is zero.

    >>> levels, index = cluster(torch.tensor([2.0, 0.0, 1.0, 1.0 + 1e-12], dtype=torch.float64))
    >>> levels.tolist(), index.tolist()
    ([0.0, 1.0000000000005, 2.0], [2, 0, 1, 1])
    """
    ordered, order = sigma.flatten().sort()
    tolerance = LEVEL_TOLERANCE * max(1.0, float(ordered[-1])) if ordered.numel() else 0.0
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered.diff() > tolerance
    group = starts.long().cumsum(0) - 1
    total = torch.zeros(int(group[-1]) + 1 if group.numel() else 0, dtype=sigma.dtype)
    levels = total.index_add(0, group, ordered) / torch.bincount(group, minlength=len(total)).clamp(min=1)
    levels[levels <= tolerance] = 0.0
    index = torch.empty_like(group)
    index[order] = group
    return levels, index.reshape(sigma.shape)
