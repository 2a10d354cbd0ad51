"""How are results shown? Plans, certificates, measurements and trainings, as entries for JSON and tables for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from softequiv.adapt.plan import Plan
from softequiv.certify import Certificate, StatisticalCertificate
from softequiv.certify.certificate import figure, span
from softequiv.measure import Measurement
from softequiv.measure.measurement import INTERVAL
from softequiv.spectrum import spectrum

USES = ("learn from", "choose by", "test on")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()) -> Table:
    """Rows under their headings; columns of numbers stand to the right."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    right = set(numbers)
    for column in columns:
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


def sizes(shape: Iterable[int]) -> str:
    """A shape as people write it.

    >>> sizes((8, 3, 5, 5))
    '8x3x5x5'
    """
    return "x".join(map(str, shape))


def plan_entries(plan: Plan) -> dict[str, Any]:
    """A plan as JSON can hold it."""
    return {
        "group": plan.group.name,
        "action": plan.action,
        "weights": [
            {
                "name": weight.found.name,
                "what": weight.found.what,
                "shape": list(weight.shape),
                "representation": str(weight.soft.rep),
                "levels": len(spectrum(weight.soft.rep).levels),
                "kept": weight.kept,
                "after_training": weight.holds,
            }
            for weight in plan.weights
        ],
        "left_alone": [{"name": item.name, "reason": item.reason} for item in plan.skipped],
        "geometry": [{"name": item.name, "why": item.why, "remedy": item.remedy} for item in plan.uneven],
        "note": plan.note,
    }


def plan_shown(plan: Plan) -> tuple[Table | Text, ...]:
    """A plan for people."""
    entries = plan_entries(plan)
    rows = [
        (w["name"], w["what"], sizes(w["shape"]), str(w["levels"]), w["kept"], w["after_training"])
        for w in entries["weights"]
    ]
    lines = [f"left alone: {len(plan.skipped)} weights"]
    lines += [f"  {count} x {why}" for why, count in Counter(item.reason for item in plan.skipped).most_common()]
    lines += [f"geometry: {uneven}" for uneven in plan.uneven]
    lines += [plan.note] if plan.note else []
    return (
        Text(f"{plan.group}: {len(plan.weights)} weights", style="bold"),
        table(("weight", "what", "shape", "levels", "kept", "after training"), rows, ("levels",)),
        Text("\n".join(lines)),
    )


def certificate_entries(certificate: Certificate) -> dict[str, Any]:
    """A certificate as its own JSON file has it, with its largest error."""
    entries: dict[str, Any] = json.loads(certificate.to_json())
    return {**entries, "error": certificate.error}


def certificate_shown(certificate: Certificate) -> tuple[Table | Text, ...]:
    """A certificate for people; its file has every figure."""
    rows = [
        (
            w.name,
            sizes(w.shape),
            f"{w.directions} of {w.directions_total}",
            *(figure(value) for value in (w.error, w.asked, w.operator, w.haar, w.supremum, w.rounding)),
        )
        for w in certificate.weights
    ]
    numbers = ("error", "asked", "operator", "Haar rms", "whole group", "rounding")
    others = certificate.uncertified
    lines = [
        f"no element of {certificate.group}, {span(certificate.within)}, changes a weight above by more than its "
        "error, relative to its norm",
        f"not certified: {len(others)} other weight{'s' * (len(others) != 1)}, normalisation, strides and borders, and "
        "what later layers make of the change; measure shows these",
        *(f"model of the action: {gap}" for gap in certificate.gaps),
        f"sha256 {certificate.sha256}",
    ]
    return (
        Text(f"largest error {certificate.error:.4g}: {certificate.group}, {span(certificate.within)}", style="bold"),
        table(("weight", "shape", "directions", *numbers), rows, numbers),
        Text("\n".join(lines)),
    )


def statistical_shown(certificate: StatisticalCertificate) -> tuple[Table | Text, ...]:
    """A certificate of answers for people."""
    rows = [
        (f.name, f"{f.observed:.4g}", f"{f.bound:.4g}", f"{f.most:g}", str(f.clipped), f.method, f.formula)
        for f in certificate.figures
    ]
    where = f"{certificate.group}, {span(certificate.within)}"
    lines = [
        "expectations over pictures drawn as these were and elements drawn as said, all bounds together",
        "not certified: any single picture or element, other data, a model trained or chosen on these pictures",
        f"sha256 of the weights {certificate.weights_sha256}",
        f"sha256 of the data {certificate.data_sha256}",
    ]
    numbers = ("observed", "at most", "largest", "clipped")
    return (
        Text(
            f"with confidence {certificate.confidence:g}: {where}; {certificate.samples} pictures, one element each, "
            f"{certificate.drawn}",
            style="bold",
        ),
        table(("figure", *numbers, "method", "formula"), rows, numbers),
        Text("\n".join(lines)),
    )


def measurement_shown(found: Measurement) -> tuple[Table | Text, ...]:
    """A measurement for people."""
    where = "all of it" if found.within is None else f"within {found.within!r}"
    moves = f"{found.elements} elements {'given' if found.given else 'drawn for each'}"
    title = f"{found.group}, {where}: {found.samples} samples, {moves}, seed {found.seed}"
    rows = [(row.name, f"{row.value:.4g}", row.interval, str(row.n), row.formula) for row in found.rows]
    columns = ("figure", "value", INTERVAL, "n", "formula")
    return (
        Text(title, style="bold"),
        table(columns, rows, ("value", INTERVAL, "n")),
        *(Text(note) for note in found.notes),
    )


def training_shown(result: Mapping[str, Any]) -> tuple[Table | Text, ...]:
    """A training for people: each evaluation, the best marked, and the test."""
    history = result["history"]
    names = [name for name in history[-1] if name != "epoch"] if history else []
    rows = [
        (f"{line['epoch']}{' *' if number == result['best'] else ''}", *(f"{line[name]:.4g}" for name in names))
        for number, line in enumerate(history)
    ]
    test = result["test"]
    rows.append(("test", *(f"{test[name]:.4g}" if name in test else "" for name in names)))
    judged = result["judged"]
    where = "all of it" if judged["within"] is None else f"within {judged['within']}"
    counts = ", ".join(
        f"{part['examples']} to {name}" for name, part in zip(USES, result["data"].values(), strict=True)
    )
    return (
        Text(f"moved by {judged['group']}, {where}; pictures: {counts}; {result['seconds']:.0f} s", style="bold"),
        table(("epoch", *names), rows, names),
        *held_shown(result),
    )


def held_shown(result: Mapping[str, Any]) -> list[Text]:
    """How a held target ended, and a warning where the weights that were kept do not keep it."""
    from softequiv.training.loop import OVER, SLACK

    held = result.get("held")  # results of older versions have none
    if not held:
        return []
    told = "held at {target:g}: in the end price {price:.4g}, error {error:.4g} on training batches"
    kept = result["history"][-1 if result["recipe"]["keep"] == "last" else result["best"]]
    lines = [Text(told.format(**held)), Text(f"{OVER}: how far the error lies above the target, as a share of it")]
    if (over := kept.get(OVER, 0.0)) > SLACK:
        missed = f"the target was not kept: the error of the model that was written is {1 + over:.3g} times as large"
        lines.append(Text(f"{missed}; train longer, or hold a larger one", style="yellow"))
    return lines
