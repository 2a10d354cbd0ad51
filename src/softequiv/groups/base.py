"""What acts: a group is known by its generators, and an element by a path that leads to it from the identity.

Lie generators are matrices A_i of the defining representation, with a stated unit of time; discrete generators s_j are
steps of length one. Everything above (representations, spectra, bounds) needs the generators and path lengths only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softequiv._cache import cached
from softequiv._linalg import expm, is_orthogonal, is_skew, stack
from softequiv.errors import GroupError, checked_number
from softequiv.groups.angles import Angle

MAX_LISTED = 10_000  # elements of a finite group that may be listed (the regular representation has order^2 entries)


@dataclass(frozen=True)
class Flow:
    """exp(sum_i coords_i A_i)."""

    coords: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """s_index ** count."""

    index: int
    count: int = 1


Word = tuple[Flow | Step, ...]


@dataclass(frozen=True)
class Element:
    """A group element as a path from the identity: the product of its word, left to right.

    >>> from softequiv.groups import SO
    >>> quarter = SO(2).element(math.pi / 2)
    >>> (quarter @ quarter).length
    3.141592653589793
    """

    group: Group
    word: Word

    @cached_property
    def matrix(self) -> Tensor:
        """The element in the defining representation, (n, n) float64."""
        return evaluate(self.word, self.group.lie, self.group.steps)

    @property
    def times(self) -> Tensor:
        """Time spent on each generator, Lie first, then discrete: (k + m,), non-negative."""
        k, m = len(self.group.lie), len(self.group.steps)
        total = [0.0] * (k + m)
        for move in self.word:
            for i, t in enumerate(move.coords) if isinstance(move, Flow) else [(k + move.index, move.count)]:
                total[i] += abs(t)
        return torch.tensor(total, dtype=torch.float64)

    @property
    def length(self) -> float:
        """Path length: the 2-norm of the time spent on each generator."""
        return float(self.times.norm())

    @property
    def inverse(self) -> Element:
        """The path walked backwards."""
        back: list[Flow | Step] = []
        for move in reversed(self.word):
            back.append(
                Flow(tuple(-t for t in move.coords)) if isinstance(move, Flow) else Step(move.index, -move.count)
            )
        return Element(self.group, tuple(back))

    def __matmul__(self, other: Element) -> Element:
        if other.group != self.group:
            raise GroupError(
                f"cannot multiply an element of {self.group} by one of {other.group}; take both from one group"
            )
        return self.group.compose(self, other)

    def __str__(self) -> str:
        moves = [
            "exp(" + ", ".join(f"{t:.4g}" for t in move.coords) + ")"
            if isinstance(move, Flow)
            else f"s{move.index}" + (f"^{move.count}" if move.count != 1 else "")
            for move in self.word
        ]
        return " ".join(moves) or "e"


def evaluate(word: Word, lie: Tensor, steps: Tensor) -> Tensor:
    """The matrix of a word: product of exp(sum_i t_i lie_i) and steps_j ** count."""
    dim = lie.shape[-1]
    product = torch.eye(dim, dtype=torch.float64)
    for move in word:
        if isinstance(move, Flow):
            coords = torch.tensor(move.coords, dtype=torch.float64)
            product = product @ expm(torch.einsum("k,kab->ab", coords, lie))
        else:
            product = product @ torch.linalg.matrix_power(steps[move.index], move.count)
    return product


class Group(ABC):
    """A group given by generators. Subclasses are frozen dataclasses: equal by value and hashable."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How people write it; `parse_group(name)` gives the group back."""

    @property
    def lie(self) -> Tensor:
        """Lie generators A_i in the defining representation, (k, n, n); none for a group that gives steps alone."""
        return stack([], self.steps.shape[-1])

    @property
    def steps(self) -> Tensor:
        """Discrete generators s_j in the defining representation, (m, n, n); none for one that gives `lie` alone."""
        return stack([], self.lie.shape[-1])

    @property
    @abstractmethod
    def unit(self) -> str:
        """What a generator does in one unit of time."""

    @property
    @abstractmethod
    def covering_radius(self) -> float:
        """No element is farther from the identity than this; infinite where the group is not compact."""

    @property
    def order(self) -> float:
        """Number of elements."""
        return math.inf

    @property
    def abelian(self) -> bool:
        """Whether all generators commute."""
        generators = torch.cat([self.lie, self.steps])
        sizes = torch.linalg.matrix_norm(generators)
        return all(
            float((a @ b - b @ a).abs().max()) <= 1e-12 * float(sizes[i] * sizes[j])
            for i, a in enumerate(generators)
            for j, b in enumerate(generators[:i])
        )

    @property
    def central(self) -> bool:
        """Whether the group Laplacian commutes with the group, so that every level is an invariant subspace.

        True when conjugation permutes or rotates the generators: abelian groups, connected compact groups with
        an orthonormal basis, all transpositions of S(n).
        """
        return self.abelian

    @property
    def compact(self) -> bool:
        """Whether the covering radius is finite."""
        return math.isfinite(self.covering_radius)

    @property
    def periods(self) -> tuple[float | None, ...]:
        """Per Lie generator the time after which exp(t A_i) is the identity, or None."""
        return (None,) * len(self.lie)

    @property
    def relations(self) -> tuple[Word, ...]:
        """Words in the discrete generators that equal the identity and present the group."""
        return ()

    @cached_property
    def orthogonal(self) -> bool:
        """Whether the defining representation is orthogonal."""
        return is_skew(self.lie) and is_orthogonal(self.steps)

    @abstractmethod
    def element_of(self, matrix: Tensor) -> Element:
        """The element with this matrix in the defining representation, by a shortest path where one is known."""

    @abstractmethod
    def _haar(self, generator: torch.Generator | None) -> Element:
        """A random element: Haar where compact, standard normal coordinates elsewhere."""

    @property
    def identity(self) -> Element:
        """The empty path."""
        return Element(self, ())

    def element(self, *coords: float) -> Element:
        """exp(sum_i t_i A_i) s_1^n_1 ... s_m^n_m from the coordinates (t_1, ..., t_k, n_1, ..., n_m).

        The path is replaced by a shortest one where the given one is longer than it need be.
        """
        k, m = len(self.lie), len(self.steps)
        if len(coords) != k + m:
            raise GroupError(
                f"{self} takes {k} Lie coordinates and {m} step counts, {k + m} numbers in all; got {len(coords)}"
            )
        coords = tuple(checked_number(t, f"a coordinate of {self}", GroupError) for t in coords)
        if not all(math.isfinite(t) for t in coords):
            raise GroupError(f"coordinates of {self} must be finite; got {coords}")
        counts = coords[k:]
        if any(count != int(count) for count in counts):
            raise GroupError(f"step counts of {self} must be whole numbers; got {counts}")
        flow: Word = (Flow(tuple(float(t) for t in coords[:k])),) if any(coords[:k]) else ()
        steps: Word = tuple(Step(j, int(count)) for j, count in enumerate(counts) if count)
        return self.shortened(Element(self, flow + steps))

    def shortened(self, g: Element) -> Element:
        """The same element by a shorter path, where one is known."""
        shortest = self.element_of(g.matrix)
        return shortest if shortest.length < g.length - 1e-9 else g

    def compose(self, g: Element, h: Element) -> Element:
        """The product g h."""
        return self.element_of(g.matrix @ h.matrix)

    def random(self, generator: torch.Generator | None = None, within: float | None = None) -> Element:
        """A random element: Haar where compact, standard normal coordinates elsewhere.

        With `within`, an element of at most that path length: coordinates uniform in the ball for a connected group,
        uniform over the elements for a finite one, steps first and then the flow for one that has both. An angle bounds
        the flow, whatever steps are taken.
        """
        if within is None:
            return self._haar(generator)
        reach = self.reach(within)
        k = len(self.lie)
        if k == 0:
            near = elements_within(self, within)
            return near[int(torch.randint(len(near), (), generator=generator))]
        # a step costs one unit of the range, the flow takes what is left
        counts = self._some_steps(reach, generator)
        left = math.sqrt(max(0.0, reach**2 - sum(count**2 for count in counts)))
        left = min(left, within) if isinstance(within, Angle) else left
        direction = torch.randn(k, dtype=torch.float64, generator=generator)
        radius = left * torch.rand((), dtype=torch.float64, generator=generator) ** (1 / k)
        return self.element(*(direction / direction.norm() * radius).tolist(), *counts)

    @property
    def draws_haar(self) -> bool:
        """Whether `random` draws from the Haar measure where no range is given."""
        return self.compact

    def how_drawn(self, within: float | None = None) -> str:
        """How `random` draws from the range, in words.

        >>> from softequiv.groups import SO
        >>> SO(2).how_drawn()
        'from the Haar measure'
        """
        if self.order < math.inf:
            return "uniform over the elements in range, the identity among them"
        if within is None:
            return "from the Haar measure" if self.draws_haar else "standard normal coordinates"
        if not len(self.steps):
            return "coordinates uniform in the ball of the range"
        most = f", at most {within!r}" if isinstance(within, Angle) else ""
        return (
            "steps one after another of those that still fit the range, or no more, then coordinates uniform in the "
            f"ball of what is left{most}"
        )

    def _some_steps(self, reach: float, generator: torch.Generator | None) -> list[int]:
        """How often each step is taken, at random: one after another of those that still fit the range, or no more."""
        alone = [word[0] for word in self.relations if len(word) == 1]  # s^n = 1
        periods = {move.index: move.count for move in alone if isinstance(move, Step)}
        counts = [0] * len(self.steps)
        while True:
            room = reach**2 + 1e-9 - sum(count**2 for count in counts)
            fitting = [
                j
                for j, count in enumerate(counts)
                if 2 * abs(count) + 1 <= room and abs(count) < periods.get(j, math.inf) // 2
            ]
            chosen = int(torch.randint(len(fitting) + 1, (), generator=generator)) if fitting else 0
            if not chosen:
                return counts
            step = fitting[chosen - 1]
            both_ways = counts[step] == 0 and periods.get(step) != 2
            back = counts[step] < 0 or (both_ways and bool(torch.randint(2, (), generator=generator)))
            counts[step] += -1 if back else 1

    def reach(self, within: float) -> float:
        """The path length that a range stands for. Plain numbers are path lengths; an `Angle` is one in radians."""
        within = checked_number(within, "a range", GroupError)
        if not within > 0:
            raise GroupError(
                f"the range {within!r} is empty; give a positive path length or angle, such as degrees(30)"
            )
        if math.isinf(within) and not self.compact:
            raise GroupError(f"{self} is not compact, so nothing can be said of all its elements; give a finite range")
        farthest = max(2 * math.pi, self.covering_radius)
        if self.compact and len(self.lie) and farthest < within < math.inf and not isinstance(within, Angle):
            raise GroupError(
                f"the range {within!r} is a path length in radians, and no element of {self} is farther than "
                f"{self.covering_radius:.4g}; an angle is written degrees({within:g}) or '{within:g}deg', the whole "
                "group is the range inf"
            )
        length = self._angle_reach(within) if isinstance(within, Angle) and not math.isinf(within) else float(within)
        if len(self.lie) == 0 and length < 1:
            raise GroupError(
                f"the range {within!r} contains no element of {self} but the identity; its shortest step is "
                f"{self.unit}: widen the range or take a finer group"
            )
        return min(length, self.covering_radius)  # no element is farther

    def holds(self, g: Element, within: float) -> bool:
        """Whether an element lies in a range: no farther than its path length, nor turned by more than the angle that
        was given.
        """
        turned = float(g.times[: len(self.lie)].norm())
        return g.length <= self.reach(within) + 1e-9 and not (isinstance(within, Angle) and turned > within + 1e-9)

    def _angle_reach(self, angle: Angle) -> float:
        raise GroupError(
            f"{self} has no angles, so the range {angle!r} means nothing to it; give a path length ({self.unit})"
        )

    def elements(self) -> Iterator[Element]:
        """All elements of a finite group, the identity first, by breadth-first search over its steps."""
        if not self.order <= MAX_LISTED:
            many = "infinitely many" if self.order == math.inf else f"more than {MAX_LISTED}"
            raise GroupError(f"{self} has {many} elements; only finite groups of at most {MAX_LISTED} can be listed")
        seen: set[bytes] = set()
        frontier = [self.identity]
        while frontier:
            following: list[Element] = []
            for g in frontier:
                key = matrix_key(g.matrix)
                if key not in seen:
                    seen.add(key)
                    yield g
                    following += [self.element_of(g.matrix @ step) for step in self.steps]
            frontier = following

    def __str__(self) -> str:
        return self.name

    def __mul__(self, other: Group) -> Group:
        from softequiv.groups.products import product

        return product(self, other)


def elements_within(group: Group, within: float) -> tuple[Element, ...]:
    """All elements of a finite group that lie in a range."""
    return _elements_within(group, within, isinstance(within, Angle))


@cached  # a draw would otherwise list the group again
def _elements_within(group: Group, within: float, _: bool) -> tuple[Element, ...]:
    """The list; an angle and a path length may be equal as numbers, so that what tells them apart is asked for."""
    return tuple(g for g in group.elements() if group.holds(g, within))


def matrix_key(matrix: Tensor) -> bytes:
    """A hashable name of a group element's matrix, blind to rounding."""
    return bytes(((matrix * 1e6).round() + 0.0).to(torch.int64).numpy().tobytes())
