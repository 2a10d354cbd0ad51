"""Direct products: each factor acts on its own block, generators side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv._linalg import stack
from softequiv.groups.angles import Angle
from softequiv.groups.base import Element, Flow, Group, Step, Word


@dataclass(frozen=True)
class DirectProduct(Group):
    """G_1 x G_2 x ...

    >>> from softequiv.groups import SO
    >>> torus = SO(2) * SO(2)
    >>> torus.name, torus.covering_radius == math.pi * math.sqrt(2)
    ('SO(2)xSO(2)', True)
    """

    factors: tuple[Group, ...]

    @property
    def name(self) -> str:
        return "x".join(factor.name for factor in self.factors)

    @property
    def dims(self) -> list[int]:
        """Size of each factor's block."""
        return [factor.lie.shape[-1] for factor in self.factors]

    def blocks(self, matrix: Tensor) -> list[Tensor]:
        """The diagonal blocks of a matrix, one per factor."""
        starts = [sum(self.dims[:i]) for i in range(len(self.factors))]
        return [matrix[s : s + d, s : s + d] for s, d in zip(starts, self.dims, strict=True)]

    def _embedded(self, kind: str, rest: Tensor) -> Tensor:
        matrices = []
        for index, factor in enumerate(self.factors):
            for generator in getattr(factor, kind):
                matrix = rest.clone()
                self.blocks(matrix)[index].copy_(generator)
                matrices.append(matrix)
        return stack(matrices, sum(self.dims))

    @property
    def lie(self) -> Tensor:
        size = sum(self.dims)
        return self._embedded("lie", torch.zeros(size, size, dtype=torch.float64))

    @property
    def steps(self) -> Tensor:
        return self._embedded("steps", torch.eye(sum(self.dims), dtype=torch.float64))

    @property
    def unit(self) -> str:
        return "; ".join(f"{factor}: {factor.unit}" for factor in self.factors)

    @property
    def covering_radius(self) -> float:
        return math.hypot(*(factor.covering_radius for factor in self.factors))

    @property
    def order(self) -> float:
        orders = [factor.order for factor in self.factors]
        return math.inf if math.inf in orders else math.prod(orders)  # a whole number may be too large for a float

    @property
    def abelian(self) -> bool:
        return all(factor.abelian for factor in self.factors)

    @property
    def central(self) -> bool:
        return all(factor.central for factor in self.factors)

    @property
    def periods(self) -> tuple[float | None, ...]:
        return tuple(period for factor in self.factors for period in factor.periods)

    @property
    def relations(self) -> tuple[Word, ...]:
        words: list[Word] = []
        owners: list[int] = []
        for index, factor in enumerate(self.factors):
            words += [_moved(word, 0, 0, len(owners)) for word in factor.relations]
            owners += [index] * len(factor.steps)
        commuting = [(a, b) for a in range(len(owners)) for b in range(a + 1, len(owners)) if owners[a] != owners[b]]
        return tuple(words) + tuple((Step(a), Step(b), Step(a, -1), Step(b, -1)) for a, b in commuting)

    def element_of(self, matrix: Tensor) -> Element:
        return self._joined([f.element_of(block) for f, block in zip(self.factors, self.blocks(matrix), strict=True)])

    def compose(self, g: Element, h: Element) -> Element:
        pairs = zip(self.factors, self._parts(g), self._parts(h), strict=True)
        return self._joined([factor.compose(a, b) for factor, a, b in pairs])

    def shortened(self, g: Element) -> Element:
        parts = zip(self.factors, self._parts(g), strict=True)
        shortest = self._joined([factor.shortened(part) for factor, part in parts])
        return shortest if shortest.length < g.length - 1e-9 else g

    def _parts(self, g: Element) -> list[Element]:
        """The element of each factor, by its own part of the path: one that is given by generators reads no matrix."""
        parts = []
        lie = steps = 0
        for factor in self.factors:
            flows, counts = slice(lie, lie + len(factor.lie)), range(steps, steps + len(factor.steps))
            word: list[Flow | Step] = []
            for move in g.word:
                if isinstance(move, Step):
                    word += [Step(move.index - steps, move.count)] * (move.index in counts)
                elif any(move.coords[flows]):
                    word.append(Flow(move.coords[flows]))
            parts.append(Element(factor, tuple(word)))
            lie, steps = flows.stop, counts.stop
        return parts

    def _joined(self, parts: Sequence[Element]) -> Element:
        """The product of an element of each factor."""
        word: Word = ()
        total = len(self.lie)
        lie = steps = 0
        for factor, part in zip(self.factors, parts, strict=True):
            word += _moved(part.word, lie, total - lie - len(factor.lie), steps)
            lie, steps = lie + len(factor.lie), steps + len(factor.steps)
        return Element(self, word)

    def _haar(self, generator: torch.Generator | None) -> Element:
        return self._joined([factor._haar(generator) for factor in self.factors])

    def random(self, generator: torch.Generator | None = None, within: float | None = None) -> Element:
        """As of any group; but an angle is one of each factor."""
        if not isinstance(within, Angle):
            return super().random(generator, within)
        self.reach(within)  # which may be refused
        return self._joined([f.identity if _rests(f, within) else f.random(generator, within) for f in self.factors])

    @property
    def draws_haar(self) -> bool:
        return all(factor.draws_haar for factor in self.factors)

    def how_drawn(self, within: float | None = None) -> str:
        apart = isinstance(within, Angle) or (within is None and not self.draws_haar)
        if self.order < math.inf or not apart:
            return super().how_drawn(within)
        return "; ".join(f"{factor}: {factor.how_drawn(within)}" for factor in self.factors)

    def holds(self, g: Element, within: float) -> bool:
        if not isinstance(within, Angle):
            return super().holds(g, within)
        return all(
            part.length == 0 if _rests(part.group, within) else part.group.holds(part, within)
            for part in self._parts(g)
        )

    def _angle_reach(self, angle: Angle) -> float:
        return math.hypot(*(factor._angle_reach(angle) for factor in self.factors))


def _rests(factor: Group, angle: Angle) -> bool:
    """Whether an angle allows no element of a factor but the identity, for which alone it would be refused."""
    return not len(factor.lie) and factor._angle_reach(angle) < 1


def _moved(word: Word, before: int, after: int, steps: int) -> Word:
    """A factor's word as a word of the product: flows padded with zeros, step indices moved."""
    moves: list[Flow | Step] = []
    for move in word:
        if isinstance(move, Flow):
            moves.append(Flow((0.0,) * before + move.coords + (0.0,) * after))
        else:
            moves.append(Step(move.index + steps, move.count))
    return tuple(moves)


def product(*groups: Group) -> Group:
    """The direct product, flat: (G x H) x K = G x H x K."""
    factors: tuple[Group, ...] = ()
    for group in groups:
        factors += group.factors if isinstance(group, DirectProduct) else (group,)
    return factors[0] if len(factors) == 1 else DirectProduct(factors)
