"""How is a table filled? Cell by cell: each is one training with its settings and seed, and a file once it is done.

A run that is interrupted goes on with the cells that have no file; cells run side by side in processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from softequiv._files import written_whole
from softequiv.certify.certificate import versions
from softequiv.errors import SoftEquivError

FORMAT = 1  # raised when a cell of the same settings would come out otherwise

Settings = Mapping[str, Any]
Figures = dict[str, Any]
Work = Callable[[Settings], Figures]


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
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def key(self) -> str:
        """A hash of everything that decides the figures."""
        told = {"format": FORMAT, "experiment": self.experiment, "settings": dict(self.settings)}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Row:
    """A finished cell: its settings, its figures, and what computed them."""

    settings: Settings
    figures: Figures
    seconds: float
    device: str
    versions: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.figures[name] if name in self.figures else self.settings[name]


def run_cells(cells: Sequence[Cell], work: Work, folder: Path, *, jobs: int = 1) -> list[Row]:
    """All rows, in the order of the cells: read where there is a file, computed by `work(settings)` where not.

    `work` is a function of a module, which processes can import. A cell that fails does not stop the others; those
    that failed are named at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [cell for cell in cells if read_row(folder, cell) is None]
    if done := len(cells) - len(waiting):
        print(f"{done} of {len(cells)} cells are there already", flush=True)
    failed: list[str] = []
    began = time.perf_counter()
    for number, (cell, problem) in enumerate(finished(waiting, work, folder, jobs), 1):
        spent = time.perf_counter() - began
        left = spent / number * (len(waiting) - number)
        print(f"[{number}/{len(waiting)}] {cell.name}: {problem or 'done'}; about {left:.0f} s left", flush=True)
        if problem:
            failed.append(f"{cell.name}: {problem}")
    if failed:
        raise SoftEquivError(f"{len(failed)} of {len(cells)} cells failed; the others are kept. " + "; ".join(failed))
    rows = [read_row(folder, cell) for cell in cells]
    return [row for row in rows if row is not None]


def finished(cells: Sequence[Cell], work: Work, folder: Path, jobs: int) -> Iterator[tuple[Cell, str]]:
    """Each cell as it ends, with what went wrong, if anything did."""
    if jobs == 1:
        for cell in cells:
            yield cell, compute(cell, work, folder)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=alone) as pool:
        futures: dict[Future[str], Cell] = {pool.submit(compute, cell, work, folder): cell for cell in cells}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], "its process died, perhaps for want of memory; run again with fewer jobs"


def alone() -> None:
    """Processes side by side have one thread each; an interruption ends them, and not their cell alone."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def compute(cell: Cell, work: Work, folder: Path) -> str:
    """Fill one cell and write its file; what went wrong, as one line."""
    began = time.perf_counter()
    try:
        figures = work(cell.settings)
    except Exception as problem:  # any: one cell must not take the others with it
        with written_whole(folder / f"{cell.key}.error.txt") as part:
            part.write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    told = {
        "experiment": cell.experiment,
        "settings": dict(cell.settings),
        "figures": figures,
        "seconds": round(time.perf_counter() - began, 2),
        "device": device,
        "versions": versions(),
    }
    with written_whole(folder / f"{cell.key}.json") as part:
        part.write_text(json.dumps(told, indent=1))
    return ""


def read_row(folder: Path, cell: Cell) -> Row | None:
    """The row of a cell, if its file is there and whole."""
    try:
        told = json.loads((folder / f"{cell.key}.json").read_text(encoding="utf-8"))
        return Row(told["settings"], told["figures"], told["seconds"], told["device"], told["versions"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
