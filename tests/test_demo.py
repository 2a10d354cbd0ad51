"""Does the demo run end to end, take up what it has finished, and leave nothing half written?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import softequiv as se
from softequiv.experiments import demo
from softequiv.measure.measurement import Row

SMALL = demo.Setup(start_steps=3, finish_steps=2, levels=(0.0, 1.0), errors=(0.3,), tested=16, width=16, depth=1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that cost next to nothing."""
    monkeypatch.setattr(demo, "QUICK", SMALL)


def trained_names(text: str) -> list[str]:
    return [
        line.split("] ")[1].split(":")[0] for line in text.splitlines() if line.startswith("[") and " steps" in line
    ]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_quick_demo_runs_and_a_second_run_reuses_its_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = demo.run(tmp_path / "demo", quick=True)
    first = capsys.readouterr().out
    assert page == tmp_path / "demo" / "report.html" and page.stat().st_size < 5_000_000
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    names = [result["name"] for result in results["results"]]
    assert names == [
        "plain",
        "softness 0.5",
        "softness 0",
        "error 0.3",
        "augmented",
        "augmented, error 0.3",
        "held 0.05",
        "typed, softness 0",
    ]
    assert trained_names(first) == ["start", "augmented start", "typed start", *names]
    for result in results["results"]:
        assert f"{100 * result['measured']['accuracy moved']['value']:.1f}%" in first
        assert f"{result['certified']:.2f}" in first
    assert {key for key in results} >= {"setup", "seed", "versions", "data", "seconds", "findings"}
    by_name = {result["name"]: result for result in results["results"]}
    assert by_name["softness 0"]["certified"] < 1e-6
    assert by_name["error 0.3"]["certified"] == pytest.approx(0.3, abs=1e-4)
    for strict in (by_name["softness 0"], by_name["typed, softness 0"]):
        assert strict["measured"]["accuracy"]["value"] == strict["quarter turn"]["value"]
        assert strict["certified"] < 1e-6

    demo.run(tmp_path / "demo", quick=True)
    second = capsys.readouterr().out
    assert trained_names(second) == [] and second.count(": reused") == 3 + len(names)
    again = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert again["results"] == results["results"]


@pytest.mark.usefixtures("small")
def test_an_interrupted_run_leaves_nothing_half_written_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = demo.train, torch.get_num_threads()

    def interrupted(model: Any, cell: demo.Cell, *rest: Any) -> None:
        if cell.name == "softness 0":
            raise KeyboardInterrupt
        real(model, cell, *rest)

    monkeypatch.setattr(demo, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path, quick=True)
    assert [path.suffix for path in files_in(tmp_path)] == [".safetensors"] * 4  # three starts and the plain model
    assert torch.get_num_threads() == threads

    capsys.readouterr()
    monkeypatch.setattr(demo, "train", real)
    demo.run(tmp_path, quick=True)
    assert trained_names(capsys.readouterr().out)[0] == "softness 0"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("target", ["softequiv.experiments.demo.save_file", "os.replace"])
def test_an_interruption_while_writing_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def stopped(*arguments: Any, **_: Any) -> None:
        if target != "os.replace":
            Path(arguments[1]).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, stopped)
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path, quick=True)
    assert files_in(tmp_path) == []


@pytest.mark.usefixtures("small")
def test_a_damaged_cell_is_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(tmp_path, quick=True)
    damaged = files_in(tmp_path / "cells")[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    capsys.readouterr()
    demo.run(tmp_path, quick=True)
    out = capsys.readouterr().out
    assert "is trained again" in out and len(trained_names(out)) == 1


def test_cells_are_told_apart_by_everything_that_decides_their_weights() -> None:
    setup = demo.Setup()
    every = demo.cells(setup)
    keys = {cell.key(setup) for cell in every}
    assert len(keys) == len(every)
    assert every[0].key(setup) != every[0].key(demo.Setup(seed=1))
    assert every[0].key(setup) == every[0].key(demo.Setup(tested=1))  # measuring less is no reason to train again


def test_every_model_takes_the_same_number_of_steps() -> None:
    setup = demo.Setup()
    for cell in demo.cells(setup):
        assert cell.start is not None and cell.start.start is None
        assert cell.steps + cell.start.steps == setup.start_steps + setup.finish_steps
        assert cell.augmented == cell.start.augmented


def row(value: float, spread: float) -> Row:
    return Row("accuracy", value, value - spread, value + spread, 100, "")


def test_overlapping_intervals_decide_nothing() -> None:
    assert demo.verdict(row(0.9, 0.01), row(0.8, 0.01), larger_is_better=True) == "better"
    assert demo.verdict(row(0.9, 0.01), row(0.8, 0.01), larger_is_better=False) == "worse"
    assert demo.verdict(row(0.9, 0.06), row(0.8, 0.06), larger_is_better=True) == "no clear difference"


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(se.SoftEquivError, match=r"needs scikit-learn: pip install 'softequiv\[demo\]'"):
        demo.run(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_without_rich_the_table_is_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "rich" else object())
    demo.run(tmp_path, quick=True)
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model"))
    assert head.split() == ["model", "certified", "upright", "turned", "quarter", "iErr", "change"]
