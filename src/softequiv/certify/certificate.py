"""What is guaranteed of a model's weights? A figure for every weight that lives on a representation; the answer prints
as a table, is kept as JSON with hashes of the weights, and can be verified against a model later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy
import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv._version import __version__
from softequiv.adapt.checkpoint import action_of
from softequiv.adapt.find import Setting
from softequiv.adapt.group import chosen_group, group_of
from softequiv.certify.kept import (
    entries_of,
    fitting,
    read_range,
    refuse_unnamed,
    saying_what_is_damaged,
    text_of,
    write_range,
    write_text,
)
from softequiv.certify.located import bakeable, certified_range, flattened_grids, located
from softequiv.certify.modelled import ActionGap, action_gaps
from softequiv.certify.weight import WeightCertificate, certified, digest
from softequiv.errors import SoftEquivError
from softequiv.groups import Group, parse_group
from softequiv.nn.module import check_module
from softequiv.reps import Action

FORMAT = 1
FIGURES = [field.name for field in dataclasses.fields(WeightCertificate) if field.name not in ("asked", "sha256")]
SAME = 1e-9  # two figures computed from the same bytes differ by the order of float64 additions only
NAMED = 3  # how many uncertified weights are named

Entry = TypeVar("Entry", WeightCertificate, ActionGap)


@dataclass(frozen=True)
class Certificate:
    """What holds for the weights of one model, for every group element of path length up to `within`; print it."""

    group: Group
    within: float
    action: Action
    grids: Mapping[str, tuple[int, ...]] | None
    weights: tuple[WeightCertificate, ...]
    uncertified: tuple[str, ...]
    gaps: tuple[ActionGap, ...]
    versions: Mapping[str, str]

    @property
    def reach(self) -> float:
        """The path length that the range stands for."""
        return self.group.reach(self.within)

    @property
    def error(self) -> float:
        """The largest certified error of any weight."""
        return max(weight.error for weight in self.weights)

    @property
    def sha256(self) -> str:
        """One hash of all certified weights, with group and range."""
        lines = [self.group.name, repr(float(self.reach)), *(f"{w.name} {w.sha256}" for w in self.weights)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def __getitem__(self, name: str) -> WeightCertificate:
        for weight in self.weights:
            if weight.name == name:
                return weight
        raise KeyError(f"no certified weight is called {name!r}; there are {', '.join(w.name for w in self.weights)}")

    def __str__(self) -> str:
        return written(self)

    def to_json(self) -> str:
        """The certificate as JSON text."""
        refuse_unnamed(self.group)
        entries = {
            "format": FORMAT,
            "group": self.group.name,
            "within": write_range(self.within),
            "action": self.action,
            "grids": None if self.grids is None else {name: list(sizes) for name, sizes in self.grids.items()},
            "versions": dict(self.versions),
            "sha256": self.sha256,
            "weights": [dataclasses.asdict(weight) for weight in self.weights],
            "uncertified": list(self.uncertified),
            "gaps": [dataclasses.asdict(gap) for gap in self.gaps],
        }
        return json.dumps(entries, indent=1)

    @staticmethod
    def from_json(text: str) -> Certificate:
        """The certificate that `to_json` wrote."""
        return read(text, "the text")

    def save(self, path: str | Path) -> None:
        """Write the certificate as a JSON file, whole or not at all."""
        write_text(self.to_json(), path)

    @staticmethod
    def load(path: str | Path) -> Certificate:
        """Read a certificate that `save` wrote."""
        return read(text_of(path), str(path))

    def verify(self, model: nn.Module) -> Verification:
        """Does this certificate hold for that model? Weights are compared by their bytes and certified again.

        Versions and measured gaps are taken as they stand, and so is what the weights of a baked model were asked for.
        """
        return verified(self, model)


@dataclass(frozen=True)
class Verification:
    """Whether a certificate is that of a model, and sentences that say what differs; true where nothing does."""

    ok: bool
    changes: tuple[str, ...]
    recomputed: int
    total: int

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"verified: same bytes and same figures for {counted(self.total, 'weight')}"
        return "\n".join(["not verified:", *(f"  {change}" for change in self.changes)])


def certify_weights(
    model: nn.Module,
    within: float | str | None = None,
    group: Group | str | None = None,
    *,
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
    images: Tensor | None = None,
) -> Certificate:
    """A certificate for every weight of a model that lives on a representation: with W_g = rho_Y(g)^-1 W rho_X(g),

        ||W_g - W|| <= error ||W||   for every g of path length up to `within`.

    A soft model is certified for its own group; a plain one (baked, or any other) needs `group`, and `grids` and
    `action` as in `soften`. The range is by default that of the model's error target, else the whole of a compact
    group. With `images` (n, c, H, W) the modelled action on pixels is compared with a true rotation of them.

    >>> import softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=0.1, within=se.degrees(30))
    >>> certificate = certify_weights(net)
    >>> certificate.within, round(certificate["weight"].error, 4)
    (30deg, 0.1)
    """
    chosen = chosen_group(model, group, "certify")
    weights = located(model, Setting(chosen, action, grids))
    if not weights:
        raise SoftEquivError(f"no weight of {type(model).__name__} lives on a representation of {chosen}")
    within = certified_range(model, chosen, within)
    known = {weight.name for weight in weights}
    others = tuple(name for name, value in bakeable(model) if value.ndim > 1 and name not in known)
    return Certificate(
        group=chosen,
        within=within,
        action=action_of(weights[0].rep) if chosen == group_of(model) else action,
        grids=flattened_grids(weights) or None,
        weights=tuple(certified(weight, within) for weight in weights),
        uncertified=others,
        gaps=() if images is None else action_gaps(weights, images, chosen.reach(within)),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """What computed the figures."""
    return {
        "softequiv": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def read(text: str, where: str) -> Certificate:
    """A certificate from JSON text; what is damaged is said."""
    entries = entries_of(text, where, "certificate", {"format": FORMAT})
    with saying_what_is_damaged(where):
        grids = entries["grids"]
        certificate = Certificate(
            group=parse_group(entries["group"]),
            within=read_range(entries["within"]),
            action=fitting(entries["action"], Action, "action"),
            grids=None if grids is None else {name: whole_numbers(sizes) for name, sizes in grids.items()},
            weights=tuple(typed(WeightCertificate, entry) for entry in entries["weights"]),
            uncertified=tuple(fitting(name, str, "a name") for name in entries["uncertified"]),
            gaps=tuple(typed(ActionGap, entry) for entry in entries["gaps"]),
            versions=fitting(entries["versions"], dict, "versions"),
        )
        intact = entries["sha256"] == certificate.sha256
    if not intact:
        raise SoftEquivError(f"{where} is a damaged certificate: its weights do not have its sha256")
    return certificate


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Sizes read from JSON."""
    return tuple(fitting(value, int, "a size") for value in values)


def typed(kind: type[Entry], entry: Mapping[str, Any]) -> Entry:
    """A dataclass of names and figures from JSON, where tuples are lists."""
    hints, values = get_type_hints(kind), dict(entry)
    if "shape" in hints:
        values["shape"] = whole_numbers(values["shape"])
    plain = [name for name in hints if name != "shape"]
    return kind(**{**values, **{name: fitting(values[name], hints[name], name) for name in plain}})


def verified(certificate: Certificate, model: nn.Module) -> Verification:
    """Compare a certificate with a model: its bytes, and every figure and entry with those of a fresh certificate."""
    check_module(model)
    changes = []
    stored, own = dict(bakeable(model)), group_of(model)
    fresh: dict[str, WeightCertificate] = {}
    if own is not None and own != certificate.group:
        changes.append(f"the model is softened for {own}, the certificate is for {certificate.group}")
    try:
        again = certify_weights(
            model, certificate.within, certificate.group, grids=certificate.grids, action=certificate.action
        )
        fresh = {weight.name: weight for weight in again.weights}
        changes += differing(certificate, again, "the certificate", ("action", "grids"))
    except SoftEquivError as problem:
        changes.append(f"the model cannot be certified again: {problem}")
    for old in certificate.weights:
        new = fresh.get(old.name)
        if new is None and old.name not in stored:
            changes.append(f"{old.name} is missing from the model")
        elif (digest(stored[old.name]) if new is None else new.sha256) != old.sha256:
            found = f"{new.error:.6g} now" if new is not None else "unknown now"
            changes.append(f"{old.name} changed: its certified error was {old.error:.6g} and is {found}")
        elif new is None:
            changes.append(f"{old.name}: its figures cannot be certified again from this plain model")
        elif new.representation != old.representation:
            changes.append(f"{old.name} was certified as {old.representation} and is {new.representation} in the model")
        else:
            changes += differing(old, new, old.name, FIGURES)
        if new is not None and own == certificate.group and new.asked != old.asked:
            changes.append(f"{old.name} was softened for {target(old)}, and now for {target(new)}")
    names = {weight.name for weight in certificate.weights}
    listed = names | set(certificate.uncertified)
    for name, value in stored.items():
        if own == certificate.group and name in fresh and name not in names:
            changes.append(f"{name} is soft and not in the certificate")
        elif name not in listed and value.ndim > 1:
            changes.append(f"{name} is in the model and not in the certificate")
    changes += [f"{name} is missing from the model" for name in certificate.uncertified if name not in stored]
    return Verification(not changes, tuple(changes), len(names & set(fresh)), len(names))


def target(weight: WeightCertificate) -> str:
    """What a weight was softened for."""
    return "no error in this range" if weight.asked is None else f"an error of {weight.asked:g} in this range"


def differing(old: object, new: object, name: str, keys: Iterable[str]) -> list[str]:
    """Where the entries of two certificates of equal bytes differ."""
    pairs = [(key, getattr(old, key), getattr(new, key)) for key in keys]
    return [f"{name} states {key} {was}, the model gives {now}" for key, was, now in pairs if not alike(was, now)]


def alike(was: Any, now: Any) -> bool:
    """Whether two entries are equal, figures up to the order of additions; what is not a number is like nothing."""
    figures = isinstance(was, float) and isinstance(now, float)
    return bool(was == now or (figures and abs(was - now) <= SAME * (1 + abs(now))))


def span(within: float) -> str:
    """A range in words."""
    return "the whole group" if math.isinf(within) else f"within {within}"


def counted(count: int, what: str) -> str:
    """1 weight, 2 weights."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def figure(value: float | None) -> str:
    """A figure of the table."""
    return "-" if value is None else f"{value:.3g}"


def written(certificate: Certificate) -> str:
    """The table that users read."""
    group, within, reach = certificate.group, certificate.within, certificate.reach
    rows: list[tuple[str, ...]] = [
        (
            *("weight", "representation", "shape", "levels", "directions", "error", "asked", "operator"),
            *("Haar rms", "whole group", "paper", "paper, whole", "kappa", "rounding"),
        )
    ]
    for w in certificate.weights:
        rows.append(
            (
                w.name,
                w.representation,
                "x".join(map(str, w.shape)),
                f"{w.levels} of {w.levels_total}",
                f"{w.directions} of {w.directions_total}",
                *(figure(value) for value in (w.error, w.asked, w.operator, w.haar, w.supremum)),
                *(figure(value) for value in (w.paper, w.paper_whole, w.kappa, w.rounding)),
            )
        )
    others = certificate.uncertified
    named = ", ".join(others[:NAMED]) + (", ..." if len(others) > NAMED else "")
    gaps = [f"model of the action: {gap}" for gap in certificate.gaps]
    return "\n".join(
        [
            f"{group}, {span(within)}: elements of path length up to {reach:.4g} ({group.unit} is 1)",
            "certified: no such element changes a weight W below, ||W rho_X(g) - rho_Y(g) W||, by more than error",
            "  times ||W|| (Frobenius norm; operator norm under 'operator'), for the action that its space models",
            f"not certified: {counted(len(others), 'other weight')}{f' ({named})' if others else ''}, normalisation, "
            "strides and",
            "  borders, and what later layers make of the change: plan(..., image_size=...) and measure show these",
            *aligned(rows),
            *(gaps or ["model of the action: not compared with a true one; give images=..."]),
            f"sha256 {certificate.sha256}",
        ]
    )
