"""What is an experiment? The cells of a table at each scale, the work of one cell, and the page made from all rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from softequiv._files import made_folder
from softequiv.errors import MissingDataError, SoftEquivError
from softequiv.experiments.cells import Cell, LackingError, Row, Runner, Work, file_of, rows_there, run_cells, take_up
from softequiv.experiments.pages import Page, rounded, write_page

Scale = Literal["smoke", "small", "full"]
DATA = "SOFTEQUIV_DATA"


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper: `cells(scale)`, `work(settings)` and `page(rows, scale)`."""

    name: str
    title: str
    cells: Callable[[Scale], list[Cell]]
    work: Work
    page: Callable[[Sequence[Row], Scale], Page]


def reproduce(
    experiment: Experiment,
    scale: Scale = "small",
    *,
    out: Path = Path("results"),
    runner: Runner | None = None,
    unfinished: bool = False,
) -> Path:
    """Fill every cell that is not there, then write the page; the path of the page.

    `smoke` takes seconds and means nothing, `small` is what a workstation does on real data, `full` is the paper's own
    setting. Cells are kept in `out/cells` and used again, as are the rows of an earlier page; the runner computes those
    that are missing, by default this machine, one after another. An `unfinished` page computes none, and says how many
    are missing.
    """
    if scale not in get_args(Scale):
        raise SoftEquivError(f"the scales are {', '.join(get_args(Scale))}; got {scale!r}")
    cells = experiment.cells(scale)
    kept = made_folder(out / "cells" / f"{cells[0].experiment}-{scale}")  # a figure may show the cells of a table
    pages = [out / f"{name}-{scale}.json" for name in dict.fromkeys((cells[0].experiment, experiment.name))]
    for earlier in pages:  # a page may hold cells that its table's does not
        take_up(earlier, cells, kept)
    found = rows_there(cells, kept) if unfinished else run_cells(cells, experiment.work, kept, runner=runner)
    rows = [rounded(row) for row in found]  # so that a page made again from what it published is the same
    if not rows:
        raise SoftEquivError(f"no cell of {cells[0].experiment} is in {kept} to make a page of; compute some first")
    try:
        page = experiment.page(rows, scale)
    except LackingError as problem:
        file = file_of(kept, Cell(cells[0].experiment, problem.row.settings))
        holding = " and ".join(str(place) for place in (*filter(Path.is_file, pages), file))  # pages are taken up again
        raise SoftEquivError(f"{problem}; remove {holding} to compute it again, the others are kept") from problem
    if len(rows) < len(cells):
        missing = f"**Unfinished**: {len(rows)} of {len(cells)} cells are computed; all below is based on these alone."
        page = replace(page, sentences=[missing, *page.sentences])
    return write_page(page, rows, out, f"{experiment.name}-{scale}")


def data_root() -> Path:
    """Where all data lie."""
    return Path(os.environ.get(DATA, "../shared/data"))


def data_folder(name: str) -> Path:
    """Where the data of an experiment lies: a folder or file below SOFTEQUIV_DATA, or below ../shared/data."""
    root = data_root()
    if not (root / name).exists():
        raise MissingDataError(
            f"{root / name} is not there; set the environment variable {DATA} to the folder that holds {name}"
        )
    return root / name
