"""Do T2, T3 and T4 run from data to page, go on where they stopped, and say what their rows say?"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
pytest.importorskip("torchmetrics")
pytest.importorskip("matplotlib")
pytest.importorskip("PIL")
transformers: Any = pytest.importorskip("transformers")

from softequiv.actions import Moves, Pictures  # noqa: E402
from softequiv.asking.answers import tensor_of  # noqa: E402
from softequiv.baselines.canonical import Canonical, prior_loss  # noqa: E402
from softequiv.errors import SoftEquivError  # noqa: E402
from softequiv.experiments import t2, t3, t4  # noqa: E402
from softequiv.experiments.arms import HALF_BATCHES, LONGER, Armed, Setting, armed  # noqa: E402
from softequiv.experiments.backbones import CLASSIFIER, SEGMENTER, PatchwiseLinear, positions_of, with_head  # noqa: E402
from softequiv.experiments.base import Experiment, Scale, reproduce  # noqa: E402
from softequiv.experiments.cells import Cell, Figures, Row, Settings  # noqa: E402
from softequiv.experiments.compare import curves  # noqa: E402
from softequiv.experiments.finetune import (  # noqa: E402
    beside_paper,
    claims_of,
    shortened,
    teach_orientation,
    told,
    trained_and_judged,
)
from softequiv.experiments.judged import judged, turns  # noqa: E402
from softequiv.experiments.pages import drawn  # noqa: E402
from softequiv.experiments.whole_network import WHOLE_NETWORK  # noqa: E402
from softequiv.groups import SO, C, degrees  # noqa: E402
from softequiv.tasks.base import Held  # noqa: E402
from softequiv.tasks.classification import Classification  # noqa: E402
from softequiv.tasks.folders import IMAGENET  # noqa: E402
from softequiv.tasks.segmentation import Segmentation  # noqa: E402
from softequiv.training import Recipe  # noqa: E402

DATA = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TABLES = (t2.T2, t3.T3, t4.T4)
SCALES: tuple[Scale, ...] = ("smoke", "small", "full")
NEEDED = {
    "T2": ("cifar10/cifar10_2k2k.npz", "vit-cifar10", "resnet56-cifar10"),
    "T3": ("imagenet-val-2k", "resnet50-imagenet"),
    "T4": ("camvid", "vit-cifar10"),
}
NEEDED["whole-network"] = NEEDED["T2"]


def needs(*names: str) -> None:
    missing = [name for name in names if not (DATA / name).exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not in {DATA}; set SOFTEQUIV_DATA")


def refused(settings: Settings) -> Figures:
    raise AssertionError("a finished cell was computed again")


@pytest.mark.parametrize("table", (*TABLES, WHOLE_NETWORK), ids=lambda table: table.name)
def test_smoke_runs_from_data_to_page_and_is_not_computed_twice(
    table: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(*NEEDED[table.name])
    monkeypatch.setenv("SOFTEQUIV_DATA", str(DATA))
    path = reproduce(table, "smoke", out=tmp_path)
    text = path.read_text(encoding="utf-8")
    for cell in table.cells("smoke"):
        assert f"| {cell.settings['arm']} | {cell.settings['dial']:g} |" in text
        assert cell.settings["backbone"] in text
    assert "stand-in" in text.lower()
    assert "the paper's" in text.lower()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    assert reproduce(replace(table, work=refused), "smoke", out=tmp_path) == path
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    figures = [json.loads(file.read_text())["figures"] for file in (tmp_path / "cells").rglob("*.json")]
    assert all(row["data"] and row["parameters"] > 0 and row["tested on"] > 0 for row in figures)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
@pytest.mark.parametrize("scale", SCALES)
def test_cells_are_different_and_can_be_written_down(table: Experiment, scale: Scale) -> None:
    cells = table.cells(scale)
    assert len({cell.key for cell in cells}) == len(cells)
    assert [json.loads(json.dumps(dict(cell.settings))) for cell in cells] == [dict(cell.settings) for cell in cells]


def first_places(cells: Sequence[Cell], chosen: Callable[[Settings], bool]) -> list[int]:
    return [place for place, cell in enumerate(cells) if chosen(cell.settings)]


@pytest.mark.parametrize("backbone", t2.STAND_INS)
def test_a_run_that_ends_early_has_every_arm_with_one_seed(backbone: str) -> None:
    cells = [cell for cell in t2.cells("small") if cell.settings["backbone"] == backbone]
    main = first_places(cells, lambda s: s["seed"] == 0 and s["labels"] == 1 and s["epochs"] > 0)
    others = first_places(cells, lambda s: s["seed"] > 0)
    fewer = first_places(cells, lambda s: s["labels"] < 1)
    assert max(main) < min(others) < min(fewer)
    assert {cells[place].settings["arm"] for place in main} == {*t2.STOPS, LONGER}


def test_every_stop_is_trained_with_and_without_turns_by_three_seeds() -> None:
    asked = {(arm, dial, turned, seed) for arm, dials in t2.STOPS.items() for dial in dials
             for turned in (True, False) for seed in range(3) if not (turned and arm == HALF_BATCHES)}  # fmt: skip
    asked |= {(LONGER, 1.0, True, seed) for seed in range(3)}
    for backbone in t2.STAND_INS:
        found = [cell.settings for cell in t2.cells("small") if cell.settings["backbone"] == backbone]
        main = {(s["arm"], s["dial"], s["turned"], s["seed"]) for s in found if s["epochs"] and s["labels"] == 1}
        assert main == asked


def test_full_is_the_papers_setting() -> None:
    settings = [cell.settings for cell in t2.cells("full")]
    assert {s["backbone"] for s in settings} == set(t2.HUB)
    assert {s["dataset"] for s in settings} == {"cifar10", "cifar100"}
    assert {s["epochs"] for s in settings if s["labels"] == 1 and s["arm"] != LONGER} == {30}
    rates = {name: (t2.BACKBONES[name].recipe.rate, t2.BACKBONES[name].recipe.head_rate) for name in t2.HUB}
    assert list(rates.values()) == [(1e-5, 1e-3), (1e-5, 1e-3), (5e-5, 1e-3)]
    assert (t3.FULL.epochs, t3.FULL.batch, t3.FULL.warmup, t3.FULL.layer_decay, t3.FULL.ema) == (15, 128, 4, 0.65, 0.99)
    voc = {name: t4.BACKBONES[name].recipe for name in t4.HUB}
    assert [recipe.rate for recipe in voc.values()] == [5e-5, 1e-5, 1e-4]
    assert {(recipe.epochs, recipe.batch, recipe.warmup) for recipe in voc.values()} == {(100, 32, 8)}


def test_recipes_can_be_written_down() -> None:
    tuned = [part.recipe for part in t2.BACKBONES.values()] + [part.recipe for part in t4.BACKBONES.values()]
    for recipe in [*tuned, t3.SMALL, t3.FULL]:
        assert Recipe.parse(recipe.to_json()) == recipe


def test_no_training_has_no_recipe_and_few_labels_have_small_batches() -> None:
    assert t2.recipe_of(t2.SMALL, {"epochs": 0, "seed": 0}, 400) is None
    for source, every in ((t2.SMALL, 40), (t2.FULL, 8)):  # the last weights, or the best of five
        for arm, batch in (("plain", 50), (HALF_BATCHES, 25)):
            recipe = t2.recipe_of(source, {"arm": arm, "epochs": 40, "seed": 3}, 400)
            assert recipe is not None
            assert (recipe.batch, recipe.epochs, recipe.seed, recipe.evaluate_every) == (batch, 40, 3, every)


# Made-up rows, so that what a page claims follows from figures that are known.


def made_up(table: str, figures: dict[tuple[str, float], tuple[float, float]], **settings: Any) -> list[Row]:
    """Rows of (gain, error) for each stop and two seeds, trained with turns on one backbone."""
    gain, error = ("cIoU", "eErr") if table == "T4" else ("cAcc", "iErr")
    shown = t4.SHOWN | t4.BEYOND if table == "T4" else t2.SHOWN | t2.BEYOND
    rows = []
    for (arm, dial), (score, cost) in figures.items():
        for seed in range(2):
            told = {figure: 0.5 for figure, _, _ in shown.values()}
            told |= {f"{gain} 30": score + 0.001 * seed, f"{error} 30": cost + 0.001 * seed, "validation score": score}
            told |= {"trained on": 40, "tested on": 10}
            own = {"turned": True, "labels": 1.0, "epochs": 2, "size": 32, "arm": arm, "dial": dial, "seed": seed}
            versions = {"torch": "2", "softequiv": "0"}
            rows.append(Row({**own, **settings}, {**told, "data": "x"}, 1.0, "cpu", versions))
    return rows


def outcomes(ours: tuple[float, float]) -> list[bool]:
    """Whether ours beats the paper's construction, is as good as the plain model, and moves with its dial."""
    figures = {
        ("plain", 1.0): (0.8, 0.3),
        ("ours", 0.9): ours,
        ("ours", 0.5): (0.4, 0.05),
        ("paper", 0.9): (0.79, 0.25),
    }
    found = curves(made_up("T2", figures), "cAcc 30", "iErr 30")
    asked = ("lower error than paper", "no less combined accuracy than plain", "moves the network's error")
    claims = claims_of("here", found)
    assert [next(words for words in asked if words in claim.text) for claim in claims] == list(asked)
    assert all(claim.text.startswith("here: ") for claim in claims)
    return [claim.holds for claim in claims]


def test_claims_follow_from_rows() -> None:
    assert outcomes((0.81, 0.2)) == [True, True, True]
    assert outcomes((0.79, 0.3)) == [False, False, True]
    assert outcomes((0.79, 0.01)) == [True, False, False]


def test_pages_of_made_up_rows_name_arms_backbones_and_the_papers_figures() -> None:
    figures = {("plain", 1.0): (0.8, 0.3), ("ours", 0.9): (0.81, 0.2), ("paper", 0.9): (0.79, 0.25)}
    untrained = {"epochs": 0, "turned": False}
    for module, table, backbone, dataset, paper in (
        (t2, t2.T2, "vit-cifar10", "cifar10", "97.24"),
        (t3, t3.T3, t3.STAND_IN, "imagenet", "76.72"),
        (t4, t4.T4, t4.SCRATCH, "camvid", "64.40"),
    ):
        rows = made_up(table.name, figures, backbone=backbone, dataset=dataset)
        if table is not t4.T4:
            rows += made_up(table.name, figures, backbone=backbone, dataset=dataset, **untrained)
        page = table.page(rows, "small")
        assert any(claim.holds for claim in page.claims)
        text = "\n".join(part.markdown() for part in page.tables)
        assert paper in text
        assert all(f"| {arm} | {dial:g} |" in text for arm, dial in figures)
        if table is not t4.T4:
            assert "before any training" in text
        if hasattr(module, "softness_figure"):
            assert b"softness" in drawn(module.softness_figure(rows))
    assert all("accuracy" not in claim.text for claim in t4.page(rows, "small").claims)


def test_data_sets_are_not_mixed_in_one_table() -> None:
    rows = made_up("T2", {("plain", 1.0): (0.8, 0.3)}, backbone=t2.HUB[0], dataset="cifar10")
    rows += made_up("T2", {("plain", 1.0): (0.2, 0.3)}, backbone=t2.HUB[0], dataset="cifar100")
    tables = [table.markdown() for table in t2.page(rows, "full").tables]
    assert len(tables) == 4
    assert not any("80.05" in table and "20.05" in table for table in tables)


def test_the_stop_beside_the_paper_is_chosen_by_validation_and_not_by_the_test() -> None:
    rows = made_up("T2", {("ours", 0.5): (0.9, 0.1), ("ours", 0.9): (0.8, 0.2)}, backbone="vit-cifar10")
    rows = [
        replace(row, figures={**row.figures, "validation score": 0.7 if row["dial"] == 0.9 else 0.6}) for row in rows
    ]
    (line,) = beside_paper(rows, t2.PAPER_NAMES, t2.SHOWN, "cAcc", t2.paper_figures("cifar10")).rows
    assert line[1] == "Ours (ours 0.9)"
    assert list(line[-4:]) == ["97.79", "96.69", "97.24", "7.02"]


def test_cutoffs_stand_side_by_side() -> None:
    figures = {(arm, dial): (0.5, 0.1) for arm, dials in t4.CUTOFFS.items() for dial in dials}
    (table,) = t4.cutoff_tables(made_up("T4", {**figures, ("ours", 0.5): (0.5, 0.1)}, backbone=t4.SCRATCH))
    assert [line[0].split()[0] for line in table.rows] == ["hard", "smooth", "softness", "least", "least"]


# Backbones: the stand-ins are what they are said to be, and those of the hub are opened by the same code.


@pytest.mark.parametrize(("backbone", "least"), [("vit-cifar10", 0.8), ("resnet56-cifar10", 0.88)])
def test_stand_ins_know_cifar_through_the_tasks_normalisation(
    backbone: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("cifar10/cifar10_2k2k.npz", backbone)
    monkeypatch.setenv("SOFTEQUIV_DATA", str(DATA))
    tuned = t2.BACKBONES[backbone]
    task = t2.pictures("cifar10, 4,000 pictures", tuned.normalised, tuned.size)
    x, y = task.test.batch(torch.arange(100))
    with torch.no_grad():
        right = tensor_of(t2.classifier(backbone, tuned.normalised, 10)(x)).argmax(1) == y
    assert right.float().mean() >= least


def random_pictures(side: int, classes: int, targets: Callable[[int], Tensor]) -> Held:
    """Eight pictures with targets made from the number of classes."""
    return Held(torch.randint(256, (8, 3, side, side), dtype=torch.uint8), targets(classes), IMAGENET)


TINY = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=8, num_labels=7, **TINY)
    ),
    "vit without a head": lambda: transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **TINY)),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(image_size=32, patch_size=8, **TINY)),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=7)
    ),
}
TINY_SEGFORMER = {
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
    "decoder_hidden_size": 16,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("arm", ["ours", "paper"])
def test_architectures_of_the_hub_go_through_one_step_of_t2(name: str, arm: str, tmp_path: Path) -> None:
    saved = ARCHITECTURES[name]()
    saved.save_pretrained(tmp_path)
    model: Any = t2.classifier(str(tmp_path), IMAGENET, 5)
    for key, value in saved.base_model.state_dict().items():
        if "pooler" not in key:
            assert torch.equal(value, model.base_model.state_dict()[key])
    part = random_pictures(32, 5, lambda classes: torch.arange(8) % classes)
    task = Classification(part, part, part, 5)
    known = turns(task.acts, 30)
    soft = armed(arm, model, 0.9, Setting(SO(2), degrees(30), task.acts, 3))
    before = {key: value.clone() for key, value in soft.model.named_parameters()}
    found = trained_and_judged(
        soft,
        task,
        replace(t2.FULL, epochs=1, batch=8),
        partial(judged, ranges={"30": known}, disc="30"),
        known,
        t2.varied(known, 32, True),
    )
    assert {"Acc", "aAcc 30", "cAcc disc", "kept", "validation score"} <= set(found)
    assert found["trained on"] == 8
    assert any(not torch.equal(value, before[key]) for key, value in soft.model.named_parameters())


@pytest.mark.parametrize("name", ["vit", "dinov2", "segformer"])
def test_architectures_of_the_hub_go_through_one_step_of_t4(name: str, tmp_path: Path) -> None:
    if name == "segformer":
        config = transformers.SegformerConfig(num_labels=9, **TINY_SEGFORMER)
        saved = transformers.SegformerForSemanticSegmentation(config)
    else:
        saved = ARCHITECTURES[name]()
    saved.save_pretrained(tmp_path)
    model = t4.network(str(tmp_path), IMAGENET, 64, 5)  # twice the size of the ViT's own pictures
    part = random_pictures(64, 5, lambda classes: torch.randint(classes, (8, 64, 64), dtype=torch.uint8))
    task = Segmentation(part, part, part, 5)
    known = turns(task.acts, 30)
    soft = t4.armed_for_masks("ours", model, 0.7, Setting(SO(2), degrees(30), task.acts, 3), 64)
    found = trained_and_judged(soft, task, replace(t4.FULL, epochs=1, batch=8, warmup=0.0), t4.judged_masks, known)
    assert {"mIoU", "aIoU 30", "cIoU 90", "eErr disc"} <= set(found)


def test_a_segformer_keeps_its_decoder_and_changes_its_classes_alone() -> None:
    saved = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=9, **TINY_SEGFORMER))
    headed = with_head(saved, SEGMENTER, 5)
    own = saved.state_dict()
    new = {name for name, value in headed.state_dict().items() if name not in own or not torch.equal(value, own[name])}
    assert new == {"decode_head.classifier.weight", "decode_head.classifier.bias"}


def test_weights_that_are_missing_are_named() -> None:
    empty = SimpleNamespace(config=ARCHITECTURES["vit"]().config, state_dict=dict)
    with pytest.raises(SoftEquivError, match=r"has no weights for vit\.embeddings"):
        with_head(empty, CLASSIFIER, 5)


def test_positions_are_read_where_the_patches_are() -> None:
    side = torch.arange(4.0)
    ramp = torch.stack([side[:, None].expand(4, 4), side.expand(4, 4)], -1).reshape(1, 16, 2)
    table = torch.cat([torch.full((1, 1, 2), 9.0), ramp], 1)
    assert torch.equal(positions_of(table, 17), table)
    larger = positions_of(table, 65)
    assert torch.equal(larger[:, 0], table[:, 0])
    inner = larger[0, 1:, 0].reshape(8, 8)[2:6]  # away from the border, where bicubic reading is linear on a ramp
    places = (torch.arange(8) + 0.5) / 2 - 0.5
    torch.testing.assert_close(inner, places[2:6, None].expand(4, 8), atol=0.1, rtol=0)


def test_scores_of_patches_are_where_their_patches_are() -> None:
    class Means(nn.Module):
        """A backbone whose tokens are the means of patches, after a token of the class."""

        config = SimpleNamespace(patch_size=4, hidden_size=3)

        def forward(self, pixel_values: Tensor) -> Any:
            tokens = nn.functional.avg_pool2d(pixel_values, 4).flatten(2).mT
            return SimpleNamespace(last_hidden_state=torch.cat([torch.zeros(len(tokens), 1, 3), tokens], 1))

    model, x = PatchwiseLinear(Means(), 2), torch.randn(2, 3, 8, 12)
    expected = torch.einsum("kc,nchw->nkhw", model.head.weight, nn.functional.avg_pool2d(x, 4))
    torch.testing.assert_close(model(x), expected + model.head.bias[:, None, None])


def test_enlarged_pictures_have_their_size_and_mean() -> None:
    grey = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    ready = t2.Enlarged(IMAGENET, 224)(grey)
    assert ready.shape == (2, 3, 224, 224)
    torch.testing.assert_close(ready[:, :, :32, :32], IMAGENET(grey))


def test_one_picture_of_each_class_teaches_and_the_other_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    folder = tmp_path / "imagenet-val-2k"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (16, 16), (40 * number, 0, 0)).save(folder / f"{number}.png")
    (folder / "labels.tsv").write_text("".join(f"{number}.png\t{number // 2}\n" for number in range(6)))
    (tmp_path / t3.STAND_IN).mkdir()
    (tmp_path / t3.STAND_IN / "preprocess.json").write_text('{"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}')
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path))
    t3.one_of_each.cache_clear()
    splits = set()
    for seed in range(4):
        task = t3.one_of_each(seed, None, 16)
        shades = [
            {round(255 * float(shade) / 40) for shade in part.batch(torch.arange(3))[0][:, 0, 0, 0]}
            for part in (task.train, task.test)
        ]
        assert shades[0] | shades[1] == set(range(6))
        assert task.train.labels().tolist() == task.test.labels().tolist() == [0, 1, 2]
        splits.add(tuple(sorted(shades[0])))
    t3.one_of_each.cache_clear()
    assert len(splits) > 1


def imagenet_of_ten_classes(folder: Path) -> None:
    """Folders as ImageNet has them, with noise for pictures."""
    from PIL import Image

    for part, count in (("train", 6), ("val", 2)):
        for label in range(10):
            place = folder / part / f"n{label:08}"
            place.mkdir(parents=True)
            for number in range(count):
                noise = torch.randint(256, (40, 44, 3), dtype=torch.uint8)
                Image.fromarray(noise.numpy()).save(place / f"{number}.jpg")


def test_the_full_recipe_of_t3_trains_and_judges_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strengths: list[int] = []
    tried: dict[str, Any] = {}

    def brightened(operations: int, strength: int) -> Callable[[Tensor], Tensor]:
        strengths.append(strength)
        return lambda picture: (picture // 2 + strength).to(torch.uint8)

    def watched(arm: Any, task: Any, recipe: Any, judge: Any, moves: Any, transform: Any) -> Figures:
        tried.update(recipe=recipe, task=task, transform=transform)
        return trained_and_judged(arm, task, recipe, judge, moves, transform)

    transforms = SimpleNamespace(RandAugment=brightened)  # torchvision is no dependency of the tests
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", transforms)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", SimpleNamespace(v2=transforms))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=t3.CLASSES, **TINY)
    monkeypatch.setattr(t3, "opened", lambda *_: transformers.ViTForImageClassification(config))
    monkeypatch.setattr(t3, "trained_and_judged", watched)
    monkeypatch.setattr(t3, "SIZE", 32)
    monkeypatch.setattr(t3, "FULL", replace(t3.FULL, batch=16))
    imagenet_of_ten_classes(tmp_path / "imagenet")
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path))
    t3.imagenet.cache_clear()
    cell = next(cell for cell in t3.cells("full") if cell.settings["arm"] == "ours")
    figures = t3.work({**cell.settings, "epochs": 5})
    t3.imagenet.cache_clear()

    assert {figure for figure, _, _ in (t3.SHOWN | t3.BEYOND).values()} <= set(figures) and math.isfinite(
        figures["last loss"]
    )
    assert figures["trained on"] + len(tried["task"].validation) == 60 and figures["tested on"] == 20
    assert tried["recipe"] == replace(t3.FULL, epochs=5)
    assert tried["task"].label_smoothing == t3.SMOOTHING
    assert set(strengths) <= set(range(7, 12)) and len(strengths) == 5 * (figures["trained on"] // 16) * 16

    x, y = tried["task"].train.batch(torch.arange(16))
    varied, mixed = tried["transform"](x, y, torch.Generator().manual_seed(0))
    assert varied.shape == x.shape and not any(map(torch.equal, varied, x))
    assert mixed.shape == (16, t3.CLASSES) and torch.allclose(mixed.sum(1), torch.ones(16))
    assert (mixed > 0).sum(1).max() == 2


def test_missing_data_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path))
    with pytest.raises(SoftEquivError, match="set the environment variable SOFTEQUIV_DATA"):
        t2.first_of(t2.ARCHIVES["cifar10"])
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert t2.first_of(t2.ARCHIVES["cifar10"]).name == "cifar-10-batches-bin"
    with pytest.raises(SoftEquivError, match="there is no data set 'stl10'"):
        t2.pictures("stl10", IMAGENET, 32)


def test_bf16_training_leaves_a_model_of_transformers_as_its_class_has_it() -> None:
    config = transformers.SegformerConfig(num_labels=5, **TINY_SEGFORMER)
    model = transformers.SegformerForSemanticSegmentation(config)
    part = random_pictures(32, 5, lambda classes: torch.randint(classes, (8, 32, 32), dtype=torch.uint8))
    recipe = Recipe(epochs=1, batch=8, precision="bf16", rate=0.0)
    moves = Moves(Pictures(), SO(2), elements=[SO(2).identity])
    answers: list[Tensor] = []

    def judge(judged: nn.Module, task: Segmentation) -> dict[str, float]:
        with torch.no_grad():
            answers.append(tensor_of(judged.eval()(task.test.batch(torch.arange(2))[0])))
        return {}

    for asked in (None, recipe):
        trained_and_judged(Armed(model), Segmentation(part, part, part, 5), asked, judge, moves)
    assert answers[1].dtype == torch.float32
    assert answers[0].shape == answers[1].shape


def test_a_scorer_learns_orientation_before_the_model_behind_it_moves() -> None:
    bright_above = torch.linspace(240, 0, 16).byte()[:, None].expand(32, 3, 16, 16)
    part = Held(
        bright_above + torch.randint(20, (32, 3, 16, 16), dtype=torch.uint8) // 2, torch.arange(32) % 2, IMAGENET
    )
    convolution = nn.Conv2d(3, 2, 16)
    next(bias for name, bias in convolution.named_parameters() if name == "bias").requires_grad_(False)
    model = Canonical(nn.Sequential(convolution, nn.Flatten()), C(4), 3, (4, 4))
    behind = convolution.weight.clone()
    x, _ = part.batch(torch.arange(32))
    turned = torch.arange(32) % 4

    def missed() -> float:
        with torch.no_grad():
            return float(prior_loss(model.eval().scores(model.turns(x, turned)), turned))

    before = missed()
    teach_orientation(
        model, Classification(part, part, part, 2), Recipe(epochs=20, batch=8, rate=1e-5), turns(Pictures(), 30)
    )
    assert missed() < 0.7 * before
    assert torch.equal(convolution.weight, behind)
    assert [weight.requires_grad for weight in convolution.parameters()] == [True, False]


def test_told_and_shortened() -> None:
    assert told({"turned": False, "epochs": 3}) == "trained without turns"
    assert told({"turned": False, "epochs": 0, "labels": 1.0}) == "before any training"
    part = random_pictures(8, 3, lambda classes: torch.arange(8) % classes)
    task = Classification(part, part, part, 3)
    assert shortened(task, None) is task
    few = shortened(task, 2)
    assert [len(few.train), len(few.validation), len(few.test)] == [2, 2, 2]
