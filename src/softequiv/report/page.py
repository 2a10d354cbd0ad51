"""How does a report become one page? Every stop of the dial is written out as HTML, and a few lines of script choose
which one is seen; the page loads nothing and can be read, printed and searched without the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from softequiv._files import made_folder, written_whole
from softequiv.certify.weight import WeightCertificate
from softequiv.errors import SoftEquivError
from softequiv.measure.measurement import Row
from softequiv.report.charts import SIGNS, Point, Series, blame_bars, chart, spectrum_chart
from softequiv.report.data import ReportData, Stop, value_of

LARGEST_PAGE = 5_000_000  # bytes: what a mail or a phone takes without complaint
UPRIGHT, MOVED = ("accuracy", "mIoU"), ("accuracy moved", "aIoU")
SHARES = {"accuracy", "accuracy moved", "accuracy combined", "mIoU", "aIoU", "cIoU"}


def write_report(path: str | Path, data: ReportData) -> Path:
    """Write a report as one self-contained HTML file, whole or not at all, and return its path."""
    text = page(data).encode()
    if len(text) > LARGEST_PAGE:
        raise SoftEquivError(
            f"the page would have {len(text) / 1e6:.1f} MB, more than {LARGEST_PAGE / 1e6:g} MB, with "
            f"{len(data.stops)} levels: give fewer levels"
        )
    target = Path(path)
    made_folder(target.parent)
    with written_whole(target) as part:
        part.write_bytes(text)
    return target


def page(data: ReportData) -> str:
    """The page as text."""
    start = data.stops[data.start]
    return Template(read("page.html")).substitute(
        css=read("page.css"),
        js=read("page.js"),
        title=escape(data.title),
        about=escape(f"{data.model} under {data.group}, {data.within}"),
        group=escape(data.group),
        within=escape(data.within),
        element=escape(data.element),
        layer=escape(data.layer),
        picture=data.picture,
        moved_picture=data.moved_picture,
        last=len(data.stops) - 1,
        start=data.start,
        softness=softness_text(start),
        stops=escape(" ".join(softness_text(stop) for stop in data.stops), quote=True),
        ticks="".join(f"<span>{softness_text(stop)}</span>" for stop in data.stops),
        figures=per_stop(data, lambda stop: tiles(stop, data)),
        views=per_stop(data, views),
        spectra=per_stop(data, lambda stop: spectrum_chart(stop.spectrum)),
        certificates=per_stop(data, certificate_table),
        blames=per_stop(data, blame),
        curves=curves(data),
        summary=summary_table(data),
        answers=answers(data),
        settings="".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in data.settings.items()),
    )


def read(name: str) -> str:
    """A file of this package."""
    return files("softequiv.report").joinpath(name).read_text(encoding="utf-8")


def per_stop(data: ReportData, drawn: Callable[[Stop], str]) -> str:
    """A block for each stop; only the one the page opens with is visible."""
    return "".join(
        f'<div data-stop="{i}"{"" if i == data.start else " hidden"}>{drawn(stop)}</div>'
        for i, stop in enumerate(data.stops)
    )


def softness_text(stop: Stop) -> str:
    """The softness as it is written everywhere."""
    return f"{stop.softness:g}"


def figure_text(name: str, value: float | None) -> str:
    """A figure as it is written everywhere: shares in per cent, errors with three digits."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}%" if name in SHARES else f"{value:.3g}"


def tiles(stop: Stop, data: ReportData) -> str:
    """The large figures of one stop."""
    shown = next(weight for weight in stop.certified if weight.name == data.layer)
    worst = max(stop.certified, key=lambda weight: weight.error)
    found: list[tuple[str, str, str]] = [
        ("certified, this layer", figure_text("", shown.error), "no move of the range changes its weight by more"),
        ("certified, worst layer", figure_text("", worst.error), worst.name),
    ]
    if stop.view.error is not None:
        found.append(("this layer, this picture", figure_text("", stop.view.error), "‖f(gx) − g f(x)‖ / ‖f(x)‖"))
    for name in ("iErr", "eErr", "relative change", *UPRIGHT, *MOVED):
        row = value_of(stop.measured, name)
        if row is not None:
            about = "" if row.exact else "about "
            span = f"{about}{figure_text(name, row.low)} to {figure_text(name, row.high)}"
            found.append((f"measured: {name}", figure_text(name, row.value), f"95% interval {span}"))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in found
    )
    return f'<dl class="tiles">{cells}</dl>'


def views(stop: Stop) -> str:
    """The pictures of one stop."""
    at = f"at softness {softness_text(stop)}"
    view = stop.view
    shown = [
        ("weights", "Filtered weights", f"Kernels of the layer {at}", view.weights),
        ("maps", "f(x): features of the picture", f"Feature maps of the picture {at}", view.features),
        ("maps", "g f(x): the same, moved", f"Feature maps of the picture, then moved, {at}", view.turned),
        ("maps", "f(gx): features of the moved picture", f"Feature maps of the moved picture {at}", view.moved),
        ("maps", "|f(gx) − g f(x)|: the error", f"Where the last two differ {at}", view.difference),
    ]
    out = "".join(
        f'<figure class="{kind}"><img src="{source}" alt="{escape(alt)}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for kind, name, alt, source in shown
        if source is not None
    )
    if view.features is None:
        out += "<p>The output of this layer is no map, so its features are not drawn.</p>"
    return f'<div class="views">{out}</div>'


def certificate_table(stop: Stop) -> str:
    """The certificate of every filtered weight, in a table that can be sorted."""
    head = ("weight", "shape", "levels", "directions", "error", "operator", "whole group", "paper's bound")
    return table(head, (certificate_row(weight) for weight in stop.certified), sortable=True)


def certificate_row(weight: WeightCertificate) -> tuple[str, ...]:
    """One line of the certificate."""
    return (
        weight.name,
        " x ".join(map(str, weight.shape)),
        f"{weight.levels} of {weight.levels_total}",
        f"{weight.directions} of {weight.directions_total}",
        *(figure_text("", value) for value in (weight.error, weight.operator, weight.supremum, weight.paper)),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], sortable: bool = False) -> str:
    """A table in its own scroller; the head of a sortable one has buttons."""
    names = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        if sortable
        else f'<th scope="col">{escape(name)}</th>'
        for name in head
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroller" tabindex="0" role="region" aria-label="table"><table{kind}>'
        f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def blame(stop: Stop) -> str:
    """Who is to blame, in words and bars."""
    bars = blame_bars(stop.blames) if stop.blames else ""
    return f"<p>{escape(stop.verdict[:1].upper() + stop.verdict[1:])}.</p>{bars}"


def models(data: ReportData) -> list[tuple[str, float, tuple[Row, ...]]]:
    """Every model of the report: its name, the largest certified error of its weights, and what was measured."""
    dial = [(f"softness {softness_text(s)}", max(w.error for w in s.certified), s.measured) for s in data.stops]
    return [*dial, *((other.name, other.certified, other.measured) for other in data.compared)]


def summary_table(data: ReportData) -> str:
    """All models in one table."""
    names = [row.name for row in data.stops[data.start].measured]
    rows = (
        (name, figure_text("", certified), *(figure_text(row.name, row.value) for row in measured))
        for name, certified, measured in models(data)
    )
    return table(("model", "certified", *names), rows)


def answers(data: ReportData) -> str:
    """What holds for the answers of every model on average, and what does not."""
    every = [(f"softness {softness_text(stop)}", stop.answers) for stop in data.stops]
    every += [(other.name, other.answers) for other in data.compared]
    refused = next((found.refused for _, found in every if found.refused), "")
    if refused:
        return f"<p>Nothing can be certified of these answers: {escape(refused)}.</p>"
    kinds = every[0][1].figures
    head = ("model", *(name for kind in kinds for name in (f"{kind.name}, observed", "at most")))
    rows = (
        (name, *(figure_text("", value) for kind in found.figures for value in (kind.observed, kind.bound)))
        for name, found in every
    )
    upto = {kind.name: "" if kind.most == 1 else f", counted up to {kind.most:g}" for kind in kinds}
    formulas = "; ".join(f"{kind.name}: {kind.formula}{upto[kind.name]}" for kind in kinds)
    least = 1 - ((1 - data.confidence) / (len(every) * len(kinds))) ** (1 / data.samples)
    return table(head, rows) + (
        f'<p class="note">With confidence {100 * data.confidence:g}%, all bounds together: over inputs drawn as these '
        f"{data.samples} pictures were, and one move each ({escape(data.drawn)}), the expectation is at most so large. "
        "This holds for any model, whatever is inside it, if the pictures neither trained nor chose it; it says "
        f"nothing of a single picture or move, or of other pictures. From {data.samples} pictures no rate can be shown "
        f"to be below {figure_text('', least)}: take more for tighter bounds.</p>"
        f'<p class="note">Figures: {escape(formulas)}.</p>'
    )


def curves(data: ReportData) -> str:
    """The errors over the dial, and accuracy against error where labels are known."""
    measured = [value_of(stop.measured, "relative change") for stop in data.stops]
    errors = [
        Series("largest certified error of a weight", "a", tuple(
            Point(stop.softness, max(w.error for w in stop.certified), f"softness {stop.softness:g}", i)
            for i, stop in enumerate(data.stops)
        )),
        Series("measured relative change of the answer", "b", tuple(
            Point(stop.softness, row.value, f"softness {stop.softness:g}", i)
            for i, (stop, row) in enumerate(zip(data.stops, measured, strict=True))
            if row is not None
        )),
    ]  # fmt: skip
    first = chart(errors, "softness", "error", "Certified and measured error against softness")
    out = f"<figure>{first}<figcaption>Errors over the dial</figcaption></figure>"
    score = value_of(data.stops[0].measured, *UPRIGHT)
    if score is None:
        return out
    second = chart(trade_off(data), "measured relative change", score.name, f"{score.name} against measured error")
    caption = "Up and to the left is better; the ends of the dial have their softness above them"
    return out + f"<figure>{second}<figcaption>{caption}</figcaption></figure>"


def trade_off(data: ReportData) -> list[Series]:
    """Accuracy, upright and moved, against the measured error, for the dial and for the compared models."""
    series = []
    for names, colour, what in ((UPRIGHT, "a", "upright"), (MOVED, "b", "moved")):
        dial = tuple(
            place(stop.measured, names, f"softness {softness_text(stop)}, {what}", i, softness_text(stop))
            for i, stop in enumerate(data.stops)
        )
        series.append(Series(f"the dial, {what}", colour, dial))
        for j, other in enumerate(data.compared):
            point = place(other.measured, names, f"{other.name}, {what}")
            series.append(Series(f"{other.name}, {what}", colour, (point,), SIGNS[j % len(SIGNS)], line=False))
    return series


def place(
    measured: tuple[Row, ...], names: tuple[str, ...], label: str, stop: int | None = None, short: str = ""
) -> Point:
    """One model in the trade-off."""
    error, score = value_of(measured, "relative change"), value_of(measured, *names)
    assert error is not None and score is not None
    return Point(error.value, score.value, f"{label}: {figure_text(score.name, score.value)}", stop, short)
