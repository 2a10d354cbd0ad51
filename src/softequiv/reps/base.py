"""How a group acts: a representation is known by the matrices of the generators, and built from others with + * @
and >>.

`X + Y` is the direct sum, `3 * X` three copies, `X @ Y` the tensor product, `X.T` the dual, and `X >> Y` the space of
linear maps from X to Y, in which a layer's weight lives. All are immutable and compare by value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from softequiv._linalg import block_diag, identity_like, is_orthogonal, kron, kron_sum
from softequiv.errors import RepresentationError
from softequiv.groups import Element, Group, evaluate


class Rep(ABC):
    """A representation of `group` on R^dim. Subclasses are frozen dataclasses."""

    group: Group

    @property
    @abstractmethod
    def dim(self) -> int:
        """Dimension of the space."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name for tables."""

    @abstractmethod
    def lie(self) -> Tensor:
        """d rho(A_i) for each Lie generator, (k, dim, dim)."""

    @abstractmethod
    def steps(self) -> Tensor:
        """rho(s_j) for each discrete generator, (m, dim, dim)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The trailing axes of a tensor that holds a vector of this space."""
        return (self.dim,)

    @property
    def parts(self) -> tuple[Rep, ...]:
        """The representations that this one is made of; none for a leaf."""
        return ()

    @property
    def orthogonal(self) -> bool:
        """Whether rho(g) is orthogonal for every g."""
        return all(part.orthogonal for part in self.parts)

    @property
    def exact(self) -> bool:
        """Whether the brackets and relations of the group hold exactly; False for named approximations on grids."""
        return all(part.exact for part in self.parts)

    @property
    def normal(self) -> bool:
        """Whether every generator is a normal matrix."""
        return all(part.normal for part in self.parts)

    @property
    def settled(self) -> bool:
        """Whether rates are those of the action; False for grids where some pictures rest but count as moving."""
        return all(part.settled for part in self.parts)

    @property
    def axes(self) -> tuple[Rep, ...]:
        """The spaces whose tensor product this is, as the weight's axes show them."""
        return (self,)

    def decomposition(self) -> Decomposition | None:
        """A change of basis to small invariant pieces where it is known in closed form."""
        return None

    def rates(self) -> Tensor:
        """What the group Laplacian is built from: d rho(A_i), then rho(s_j) - I; (k + m, dim, dim)."""
        steps = self.steps()
        return torch.cat([self.lie(), steps - identity_like(steps)])

    def rho(self, g: Element) -> Tensor:
        """The matrix of an element, (dim, dim) float64.

        >>> from softequiv import SO, vector
        >>> vector(SO(2)).rho(SO(2).element(math.pi)).round().diagonal().tolist()
        [-1.0, -1.0]
        """
        if g.group != self.group:
            raise RepresentationError(f"{self} represents {self.group}; the element belongs to {g.group}")
        return evaluate(g.word, self.lie(), self.steps())

    def drho(self, coords: Sequence[float]) -> Tensor:
        """d rho(sum_i t_i A_i), (dim, dim)."""
        lie = self.lie()
        if len(coords) != len(lie):
            raise RepresentationError(f"{self.group} has {len(lie)} Lie generators; got {len(coords)} coordinates")
        return torch.einsum("k,kab->ab", torch.as_tensor(coords, dtype=torch.float64), lie)

    @property
    def T(self) -> Rep:
        """The dual representation rho(g)^-T; an orthogonal one is its own dual."""
        return self if self.orthogonal and self.settled else Dual(self)

    def __add__(self, other: Rep) -> Rep:
        return direct_sum([(self, 1), (other, 1)])

    def __mul__(self, copies: int) -> Rep:
        if not isinstance(copies, int) or copies < 1:
            raise RepresentationError(f"a multiplicity is a whole number of at least 1; got {copies!r}")
        return direct_sum([(self, copies)])

    __rmul__ = __mul__

    def __matmul__(self, other: Rep) -> Rep:
        return tensor_product(self, other)

    def __rshift__(self, target: Rep) -> Hom:
        return Hom(self, target)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Piece:
    """Copies of one small representation inside a larger one.

    `rates` (k + m, p, p) as in `Rep.rates`; `index` (copies, p) says where each copy's coordinates lie.
    """

    rates: Tensor
    index: Tensor


@dataclass(frozen=True)
class Decomposition:
    """x = basis @ y with y made of pieces; `basis` (dim, dim) is orthogonal, or None for the identity."""

    basis: Tensor | None
    pieces: tuple[Piece, ...]


def common_group(reps: Sequence[Rep]) -> Group:
    """The one group of several representations."""
    groups = list(dict.fromkeys(rep.group for rep in reps))
    if len(groups) > 1:
        raise RepresentationError(
            f"representations of different groups cannot be combined: {', '.join(map(str, groups))}; use "
            f"outer() for a product of groups"
        )
    return groups[0]


@dataclass(frozen=True)
class Trivial(Rep):
    """The scalar: nothing moves."""

    group: Group

    @property
    def dim(self) -> int:
        return 1

    @property
    def name(self) -> str:
        return "1"

    def lie(self) -> Tensor:
        return torch.zeros(len(self.group.lie), 1, 1, dtype=torch.float64)

    def steps(self) -> Tensor:
        return torch.ones(len(self.group.steps), 1, 1, dtype=torch.float64)


def scalar(group: Group) -> Rep:
    """The trivial representation.

    >>> from softequiv import SO
    >>> (3 * scalar(SO(2))).dim
    3
    """
    return Trivial(group)


@dataclass(frozen=True)
class Dual(Rep):
    """rho(g)^-T."""

    base: Rep

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.base.group

    @property
    def dim(self) -> int:
        return self.base.dim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def name(self) -> str:
        return f"({self.base})*"

    @property
    def parts(self) -> tuple[Rep, ...]:
        return (self.base,)

    @property
    def T(self) -> Rep:
        return self.base

    def lie(self) -> Tensor:
        return -self.base.lie().mT

    def steps(self) -> Tensor:
        return torch.linalg.inv(self.base.steps()).mT

    def rates(self) -> Tensor:
        """A weight w in the dual changes by w^T rho(s) - w^T, which needs no inverse of rho(s)."""
        return self._dual(self.base.rates())

    def _dual(self, rates: Tensor) -> Tensor:
        k = len(self.group.lie)
        return torch.cat([-rates[:k].mT, rates[k:] if self.orthogonal else rates[k:].mT])

    def decomposition(self) -> Decomposition | None:
        known = self.base.decomposition()
        if known is None or not self.orthogonal:
            return None
        return Decomposition(known.basis, tuple(Piece(self._dual(piece.rates), piece.index) for piece in known.pieces))


def action_rates(rep: Rep) -> Tensor:
    """d rho(A_i) and rho(s_j) - I, also for a dual, whose own `rates` measure the change of a single weight."""
    steps = rep.steps()
    return torch.cat([rep.rates()[: len(rep.group.lie)], steps - identity_like(steps)])


@dataclass(frozen=True)
class Sum(Rep):
    """A direct sum with multiplicities; coordinates run term by term, copy by copy."""

    terms: tuple[tuple[Rep, int], ...]

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.terms[0][0].group

    @cached_property
    def dim(self) -> int:
        return sum(rep.dim * copies for rep, copies in self.terms)

    @property
    def name(self) -> str:
        return "+".join((f"{copies}" if copies > 1 else "") + f"[{rep}]" for rep, copies in self.terms)

    @property
    def parts(self) -> tuple[Rep, ...]:
        return tuple(rep for rep, _ in self.terms)

    @property
    def T(self) -> Rep:
        return direct_sum([(rep.T, copies) for rep, copies in self.terms])

    def _blocks(self, kind: str) -> Tensor:
        return reduce(block_diag, [getattr(rep, kind)() for rep, copies in self.terms for _ in range(copies)])

    def lie(self) -> Tensor:
        return self._blocks("lie")

    def steps(self) -> Tensor:
        return self._blocks("steps")

    def rates(self) -> Tensor:
        return self._blocks("rates")


def terms_of(rep: Rep) -> tuple[tuple[Rep, int], ...]:
    """The terms of a sum, or the space itself once."""
    return rep.terms if isinstance(rep, Sum) else ((rep, 1),)


def direct_sum(terms: Sequence[tuple[Rep, int]]) -> Rep:
    """The flat direct sum: nested sums of single copies are opened, equal neighbours merged."""
    common_group([rep for rep, _ in terms])
    if any(copies < 1 for _, copies in terms):
        raise RepresentationError(f"a multiplicity is a whole number of at least 1; got {[c for _, c in terms]}")
    flat: list[tuple[Rep, int]] = []
    for rep, copies in terms:
        inner = terms_of(rep)
        if copies > 1 and len(inner) > 1:
            inner = inner * copies
        elif copies > 1:
            inner = ((inner[0][0], inner[0][1] * copies),)
        for leaf, count in inner:
            if flat and flat[-1][0] == leaf:
                flat[-1] = (leaf, flat[-1][1] + count)
            else:
                flat.append((leaf, count))
    return flat[0][0] if len(flat) == 1 and flat[0][1] == 1 else Sum(tuple(flat))


def is_dual(rep: Rep) -> bool:
    """Whether a space consists of duals, next to which orthogonal parts may stand, that are their own duals."""
    if rep.orthogonal or isinstance(rep, (Dual, Hom)):
        return isinstance(rep, Dual)
    return bool(rep.parts) and all(part.orthogonal or is_dual(part) for part in rep.parts)


@dataclass(frozen=True)
class TensorProduct(Rep):
    """rho_1(g) (x) rho_2(g) (x) ..."""

    factors: tuple[Rep, ...]

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.factors[0].group

    @property
    def dim(self) -> int:
        return math.prod([rep.dim for rep in self.factors])  # a list: torch.compile reads no generator here

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for rep in self.factors for size in rep.shape)

    @property
    def name(self) -> str:
        return "@".join(f"({rep})" if isinstance(rep, (Sum, Hom)) else str(rep) for rep in self.factors)

    @property
    def parts(self) -> tuple[Rep, ...]:
        return self.factors

    @property
    def axes(self) -> tuple[Rep, ...]:
        return tuple(axis for rep in self.factors for axis in rep.axes)

    @property
    def T(self) -> Rep:
        return TensorProduct(tuple(rep.T for rep in self.factors))

    def lie(self) -> Tensor:
        return reduce(kron_sum, [rep.lie() for rep in self.factors])

    def steps(self) -> Tensor:
        return reduce(kron, [rep.steps() for rep in self.factors])

    def rates(self) -> Tensor:
        """Kronecker sums for Lie generators; for a step W -> rho_Y(s) W - W rho_X(s), with the dual axes as X.

        Like that of `Hom` it needs no inverse; for an orthogonal step it is rho_W(s) - I times an orthogonal matrix,
        and the latter is given.
        """
        k = len(self.group.lie)
        lie = reduce(kron_sum, [rep.rates()[:k] for rep in self.factors])
        moves = [] if self.orthogonal else [(axis.T if is_dual(axis) else axis).steps() for axis in self.axes]
        if all(map(is_orthogonal, moves)):
            steps = self.steps()
            return torch.cat([lie, steps - identity_like(steps)])
        after = [identity_like(move) if is_dual(axis) else move for axis, move in zip(self.axes, moves, strict=True)]
        before = [
            move.mT if is_dual(axis) else identity_like(move) for axis, move in zip(self.axes, moves, strict=True)
        ]
        return torch.cat([lie, reduce(kron, after) - reduce(kron, before)])


def product_rates(rates: Sequence[Tensor], k: int) -> Tensor:
    """Rates of a tensor product: Kronecker sums for the k Lie generators, products of steps minus the identity."""
    lie = reduce(kron_sum, [rate[:k] for rate in rates])
    steps = reduce(kron, [rate[k:] + identity_like(rate[k:]) for rate in rates])
    return torch.cat([lie, steps - identity_like(steps)])


def tensor_product(*reps: Rep) -> Rep:
    """The flat tensor product; a scalar factor changes nothing and is left out."""
    group = common_group(reps)
    factors = tuple(
        factor
        for rep in reps
        for factor in (rep.factors if isinstance(rep, TensorProduct) else (rep,))
        if factor != Trivial(group)
    )
    return Trivial(group) if not factors else factors[0] if len(factors) == 1 else TensorProduct(factors)


@dataclass(frozen=True)
class Hom(Rep):
    """Linear maps from `source` to `target`: rho_W(g) W = rho_Y(g) W rho_X(g)^-1, weights of shape (target.dim,
    source.dim).

    >>> from softequiv import SO, vector
    >>> (vector(SO(3)) >> 2 * vector(SO(3))).shape
    (6, 3)
    """

    source: Rep
    target: Rep

    def __post_init__(self) -> None:
        common_group([self.source, self.target])

    @property
    def group(self) -> Group:  # type: ignore[override]
        return self.source.group

    @property
    def dim(self) -> int:
        return self.source.dim * self.target.dim

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.target.dim, self.source.dim)

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.target}"

    @property
    def parts(self) -> tuple[Rep, ...]:
        return (self.source, self.target)

    @property
    def axes(self) -> tuple[Rep, ...]:
        return (self.target, self.source.T)

    def lie(self) -> Tensor:
        return kron_sum(self.target.lie(), -self.source.lie().mT)

    def steps(self) -> Tensor:
        return kron(self.target.steps(), torch.linalg.inv(self.source.steps()).mT)

    def rates(self) -> Tensor:
        """W -> D_Y W - W D_X with the rates D of the two sides, as a matrix on vec(W) (row-major).

        For an orthogonal step that is rho_W(s) - I times an orthogonal matrix, and the latter is given.
        """
        if not self.orthogonal:
            return kron_sum(action_rates(self.target), -action_rates(self.source).mT)
        moved = kron_sum(self.target.rates(), -self.source.rates().mT)
        steps = self.steps()
        return torch.cat([moved[: len(self.group.lie)], steps - identity_like(steps)])
