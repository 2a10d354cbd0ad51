"""What can be said of any network, whatever is inside it, from n held-out samples? With a stated confidence, bounds on
how often and how far its answers change under a random group element; nothing is said of a single input.

Each sample is moved by one element of its own, so that the n comparisons are independent: rates are bounded by
Clopper & Pearson (1934), means of bounded figures by betting (Waudby-Smith & Ramdas, 2024).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv.actions import Acts, Moves, Pictures, Points, Still
from softequiv.adapt.group import chosen_group
from softequiv.asking import asked, at_home, check_finite, default_target, evaluating, inputs_of
from softequiv.asking.answers import at_size_of, check_alone
from softequiv.asking.proportion import mean_upper, proportion_upper
from softequiv.certify.certificate import span, versions
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
from softequiv.certify.located import bakeable, certified_range
from softequiv.certify.weight import bytes_of, digest
from softequiv.errors import SoftEquivError, check_count, check_seed, checked_amount, checked_number
from softequiv.groups import Group, parse_group

FORMAT = 1
BOUNDS_NOTHING = "what is counted on such answers bounds nothing; keep running statistics, or take batch_size=1"
LARGEST_KL = 10.0  # nats; beyond it the answers have nothing in common
REPEATED = 1e-4  # answers in float32 on another machine, relative


@dataclass(frozen=True)
class BoundedFigure:
    """One figure f, 0 <= f <= `most`: its mean over the samples, and what its expectation is at most.

    `clipped` samples were larger than `most` and counted as `most`: the bound is for E min(f, most).
    """

    name: str
    formula: str
    observed: float
    bound: float
    most: float
    clipped: int
    method: str


@dataclass(frozen=True)
class StatisticalCertificate:
    """With probability `confidence` over samples and elements, no figure's expectation exceeds its bound; print it.

    It is for samples drawn independently as these were, not used to train or choose the model, and for one element
    drawn as `drawn` says: an average over inputs and elements, not a worst case.
    """

    group: Group
    within: float
    drawn: str
    acts: str
    target: str
    samples: int
    confidence: float
    clip: float | None
    seed: int
    figures: tuple[BoundedFigure, ...]
    weights_sha256: str
    data_sha256: str
    versions: Mapping[str, str]

    def __getitem__(self, name: str) -> BoundedFigure:
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(f"no figure is called {name!r}; there are {', '.join(figure.name for figure in self.figures)}")

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("figure", "observed", "at most", "range", "clipped", "method", "")]
        for f in self.figures:
            cells = (f"{f.observed:.4g}", f"{f.bound:.4g}", f"0 .. {f.most:g}", str(f.clipped), f.method, f.formula)
            rows.append((f.name, *cells))
        together = "all bounds together" if len(self.figures) > 1 else "the bound"
        return "\n".join(
            [
                f"{self.group}, {span(self.within)}: {self.samples} samples, one element each, {self.drawn}, "
                f"seed {self.seed}",
                f"certified with confidence {self.confidence:g}, {together}: expectations over samples drawn as these "
                "were",
                "  and elements drawn as said; not certified: any single input or element, other data, a model chosen "
                "on this data",
                *aligned(rows),
                f"sha256 of the weights {self.weights_sha256}",
                f"sha256 of the data {self.data_sha256}",
            ]
        )

    def to_json(self) -> str:
        """The certificate as JSON text, closed by a hash of itself."""
        refuse_unnamed(self.group)
        entries = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "format": FORMAT,
            "kind": "statistical",
            "group": self.group.name,
            "within": write_range(self.within),
            "figures": [dataclasses.asdict(figure) for figure in self.figures],
            "versions": dict(self.versions),
        }
        return json.dumps({**entries, "sha256": sealed(entries)}, indent=1)

    @staticmethod
    def from_json(text: str) -> StatisticalCertificate:
        """The certificate that `to_json` wrote."""
        return read(text, "the text")

    def save(self, path: str | Path) -> None:
        """Write the certificate as a JSON file, whole or not at all."""
        write_text(self.to_json(), path)

    @staticmethod
    def load(path: str | Path) -> StatisticalCertificate:
        """Read a certificate that `save` wrote."""
        return read(text_of(path), str(path))

    def differences(
        self,
        model: nn.Module,
        data: Any,
        *,
        acts: Acts = Pictures(),  # noqa: B008  (frozen)
        target: Acts | None = None,
        batch_size: int = 64,
    ) -> tuple[str, ...]:
        """Sentences on what differs when everything is computed again with the same seed; none where nothing does."""
        again = certify_data(
            model,
            data,
            self.group,
            self.within,
            acts=acts,
            target=target,
            confidence=self.confidence,
            clip=self.clip,
            seed=self.seed,
            batch_size=batch_size,
        )
        found = []
        for name in ("weights_sha256", "data_sha256", "samples", "drawn", "acts", "target"):
            was, now = getattr(self, name), getattr(again, name)
            if was != now:
                found.append(f"{name} was {was} and is {now}")
        if [figure.name for figure in self.figures] != [figure.name for figure in again.figures]:
            return (*found, "the figures are not of the same kind")
        for old, new in zip(self.figures, again.figures, strict=True):
            for key in ("observed", "bound", "most"):
                was, now = getattr(old, key), getattr(new, key)
                if not math.isclose(was, now, rel_tol=REPEATED, abs_tol=1e-9):
                    found.append(f"{old.name}: {key} was {was:.6g} and is {now:.6g}")
        return tuple(found)


def certify_data(
    model: nn.Module,
    data: Any,
    group: Group | str | None = None,
    within: float | str | None = None,
    *,
    acts: Acts = Pictures(),  # noqa: B008  (frozen)
    target: Acts | None = None,
    confidence: float = 0.99,
    clip: float | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> StatisticalCertificate:
    """With the given confidence, E f(F(g x), g F(x)) <= bound for a sample x like those of `data` and g from the range.

    Class scores (N, K): the flip rate, the total variation 1/2 sum_k |p_k - q_k| and KL[p || q] of p = softmax F(x)
    and q = softmax F(gx). Scores per pixel (N, K, h, w): the same, averaged over the pixels of a picture that stay
    inside the frame. Other answers: their distance ||F(gx) - g F(x)||, for `Points` the mean over the points. KL has
    no largest value and is clipped at `clip` (by default 10 nats); a distance needs a `clip` in its own unit. With m
    figures each bound has confidence 1 - (1 - confidence) / m, so that all hold together (Bonferroni).

    `data`: a tensor (N, ...) of held-out inputs, a pair (inputs, labels), or a loader; labels are not used. `acts` and
    `target` say how the group moves inputs and answers, as in `measure`. Group and range are by default those of a soft
    model and its error target, else the range is the whole group. Every sample gets one element, as `group.random`
    draws it: `drawn` says how. A model whose answers depend on the rest of their batch is refused.

    >>> net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> certify_data(net, torch.randn(200, 1, 9, 9), "C4")["total variation"].bound < 0.2
    True
    """
    group = chosen_group(model, group, "certify")
    reach = certified_range(model, group, within)
    group.reach(reach)  # which may be refused
    limit = None if math.isinf(reach) else reach
    confidence = checked_confidence(confidence)
    if clip is not None:
        clip = checked_amount(clip, "clip, the largest value that counts,", positive=True)
    check_count("batch_size", batch_size)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, list[Tensor]] = {}
    hashed = hashlib.sha256()
    checked = False
    with evaluating(model):
        for inputs in inputs_of(data, batch_size):
            if not columns:
                hashed.update(f"{inputs.dtype} {tuple(inputs.shape[1:])} ".encode())
            hashed.update(bytes_of(inputs))
            x, numbers = at_home(model, inputs), torch.arange(len(inputs))
            acts.check(group, x[0])
            drawn = [group.random(generator, limit) for _ in range(len(x))]
            moves = Moves(acts, group, elements=drawn)
            raw, moved = (asked(model, part) for part in (x, moves(x, numbers)))
            check_finite(raw, "answers")
            if not checked:
                check_alone(model, x, raw, BOUNDS_NOTHING)
                checked = len(x) > 1  # a sample by itself has no others
            y, moved = at_size_of(x, raw), at_size_of(x, moved)
            check_finite(moved, "answers to moved inputs")
            target = target or default_target(acts, y)
            target.check(group, y[0])
            on_answers = moves.on(target)
            figures = changes(target, moved, on_answers(y, numbers), on_answers.valid(y, numbers))
            for name, values in figures.items():
                columns.setdefault(name, []).append(values.cpu())
    samples = sum(map(len, next(iter(columns.values()), [])))
    if samples < 2:
        raise SoftEquivError(f"a bound needs at least 2 held-out samples, and some hundreds to say much; got {samples}")
    delta = (1 - confidence) / len(columns)
    # data often come class by class, and a gambler who sees one class alone for long would win without being right
    order = torch.randperm(samples, generator=generator)
    return StatisticalCertificate(
        group=group,
        within=reach,
        drawn=group.how_drawn(limit),
        acts=repr(acts),
        target=repr(target),
        samples=samples,
        confidence=confidence,
        clip=clip,
        seed=seed,
        figures=tuple(bounded(name, torch.cat(values)[order], delta, clip) for name, values in columns.items()),
        weights_sha256=model_digest(model),
        data_sha256=hashed.hexdigest(),
        versions=versions(),
    )


def checked_confidence(confidence: float) -> float:
    """A number between 0 and 1, as Python's own."""
    number = float(checked_number(confidence, "confidence", SoftEquivError))
    if not 0 < number < 1:
        raise SoftEquivError(f"confidence lies between 0 and 1, such as 0.99; got {confidence!r}")
    return number


def bounded(name: str, values: Tensor, delta: float, clip: float | None) -> BoundedFigure:
    """The figure of one column, (n,)."""
    formula, largest = FORMULAS[name]
    most = clip if clip is not None and name in UNBOUNDED else largest
    if most is None:
        raise SoftEquivError(
            f"a {name} has no largest value, and without one no bound: give clip=, the largest that counts, in the "
            f"answers' unit (the largest here is {float(values.max()):.3g}; choose it without looking at this data)"
        )
    kept = values.clamp(0, most)
    if name == "flip rate":
        bound, method = proportion_upper(int(values.sum()), len(values), delta), "Clopper-Pearson"
    else:
        bound, method = most * mean_upper(kept / most, delta), "betting"
    return BoundedFigure(name, formula, float(kept.mean()), bound, float(most), int((values > most).sum()), method)


FORMULAS: dict[str, tuple[str, float | None]] = {
    "flip rate": ("class of F(gx) is not that of F(x)", 1.0),
    "flipped pixels": ("share of pixels inside the frame whose class in F(gx) is not that in gF(x)", 1.0),
    "total variation": ("1/2 sum_k |p_k - q_k| of the softmax of F(gx) and gF(x)", 1.0),
    "KL": ("KL[F(x) || F(gx)] in nats", LARGEST_KL),
    "pixel KL": ("KL[F(gx) || gF(x)] in nats, mean over pixels inside the frame", LARGEST_KL),
    "distance": ("||F(gx) - gF(x)||", None),
    "mean displacement": ("mean over the points of ||F(gx) - gF(x)||", None),
}
UNBOUNDED = ("KL", "pixel KL", "distance", "mean displacement")


def changes(target: Acts, moved: Tensor, expected: Tensor, inside: Tensor | None) -> dict[str, Tensor]:
    """Every figure of a batch, (N,) each: answers F(gx) to moved samples beside the expected g F(x)."""
    p, q = moved.double(), expected.double()
    maps = isinstance(target, Pictures) and p.ndim == 4
    if p.shape[1] > 1 and (maps or (isinstance(target, Still) and p.ndim == 2)):
        log_p, log_q = p.log_softmax(1), q.log_softmax(1)
        flips = averaged((p.argmax(1) != q.argmax(1)).double(), inside)
        variation = averaged((log_p.exp() - log_q.exp()).abs().sum(1) / 2, inside).clamp(max=1)  # 1 + rounding
        if maps:
            divergence = averaged((log_p.exp() * (log_p - log_q)).sum(1), inside)
            return {"flipped pixels": flips, "total variation": variation, "pixel KL": divergence}
        divergence = (log_q.exp() * (log_q - log_p)).sum(1)
        return {"flip rate": flips, "total variation": variation, "KL": divergence}
    change = p - q if inside is None else (p - q) * (inside if inside.ndim == p.ndim else inside[:, None])
    if isinstance(target, Points):
        return {"mean displacement": change.norm(dim=-1).flatten(1).mean(1)}
    return {"distance": change.flatten(1).norm(dim=1)}


def averaged(values: Tensor, inside: Tensor | None) -> Tensor:
    """The mean of every sample over its pixels inside the frame: (N, ...) to (N,)."""
    if inside is None:
        return values.reshape(len(values), -1).mean(1)
    pixels = inside.flatten(1).sum(1)
    if not bool(pixels.all()):
        raise SoftEquivError(
            f"no pixel of an answer of {values.shape[-2]} x {values.shape[-1]} stays inside the frame; use larger "
            "pictures, or a target with another interpolation"
        )
    return (values * inside).flatten(1).sum(1) / pixels


def model_digest(model: nn.Module) -> str:
    """One sha256 of all weights as the model uses them, and of its buffers, under their names."""
    buffers = ((name, value) for name, value in model.named_buffers() if "parametrizations" not in name.split("."))
    lines = [
        f"{name} {digest(value.reshape(1) if value.ndim == 0 else value)}"
        for name, value in (*bakeable(model), *buffers)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sealed(entries: Mapping[str, Any]) -> str:
    """One hash of all entries of a file."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def read(text: str, where: str) -> StatisticalCertificate:
    """A certificate from JSON text; what is damaged is said."""
    entries = entries_of(text, where, "statistical certificate", {"kind": "statistical", "format": FORMAT})
    seal = entries.pop("sha256", None)
    if seal != sealed(entries):
        raise SoftEquivError(f"{where} is a damaged certificate: its entries do not have its sha256")
    with saying_what_is_damaged(where):
        hints = get_type_hints(BoundedFigure)
        own = {name: entries[name] for name in get_type_hints(StatisticalCertificate)}
        figures = [{key: fitting(entry[key], kind, key) for key, kind in hints.items()} for entry in own["figures"]]
        own |= {
            "group": parse_group(own["group"]),
            "within": read_range(own["within"]),
            "figures": tuple(BoundedFigure(**entry) for entry in figures),
        }
        return StatisticalCertificate(**own)
