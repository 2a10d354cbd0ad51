"""Are tracks read as they were walked, gaps and all, and are forecasters judged by the formulas?"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import softequiv as se
from softequiv.actions import Moves, Pictures, Points
from softequiv.baselines.autoregressive import Autoregressive, ConstantVelocity
from softequiv.baselines.eqauto import EqAuto
from softequiv.errors import SoftEquivError
from softequiv.networks.forecaster import Forecaster
from softequiv.tasks.base import Held
from softequiv.tasks.trajectories import (
    SCENES,
    SPLITS,
    Trajectories,
    as_examples,
    read_scene,
    windows_of,
)

Row = tuple[int, int, float, float]


def walk(pedestrian: int, frames: range, speed: float = 0.4) -> list[Row]:
    """A straight walk, whose x tells the frame and whose y tells the pedestrian."""
    return [(frame, pedestrian, speed * frame / 10, float(pedestrian)) for frame in frames]


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two scenes with two walkers in each split, of 6, 7 and 8 steps."""
    for scene in ("square", "street"):
        for split, steps in zip(SPLITS, (6, 7, 8), strict=True):
            rows = walk(1, range(0, 10 * steps, 10)) + walk(2, range(0, 10 * steps, 10))
            write(tmp_path / "walks" / scene / split / "a.txt", rows)
    return tmp_path / "walks"


def zipped(folder: Path, into: Path) -> Path:
    return Path(shutil.make_archive(str(into / "walks"), "zip", folder.parent, folder.name))


# windows


def test_windows_are_successive_positions_of_one_pedestrian(folder: Path) -> None:
    found = read_scene(folder, "square", past=3, future=2)
    assert {split: len(windows) for split, windows in found.items()} == {"train": 4, "val": 6, "test": 8}
    expected = [[0.4 * (start + step), float(walker)] for walker in (1, 2) for start in range(4) for step in range(5)]
    torch.testing.assert_close(found["test"], torch.tensor(expected, dtype=torch.float64).unflatten(0, (8, 5)))


def test_folder_parent_and_zips_of_either_are_read_alike(folder: Path, tmp_path: Path) -> None:
    inner = Path(shutil.make_archive(str(tmp_path / "inner"), "zip", folder))
    expected = read_scene(folder, "street", 3, 2)
    for source in (folder.parent / "walks", str(zipped(folder, tmp_path)), inner):
        found = read_scene(source, "street", 3, 2)
        assert all(torch.equal(found[split], expected[split]) for split in SPLITS)


def slow_windows(rows: list[Row], length: int, step: int, together: int) -> dict[tuple[int, int], list[list[float]]]:
    """By the definition: start where the pedestrian is there at all of the next frames, and enough others are too."""
    place = {(pedestrian, frame): [x, y] for frame, pedestrian, x, y in rows}
    whole = {
        (pedestrian, frame): [place[pedestrian, frame + k * step] for k in range(length)]
        for pedestrian, frame in place
        if all((pedestrian, frame + k * step) in place for k in range(length))
    }
    return {key: window for key, window in whole.items() if sum(key[1] == f for _, f in whole) >= together}


@given(st.data())
def test_windows_never_run_across_a_gap(data: st.DataObject) -> None:
    together, length = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    rows = walk(0, range(0, 400, 10))  # settles the step between frames
    for walker in (1, 2, 3):
        seen = data.draw(st.sets(st.integers(0, 15), max_size=16))
        rows += [(10 * k, walker, k + 0.5, 100.0 * walker) for k in seen]
    shuffled = data.draw(st.permutations(rows))
    found = windows_of(numpy.array(shuffled), length, together=together).tolist()
    expected = slow_windows(rows, length, 10, together)
    assert found == [expected[key] for key in sorted(expected)]


def test_strides_thin_out_each_unbroken_track() -> None:
    rows = numpy.array(walk(1, range(0, 70, 10)) + walk(2, range(200, 240, 10)), dtype=numpy.float64)
    starts = windows_of(rows, 3, stride=2)[:, 0]
    assert starts.tolist() == [[0.0, 1.0], [0.8, 1.0], [1.6, 1.0], [8.0, 2.0]]


# the task


def task_of(windows: Tensor, past: int = 8) -> Trajectories:
    examples = as_examples(windows, past)
    return Trajectories(examples, examples, examples, past)


def test_a_model_that_knows_the_next_position_has_no_loss() -> None:
    windows = torch.randn(4, 20, 2)
    task = task_of(windows)
    inputs, targets = task.train.batch(torch.arange(4))
    assert inputs.shape == (4, 19, 2) and torch.equal(inputs, targets[:, :-1])
    assert torch.equal(targets[:, 7], torch.zeros(4, 2))
    assert task.loss(targets[:, 2:], targets) == 0
    assert Forecaster(16, layers=1)(inputs).shape == targets[:, 2:].shape
    steady = torch.arange(20.0)[None, :, None] * torch.tensor([0.3, -0.2])
    inputs, targets = as_examples(steady, 8).batch(torch.arange(1))
    assert task.loss(ConstantVelocity()(inputs), targets) < 1e-10


def test_figures_are_those_of_the_formulas_with_each_track_turned_by_its_own_angle() -> None:
    torch.manual_seed(1)
    task = task_of(torch.randn(7, 12, 2).cumsum(1), past=7)
    model = Forecaster(16, layers=1).double().requires_grad_(False)
    moves = Moves(task.acts, se.SO(2), se.degrees(30), count=5)
    found = task.figures(model, task.test, moves, batch=3)
    inputs, targets = task.test.batch(torch.arange(7))
    along, final, turned_along, turned_final, difference = [], [], [], [], []
    for i in range(7):
        g = moves.elements[i % 5]
        past, future = inputs[i : i + 1, :7].double(), targets[i, 7:].double()
        plain, moved = model.forecast(past, 5)[0], model.forecast(Points()(past, g), 5)[0]
        along += [float((plain[t] - future[t]).norm()) for t in range(5)]
        turned_along += [float((moved[t] - g.matrix @ future[t]).norm()) for t in range(5)]
        final.append(along[-1])
        turned_final.append(turned_along[-1])
        difference.append(float((moved - plain @ g.matrix.T).norm()))
    expected = {
        "ADE": along,
        "FDE": final,
        "aADE": turned_along,
        "aFDE": turned_final,
        "cADE": along + turned_along,
        "cFDE": final + turned_final,
        "eErr": difference,
    }
    assert found == pytest.approx({name: sum(values) / len(values) for name, values in expected.items()})
    assert found["eErr"] > 0.01 and Trajectories.sign == -1 and Trajectories.score in found


def test_figures_forecast_from_the_past_alone() -> None:
    """Changing the future changes the errors and nothing that the model says."""
    windows = torch.randn(5, 12, 2)
    other = torch.cat([windows[:, :7], torch.randn(5, 5, 2)], 1)
    moves, model = Moves(Points(), se.SO(2), se.degrees(30), count=5), Forecaster(16, layers=1)
    first, second = (task.figures(model, task.test, moves) for task in (task_of(windows, 7), task_of(other, 7)))
    assert first["eErr"] == second["eErr"] and first["ADE"] != second["ADE"]


def test_figures_leave_the_mode_of_the_model() -> None:
    task, model = task_of(torch.randn(3, 12, 2)), Forecaster(16, layers=1)
    task.figures(model, task.test, Moves(Points(), se.SO(2), count=2))
    assert model.training and all(weight.grad is None for weight in model.parameters())


def test_constant_velocity_forecasts_steady_tracks() -> None:
    steady = torch.arange(20.0)[None, :, None] * torch.tensor([0.3, -0.2])
    torch.testing.assert_close(ConstantVelocity().forecast(steady[:, :8], 12), steady[:, 8:])


# bad input


def edited(change: Callable[[Path], object], message: str, folder: Path) -> None:
    change(folder / "square" / "val" / "a.txt")
    with pytest.raises(SoftEquivError, match=message):
        read_scene(folder, "square", 3, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("60\t1\t2.4", r"a\.txt, line 15: a row is four numbers, frame pedestrian x y; got '60 1 2.4'"),
        ("60 1 2.4 1.0 7", "line 15: a row is four numbers"),
        ("60 1 2.4 one", "line 15: a row is four numbers"),
        ("90 1 nan 1.0", "line 15: '90 1 nan 1.0' holds a number that is not finite"),
        ("90 1 2.4 -inf", "line 15: .* not finite"),
        ("30 2 2.4 1.0", "line 15: pedestrian 2 is at frame 30 in line 11 already; keep one"),
        ("90.5 2 2.4 1.0", "line 15: frame and pedestrian are whole numbers; got 90.5 and 2"),
    ],
)
def test_a_broken_row_is_named_with_file_and_line(line: str, message: str, folder: Path) -> None:
    edited(lambda file: file.write_text(file.read_text() + line + "\n"), message, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_text("\n"), r"a\.txt is empty"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "is not a text file"),
        (lambda file: file.unlink(), "val holds no .txt files"),
        (lambda file: write(file, walk(1, range(0, 90, 10))), "no 2 pedestrians in .*val are seen together for 5 succ"),
        (lambda file: write(file, walk(1, range(0, 30, 10))), "no 2 pedestrians in .*val"),
        (lambda file: write(file, walk(1, range(0, 10, 10))), "no 2 pedestrians in .*val"),
        (lambda file: shutil.rmtree(file.parent), "holds no scene 'square'; found street"),
    ],
)
def test_a_broken_folder_is_answered_with_a_sentence(
    change: Callable[[Path], object], message: str, folder: Path
) -> None:
    edited(change, message, folder)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_blank_lines_and_a_byte_order_mark_are_no_rows(mark: str, folder: Path) -> None:
    before = read_scene(folder, "square", 3, 2)["val"]
    file = folder / "square" / "val" / "a.txt"
    file.write_text(mark + "\n" + file.read_text() + "\n  \n", encoding="utf-8")
    assert torch.equal(read_scene(folder, "square", 3, 2)["val"], before)


def test_what_is_no_source_is_answered_with_a_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SoftEquivError, match="holds no scene 'eth'; found square, street"):
        read_scene(folder, "eth")
    with pytest.raises(SoftEquivError, match=r"there is no .*nowhere"):
        read_scene(tmp_path / "nowhere", "eth")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SoftEquivError, match="no folder in it has train, val, test inside"):
        read_scene(tmp_path / "empty", "eth")
    (tmp_path / "no.zip").write_text("no zip")
    with pytest.raises(SoftEquivError, match="cannot be read as a zip"):
        read_scene(tmp_path / "no.zip", "eth")
    whole = zipped(folder, tmp_path).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SoftEquivError, match="cannot be read as a zip"):
        read_scene(tmp_path / "cut.zip", "square")


def test_a_damaged_member_of_a_zip_is_noticed(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as archive:
        for file in sorted(folder.rglob("*.txt")):
            archive.write(file, file.relative_to(folder))
    content = bytearray((tmp_path / "plain.zip").read_bytes())
    place = content.index(b"0\t1\t0.0")
    content[place + 4] = ord("7")
    (tmp_path / "plain.zip").write_bytes(content)
    with pytest.raises(SoftEquivError, match=r"cannot be read as a zip .*CRC"):
        read_scene(tmp_path / "plain.zip", "square", 3, 2)


@pytest.mark.parametrize("name", ["../square/train/a.txt", "/square/train/a.txt", "..\\a.txt"])
def test_a_zip_that_leads_out_of_itself_is_not_trusted(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), "0 1 0.0 0.0")
    with pytest.raises(SoftEquivError, match="leads out of it; do not trust"):
        read_scene(tmp_path / "bad.zip", "square")


@pytest.mark.parametrize("wrong", [{"past": 1}, {"future": 0}, {"stride": 0}, {"together": 0}])
def test_windows_of_nothing_are_refused(wrong: dict[str, int], folder: Path) -> None:
    with pytest.raises(SoftEquivError, match="windows need at least 2 past steps"):
        read_scene(folder, "square", **wrong)


def test_figures_say_what_they_cannot_judge() -> None:
    task = task_of(torch.randn(3, 12, 2))
    with pytest.raises(SoftEquivError, match=r"Linear has no forecast\(past, steps\)"):
        task.figures(nn.Linear(2, 2), task.test, Moves(Points(), se.SO(2), count=2))
    for acts, group in ((Pictures(), se.SO(2)), (Points("mean"), se.SO(2))):
        with pytest.raises(SoftEquivError, match="about their last observed position"):
            task.figures(ConstantVelocity(), task.test, Moves(acts, group, count=2))


# the real tracks


@pytest.fixture(scope="module")
def ethucy() -> Path:
    root = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data"))
    found = next((path for path in (root / "ethucy", root / "ethucy.zip") if path.exists()), None)
    if found is None:
        pytest.skip(f"needs ethucy/ or ethucy.zip in {root}; point SOFTEQUIV_DATA at the data")
    return found


@pytest.fixture(scope="module")
def zara1(ethucy: Path) -> Trajectories:
    return Trajectories.read(ethucy, "zara1", stride=4)


KNOWN = {"eth": (1.00, 2.23), "hotel": (0.32, 0.62), "univ": (0.52, 1.17), "zara1": (0.43, 0.96), "zara2": (0.33, 0.73)}


@pytest.mark.parametrize("scene", SCENES)
def test_constant_velocity_has_its_known_errors(scene: str, ethucy: Path) -> None:
    windows = read_scene(ethucy, scene)["test"]
    errors = (ConstantVelocity().forecast(windows[:, :8], 12) - windows[:, 8:]).norm(dim=-1)
    assert (round(float(errors.mean()), 2), round(float(errors[:, -1].mean()), 2)) == KNOWN[scene]


def learnt(model: Autoregressive, task: Trajectories, steps: int, rate: float = 3e-3) -> Autoregressive:
    """Adam with a rate that falls to zero."""
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        inputs, targets = task.train.batch(torch.randint(len(task.train), (128,), generator=generator))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return model


MODELS: dict[str, Callable[[], Autoregressive]] = {
    "plain": lambda: Forecaster(32, layers=2),
    "EqAuto": lambda: EqAuto(width=32, layers=2),
    "softness 0": lambda: Forecaster(32, layers=2, group=se.SO(2)),
    "softness .5": lambda: Forecaster(32, layers=2, group=se.SO(2), gain=se.softness(0.5)),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_a_few_dozen_steps_come_near_to_constant_velocity(name: str, zara1: Trajectories) -> None:
    assert isinstance(zara1.test, Held)
    some = zara1.test.part(torch.arange(0, len(zara1.test), 3))
    moves = Moves(zara1.acts, se.SO(2), se.degrees(30), count=64)
    torch.manual_seed(0)
    model, steady = MODELS[name](), zara1.figures(ConstantVelocity(), some, moves)
    before = zara1.figures(model, some, moves)
    after = zara1.figures(learnt(model, zara1, 60), some, moves)
    assert after["ADE"] < 0.7 * before["ADE"] and after["ADE"] < 1.4 * steady["ADE"]
    strict = name in ("EqAuto", "softness 0")
    assert (after["eErr"] < 1e-4) == strict == (abs(after["aADE"] / after["ADE"] - 1) < 1e-4)
