"""Does a sweep go through its whole grid, once, and say what each cell found?"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

import softequiv as se
from shell import call
from softequiv.adapt.opening import open_model
from softequiv.errors import SoftEquivError
from softequiv.experiments import sweep as swept
from softequiv.experiments.cells import read_row
from softequiv.experiments.sweep import Grid, source, sweep
from softequiv.training import Recipe
from test_cli_training import CLASSES, draw
from zoo import CASES


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    CASES["vit"].model().save_pretrained(root / "vit")
    for number in range(CLASSES):
        for picture in range(4):
            draw(root / "classes" / f"class{number}" / f"{picture}.png", number)
    return root


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of elements take longer to draw than these models to train."""
    monkeypatch.setattr(swept, "POOL", 16)


def test_every_combination_is_a_cell_and_tells_what_its_model_is_certified_for(home: Path, tmp_path: Path) -> None:
    grid = Grid([str(home / "vit")], ["C36", "SO(2)"], softness=[0.0, 1.0], error=[0.1], within="30deg", seeds=2)
    rows = sweep(grid, tmp_path)
    assert len(rows) == 1 * 2 * 3 * 2
    by = {(row["group"], swept.stop(row.settings), row["seed"]): row for row in rows}
    assert len(by) == 12
    plain = by["SO(2)", "softness 1", 0]
    assert plain["kept"] == pytest.approx(1) and plain["certified"] > by["SO(2)", "softness 0", 0]["certified"]
    model = se.soften(open_model(home / "vit"), "SO(2)", error=0.1, within="30deg")
    assert by["SO(2)", "error 0.1 within 30deg", 1]["certified"] == se.certify(model).error <= 0.1 * (1 + 1e-4)
    with (tmp_path / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["certified"]) for line in lines] == [row["certified"] for row in rows]
    assert json.loads((tmp_path / "sweep.json").read_text())["title"] == "Sweep: 12 of 12 cells"
    assert "| vit | SO(2) | error 0.1 within 30deg | 0.1" in (tmp_path / "sweep.md").read_text()


def test_a_trained_cell_is_the_training_of_the_library(home: Path, tmp_path: Path) -> None:
    grid = Grid(
        [str(home / "vit")],
        ["SO(2)"],
        softness=[0.5],
        within="30deg",
        seeds=2,
        data=str(home / "classes"),
        recipe=Recipe(epochs=2, batch=4, rate=0.01),
        turned=True,
    )
    rows = sweep(grid, tmp_path)
    assert [row["seed"] for row in rows] == [0, 1] and all(0 <= row["Acc"] <= 1 and row["test"] == 5 for row in rows)
    assert rows[0].figures != rows[1].figures
    again = swept.work(rows[1].settings)
    assert again == rows[1].figures
    still = swept.work({name: value for name, value in rows[1].settings.items() if name != "turned"})
    assert still != again


def test_pictures_are_measured_where_nothing_is_trained_from_the_shell_too(home: Path, tmp_path: Path) -> None:
    given = ("sweep", home / "vit", "-g", "C4", "-s", 0.2, "-s", 0.9, "-d", home / "classes", "--limit", 8)
    result = call(*given, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["settings"]["softness"] for row in rows] == [0.2, 0.9]
    assert all({"iErr", "certified", "kept"} <= row["figures"].keys() for row in rows)
    shown = call(*given, "-o", tmp_path / "out")
    assert "2 of 2 cells are there already" in shown.stdout and "softness 0.9" in shown.stdout


def test_what_a_folder_holds_is_part_of_a_cell(home: Path, tmp_path: Path) -> None:
    keys = []
    for scale in (1.0, 2.0):
        model = CASES["vit"].model()
        model.classifier.weight.data *= scale
        model.save_pretrained(tmp_path / "vit")  # the same name and size
        keys.append([cell.key for cell in Grid([str(tmp_path / "vit")], ["C4"], softness=[0.5]).cells()])
    assert keys[0] != keys[1]
    assert source("google/vit", whole=True) == {"model": "google/vit"}
    pictures = source(str(home / "classes"), whole=False, name="data")
    draw(home / "classes" / "class0" / "more.png", 1)
    assert source(str(home / "classes"), whole=False, name="data") != pictures
    (home / "classes" / "class0" / "more.png").unlink()


def test_models_of_one_name_are_not_averaged_and_what_is_said_twice_is_one_cell(home: Path, tmp_path: Path) -> None:
    for number, scale in enumerate((1.0, 3.0)):
        model = CASES["vit"].model()
        model.vit.embeddings.position_embeddings.data[..., ::2] *= scale
        model.save_pretrained(tmp_path / f"run{number}" / "model")  # as trainings write them
    models = [str(tmp_path / f"run{number}" / "model") for number in (0, 1, 1)]
    rows = sweep(Grid(models, ["C4", "C(4)"], softness=[0.5, 0.5, 0.5000001]), tmp_path / "out")
    assert len(rows) == len({str(row.settings) for row in rows}) == 2 * 1 * 2
    lines = swept.table(rows).rows
    assert len(lines) == 4 and {line[0] for line in lines} == set(models)


def test_a_name_of_timm_is_no_folder_and_the_home_folder_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source("timm:vit", whole=True) == {"model": "timm:vit"}
    assert source("~/vit", whole=True) == source("vit", whole=True) != {"model": "vit"}


def test_cells_that_fail_are_named_and_the_others_are_told(home: Path, tmp_path: Path) -> None:
    grid = Grid([str(home / "vit"), "./nowhere"], ["C4"], softness=[0.5])
    with pytest.raises(SoftEquivError, match=r"1 of 2 cells failed.*nowhere"):
        sweep(grid, tmp_path)
    assert "# Sweep: 1 of 2 cells" in (tmp_path / "sweep.md").read_text()
    done = [cell for cell in grid.cells() if read_row(tmp_path / "cells", cell)]
    assert len(done) == 1 and replace(grid, models=grid.models[:1]).cells() == done


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("-g", "C4"), 3, "a sweep goes through softness or error, and none was given"),
        (("-g", "C4", "-e", "0.1"), 3, "an error target holds within a range"),
        (("-g", "Q8", "-s", "0.1"), 3, "unknown group"),
        (("-g", "C4", "-s", "0.1", "-w", "wide"), 3, "cannot read the range 'wide'"),
        (("-g", "C4", "-s", "0.1", "--epochs", "1"), 3, "training needs data"),
        (("-g", "C4", "-s", "0.1", "--turned"), 3, "belong to training"),
        (("-g", "C4", "-s", "0.1", "--rate", "1"), 2, "--batch and --rate belong to training"),
        (("-g", "C4", "-s", "0.1", "--on", "moon"), 2, "cells are computed here or on ray; got --on moon"),
        (("-g", "C4", "-s", "0.1", "--address", "auto"), 2, "add --on ray"),
        (("-g", "C4", "-s", "0.1", "--gpus", "1"), 2, "add --on ray"),
        (("-g", "C4", "-s", "0.1", "--on", "ray", "--jobs", "2"), 2, "--jobs are processes here"),
        (("-s", "0.1"), 2, "Missing option"),
    ],
)
def test_a_grid_that_makes_no_sense_is_answered_by_a_sentence(
    arguments: tuple[str, ...], code: int, says: str, home: Path, tmp_path: Path
) -> None:
    result = call("sweep", home / "vit", *arguments, "-o", tmp_path / "out")
    assert result.exit_code == code and says in " ".join(result.stderr.replace("│", " ").split()), result.output
    assert not (tmp_path / "out").exists()
