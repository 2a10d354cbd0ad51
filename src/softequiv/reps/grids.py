"""How a group acts on pictures: lines, squares and cubes of pixels, put together with @ into grids of any number of
axes.

A picture of shape (H, W) is a vector of `grid(group, H, W)`. Quarter turns, flips and rolls are exact permutations. For
other angles the action has a name: "exact" (integer frequencies, the default), "su2", "central" (skew generators whose
exponentials are orthogonal), or "bilinear" (resampling as in the paper: neither orthogonal nor a representation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from softequiv._linalg import expm, stack
from softequiv.errors import RepresentationError, TooLargeError
from softequiv.groups import SO, C, D, Group, O, Reflection, Scaling, Shifts
from softequiv.groups.rotations import mirror, rotation
from softequiv.reps.base import Decomposition, Piece, Rep, scalar, tensor_product
from softequiv.reps.pixels import bilinear_rotation, central_generator, harmonics, quarter_turn, su2_generator

Action = Literal["exact", "su2", "central", "bilinear"]

PAPER_STEP = math.radians(20)  # the angle over which the paper takes its bilinear difference
LARGEST_SQUARE = 96  # a dense basis for it takes 0.7 GB in float64
UNSETTLED_RATE = 2.0  # how fast a quarter turn moves a picture whose sign it changes: ||P v - v|| / ||v||


@dataclass(frozen=True)
class Square(Rep):
    """n x n pixels under plane rotations and, for O(2) and D(n), the left-right flip.

    Some sizes admit no exact action, and then a few of the roughest pictures are left out of it: one picture under
    SO(2) for n = 2 mod 4, where a quarter turn has determinant -1; n/2 pictures under O(2) for even n, where the flip
    and the transposition differ in trace although all reflections of O(2) are conjugate. Quarter turns change the sign
    of these pictures. Other rotations leave them unchanged, but they count as moving at rate 2, so that level 0 never
    contains them.
    """

    group: Group
    n: int
    action: Action = "exact"

    @property
    def dim(self) -> int:
        return self.n**2

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.n)

    @property
    def name(self) -> str:
        return f"{self.n}x{self.n}" + ("" if self.action == "exact" else f" {self.action}")

    @property
    def permutes(self) -> bool:
        """Whether the group holds quarter turns and flips only, which move pixels to pixels."""
        return isinstance(self.group, (C, D)) and 4 % self.group.n == 0

    @property
    def orthogonal(self) -> bool:
        return self.action != "bilinear" or self.permutes

    @property
    def normal(self) -> bool:
        return self.orthogonal

    @property
    def exact(self) -> bool:
        return self.action == "exact" or self.permutes

    @property
    def settled(self) -> bool:
        return self.action != "exact" or isinstance(self.group, (C, D)) or not bool(self._columns[2].any())

    @property
    def flips(self) -> bool:
        """Whether the group holds reflections."""
        return isinstance(self.group, (O, D))

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(still pictures, their parity, which of them are unsettled, turning pairs (2, n^2, n1), frequencies
        (n1,)).
        """
        table = harmonics(self.n)
        still, parity = table.zero, table.zero_parity
        unsettled = torch.zeros(len(parity), dtype=torch.bool)
        if table.leftover is not None:
            unsettled[table.leftover] = True
        pairs, m = torch.stack([table.cosine, table.sine]), table.frequency
        if self.flips and not table.mirrored.all():
            lost = pairs[:, :, ~table.mirrored].transpose(0, 1).flatten(1)
            still = torch.cat([still, lost], 1)
            parity = torch.cat([parity, -torch.ones(lost.shape[1], dtype=torch.float64)])
            unsettled = torch.cat([unsettled, torch.ones(lost.shape[1], dtype=torch.bool)])
            pairs, m = pairs[:, :, table.mirrored], m[table.mirrored]
        return still, parity, unsettled, pairs, m

    def _turn(self, angle: float) -> Tensor:
        """The picture turned by an angle, (n^2, n^2)."""
        quarters = 2 * angle / math.pi
        if abs(quarters - round(quarters)) < 1e-12 and self.permutes:
            turn = torch.eye(self.dim, dtype=torch.float64)
            for _ in range(round(quarters) % 4):
                turn = turn[quarter_turn(self.n)]
            return turn
        if self.action == "bilinear":
            return bilinear_rotation(self.n, angle)
        if self.action != "exact":
            return expm(angle * self._generator())
        still, _, unsettled, (cosine, sine), m = self._columns
        half = (cosine * torch.cos(angle * m)) @ cosine.T + (sine * torch.cos(angle * m)) @ sine.T
        swap = (sine * torch.sin(angle * m)) @ cosine.T
        return half + swap - swap.T + (still * torch.where(unsettled, self._unsettled_sign, 1.0)) @ still.T

    @property
    def _unsettled_sign(self) -> float:
        """What a step of C(n), D(n) does to unsettled pictures: it changes their sign where n is a multiple of 4.

        That is what the quarter turn asks for when n / 4 is odd; when it is even no real number will do, and the sign
        keeps them out of level 0.
        """
        return -1.0 if isinstance(self.group, (C, D)) and self.group.n % 4 == 0 else 1.0

    def _generator(self) -> Tensor:
        if self.n > LARGEST_SQUARE:
            raise TooLargeError(
                f"the matrix of {self} would have {self.dim}^2 entries; its spectrum can be had, it cannot"
            )
        if self.action == "su2":
            return su2_generator(self.n)
        if self.action == "central":
            return central_generator(self.n)
        if self.action == "bilinear":
            return (bilinear_rotation(self.n, PAPER_STEP) - torch.eye(self.dim, dtype=torch.float64)) / PAPER_STEP
        _, _, _, (cosine, sine), m = self._columns
        half = (sine * m) @ cosine.T
        return half - half.T

    def lie(self) -> Tensor:
        return self._generator()[None] if isinstance(self.group, (SO, O)) else stack([], self.dim)

    def steps(self) -> Tensor:
        turns = [self._turn(2 * math.pi / self.group.n)] if isinstance(self.group, (C, D)) else []
        flip = torch.eye(self.dim, dtype=torch.float64)[torch.arange(self.dim).reshape(self.shape).flip(-1).flatten()]
        return stack(turns + [flip] * self.flips, self.dim)

    def rates(self) -> Tensor:
        rates = super().rates()
        if self.action == "exact" and isinstance(self.group, (SO, O)):
            still, _, unsettled, _, _ = self._columns
            rates[0] += UNSETTLED_RATE * still[:, unsettled] @ still[:, unsettled].T
        return rates

    def decomposition(self) -> Decomposition | None:
        if self.action != "exact":
            return None
        still, parity, unsettled, pairs, m = self._columns
        basis = torch.cat([still, *pairs], 1)
        pieces = []
        for sign in (1.0, -1.0):
            for lost in (False, True):
                index = torch.nonzero((parity == sign) & (unsettled == lost))
                if len(index):
                    pieces.append(Piece(self._still_rates(sign, lost), index))
        for value in m.unique():
            first = still.shape[1] + torch.nonzero(m == value)
            pieces.append(Piece(self._pair_rates(float(value)), torch.cat([first, first + len(m)], 1)))
        return Decomposition(basis, tuple(pieces))

    def _still_rates(self, parity: float, unsettled: bool) -> Tensor:
        continuous = isinstance(self.group, (SO, O))
        turn = (UNSETTLED_RATE if continuous else self._unsettled_sign - 1) if unsettled else 0.0
        return torch.tensor([turn] + [parity - 1] * self.flips, dtype=torch.float64)[:, None, None]

    def _pair_rates(self, m: float) -> Tensor:
        eye = torch.eye(2, dtype=torch.float64)
        if isinstance(self.group, (SO, O)):
            turn = torch.tensor([[0.0, -m], [m, 0.0]], dtype=torch.float64)
        else:
            assert isinstance(self.group, (C, D))
            turn = rotation(2 * math.pi * m / self.group.n) - eye
        return torch.stack([turn] + [-mirror(2) - eye] * self.flips)


@dataclass(frozen=True)
class Line(Rep):
    """n places in a row: the axis of a grid under shifts (rolled), reflection (the last axis flipped) or scaling.

    Scaling is the energy-preserving dilation e^(-t/2) f(e^-t x) about the middle, which is orthogonal.
    """

    group: Group
    n: int
    axis: int
    last: bool

    @property
    def dim(self) -> int:
        return self.n

    @property
    def name(self) -> str:
        return f"{self.n}"

    def lie(self) -> Tensor:
        return dilation_generator(self.n)[None] if isinstance(self.group, Scaling) else stack([], self.n)

    def steps(self) -> Tensor:
        eye = torch.eye(self.n, dtype=torch.float64)
        if isinstance(self.group, Shifts):
            return stack(
                [eye.roll(1, 0) if axis == self.axis else eye for axis in range(len(self.group.sizes))], self.n
            )
        if isinstance(self.group, Reflection):
            return stack([eye.flip(0) if self.last else eye], self.n)
        return stack([], self.n)

    def decomposition(self) -> Decomposition | None:
        """Shifts: the real Fourier basis, place i and frequency k giving cos and sin(2 pi k i / n)."""
        if not isinstance(self.group, Shifts):
            return None
        phase = (
            2 * math.pi * torch.outer(torch.arange(self.n), torch.arange(self.n // 2 + 1)).to(torch.float64) / self.n
        )
        alone = [0] + [self.n // 2] * (self.n % 2 == 0)
        paired = [k for k in range(self.n // 2 + 1) if k not in alone]
        columns = [phase[:, alone].cos().round() / math.sqrt(self.n)]
        columns += [f(phase[:, paired]) * math.sqrt(2 / self.n) for f in (torch.cos, torch.sin)]
        pieces = [
            Piece(self._shift_rates(math.pi * k * 2 / self.n, 1), torch.tensor([[i]])) for i, k in enumerate(alone)
        ]
        for i, k in enumerate(paired, start=len(alone)):
            pieces.append(Piece(self._shift_rates(2 * math.pi * k / self.n, 2), torch.tensor([[i, i + len(paired)]])))
        return Decomposition(torch.cat(columns, 1), tuple(pieces))

    def _shift_rates(self, angle: float, size: int) -> Tensor:
        rates = torch.zeros(len(self.group.steps), size, size, dtype=torch.float64)
        rates[self.axis] = rotation(angle)[:size, :size] - torch.eye(size, dtype=torch.float64)
        return rates


def dilation_generator(n: int) -> Tensor:
    """-(x D + D x) / 2 with central differences D and the middle at x = 0: (n, n), skew."""
    x = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    half = torch.full((n - 1,), 0.5, dtype=torch.float64)
    derivative = half.diag(1) - half.diag(-1) if n > 1 else torch.zeros(1, 1, dtype=torch.float64)
    return -(x[:, None] * derivative + derivative * x) / 2


@dataclass(frozen=True)
class Cube(Rep):
    """n x n x n voxels (depth, height, width) under SO(3) or O(3): each coordinate plane turns exactly, their
    brackets only nearly.

    So the certificate along any one-parameter path holds, while rho(g) rho(h) and rho(gh) differ; `exact` says so.
    """

    group: Group
    n: int
    action: Action = "exact"

    @property
    def dim(self) -> int:
        return self.n**3

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.n, self.n)

    @property
    def name(self) -> str:
        return f"{self.n}x{self.n}x{self.n}" + ("" if self.action == "exact" else f" {self.action}")

    @property
    def orthogonal(self) -> bool:
        return self.action != "bilinear"

    @property
    def normal(self) -> bool:
        return self.orthogonal

    @property
    def exact(self) -> bool:
        return self.n == 1

    @property
    def settled(self) -> bool:
        return self._plane.settled

    @property
    def _plane(self) -> Square:
        return Square(O(2) if isinstance(self.group, O) else SO(2), self.n, self.action)

    def _embedded(self, plane: Tensor) -> Tensor:
        """The plane's generator in the planes that turn about x, y and z: (depth, height), (depth, width), (height,
        width).
        """
        n = self.n
        square, eye = plane.reshape(n, n, n, n), torch.eye(n, dtype=torch.float64)
        forms = ("abde,cf->abcdef", "acdf,be->abcdef", "bcef,ad->abcdef")
        return torch.stack([torch.einsum(form, square, eye).reshape(self.dim, self.dim) for form in forms])

    def lie(self) -> Tensor:
        return self._embedded(self._plane.lie()[0])

    def steps(self) -> Tensor:
        index = torch.arange(self.dim).reshape(self.shape).flip(-1).flatten()
        return stack([torch.eye(self.dim, dtype=torch.float64)[index]] * isinstance(self.group, O), self.dim)

    def rates(self) -> Tensor:
        return torch.cat([self._embedded(self._plane.rates()[0]), super().rates()[3:]])


def kernels(group: Group, *sizes: int, action: Action = "exact") -> Rep:
    """The space of weights that are laid over pictures, x -> <w, x>: the dual of `grid`, which differs from it only
    where the action is not orthogonal.

    >>> print(kernels(C(18), 5, 5), "and", kernels(C(18), 5, 5, action="bilinear"))
    5x5 and (5x5 bilinear)*
    """
    pictures = grid(group, *sizes, action=action)
    return pictures if pictures.orthogonal else pictures.T


def grid(group: Group, *sizes: int, action: Action = "exact") -> Rep:
    """The action of a group on grids of pixels or voxels, (H, W) or (D, H, W), last axis to the right.

    >>> grid(SO(2), 14, 14).shape
    (14, 14)
    """
    if not sizes or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise RepresentationError(f"a grid needs the size of each axis as a whole number of at least 1; got {sizes}")
    if action not in get_args(Action):
        raise RepresentationError(f"unknown action {action!r}; choose one of {', '.join(get_args(Action))}")
    if isinstance(group, (C, D)) or group in (SO(2), O(2)):
        if len(sizes) < 2 or sizes[-1] != sizes[-2]:
            raise RepresentationError(
                f"{group} turns squares, and {sizes} is not one: pad or crop the last two axes to one size, "
                f"or use Reflection or Shifts"
            )
        if sizes[-1] > LARGEST_SQUARE and not (group == SO(2) and len(sizes) == 2 and action == "su2"):
            raise TooLargeError(
                f"a basis for {group} on {sizes[-1]} x {sizes[-1]} pixels takes {sizes[-1] ** 4 * 8 / 1e9:.1f} GB; "
                f"the largest square is {LARGEST_SQUARE}: resize, or use SO(2) with action='su2', short at any size"
            )
        return tensor_product(*(size * scalar(group) for size in sizes[:-2]), Square(group, sizes[-1], action))
    if group in (SO(3), O(3)):
        if len(sizes) != 3 or len(set(sizes)) > 1:
            raise RepresentationError(
                f"{group} turns cubes of voxels, and {sizes} is not one: pad or crop to three equal sizes"
            )
        if sizes[0] ** 3 > LARGEST_SQUARE**2:
            raise TooLargeError(
                f"a rotation of {sizes[0]} cubed voxels is too large; at most {int(LARGEST_SQUARE ** (2 / 3))} cubed"
            )
        return Cube(group, sizes[0], action)
    if isinstance(group, Shifts) and group.sizes != sizes:
        raise RepresentationError(f"{group} shifts grids of its own size; got {sizes}: use Shifts{sizes}")
    if isinstance(group, (Shifts, Reflection, Scaling)):
        last = len(sizes) - 1
        return tensor_product(*(Line(group, size, axis, axis == last) for axis, size in enumerate(sizes)))
    raise RepresentationError(
        f"{group} does not act on a grid of {len(sizes)} axes; SO(2), O(2), C(n), D(n), SO(3), O(3), "
        f"Reflection, Shifts and Scaling do"
    )
