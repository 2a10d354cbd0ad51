"""Where will people walk? Tracks of ETH/UCY cut into windows, learnt step by step and judged by free forecasts.

On disk a scene is a folder SCENE/{train,val,test} of text files with rows `frame pedestrian x y` in metres, 0.4 s
apart; the other scenes are what SCENE/train and SCENE/val hold. The folder of scenes may stay inside its zip.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy
import numpy.typing
import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv._files import path_of
from softequiv.actions import Moves, Points
from softequiv.asking.answers import at_home, evaluating
from softequiv.errors import SoftEquivError
from softequiv.tasks.archives import check_unpacked
from softequiv.tasks.base import Examples, Held, Task

SCENES = ("eth", "hotel", "univ", "zara1", "zara2")
SPLITS = ("train", "val", "test")
DEEPEST = 20  # folders inside a zip
FARTHEST = 1e7  # metres: no walk on Earth leads farther, and squares of it are exact enough

Array = numpy.typing.NDArray[numpy.float64]
Folder = Path | zipfile.Path


@dataclass(frozen=True)
class Trajectories(Task):
    """Forecast `future` steps from `past` ones.

    Windows are positions relative to the last observed one. Inputs are a window without its last step, (N, past +
    future - 1, d), targets the whole window: a model that answers with the position after its second, third, ... one,
    as `Autoregressive` does, learns every step from the true ones before it. Figures are of `model.forecast(past,
    future)`, which sees the past alone.
    """

    past: int = 8

    acts: ClassVar[Points] = Points()
    score: ClassVar[str] = "cADE"
    sign: ClassVar[int] = -1

    @classmethod
    def read(
        cls, source: str | Path, scene: str, past: int = 8, future: int = 12, stride: int = 1, together: int = 2
    ) -> Trajectories:
        """The windows of a scene left out, as `read_scene` finds them."""
        windows = read_scene(source, scene, past, future, stride, together)
        train, validation, test = (as_examples(windows[split], past) for split in SPLITS)
        return cls(train, validation, test, past)

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error of the next positions: answers (N, L - 2, d), targets (N, L, d)."""
        return functional.mse_loss(answers, targets[:, 2:])

    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        """ADE, FDE, aADE, aFDE, cADE, cFDE and eErr of free forecasts, in metres, as `TrajectoryMetrics` has them."""
        from softequiv.measure.metrics import TrajectoryMetrics  # needs torchmetrics

        forecast = getattr(model, "forecast", None)
        if forecast is None:
            raise SoftEquivError(
                f"{type(model).__name__} has no forecast(past, steps) to run freely; derive it from Autoregressive"
            )
        if moves.acts != self.acts or not moves.group.orthogonal:
            raise SoftEquivError(
                f"tracks turn as {self.acts} about their last observed position, by a group that keeps distances; got "
                f"{moves.acts} under {moves.group}"
            )
        metrics, back, seen = TrajectoryMetrics(), moves.inverse(), 0
        with evaluating(model):
            for inputs, targets in examples.batches(batch):
                x = at_home(model, inputs)[:, : self.past]
                future, chosen = targets[:, self.past :].to(x), moves.cycle(seen, len(x))
                plain, moved = (forecast(past, future.shape[1]) for past in (x, moves(x, chosen)))
                # moved back, as each track has its own g: ||F(g x) - g y|| = ||g^-1 F(g x) - y||
                metrics.to(x.device).update(plain, back(moved, chosen), future, moves.group.identity)
                seen += len(x)
        return {name: value.item() for name, value in metrics.compute().items()}


def as_examples(windows: Tensor, past: int) -> Held:
    """Windows (N, L, d) as inputs (N, L - 1, d) and targets (N, L, d), relative to their last observed position.

    >>> as_examples(torch.zeros(3, 20, 2), past=8).inputs.shape
    torch.Size([3, 19, 2])
    """
    windows = (windows - windows[:, past - 1 : past]).float()
    return Held(windows[:, :-1].contiguous(), windows)


def read_scene(
    source: str | Path, scene: str, past: int = 8, future: int = 12, stride: int = 1, together: int = 2
) -> dict[str, Tensor]:
    """Windows of `past + future` positions in metres, {"train", "val", "test"} to (N, past + future, 2) float64.

    A window is one pedestrian at successive steps of a file: none runs across a gap in which that pedestrian was not
    seen.

    Args:
        source: the folder that holds the scenes, its parent, or the zip of either.
        stride: steps between the starts of windows of one unbroken track.
        together: windows count where so many pedestrians have one that starts at that frame; published figures are of
            2, and 1 takes all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for split in SPLITS:
    ...         (Path(folder) / "eth" / split).mkdir(parents=True)
    ...         rows = "\\n".join(f"{10 * step} 1 {0.5 * step} 2.0" for step in range(20))
    ...         _ = (Path(folder) / "eth" / split / "walk.txt").write_text(rows)
    ...     read_scene(folder, "eth", together=1)["test"].shape
    torch.Size([1, 20, 2])
    """
    whole = all(type(number) is int for number in (past, future, stride, together))
    if not whole or past < 2 or min(future, stride, together) < 1:
        raise SoftEquivError(
            f"windows need at least 2 past steps, 1 future step, a stride of 1 and 1 pedestrian together, all "
            f"whole; got past={past}, future={future}, stride={stride}, together={together}"
        )
    with _opened(path_of(source)) as folder:
        scenes = _scenes(folder)
        if scene not in scenes:
            found = (
                f"found {', '.join(sorted(scenes))}" if scenes else f"no folder in it has {', '.join(SPLITS)} inside"
            )
            raise SoftEquivError(f"{source} holds no scene {scene!r}; {found}")
        return {split: _windows(scenes[scene] / split, past + future, stride, together) for split in SPLITS}


@contextmanager
def _opened(source: Path) -> Iterator[Folder]:
    """A folder, or a zip that is read as one."""
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise SoftEquivError(f"there is no {source}; give the folder of ETH/UCY scenes, or their zip")
    try:
        with zipfile.ZipFile(source) as archive:
            check_unpacked((member.file_size for member in archive.infolist()), source)
            for name in archive.namelist():
                if name.count("/") > DEEPEST:
                    raise SoftEquivError(
                        f"{source} holds a file {name.count('/')} folders down; do not trust this file"
                    )
                if name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts:
                    raise SoftEquivError(f"{source} holds {name!r}, which leads out of it; do not trust this file")
            yield zipfile.Path(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as problem:
        raise SoftEquivError(f"{source} cannot be read as a zip ({problem}); copy it again") from problem


def _scenes(folder: Folder) -> dict[str, Folder]:
    """The scenes in a folder, or one folder further down."""
    inner = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: entry.name)
    scenes = {entry.name: entry for entry in inner if all((entry / split).is_dir() for split in SPLITS)}
    if scenes or len(inner) != 1:
        return scenes
    return _scenes(inner[0])


def _windows(folder: Folder, length: int, stride: int, together: int) -> Tensor:
    """The windows of all files of a split, in the order of file names, pedestrians and frames."""
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    if not files:
        raise SoftEquivError(f"{folder} holds no .txt files; a scene has some in each of {', '.join(SPLITS)}")
    windows = numpy.concatenate([windows_of(read_rows(file), length, stride, together) for file in files])
    if not len(windows):
        raise SoftEquivError(
            f"no {together} pedestrians in {folder} are seen together for {length} successive steps; ask for fewer"
        )
    return torch.from_numpy(windows)


def windows_of(rows: Array, length: int, stride: int = 1, together: int = 1) -> Array:
    """Runs of `length` successive rows of one pedestrian, as in `read_scene`: (R, 4) rows to (N, length, 2) positions.

    Successive rows lie as many frames apart as most neighbouring rows of pedestrians do.

    >>> rows = numpy.array([[frame, 1, frame, 0] for frame in (0, 10, 20, 40, 50)])  # 30 is missing
    >>> windows_of(rows, 2)[:, :, 0].tolist()
    [[0, 10], [10, 20], [40, 50]]
    """
    rows = rows[numpy.lexsort((rows[:, 0], rows[:, 1]))]
    steps, same = numpy.diff(rows[:, 0]), numpy.diff(rows[:, 1]) == 0
    sizes, counts = numpy.unique(steps[same], return_counts=True)
    if not len(sizes) or len(rows) < length:
        return numpy.empty((0, length, 2))
    goes_on = same & (steps == sizes[counts.argmax()])
    first = numpy.flatnonzero(numpy.concatenate([[True], ~goes_on]))  # where runs begin
    sizes_of_runs = numpy.diff(numpy.append(first, len(rows)))
    within = numpy.arange(len(rows)) - numpy.repeat(first, sizes_of_runs)  # place in its run
    left = numpy.repeat(sizes_of_runs, sizes_of_runs) - within  # rows from here to the end of the run
    starts = numpy.flatnonzero(left >= length)
    _, frame, company = numpy.unique(rows[starts, 0], return_inverse=True, return_counts=True)
    starts = starts[(company[frame] >= together) & (within[starts] % stride == 0)]
    return rows[starts[:, None] + numpy.arange(length), 2:]


def read_rows(file: Folder) -> Array:
    """The rows `frame pedestrian x y` of a file, (R, 4) float64; what is wrong with one is said with its line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "walk.txt").write_text("0 1 0.0 2.0")
    ...     read_rows(Path(folder) / "walk.txt")
    array([[0., 1., 0., 2.]])
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # as some editors of tables write
    except UnicodeDecodeError as problem:
        raise SoftEquivError(f"{file} is not a text file ({problem}); copy it again") from problem
    seen: dict[tuple[float, float], int] = {}
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line.split(), f"{file}, line {number}")
        before = seen.setdefault((row[0], row[1]), number)
        if before != number:
            raise SoftEquivError(
                f"{file}, line {number}: pedestrian {row[1]:g} is at frame {row[0]:g} in line {before} already; "
                "keep one"
            )
        rows.append(row)
    if not rows:
        raise SoftEquivError(f"{file} is empty; copy it again, or take it away")
    return numpy.array(rows)


def _row(words: Sequence[str], place: str) -> list[float]:
    try:
        row = [float(word) for word in words]
    except ValueError:
        row = []
    if len(row) != 4:
        raise SoftEquivError(f"{place}: a row is four numbers, frame pedestrian x y; got {' '.join(words)!r}")
    if not all(map(numpy.isfinite, row)):
        raise SoftEquivError(
            f"{place}: {' '.join(words)!r} holds a number that is not finite; correct or remove the row"
        )
    if max(abs(row[2]), abs(row[3])) > FARTHEST:
        raise SoftEquivError(
            f"{place}: {words[2]} {words[3]} lies beyond {FARTHEST:g} metres; give positions in metres"
        )
    if not (row[0].is_integer() and row[1].is_integer()):
        raise SoftEquivError(f"{place}: frame and pedestrian are whole numbers; got {words[0]} and {words[1]}")
    return row
