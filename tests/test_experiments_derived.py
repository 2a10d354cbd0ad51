"""Are figures and comparisons that show a table's cells made of its cells, and do they say what the rows say?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from softequiv.experiments import whole_network
from softequiv.experiments.arms import ARMS
from softequiv.experiments.augmentation import against_augmentation, beaten
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.pages import Page, write_page
from softequiv.experiments.registry import experiment, names


def made_up(cells: list[Cell], figures: Callable[[Any], dict[str, float]]) -> list[Row]:
    told = {"trained on": 100, "tested on": 50, "samples": []}
    versions = {"torch": "0", "softequiv": "0"}
    return [Row(cell.settings, {**told, **figures(cell.settings)}, 1.0, "here", versions) for cell in cells]


def of_pictures(better: str) -> Callable[[Any], dict[str, float]]:
    """Figures in which one arm is ahead by a tenth."""

    def figures(settings: Any) -> dict[str, float]:
        gain = (0.6 if settings["arm"] == better else 0.5) + 0.001 * settings["seed"]
        scores = {f"{key}{end}": gain for key in ("Acc", "aAcc", "cAcc") for end in ("", " 30")}
        ious = {f"{key}{end}": gain for key in ("mIoU", "aIoU", "cIoU") for end in ("", " 30")}
        return {**scores, **ious, "iErr 30": 0.2, "eErr 30": 0.2, "validation score": gain}

    return figures


def page(name: str, better: str, tmp_path: Any) -> Page:
    own = experiment(name)
    rows = made_up(own.cells("small"), of_pictures(better))
    found = own.page(rows, "small")
    text = write_page(found, rows, tmp_path, f"{name}-small").read_text()
    assert found.title in text
    return found


@pytest.mark.parametrize(
    ("name", "table"),
    [("F2", "T1"), ("F4", "T4"), ("F5", "T5"), ("hard-vs-smooth", "T4"), ("softness-selection", "T2")],
)
@pytest.mark.parametrize("scale", ["smoke", "small", "full"])
def test_its_cells_are_those_of_the_table(name, table, scale):
    own, every = ([cell.key for cell in experiment(part).cells(scale)] for part in (name, table))
    assert own and set(own) <= set(every)


def test_strict_models_are_cells_of_t2_that_t2_leaves_out():
    strict = experiment("full-equivariant").cells("small")
    assert {cell.settings["dial"] for cell in strict if cell.settings["arm"] != "plain"} == {0.0}
    shared = {cell.key for cell in strict} & {cell.key for cell in experiment("T2").cells("small")}
    assert shared == {cell.key for cell in strict if cell.settings["arm"] == "plain"}


@pytest.mark.parametrize(("better", "holds"), [("ours", True), ("paper", False)])
def test_full_equivariance_says_who_is_ahead(better, holds, tmp_path):
    claims = page("full-equivariant", better, tmp_path).claims
    assert claims and all(claim.holds is holds for claim in claims)


@pytest.mark.parametrize(("better", "holds"), [("paper (smooth)", True), ("paper", False)])
def test_hard_against_smooth_says_who_is_ahead(better, holds, tmp_path):
    claims = [claim for claim in page("hard-vs-smooth", better, tmp_path).claims if "paper (smooth) has" in claim.text]
    assert claims and all(claim.holds is holds for claim in claims)


def test_hard_against_smooth_chooses_stops_by_validation():
    def lucky(settings: Any) -> dict[str, float]:
        """The target that is best on the test is the one that validation likes least."""
        figures = of_pictures("none")(settings)
        best = settings["arm"] == "ours (target)" and settings["dial"] == 0.9
        return {**figures, "cIoU 30": figures["cIoU 30"] + 0.2 * best, "validation score": 0.1 if best else 0.5}

    own = experiment("hard-vs-smooth")
    claims = own.page(made_up(own.cells("small"), lucky), "small").claims
    targets = [claim for claim in claims if "ours (target) has" in claim.text]
    assert targets and not any(claim.holds for claim in targets)


def of_dials(settings: Any, better: bool) -> dict[str, float]:
    """Figures in which a mixture's error is its share, and a held target lowers the error at the accuracy of all, or
    not."""
    error = {"mixture": settings["dial"], "held + labels": 0.1 if better else 0.6}.get(settings["arm"], 0.5)
    spread = 0.001 * settings["seed"]
    ends = ("", " 30", " 15", " 45", " 60", " 90", " 180", " all", " disc")
    return {f"{key}{end}": 0.8 + spread for key in ("Acc", "aAcc", "cAcc") for end in ends} | {
        f"iErr{end}": error * (1 + spread) for end in ends
    }


@pytest.mark.parametrize("better", [True, False])
def test_a_dial_of_the_whole_network_is_compared_with_augmentation(better, tmp_path):
    own = experiment("whole-network")
    rows = made_up(own.cells("small"), lambda settings: of_dials(settings, better))
    found = own.page(rows, "small")
    assert found.title in write_page(found, rows, tmp_path, "whole-network-small").read_text()
    held = [
        claim for claim in found.claims if claim.text.endswith("turns, within 30°: held + labels beats augmentation")
    ]
    longer = "turns, within 30°: held + labels beats augmentation for twice as long"
    long = [claim for claim in found.claims if claim.text.endswith(longer)]
    assert len(long) == 4 and all(claim.holds is better for claim in long)
    mixed = [claim for claim in found.claims if "dial of mixture" in claim.text]
    assert len(held) == len(mixed) == 4  # two backbones, trained with turns and without
    assert all(claim.holds is better for claim in held) and all(claim.holds for claim in mixed)
    wide = [
        claim for claim in found.claims if claim.text.endswith("turns, by any angle: held + labels beats augmentation")
    ]
    assert len(wide) == 4
    few_labels = "% of the labels, within 30°: held + labels beats augmentation"
    few = [claim for claim in found.claims if claim.text.endswith(few_labels)]
    assert len(few) == 4 and all(claim.holds is better for claim in few)  # 1 % and 10 %, for two backbones
    table = next(table for table in found.tables if "augmentation beaten" in table.caption)
    assert {range_ for _, range_, *_ in table.rows} == {"within 30°", "by any angle"}
    assert {(range_, rival) for _, range_, rival, *_ in table.rows} == {
        ("within 30°", "augmentation"),
        ("within 30°", "augmentation for twice as long"),
        ("by any angle", "augmentation"),
    }
    for *_, ahead, behind in table.rows:
        assert ("held + labels at " in ahead, "held + labels" in behind.split(", ")) == (better, not better)
    one = own.page([row for row in rows if row["seed"] == 0], "small")
    assert not any(claim.holds for claim in one.claims if "beats" in claim.text)
    assert {row[3] for table in one.tables if "augmentation beaten" in table.caption for row in table.rows} == {"none"}


def test_by_any_angle_the_rival_was_trained_on_any_angle():
    cells = [cell for cell in experiment("whole-network").cells("small") if cell.settings["labels"] == 1]

    def figures(settings: Any) -> dict[str, float]:
        wide = {"cAcc all": 0.9, "iErr all": 0.05} if settings["arm"] == "plain (any angle)" else {}
        return of_dials(settings, True) | wide

    rows = made_up(cells, figures)
    table = beaten(rows, {"within 30°": "30", "by any angle": "all"})
    ahead = {(turned, "held + labels" in by) for _, turned, _, by, _ in table.rows}
    assert ahead == {("within 30°", True), ("by any angle", False)}
    without = [row for row in rows if row["arm"] != "plain (any angle)"]
    assert all("held + labels" in by for *_, by, _ in beaten(without, {"by any angle": "all"}).rows)


def test_augmentation_is_compared_with_as_many_labels():
    cells = [cell for cell in experiment("whole-network").cells("small") if cell.settings["labels"] < 1]
    upright = [row for row in made_up(cells, lambda settings: of_dials(settings, True)) if not row["turned"]]
    assert not against_augmentation(upright, {"within 30°": "30"})  # nothing to compare with
    rows = made_up(experiment("whole-network").cells("small"), lambda settings: of_dials(settings, True))
    others = [row for row in rows if row["labels"] == 1 or not row["turned"]]  # turned pictures with all labels alone
    assert not any("% of the labels" in claim.text for claim in against_augmentation(others, {"within 30°": "30"}))


def test_the_arms_of_the_whole_network_are_known_and_their_costs_told():
    arms = {cell.settings["arm"] for cell in experiment("whole-network").cells("small")}
    assert arms == set(whole_network.COSTS) and arms <= set(ARMS)


def test_choosing_by_validation_is_compared_with_the_test(tmp_path):
    own = experiment("softness-selection")

    def misled(settings: Any) -> dict[str, float]:
        return {"validation score": settings["dial"], "cAcc 30": 1 - settings["dial"]}

    rows = made_up(own.cells("small"), misled)
    assert not own.page(rows, "small").claims[0].holds
    assert page("softness-selection", "ours", tmp_path).claims[0].holds


@pytest.mark.parametrize(("strict", "works"), [(0.9, True), (0.8, False)])
def test_a_typed_vit_is_asked_what_its_dial_moves_and_costs(strict, works, tmp_path):
    """Errors follow the dial or do not; softness 0 is as accurate as plain and beats augmentation, or does neither."""

    def figures(settings: Any) -> dict[str, float]:
        typed, dial, noise = settings["arm"] == "ours (typed)", settings["dial"], 0.001 * settings["seed"]
        error = (dial if works else 0.6) if typed else 1.1 if not settings["turned"] else 0.5
        gain = (strict if typed and dial == 0 else 0.85) + noise
        moved = {f"{key} {end}": gain for key in ("aAcc", "cAcc") for end in ("quarters", "30")}
        return {"Acc": gain, **moved, "iErr quarters": error * (1 + noise), "iErr 30": 0.3, "validation score": gain}

    own = experiment("typed-vit")
    rows = made_up(own.cells("small"), figures)
    found = own.page(rows, "small")
    assert [claim.holds for claim in found.claims[:4]] == [works] * 4
    assert "one seed" in write_page(own.page(rows[: len(rows) // 3], "small"), rows, tmp_path, "typed-vit").read_text()


def test_curves_over_softness_have_a_panel_for_each_backbone(tmp_path):
    found = page("F4", "ours", tmp_path)
    assert len(found.tables) == 2 and len(found.figures) == 1


def test_every_experiment_of_the_paper_is_there():
    expected = "T1 T1b T2 T3 T4 T5 T6 T7 F1 F2 F3 F4 F5 hard-vs-smooth full-equivariant softness-selection"
    assert names() == [*expected.split(), "whole-network", "typed-vit"]
