"""Is a batch moved by many elements at once what its samples are, moved one by one?"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import softequiv as se
from softequiv.actions import Acts, Moves, Pictures, Points, Still, Tokens, Vectors, in_disc
from softequiv.errors import GroupError, RepresentationError, SoftEquivError
from softequiv.groups import Element, Group


@dataclass(frozen=True)
class Cycled(Acts):
    """An action that knows no vectorised form: entries move around a circle; what went around is not real."""

    def check(self, group: Group, x: Tensor) -> None: ...

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        return x.roll(int(g.length), -1)

    def valid(self, x: Tensor, g: Element) -> Tensor | None:
        steps = int(g.length)
        return None if steps == 0 else torch.arange(x.shape[-1]) >= steps


CASES: list[tuple[Acts, Group, float | None, tuple[int, ...]]] = [
    (Pictures(), se.SO(2), None, (3, 7, 7)),
    (Pictures("bilinear", "border"), se.SO(2), se.degrees(30), (3, 6, 9)),
    (Pictures("bilinear", "reflection"), se.O(2), None, (2, 6, 6)),
    (Pictures("bicubic", fill=2.5), se.SO(2), None, (2, 7, 7)),
    (Pictures("nearest", fill=255), se.SO(2), None, (7, 7)),
    (Pictures("nearest"), se.C(12), None, (1, 7, 7)),  # whose places fall midway between pixels
    (Pictures(), se.C(4), None, (3, 5, 5)),
    (Pictures(), se.D(4), None, (5, 5)),
    (Pictures(), se.C(8), None, (3, 6, 6)),
    (Pictures(), se.D(18), None, (3, 6, 7)),
    (Pictures(), se.Reflection(), None, (2, 3, 4)),
    (Pictures(), se.Shifts(3, 4), None, (2, 3, 4)),
    (Tokens(4, 4, extra=2), se.SO(2), None, (18, 3)),
    (Tokens(4, 4), se.C(4), None, (16, 3)),
    (Points(), se.SO(2), se.degrees(30), (6, 2)),
    (Points("mean"), se.SO(3), None, (2, 6, 3)),
    (Points((1.0, 2.0)), se.O(2), None, (6, 2)),
    (Vectors(se.vector(se.SO(3))), se.SO(3), None, (3,)),
    (Vectors(se.grid(se.C(4), 3, 3)), se.C(4), None, (5, 3, 3)),
    (Still(), se.SO(2), None, (10,)),
    (Cycled(), se.C(5), None, (2, 6)),
]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize(("acts", "group", "within", "shape"), CASES, ids=str)
def test_each_sample_is_moved_as_if_it_were_alone(
    acts: Acts, group: Group, within: float | None, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    moves = Moves(acts, group, within, count=40)
    x, chosen = drawn(24, *shape, dtype=dtype), moves.draw(24, torch.Generator().manual_seed(1))
    moved, valid = moves(x, chosen), moves.valid(x, chosen)
    assert moved.dtype == dtype
    for i, number in enumerate(chosen.tolist()):
        g = moves.elements[number]
        torch.testing.assert_close(moved[i], acts(x[i], g), rtol=0, atol=tolerance)
        alone = acts.valid(x[i], g)
        if valid is None:
            assert alone is None
        else:
            assert torch.equal(valid[i], torch.ones_like(valid[i]) if alone is None else alone)


@pytest.mark.parametrize(("group", "size"), [(se.C(4), (6, 6)), (se.D(4), (5, 5)), (se.Shifts(4, 5), (4, 5))], ids=str)
def test_where_pixels_go_to_pixels_the_inverse_brings_back_every_bit(group: Group, size: tuple[int, int]) -> None:
    moves = Moves(Pictures(), group)
    x, chosen = drawn(30, 2, *size), moves.draw(30)
    assert torch.equal(moves.inverse()(moves(x, chosen), chosen), x)
    assert moves.valid(x, chosen) is None


def test_whole_labels_are_moved_exactly_and_filled() -> None:
    labels = torch.arange(2 * 36).reshape(2, 6, 6)
    moves = Moves(Pictures("nearest", fill=255), se.SO(2), elements=[se.SO(2).element(se.degrees(45))])
    moved = moves(labels, torch.zeros(2, dtype=torch.int64))
    assert moved.dtype == torch.int64 and bool((moved[:, 0, 0] == 255).all())
    assert torch.equal(moved[0], moves.acts(labels[0], moves.elements[0]))


def test_a_small_finite_group_is_listed_whole_and_drawn_evenly() -> None:
    moves = Moves(Pictures(), se.C(8), se.degrees(90))
    angles = {round(float(torch.atan2(g.matrix[1, 0], g.matrix[0, 0]).rad2deg())) for g in moves.elements}
    assert angles == {0, 45, -45, 90, -90} and len(moves) == 5
    counts = moves.draw(50_000, torch.Generator().manual_seed(0)).bincount(minlength=5) / 10_000
    torch.testing.assert_close(counts, torch.ones(5), rtol=0, atol=0.05)  # 5 standard deviations


def test_a_continuous_range_is_covered_uniformly_and_without_gaps() -> None:
    moves = Moves(Pictures(), se.SO(2), se.degrees(30))
    turned = torch.stack([g.matrix for g in moves.elements])
    angles = torch.atan2(turned[:, 1, 0], turned[:, 0, 0]).rad2deg().sort().values
    even = torch.linspace(-30, 30, len(moves), dtype=torch.float64)
    assert len(moves) == 4096 and float((angles - even).abs().max()) < 60 * 1.95 / 64  # Kolmogorov-Smirnov at 0.1%
    whole = torch.stack([g.matrix for g in Moves(Pictures(), se.SO(2)).elements])
    assert float(torch.atan2(whole[:, 1, 0], whole[:, 0, 0]).rad2deg().sort().values.diff().max()) < 1


def test_pools_are_the_same_for_the_same_seed_and_differ_by_seed() -> None:
    pools = [Moves(Points(), se.SO(2), count=5, seed=seed).elements for seed in (0, 0, 1)]
    assert pools[0] == pools[1] != pools[2]


def test_a_cycle_runs_through_all_elements_from_where_it_starts() -> None:
    assert Moves(Pictures(), se.C(4)).cycle(3, 6).tolist() == [3, 0, 1, 2, 3, 0]


def test_targets_move_by_the_same_elements() -> None:
    moves, chosen = Moves(Pictures(), se.SO(2), count=8), torch.arange(4)
    points = moves.on(Points())
    x = drawn(4, 3, 2)
    for i in range(4):
        torch.testing.assert_close(points(x, chosen)[i], Points()(x[i], moves.elements[i]))


def test_gradients_pass_through_a_mixture_of_exact_and_resampled_turns() -> None:
    moves = Moves(Pictures("bilinear"), se.C(8))
    x, chosen = drawn(8, 1, 4, 4).requires_grad_(), torch.arange(8)
    weights = drawn(8, 1, 4, 4)
    (moves(x, chosen) * weights).sum().backward()
    assert x.grad is not None
    # the map is linear, so the gradient g satisfies <g, x> = <weights, moved x>
    torch.testing.assert_close((x.grad * x).sum(), (moves(x, chosen) * weights).sum())


def test_no_sample_is_no_problem() -> None:
    moves, nothing = Moves(Pictures(), se.SO(2), count=2), torch.zeros(0, 3, 4, 4)
    assert moves(nothing, moves.draw(0)).shape == nothing.shape and moves.valid(nothing, moves.draw(0)) is None


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (6, 9)], ids=str)
def test_the_disc_keeps_what_no_turn_takes_out_of_the_frame(size: tuple[int, int]) -> None:
    x, radius = drawn(2, *size), min(size) / 2
    kept = in_disc(x, fill=7.0)
    for row in range(size[0]):
        for column in range(size[1]):
            far = (row - (size[0] - 1) / 2) ** 2 + (column - (size[1] - 1) / 2) ** 2 > radius**2
            assert torch.equal(kept[:, row, column], torch.full((2,), 7.0).double() if far else x[:, row, column])
    if size[0] == size[1]:
        assert torch.equal(in_disc(x.rot90(1, (-2, -1))), in_disc(x).rot90(1, (-2, -1)))


def test_a_picture_in_the_disc_loses_little_by_turning_and_one_in_the_square_much() -> None:
    moves, x = Moves(Pictures("bilinear"), se.SO(2), elements=[se.SO(2).element(se.degrees(45))]), torch.ones(1, 64, 64)
    chosen = torch.tensor([0])
    kept = [float(moves(picture, chosen).sum() / picture.sum()) for picture in (in_disc(x), x)]
    assert kept[0] > 0.99 and kept[1] < 0.85  # an octagon is 0.83 of the square


@pytest.mark.parametrize(
    ("mistake", "error", "sentence"),
    [
        (lambda: Moves(Pictures(), se.C(4), elements=[]), SoftEquivError, "no element to move by"),
        (lambda: Moves(Pictures(), se.SO(2), count=0), SoftEquivError, "count=0"),
        (lambda: Moves(Pictures(), se.SO(2), -1.0), GroupError, "range -1.0 is empty"),
        (lambda: Moves(Pictures(), se.C(4), elements=[se.C(8).element(1)]), GroupError, "C8 do not belong to C4"),
        (lambda: Moves(Pictures(), se.C(4))(torch.ones(2, 3, 3), torch.tensor([0, 4])), SoftEquivError, "0 to 3"),
        (lambda: Moves(Pictures(), se.C(4))(torch.ones(2, 3, 3), torch.tensor([0])), SoftEquivError, "each of 2"),
        (lambda: Moves(Pictures(), se.C(4))(torch.ones(1, 3, 3), torch.tensor([0.0])), SoftEquivError, "whole numbers"),
        (lambda: Moves(Pictures(), se.C(4))(torch.ones(1, 3, 4), torch.tensor([1])), RepresentationError, "square"),
        (
            lambda: Moves(Points(), se.SO(3), count=2)(torch.ones(1, 3, 2), torch.tensor([1])),
            RepresentationError,
            "3 coord",
        ),
        (lambda: in_disc(torch.ones(3)), RepresentationError, "a picture is"),
    ],
)
def test_mistakes_are_named(mistake: object, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        mistake()  # type: ignore[operator]
