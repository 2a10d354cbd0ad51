"""How is a table filled? Cell by cell: each is one training with its settings and seed, and a file once it is done.

A run that is interrupted goes on with the cells that have no file; who computes them, this process, others beside it or
a cluster, is a runner's matter.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from softequiv._files import made_folder, read_json, written_whole
from softequiv.certify.certificate import counted, versions
from softequiv.errors import MissingDataError, SoftEquivError
from softequiv.experiments.watched import watched

FORMAT = 1  # raised when a cell of the same settings would mean something else; other random draws do not
CAUSES = 3  # how many causes of failed cells are told

Settings = Mapping[str, Any]
Figures = dict[str, Any]
Work = Callable[[Settings], Figures]
Told = dict[str, Any]  # what a computed cell says, as JSON can hold it


@dataclass(frozen=True)
class Cell:
    """One entry of a table: an arm with its settings, and the seed. Settings are what JSON can hold.

    >>> Cell("T1", {"arm": "ours", "softness": 0.5, "seed": 0}).name
    'arm=ours softness=0.5 seed=0'
    """

    experiment: str
    settings: Settings = field(hash=False)

    @property
    def name(self) -> str:
        """The settings as one reads them."""
        return told_of(self.settings)

    @property
    def key(self) -> str:
        """A hash of everything that decides the figures."""
        told = {"format": FORMAT, "experiment": self.experiment, "settings": dict(self.settings)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def told_of(settings: Settings) -> str:
    """Settings as one reads them."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


@dataclass(frozen=True)
class Row:
    """A finished cell: its settings, its figures, and what computed them."""

    settings: Settings
    figures: Figures
    seconds: float
    device: str
    versions: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        for part in (self.figures, self.settings):
            if name in part:
                return part[name]
        raise LackingError(self, name)


class LackingError(SoftEquivError):
    """A row without a figure that is asked for."""

    def __init__(self, row: Row, name: str) -> None:
        super().__init__(f"the cell {told_of(row.settings)} has no figure {name!r}, which its page needs")
        self.row = row


class Runner(Protocol):
    """Who computes cells: called with them, it gives each as it ends, with what went wrong, if anything did."""

    def __call__(self, cells: Sequence[Cell], work: Work, folder: Path) -> Iterator[tuple[Cell, str]]: ...

    def standing(self) -> str | None:
        """Who is at work now, in a few words; None where the cells run in this process and show their own progress."""


def run_cells(cells: Sequence[Cell], work: Work, folder: Path, *, runner: Runner | None = None) -> list[Row]:
    """All rows, in the order of the cells: read where there is a file, computed by `work(settings)` where not.

    `work` is a function of a module, which processes can import; the runner is by default this machine, one
    cell after another. A cell that fails does not stop the others, and what went wrong is told at the end; but where
    the first one does not find its data, no other is tried.
    """
    made_folder(folder)
    waiting = [cell for cell in cells if read_row(folder, cell) is None]
    if done := len(cells) - len(waiting):
        print(f"{done} of {len(cells)} cells are there already", flush=True)
    chosen = runner or Here()
    failed: list[tuple[Cell, str]] = []
    with watched(len(waiting), chosen.standing) as tell:
        for number, (cell, problem) in enumerate(chosen(waiting, work, folder)):
            kind, _, sentence = problem.partition(": ")
            if number == 0 and kind == MissingDataError.__name__:  # errors of other processes come back as text
                raise MissingDataError(f"{sentence}; none of {len(waiting)} cells was computed")
            tell(cell.name, problem)
            if problem:
                failed.append((cell, problem))
    if failed:
        kept = "; the others are kept" if len(failed) < len(cells) else ""
        whole = f" All of it is in {folder}/*.error.txt" if any(folder.glob("*.error.txt")) else ""
        raise SoftEquivError(f"{len(failed)} of {len(cells)} cells failed{kept}. {causes(failed)}{whole}")
    return rows_there(cells, folder)


def causes(failed: Sequence[tuple[Cell, str]]) -> str:
    """What went wrong, each cause once with the first of its cells, the most frequent first, and a few of them.

    >>> causes([(Cell("X", {"seed": seed}), "no data") for seed in range(3)])
    'seed=0: no data (and 2 more cells alike).'
    """
    struck: dict[str, list[Cell]] = {}
    for cell, problem in failed:
        struck.setdefault(problem, []).append(cell)
    often = sorted(struck.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{first.name}: {problem}" + (f" (and {counted(len(others), 'more cell')} alike)" if others else "")
        for problem, (first, *others) in often[:CAUSES]
    ]
    more = [counted(len(often) - CAUSES, "more cause")] if len(often) > CAUSES else []
    return "; ".join([*lines, *more]) + "."


@dataclass(frozen=True)
class Here:
    """The runner on this machine: one cell after another, or `jobs` of them side by side in processes of their own."""

    jobs: int = 1

    def __call__(self, cells: Sequence[Cell], work: Work, folder: Path) -> Iterator[tuple[Cell, str]]:
        if self.jobs == 1:
            for cell in cells:
                yield cell, compute(cell, work, folder)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.jobs, mp_context=context, initializer=alone) as pool:
            futures: dict[Future[str], Cell] = {pool.submit(compute, cell, work, folder): cell for cell in cells}
            try:
                for future in as_completed(futures):
                    try:
                        yield futures[future], future.result()
                    except BrokenProcessPool:
                        yield futures[future], "its process died, perhaps for want of memory; run again with fewer jobs"
            finally:
                pool.shutdown(cancel_futures=True)  # where nobody asks for the others

    def standing(self) -> str | None:
        """How many processes there are."""
        return f"{self.jobs} processes here" if self.jobs > 1 else None


def alone() -> None:
    """Processes side by side have one thread each; an interruption ends them, and not their cell alone, and they do not
    outlive the process that started them."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def compute(cell: Cell, work: Work, folder: Path) -> str:
    """Compute one cell and write its file; what went wrong, as one line."""
    return keep(cell, computed(cell, work), folder)


def computed(cell: Cell, work: Work) -> Told:
    """What the file of a cell will hold, or how it failed."""
    began = time.perf_counter()
    try:
        figures = work(cell.settings)
    except Exception as problem:  # any: one cell must not take the others with it
        line = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
        return {"problem": line, "traceback": traceback.format_exc()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "experiment": cell.experiment,
        "settings": dict(cell.settings),
        "figures": figures,
        "seconds": round(time.perf_counter() - began, 2),
        "device": device,
        "versions": versions(),
    }


def keep(cell: Cell, told: Told, folder: Path) -> str:
    """Write a cell's file, or that of its failure; what went wrong, as one line."""
    if "problem" in told:
        with written_whole(folder / f"{cell.key}.error.txt") as part:
            part.write_text(told["traceback"], encoding="utf-8")
        return str(told["problem"])
    with written_whole(file_of(folder, cell)) as part:
        part.write_text(json.dumps(told, indent=1))
    (folder / f"{cell.key}.error.txt").unlink(missing_ok=True)  # of an earlier try
    return ""


def take_up(page: Path, cells: Sequence[Cell], folder: Path) -> None:
    """Write the files of cells that are not there and whose rows a page's JSON holds, whole: what was published
    without its cells is not computed again.
    """
    try:
        rows = json.loads(page.read_text(encoding="utf-8"))["rows"]
        known = {Cell(cells[0].experiment, row["settings"]).key: row for row in rows if "left out" not in row}
    except (OSError, ValueError, KeyError, TypeError):
        return
    for cell in cells:
        row = known.get(cell.key, {})
        if {"figures", "versions"} <= row.keys() and read_row(folder, cell) is None:
            keep(cell, {"experiment": cell.experiment, **row}, folder)


def rows_there(cells: Sequence[Cell], folder: Path) -> list[Row]:
    """The rows of the cells that have a file, in the order of the cells."""
    rows = [read_row(folder, cell) for cell in cells]
    return [row for row in rows if row is not None]


def read_row(folder: Path, cell: Cell) -> Row | None:
    """The row of a cell, if its file is there and whole."""
    try:
        told = read_json(file_of(folder, cell).read_text(encoding="utf-8"))
        row = Row(told["settings"], told["figures"], float(told["seconds"]), told["device"], told["versions"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    mappings = all(isinstance(part, dict) for part in (row.settings, row.figures, row.versions))
    return row if mappings and row.figures and row.versions else None


def file_of(folder: Path, cell: Cell) -> Path:
    """Where a computed cell is kept."""
    return folder / f"{cell.key}.json"
