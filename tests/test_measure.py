"""Are measured errors what their formulas say? Slow references, exact cases, estimators, and bad input."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import softequiv as se
from softequiv.actions import Pictures, Points, Still, Vectors
from softequiv.errors import SoftEquivError
from softequiv.measure import jacobian, jacobian_norm, jacobian_square, measure
from softequiv.measure.bootstrap import combined, exact_interval, interval
from softequiv.measure.functional import mean_iou
from softequiv.measure.lie import lie_derivative
from softequiv.measure.measurement import overlaps
from zoo import CASES

CLASSES = 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, CLASSES, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, CLASSES, 1)).double()


def kl(p: Tensor, q: Tensor) -> float:
    """KL of two vectors of scores, one term at a time."""
    a, b = p.softmax(0).tolist(), q.softmax(0).tolist()
    return sum(s * math.log(s / t) for s, t in zip(a, b, strict=True))


class Affine(nn.Module):
    """y = A x, with a known Jacobian."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(drawn(outputs, inputs, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


# --- figures against slow references ---------------------------------------------------------------------------------


def test_class_scores_against_loops() -> None:
    model, x, labels = classifier(), drawn(6, 2, 9, 9), torch.tensor([0, 1, 2, 0, 1, 2])
    moves = [se.SO(2).element(0.4), se.SO(2).element(-0.3)]
    found = measure(model, (x, labels), "SO(2)", elements=moves)
    right = moved_right = divergence = change = 0.0
    with torch.no_grad():
        for n in range(6):
            y = model(x[n : n + 1])[0]
            right += float(y.argmax() == labels[n]) / 6
            for g in moves:
                z = model(Pictures()(x[n : n + 1], g))[0]
                moved_right += float(z.argmax() == labels[n]) / 12
                divergence += kl(y, z) / 12
                change += float((z - y).norm() / y.norm()) / 12
    assert found["accuracy"].value == pytest.approx(right)
    assert found["accuracy moved"].value == pytest.approx(moved_right)
    assert found["accuracy combined"].value == pytest.approx(math.sqrt(right * moved_right))
    assert found["iErr"].value == pytest.approx(divergence)
    assert found["relative change"].value == pytest.approx(change)
    assert found["iErr"].n == 6 and found.elements == 2


def test_scores_per_pixel_against_loops() -> None:
    model, x = segmenter(), drawn(3, 2, 9, 9)
    labels = torch.randint(CLASSES, (3, 9, 9), generator=torch.Generator().manual_seed(1))
    labels[0, 2] = 255
    g = se.SO(2).element(0.4)
    inside = Pictures().valid(x, g)
    assert inside is not None and 0 < inside.sum() < inside.numel()
    found = measure(model, (x, labels), "SO(2)", elements=[g])
    with torch.no_grad():
        y, moved = model(x), model(Pictures()(x, g))
    expected, turned = Pictures()(y, g), Pictures("nearest", fill=255)(labels, g)
    terms = [
        kl(moved[n, :, i, j], expected[n, :, i, j])
        for n in range(3)
        for i in range(9)
        for j in range(9)
        if inside[i, j]
    ]
    assert found["eErr"].value == pytest.approx(sum(terms) / len(terms))

    def iou(scores: Tensor, truth: Tensor) -> float:
        values = []
        for k in range(CLASSES):
            said, true, counted = scores.argmax(1) == k, truth == k, truth != 255
            union = int(((said | true) & counted).sum())
            if union:
                values.append(int((said & true & counted).sum()) / union)
        return sum(values) / len(values)

    upright, after = iou(y, labels), iou(moved, turned)
    assert found["mIoU"].value == pytest.approx(upright)
    assert found["aIoU"].value == pytest.approx(after)
    assert found["cIoU"].value == pytest.approx(math.sqrt(upright * after))
    change = ((moved - expected) * inside).flatten(1).norm(dim=1) / (expected * inside).flatten(1).norm(dim=1)
    assert found["relative change"].value == pytest.approx(float(change.mean()))


def test_small_maps_of_scores_are_compared_at_the_size_of_the_picture() -> None:
    coarse = nn.Sequential(nn.AvgPool2d(3), nn.Conv2d(2, CLASSES, 1)).double()
    found = measure(coarse, (drawn(2, 2, 9, 9), torch.zeros(2, 9, 9, dtype=torch.long)), "C4")
    assert found["eErr"].value < 1e-12  # a 1 x 1 kernel on averages turns with the picture, and so does the resizing
    assert found["mIoU"].n == 2


def test_a_class_that_nobody_names_has_no_iou() -> None:
    class Zero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:, :1].abs() + 1, -x[:, :1].abs()], 1).repeat(1, 2, 1, 1)[:, :3]

    labels = torch.zeros(2, 6, 6, dtype=torch.long)
    labels[0, 0, 0] = 1
    found = measure(Zero(), (drawn(2, 2, 6, 6), labels), "C4")
    assert found["mIoU"].value == pytest.approx((71 / 72 + 0) / 2)  # two of three classes occur


def test_the_papers_relative_error() -> None:
    """A linear map: the Jacobian is its matrix."""
    model, x, rep = Affine(4, 6), drawn(5, 6), 3 * se.vector(se.SO(2))
    g = se.SO(2).element(0.7)
    found = measure(model, x, "SO(2)", acts=Vectors(rep), target=Still(), elements=[g], jacobians=5)
    moved = x @ rep.rho(g).T
    matrix = model.matrix.detach()
    expected = ((moved - x) @ matrix.T).norm(dim=1) / (matrix.norm() * x.norm(dim=1))
    assert found["relative error"].value == pytest.approx(float(expected.mean()))
    assert "exact" in found.notes[0]


def test_the_relative_error_of_a_map_is_taken_inside_the_frame() -> None:
    """Of a shift, whose Jacobian has a single one in every row: as many as there are entries inside."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(3, -1)

    x, moves = drawn(3, 2, 9, 9), [se.SO(2).element(angle) for angle in (0.5, 0.8)]
    found = measure(Shift(), x, "SO(2)", elements=moves, probes=2)
    changes, entries = [], []
    for g in moves:
        inside, back = Pictures().valid(x, g), Pictures().valid(x, g.inverse)
        change = Pictures()(x, g).roll(3, -1) - Pictures()(x.roll(3, -1), g)
        changes.append((change * inside).flatten(1).norm(dim=1))
        entries.append(2 * int(back.sum()))
    jacobian = math.sqrt(sum(entries) / 2)
    expected = (changes[0] + changes[1]) / 2 / (jacobian * x.flatten(1).norm(dim=1))
    assert found["relative error"].value == pytest.approx(float(expected.mean()))
    assert jacobian < 0.9 * math.sqrt(2 * 81)


def test_an_equivariant_model_has_no_error() -> None:
    model = se.soften(CASES["resnet"].model(), "C4", softness=0.0)
    found = measure(model, CASES["resnet"].input(33), "C4", elements=list(se.C(4).elements()))
    assert found["relative change"].value < 1e-5
    assert found["iErr"].value < 1e-8
    free = measure(CASES["resnet"].model(), CASES["resnet"].input(33), "C4", elements=list(se.C(4).elements()))
    assert free["relative change"].value > 1e-2


class InPlace(nn.Module):
    """Normalises its input in place, as careless models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.sub_(0.5).div_(0.2))


class OutOfPlace(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - 0.5) / 0.2)


def test_a_model_that_writes_into_its_input_gets_a_copy() -> None:
    x = drawn(4, 2, 9, 9)
    kept = x.clone()
    found, expected = (measure(model, x, "SO(2)", se.degrees(30)) for model in (InPlace(), OutOfPlace()))
    assert torch.equal(x, kept)
    assert [row.value for row in found.rows] == pytest.approx([row.value for row in expected.rows])


def test_answers_of_one_number_a_sample() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)[:, 0]

    model, x, g = First(), drawn(4, 2, 9, 9), se.C(4).element(1)
    found = measure(model, x, "C4", target=Still(), elements=[g])
    with torch.no_grad():
        y, moved = model(x), model(Pictures()(x, g))
    assert found["relative change"].value == pytest.approx(float(((moved - y) / y).abs().mean()))


def test_every_sample_has_its_own_elements() -> None:
    """The figures are those of the drawn elements, sample by sample, and cost as many answers as given ones."""
    calls: list[int] = []

    class Counting(OutOfPlace):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    model, x = Counting(), drawn(5, 2, 9, 9)
    found = measure(model, x, "SO(2)", se.degrees(30), elements=2, jacobians=0, seed=4)
    assert sum(calls) == 5 + 2 * 5 + 5  # as it is, moved twice, and the Lie derivative
    generator = torch.Generator().manual_seed(4)
    changes = []
    with torch.no_grad():
        y = model(x)
        for _ in range(2):
            for n in range(5):
                g = se.SO(2).random(generator, se.degrees(30))
                changes.append(float((model(Pictures()(x[n : n + 1], g))[0] - y[n]).norm() / y[n].norm()))
    assert found["relative change"].value == pytest.approx(sum(changes) / 10)
    assert found.elements == 2 and not found.given


def test_all_samples_of_a_round_are_moved_and_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    each = Pictures.each

    def counted(self: Pictures, x: Tensor, group: se.Group, stack: Tensor) -> Tensor:
        sizes.append(len(x))
        return each(self, x, group, stack)

    monkeypatch.setattr(Pictures, "each", counted)
    monkeypatch.setattr(Pictures, "__call__", None)
    data = (drawn(12, 2, 9, 9), torch.zeros(12, 9, 9, dtype=torch.long))
    measure(segmenter(), data, "D4", elements=3, jacobians=0)
    assert sizes == 3 * 3 * [12]  # pictures, answers and labels


def test_samples_of_a_batch_are_compared_each_inside_its_own_frame() -> None:
    """Quarter turns, which keep all pixels inside, beside others, which do not."""
    model, x = segmenter(), drawn(6, 2, 9, 9)
    together = measure(model, x, "C8", elements=2, seed=2)
    generator, changes, terms = torch.Generator().manual_seed(2), [], []
    for n in [*range(6), *range(6)]:
        g, picture = se.C(8).random(generator), x[n : n + 1]
        with torch.no_grad():
            moved, expected = model(Pictures()(picture, g)), Pictures()(model(picture), g)
        inside = Pictures().valid(picture, g)
        inside = torch.ones(9, 9, dtype=torch.bool) if inside is None else inside
        changes.append(float(((moved - expected) * inside).norm() / (expected * inside).norm()))
        divergences = [kl(a, b) for a, b in zip(moved[0, :, inside].T, expected[0, :, inside].T, strict=True)]
        terms.append((sum(divergences), int(inside.sum())))
    assert together["relative change"].value == pytest.approx(sum(changes) / 12)
    assert together["eErr"].value == pytest.approx(sum(a for a, _ in terms) / sum(b for _, b in terms))


def test_intervals_speak_of_elements_and_samples() -> None:
    """||F(gx) - F(x)|| depends on the element alone here: without own elements there would be no spread at all."""

    class Angle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0]

    x = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64).repeat(60, 1, 1)
    inside, widest = 0, math.radians(30)
    truth = 4 * (1 - math.cos(widest / 2)) / widest  # the mean of |2 sin(t / 2)| over angles t in the range
    for seed in range(40):
        row = measure(
            Angle(), x, "SO(2)", se.degrees(30), acts=Points(), target=Still(), elements=1, jacobians=0, seed=seed
        )["relative change"]
        inside += row.low <= truth <= row.high
    assert inside >= 34


def test_elements_of_a_range_of_a_finite_group_are_drawn_from_it() -> None:
    from softequiv.measure.elements import drawn as drawn_elements

    draws = drawn_elements(se.C(12), se.degrees(60), 200, torch.Generator().manual_seed(0))
    assert {round(g.length) for g in draws} == {0, 1, 2} and len({str(g) for g in draws}) == 5


def test_one_sample_has_no_interval() -> None:
    found = measure(classifier(), drawn(1, 2, 9, 9), "C4")
    assert all(row.interval == "" for row in found.rows) and ".." not in str(found)
    assert ".." in str(measure(classifier(), drawn(2, 2, 9, 9), "C4"))


def test_given_elements_are_called_given() -> None:
    found = measure(classifier(), drawn(2, 2, 9, 9), "SO(2)", "30deg", elements=[se.SO(2).element(0.2)])
    assert str(found).startswith("SO(2), within 30deg: 2 samples, 1 elements given, seed 0")


def test_data_made_or_measured_in_inference_mode() -> None:
    model, x = classifier(), drawn(3, 2, 9, 9)
    expected = measure(model, x, "SO(2)", se.degrees(30))
    with torch.inference_mode():
        made = x.clone()
        inside = measure(model, x, "SO(2)", se.degrees(30))
    assert len(expected.rows) == 4 and expected == inside == measure(model, made, "SO(2)", se.degrees(30))


# --- the Lie derivative ----------------------------------------------------------------------------------------------


def test_lie_derivative_is_the_generators_commutator() -> None:
    """F(x) = A x with vectors in and out: L F(x) = (A R - R A) x."""
    model, x, rep = Affine(4, 4), drawn(3, 4), 2 * se.vector(se.SO(2))
    found = lie_derivative(model, x, se.SO(2), Vectors(rep), Vectors(rep))
    commutator = model.matrix @ rep.lie()[0] - rep.lie()[0] @ model.matrix
    assert torch.allclose(found, (x @ commutator.T).norm(dim=1), rtol=1e-6)


def test_lie_derivative_is_the_slope_of_the_pulled_back_answer() -> None:
    """Against a finite difference of g_t^-1 F(g_t x) through the whole model."""
    model, x = classifier(), drawn(4, 2, 9, 9)
    t = 1e-4
    with torch.no_grad():
        ahead, behind = (model(Pictures()(x, se.SO(2).element(s))) for s in (t, -t))
    slope = ((ahead - behind) / (2 * t)).norm(dim=1)
    found = lie_derivative(model, x, se.SO(2), Pictures(), Still())
    assert torch.allclose(found, slope, rtol=1e-2)


def test_lie_derivative_vanishes_for_an_equivariant_map_of_points() -> None:
    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(-2, keepdim=True) * x.norm(dim=(-2, -1))[:, None, None]

    found = measure(Middle(), drawn(4, 5, 3), "SO(3)", acts=Points(), target=Points())
    assert found["Lie derivative"].value < 1e-8
    assert found["relative change"].value < 1e-12


def test_a_group_without_lie_generators_has_no_lie_derivative() -> None:
    assert "Lie derivative" not in [row.name for row in measure(classifier(), drawn(2, 2, 9, 9), "D4").rows]


@pytest.mark.parametrize("options", [{"acts": Pictures("nearest")}, {"target": Pictures("nearest")}])
def test_nearest_interpolation_has_no_lie_derivative(options: dict[str, Any]) -> None:
    found = measure(segmenter(), drawn(2, 2, 9, 9), "SO(2)", se.degrees(30), **options)
    assert "Lie derivative" not in [row.name for row in found.rows]
    assert any("nearest interpolation" in note for note in found.notes)


def test_the_lie_derivative_of_a_map_is_relative_to_what_stays_inside() -> None:
    """A map that shifts by a column: only border pixels are left out of numerator and denominator alike."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.roll(1, -1)

    x = drawn(2, 2, 9, 9)
    found = measure(Shift(), x, "SO(2)", se.degrees(30), jacobians=0)
    g = se.SO(2).element(1e-5)
    inside = Pictures().valid(x, g) & Pictures().valid(x, g.inverse)
    defect = lie_derivative(Shift(), x, se.SO(2), Pictures(), Pictures())
    expected = defect / (x.roll(1, -1) * inside).flatten(1).norm(dim=1)
    assert found["Lie derivative"].value == pytest.approx(float(expected.mean()))


def test_a_model_in_inference_mode_has_no_derivatives() -> None:
    class Frozen(OutOfPlace):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    found = measure(Frozen(), drawn(2, 2, 9, 9), "SO(2)", se.degrees(30))
    assert {row.name for row in found.rows} == {"iErr", "relative change"}
    assert any(note.startswith("relative error: not measured") for note in found.notes)
    assert any(note.startswith("Lie derivative: not measured") for note in found.notes)


def test_a_model_without_forward_derivative_says_so() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(x).mean((-2, -1))

    found = measure(Odd(), drawn(2, 3, 9, 9), "SO(2)")
    assert "Lie derivative" not in [row.name for row in found.rows]
    assert any("no forward derivative" in note for note in found.notes)


# --- Jacobians -------------------------------------------------------------------------------------------------------


def test_exact_jacobian_norm() -> None:
    model, x = classifier(), drawn(3, 2, 9, 9)
    found = jacobian_norm(model, x)
    for n in range(3):
        full = torch.autograd.functional.jacobian(lambda one: model(one[None])[0], x[n])
        assert float(found[n]) == pytest.approx(float(full.norm()))


def test_probes_are_unbiased_with_the_stated_variance() -> None:
    """4,000 single-probe estimates: mean within 4 standard errors, variance within 15% of the formula."""
    model, runs = Affine(7, 5), 4000
    matrix = model.matrix.detach()
    square = matrix @ matrix.T
    variance = 2 * (square.norm() ** 2 - square.diagonal().square().sum())
    generator = torch.Generator().manual_seed(0)
    found = jacobian_square(model, torch.zeros(runs, 5, dtype=torch.float64), probes=1, generator=generator)
    error = float(found.mean() - matrix.norm() ** 2)
    assert abs(error) < 4 * float((variance / runs).sqrt())
    assert float(found.var()) == pytest.approx(float(variance), rel=0.15)


def test_the_variance_falls_with_the_number_of_probes() -> None:
    model, generator = Affine(7, 5), torch.Generator().manual_seed(0)
    x = torch.zeros(2000, 5, dtype=torch.float64)
    one, ten = (jacobian_square(model, x, probes=m, generator=generator).var() for m in (1, 10))
    assert float(one / ten) == pytest.approx(10, rel=0.2)


def test_many_outputs_are_probed_and_the_note_says_so() -> None:
    found = measure(segmenter(), drawn(2, 2, 9, 9), "C4", probes=4)
    assert "4 random probes" in found.notes[0]


def test_a_function_that_cannot_be_swept_at_once_is_taken_row_by_row() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert grad.sum().item() < math.inf  # vmap cannot look into values
            return 2 * ctx.saved_tensors[0] * grad

    x = drawn(3, 4)
    assert torch.allclose(jacobian_norm(Square.apply, x), 2 * x.norm(dim=1))


class Centred(nn.Module):
    """Answers to what a sample has beyond the mean of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).flatten(1)[:, :3]


def test_a_sample_whose_answer_hangs_on_its_batch_has_no_jacobian() -> None:
    """All of them answered together do not move with one of them: a Jacobian of rounding, and errors of 1e5."""
    found = se.measure(Centred(), GOOD[0], "C4")
    assert "relative error" not in [row.name for row in found.rows]
    assert "relative error: not measured, as the answer to a sample changed with the others" in str(found)
    assert found["relative change"].value > 0


def test_a_jacobian_that_cannot_be_taken_is_noted() -> None:
    class Checkpointed(OutOfPlace):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    found = measure(Checkpointed(), drawn(2, 2, 9, 9), "C4")
    assert [row.name for row in found.rows] == ["iErr", "relative change"]
    assert "relative error: not measured" in found.notes[0] and "use_reentrant" in found.notes[0]


def test_large_answers_take_fewer_probes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pulled_back = jacobian.pulled_back

    def watched(y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        sizes.append(rows.numel())
        return pulled_back(y, x, rows)

    monkeypatch.setattr(jacobian, "pulled_back", watched)
    monkeypatch.setattr(jacobian, "MOST_ENTRIES", 100)
    x = drawn(4, 10)
    assert torch.allclose(jacobian_norm(lambda v: 3 * v, x), torch.tensor(90.0, dtype=torch.float64).sqrt())
    assert max(sizes) <= 100 and len(sizes) == 5


def test_whole_numbers_have_no_jacobian() -> None:
    with pytest.raises(SoftEquivError, match=r"floating-point inputs; got torch\.int64"):
        jacobian_norm(lambda v: v, torch.ones(2, 3, dtype=torch.long))


# --- intervals -------------------------------------------------------------------------------------------------------


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for trial in range(200):
        _, low, high = interval(torch.rand(60, generator=generator), resamples=400, seed=trial)
        inside += low <= 0.5 <= high
    assert 0.9 <= inside / 200 <= 0.98


@pytest.mark.parametrize("n", [5, 20, 60, 300])
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.98, 0.999])
def test_intervals_of_rates_cover_at_least_as_often_as_they_say(n: int, rate: float) -> None:
    """Exactly, over all outcomes of n coins by their probabilities; all right is no proof that all will be."""
    missed = 0.0
    for count in range(n + 1):
        _, low, high = exact_interval((torch.arange(n) < count).double())
        missed += 0.0 if low <= rate <= high else math.comb(n, count) * rate**count * (1 - rate) ** (n - count)
    assert missed <= 0.05
    assert exact_interval(torch.ones(n))[1:] == pytest.approx((0.025 ** (1 / n), 1))


def test_intervals_of_a_combined_accuracy_cover_at_least_as_often_as_they_say() -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        right = torch.rand(40, 2, generator=generator) < torch.tensor([0.99, 0.95])
        _, low, high = exact_interval(right.double(), combined)
        inside += low <= math.sqrt(0.99 * 0.95) <= high < 1.0001
    assert inside / 300 >= 0.95


@pytest.mark.parametrize(("n", "least"), [(20, 0.85), (200, 0.92)])
def test_intervals_of_skew_means_cover_about_as_often_as_the_docs_say(n: int, least: float) -> None:
    generator, inside = torch.Generator().manual_seed(0), 0
    for trial in range(300):
        _, low, high = interval(torch.rand(n, generator=generator).log().neg(), resamples=400, seed=trial)
        inside += low <= 1 <= high
    assert least <= inside / 300 <= 0.98


@pytest.mark.parametrize(("n", "fragile", "lost"), [(200, 0.02, 0.5), (200, 0.01, 0.5), (500, 0.01, 0.3)])
def test_intervals_of_moved_accuracies_cover_at_least_as_often_as_they_say(n: int, fragile: float, lost: float) -> None:
    """Means of four elements each, where few samples are fragile: a bootstrap covers in 87 to 90 of 100 cases."""
    generator, inside, truth = torch.Generator().manual_seed(0), [0, 0], 1 - fragile * lost
    for trial in range(300):
        right = torch.ones(n, 2, dtype=torch.float64)
        wrong = torch.rand(n, 4, generator=generator) < lost
        right[:, 1] -= wrong.double().mean(1) * (torch.rand(n, generator=generator) < fragile)
        _, low, high = exact_interval(right[:, 1], seed=trial)
        inside[0] += low <= truth <= high
        _, low, high = exact_interval(right, combined, seed=trial)
        inside[1] += low <= math.sqrt(truth) <= high
    assert min(inside) / 300 >= 0.95


def test_intervals_of_moved_accuracies_are_near_those_of_as_many_coins() -> None:
    right = torch.ones(1000)
    right[:20] = 0.5
    _, low, high = exact_interval(right)
    _, least, most = exact_interval((torch.arange(1000) >= 10).double())
    assert high - low < 1.5 * (most - least)


def test_intervals_of_accuracies_are_exact_and_others_say_that_they_are_approximate() -> None:
    found = measure(classifier(), (drawn(300, 2, 9, 9), torch.arange(300) % 3), "C4", jacobians=0)
    exact = [row for row in found.rows if row.exact]
    assert [row.name for row in exact] == ["accuracy", "accuracy moved", "accuracy combined"]
    assert all(row.interval.startswith("~") != row.exact for row in found.rows)
    moved = found["accuracy moved"]
    assert moved.low < moved.value < moved.high and "(~ bootstrap, approximate)" in str(found)


def test_an_error_of_zero_has_no_exact_interval() -> None:
    """An error has no largest value, so that no number of zeros bounds its mean."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = measure(net, drawn(50, 2, 9, 9), "C4", jacobians=0)["iErr"]
    assert found.value == pytest.approx(0) and not found.exact and found.high < 1e-9


def test_a_soft_model_is_measured_for_its_own_group() -> None:
    net = se.soften(classifier(), "C4", softness=0.5)
    assert measure(net, drawn(4, 2, 9, 9)) == measure(net, drawn(4, 2, 9, 9), "C4")


def test_a_mean_iou_lies_in_its_interval_though_resamples_miss_classes() -> None:
    """Six pictures with a class each of their own: most resamples lack one of them."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.zeros(6, 8, 8, dtype=torch.long)
        labels[:, :4] = torch.randint(1, 10, (6, 1, 1), generator=generator)
        noise = 0.6 * torch.randn(6, 10, 8, 8, generator=generator)
        scores = nn.functional.one_hot(labels, 10).movedim(-1, 1) + noise
        value, low, high = interval(overlaps(scores, labels, 255), mean_iou)
        assert low <= value <= high
    pair = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 2.0]])  # a class in each of two samples, both at 1/2
    assert interval(pair, mean_iou) == pytest.approx((0.5, 0.5, 0.5))


def test_pictures_without_labels_have_no_part_in_the_iou() -> None:
    x, labels = drawn(3, 2, 9, 9), torch.zeros(3, 9, 9, dtype=torch.long)
    labels[1:] = 255
    found = measure(segmenter(), (x, labels), "C4")
    assert found["mIoU"].n == 1 and found["mIoU"].interval == "" and found["eErr"].n == 3


def test_255_is_a_class_where_there_are_more() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 300, 1).double(), drawn(2, 2, 6, 6)
    with torch.no_grad():
        labels = model(x).argmax(1)
        model.bias[255] += 100
    labels[0] = 255
    found = measure(model, (x, labels), "SO(2)", se.degrees(30))
    assert found["mIoU"].value > 0  # every pixel is said to be 255, and half of them are
    with pytest.raises(SoftEquivError, match="ignore_index"):
        measure(model, (x, torch.full_like(labels, 255)), "C4", ignore_index=255)


def test_interval_of_a_mean_is_the_normal_one() -> None:
    values = drawn(400)
    value, low, high = interval(values)
    spread = 1.96 * float(values.std()) / 20
    assert value == pytest.approx(float(values.mean()))
    assert value - low == pytest.approx(spread, rel=0.15) and high - value == pytest.approx(spread, rel=0.15)


def test_the_seed_decides_everything() -> None:
    data = drawn(4, 2, 9, 9)
    same = [measure(classifier(), data, "SO(2)", se.degrees(30), seed=5) for _ in range(2)]
    assert same[0] == same[1]
    assert measure(classifier(), data, "SO(2)", se.degrees(30), seed=6) != same[0]


# --- data and models as they come ------------------------------------------------------------------------------------


def test_all_forms_of_data_give_the_same_figures() -> None:
    x, labels = drawn(6, 2, 9, 9), torch.tensor([0, 1, 2, 0, 1, 2])
    loader = DataLoader(TensorDataset(x, labels), batch_size=2)
    forms: list[Any] = [
        (x, labels),
        [x, labels],
        {"pixel_values": x, "labels": labels},
        loader,
        ({"pixel_values": x[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2, 4)),
    ]
    moves = [se.C(4).element(1), se.C(4).element(2)]
    tables = [measure(classifier(), data, "C4", elements=moves, batch_size=2).to_dict()["rows"] for data in forms]
    for table in tables[1:]:
        assert table.keys() == tables[0].keys()
        for name in table:
            for key in ("value", "low", "high", "n"):
                assert table[name][key] == pytest.approx(tables[0][name][key])


def test_batches_are_streamed() -> None:
    alive: list[int] = []

    class Counting:
        """Batches that count how many of them are held."""

        def __iter__(self) -> Any:
            import weakref

            refs = []
            for seed in range(6):
                batch = drawn(2, 2, 9, 9, seed=seed)
                refs.append(weakref.ref(batch))
                yield batch
                del batch
                alive.append(sum(ref() is not None for ref in refs))

    assert measure(classifier(), Counting(), "C4").samples == 12
    assert max(alive) <= 2


def test_the_mode_of_every_module_is_restored() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.train()
    model[1].eval()
    statistics = model[1].running_mean.clone()
    first, again = (measure(model, drawn(3, 2, 9, 9), "C4") for _ in range(2))
    assert first == again  # dropout is off
    assert [module.training for module in model] == [True, False, True, True, True]
    assert torch.equal(model[1].running_mean, statistics)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(SoftEquivError):
        measure(model, drawn(0, 2, 9, 9), "C4")
    assert model.training


def test_inputs_follow_the_models_precision_and_autocast_is_respected() -> None:
    model, x = classifier().float(), drawn(4, 2, 9, 9)
    plain = measure(model, x, "SO(2)", se.degrees(30))
    with torch.autocast("cpu", torch.bfloat16):
        rough = measure(model, x, "SO(2)", se.degrees(30))
    assert rough["relative change"].value == pytest.approx(plain["relative change"].value, rel=0.1)
    assert rough["relative change"].value != plain["relative change"].value
    assert rough["relative error"].value == pytest.approx(plain["relative error"].value, rel=0.1)


@pytest.mark.parametrize("name", ["vit", "swin", "convnext", "segformer"])
def test_model_families_can_be_measured(name: str) -> None:
    case = CASES[name]
    found = measure(case.model(), case.input(), "SO(2)", se.degrees(30))
    assert found["Lie derivative"].value > 0 and found["relative error"].value > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_models_device_is_used() -> None:
    x = drawn(4, 2, 9, 9)
    here, there = (measure(classifier().to(device), x, "SO(2)", se.degrees(30)) for device in ("cpu", "cuda"))
    assert there["relative change"].value == pytest.approx(here["relative change"].value)


def test_the_jacobians_do_not_change_which_elements_are_drawn() -> None:
    data = drawn(6, 2, 9, 9)
    few, none = (measure(segmenter(), data, "SO(2)", batch_size=2, jacobians=n)["eErr"] for n in (6, 0))
    assert few == none


def test_a_bar_is_shown_to_who_watches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    measure(classifier(), drawn(4, 2, 9, 9), "C4")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    measure(classifier(), drawn(4, 2, 9, 9), "C4")
    assert "measuring" in capsys.readouterr().err


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_table_names_group_range_samples_and_seed() -> None:
    found = measure(classifier(), drawn(4, 2, 9, 9), "SO(2)", se.degrees(30), seed=3)
    title, header, *rows = str(found).splitlines()
    assert title == "SO(2), within 30deg: 4 samples, 4 elements drawn for each, seed 3"
    assert [row.split("  ")[0] for row in rows[: len(found.rows)]] == [row.name for row in found.rows]
    starts = {line.index(row.formula) for line, row in zip(rows, found.rows, strict=False)}
    assert len(starts) == 1 and "95% interval" in header
    assert json.loads(json.dumps(found.to_dict()))["rows"]["iErr"]["value"] == found["iErr"].value
    for row in found.rows:
        assert row.low <= row.value <= row.high


def test_an_unknown_figure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SoftEquivError, match="iErr"):
        measure(classifier(), drawn(2, 2, 9, 9), "C4")["kl"]


# --- bad input -------------------------------------------------------------------------------------------------------


class Headless(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x, "pooled": x}


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1)) / 0


class Raising(nn.Module):
    def __init__(self, problem: Exception) -> None:
        super().__init__()
        self.problem = problem

    def forward(self, x: Tensor) -> Tensor:
        raise self.problem


class Labels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).argmax(1, keepdim=True)


GOOD = (drawn(4, 2, 9, 9), torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("model", "data", "group", "options", "words"),
    [
        (classifier(), GOOD, "SO(3)", {}, r"SO\(3\) does not act on pictures"),
        (classifier(), drawn(2, 2, 8, 9), "C4", {}, "8 x 9"),
        (classifier(), GOOD, "C4", {"within": se.degrees(30)}, "no element"),
        (classifier(), GOOD, "SO(2)", {"within": se.degrees(0)}, "the range 0deg is empty"),
        (classifier(), drawn(0, 2, 9, 9), "C4", {}, "the data is empty"),
        (classifier(), [], "C4", {}, "the data is empty"),
        (classifier(), (GOOD[0], torch.tensor([0, 1, 2, 3])), "C4", {}, r"0\.\.2.*got 3"),
        (classifier(), (GOOD[0], torch.tensor([0, 1, -1, 2])), "C4", {}, r"0\.\.2.*got -1"),
        (classifier(), (GOOD[0], torch.zeros(3, dtype=torch.long)), "C4", {}, "4 inputs came with labels"),
        (classifier(), (GOOD[0], torch.zeros(4, 9, 9, dtype=torch.long)), "C4", {}, "need labels of shape"),
        (segmenter(), (GOOD[0], torch.full((4, 9, 9), 200)), "C4", {}, "got 200"),
        (Overflow(), GOOD[0], "C4", {}, "NaN or infinity"),
        (Headless(), GOOD[0], "C4", {}, "features, pooled"),
        (classifier(), drawn(2, 2, 3, 3), "C4", {}, r"cannot take inputs of shape \(2, 2, 3, 3\).*[Kk]ernel size"),
        (classifier(), "pictures", "C4", {}, "data of type str"),
        (classifier(), 3, "C4", {}, "data of type int"),
        (classifier(), [[1, 2]], "C4", {}, "cannot read a batch of int, int"),
        (classifier(), {"images": GOOD[0]}, "C4", {}, "pixel_values.*images"),
        (classifier(), torch.zeros(2, 2, 9, 9, dtype=torch.uint8), "C4", {}, "floating point"),
        (classifier(), GOOD, "C4", {"elements": 0}, "at least one element"),
        (classifier(), GOOD, "C4", {"elements": 2.5}, "whole number, or a list of elements of C4; got 2.5"),
        (classifier(), GOOD, "C4", {"elements": se.C(4).element(1)}, "a list of elements of C4"),
        (
            classifier(),
            GOOD,
            "SO(2)",
            {"within": se.degrees(30), "elements": [se.SO(2).element(2.0)]},
            "exp\\(2\\) lies outside the range 30deg",
        ),
        (
            classifier(),
            GOOD,
            "O(2)",
            {"within": se.degrees(30), "elements": [se.O(2).element(1.0, 0)]},
            "exp\\(1\\) lies outside the range 30deg",
        ),
        (classifier(), GOOD, "SO(2)", {"within": "wide"}, "cannot read the range 'wide'"),
        (classifier(), GOOD, "SO(2)", {"within": [1]}, "a range is a number"),
        (classifier(), GOOD, "C4", {"batch_size": 0}, "batch_size is a whole number of at least 1; got 0"),
        (classifier(), GOOD, "C4", {"jacobians": -1}, "jacobians is"),
        (classifier(), GOOD, "C4", {"acts": "bicubic"}, "acts must be an action on data"),
        (classifier(), GOOD, "C4", {"target": "still"}, "target must be an action on data"),
        (Affine(3, 16), drawn(16, 16), "C4", {}, r"a picture is \(..., H, W\).*got \(16,\)"),
        (Affine(3, 16), drawn(8, 16), "C4", {"acts": Still(), "target": Pictures()}, r"got \(3,\)"),
        (segmenter(), (GOOD[0], GOOD[0]), "C4", {}, "labels must be whole numbers"),
        (classifier(), (GOOD[0], torch.eye(3)[GOOD[1]]), "C4", {}, "take the argmax of one-hot"),
        (classifier(), DataLoader(TensorDataset(*GOOD, GOOD[1])), "C4", {}, "cannot read a batch"),
        (classifier(), DataLoader(TensorDataset(GOOD[0], torch.eye(4))), "C4", {}, "labels must be whole numbers"),
        (classifier(), (GOOD[0], None), "C4", {}, "a batch of Tensor, NoneType"),
        (segmenter(), (GOOD[0], torch.full((4, 9, 9), 255)), "C4", {}, "every pixel is labelled ignore_index"),
        (classifier(), GOOD[0] / 0, "C4", {}, "inputs hold NaN or infinity"),
        (Raising(AssertionError("size 224")), GOOD[0], "C4", {}, "cannot take inputs.*AssertionError: size 224"),
        (Raising(TypeError("missing y")), GOOD[0], "C4", {}, "cannot take inputs.*TypeError: missing y"),
        (Labels(), GOOD[0], "C4", {}, "answers must be floating point.*torch.int64"),
        (nn.Conv2d(2, 2, 1, device="meta"), GOOD[0], "C4", {}, "meta device"),
        (classifier(), GOOD, "C4", {"elements": [se.SO(2).element(1.0)]}, "elements of C4"),
        (Affine(4, 4), drawn(2, 4), "SO(2)", {"acts": Vectors(2 * se.vector(se.SO(2)))}, "target="),
        (len, GOOD, "C4", {}, "must be a torch module"),
        (len, GOOD, None, {}, "no soft weights: say for which group"),
        (classifier(), GOOD[0], None, {}, "no soft weights: say for which group"),
        (classifier(), "C4", GOOD[0], {}, r"got a tensor of \(4, 2, 9, 9\): the data come before the group$"),
        (classifier(), GOOD, "C4", {"target": Vectors(3 * se.scalar(se.C(4)))}, "leave the labels out"),
        (nn.Sequential(classifier(), nn.Threshold(1e9, 0.0)), GOOD[0], "C4", {}, "answer is zero at 4 samples"),
        (
            nn.Sequential(classifier(), nn.Threshold(1e9, 1.0)),
            GOOD[0],
            "C4",
            {},
            "is zero at 4 samples.*jacobians=0",
        ),
    ],
)
def test_bad_input_gets_a_sentence(model: Any, data: Any, group: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SoftEquivError, match=words):
        measure(model, data, group, **options)
