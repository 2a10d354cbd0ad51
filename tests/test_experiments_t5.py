"""Does T5 run from tracks to page, go on where it stopped, and say what its rows say?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("torchmetrics")
pytest.importorskip("matplotlib")

from softequiv.errors import SoftEquivError
from softequiv.experiments import t5
from softequiv.experiments.base import Scale, reproduce
from softequiv.experiments.cells import Figures, Row, Settings
from softequiv.experiments.graphs import recorded
from softequiv.experiments.pages import drawn
from softequiv.nn import soft_weights
from softequiv.tasks.trajectories import SCENES, Trajectories, as_examples

DATA = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
SCALES: tuple[Scale, ...] = ("smoke", "small", "full")


def refused(settings: Settings) -> Figures:
    raise AssertionError("a finished cell was computed again")


def test_smoke_runs_from_tracks_to_page_and_is_not_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (DATA / "ethucy.zip").exists():
        pytest.skip(f"ethucy.zip not in {DATA}; set SOFTEQUIV_DATA")
    monkeypatch.setenv("SOFTEQUIV_DATA", str(DATA))
    path = reproduce(t5.T5, "smoke", out=tmp_path)
    text = path.read_text(encoding="utf-8")
    for cell in t5.cells("smoke"):
        assert f"| {cell.settings['arm']} | {cell.settings['dial']:g} |" in text
    for name in t5.PAPER:
        assert f"| the paper's {name} |" in text
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert reproduce(replace(t5.T5, work=refused), "smoke", out=tmp_path) == path
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    told = [json.loads(file.read_text()) for file in (tmp_path / "cells").rglob("*.json")]
    found = {(row["settings"]["arm"], row["settings"]["dial"]): row["figures"] for row in told}
    for figures in found.values():
        assert figures["data"] and figures["tested on"] > 0
        for protocol in t5.PROTOCOLS:
            for name in t5.RANGES:
                mean = (figures[f"ADE {protocol}"] + figures[f"aADE {protocol} {name}"]) / 2
                assert figures[f"cADE {protocol} {name}"] == pytest.approx(mean)
    for strict in (("ours", 0.0), (t5.STRICT, 0.0), (t5.STILL, 0.0)):
        assert found[strict]["eErr 8-12 all"] < 1e-4
    assert found["ours", 0.3]["eErr 8-12 all"] > 1e-2


@pytest.mark.parametrize("scale", SCALES)
def test_cells_are_different_and_can_be_written_down(scale: Scale) -> None:
    cells = t5.cells(scale)
    assert len({cell.key for cell in cells}) == len(cells)
    assert [json.loads(json.dumps(dict(cell.settings))) for cell in cells] == [dict(cell.settings) for cell in cells]


@pytest.mark.parametrize("scale", ("small", "full"))
def test_every_arm_walks_every_scene_with_one_seed_before_there_is_a_second(scale: Scale) -> None:
    settings = [cell.settings for cell in t5.cells(scale)]
    assert [s["seed"] for s in settings] == sorted(s["seed"] for s in settings)
    for seed in range(3):
        found = {(s["arm"], s["dial"], s["scene"]) for s in settings if s["seed"] == seed}
        asked = {
            (arm, dial, scene)
            for arm, dials in t5.STOPS.items()
            for dial in dials
            for scene in SCENES
            if arm != t5.STILL or seed == 0
        }
        assert found == asked


def test_full_is_the_papers_setting() -> None:
    assert (t5.FULL.epochs, t5.FULL.rate, t5.FULL.weight_decay, t5.FULL.keep) == (100, 5e-4, 1e-5, "best")
    assert all(cell.settings["steps"] is None and cell.settings["windows"] is None for cell in t5.cells("full"))
    model = t5.network("Base", 1.0, 0)
    assert (len(model.layers), model.layers[0].heads) == (4, 4)  # type: ignore[arg-type, index, union-attr]


def test_both_protocols_train_on_the_same_steps() -> None:
    windows, model = torch.randn(6, t5.LENGTH, 2).cumsum(1), t5.network("Base", 1.0, 0)
    losses = []
    for past, _ in t5.PROTOCOLS.values():
        part = as_examples(windows, past)
        losses.append(Trajectories(part, part, part, past).loss(model(part.inputs), part.targets))
    torch.testing.assert_close(losses[0], losses[1])


def test_the_papers_softness_keeps_the_same_from_a_half_to_nine_tenths() -> None:
    found = [[weight.soft.gain for weight in soft_weights(t5.papers_network(dial))] for dial in (0.5, 0.7, 0.9)]
    assert found[0] == found[1] == found[2]
    assert found[0] != [weight.soft.gain for weight in soft_weights(t5.papers_network(1.0))]


def test_a_turned_window_is_the_window_turned() -> None:
    x, generator = torch.randn(50, t5.LENGTH, 2), torch.Generator().manual_seed(0)
    inputs, targets = t5.TurnedTracks(t5.turns("30", 0))(x[:, :-1], x, generator)
    torch.testing.assert_close(inputs, targets[:, :-1])
    torch.testing.assert_close(targets.norm(dim=-1), x.norm(dim=-1))
    cosine = (targets * x).sum(-1) / x.square().sum(-1)
    torch.testing.assert_close(cosine.amin(1), cosine.amax(1))  # one angle for all steps of a window
    assert cosine.min() >= torch.cos(torch.tensor(torch.pi / 6)) - 1e-5
    assert cosine[:, 0].unique().numel() > 40


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(SoftEquivError, match="no arm 'theirs'; choose one of Base, ours"):
        t5.network("theirs", 0.0, 0)


def made_up(arm: str, dial: float, cade: float, eerr: float, *, validation: float | None = None) -> list[Row]:
    """Rows of two scenes and two seeds whose mean figures are the given ones."""
    rows = []
    for scene, far in (("eth", 1.5), ("hotel", 0.5)):
        for seed, more in ((0, 0.0), (1, 0.002)):
            figures: dict[str, Any] = {
                "validation cADE": cade if validation is None else validation,
                "recipe": {"epochs": 9, "batch": 8, "rate": 1e-3, "weight_decay": 1e-5},
                "samples": [walked(), walked()] if seed == 0 else None,
                "kept": None,
            }
            for protocol in t5.PROTOCOLS:
                figures |= {f"{name} {protocol}": cade * far for name in ("ADE", "FDE")}
                for name in t5.RANGES:
                    figures |= {f"{key} {protocol} {name}": cade * far + more for key in ("aADE", "aFDE", "cFDE")}
                    figures |= {f"cADE {protocol} {name}": cade * far + more - 0.001}
                    figures |= {f"eErr {protocol} {name}": eerr * far}
            settings = {"arm": arm, "dial": dial, "scene": scene, "seed": seed, "steps": 512, "windows": 8192}
            rows.append(Row(settings, figures, 1.0, "cpu", {"torch": "2", "softequiv": "0"}))
    return rows


def walked() -> dict[str, list[list[float]]]:
    line = [[0.1 * step, 0.0] for step in range(20)]
    return {"past": line[:8], "future": line[8:], "forecast": line[8:]}


def table(ours: Mapping[float, tuple[float, float]]) -> list[Row]:
    rows = [row for dial, (cade, eerr) in ours.items() for row in made_up("ours", dial, cade, eerr)]
    rows += made_up(t5.PLAIN, 1.0, 0.5, 0.4) + made_up(t5.STRICT, 0.0, 0.6, 0.0) + made_up("paper", 0.9, 0.55, 0.3)
    return rows + made_up(t5.TURNED, 1.0, 0.5, 0.2) + made_up(t5.TURNED_ALL, 1.0, 0.5, 0.2)


@pytest.mark.parametrize("holds", (True, False))
def test_claims_follow_from_the_rows(holds: bool) -> None:
    good = {0.0: (0.45, 0.0), 0.3: (0.4, 0.1), 1.0: (0.5, 0.3)}
    bad = {0.0: (0.9, 0.6), 0.3: (0.8, 0.5), 1.0: (0.7, 0.45)}
    claims = t5.claims(t5.over_scenes(table(good if holds else bad)))
    assert len(claims) == 2 * (2 + 1 + 2 + 1) + 2 * (2 + 1 + 1)
    assert {claim.holds for claim in claims} == {holds}
    first = claims[0]
    assert ("softness 0.3" if holds else "softness 1") in first.text
    assert ("0.400 ± 0.001" if holds else "0.700 ± 0.001") in first.evidence and "0.500 ± 0.001 m" in first.evidence


def test_softness_is_chosen_on_validation() -> None:
    rows = made_up("ours", 0.3, 0.1, 0.1, validation=0.9) + made_up("ours", 0.6, 0.2, 0.1, validation=0.8)
    assert t5.best_stop(t5.over_scenes(rows), "ours") == 0.6


def test_an_average_waits_for_all_scenes() -> None:
    rows = made_up("ours", 0.3, 0.4, 0.1)
    averaged = t5.over_scenes([row for row in rows if row["scene"] == "eth" or row["seed"] == 0])
    assert [(row["seed"], round(row["eErr 8-12 30"], 6)) for row in averaged] == [(0, 0.1)]


def test_the_page_names_every_arm_and_draws_the_same_tracks_twice() -> None:
    rows = table({0.0: (0.45, 0.0), 0.3: (0.4, 0.1)})
    page = t5.page(rows, "small")
    for shown in page.tables:
        assert {line[0] for line in shown.rows} >= {row["arm"] for row in rows}
    assert any("the paper's ours" in line for shown in page.tables for line in shown.rows)
    figure = t5.samples_figure(rows)
    svg = drawn(figure)
    assert svg == drawn(figure)
    assert all(name in svg.decode() for name in ("past", "truth", "Base", "ours at 0.3", "EqAuto", "eth", "hotel"))


def test_the_page_counts_the_seeds_that_its_averages_have() -> None:
    rows = table({0.0: (0.45, 0.0), 0.3: (0.4, 0.1)})
    begun = replace(rows[0], settings={**rows[0].settings, "seed": 7})
    seeds = {row["seed"] for row in rows}
    assert f"mean squared error, {len(seeds)} seeds" in t5.page([*rows, begun], "small").sentences[0]


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What torch was asked to record, on a machine that seems to have a GPU."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda *given: asked.append(given))
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return asked


def test_each_call_of_a_step_has_a_graph_of_its_own(graphed: list[tuple[Any, ...]]) -> None:
    model, x = torch.nn.Linear(2, 3).eval(), torch.randn(5, 2)
    expected = model(x)
    recorded(model, x, calls=2)
    [(passes, examples)] = graphed
    assert len(set(passes)) == 2 and all(example is x for (example,) in examples)
    used = []
    for one in passes:
        one.register_forward_hook(lambda module, *_: used.append(module))
    for _ in range(2):
        torch.testing.assert_close([model(x), model(x)], [expected] * 2)
    assert used == [*passes, *passes]
    torch.testing.assert_close(model.eval()(x), expected)
    assert len(used) == 4  # evaluation is not recorded


def test_what_cannot_be_recorded_is_trained_as_before(
    graphed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("it waits for a number")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    model, x = torch.nn.Linear(2, 3), torch.randn(5, 2)
    with pytest.warns(UserWarning, match="no CUDA graph of Linear.*waits for a number"):
        recorded(model, x)
    assert "forward" not in vars(model)


def test_without_a_gpu_nothing_is_recorded(graphed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = torch.nn.Linear(2, 3)
    recorded(model, torch.randn(5, 2))
    assert not graphed and "forward" not in vars(model)
