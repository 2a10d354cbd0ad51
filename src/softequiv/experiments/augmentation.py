"""Is augmentation beaten, where and by what? Arms beside the plain model that was trained on turned pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from softequiv.experiments.cells import Row
from softequiv.experiments.compare import beats, curves
from softequiv.experiments.finetune import by_training, of, told
from softequiv.experiments.pages import Claim, Table

ANY_ANGLE = "plain (any angle)"  # augmentation by all turns
OF_THE_NETWORK = ("ours", "penalty", "held + labels", "mixture", "ours + held", "mixture + held")


def trained(rows: Sequence[Row]) -> list[Row]:
    """The rows of models that were trained at all."""
    return [row for row in rows if row["epochs"]]


def compared(rows: Sequence[Row], way: Sequence[Row], judged: str) -> dict[str, Claim]:
    """Whether each arm, trained one way, beats the plain model that had turned pictures and as many labels; judged by
    any angle, the one that had pictures turned by any angle, if there is one."""
    alike = told({**way[0].settings, "turned": True})
    for arm in (ANY_ANGLE, "plain") if judged == "all" else ("plain",):
        turned = [row for row in of(rows, backbone=way[0]["backbone"], arm=arm) if row["turned"] or arm == ANY_ANGLE]
        rivals = [row for row in turned if told({**row.settings, "turned": True}) == alike]
        if rivals:
            base = curves(rivals, f"cAcc {judged}", f"iErr {judged}")[arm][0]
            found = curves(way, f"cAcc {judged}", f"iErr {judged}")
            return {own: beats(found, own, base) for own in found if own not in (arm, "plain")}
    return {}


def against_augmentation(rows: Sequence[Row], judged: str) -> list[Claim]:
    """The claim of each dial of the network, for every way of training, judged by the figures of a range."""
    return [
        replace(found[arm], text=f"{name}: {found[arm].text}")
        for name, mine in by_training(trained(rows)).items()
        for found in (compared(rows, mine, judged),)
        for arm in OF_THE_NETWORK
        if arm in found
    ]


def beaten(rows: Sequence[Row], ranges: Mapping[str, str]) -> Table:
    """Where augmentation is beaten and by what, a line for each way of training and range of turns."""
    lines = []
    for name, mine in by_training(trained(rows)).items():
        for turned, judged in ranges.items():
            found = compared(rows, mine, judged)
            ahead = [f"{arm} {claim.evidence.partition(';')[0]}" for arm, claim in found.items() if claim.holds]
            behind = [arm for arm, claim in found.items() if not claim.holds]
            if found:
                lines.append([name, turned, "; ".join(ahead) or "none", ", ".join(behind) or "none"])
    return Table(
        "## Where is augmentation beaten?\n\nBeside the plain model trained on turned pictures with as many labels, by "
        "a lower error at its combined accuracy, or more accuracy at its error, beyond the spread over seeds. What has "
        f"one seed cannot. Judged by any angle, the rival is '{ANY_ANGLE}' where it was trained.",
        ["trained", "turned", "beaten by", "not by"],
        lines,
    )
