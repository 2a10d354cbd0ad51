"""Are the paper's metrics what their formulas say, however the data are cut into batches and spread over ranks?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import softequiv as se
from softequiv.actions import Pictures, Points
from softequiv.asking import kl_divergence
from softequiv.groups import Element
from softequiv.measure.functional import confusion_counts, displacements, mean_iou, overlap

pytest.importorskip("torchmetrics", reason="needs the extra: pip install 'softequiv[metrics]'")

from torchmetrics import Metric, MetricCollection

from softequiv.measure.metrics import ClassificationMetrics, SegmentationMetrics, TrajectoryMetrics

CLASSES, IGNORED = 5, 255
THIRTY = se.SO(2).element(se.degrees(30))
QUARTER = se.SO(2).element(se.degrees(90))
ELEMENTS = (THIRTY, QUARTER, THIRTY.inverse)

Batch = tuple[Any, ...]


# slow references, written from the formulas


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


def slow_kl(scores: list[float], other: list[float]) -> float:
    return sum(p * (math.log(p) - math.log(q)) for p, q in zip(softmax(scores), softmax(other), strict=True))


def best(scores: list[float]) -> int:
    return scores.index(max(scores))


def slow_classification(batches: list[Batch]) -> dict[str, float]:
    right = moved_right = 0
    divergences = []
    for logits, moved, labels in batches:
        for one, other, label in zip(logits.tolist(), moved.tolist(), labels.tolist(), strict=True):
            right += best(one) == label
            moved_right += best(other) == label
            divergences.append(slow_kl(one, other))
    n = len(divergences)
    acc, aacc = right / n, moved_right / n
    return {"Acc": acc, "aAcc": aacc, "cAcc": math.sqrt(acc * aacc), "iErr": sum(divergences) / n}


def slow_iou(pairs: list[tuple[int, int]]) -> float:
    ious = []
    for k in range(CLASSES):
        both = sum(1 for predicted, label in pairs if predicted == k and label == k)
        either = sum(1 for predicted, label in pairs if label != IGNORED and (predicted == k or label == k))
        if either:
            ious.append(both / either)
    return sum(ious) / len(ious)


def slow_segmentation(batches: list[Batch]) -> dict[str, float]:
    plain_pairs, moved_pairs, divergences = [], [], []
    for logits, moved, labels, g in batches:
        carried = Pictures()(logits, g)
        moved_labels = Pictures("nearest", fill=IGNORED)(labels, g)
        inside = Pictures().valid(logits, g)
        n, _, height, width = logits.shape
        for i in range(n):
            for u in range(height):
                for v in range(width):
                    plain_pairs.append((best(logits[i, :, u, v].tolist()), int(labels[i, u, v])))
                    moved_pairs.append((best(moved[i, :, u, v].tolist()), int(moved_labels[i, u, v])))
                    if inside is None or inside[u, v]:
                        divergences.append(slow_kl(moved[i, :, u, v].tolist(), carried[i, :, u, v].tolist()))
    plain, aug = (slow_iou([pair for pair in pairs if pair[1] != IGNORED]) for pairs in (plain_pairs, moved_pairs))
    return {"mIoU": plain, "aIoU": aug, "cIoU": math.sqrt(plain * aug), "eErr": sum(divergences) / len(divergences)}


def slow_trajectories(batches: list[Batch]) -> dict[str, float]:
    along: list[float] = []
    moved_along: list[float] = []
    final: list[float] = []
    moved_final: list[float] = []
    differences = []
    for forecast, moved, future, g in batches:
        (a, b), (c, d) = g.matrix.tolist()
        for one, other, truth in zip(forecast.tolist(), moved.tolist(), future.tolist(), strict=True):

            def turned(path: list[list[float]], a: float = a, b: float = b, c: float = c, d: float = d) -> Any:
                return [(a * x + b * y, c * x + d * y) for x, y in path]

            plain = [math.dist(p, q) for p, q in zip(one, truth, strict=True)]
            aug = [math.dist(p, q) for p, q in zip(other, turned(truth), strict=True)]
            along, moved_along = along + plain, moved_along + aug
            final, moved_final = [*final, plain[-1]], [*moved_final, aug[-1]]
            differences.append(math.sqrt(sum(math.dist(p, q) ** 2 for p, q in zip(other, turned(one), strict=True))))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    figures = {"ADE": mean(along), "FDE": mean(final), "aADE": mean(moved_along), "aFDE": mean(moved_final)}
    figures["cADE"] = (figures["ADE"] + figures["aADE"]) / 2
    figures["cFDE"] = (figures["FDE"] + figures["aFDE"]) / 2
    return {**figures, "eErr": mean(differences)}


# data: batches of different sizes, so that a mean of batch means would be wrong


def classification_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for n in (7, 2, 5, 1):
        logits = 2 * torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
        moved = logits + torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
        batches.append((logits, moved, torch.where(torch.rand(n, generator=generator) < 0.7, logits.argmax(1), 0)))
    return batches


def segmentation_batches() -> list[Batch]:
    """Class 4 occurs neither in labels nor in predictions; a few pixels are ignored."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for n, g in zip((2, 1, 3), ELEMENTS, strict=True):
        logits = 2 * torch.randn(n, CLASSES, 6, 6, generator=generator, dtype=torch.float64)
        noise = torch.randn(n, CLASSES, 6, 6, generator=generator, dtype=torch.float64)
        logits[:, 4] = -30
        labels = torch.where(torch.rand(n, 6, 6, generator=generator) < 0.7, logits.argmax(1), 0)
        labels[torch.rand(n, 6, 6, generator=generator) < 0.1] = IGNORED
        batches.append((logits, Pictures()(logits, g) + 0.5 * noise, labels, g))
        batches[-1][1][:, 4] = -30
    return batches


def trajectory_batches() -> list[Batch]:
    """Also of different lengths: time steps and agents have different numbers."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for n, steps, g in zip((4, 1, 6), (12, 8, 3), ELEMENTS, strict=True):
        future, one, other = torch.randn(3, n, steps, 2, generator=generator, dtype=torch.float64)
        batches.append((future + 0.3 * one, Points()(future, g) + 0.3 * other, future, g))
    return batches


def segmentation_metrics() -> Metric:
    return SegmentationMetrics(CLASSES, ignore_index=IGNORED)


TASKS: dict[str, tuple[Callable[[], Metric], Callable[[], list[Batch]], Callable[[list[Batch]], dict[str, float]]]] = {
    "classification": (ClassificationMetrics, classification_batches, slow_classification),
    "segmentation": (segmentation_metrics, segmentation_batches, slow_segmentation),
    "trajectories": (TrajectoryMetrics, trajectory_batches, slow_trajectories),
}


def figures(metric: Metric) -> dict[str, float]:
    return {name: float(value) for name, value in metric.compute().items()}


@pytest.mark.parametrize("task", TASKS)
def test_every_figure_is_its_formula(task: str) -> None:
    make, draw, slow = TASKS[task]
    metric = make()
    for batch in draw():
        metric.update(*batch)
    assert figures(metric) == pytest.approx(slow(draw()), rel=1e-9)
    assert len(set(figures(metric).values())) == len(figures(metric))  # the data tell all figures apart


@pytest.mark.parametrize("task", ["classification", "segmentation", "trajectories"])
def test_how_data_are_cut_into_batches_does_not_matter(task: str) -> None:
    make, draw, _ = TASKS[task]
    whole, pieces = make(), make()
    *tensors, g = draw()[0] if task != "classification" else (*draw()[0], None)
    move = () if g is None else (g,)
    whole.update(*tensors, *move)
    for i in range(len(tensors[0])):
        pieces.update(*(tensor[i : i + 1] for tensor in tensors), *move)
    assert figures(pieces) == pytest.approx(figures(whole), rel=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_reset_forgets_and_forward_gives_the_batch(task: str) -> None:
    make, draw, slow = TASKS[task]
    metric, batches = make(), draw()
    metric.update(*batches[0])
    metric.reset()
    of_batch = {name: float(value) for name, value in metric(*batches[1]).items()}
    assert of_batch == pytest.approx(slow(batches[1:2]), rel=1e-9)
    metric(*batches[2])
    assert figures(metric) == pytest.approx(slow(batches[1:3]), rel=1e-9)


def rank_figures(rank: int, folder: str) -> None:
    """This process's share of the batches; rank 0 writes the figures of both."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for task, (make, draw, _) in TASKS.items():
        metric = make()
        for batch in draw()[rank::2]:
            metric.update(*batch)
        found[task] = figures(metric)
    Path(folder, f"figures-{rank}.json").write_text(json.dumps(found))
    # gloo aborts where one process tears its connections down while the other still uses them
    Path(folder, f"done-{rank}").touch()
    while not all(Path(folder, f"done-{other}").exists() for other in (0, 1)):
        time.sleep(0.01)
    os._exit(0)


def test_two_processes_give_the_figures_of_one(tmp_path: Path) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    torch.multiprocessing.spawn(rank_figures, (str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"figures-{rank}.json").read_text())
        for task, (_, draw, slow) in TASKS.items():
            assert found[task] == pytest.approx(slow(draw()), rel=1e-9), (rank, task)


def test_metrics_live_in_a_collection() -> None:
    collection = MetricCollection({"here": ClassificationMetrics()}, prefix="test_")
    collection.update(*classification_batches()[0])
    assert {"test_Acc", "test_iErr"} <= set(collection.compute())


def test_half_precision_outputs_are_summed_in_full() -> None:
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)
    moved = logits + torch.tensor([0.0, 0.125], dtype=torch.bfloat16)
    metric = ClassificationMetrics()
    metric.update(logits, moved, torch.zeros(4096, dtype=torch.long))
    assert figures(metric)["iErr"] == pytest.approx(slow_kl([0, 0], [0, 0.125]), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("task", TASKS)
def test_sums_stay_exact_inside_a_model_of_half_precision(task: str, dtype: torch.dtype) -> None:
    make, draw, slow = TASKS[task]
    model = torch.nn.Linear(2, 2)
    model.metric = make()
    model.to(dtype)
    for batch in draw():
        model.metric.update(*batch)
    assert figures(model.metric) == pytest.approx(slow(draw()), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_labels_of_any_whole_type_may_have_no_ignored_one(dtype: torch.dtype) -> None:
    """What leaves the frame is left out even where no label stands for it."""
    logits, moved, labels, g = segmentation_batches()[0]
    labels = labels.clamp_max(CLASSES - 1)
    found, expected = SegmentationMetrics(CLASSES, ignore_index=None), SegmentationMetrics(CLASSES, ignore_index=-100)
    found.update(logits, moved, labels.to(dtype), g)
    expected.update(logits, moved, labels, g)
    assert figures(found) == figures(expected)


def test_255_is_a_class_where_there_are_more() -> None:
    logits, labels = torch.zeros(1, 300, 8, 8), torch.full((1, 8, 8), 255)
    logits[:, 255] = 1
    metric = SegmentationMetrics(300)
    metric.update(logits, logits, labels, se.SO(2).element(0.3))
    assert figures(metric)["mIoU"] == figures(metric)["aIoU"] == 1


def test_metrics_with_other_options_keep_their_own_sums_without_compute_groups() -> None:
    pair = {name: SegmentationMetrics(CLASSES, pictures=Pictures(name)) for name in ("bilinear", "bicubic")}
    collection = MetricCollection(pair, compute_groups=False)
    for logits, moved, labels, g in segmentation_batches():
        collection.update(logits, moved, labels, g)
    found = collection.compute()
    assert found["bilinear_eErr"] != found["bicubic_eErr"]
    assert "compute_groups=False" in (SegmentationMetrics.__doc__ or "")


def test_an_exactly_equivariant_model_has_no_error_whatever_leaves_the_frame() -> None:
    logits = torch.randn(2, CLASSES, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    metric = segmentation_metrics()
    moved = Pictures(fill=50.0)(logits, THIRTY)  # another filling of the corners, which are not valid
    metric.update(logits, moved, logits.argmax(1), THIRTY)
    assert figures(metric)["eErr"] == pytest.approx(0, abs=1e-12)
    assert figures(metric)["mIoU"] == 1


# pure functions


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_divergence_is_its_formula_along_any_axis(dim: int) -> None:
    a, b = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = kl_divergence(a, b, dim)
    rows, others = (x.movedim(dim, -1) for x in (a, b))
    for place in ((0, 0), (1, 2), (2, 3)):
        expected = slow_kl(rows[place].tolist(), others[place].tolist())
        assert float(found[place]) == pytest.approx(expected, rel=1e-9)
    assert not torch.allclose(found, kl_divergence(b, a, dim))


def test_counts_are_labels_by_predictions() -> None:
    prediction, labels = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([0, 2, 2, IGNORED, 1], dtype=torch.uint8)
    counts = confusion_counts(prediction, labels, 3, ignore_index=IGNORED)
    assert counts.tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert float(mean_iou(overlap(counts))) == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)


def test_absent_classes_do_not_count_but_wrongly_predicted_ones_do() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    assert float(mean_iou(overlap(confusion_counts(labels, labels, 9)))) == 1
    one_wrong = torch.tensor([0, 7, 1, 1])
    assert float(mean_iou(overlap(confusion_counts(one_wrong, labels, 9)))) == pytest.approx((1 / 2 + 1 + 0) / 3)


# refusals


def classified(logits: Tensor, labels: Tensor) -> None:
    ClassificationMetrics().update(logits, logits, labels)


def segmented(logits: Tensor, labels: Tensor, g: Element = QUARTER) -> None:
    segmentation_metrics().update(logits, logits, labels, g)


LONG = torch.zeros(2, dtype=torch.long)
MASK = torch.zeros(1, 4, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: classified(torch.zeros(2, 3), LONG + 3), r"labels must lie in 0..2, .* got 3"),
        (lambda: classified(torch.zeros(2, 3), LONG - 1), "got -1"),
        (lambda: classified(torch.zeros(2, 3), LONG.float()), "whole numbers; got torch.float32"),
        (lambda: classified(torch.full((2, 3), math.nan), LONG), "NaN or infinity in 6 of 6"),
        (lambda: classified(torch.zeros(2, 3), LONG[:1]), r"\(N, K\) and labels \(N,\)"),
        (lambda: ClassificationMetrics().update(torch.zeros(2, 3), torch.zeros(2, 4), LONG), "must have one shape"),
        (lambda: segmented(torch.zeros(1, CLASSES, 4, 4), MASK + 5), r"0..4, .* got 5"),
        (lambda: segmented(torch.full((1, CLASSES, 4, 4), math.inf), MASK), "pixel scores hold NaN or infinity"),
        (lambda: segmented(torch.zeros(1, CLASSES, 2, 2), MASK), "resize the scores"),
        (lambda: segmented(torch.zeros(1, 3, 4, 4), MASK), r"scores are \(N, 5, H, W\)"),
        (lambda: segmented(torch.zeros(1, CLASSES, 4, 4), MASK, se.SO(3).element(1, 0, 0)), "does not act"),
        (lambda: segmented(torch.zeros(1, CLASSES, 4, 4), MASK.float()), "whole numbers; got torch.float32"),
        (lambda: SegmentationMetrics(0), "at least one class"),
        (lambda: TrajectoryMetrics().update(*torch.zeros(3, 5, 0, 2), THIRTY), "at least one step"),
        (lambda: TrajectoryMetrics(Points("mean")), "not together"),
        (
            lambda: TrajectoryMetrics().update(
                torch.zeros(2, 3, 2), torch.full((2, 3, 2), math.nan), torch.zeros(2, 3, 2), THIRTY
            ),
            "forecasts of moved data hold NaN",
        ),
        (lambda: displacements(torch.zeros(2, 3, 2), torch.zeros(2, 4, 2)), "forecast and future must have one shape"),
        (lambda: confusion_counts(LONG + 2, LONG, 2), "predictions must lie in 0..1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(se.SoftEquivError, match=sentence):
        act()


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("task", TASKS)
def test_no_data_no_figures(task: str) -> None:
    with pytest.raises(se.SoftEquivError, match="no figure yet"):
        TASKS[task][0]().compute()


def test_a_refused_batch_leaves_no_trace() -> None:
    metric, good = segmentation_metrics(), segmentation_batches()[0]
    metric.update(*good)
    before = figures(metric)
    with pytest.raises(se.SoftEquivError):
        metric.update(good[0], good[1], torch.full_like(good[2], 77), good[3])
    assert figures(metric) == before


def test_labels_that_are_all_ignored_give_no_iou() -> None:
    metric, (logits, moved, labels, g) = segmentation_metrics(), segmentation_batches()[0]
    metric.update(logits, moved, torch.full_like(labels, IGNORED), g)
    with pytest.raises(se.SoftEquivError, match="no labelled pixel has been seen"):
        metric.compute()


def test_the_package_works_without_torchmetrics_and_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['torchmetrics'] = None\n"
        "import softequiv, softequiv.measure.functional\n"
        "try:\n    import softequiv.measure.metrics\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'softequiv[metrics]'" in done.stdout
