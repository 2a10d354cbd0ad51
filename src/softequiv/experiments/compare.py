"""Which arm is better? Curves of a gain against an error, one point for each stop of a dial, compared stop by stop."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from softequiv.experiments.arms import LONGER
from softequiv.experiments.cells import Row
from softequiv.experiments.pages import LOWER, Claim, Figure, Spread, spread_over_seeds

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "os^Dv<>xP"
SCORE = "validation score"


@dataclass(frozen=True)
class Stop:
    """One stop of a dial: what is gained (more is better), what it costs (an error, less is better), and the score on
    validation data by which one would choose it, where rows have one."""

    dial: float
    gain: Spread
    error: Spread
    validation: float = math.nan


Curves = dict[str, list[Stop]]
Kinds = Mapping[str, Sequence[str]]  # what our dials are of, in words, and their arms


def style(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """How an arm is drawn among others: a colour for its family, which is what stands before a bracket or a plus, and
    a mark of its own.

    >>> among = ["plain", "ours", "ours (target)", "ours + held"]
    >>> {style(arm, among)["color"] for arm in among[1:]} == {COLOURS[1]}
    True
    """
    place, families = arms.index(arm), [re.split(r" [(+]", name)[0] for name in arms]
    return {
        "color": COLOURS[list(dict.fromkeys(families)).index(families[place]) % len(COLOURS)],
        "marker": MARKS[place % len(MARKS)],
        "markersize": 4,
        "linewidth": 1,
    }


def curves(rows: Sequence[Row], gain: str, error: str) -> Curves:
    """The stops of each arm, in the order of its dial."""
    gains = spread_over_seeds(rows, gain, "arm", "dial")
    errors = spread_over_seeds(rows, error, "arm", "dial")
    validated = spread_over_seeds([row for row in rows if SCORE in row.figures], SCORE, "arm", "dial")
    found: Curves = {}
    for (arm, dial), value in gains.items():
        score = validated[arm, dial].mean if (arm, dial) in validated else math.nan
        found.setdefault(arm, []).append(Stop(dial, value, errors[arm, dial], score))
    return {arm: sorted(stops, key=lambda stop: stop.dial) for arm, stops in found.items()}


def answers(ours: Sequence[Stop], theirs: Stop) -> Stop | None:
    """Our stop with the least error among those that gain as much as theirs, up to one standard deviation of theirs."""
    able = [stop for stop in ours if stop.gain.mean >= theirs.gain.mean - known(theirs.gain.std)]
    return min(able, key=lambda stop: stop.error.mean) if able else None


def stops_of(found: Curves, arms: Sequence[str]) -> list[Stop]:
    """The stops of all these arms."""
    return [stop for arm in arms for stop in found.get(arm, [])]


def one_of_ours(found: Curves, arms: Sequence[str], what: str = "") -> tuple[str, str]:
    """Those of the arms that are there, as a claim has them, the same on every page, and what its evidence must add;
    `what` says which of our dials they are.

    >>> one_of_ours({"a": [], "b": [], "c": []}, ["a", "b", "d"], "of the network")
    ('one of our dials of the network', 'a or b: ')
    >>> one_of_ours({"a": [], "b": []}, ["b", "d"])
    ('b', '')
    """
    there = [arm for arm in arms if arm in found]
    if len(there) == 1:
        return there[0], ""
    return f"one of our dials {what}".rstrip(), f"{', '.join(there[:-1])} or {there[-1]}: "


def apart(less: Spread, more: Spread) -> bool:
    """Whether one figure is below another by more than both standard deviations; of one seed nothing is known."""
    return less.mean + less.std < more.mean - more.std


def of_one_seed(stops: Sequence[Stop]) -> bool:
    """Whether some stop was trained once, and has no spread."""
    return any(min(stop.gain.count, stop.error.count) == 1 for stop in stops)


def if_of_one_seed(stops: Sequence[Stop]) -> str:
    """A warning where some stop was trained once."""
    return " (one seed)" if of_one_seed(stops) else ""


def in_short(text: str, stops: Sequence[Stop]) -> str:
    """An entry of the index, with a mark where some stop was trained once."""
    return f"{text} ¹" if of_one_seed(stops) else text


def better_at_equal_gain(found: Curves, arms: Sequence[str], other: str, what: str = "") -> Claim:
    """Whether for every stop of the other dial one of ours gains as much at an error that is clearly lower."""
    ours, theirs = stops_of(found, arms), found[other]
    pairs = [(best, stop) for stop in theirs if (best := answers(ours, stop)) is not None]
    ratios = [best.error.mean / stop.error.mean for best, stop in pairs if stop.error.mean > 0]
    lower = sum(best.error.mean < stop.error.mean for best, stop in pairs)
    clear = sum(apart(best.error, stop.error) for best, stop in pairs)
    who, told = one_of_ours(found, arms, what)
    middle = f"; median ratio of the errors {statistics.median(ratios):.2f}" if ratios else ""
    above = f"any of {'ours' if what else who}"
    unreached = f"; {len(theirs) - len(pairs)} have more accuracy than {above}" if len(pairs) < len(theirs) else ""
    seen = [*theirs, *(best for best, _ in pairs)]
    return Claim(
        f"at a combined accuracy equal within one standard deviation, {who} has a lower error than {other}, beyond the "
        "spread",
        clear == len(theirs),
        f"{told}at {clear} of {len(theirs)} stops of {other}, beyond one standard deviation of both errors (on average "
        f"at {lower}){unreached}{middle}{if_of_one_seed(seen)}",
        f"{LOWER} Dials {what}" if what else "",
        other,
        in_short(f"{clear} of {len(theirs)}" + (f" × {statistics.median(ratios):.2g}" if ratios else ""), seen),
    )


def at_least_as_good(found: Curves, arms: Sequence[str], what: str = "") -> Claim:
    """Whether the stop of our dials that validation prefers gains no less than the model without one: the best of many
    on the test would do so by chance.
    """
    best = max((stop for stop in stops_of(found, arms) if validated(stop)), key=lambda stop: stop.validation)
    free = found["plain"][0]
    who, told = one_of_ours(found, arms, what)
    return Claim(
        f"at the stop that validation prefers, {who} has no less combined accuracy than plain, beyond the spread",
        not apart(best.gain, free.gain) and not of_one_seed([best, free]),
        f"{told}{best.gain.told(100, 2)} at {best.dial:g} against {free.gain.told(100, 2)}, with an error of "
        f"{best.error.told(1, 3)} against {free.error.told(1, 3)}{if_of_one_seed([best, free])}",
        "Does the dial cost accuracy?",
        f"dials {what}",
        in_short(f"{100 * best.gain.mean:.1f} for {100 * free.gain.mean:.1f}", [best, free]),
    )


def validated(stop: Stop) -> bool:
    """Whether a stop was tried on validation data: models that are judged before any training were not."""
    return not math.isnan(stop.validation)


def lower_errors(found: Curves, kinds: Kinds, rivals: Sequence[str]) -> list[Claim]:
    """Whether our dials of each kind have a lower error than each rival, as far as they are there."""
    return [
        better_at_equal_gain(found, arms, other, what)
        for other in rivals
        for what, arms in kinds.items()
        if other in found and stops_of(found, arms)
    ]


def as_good_as_plain(found: Curves, kinds: Kinds) -> list[Claim]:
    """Whether our dials of each kind gain no less than the plain model, as far as they are there and were validated."""
    return [
        at_least_as_good(found, arms, what)
        for what, arms in kinds.items()
        if "plain" in found and any(map(validated, stops_of(found, arms)))
    ]


def beats(found: Curves, arm: str, base: Stop, rival: str = "augmentation") -> Claim:
    """Whether a stop has a lower error than augmentation at its accuracy, or more accuracy at its error, clearly.

    Equal means within one standard deviation of augmentation's figure over seeds; lower and more, beyond the sum of
    both standard deviations. One seed shows nothing clearly.
    """
    several = [stop for stop in found[arm] if min(stop.gain.count, base.gain.count) > 1]
    lower = [
        stop for stop in several if stop.gain.mean >= base.gain.mean - base.gain.std and apart(stop.error, base.error)
    ]
    higher = [
        stop for stop in several if stop.error.mean <= base.error.mean + base.error.std and apart(base.gain, stop.gain)
    ]
    shown = answers(lower or found[arm], base) or max(found[arm], key=lambda stop: stop.gain.mean)
    if higher and not lower:
        shown = max(higher, key=lambda stop: stop.gain.mean)
    tried = f" of {len(found[arm])} stops" if len(found[arm]) > 1 else ""
    return Claim(
        f"{arm} beats {rival}",
        bool(lower or higher),
        f"at {shown.dial:g}{tried}: combined accuracy {shown.gain.told(100, 2)}, error {shown.error.told(1, 3)}; "
        f"{rival} {base.gain.told(100, 2)}, {base.error.told(1, 3)}{if_of_one_seed([shown, base])}",
        f"Is {rival} beaten?",
        arm,
        in_short(" / ".join(f"{100 * s.gain.mean:.1f} at {s.error.mean:.3f}" for s in (shown, base)), [shown, base]),
    )


def moves_the_error(found: Curves, arm: str) -> Claim:
    """Whether turning the dial up never lowers the error, by Spearman's rank correlation over its stops, and moves it
    at all: its ends are further apart than their spreads, which those of one seed cannot show.
    """
    stops = found[arm]
    rank = spearman([stop.dial for stop in stops], [stop.error.mean for stop in stops])
    low, high = stops[0].error, stops[-1].error
    within = known(low.std) + known(high.std)
    monotone, moved, falls = rank > 0.99, low.mean + within < high.mean, high.mean + within < low.mean
    why = ", falling" if falls else ", within the spread" if not moved else "" if monotone else ", not monotone"
    return Claim(
        f"the dial of {arm} moves the network's error monotonically",
        monotone and moved and not of_one_seed([stops[0], stops[-1]]),
        f"rank correlation {rank:.2f} over {len(stops)} stops, from {low.mean:.3g} to {high.mean:.3g}"
        f"{why}{if_of_one_seed(stops)}",
        "Does the dial move the network's error?",
        arm,
        in_short(f"{low.mean:.2g} → {high.mean:.2g}{why}", stops),
    )


def dials_move(found: Curves, arms: Sequence[str]) -> list[Claim]:
    """Whether the dials of these arms move the error, of those that have more than one stop."""
    return [moves_the_error(found, arm) for arm in arms if len(found.get(arm, ())) > 1]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks.

    >>> spearman([1, 2, 3], [1, 4, 9]), spearman([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]

    a, b = ranks(x), ranks(y)
    mean = (len(a) - 1) / 2
    size = math.sqrt(sum((v - mean) ** 2 for v in a) * sum((v - mean) ** 2 for v in b))
    return sum((v - mean) * (w - mean) for v, w in zip(a, b, strict=True)) / size if size else math.nan


def known(value: float) -> float:
    """A spread, nothing where there was one seed."""
    return 0.0 if math.isnan(value) else value


def beside_augmentation(panels: Mapping[str, Curves]) -> dict[str, Curves]:
    """Panels "..., with turns" and "..., without turns", the second with the plain models of the first in it as well.

    >>> shown = beside_augmentation({"A, with turns": {"plain": []}, "A, without turns": {"ours": []}})
    >>> list(shown["A, without turns"])
    ['ours', 'plain (with turns)']
    """
    shown = {}
    for name, found in panels.items():
        augmented = panels.get(name.replace("without turns", "with turns"), found)
        others = {"plain": "plain (with turns)", LONGER: LONGER} if augmented is not found else {}
        shown[name] = found | {told: augmented[arm] for arm, told in others.items() if arm in augmented}
    return shown


def trade_off(name: str, panels: Mapping[str, Curves], gain: str, error: str, *, scale: float = 100.0) -> Figure:
    """Gain against error, a panel for each setting and a line for each arm, with the spread over seeds."""
    arms = list(dict.fromkeys(arm for found in panels.values() for arm in found))

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        drawn: dict[str, Any] = {}  # an arm need not be in every panel
        for axis, (title, found) in zip(axes, panels.items(), strict=True):
            for arm, stops in found.items():
                drawn[arm] = axis.errorbar(
                    [stop.error.mean for stop in stops],
                    [stop.gain.mean * scale for stop in stops],
                    xerr=[known(stop.error.std) for stop in stops],
                    yerr=[known(stop.gain.std) * scale for stop in stops],
                    **style(arm, arms),
                )
            axis.set_title(title)
            axis.set_xlabel(error)
            axis.locator_params(axis="x", nbins=5)
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(gain)
        canvas.legend(drawn.values(), drawn.keys(), fontsize=8, loc="outside right center")

    alt = f"{gain} against {error} for {', '.join(arms)}; up and to the left is better"
    return Figure(name, alt, draw, (3.6 * len(panels) + 1.4, 3.6))
