"""Do T6, T7 and the figures F1 to F3 run from data to page, go on where they stopped, and say what their rows say?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from draws import as_trained
from softequiv.errors import SoftEquivError
from softequiv.experiments import f1, f2, f3, t1, t6, t7
from softequiv.experiments.base import Scale, reproduce
from softequiv.experiments.cells import Figures, Row, Settings
from softequiv.experiments.pages import drawn
from softequiv.tasks.regression import o5_target, synthetic_o5
from softequiv.testing import equivariance_error
from softequiv.training import Recipe, fit

DATA = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
EXPERIMENTS = {"T6": t6.T6, "T7": t7.T7, "F1": f1.F1, "F2": f2.F2, "F3": f3.F3}
NEEDED: dict[str, tuple[str, ...]] = {
    "F1": ("vit-cifar10", "cifar10/cifar10_2k2k.npz"),
    "F2": ("mnist",),
    "F3": ("imagenet-val-2k", "resnet50-imagenet"),
}
PACKAGES = {"T7": ("scipy",), "F1": ("transformers",), "F2": ("torchmetrics",), "F3": ("transformers", "PIL")}
NAMED: dict[str, Callable[[Settings], str]] = {  # how a page names a cell
    "T6": lambda settings: f"| {settings['arm']} | {settings['gamma']:g} | {settings['dial']:g} |",
    "T7": lambda settings: f"| {settings['n']} x {settings['n']} |",
    "F1": lambda settings: f"| {settings['group']} |",
    "F2": lambda settings: "ours",
    "F3": lambda settings: str(settings["model"]),
}
SCALES: tuple[Scale, ...] = ("smoke", "small", "full")


def refused(settings: Settings) -> Figures:
    raise AssertionError("a finished cell was computed again")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_runs_to_a_page_and_is_not_computed_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    missing = [part for part in NEEDED.get(name, ()) if not (DATA / part).exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not in {DATA}; set SOFTEQUIV_DATA")
    monkeypatch.setenv("SOFTEQUIV_DATA", str(DATA))
    experiment = EXPERIMENTS[name]
    path = reproduce(experiment, "smoke", out=tmp_path)
    text = path.read_text(encoding="utf-8")
    for cell in experiment.cells("smoke"):
        assert NAMED[name](cell.settings) in text
    assert "aper's" in text
    assert list(tmp_path.glob(f"{name}-smoke-*.svg"))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert reproduce(replace(experiment, work=refused), "smoke", out=tmp_path) == path
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("scale", SCALES)
def test_cells_are_different_and_can_be_written_down(name: str, scale: Scale) -> None:
    cells = EXPERIMENTS[name].cells(scale)
    assert len({cell.key for cell in cells}) == len(cells)
    assert [json.loads(json.dumps(dict(cell.settings))) for cell in cells] == [dict(cell.settings) for cell in cells]


# --- T6


def test_every_arm_has_the_same_number_of_trials() -> None:
    for scale in ("small", "full"):
        trials: dict[tuple[str, float], int] = {}
        for cell in t6.cells(scale):
            key = cell.settings["arm"], cell.settings["gamma"]
            trials[key] = trials.get(key, 0) + 1
        assert {arm for arm, _ in trials} == set(t6.STOPS)
        assert len(set(trials.values())) == 1


def test_networks_side_by_side_learn_what_each_learns_alone() -> None:
    tasks = [synthetic_o5(0.3, train=40, validation=20, test=20, seed=seed) for seed in range(2)]
    recipe = Recipe(epochs=3, batch=20, rate=1e-2, keep="last")
    networks: list[nn.Module] = []
    alone: list[nn.Module] = []
    for seed, task in enumerate(tasks):
        for kept in (networks, alone):
            torch.manual_seed(seed)
            kept.append(t6.network("ours", 0.1, task.source, task.target, 24, 1))
        fit(alone[-1], task, recipe, t6.elements())
    model = t6.SideBySide(networks)
    fitted = fit(model, t6.together(tasks), recipe, t6.elements())
    x = tasks[0].test.batch(torch.arange(20))[0].to(fitted.device)
    for own, other in zip(model.apart(), alone, strict=True):
        assert torch.allclose(own(x), other(x), atol=1e-4)
    before = [t6.network("ours", 0.1, tasks[0].source, tasks[0].target, 24, 1)]
    assert not torch.allclose(before[0].to(fitted.device)(x), alone[0](x), atol=1e-2)


def test_examples_of_all_seeds_stand_side_by_side() -> None:
    tasks = [synthetic_o5(0.3, train=6, validation=2, test=3, seed=seed) for seed in range(2)]
    x, y = t6.together(tasks).train.batch(torch.tensor([4, 1]))
    assert x.shape == (2, 2, 10)
    for number, task in enumerate(tasks):
        own_x, own_y = task.train.batch(torch.tensor([4, 1]))
        assert torch.equal(x[:, number], own_x)
        assert torch.equal(y[:, number], own_y)


@pytest.mark.parametrize(("arm", "strict"), [("EMLP", True), ("ours", False), ("MLP", False), ("EMLP-RPP", False)])
def test_only_the_strict_arm_is_invariant(arm: str, strict: bool) -> None:
    torch.manual_seed(0)
    task = synthetic_o5(0.3, train=8)
    model = as_trained(t6.network(arm, 0.1, task.source, task.target, 24, 1))
    x = torch.randn(16, 10)
    error = equivariance_error(model, task.source.group, task.source, task.target, inputs=x)
    assert (error < 1e-4) == strict


def test_the_target_arm_keeps_its_target_and_others_are_refused() -> None:
    task = synthetic_o5(0.3, train=8)
    model = as_trained(t6.network("ours (target)", 0.05, task.source, task.target, 24, 1))
    free = as_trained(t6.network("ours", 1.0, task.source, task.target, 24, 1))
    x = torch.randn(16, 10)
    spaces = (task.source.group, task.source, task.target)
    tight, loose = (equivariance_error(own, *spaces, inputs=x) for own in (model, free))
    assert tight < 0.5 * loose
    with pytest.raises(SoftEquivError, match=r"EMLP-RPP.*ours"):
        t6.network("them", 0.0, task.source, task.target, 24, 1)


def test_the_broken_share_is_what_the_best_invariant_guess_misses() -> None:
    task = synthetic_o5(0.5, train=10, test=400)
    x = task.test.batch(torch.arange(400))[0].double()
    truth, invariant = o5_target(x, 0.5), o5_target(x, 0.0)
    guess = invariant + (truth - invariant).mean()
    wanted = float((truth - guess).square().sum() / truth.square().sum())
    assert t6.broken_share(task, 0.5) == pytest.approx(wanted)
    assert wanted > 0


def t6_row(arm: str, gamma: float, errors: list[float], *, validation: float = 0.1, **more: Any) -> Row:
    settings = {**t6.SIZES["smoke"], "gamma": gamma, "arm": arm, "dial": 0.1, "rate": 1e-3, **more}
    figures = {
        "validation": validation,
        "epoch": 2,
        "relMSE": errors,
        "eErr": [10 * error for error in errors],
        "broken": [0.0, 0.0],
        "kept": 0.5,
        "parameters": 7,
        "data": "0",
    }
    return Row(settings, figures, 1.0, "cpu", {"torch": "2", "softequiv": "0"})


def test_the_trial_is_chosen_by_validation_and_not_by_the_test() -> None:
    rows = [
        t6_row("ours", 0.3, [0.1, 0.1], validation=0.3, dial=0.01),
        t6_row("ours", 0.3, [0.9, 0.9], validation=0.2, dial=0.03),
    ]
    assert t6.chosen(rows)["ours", 0.3]["dial"] == 0.03


@pytest.mark.parametrize(("ours", "holds"), [(0.1, True), (0.3, False)])
def test_claims_of_t6_follow_from_rows(ours: float, holds: bool) -> None:
    others = [t6_row(arm, gamma, [0.2, 0.2]) for arm in ("MLP", "EMLP", "EMLP-RPP") for gamma in (0.0, 0.3)]
    rows = [*others, *(t6_row("ours", gamma, [ours, ours]) for gamma in (0.0, 0.3))]
    page = t6.page(rows, "smoke")
    assert len(page.claims) == 3 + 2 + 1
    assert all(claim.holds == holds for claim in page.claims)
    table = page.tables[0]
    assert [line[0] for line in table.rows] == ["MLP", "EMLP", "EMLP-RPP", "ours", "the broken part itself"]
    assert all(len(line) == len(table.header) for line in table.rows)
    assert dict(zip(table.header, table.rows[3], strict=True))["the paper's at 0.4"] == "0.74"


# --- T7


def t7_row(n: int, ours: float, schur: float | None, svd: float | None) -> Row:
    return Row(
        {"n": n, "action": "exact", "svd": svd is not None},
        {"n": n, "ours": ours, "schur": schur, "svd": svd},
        1.0,
        "cpu",
        {"torch": "2", "softequiv": "0"},
    )


def test_claims_of_t7_follow_from_rows() -> None:
    rows = [t7_row(6, 0.01, 0.02, None), t7_row(4, 0.01, 0.005, 0.1)]
    assert t7.faster(rows, "SVD").holds
    assert not t7.faster(rows, "Schur rule").holds
    assert not t7.faster([t7_row(4, 0.1, None, None)], "SVD").holds
    page = t7.page(rows, "small")
    assert [line[0] for line in page.tables[0].rows] == ["4 x 4", "6 x 6"]
    assert page.tables[0].rows[1][-2:] == ["0.5 s", "0.01 s"]
    assert drawn(page.figures[0]).startswith(b"<?xml")


def test_the_svd_is_spared_beyond_8_pixels_unless_all_is_asked_for() -> None:
    assert [cell.settings["n"] for cell in t7.cells("small") if cell.settings["svd"]] == [4, 6, 8]
    assert all(cell.settings["svd"] for cell in t7.cells("full"))


# --- figures


@pytest.mark.parametrize(("errors", "holds"), [([0.0, 0.2, 0.5], True), ([0.0, 0.5, 0.2], False)])
def test_claims_of_f1_follow_from_rows(errors: list[float], holds: bool) -> None:
    row = Row({"group": "C4", "levels": [0.0, 0.5, 1.0]}, {"error": errors}, 1.0, "cpu", {})
    assert f1.grows(row).holds == holds


def test_f1_has_a_model_where_there_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path))
    (name,) = {cell.settings["model"] for cell in f1.cells("smoke")}
    model, picture = f1.model_and_picture(name)
    assert name == f1.RANDOM
    assert picture.shape == (3, 32, 32)
    assert not model.training


def test_f2_uses_cells_of_t1() -> None:
    for scale in SCALES:
        own, every = f2.cells(scale), {cell.key for cell in t1.cells(scale)}
        assert own
        assert all(cell.key in every and not cell.settings["turned"] for cell in own)
    assert f2.F2.work is t1.work


@pytest.mark.parametrize(("error", "holds"), [(0.1, True), (0.9, False)])
def test_claims_of_f2_follow_from_rows(error: float, holds: bool) -> None:
    def row(arm: str, dial: float, gain: float, cost: float, seed: int) -> Row:
        settings = {"symmetry": "rotation", "arm": arm, "dial": dial, "seed": seed}
        return Row(settings, {t1.GAIN: gain, t1.ERROR: cost}, 1.0, "cpu", {})

    rows = [row("ours", dial, 0.8, error * (1 + dial), seed) for dial in (0.0, 0.5) for seed in (0, 1)]
    rows += [row("RPP", dial, 0.7, 0.5, seed) for dial in (0.0, 0.5) for seed in (0, 1)]
    page = f2.page(rows, "smoke")
    assert page.claims[0].holds == holds
    assert "RPP" in page.claims[0].text
    for figure in page.figures:
        assert drawn(figure).startswith(b"<?xml")


def test_what_beats_augmentation_does_so_with_the_same_labels_and_more_than_one_seed() -> None:
    def rows(arm: str, turned: bool, labels: float, gain: float, cost: float, seeds: int = 3) -> list[Row]:
        settings = {"symmetry": "rotation", "arm": arm, "dial": 1.0, "turned": turned, "labels": labels}
        figures = [{t1.GAIN: gain + 0.001 * seed, t1.ERROR: cost + 0.001 * seed} for seed in range(seeds)]
        return [Row({**settings, "seed": n}, own, 1.0, "cpu", {}) for n, own in enumerate(figures)]

    found = t1.against_augmentation(
        [
            *rows("plain", True, 0.01, 0.80, 0.2),
            *rows("held", False, 0.01, 0.83, 0.1),
            *rows("ours", False, 0.01, 0.70, 0.3),
            *rows("penalty", False, 0.01, 0.83, 0.1, seeds=1),
            *rows("plain", True, 1.0, 0.96, 0.05),
            *rows("held", False, 1.0, 0.83, 0.1),
            *rows("ours", True, 1.0, 0.97, 0.04),
        ],
        ("ours", "penalty", "held"),
    )
    held = {claim.text: claim.holds for claim in found}
    few = "rotation, 1 % of the labels: "
    assert held == {
        "rotation, 100 % of the labels: held beats augmentation": False,
        "rotation, 100 % of the labels, trained on turned digits: ours beats augmentation": True,
        f"{few}ours beats augmentation": False,
        f"{few}penalty beats augmentation": False,
        f"{few}held beats augmentation": True,
    }
    assert "one seed" in next(claim.evidence for claim in found if "penalty" in claim.text)


def test_a_linear_model_has_its_own_matrix_as_jacobian() -> None:
    """F(x) = A x has ||J||_F = ||A||_F for every picture, exactly and on average over probes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5, bias=False))
    x = torch.randn(20, 3, 8, 8)
    wanted = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    exact = f3.distribution(model, x, probes=0, elements=1, seed=0)
    assert exact["norm"] == pytest.approx([wanted] * 20, rel=1e-4)
    assert exact["doubt"] == [0.0] * 20
    guessed = f3.distribution(model, x, probes=64, elements=1, seed=0)
    assert sum(guessed["norm"]) / 20 == pytest.approx(wanted, rel=0.1)
    assert max(guessed["doubt"]) > 0
    assert all(0 < error <= 2.1 for error in exact["relative error"])


def test_f3_tells_quantiles_of_all_parts() -> None:
    def row(part: int, values: list[float]) -> Row:
        settings = {**f3.SIZES["small"], "part": part, "seed": 0}
        figures = {"norm": values, "relative error": values, "doubt": [0.1, 0.1]}
        return Row(settings, figures, 1.0, "cpu", {})

    page = f3.page([row(0, [1.0, 2.0]), row(1, [3.0, 5.0])], "small")
    assert page.tables[0].rows[0] == ["norm", "1", "1.15", "2.5", "4.7", "5"]
    assert "stand-in" in page.sentences[0]
    assert drawn(page.figures[0]).startswith(b"<?xml")
