"""What is this for, in a minute? A small ViT on real digits: softened, certified, measured under rotation, held at a
target, and compared with the plain and the augmented model, all trained for the same number of steps.

Every trained model is a cell, a file that a later run takes up again; nothing is downloaded.
"""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from softequiv._files import made_folder, written_whole
from softequiv._text import aligned
from softequiv.actions import Moves, Pictures, Still
from softequiv.adapt import load_tensors, soften, stored_tensors
from softequiv.asking.answers import tensor_of
from softequiv.certify.certificate import versions
from softequiv.errors import SoftEquivError
from softequiv.gains import softness
from softequiv.groups import SO, degrees
from softequiv.holding import HeldByMeasurement
from softequiv.measure import measure
from softequiv.measure.measurement import Row
from softequiv.measure.progress import progress
from softequiv.networks.vision import VisionTransformer
from softequiv.report import ReportData, build, write_report

FORMAT = 1
GROUP, WITHIN = SO(2), degrees(30)
QUARTER = GROUP.element(degrees(90))
TRAIN, VALIDATION = 1000, 297  # of 1797 pictures, in one fixed order; the rest is the test set
TURNS = 64  # rotations that an augmented model sees of every picture
TRIED = tuple(GROUP.element(degrees(60 * (i + 0.5) / 8 - 30)) for i in range(8))  # angles that cover the range evenly
WHOLE = 512  # pictures asked for at once
LINE = 100  # characters
HEADS = 4
TYPE = 5 * HEADS  # numbers of a token with one scalar and one vector of frequencies 1 and 2 for each head
NEEDED = {"transformers": "transformers", "sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Setup:
    """The sizes of everything; the same for all models of a run."""

    pixels: int = 15
    patch: int = 3
    width: int = 48
    depth: int = 2
    batch: int = 64
    start_steps: int = 400
    start_rate: float = 2e-3
    finish_steps: int = 200
    finish_rate: float = 1e-3
    levels: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
    errors: tuple[float, ...] = (0.1, 0.3)
    held: float = 0.05
    tested: int = 500
    seed: int = 0


QUICK = Setup(start_steps=20, finish_steps=10, levels=(0.0, 0.5, 1.0), errors=(0.3,), tested=40)


@dataclass(frozen=True)
class Cell:
    """One model to train: from scratch, or from another cell; softened or not, on turned pictures or not, its measured
    error held at a target or not, its tokens carrying representations or not.
    """

    name: str
    steps: int
    rate: float
    augmented: bool = False
    softness: float | None = None
    error: float | None = None
    held: float | None = None
    typed: bool = False
    start: Cell | None = None

    def key(self, setup: Setup) -> str:
        """A hash of everything that decides the trained weights."""
        sizes = {k: getattr(setup, k) for k in ("pixels", "patch", "width", "depth", "batch", "seed")}
        told = {"format": FORMAT, "cell": asdict(self), "torch": torch.__version__, **sizes}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits in one fixed order, split."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    sha256: str


@dataclass(frozen=True)
class Result:
    """One line of the table; `validation` is the combined accuracy by which the best softness is chosen."""

    name: str
    certified: float
    measured: Mapping[str, Row]
    quarter: Row
    validation: float
    soft: bool
    augmented: bool
    held: bool


def run(folder: Path = Path("demo"), *, seed: int = 0, quick: bool = False) -> Path:
    """Train, soften, certify, measure, compare; print the table, write report.html and results.json into `folder`.

    Returns the path of the report. About a minute on two cores; models that an earlier run has trained are reused.
    With `quick`, a few seconds, to see that everything works: its figures mean nothing.
    """
    refuse_missing_packages()
    setup = replace(QUICK if quick else Setup(), seed=seed)
    with one_thread():
        return ran(Path(folder), setup)


def ran(folder: Path, setup: Setup) -> Path:
    """The stages of a run, one after another."""
    began = time.perf_counter()
    digits = load_digits(setup)
    print(f"Digits: {TRAIN} to train, {VALIDATION} to validate, {len(digits.test[0])} to test; results in {folder}/")
    models = trained(cells(setup), digits, setup, folder / "cells")
    print("certifying and measuring ...", flush=True)
    data = report(models, digits, setup)
    results = [result(cell, model, data, digits) for cell, model in models.items()]
    sentences = findings(results)
    show_table(results)
    for sentence in sentences:
        print(wrapped(sentence))
    page = write_report(folder / "report.html", data)
    seconds = time.perf_counter() - began
    with written_whole(folder / "results.json") as part:
        part.write_text(json.dumps(written(results, sentences, setup, digits, seconds), indent=1))
    print(
        f"\n{seconds:.0f} seconds. Open {page} in a browser and move the dial; all figures: {folder / 'results.json'}"
    )
    return page


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and wait for it where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def refuse_missing_packages() -> None:
    """The demo needs more than the library does."""
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise SoftEquivError(f"the demo needs {' and '.join(missing)}: pip install 'softequiv[demo]'")


def load_digits(setup: Setup) -> Digits:
    """8 x 8 grey pictures in [0, 1], enlarged; the order does not depend on the seed."""
    from sklearn import datasets

    found = datasets.load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    size = (setup.pixels, setup.pixels)
    pictures = functional.interpolate(small, size, mode="bicubic", align_corners=False).clamp(0, 1)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    train, validation, test = order.split([TRAIN, VALIDATION, len(order) - TRAIN - VALIDATION])

    def part(chosen: Tensor) -> tuple[Tensor, Tensor]:
        return pictures[chosen], labels[chosen]

    fingerprint = hashlib.sha256(small.numpy().tobytes()).hexdigest()
    return Digits(part(train), part(validation), part(test[: setup.tested]), fingerprint)


def cells(setup: Setup) -> list[Cell]:
    """Every model of the table: a common start, then as many steps again for each."""
    plain = Cell("start", setup.start_steps, setup.start_rate)
    turned = Cell("augmented start", setup.start_steps, setup.start_rate, augmented=True)
    finish = Cell("plain", setup.finish_steps, setup.finish_rate, start=plain)
    more = replace(finish, augmented=True, start=turned)
    typed = replace(plain, name="typed start", softness=0.0, typed=True)
    target = max(setup.errors)
    return [
        finish,
        *(replace(finish, name=f"softness {s:g}", softness=s) for s in reversed(setup.levels) if s < 1),
        *(replace(finish, name=f"error {e:g}", error=e) for e in sorted(setup.errors, reverse=True)),
        replace(more, name="augmented"),
        replace(more, name=f"augmented, error {target:g}", error=target),
        replace(more, name=f"held {setup.held:g}", held=setup.held),
        replace(finish, name="typed, softness 0", softness=0.0, typed=True, start=typed),
    ]


def new_model(setup: Setup, typed: float | None = None) -> nn.Module:
    """A small ViT with random weights; with tokens that carry representations where a softness is given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        if typed is None:
            return plain_vit(setup)
        width = TYPE * max(1, setup.width // TYPE)
        sizes = {"width": width, "layers": setup.depth, "heads": HEADS}
        return VisionTransformer(setup.pixels, setup.patch, 10, group=GROUP, gain=softness(typed), **sizes)


def plain_vit(setup: Setup) -> nn.Module:
    """A ViT of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=setup.pixels,
        patch_size=setup.patch,
        num_channels=1,
        hidden_size=setup.width,
        num_hidden_layers=setup.depth,
        num_attention_heads=HEADS,
        intermediate_size=2 * setup.width,
        id2label={i: str(i) for i in range(10)},
        label2id={str(i): i for i in range(10)},
    )
    return ViTForImageClassification(config)


def trained(wanted: Sequence[Cell], digits: Digits, setup: Setup, folder: Path) -> dict[Cell, nn.Module]:
    """All cells, each from its file where there is one, and what they start from."""
    made_folder(folder)
    starts = list(dict.fromkeys(cell.start for cell in wanted if cell.start is not None))
    done: dict[Cell, nn.Module] = {}
    every = [*starts, *wanted]
    for i, cell in enumerate(every, 1):
        began = time.perf_counter()
        model = prepared(cell, done, setup)
        path = folder / f"{cell.key(setup)}.safetensors"
        reused = take_up(model, path)
        if not reused:
            train(model, cell, digits, setup)
            keep(model, path, cell)
        how = "reused" if reused else f"{cell.steps} steps, {time.perf_counter() - began:.1f} s"
        print(f"[{i}/{len(every)}] {cell.name}: {how}", flush=True)
        done[cell] = model
    return {cell: done[cell] for cell in wanted}


def prepared(cell: Cell, done: Mapping[Cell, nn.Module], setup: Setup) -> nn.Module:
    """The model of a cell before its training."""
    if cell.start is None:
        return new_model(setup, cell.softness if cell.typed else None)
    model = copy.deepcopy(done[cell.start])
    if cell.softness is not None and not cell.typed:
        soften(model, GROUP, softness=cell.softness)
    if cell.error is not None:
        soften(model, GROUP, error=cell.error, within=WITHIN)
    return model


def take_up(model: nn.Module, path: Path) -> bool:
    """Load a finished cell, if there is one that can be read."""
    if not path.is_file():
        return False
    try:
        load_tensors(model, load_file(path))
    except (SafetensorError, SoftEquivError, OSError) as problem:
        print(f"{path} cannot be used and is trained again: {problem}")
        return False
    return True


def keep(model: nn.Module, path: Path, cell: Cell) -> None:
    """Write a finished cell, whole or not at all."""
    tensors = {name: value.detach().clone().contiguous() for name, value in stored_tensors(model).items()}
    told = {"cell": json.dumps(asdict(cell))}
    with written_whole(path) as part:
        save_file(tensors, part, metadata=told)


def train(model: nn.Module, cell: Cell, digits: Digits, setup: Setup) -> None:
    """AdamW on drawn batches; the rate rises over a tenth of the steps and falls to nothing."""
    generator = torch.Generator().manual_seed(setup.seed)
    pictures, labels = digits.train
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.rate, weight_decay=0.05)
    warm = max(1, cell.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (cell.steps - step) / cell.steps)
    )
    turned = cell.augmented and cell.held is None
    turns = [GROUP.random(generator, WITHIN) for _ in range(TURNS)] if turned else [GROUP.identity]
    copies = torch.stack([Pictures()(pictures, g) for g in turns])
    held = None
    batch = setup.batch
    if cell.held is not None:
        held = HeldByMeasurement(Moves(Pictures(), GROUP, WITHIN, count=TURNS), cell.held, targets=Still())
        batch //= 2  # it turns each picture once more, so that as many go through the model
    model.train()
    for _ in progress(range(cell.steps), f"training {cell.name}", cell.steps):
        chosen = torch.randint(len(pictures), (batch,), generator=generator)
        turn = torch.randint(len(turns), (batch,), generator=generator)
        x, y = copies[turn, chosen], labels[chosen]
        if held is None:
            loss = functional.cross_entropy(tensor_of(model(x)), y)
        else:
            loss = held(model, x, y, functional.cross_entropy, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def report(models: Mapping[Cell, nn.Module], digits: Digits, setup: Setup) -> ReportData:
    """The page: the dial over the trained soft models, the others beside it."""
    dial = {1.0 if cell.softness is None else cell.softness: model for cell, model in models.items() if on_dial(cell)}
    others = {cell.name: model for cell, model in models.items() if not on_dial(cell)}
    steps = f"{setup.start_steps} + {setup.finish_steps} for every model"
    return build(
        dial,
        *digits.test,
        group=GROUP,
        within=WITHIN,
        title="A small ViT on digits, from equivariant to free",
        compared=others,
        elements=TRIED,
        batch_size=WHOLE,
        settings={"training steps": steps, "seed": str(setup.seed), "data": "scikit-learn digits, test pictures"},
    )


def on_dial(cell: Cell) -> bool:
    """Whether a cell is a stop of the dial: trained on upright pictures, plain or of some softness."""
    return not cell.augmented and cell.error is None and not cell.typed


def result(cell: Cell, model: nn.Module, data: ReportData, digits: Digits) -> Result:
    """One line: what the page says of this model, with a quarter turn and the validation pictures besides."""
    if on_dial(cell):
        level = 1.0 if cell.softness is None else cell.softness
        stop = next(stop for stop in data.stops if stop.softness == level)
        certified, rows = max(weight.error for weight in stop.certified), stop.measured
    else:
        other = next(other for other in data.compared if other.name == cell.name)
        certified, rows = other.certified, other.measured
    quarter = measure(model, digits.test, GROUP, elements=[QUARTER], jacobians=0, batch_size=WHOLE)
    validation = measure(model, digits.validation, GROUP, WITHIN, elements=TRIED, jacobians=0, batch_size=WHOLE)
    return Result(
        name=cell.name,
        certified=certified,
        measured={row.name: row for row in rows},
        quarter=quarter["accuracy moved"],
        validation=validation["accuracy combined"].value,
        soft=(cell.softness is not None or cell.error is not None) and not cell.typed,
        augmented=cell.augmented,
        held=cell.held is not None,
    )


def findings(results: Sequence[Result]) -> list[str]:
    """What one sees, in sentences made from the figures."""
    named = {result.name: result for result in results}
    plain, augmented, strict, typed = (
        named[name] for name in ("plain", "augmented", "softness 0", "typed, softness 0")
    )
    best = max((r for r in results if r.soft and not r.augmented), key=lambda r: r.validation)
    both = next(r for r in results if r.soft and r.augmented)
    held = next(r for r in results if r.held)
    return [
        f"The soft model that does best on the validation pictures is {best.name}. {versus(best, plain)}",
        f"Augmentation promises nothing about other pictures. {versus(augmented, best)}",
        f"Both together: {versus(both, augmented)} Rotations change a filtered weight by at most "
        f"{both.certified:.2g} of its size in the first, and by up to {augmented.certified:.2g} in the second.",
        f"Weights are promised something, and later layers undo it; a held target is a dial of the whole network. "
        f"{versus(held, augmented)}",
        f"Exactly equivariant weights ({strict.name}): {percent(strict.quarter)} right after a quarter turn and "
        f"{percent(strict.measured['accuracy'])} upright; the plain model: {percent(plain.quarter)} and "
        f"{percent(plain.measured['accuracy'])}. A ViT whose tokens carry representations is as exact: "
        f"{percent(typed.quarter)} and {percent(typed.measured['accuracy'])} "
        f"({verdict(typed.measured['accuracy'], strict.measured['accuracy'], larger_is_better=True)} upright).",
    ]


def versus(one: Result, other: Result) -> str:
    """How one model compares with another: upright, turned, and in its error; overlapping intervals decide nothing."""
    parts = []
    for name, what in (("accuracy", "upright"), ("accuracy moved", "turned")):
        a, b = one.measured[name], other.measured[name]
        parts.append(f"{what} {percent(a)} and {percent(b)} right ({verdict(a, b, larger_is_better=True)})")
    a, b = one.measured["iErr"], other.measured["iErr"]
    parts.append(f"invariance error {a.value:.2f} and {b.value:.2f} ({verdict(a, b, larger_is_better=False)})")
    return f"{one.name.capitalize()} against {other.name}: {'; '.join(parts)}."


def verdict(a: Row, b: Row, larger_is_better: bool) -> str:
    """Better, worse, or no clear difference where the 95% intervals overlap."""
    if a.low <= b.high and b.low <= a.high:
        return "no clear difference"
    return "better" if (a.value > b.value) == larger_is_better else "worse"


def percent(row: Row) -> str:
    """A share."""
    return f"{100 * row.value:.1f}%"


def table(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """The table's cells, the head first."""
    head = ("model", "certified", "upright", "turned", "quarter", "iErr", "change")
    rows = [
        (
            r.name,
            f"{r.certified:.2f}",
            *(percent(row) for row in (r.measured["accuracy"], r.measured["accuracy moved"], r.quarter)),
            f"{r.measured['iErr'].value:.3f}",
            f"{r.measured['relative change'].value:.3f}",
        )
        for r in results
    ]
    return [head, *rows]


LEGEND = (
    "certified: largest relative change of a filtered weight by any rotation within 30 degrees, guaranteed; upright, "
    "turned (within 30 degrees), quarter (of a turn): accuracy on the test pictures; iErr: KL[F(x) || F(gx)]; change: "
    "||F(gx) - F(x)|| / ||F(x)||; held: trained with a price that keeps iErr at this target; typed: tokens carry "
    "representations. All models took the same "
    "number of training steps, and as many pictures a step."
)


def show_table(results: Iterable[Result]) -> None:
    """Print the table, with rich where it is installed."""
    head, *rows = table(results)
    print()
    if find_spec("rich") is None:
        print("\n".join(aligned([head, *rows])))
    else:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=f"Digits under {GROUP}, within {WITHIN}", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)
    print(wrapped(LEGEND))


def wrapped(text: str) -> str:
    """A paragraph for a terminal, with an empty line before it."""
    return "\n" + textwrap.fill(text, LINE)


def written(
    results: Sequence[Result], sentences: Sequence[str], setup: Setup, digits: Digits, seconds: float
) -> dict[str, Any]:
    """Everything that the run found and how, for JSON."""
    from sklearn import __version__ as sklearn_version
    from transformers import __version__ as transformers_version

    return {
        "format": FORMAT,
        "group": str(GROUP),
        "within": str(WITHIN),
        "setup": asdict(setup),
        "seed": setup.seed,
        "data": {"name": "scikit-learn digits", "sha256": digits.sha256, "train": TRAIN, "validation": VALIDATION,
                 "test": len(digits.test[0])},
        "versions": {**versions(), "transformers": transformers_version, "scikit-learn": sklearn_version},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "seconds": seconds,
        "results": [
            {
                "name": r.name,
                "certified": r.certified,
                "measured": {name: asdict(row) for name, row in r.measured.items()},
                "quarter turn": asdict(r.quarter),
                "validation": r.validation,
            }
            for r in results
        ],
        "findings": list(sentences),
    }  # fmt: skip
