"""Does the public test helper pass what is equivariant, catch what is not, and say where?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import softequiv as se
from softequiv.actions import Acts, Pictures, Points, Still
from softequiv.nn import SoftLinear
from softequiv.testing import TOLERANCE, assert_equivariant, equivariance_error

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CASES = [
    (se.SO(2), 4 * se.vector(se.SO(2)), 3 * se.vector(se.SO(2)) + 2 * se.scalar(se.SO(2))),
    (se.SO(3), 4 * se.vector(se.SO(3)), 3 * se.vector(se.SO(3))),
    (se.D(6), se.regular(se.D(6)), 2 * se.vector(se.D(6))),
    (se.SO(2), se.grid(se.SO(2), 5, 5), 2 * se.vector(se.SO(2))),
]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Flattened(nn.Module):
    """A linear layer on pictures."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "source", "target"), CASES, ids=str)
def test_equivariant_layers_pass_and_plain_ones_fail(
    group: se.Group, source: se.Rep, target: se.Rep, dtype: torch.dtype
) -> None:
    soft = Flattened(seeded(lambda: SoftLinear(source, target))).to(dtype)
    assert_equivariant(soft, group, source, target)
    plain = Flattened(seeded(lambda: nn.Linear(source.dim, target.dim))).to(dtype)
    with pytest.raises(AssertionError, match=f"Flattened is not equivariant under .* in {str(dtype)[6:]}"):
        assert_equivariant(plain, group, source, target)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tolerances_lie_between_rounding_and_small_breaks(dtype: torch.dtype) -> None:
    """A defect of ten times the tolerance is caught."""
    X = 4 * se.vector(se.SO(2))
    soft, stray = (seeded(make).to(dtype) for make in (lambda: SoftLinear(X, X), lambda: nn.Linear(X.dim, X.dim)))

    def almost(x: Tensor) -> Tensor:
        return soft(x) + 10 * TOLERANCE[dtype] * stray(x)

    with torch.no_grad():
        assert_equivariant(soft, se.SO(2), X, X, dtype=dtype)
        with pytest.raises(AssertionError):
            assert_equivariant(almost, se.SO(2), X, X, dtype=dtype)


def test_the_error_is_its_formula() -> None:
    group, X = se.SO(2), se.vector(se.SO(2))
    matrix = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = equivariance_error(
        lambda v: v @ matrix.T, group, X, X, inputs=x, elements=4, generator=torch.Generator().manual_seed(7)
    )
    drawn, worst = torch.Generator().manual_seed(7), 0.0
    for _ in range(4):
        rho = group.random(drawn).matrix
        for v in x:
            worst = max(worst, float((matrix @ rho @ v - rho @ matrix @ v).norm() / (matrix @ v).norm()))
    assert found == pytest.approx(worst, rel=1e-12)


def test_a_small_finite_group_is_tried_whole_and_the_worst_element_is_named() -> None:
    """Broken at one element alone: a quarter turn and a half turn are fine, the flip is not."""
    X = se.vector(se.D(4))
    perpendicular = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    assert_equivariant(lambda x: x @ perpendicular.T, se.C(4), se.vector(se.C(4)), se.vector(se.C(4)))
    with pytest.raises(AssertionError, match=r"<lambda> is not equivariant under D4: at the element .*s1,.* is 2, "):
        assert_equivariant(lambda x: x @ perpendicular.T, se.D(4), X, X)


def test_a_range_restricts_the_elements() -> None:
    X = se.vector(se.SO(2))
    matrix = torch.diag(torch.tensor([1.0, 0.9], dtype=torch.float64))
    near, far = (
        equivariance_error(lambda x: x @ matrix, se.SO(2), X, X, within=se.degrees(angle)) for angle in (1, 90)
    )
    assert 0 < near <= 0.1 * 2 * torch.pi / 180 < far
    finite = se.vector(se.C(8))
    assert equivariance_error(lambda x: x @ matrix, se.C(8), finite, finite, within=1) < equivariance_error(
        lambda x: x @ matrix, se.C(8), finite, finite
    )


def test_pictures_are_given_and_compared_on_valid_pixels() -> None:
    x = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    pixelwise = nn.Conv2d(3, 2, 1, bias=False)
    assert_equivariant(pixelwise, se.SO(2), Pictures(), Pictures(), inputs=x, tolerance=1e-5)
    assert_equivariant(nn.AvgPool2d(2), se.D(4), Pictures(), Pictures(), inputs=x)
    assert_equivariant(lambda p: p.mean((-1, -2)), se.D(4), Pictures(), Still(), inputs=x)
    with_border = nn.Conv2d(3, 2, 1, bias=True)  # its bias fills what the turned answer leaves empty
    nn.init.ones_(with_border.bias)
    assert_equivariant(with_border, se.SO(2), Pictures(), Pictures(), inputs=x, tolerance=1e-5)
    with pytest.raises(AssertionError, match="Conv2d"):
        assert_equivariant(nn.Conv2d(3, 2, 3, padding=1), se.C(4), Pictures(), Pictures(), inputs=x)


def test_points_and_whole_numbers() -> None:
    x = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_equivariant(lambda p: 2 * p.mean(-2, keepdim=True), se.O(2), Points(), Points(), inputs=x)
    labels = torch.randint(9, (2, 4, 4), generator=torch.Generator().manual_seed(0))
    assert_equivariant(lambda k: (k == 3).double(), se.C(4), Pictures("nearest"), Pictures(), inputs=labels)


def test_modules_run_in_eval_mode_and_get_theirs_back() -> None:
    X = se.vector(se.SO(2))
    model = nn.Sequential(SoftLinear(X, X), nn.Dropout(0.5)).train()
    model[1].eval()
    model[0].train()
    assert_equivariant(model, se.SO(2), X, X)
    assert [part.training for part in (model, model[0], model[1])] == [True, True, False]

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training and not torch.is_grad_enabled()
            raise RuntimeError("inside")

    failing = Failing().train()
    with pytest.raises(RuntimeError, match="inside"):
        equivariance_error(failing, se.SO(2), X, X)
    assert failing.training


def test_the_same_draws_at_every_call_and_no_trace_in_the_global_generator() -> None:
    X = se.vector(se.SO(3))
    layer = seeded(lambda: nn.Linear(3, 3))
    state = torch.random.get_rng_state()
    assert equivariance_error(layer, se.SO(3), X, X) == equivariance_error(layer, se.SO(3), X, X)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_function_that_is_zero_is_equivariant_and_one_that_vanishes_at_x_alone_is_not() -> None:
    X = se.vector(se.C(4))
    assert equivariance_error(lambda x: 0 * x, se.C(4), X, X) == 0
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert equivariance_error(lambda v: v * (v[..., :1] < 0.5), se.C(4), X, X, inputs=x) == float("inf")


def test_functions_that_write_into_their_input_get_a_copy() -> None:
    X = se.vector(se.SO(2))
    matrix = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64))
    x = torch.ones(1, 2, dtype=torch.float64)
    in_place = equivariance_error(lambda v: v.copy_(v @ matrix), se.SO(2), X, X, inputs=x)
    assert in_place == equivariance_error(lambda v: v @ matrix, se.SO(2), X, X, inputs=x) > 0.5
    assert torch.equal(x, torch.ones(1, 2, dtype=torch.float64))
    kept = torch.empty(1, 2, dtype=torch.float64)

    def into_one_place(v: Tensor) -> Tensor:
        return kept.copy_(v @ matrix)

    assert equivariance_error(into_one_place, se.SO(2), X, X, inputs=x) == in_place


def test_the_identity_is_no_test() -> None:
    """Whatever is drawn, it moves something."""
    x = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        with pytest.raises(AssertionError):
            assert_equivariant(
                lambda p: p.cumsum(-1), "Reflection", Pictures(), Pictures(), inputs=x, elements=1, generator=generator
            )
    with pytest.raises(se.SoftEquivError, match="C1 moves nothing"):
        assert_equivariant(lambda p: p, se.C(1), Pictures(), Pictures(), inputs=x)


def test_maps_are_compared_to_what_stays_inside_the_frame() -> None:
    x, g = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64), se.C(8).element(1)
    found = equivariance_error(lambda p: p.roll(3, -1), "C8", Pictures(), Pictures(), inputs=x, within=1)
    errors = []
    for move in (g, g.inverse):
        inside = Pictures().valid(x, move)
        expected = Pictures()(x.roll(3, -1), move)
        errors.append(((Pictures()(x, move).roll(3, -1) - expected) * inside).norm() / (expected * inside).norm())
    assert found == pytest.approx(float(max(errors)))
    with pytest.raises(se.SoftEquivError, match="stays inside the frame"):
        equivariance_error(lambda p: p, "SO(2)", Pictures(), Pictures(), inputs=x[..., :2, :2])


def test_groups_and_ranges_by_name() -> None:
    X = se.vector(se.SO(2))
    assert_equivariant(nn.Identity(), "SO(2)", X, X, within="30deg")


X2 = se.vector(se.SO(2))


@pytest.mark.parametrize(
    ("fn", "rep_in", "rep_out", "keywords", "sentence"),
    [
        (lambda x: x, Pictures(), X2, {}, "give samples as inputs="),
        (lambda x: (x,), X2, X2, {}, "got tuple: wrap it"),
        (lambda x: x / 0, X2, X2, {}, "answers hold NaN or infinity"),
        (lambda x: x, X2, X2, {"inputs": torch.full((1, 2), torch.nan)}, "inputs hold NaN or infinity"),
        (lambda x: 1j * x, X2, X2, {}, "real numbers; got torch.complex128"),
        (lambda x: x.sum(), X2, Still(), {}, "the first axis must be the samples'"),
        (lambda x: x, X2, "still", {}, "by an action such as Pictures"),
        (lambda x: x, X2, X2, {"elements": 2.5}, "elements is a whole number of at least 1"),
        (lambda x: x, Pictures(), Pictures(), {"inputs": torch.ones(4, 4)}, "got \\(4,\\)"),
        (lambda x: x, X2, X2, {"samples": 0}, "samples is a whole number of at least 1"),
        (lambda x: x, X2, X2, {"elements": 0}, "elements is a whole number of at least 1"),
        (lambda x: x, X2, X2, {"dtype": torch.int32}, "got torch.int32"),
        (lambda x: x, X2, X2, {"inputs": torch.zeros(0, 2)}, "nothing to test on"),
        (lambda x: x, se.vector(se.C(4)), X2, {}, "SO\\(2\\) does not act on it"),
        (lambda x: x, X2, se.vector(se.C(4)), {}, "SO\\(2\\) does not act on it"),
        (lambda x: x[:, :1], X2, X2, {}, "trailing shape"),
    ],
)
def test_what_cannot_be_tested_is_said(
    fn: Callable[[Tensor], Tensor], rep_in: se.Rep | Acts, rep_out: se.Rep | Acts, keywords: dict, sentence: str
) -> None:
    with pytest.raises(se.SoftEquivError, match=sentence):
        equivariance_error(fn, se.SO(2), rep_in, rep_out, **keywords)
