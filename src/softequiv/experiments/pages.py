"""How are results told? As one page with its tables, figures and claims, beside the rows it was made from."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from softequiv._files import made_folder, read_json, written_whole
from softequiv.experiments.cells import Row

OPENING = """# Results

What was found, question by question; **bold** entries hold. Each page gives its data, seeds, spread and command, and
what is missing.

- *Error*: the invariance error, the mean KL divergence between the answers to a sample and to the moved sample.
- *Combined accuracy*: the geometric mean of the accuracies on upright and on moved samples.
- *Dial*: what a method lets one tune; a *stop* is one setting of it.
- *With turns*: trained on turned pictures; *without turns*: on upright ones.
- ¹: some stop has one seed only.
"""
DIGITS = 6  # of a figure
LONGEST = 20_000  # characters of a figure that is told beside a page
LOWER = "At equal accuracy, is the error lower?"
QUESTIONS = {  # of the index, in its order, with what their entries say
    f"{LOWER} Dials of the network": "Dials that measure the whole network in training or average its answers "
    "('held', 'mixture'). An entry says at how many stops of a rival's dial one of these has a lower error at equal "
    "combined accuracy, and gives the median ratio of the two errors. Equal means within one standard deviation; lower "
    "means by more than the sum of both standard deviations, so that stops with one seed never count.",
    f"{LOWER} Dials of weights": "The same for dials that filter weights ('ours': softness, levels, error target).",
    "Is augmentation beaten?": "Combined accuracy and error; behind the slash those of the plain model trained on "
    "moved samples. It is beaten by a lower error at equal accuracy, or by a higher accuracy at equal error, beyond "
    "the sum of both standard deviations, at one stop at least; the pages say at how many.",
    "Is augmentation for twice as long beaten?": "The same, with as many passes for augmentation as dials of the "
    "network take, which evaluate the model twice a step.",
    "Does the dial move the network's error?": "The error at the lowest and at the highest stop.",
    "Does the dial go from the plain model's error to zero?": "The error of the plain model and that of the last stop.",
    "Does the dial cost accuracy?": "Combined accuracy at the stop that validation prefers, for that of the plain "
    "model. The dial costs accuracy if it is lower by more than the sum of both standard deviations.",
}

Draw = Callable[[Any], None]  # what it is given is a matplotlib figure


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and its sample standard deviation, nan where there is one seed.

    >>> print(Spread.of([0.9, 0.92]), Spread.of([0.5]))
    0.910 ± 0.014 0.500
    """

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of figures, one for each seed."""
        found = list(values)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else math.nan, len(found))

    def told(self, scale: float = 1.0, digits: int = 3) -> str:
        """As a table shows it, times `scale`."""
        text = f"{self.mean * scale:.{digits}f}"
        return text if math.isnan(self.std) else f"{text} ± {self.std * scale:.{digits}f}"

    def __str__(self) -> str:
        return self.told()


@dataclass(frozen=True)
class Table:
    """A table with its caption."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As a page holds it."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return f"{self.caption}\n\n" + "\n".join(f"| {' | '.join(map(entry, line))} |" for line in lines) + "\n"


def entry(text: str) -> str:
    """A text as an entry of a table: on one line, with bars that do not end it.

    >>> print(entry("|x|"))
    \\|x\\|
    """
    return " ".join(text.split("\n")).replace("|", "\\|")


@dataclass(frozen=True)
class Figure:
    """A picture: its name in the file's, what it shows for those who do not see it, and how it is drawn."""

    name: str
    alt: str
    draw: Draw
    size: tuple[float, float] = (7.0, 4.0)


@dataclass(frozen=True)
class Claim:
    """What was to be shown, whether it was, and by which figures.

    Claims that answer one of the `QUESTIONS` of the index are entries of one table there, the `short` one in a row for
    their setting, which stands before a colon in `text`, and in a `column` for whom they are about.
    """

    text: str
    holds: bool
    evidence: str
    question: str = ""
    column: str = ""
    short: str = ""

    @property
    def setting(self) -> str:
        """Where it was tried."""
        return self.text.rpartition(": ")[0]


@dataclass(frozen=True)
class Page:
    """What an experiment says."""

    title: str
    sentences: Sequence[str]
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


def write_page(page: Page, rows: Sequence[Row], folder: Path, name: str) -> Path:
    """NAME.md with NAME.json, NAME.csv and a NAME-*.svg for each figure, each written whole; the path of the page."""
    made_folder(folder)
    for figure in page.figures:
        with written_whole(folder / f"{name}-{figure.name}.svg") as part:
            part.write_bytes(drawn(figure))
    files = {
        f"{name}.json": told(page, rows),
        f"{name}.csv": comma_separated(rows),
        f"{name}.md": markdown(page, rows, name),
    }
    for file, text in files.items():
        with written_whole(folder / file) as part:
            part.write_text(text, encoding="utf-8")
    write_index(folder)
    return folder / f"{name}.md"


@dataclass(frozen=True)
class Listed:
    """A page that is there, as its JSON tells it: a link to it, its scale, its claims, and how many cells it has."""

    link: str
    scale: str
    claims: Sequence[Claim]
    cells: int


def write_index(folder: Path) -> None:
    """index.md: what was claimed and how often it held, then every claim of every page, with its evidence; a page whose
    JSON cannot be read is named.
    """
    found = {file: listed(file) for file in sorted(folder.glob("*-*.json")) if file.with_suffix(".md").is_file()}
    pages = [page for page in found.values() if page]
    claims = counted_once(pages)
    rest = [[link, claim.text, outcome(claim), claim.evidence] for link, claim in claims if not claim.question]
    tables = [*answered(claims), Table("## Other claims", ["", "claim", "", "evidence"], rest)]
    parts = [OPENING, *(damaged(file) for file, page in found.items() if page is None)]
    with written_whole(folder / "index.md") as part:
        part.write_text("\n".join([*parts, *(table.markdown() for table in tables)]), encoding="utf-8")


def listed(file: Path) -> Listed | None:
    """The page of a JSON file, if the file is whole."""
    try:
        told = read_json(file.read_text(encoding="utf-8"))
        if not {"title", "claims", "rows"} <= told.keys():
            return Listed(file.stem, "", (), 0)  # some other file
        claims = [Claim(**claim) for claim in told["claims"]]
        name, _, scale = file.stem.rpartition("-")
        page = Listed(f"[{name}]({file.stem}.md)", scale, claims, len(told["rows"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = all(isinstance(claim.holds, bool) and isinstance(claim.text + claim.evidence, str) for claim in claims)
    return page if whole else None


def damaged(file: Path) -> str:
    """What the index says in place of the claims of a page whose JSON is damaged."""
    return f"[{file.stem}]({file.stem}.md) is left out: {file.name} is damaged; `{again(file.stem)}` writes it again.\n"


def outcome(claim: Claim) -> str:
    """What was found of a claim."""
    return "holds" if claim.holds else "does not hold"


def counted_once(pages: Sequence[Listed]) -> list[tuple[str, Claim]]:
    """Every claim with a link to its page, but of pages of one scale that claim the same by the same evidence only the
    one with the most cells: a figure shows some of the cells of a table.
    """
    owners: dict[tuple[str, Claim], Listed] = {}
    for page in sorted(pages, key=lambda page: page.cells):
        owners.update({(page.scale, claim): page for claim in page.claims})
    return [(page.link, claim) for page in pages for claim in page.claims if owners[page.scale, claim] is page]


def answered(claims: Sequence[tuple[str, Claim]]) -> list[Table]:
    """A table for each question that was asked: a row for each page and setting, a column for each whom it is about."""
    tables = []
    for question, sentence in QUESTIONS.items():
        asked = [(link, claim) for link, claim in claims if claim.question == question]
        columns = list(dict.fromkeys(claim.column for _, claim in asked))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for link, claim in asked:
            entry = f"**{claim.short}**" if claim.holds else claim.short
            rows.setdefault((link, claim.setting), {})[claim.column] = entry
        lines = [[link, setting, *(row.get(column, "") for column in columns)] for (link, setting), row in rows.items()]
        if lines:
            tables.append(Table(f"## {question}\n\n{sentence}", ["", "setting", *columns], lines))
    return tables


def told(page: Page, rows: Sequence[Row]) -> str:
    """Claims and rows as JSON, a line for each row."""
    head = json.dumps({"title": page.title, "claims": [asdict(claim) for claim in page.claims]})
    lines = ",\n".join(json.dumps(row_told(row)) for row in rows)
    return f'{head[:-1]}, "rows": [\n{lines}\n]}}\n'


def row_told(row: Row) -> dict[str, Any]:
    """A row as JSON; pictures stay in the cells, and what was left out is named."""
    small = {k: v for k, v in row.figures.items() if len(json.dumps(v)) <= LONGEST}
    told = asdict(row) | {"settings": dict(row.settings), "figures": small}
    return told if len(small) == len(row.figures) else told | {"left out": sorted(row.figures.keys() - small.keys())}


def rounded(row: Row) -> Row:
    """A row with the digits that pages keep."""
    figures = {k: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for k, v in row.figures.items()}
    return replace(row, figures=figures)


def comma_separated(rows: Sequence[Row]) -> str:
    """Settings and single figures, a line for each cell."""
    flat = [
        {**row.settings, **{k: v for k, v in row.figures.items() if isinstance(v, (int, float, str))}} for row in rows
    ]
    names = list(dict.fromkeys(name for line in flat for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def markdown(page: Page, rows: Sequence[Row], name: str) -> str:
    """The page as text."""
    parts = [f"# {page.title}", *page.sentences]
    parts += [f"![{figure.alt}]({name}-{figure.name}.svg)" for figure in page.figures]
    if page.claims:
        claims = [[claim.text, outcome(claim), claim.evidence] for claim in page.claims]
        parts.append(Table("What was to be shown, and what was found:", ["claim", "", "evidence"], claims).markdown())
    parts += [table.markdown() for table in page.tables]
    parts.append(made_with(rows, name))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def made_with(rows: Sequence[Row], name: str) -> str:
    """What computed the figures, and how to compute them again."""
    found = {name: sorted({row.versions[name] for row in rows} - {"unknown"}) for name in ("torch", "softequiv")}
    versions = [f"{package} {' and '.join(numbers)}" for package, numbers in found.items() if numbers]
    devices = sorted({row.device for row in rows})
    minutes = sum(row.seconds for row in rows) / 60
    spent = f"{minutes:.0f} minutes" if minutes < 60 else f"{minutes / 60:.1f} hours"
    return (
        f"{len(rows)} cells, {spent} in all, on {' and '.join(devices)}; {', '.join(versions)}. "
        f"Again by `{again(name)}`. All rows: [{name}.json]({name}.json), [{name}.csv]({name}.csv)."
    )


def bullets(heading: str, entries: Mapping[str, str]) -> str:
    """A heading and a list of what is said under each name.

    >>> print(bullets("The dial is, for", {"ours": "softness"}))
    The dial is, for
    <BLANKLINE>
    - ours: softness
    """
    return "\n".join([heading, "", *(f"- {name}: {text}" for name, text in entries.items())])


def again(name: str) -> str:
    """The command that writes a page.

    >>> again("hard-vs-smooth-small")
    'softequiv reproduce hard-vs-smooth --scale small'
    """
    experiment, _, scale = name.rpartition("-")
    return f"softequiv reproduce {experiment} --scale {scale}"


def drawn(figure: Figure) -> bytes:
    """A figure as SVG; the same data give the same bytes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError as missing:
        raise ImportError("drawing needs matplotlib; install it with: pip install 'softequiv[plot]'") from missing
    with matplotlib.rc_context({"svg.hashsalt": "softequiv", "svg.fonttype": "none", "font.size": 9}):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        out = io.BytesIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def spread_over_seeds(rows: Iterable[Row], figure: str, *by: str) -> dict[tuple[Any, ...], Spread]:
    """The spread of a figure for each combination of settings, over everything else."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row.settings.get(name) for name in by), []).append(float(row[figure]))
    return {key: Spread.of(values) for key, values in groups.items()}
