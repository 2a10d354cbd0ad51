"""The commands that run experiments: the tables of the paper, and speed on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from rich.console import RenderableType
from rich.text import Text

from softequiv.cli import options, tables
from softequiv.cli.app import Answer, command

if TYPE_CHECKING:
    from softequiv.experiments.cells import Runner


@command("softequiv reproduce T1 --scale smoke --out results")
def reproduce_command(
    name: options.ExperimentName = None,
    scale: options.ScaleName = "small",
    out: options.Results = Path("results"),
    jobs: options.Jobs = 1,
    on: options.On = "here",
    address: options.Address = None,
    cpus: options.CellCPUs = 1.0,
    gpus: options.CellGPUs = 0.0,
    retries: options.Retries = 3,
    unfinished: options.Unfinished = False,
    shown: options.ExperimentList = False,
) -> Answer:
    """Reproduce a table or figure of the paper.

    Compute its cells, each one training or measurement, and write a page with our figures beside the paper's. Finished
    cells are reused, so that an interrupted run resumes. With --on ray, a cluster computes the cells.
    """
    from softequiv.experiments.base import Scale, reproduce
    from softequiv.experiments.registry import experiment, names

    if shown:
        titles = {known: experiment(known).title for known in names()}
        return Answer({"experiments": titles}, (tables.table(("name", "what"), titles.items()),))
    if name is None:
        raise typer.BadParameter(f"say which: {', '.join(names())}; --list tells what they are")
    runner = runner_of(on, jobs, address, cpus, gpus, retries)
    chosen = experiment(name)
    page = reproduce(chosen, cast(Scale, scale), out=out, runner=runner, unfinished=unfinished)
    return Answer(
        {"experiment": chosen.name, "scale": scale, "page": str(page)}, (Text(f"{chosen.title}: written to {page}"),)
    )


@command("softequiv bench")
def bench_command(compiled: options.Compiled = False) -> Answer:
    """Time softequiv against alternatives on this machine.

    Print ratios of times taken in one run, which takes some minutes; keep the machine otherwise idle.
    """
    from softequiv.experiments import bench

    parts = []
    for title, measure in bench.parts(compiled).items():
        print(f"{title} ...", file=sys.stderr, flush=True)
        parts.append(measure())
    shown: list[RenderableType] = [Text(bench.machine(), style="bold")]
    for part in parts:
        shown += [Text(f"\n{part.title}", style="bold"), tables.table(part.columns, part.rows, part.columns[1:])]
        shown.append(Text(part.method))
    entries = {part.title: {"method": part.method, "columns": part.columns, "rows": part.rows} for part in parts}
    return Answer({"machine": bench.machine(), "parts": entries}, tuple(shown))


def runner_of(on: str, jobs: int, address: str | None, cpus: float, gpus: float, retries: int) -> Runner:
    """Who computes cells."""
    from softequiv.experiments.cells import Here
    from softequiv.experiments.ray_cells import OnRay

    here, cluster = Here(jobs), OnRay(address, cpus, gpus, retries)
    if on not in ("here", "ray"):
        raise typer.BadParameter(f"cells are computed here or on ray; got --on {on}")
    if on == "here" and cluster != OnRay():
        raise typer.BadParameter("--address, --cpus, --gpus and --retries are of a Ray cluster; add --on ray")
    if on == "ray" and here != Here():
        raise typer.BadParameter("--jobs are processes here; on Ray --cpus and --gpus say how many cells run at once")
    return here if on == "here" else cluster
