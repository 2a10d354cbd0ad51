"""What is known of one tensor inside a network: how the group moves it, how large it is, and how far it is from moving
as it should. Bounds are affine in the size of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.actions import Pictures
from softequiv.certify.operator import linear_map, operator_change, spectral_norm
from softequiv.groups import C, D, Element, Group, Shifts, Step
from softequiv.nn.layers import is_scalar
from softequiv.reps import Action, Rep, grid, scalar, terms_of
from softequiv.spectrum import spectrum

MOST_ELEMENTS = 16  # so many are tried one by one; of larger sets the generators are bounded


class UnboundedError(Exception):
    """A network, or a part of it, for which no bound is computed; the message says why."""


@dataclass(frozen=True)
class Affine:
    """slope ||x|| + offset, for the input x of the network."""

    slope: float
    offset: float

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.slope + other.slope, self.offset + other.offset)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.slope * factor, self.offset * factor)

    def __str__(self) -> str:
        return f"{self.slope:.3g} ||x|| + {self.offset:.3g}"


NOTHING = Affine(0.0, 0.0)


def merged(*changes: Mapping[str, Affine]) -> dict[str, Affine]:
    """Deviations by layer, those of one layer added up."""
    total: dict[str, Affine] = {}
    for change in changes:
        for name, part in change.items():
            total[name] = total.get(name, NOTHING) + part
    return total


@dataclass(frozen=True)
class Still:
    """The group leaves the tensor alone."""

    def __str__(self) -> str:
        return "stands still"


@dataclass(frozen=True)
class Pixels:
    """(N, channels, *sizes) whose pixels the group permutes, or the same flattened into (N, channels * prod sizes)."""

    channels: int
    sizes: tuple[int, ...]
    flat: bool = False

    def __str__(self) -> str:
        return f"moves as a picture of {'x'.join(map(str, self.sizes))} pixels"


@dataclass(frozen=True)
class Moving:
    """(N, channels, *rep.shape), or flat (N, channels * rep.dim), each channel moved by a representation."""

    rep: Rep
    channels: int = 1
    flat: bool = True

    def __str__(self) -> str:
        return f"moves as {self.rep}"


@dataclass(frozen=True)
class Padded:
    """Pixels with a border that a convolution is about to consume."""

    inside: Pixels
    border: tuple[tuple[int, int], ...]
    mode: str

    def __str__(self) -> str:
        return "moves as a padded picture"


How = Still | Pixels | Moving | Padded


@dataclass(frozen=True)
class Signal:
    """A tensor h(x): ||h|| <= size, and ||h(rho x) - rho h(x)|| <= the sum of `change`, split by layers.

    Norms are those of one sample; axis 0 counts samples.
    """

    shape: tuple[int, ...]
    how: How
    size: Affine
    change: Mapping[str, Affine]

    @property
    def total(self) -> Affine:
        """The whole deviation."""
        return sum(self.change.values(), NOTHING)

    @property
    def entries(self) -> int:
        """Numbers in one sample."""
        return math.prod(self.shape[1:])

    def through(self, shape: Iterable[int], how: How, factor: float, offset: float = 0.0) -> Signal:
        """After a map with this Lipschitz constant that commutes with the group; `offset` is the size of its f(0)."""
        change = {name: part * factor for name, part in self.change.items()}
        return Signal(tuple(shape), how, self.size * factor + Affine(0.0, offset), change)

    def adding(self, name: str, part: Affine) -> Signal:
        """With a further deviation that a layer brings in."""
        if part == NOTHING:
            return self
        return Signal(self.shape, self.how, self.size, merged(self.change, {name: part}))

    def capped(self) -> Signal:
        """The same with a deviation of at most 2 ||h||, which holds where the group keeps lengths."""
        total, most = self.total, self.size * 2
        if not (total.slope >= most.slope and total.offset >= most.offset and total != NOTHING):
            return self
        slope = most.slope / total.slope if total.slope else 0.0
        offset = most.offset / total.offset if total.offset else 0.0
        change = {name: Affine(part.slope * slope, part.offset * offset) for name, part in self.change.items()}
        return Signal(self.shape, self.how, self.size, change)

    @property
    def keeps_lengths(self) -> bool:
        """Whether the group acts orthogonally on the tensor."""
        return not isinstance(self.how, Moving) or self.how.rep.orthogonal

    @property
    def permuted(self) -> bool:
        """Whether the group permutes or fixes the entries, so that functions of single entries commute with it."""
        return isinstance(self.how, (Still, Pixels)) or (isinstance(self.how, Moving) and permutes(self.how.rep))


def permutes(rep: Rep) -> bool:
    """Whether every element permutes the coordinates of a space."""
    terms = [term for term, _ in terms_of(rep)]
    return all(are_permutations(term.steps()) and not bool(term.lie().any()) for term in terms)


def are_permutations(matrices: Tensor) -> bool:
    """Whether each of (m, n, n) matrices has a single 1 in every row and column, and zeros elsewhere."""
    ones = (matrices - 1).abs() < 1e-12
    zeros = matrices.abs() < 1e-12
    return bool((ones | zeros).all() and (ones.sum(-1) == 1).all() and (ones.sum(-2) == 1).all())


@dataclass(frozen=True)
class Range:
    """The group elements that a certificate is for."""

    group: Group
    within: float
    action: Action
    elements: tuple[Element, ...] | None

    @staticmethod
    def of(group: Group, within: float, action: Action = "exact") -> Range:
        """Elements of path length up to `within`, listed where they are few; `action` says how they turn grids."""
        reach = group.reach(within)
        if group.order > MOST_ELEMENTS or len(group.lie):
            return Range(group, within, action, None)
        return Range(group, within, action, tuple(g for g in group.elements() if g.length <= reach + 1e-9))

    def grid(self, sizes: tuple[int, ...]) -> Rep:
        """The representation on a grid of these sizes."""
        return grid(self.group, *sizes, action=self.action)

    @property
    def reversed_axes(self) -> tuple[bool, ...]:
        """Whether any element turns (rows, columns) round."""
        if isinstance(self.group, Shifts) or self.group.order == 1:
            return False, False
        both = isinstance(self.group, (C, D)) and self.group.n > 1
        return both, True

    @property
    def swaps_axes(self) -> bool:
        """Whether any element exchanges rows and columns."""
        return isinstance(self.group, (C, D)) and self.group.n == 4

    def moved(self, x: Tensor, g: Element, axes: int) -> Tensor:
        """g x for pixels in the last axes."""
        if isinstance(g.group, Shifts):
            counts = [sum(m.count for m in g.word if isinstance(m, Step) and m.index == j) for j in range(axes)]
            return x.roll(counts, tuple(range(-axes, 0)))
        rows = x if axes == 2 else x.unsqueeze(-2)
        ringed = functional.pad(rows, (1, 1, 1, 1))  # pictures of one row or column have the same middle with a ring
        turned = Pictures()(ringed, g)[..., 1:-1, 1:-1]
        return turned if axes == 2 else turned.squeeze(-2)

    def picture(self, channels: int, sizes: tuple[int, ...]) -> How:
        """How a picture of these sizes moves; one of a single pixel does not."""
        if math.prod(sizes) == 1:
            return Still()
        if Pictures().exact(self.group):  # quarter turns, flips and shifts alone
            if isinstance(self.group, Shifts) and self.group.sizes != sizes:
                raise UnboundedError(f"{self.group} does not act on {sizes} pixels; it shifts pictures of its own size")
            turns = isinstance(self.group, (C, D))
            if turns and (len(sizes) != 2 or (self.swaps_axes and len(set(sizes)) > 1)):
                raise UnboundedError(f"{self.group} turns squares, and {sizes} is not one")
            return Pixels(channels, sizes)
        return Moving(self.grid(sizes), channels, flat=False)

    def map_change(self, weight: Tensor, source: How, target: Rep | None) -> float:
        """A bound on sup ||W rho_X(g) - rho_Y(g) W||_op for W (rows, columns); the target stands still if None."""
        if isinstance(source, Pixels) and target is None and self.elements is not None:
            view = weight.reshape(len(weight), source.channels, *source.sizes)
            axes = len(source.sizes)
            return max(spectral_norm((self.moved(view, g, axes) - view).flatten(1)) for g in self.elements)
        if isinstance(source, Pixels):
            source = Moving(self.grid(source.sizes), source.channels)
        if not isinstance(source, Moving):
            source = Moving(scalar(self.group), weight.shape[1])
        if target is None and is_scalar(source.rep):
            return 0.0
        channels = weight.reshape(len(weight), source.channels, source.rep.dim)
        if self.elements is not None:
            return max(
                spectral_norm((channels @ source.rep.rho(g)).flatten(1) - turned(weight, target, g))
                for g in self.elements
            )
        if target is None and source.rep.orthogonal:
            view, rep = channels.reshape(len(weight), source.channels, *source.rep.shape), source.rep
        else:
            outputs = len(weight) * scalar(self.group) if target is None else target
            view, rep = weight, source.channels * source.rep >> outputs
        of = spectrum(rep)
        linear = linear_map(view, of)
        assert linear is not None  # a matrix is a map
        return operator_change(of, linear, self.within, of.error(view, self.within) * float(view.norm()))

    def vector_change(self, value: Tensor, how: How) -> float:
        """A bound on sup ||c - rho(g) c|| for a constant (channels, *sizes) or (entries,) of one sample."""
        if isinstance(how, Pixels) and self.elements is not None:
            view = value.reshape(how.channels, *how.sizes)
            return max(float((self.moved(view, g, len(how.sizes)) - view).norm()) for g in self.elements)
        if isinstance(how, Pixels):
            how = Moving(self.grid(how.sizes), how.channels)
        if not isinstance(how, Moving):
            return 0.0
        view = value.reshape(how.channels, *how.rep.shape).to(torch.float64)
        return spectrum(how.rep).error(view, self.within) * float(view.norm())


def turned(weight: Tensor, target: Rep | None, g: Element) -> Tensor:
    """rho_Y(g) W."""
    return weight if target is None else target.rho(g) @ weight
