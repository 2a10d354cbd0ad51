"""Are measured errors what their formulas say? Slow references, exact cases, estimators, and bad input."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import softequiv as se
from softequiv.actions import Pictures, Points, Still, Vectors
from softequiv.errors import SoftEquivError
from softequiv.measure import jacobian_norm, jacobian_square, measure
from softequiv.measure.bootstrap import interval
from softequiv.measure.lie import lie_derivative
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
    change = ((moved - expected) * inside).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)
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


def test_an_equivariant_model_has_no_error() -> None:
    model = se.soften(CASES["resnet"].model(), "C4", softness=0.0)
    found = measure(model, CASES["resnet"].input(33), "C4", elements=list(se.C(4).elements()))
    assert found["relative change"].value < 1e-5
    assert found["iErr"].value < 1e-8
    free = measure(CASES["resnet"].model(), CASES["resnet"].input(33), "C4", elements=list(se.C(4).elements()))
    assert free["relative change"].value > 1e-2


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


# --- intervals -------------------------------------------------------------------------------------------------------


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for trial in range(200):
        _, low, high = interval(torch.rand(60, generator=generator), resamples=400, seed=trial)
        inside += low <= 0.5 <= high
    assert 0.9 <= inside / 200 <= 0.98


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
    assert title == "SO(2), within 30deg: 4 samples, 4 elements drawn, seed 3"
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
        (classifier(), GOOD, "C4", {"elements": [se.SO(2).element(1.0)]}, "elements of C4"),
        (Affine(4, 4), drawn(2, 4), "SO(2)", {"acts": Vectors(2 * se.vector(se.SO(2)))}, "target="),
        (len, GOOD, "C4", {}, "must be a torch module"),
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
def test_bad_input_gets_a_sentence(model: Any, data: Any, group: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SoftEquivError, match=words):
        measure(model, data, group, **options)
