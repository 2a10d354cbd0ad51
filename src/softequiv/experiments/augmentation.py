"""Is augmentation beaten, where and by what? Arms beside the plain model that was trained on turned pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from softequiv.experiments.arms import HALF_BATCHES, LONGER
from softequiv.experiments.cells import Row
from softequiv.experiments.compare import Curves, beats, curves
from softequiv.experiments.finetune import by_training, of, told
from softequiv.experiments.pages import Claim, Table

ANY_ANGLE = "plain (any angle)"  # augmentation by all turns
PLAIN = ("plain", LONGER, ANY_ANGLE)
DIALS = ("ours", "penalty", "held + labels", HALF_BATCHES, "mixture", "ours + held", "mixture + held")
# What augmentation is called, by its arms, the first of which that is there is the rival.
RIVALS = {"augmentation": ("plain",), "augmentation for twice as long": (LONGER,)}
BY_ANY_ANGLE = {"augmentation": (ANY_ANGLE, "plain")}


def trained(rows: Sequence[Row]) -> list[Row]:
    """The rows of models that were trained at all."""
    return [row for row in rows if row["epochs"]]


def against(found: Curves, turned: Curves, rivals: Mapping[str, Sequence[str]] = RIVALS) -> dict[str, dict[str, Claim]]:
    """Whether each arm beats the plain model that had turned pictures, by the rival's name and then the arm's."""
    own = [arm for arm in found if arm not in PLAIN]
    claims: dict[str, dict[str, Claim]] = {}
    for rival, arms in rivals.items():
        base = next((turned[arm][0] for arm in arms if arm in turned), None)
        if own and base is not None:
            claims[rival] = {arm: beats(found, arm, base, rival) for arm in own}
    return claims


def compared(rows: Sequence[Row], way: Sequence[Row], judged: str) -> dict[str, dict[str, Claim]]:
    """The same for arms that were trained one way, beside the plain model that had as many labels; judged by any angle,
    the one that had pictures turned by any angle, if there is one."""
    alike = told({**way[0].settings, "turned": True})
    turned = [
        row
        for row in of(rows, backbone=way[0]["backbone"])
        if row["arm"] == ANY_ANGLE or (row["turned"] and row["arm"] in PLAIN)
        if told({**row.settings, "turned": True}) == alike
    ]
    found, theirs = (curves(some, f"cAcc {judged}", f"iErr {judged}") for some in (way, turned))
    return against(found, theirs, BY_ANY_ANGLE if judged == "all" else RIVALS)


def against_augmentation(rows: Sequence[Row], ranges: Mapping[str, str]) -> list[Claim]:
    """The claim of each dial of the network, for every way of training and range of turns."""
    return [
        replace(found[arm], text=f"{name}, {turned}: {found[arm].text}")
        for name, mine in by_training(trained(rows)).items()
        for turned, judged in ranges.items()
        for found in compared(rows, mine, judged).values()
        for arm in DIALS
        if arm in found
    ]


def beaten(rows: Sequence[Row], ranges: Mapping[str, str]) -> Table:
    """Where augmentation is beaten and by what, a line for each way of training and range of turns."""
    lines = []
    for name, mine in by_training(trained(rows)).items():
        for turned, judged in ranges.items():
            for rival, found in compared(rows, mine, judged).items():
                ahead = [f"{arm} {claim.evidence.partition(';')[0]}" for arm, claim in found.items() if claim.holds]
                behind = [arm for arm, claim in found.items() if not claim.holds]
                lines.append([name, turned, rival, "; ".join(ahead) or "none", ", ".join(behind) or "none"])
    return Table(
        "## Where is augmentation beaten?\n\nRivals are plain models trained on turned pictures with as many labels. "
        "An arm beats one by a lower error at equal combined accuracy, or by a higher accuracy at equal error, beyond "
        "the spread over seeds; an arm with one seed cannot. Arms that do not filter weights evaluate the model twice "
        "a step, augmentation once: trained for twice as long, it takes as many passes. Judged by any angle, the rival "
        f"is '{ANY_ANGLE}' where it was trained.",
        ["trained", "turned", "rival", "beaten by", "not by"],
        lines,
    )
