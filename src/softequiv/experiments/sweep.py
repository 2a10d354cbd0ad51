"""How do models fare over a grid of groups, softness or error, and seeds? Each combination is a cell: a model is
opened, softened, trained where a recipe is given, certified, and measured where there are pictures.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from softequiv._files import written_whole
from softequiv.actions import Moves
from softequiv.adapt import soften
from softequiv.adapt.opening import TIMM, open_model
from softequiv.baselines.augmentation import Augmented
from softequiv.certify import certify
from softequiv.errors import SoftEquivError
from softequiv.experiments.arms import kept
from softequiv.experiments.cells import Cell, Figures, Row, Runner, Settings, rows_there, run_cells
from softequiv.experiments.pages import Page, Spread, Table, comma_separated, told
from softequiv.groups import parse_group, parse_range
from softequiv.measure import measure
from softequiv.tasks.images import open_images
from softequiv.tasks.named import open_task
from softequiv.tasks.segmentation import MASKS, Segmentation
from softequiv.training import Recipe, fit
from softequiv.training.heads import check_answers, new_head

NAME = "sweep"
POOL = 1024  # elements that stand for a range
DIALS = ("softness", "error")


@dataclass(frozen=True)
class Grid:
    """What a sweep goes through: every model with every group, each stop of the dial and every seed.

    The dial is softness, or the error target within a range, or both, one after the other. With a recipe each model is
    trained on `data`, a folder of pictures or mnist:PATH and the like, on pictures moved within the range if `turned`;
    without one, `data` is a folder of which `pictures` are measured.

    >>> grid = Grid(["timm:vit"], ["SO(2)", "C4"], softness=[0.2, 0.8], seeds=3)
    >>> len(grid.cells()), grid.cells()[0].name
    (12, 'model=timm:vit group=SO(2) softness=0.2 mode=parametrize seed=0')
    """

    models: Sequence[str]
    groups: Sequence[str]
    softness: Sequence[float] = ()
    error: Sequence[float] = ()
    within: str | None = None
    mode: str = "parametrize"
    seeds: int = 1
    data: str | None = None
    pictures: int = 256
    recipe: Recipe | None = None
    turned: bool = False
    new_head: bool = False
    size: int | None = None
    stops: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        if self.within is not None:
            parse_range(self.within)
        if self.error and self.within is None:
            raise SoftEquivError("an error target holds within a range; say which, such as within='30deg'")
        if self.recipe is not None and self.data is None:
            raise SoftEquivError("training needs data; give a folder of pictures, or mnist:PATH and the like")
        if (self.turned or self.new_head) and self.recipe is None:
            raise SoftEquivError("turned pictures and a new head belong to training; give a recipe, or its epochs")
        stops = [{dial: float(value)} for dial in DIALS for value in getattr(self, dial)]
        wanted = {"models": self.models, "groups": self.groups, "softness or error": stops, "seeds": range(self.seeds)}
        for name, found in wanted.items():
            if not found:
                raise SoftEquivError(f"a sweep goes through {name}, and none was given")
        object.__setattr__(self, "groups", [parse_group(group).name for group in self.groups])
        object.__setattr__(self, "stops", stops)

    def cells(self) -> list[Cell]:
        """One for each combination; its settings name all that decides its figures, the files by what they hold."""
        sources = {model: source(model, whole=True) for model in self.models}
        shared = {
            "within": self.within,
            "mode": self.mode,
            **({} if self.data is None else source(self.data, whole=False, name="data")),
            "pictures": self.pictures if self.data is not None and self.recipe is None else None,
            "recipe": None if self.recipe is None else changes(self.recipe),
            "turned": self.turned or None,
            "new head": self.new_head or None,
            "size": self.size,
        }
        given = {name: value for name, value in shared.items() if value is not None}
        every = itertools.product(self.models, self.groups, self.stops, range(self.seeds))
        cells = (
            Cell(NAME, {**sources[m], "group": group, **stop, **given, "seed": seed}) for m, group, stop, seed in every
        )
        return list({cell.key: cell for cell in cells}.values())  # what was said twice is one


def sweep(grid: Grid, out: Path, *, runner: Runner | None = None) -> list[Row]:
    """Fill the cells of a grid; their rows, also as sweep.csv, sweep.json and sweep.md in the folder.

    Cells that are there are used again. The files tell those that are done, even where others failed.
    """
    cells = grid.cells()
    try:
        return run_cells(cells, work, out / "cells", runner=runner)
    finally:
        if rows := rows_there(cells, out / "cells"):
            write(rows, len(cells), out)


def work(settings: Settings) -> Figures:
    """One cell: the certified error, the share of directions kept, and what training and pictures show."""
    model, seed = open_model(settings["model"]), settings["seed"]
    group = parse_group(settings["group"])
    within = parse_range(settings["within"]) if "within" in settings else None
    task = None
    if "recipe" in settings:
        named = "new head" not in settings
        opened = open_task(settings["data"], model, size=settings.get("size"), seed=seed, named=named)
        task = opened.task
        if "new head" in settings:
            new_head(model, task.classes, opened.names, seed=seed)
        check_answers(model, task)
    dial = {name: settings[name] for name in DIALS if name in settings}
    soften(model, group, **dial, within=within if "error" in dial else None, mode=settings["mode"])
    figures: Figures = {}
    if task is not None:
        known, unseen = (Moves(task.acts, group, within, count=POOL, seed=2 * seed + i) for i in (0, 1))
        masks = known.on(MASKS) if isinstance(task, Segmentation) else None
        recipe = Recipe.of({**settings["recipe"], "seed": seed})
        fitted = fit(model, task, recipe, known, transform=Augmented(known, masks) if "turned" in settings else None)
        test = task.to(fitted.device)
        figures = {**test.figures(model, test.test, unseen, batch=2 * recipe.batch), "test": len(test.test)}
    elif "data" in settings:
        figures = measured(model, settings, within)
    model = model.cpu()
    return {**figures, "certified": certify(model, within).error, "kept": kept(model)}


def measured(model: nn.Module, settings: Settings, within: float | None) -> Figures:
    """The figures of a measurement on pictures."""
    taken = {"size": settings.get("size"), "limit": settings["pictures"], "seed": settings["seed"]}
    images = open_images(Path(settings["data"]), model, **taken)
    found = measure(model, images, settings["group"], within, seed=settings["seed"])
    return {row.name: row.value for row in found.rows}


def source(text: str, *, whole: bool, name: str = "model") -> dict[str, Any]:
    """A model or data by its name, absolute where it is a path, and a digest of what is there: of the names and sizes
    of all files, and of what they hold if `whole`. Names of the hub and of timm stand for themselves."""
    kind, colon, rest = text.partition(":")
    prefix, path = ("", Path(text)) if Path(text).exists() or not colon else (f"{kind}:", Path(rest))
    path = path.expanduser()
    if text.startswith(TIMM) or not path.exists():
        return {name: text}
    files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
        if whole:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return {name: f"{prefix}{path.resolve()}", f"{name} files": digest.hexdigest()[:16]}


def changes(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says beside the usual; the seed is the cell's own.

    >>> changes(Recipe(epochs=3, seed=7))
    {'epochs': 3}
    """
    usual = asdict(Recipe())
    return {name: value for name, value in asdict(recipe).items() if value != usual[name] and name != "seed"}


def write(rows: Sequence[Row], total: int, folder: Path) -> None:
    """All rows as CSV and JSON, and their table as a page."""
    title = f"Sweep: {len(rows)} of {total} cells"
    page = f"# {title}\n\n{table(rows).markdown()}\nAll rows: [{NAME}.csv]({NAME}.csv), [{NAME}.json]({NAME}.json).\n"
    files = {f"{NAME}.csv": comma_separated(rows), f"{NAME}.json": told(Page(title, []), rows), f"{NAME}.md": page}
    for file, text in files.items():
        with written_whole(folder / file) as part:
            part.write_text(text, encoding="utf-8")


def table(rows: Sequence[Row]) -> Table:
    """Figures over models, groups and stops: mean and spread over seeds."""
    names = list(dict.fromkeys(name for row in rows for name in numbers(row)))
    models = {row["model"] for row in rows}
    short = {model: Path(model).name for model in models}
    alike = len(set(short.values())) < len(models)  # as trainings are, which write each a folder `model`
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["model"], row["group"], stop(row.settings)), []).append(row)
    lines = [
        [model if alike else short[model], group, dial, *cells_of(names, found)]
        for (model, group, dial), found in grouped.items()
    ]
    return Table("Mean and standard deviation over seeds.", ["model", "group", "dial", *names], lines)


def cells_of(names: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """The entries of one line."""
    for name in names:
        values = [row.figures[name] for row in rows if name in numbers(row)]
        yield Spread.of(values).told() if values else ""


def numbers(row: Row) -> Mapping[str, float]:
    """The figures that are numbers."""
    return {name: value for name, value in row.figures.items() if isinstance(value, (int, float))}


def stop(settings: Settings) -> str:
    """Where the dial stands."""
    dial = next(name for name in DIALS if name in settings)
    return f"{dial} {settings[dial]:.12g}" + (f" within {settings['within']}" if dial == "error" else "")
