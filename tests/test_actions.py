"""Do group elements act on data as they should: exactly where pixels go to pixels, by the formula elsewhere?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import softequiv as se
from softequiv.actions import Acts, Interpolation, Pictures, Points, Still, Tokens, Vectors
from softequiv.groups import Element, Group

PERMUTING: list[tuple[Group, tuple[int, int]]] = [
    *((group, (n, n)) for group in (se.C(1), se.C(2), se.C(4), se.D(1), se.D(2), se.D(4)) for n in (2, 4, 5)),
    (se.Reflection(), (3, 4)),
    (se.Shifts(3, 4), (3, 4)),
]
THIRTY = se.SO(2).element(se.degrees(30))
INTERPOLATIONS: tuple[Interpolation, ...] = ("bicubic", "bilinear", "nearest")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hill(n: int, middle: tuple[float, float] = (0.25, -0.15), width: float = 0.35) -> Tensor:
    """A smooth hill on [-1, 1]^2, (right, up) of its top given: (n, n)."""
    along = (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1
    right, up = along[None, :], -along[:, None]
    return torch.exp(-((right - middle[0]) ** 2 + (up - middle[1]) ** 2) / width**2)


# pictures, exactly


@pytest.mark.parametrize(("group", "size"), PERMUTING, ids=str)
def test_pixels_go_where_the_grid_representation_sends_them(group: Group, size: tuple[int, int]) -> None:
    x, rep = drawn(2, *size), se.grid(group, *size)
    for g in group.elements():
        expected = (x.flatten(1) @ rep.rho(g).T.round()).reshape(x.shape)
        assert torch.equal(Pictures()(x, g), expected)
        assert Pictures().valid(x, g) is None


@pytest.mark.parametrize(("group", "size"), PERMUTING, ids=str)
def test_composition_and_inverse_are_exact_where_pixels_go_to_pixels(group: Group, size: tuple[int, int]) -> None:
    x, acts = drawn(*size), Pictures()
    for g in group.elements():
        assert torch.equal(acts(acts(x, g), g.inverse), x)
        for h in group.elements():
            assert torch.equal(acts(x, g @ h), acts(acts(x, h), g))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("group", [se.SO(2), se.O(2), se.C(8), se.D(12)], ids=str)
def test_quarter_turns_of_larger_groups_need_no_interpolation(group: Group, interpolation: Interpolation) -> None:
    x = drawn(3, 6, 6)
    quarter = group.element_of(se.C(4).element(1).matrix)
    assert torch.equal(Pictures(interpolation)(x, quarter), x.rot90(1, (-2, -1)))
    if len(group.steps) and not isinstance(group, se.C):
        flip = group.element_of(se.Reflection().element(1).matrix)
        assert torch.equal(Pictures(interpolation)(x, quarter @ flip), x.flip(-1).rot90(1, (-2, -1)))


def test_half_turns_and_flips_take_any_shape_and_any_dtype() -> None:
    labels = torch.arange(12).reshape(3, 4)
    assert torch.equal(Pictures()(labels, se.C(2).element(1)), labels.flip(-1, -2))
    assert torch.equal(Pictures()(labels > 5, se.Reflection().element(1)), (labels > 5).flip(-1))


# pictures, resampled


def test_one_pixel_of_a_turned_picture_is_the_bilinear_formula() -> None:
    x, angle = drawn(7, 9), math.radians(30)
    moved = Pictures("bilinear")(x, THIRTY)
    for row, column in ((3, 4), (2, 6), (5, 3)):
        right, up = column - 4, 3 - row
        back_right = math.cos(angle) * right + math.sin(angle) * up  # R(-angle) p
        back_up = -math.sin(angle) * right + math.cos(angle) * up
        i, j = 3 - back_up, back_right + 4
        top, left = math.floor(i), math.floor(j)
        expected = 0.0
        for a, b in ((0, 0), (0, 1), (1, 0), (1, 1)):
            expected += (1 - abs(i - top - a)) * (1 - abs(j - left - b)) * float(x[top + a, left + b])
        assert float(moved[row, column]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("angle", [-75, -10, 10, 30, 120])
def test_a_smooth_picture_turns_as_its_formula_does(angle: float) -> None:
    turned = (se.SO(2).element(se.degrees(angle)).matrix @ torch.tensor([0.25, -0.15], dtype=torch.float64)).tolist()
    expected = hill(32, (turned[0], turned[1]))
    # bilinear reading errs by h^2 (|f_xx| + |f_yy|) / 8, .016 on top of this hill
    for acts, tolerance in ((Pictures("bicubic"), 0.012), (Pictures("bilinear"), 0.016)):
        moved = acts(hill(32), se.SO(2).element(se.degrees(angle)))
        inside = acts.valid(hill(32), se.SO(2).element(se.degrees(angle)))
        assert float((moved - expected)[inside].abs().max()) < tolerance


def test_turns_go_the_way_of_the_grid_representation() -> None:
    x, g = hill(16), se.SO(2).element(se.degrees(10))
    modelled = (se.grid(se.SO(2), 16, 16).rho(g) @ x.flatten()).reshape(16, 16)
    change = Pictures()(x, g) - x
    assert float((change * (modelled - x)).sum() / (change.norm() * (modelled - x).norm())) > 0.95


def test_mirrored_turns_flip_first() -> None:
    x, g = drawn(6, 6), se.O(2).element(0.4, 1)
    assert torch.allclose(Pictures()(x, g), Pictures()(x.flip(-1), se.SO(2).element(0.4)), atol=1e-12)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(8, 8), (9, 9), (8, 13)])
def test_valid_is_where_a_picture_of_ones_keeps_its_ones(interpolation: Interpolation, size: tuple[int, int]) -> None:
    ones = torch.ones(size, dtype=torch.float64)
    acts = Pictures(interpolation)
    inside = acts.valid(ones, THIRTY)
    assert inside is not None and inside.shape == size
    assert torch.equal(inside, (acts(ones, THIRTY) - 1).abs() < 1e-9)
    assert 0 < int(inside.sum()) < ones.numel()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_valid_pixels_do_not_depend_on_what_lies_outside(interpolation: Interpolation) -> None:
    x = drawn(2, 9, 9)
    acts = [Pictures(interpolation), Pictures(interpolation, "border"), Pictures(interpolation, fill=7.0)]
    inside = acts[0].valid(x, THIRTY)
    zeros, border, seven = (act(x, THIRTY) for act in acts)
    assert torch.allclose(zeros[:, inside], border[:, inside], atol=1e-12)
    assert torch.allclose(zeros[:, inside], seven[:, inside], atol=1e-12)
    assert not torch.allclose(zeros, border) and not torch.allclose(zeros, seven)


def test_labels_are_moved_whole_and_outside_is_filled() -> None:
    labels = torch.randint(0, 21, (2, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    acts = Pictures("nearest", fill=255)
    moved, inside = acts(labels, THIRTY), acts.valid(labels, THIRTY)
    assert inside is not None and moved.dtype == torch.uint8
    assert bool((moved[:, inside] < 21).all()) and bool((moved[:, ~inside] == 255).all())
    large = torch.full((4, 4), 2**40 + 1)
    assert int(Pictures("nearest", "border")(large, THIRTY).min()) == 2**40 + 1


def test_the_inverse_action_brings_a_segmentation_back() -> None:
    def segment(pictures: Tensor) -> Tensor:
        return torch.cat([pictures, -pictures], -3)  # pixel by pixel, hence equivariant

    x, acts = hill(48)[None], Pictures()
    back = acts(segment(acts(x, THIRTY)), THIRTY.inverse)
    inside = acts.valid(x, THIRTY.inverse)
    assert inside is not None
    # the corners were lost on the way out: what came back of them is zero
    disc = hill(48, (0.0, 0.0), 1.0) > math.exp(-0.8)
    assert float((back - segment(x))[:, inside & disc].abs().max()) < 0.01  # resampled twice; values reach 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_low_precision_is_rounded_once(dtype: torch.dtype, interpolation: Interpolation) -> None:
    x = drawn(2, 3, 8, 8, dtype=dtype)
    moved = Pictures(interpolation)(x, THIRTY)
    assert moved.dtype == dtype
    error = (moved.double() - Pictures(interpolation)(x.double(), THIRTY)).abs().max()
    assert float(error) <= torch.finfo(dtype).eps / 2 * float(moved.abs().max()) + 1e-5


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0, 3)])
def test_every_picture_of_a_batch_moves_alike(lead: tuple[int, ...]) -> None:
    x = drawn(*lead, 5, 7)
    moved = Pictures()(x, THIRTY)
    assert moved.shape == x.shape
    for one, whole in zip(x.reshape(-1, 5, 7), moved.reshape(-1, 5, 7), strict=True):
        assert torch.allclose(Pictures()(one, THIRTY), whole)


def test_gradients_pass_through() -> None:
    x = drawn(1, 1, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: Pictures("bilinear")(y, THIRTY), (x,))


# tokens


@pytest.mark.parametrize("g", [se.C(4).element(1), THIRTY, se.D(4).element(1, 1)], ids=str)
def test_tokens_move_as_the_picture_of_patches(g: Element) -> None:
    x, acts = drawn(2, 3 + 36, 5), Tokens(6, 6, extra=3)
    moved = acts(x, g)
    assert torch.equal(moved[:, :3], x[:, :3])
    picture = x[:, 3:].reshape(2, 6, 6, 5).permute(0, 3, 1, 2)
    assert torch.equal(moved[:, 3:].reshape(2, 6, 6, 5).permute(0, 3, 1, 2), Pictures()(picture, g))
    inside, expected = acts.valid(x, g), Pictures().valid(picture, g)
    if expected is None:
        assert inside is None
    else:
        assert inside is not None and inside.shape == (39, 1)
        assert bool(inside[:3].all()) and torch.equal(inside[3:, 0].reshape(6, 6), expected)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
def test_what_fills_the_outside_costs_the_inside_no_digits(interpolation: str) -> None:
    x = drawn(1, 1, 9, 9, dtype=torch.float32)
    plain, filled = (Pictures(interpolation, fill=fill)(x, THIRTY) for fill in (0.0, -1e30))
    inside = Pictures(interpolation).valid(x, THIRTY)
    assert inside is not None
    assert torch.equal(plain[..., inside], filled[..., inside])
    assert float(filled[0, 0, 0, 0]) == pytest.approx(-1e30, rel=0.2)  # a corner reads little else
    small = Pictures(interpolation, fill=0.5)(x.double(), THIRTY)
    assert torch.allclose(small, Pictures(interpolation)(x.double() - 0.5, THIRTY) + 0.5, atol=1e-12)


def test_tokens_of_a_wide_picture_roll() -> None:
    x, g = drawn(1, 1 + 6, 2), se.Shifts(2, 3).element(0, 1)
    assert torch.equal(Tokens(2, 3, extra=1)(x, g)[:, 1:].reshape(2, 3, 2), x[0, 1:].reshape(2, 3, 2).roll(1, 1))


# vectors, points, and what stands still


@pytest.mark.parametrize("rep", [se.vector(se.SO(3)), se.grid(se.SO(2), 4, 4), 2 * se.vector(se.S(3))], ids=str)
def test_vectors_move_by_their_representation(rep: se.Rep) -> None:
    g = rep.group.random(torch.Generator().manual_seed(0))
    x = drawn(2, 3, *rep.shape)
    expected = torch.stack([rep.rho(g) @ v.flatten() for v in x.reshape(6, -1)]).reshape(x.shape)
    assert torch.allclose(Vectors(rep)(x, g), expected, atol=1e-12)
    assert Vectors(rep).valid(x, g) is None


@pytest.mark.parametrize("group", [se.SO(2), se.O(3), se.C(5), se.Reflection()], ids=str)
@pytest.mark.parametrize("centre", ["origin", "mean", "given"])
def test_points_keep_their_distances_and_their_centre(group: Group, centre: str) -> None:
    dim = group.lie.shape[-1]
    x = drawn(2, 10, dim) + 3
    acts = Points((1.0, -2.0, 0.5)[:dim]) if centre == "given" else Points("mean" if centre == "mean" else "origin")
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        g, h = group.random(generator), group.random(generator)
        moved = acts(x, g)
        assert torch.allclose(torch.cdist(moved, moved), torch.cdist(x, x), atol=1e-6)
        assert torch.allclose(acts(moved, g.inverse), x, atol=1e-12)
        assert torch.allclose(acts(x, g @ h), acts(acts(x, h), g), atol=1e-12)
        if centre == "mean":
            assert torch.allclose(moved.mean(-2), x.mean(-2), atol=1e-12)
    if centre == "given":
        middle = torch.tensor([acts.centre], dtype=torch.float64)
        assert torch.allclose(acts(middle, g), middle, atol=1e-12)


def test_points_turn_counter_clockwise() -> None:
    quarter = se.SO(2).element(se.degrees(90))
    assert torch.allclose(Points()(torch.tensor([[1.0, 0.0]]), quarter), torch.tensor([[0.0, 1.0]]), atol=1e-7)


def test_autocast_does_not_coarsen_an_action() -> None:
    x, points = drawn(1, 1, 6, 6, dtype=torch.float32), drawn(10, 2, dtype=torch.float32)
    plain = Pictures()(x, THIRTY), Points("mean")(points, THIRTY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Pictures()(x, THIRTY), plain[0]) and torch.equal(Points("mean")(points, THIRTY), plain[1])


def test_what_stands_still_stands_still() -> None:
    x = drawn(4, 10)
    assert torch.equal(Still()(x, THIRTY), x) and Still().valid(x, THIRTY) is None


# actions are values, and refuse in sentences


def test_actions_are_values() -> None:
    assert Pictures() == Pictures("bicubic") and len({Tokens(2, 2), Tokens(2, 2), Points(), Still()}) == 3


@pytest.mark.parametrize(
    ("acts", "x", "g", "sentence"),
    [
        (Pictures(), torch.zeros(4, 4), se.SO(3).element(1, 0, 0), "does not act on pictures"),
        (Pictures(), torch.zeros(4, 4), (se.C(4) * se.Reflection()).element(1, 0), "does not act on pictures"),
        (Pictures(), torch.zeros(4, 4), se.Scaling().element(1.0), "does not act on pictures"),
        (Pictures(), torch.zeros(4, 4), se.Shifts(4, 5).element(1, 0), r"use Shifts\(4, 4\)"),
        (Pictures(), torch.zeros(4, 5), se.C(4).element(2), "pad or crop it to a square"),
        (Pictures(), torch.zeros(4, 5), se.SO(2).element(math.pi / 2), "4 x 5 pixels has another shape"),
        (Pictures(), torch.zeros(1, 4), THIRTY, "at least 2 x 2"),
        (Pictures(), torch.zeros(4), THIRTY, "at least 2 x 2"),
        (Pictures(), torch.zeros(4, 4, dtype=torch.long), THIRTY, "floating-point picture; got torch.int64"),
        (Pictures("bilinear"), torch.zeros(4, 4, dtype=torch.uint8), THIRTY, "interpolation='nearest'"),
        (Pictures("nearest", fill=300), torch.zeros(4, 4, dtype=torch.uint8), THIRTY, "cannot hold fill=300"),
        (Tokens(2, 2, 1), torch.zeros(1, 4, 3), THIRTY, r"\(..., 5, D\); got a tensor of \(1, 4, 3\)"),
        (Tokens(2, 3), torch.zeros(1, 6, 3), se.C(4).element(1), "pad or crop"),
        (Vectors(se.vector(se.SO(2))), torch.zeros(2), se.C(4).element(1), "C4 does not act on it"),
        (Vectors(se.vector(se.SO(2))), torch.zeros(3), THIRTY, "trailing shape"),
        (Vectors(se.vector(se.SO(2))), torch.zeros(2, dtype=torch.int), THIRTY, "must be floating point"),
        (Points(), torch.zeros(10, 3), THIRTY, "points of 2 coordinates"),
        (Points(), torch.zeros(2), THIRTY, "points of 2 coordinates"),
        (Points(), torch.zeros(10, 2), se.Shifts(5).element(1), "places of a grid"),
        (Points((1.0, 2.0, 3.0)), torch.zeros(10, 2), THIRTY, "a centre of as many"),
        (Points(), torch.zeros(10, 2, dtype=torch.int), THIRTY, "must be floating point"),
    ],
)
def test_what_a_group_cannot_move_is_refused(acts: Acts, x: Tensor, g: Element, sentence: str) -> None:
    with pytest.raises(se.SoftEquivError, match=sentence):
        acts(x, g)


def test_check_refuses_before_any_element_is_drawn() -> None:
    for group in (se.C(4), se.C(36), se.D(8), se.SO(3), se.Shifts(5, 4)):
        with pytest.raises(se.SoftEquivError):
            Pictures().check(group, torch.zeros(4, 5))
    for group in (se.SO(2), se.C(18), se.D(6), se.Reflection(), se.C(2), se.Shifts(4, 5)):
        Pictures().check(group, torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Pictures("cubic"), "bicubic, bilinear, nearest"),
        (lambda: Pictures(padding="mirror"), "zeros, border, reflection"),
        (lambda: Pictures(padding="border", fill=1.0), "leaves nothing to fill"),
        (lambda: Pictures(fill=math.inf), "finite"),
        (lambda: Pictures(fill="a"), "finite"),
        (lambda: Points("middle"), "'origin', 'mean'"),
        (lambda: Points(1.0), "unknown centre 1.0"),
        (lambda: Points((math.nan, 0.0)), r"unknown centre \(nan, 0.0\).*finite coordinates"),
        (lambda: Points((0.0, math.inf)), "finite coordinates"),
        (lambda: Tokens(-2, -2), "at least 2 x 2 patches"),
        (lambda: Tokens(1, 1), "at least 2 x 2 patches.*got 1 x 1 behind 0"),
        (lambda: Tokens("a", 2), "in whole numbers; got 'a' x 2"),
        (lambda: Tokens(2, 2.0), "in whole numbers; got 2 x 2.0"),
        (lambda: Tokens(2, 2, extra=None), "in whole numbers; got 2 x 2 behind None"),
        (lambda: Tokens(2, 2, extra=-1), "0 or more extra"),
    ],
)
def test_unknown_options_are_refused(make: Callable[[], Acts], sentence: str) -> None:
    with pytest.raises(se.SoftEquivError, match=sentence):
        make()
