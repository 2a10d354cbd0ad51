"""The command that goes through a grid: models, groups, softness or error, and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from softequiv.cli import options, tables
from softequiv.cli.app import Answer, command
from softequiv.cli.experiments import runner_of
from softequiv.cli.training import settings_of

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders, hub ids, or timm:name.")]
Groups = Annotated[list[str], typer.Option("--group", "-g", help="Group: SO(2), C18, D4, ...; repeatable.")]
Stops = Annotated[list[float] | None, typer.Option("--softness", "-s", help="Softness from 0 to 1; repeatable.")]
Errors = Annotated[list[float] | None, typer.Option("--error", "-e", help="Error target; repeatable.")]
Range = Annotated[
    str | None, typer.Option("--within", "-w", help="Range of targets and figures, such as 30deg; default: all.")
]
Seeds = Annotated[int, typer.Option("--seeds", help="Number of seeds, from 0.", min=1)]
SweepData = Annotated[
    str | None, typer.Option("--data", "-d", help="Pictures to measure on; with --epochs or --recipe, to train on.")
]
Pictures = Annotated[int, typer.Option("--limit", help="Measure on at most so many pictures, drawn at random.", min=1)]
Turned = Annotated[bool, typer.Option("--turned", help="Train on pictures moved within the range.")]
SweepFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder of tables and finished cells.")]


@command('softequiv sweep ./vit --group "SO(2)" --group C4 --softness 0.2 --softness 0.8 --data pictures/ -o swept/')
def sweep_command(
    models: Models,
    group: Groups,
    softness: Stops = None,
    error: Errors = None,
    within: Range = None,
    mode: options.Mode = "parametrize",
    seeds: Seeds = 1,
    data: SweepData = None,
    limit: Pictures = 256,
    epochs: options.Epochs = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    recipe: options.RecipeFile = None,
    turned: Turned = False,
    new_head: options.NewHead = False,
    size: options.Size = None,
    out: SweepFolder = Path("swept"),
    jobs: options.Jobs = 1,
    on: options.On = "here",
    address: options.Address = None,
    cpus: options.CellCPUs = 1.0,
    gpus: options.CellGPUs = 0.0,
    retries: options.Retries = 3,
) -> Answer:
    """Soften, train, certify and measure over a grid.

    Try every combination (a cell) of model, group, softness or error, and seed. Finished cells are reused, so that an
    interrupted sweep resumes. With --epochs or --recipe, train each model; with --on ray, a cluster computes the cells.
    """
    from softequiv.experiments.sweep import Grid, sweep, table

    runner = runner_of(on, jobs, address, cpus, gpus, retries)
    trained = epochs is not None or recipe is not None
    if not trained and (batch is not None or rate is not None):
        raise typer.BadParameter("--batch and --rate belong to training; add --epochs or --recipe")
    settings = settings_of(recipe, {"epochs": epochs, "batch": batch, "rate": rate}) if trained else None
    grid = Grid(
        *(models, group, softness or (), error or (), within, mode, seeds, data, limit),
        recipe=settings,
        turned=turned,
        new_head=new_head,
        size=size,
    )
    rows = sweep(grid, out, runner=runner)
    found = table(rows)
    entries = {"rows": [{"settings": dict(row.settings), "figures": row.figures} for row in rows], "out": str(out)}
    last = Text(f"{len(rows)} cells, written to {out / 'sweep.md'} and {out / 'sweep.csv'}")
    return Answer(entries, (tables.table(found.header, found.rows), last))
