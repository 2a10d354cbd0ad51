"""What must hold for the commands that train and try out: they end where an undisturbed run ends, and say what is
wrong with model, data and settings in a sentence."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import softequiv as se
from shell import call, found
from softequiv.adapt.opening import open_model, save_model
from softequiv.cli import training
from softequiv.experiments import bench, costs, registry, speed
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.pages import Page
from softequiv.tasks.named import open_task
from softequiv.training import loop, saved, tune
from softequiv.training.heads import new_head
from softequiv.training.parameters import head_names
from zoo import CASES

CLASSES = 5  # of the zoo's ViT
QUICK = ("--epochs", 2, "--batch", 4, "--rate", 0.01)


def scorer(model: Any) -> Any:
    """The layer that gives the scores."""
    return model.get_submodule(head_names(model)[0])


def draw(path: Path, colour: int, shape: tuple[int, int] = (24, 24)) -> None:
    """A noisy picture whose red grows with its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng([*path.name.encode(), colour]).integers(0, 40, (*shape, 3), dtype=np.uint8)
    noise[..., 0] += np.uint8(40 * colour)
    Image.fromarray(noise).save(path)


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of elements take longer to draw than these models to train."""
    monkeypatch.setattr(tune, "POOL", 16)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of every kind, small; nobody writes into these."""
    root = tmp_path_factory.mktemp("home")
    CASES["vit"].model().save_pretrained(root / "vit")
    CASES["segformer"].model().save_pretrained(root / "segformer")
    for number in range(CLASSES):
        for picture in range(5):
            draw(root / "classes" / f"class{number}" / f"{picture}.png", number)
    for number in range(3):
        for picture in range(5):
            draw(root / "three" / f"name{number}" / f"{picture}.png", number)
    draws = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = draws.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(12) % 10
    np.savez(root / "cifar.npz", **arrays)
    (root / "mnist").mkdir()
    for part in ("train", "t10k"):
        pixels = draws.integers(0, 256, 12 * 28 * 28, dtype=np.uint8).tobytes()
        images = struct.pack(">4B3I", 0, 0, 8, 3, 12, 28, 28) + pixels
        labels = struct.pack(">4BI", 0, 0, 8, 1, 12) + bytes(i % 10 for i in range(12))
        (root / "mnist" / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (root / "mnist" / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    for part in ("train", "val", "test"):
        for picture in range(4):
            draw(root / "camvid" / part / f"{picture}.jpg", picture)
            mask = draws.integers(0, 12, (24, 24), dtype=np.uint8)
            (root / "camvid" / f"{part}annot").mkdir(exist_ok=True)
            Image.fromarray(mask).save(root / "camvid" / f"{part}annot" / f"{picture}.png")
    for picture in range(10):
        draw(root / "pairs" / "images" / f"{picture}.jpg", picture % 5)
        (root / "pairs" / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.full((24, 24), picture % 5, np.uint8)).save(root / "pairs" / "masks" / f"{picture}.png")
    return root


def test_a_model_is_softened_trained_and_still_keeps_its_promise(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    soft = ("--group", "SO(2)", "--error", 0.2, "--within", "30deg", "--turn", "30deg")
    result = found("train", home / "vit", "--data", home / "classes", "-o", out, *soft, *QUICK, "--seed", 3)
    written = json.loads((out / "result.json").read_text())
    assert {**written, "out": str(out)} == result
    assert result["seed"] == result["recipe"]["seed"] == 3 and result["recipe"]["epochs"] == 2
    assert [line["epoch"] for line in result["history"]] == [1, 2] and set(result["test"]) >= {"Acc", "iErr"}
    assert result["judged"] == {"group": "SO(2)", "within": "30deg"} and result["versions"]["torch"]
    assert sum(part["examples"] for part in result["data"].values()) == 25
    trained, plain = open_model(out / "model"), open_model(home / "vit")
    certificate = se.certify(trained)
    assert certificate.within == se.degrees(30) and certificate.error <= 0.2 * (1 + 1e-4)
    assert not torch.equal(scorer(trained).weight, scorer(plain).weight)
    shown = call("train", home / "vit", "--data", home / "classes", "-o", out, *soft, *QUICK, "--seed", 3).stdout
    assert "test" in shown and f"softequiv certify {out / 'model'}" in " ".join(shown.split())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_in_half_precision_is_trained_in_float32(home: Path, tmp_path: Path, precision: str) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"epochs": 1, "batch": 4, "rate": 1e-5, "precision": precision}))
    half, out = tmp_path / "half", tmp_path / "out"
    save_model(open_model(home / "vit").half(), half)
    result = call("train", half, "-d", home / "classes", "-o", out, "--recipe", recipe, "--new-head", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("the weights are float16; float32 is used instead") == 1
    trained, before = open_model(out / "model"), open_model(half).float()
    assert {value.dtype for value in trained.parameters()} == {torch.float32}
    steps = [torch.dist(*pair) for pair in zip(trained.vit.parameters(), before.vit.parameters(), strict=True)]
    assert max(steps) > 0  # in float16 steps of 1e-5 leave most weights where they are


def test_the_next_command_certifies_what_was_written(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = call("train", home / "vit", "-d", home / "classes", "-o", out, "--turn", "30deg", "--hold", 0.1, *QUICK)
    said = " ".join(shown.stdout.split())
    line = f"softequiv certify {out / 'model'} --group 'SO(2)' --within 30deg --data HELD_OUT"
    assert line in said and "over the target: how far the error lies above the target" in said
    arguments = shlex.split(line.replace("HELD_OUT", str(home / "three")))[1:]
    assert call(*arguments, "--limit", 5).exit_code == 0
    assert training.certifying(out / "model", {"group": "C4", "within": None}).endswith("--group C4 --data HELD_OUT")


def test_a_training_that_fails_before_it_is_saved_leaves_its_folder_to_others(home: Path, tmp_path: Path) -> None:
    given = ("train", home / "vit", "-d", home / "classes", "-o", tmp_path / "out", *QUICK[:-1])
    assert call(*given, 1e30).exit_code == 3
    assert not list((tmp_path / "out").iterdir())
    assert call(*given, 1e-3).exit_code == 0


def test_a_disk_too_full_for_the_first_save_leaves_its_folder_to_the_next_try(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("train", home / "vit", "-d", home / "classes", "-o", tmp_path / "out", *QUICK)
    with monkeypatch.context() as patched:
        patched.setattr(saved, "save_file", full)
        assert "start again" in call(*given).output
    assert not list((tmp_path / "out").iterdir())
    assert call(*given).exit_code == 0


def full(*arguments: Any, **others: Any) -> None:
    """A disk that is full."""
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_run_that_is_interrupted_ends_with_the_same_figures(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"epochs": 7, "batch": 4, "rate": 0.01, "save_every": 1}))
    given = ("--data", home / "classes", "--turn", "45deg", "--recipe", recipe, "--epochs", 2)
    undisturbed = found("train", home / "vit", *given, "-o", tmp_path / "a")
    assert undisturbed["recipe"]["epochs"] == 2  # what is given beside the file wins
    take = loop._Run.take

    def interrupted(run: Any, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt
        take(run, step)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Run, "take", interrupted)
        assert call("train", home / "vit", *given, "-o", tmp_path / "b").exit_code == 130
    assert not (tmp_path / "b" / "result.json").exists() and not (tmp_path / "b" / "model").exists()
    resumed = found("train", home / "vit", *given, "-o", tmp_path / "b")
    for name in ("test", "history", "best", "data"):
        assert resumed[name] == undisturbed[name], name
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    monkeypatch.setattr(loop._Run, "take", interrupted)  # nothing is left to do
    again = call("train", home / "vit", *given, "-o", tmp_path / "b", "--json")
    assert json.loads(again.stdout) == resumed
    assert "holds this training, done on the pictures as they were then" in again.stderr


def test_a_run_does_not_go_on_with_other_pictures_of_the_same_names_and_sizes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = tmp_path / "pictures"
    for source in (home / "classes").rglob("*.png"):
        path = (pictures / source.relative_to(home / "classes")).with_suffix(".bmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(source).save(path)

    def interrupted(run: Any, step: int) -> None:
        raise KeyboardInterrupt

    given = ("train", home / "vit", "--data", pictures, *QUICK, "-o", tmp_path / "out")
    look = loop._Run.look
    with monkeypatch.context() as patched:
        patched.setattr(loop._Run, "look", lambda run, step: (look(run, step), step == 6 and interrupted(run, step)))
        assert call(*given).exit_code == 130
    assert (tmp_path / "out" / "training.safetensors").is_file()
    for path in pictures.rglob("*.bmp"):
        size = path.stat().st_size
        Image.new("RGB", Image.open(path).size).save(path)
        assert path.stat().st_size == size
    result = call(*given)
    assert result.exit_code == 3, result.output
    assert "other settings (training examples, validation examples); use another folder" in result.stderr


def test_a_model_that_was_removed_is_written_again_from_the_saved_training(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("train", home / "vit", "--data", home / "classes", *QUICK, "-o", out)
    first, before = found(*given), load_file(out / "model" / "model.safetensors")
    shutil.rmtree(out / "model")
    again, after = found(*given), load_file(out / "model" / "model.safetensors")
    assert first["test"] == again["test"] and first["history"] == again["history"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(out / "model")
    (out / "training.safetensors").unlink()
    result = call(*given)
    assert result.exit_code == 3
    assert "neither its model nor the training.safetensors to write it again from" in " ".join(result.stderr.split())


def test_a_folder_of_other_settings_or_other_files_is_refused(home: Path, tmp_path: Path) -> None:
    given = ("train", home / "vit", "--data", home / "classes", *QUICK)
    found(*given, "-o", tmp_path / "out")
    result = call(*given, "-o", tmp_path / "out", "--turn", "10deg", "--penalty", 0.5)
    assert result.exit_code == 3 and "other settings (turn, penalty); choose another name" in result.stderr
    result = call(*given, "-o", tmp_path / "out", "--seed", 7)
    assert result.exit_code == 3 and "other settings (seed); choose another name" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    result = call(*given, "-o", tmp_path / "full")
    assert result.exit_code == 3 and "exists and holds no training" in result.stderr
    assert os.listdir(tmp_path / "full") == ["letter.txt"]


def test_turns_penalty_target_and_variations_change_what_is_learnt(home: Path, tmp_path: Path) -> None:
    weights, turn = [], ("--turn", "90deg")
    ways = [(), turn, ("--augment", "flip,mixup"), (*turn, "--augment", "flip,mixup")]
    for number, more in enumerate([*ways, (*turn, "--penalty", 5), (*turn, "--hold", 1e-4)]):
        out = tmp_path / str(number)
        found("train", home / "vit", "--data", home / "classes", "-o", out, "--epochs", 1, "--batch", 4, *more)
        weights.append(load_file(out / "model" / "model.safetensors")["classifier.weight"])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))
    saved = load_file(out / "training.safetensors")  # the last had a price to pay
    level, error = (
        next(float(value) for name, value in saved.items() if name.endswith(f"/{own}")) for own in ("level", "error")
    )
    told = [json.loads((tmp_path / str(number) / "result.json").read_text())["held"] for number in range(6)]
    last = told.pop()
    assert told == [None] * 5 and (last["target"], last["error"]) == (1e-4, error)
    assert last["price"] > level > 0 and last["error"] > 1e-4
    given = ("train", home / "vit", "--data", home / "classes", "--epochs", 1, "--batch", 4, *more)
    shown = call(*given, "-o", out).stdout
    assert f"price {last['price']:.4g}" in shown and f"error {last['error']:.4g}" in shown
    assert "the target was not kept" in shown and "hold a larger one" in shown
    loose = ("train", home / "vit", "--data", home / "classes", "--epochs", 1, "--batch", 4, *turn, "--hold", 9)
    assert "not kept" not in call(*loose, "-o", tmp_path / "loose").stdout


@pytest.mark.parametrize(
    ("model", "data", "more", "figure"),
    [
        ("vit", "cifar10:cifar.npz", ("--new-head", "--augment", "crop,flip,erase,mixup,cutmix"), "cAcc"),
        ("vit", "mnist:mnist", ("--new-head", "--augment", "mixup", "--turn", "30deg", "--hold", "0.1"), "cAcc"),
        ("segformer", "camvid:camvid", ("--new-head", "--size", "64", "--turn", "30deg", "--penalty", "1"), "cIoU"),
        ("segformer", "camvid:camvid", ("--new-head", "--size", "64", "--turn", "30deg", "--hold", "0.1"), "cIoU"),
        ("segformer", "masks:pairs", ("--new-head", "--size", "64", "--augment", "crop,flip"), "cIoU"),
    ],
)
def test_data_sets_are_called_by_name(
    model: str, data: str, more: Sequence[str], figure: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    result = found("train", model, "--data", data, "-o", tmp_path / "out", "--epochs", 1, "--batch", 4, *more)
    assert figure in result["test"]
    classes = {"camvid:camvid": 11, "masks:pairs": 5}.get(data, 10)
    assert open_model(tmp_path / "out" / "model").config.num_labels == classes  # type: ignore[union-attr]


def test_a_head_of_other_classes_is_refused_and_replaced(home: Path, tmp_path: Path) -> None:
    given = ("train", home / "vit", "--data", home / "three", "-o", tmp_path / "out", *QUICK)
    result = call(*given)
    assert result.exit_code == 3 and not (tmp_path / "out").exists()
    assert f"the model answers {CLASSES} classes and the data have 3; give the model a new head (--new-head)" in (
        result.stderr
    )
    found(*given, "--new-head")
    config: Any = open_model(tmp_path / "out" / "model").config
    assert config.num_labels == 3 and config.id2label == {0: "name0", 1: "name1", 2: "name2"}


def test_class_folders_get_the_models_own_numbers(home: Path) -> None:
    model: Any = open_model(home / "vit")
    names = ["name2", "x", "name0", "y", "name1"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    task = open_task(str(home / "three"), model).task
    assert task.classes == CLASSES and set(task.test.labels().tolist()) == {0, 2, 4}
    assert [int(path.parent.name[-1]) for path, _ in task.test.items] == [  # type: ignore[attr-defined]
        {2: 0, 4: 1, 0: 2}[label] for label in task.test.labels().tolist()
    ]
    assert open_task(str(home / "three"), model, named=False).task.classes == 3


def test_a_head_for_other_names_is_refused_and_one_without_names_gets_those_of_the_pictures(
    home: Path, tmp_path: Path
) -> None:
    found("train", home / "vit", "--data", home / "classes", "-o", tmp_path / "out", *QUICK)
    trained: Any = open_model(tmp_path / "out" / "model")
    assert trained.config.id2label == {number: f"class{number}" for number in range(CLASSES)}
    names = [f"owl{number}" for number in range(CLASSES)]
    trained.config.id2label, trained.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    refused = r"called class0, class1, class2, ... and the model's owl0, owl1, owl2, ...: .* \(--new-head\)"
    with pytest.raises(se.SoftEquivError, match=refused):
        open_task(str(home / "classes"), trained)


def test_a_new_head_is_drawn_by_its_seed_and_leaves_the_rest() -> None:
    nets = [CASES["segformer"].model() for _ in range(3)]
    for net, seed in zip(nets, (0, 0, 1), strict=True):
        new_head(net, 7, seed=seed)
    heads = [scorer(net).weight for net in nets]
    assert heads[0].shape[0] == 7 and torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    state = torch.random.get_rng_state()
    new_head(nets[0], 2)
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(se.SoftEquivError, match="no layer inside that could be its head"):
        new_head(nn.ReLU(), 3)


def upernet() -> Any:
    stages = {"out_features": [f"stage{i}" for i in range(1, 5)], "hidden_sizes": [8] * 4, "depths": [1] * 4}
    sizes = {"hidden_size": 8, "auxiliary_in_channels": 8, "auxiliary_channels": 8, "pool_scales": [1, 2]}
    config = transformers.UperNetConfig(backbone_config=transformers.ConvNextConfig(**stages), num_labels=5, **sizes)
    return transformers.UperNetForSemanticSegmentation(config)


def levit() -> Any:
    sizes = {"hidden_sizes": [16] * 3, "num_attention_heads": [1] * 3, "depths": [1] * 3, "key_dim": [4] * 3}
    down = [["Subsample", 4, 4, 4, 2, 2]] * 2
    config = transformers.LevitConfig(image_size=64, num_labels=5, down_ops=down, **sizes)
    return transformers.LevitForImageClassificationWithTeacher(config)


def swiftformer() -> Any:
    config = transformers.SwiftFormerConfig(depths=[1] * 4, embed_dims=[8] * 4, num_labels=5)
    return transformers.SwiftFormerForImageClassification(config)


@pytest.mark.parametrize("build", [upernet, levit, swiftformer])
def test_a_model_with_two_heads_answers_the_new_classes_and_opens_again(build: Any, tmp_path: Path) -> None:
    model = build().eval()
    new_head(model, 3)
    save_model(model, tmp_path / "model")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        answers = [net(x).logits for net in (model, open_model(tmp_path / "model"))]
    assert answers[0].shape[1] == 3 and torch.equal(*answers)


@pytest.mark.parametrize("told", [None, {"image_mean": [0.5], "image_std": [0.25]}])
def test_a_model_of_grey_pictures_learns_masks(told: dict[str, Any] | None, home: Path, tmp_path: Path) -> None:
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    config = transformers.SegformerConfig(num_channels=1, num_labels=5, **sizes)
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(tmp_path / "grey")
    if told:
        (tmp_path / "grey" / "preprocessor_config.json").write_text(json.dumps(told))
    data = ("--data", f"masks:{home / 'pairs'}", "--size", 32)
    assert "mIoU" in found("train", tmp_path / "grey", *data, "-o", tmp_path / "out", *QUICK)["test"]


def test_a_recipe_leaves_what_it_does_not_name_as_it_is_without_one(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"warmup": 2, "rate": 1e-3}))
    usual = training.settings_of(None, {})
    assert training.settings_of(file, {"epochs": 20}) == replace(usual, warmup=2, rate=1e-3, epochs=20)


def test_two_processes_print_and_write_once(home: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29641"]
    command += ["-m", "softequiv", "train", str(home / "vit"), "--data", str(home / "classes"), "--json"]
    command += ["-o", str(tmp_path / "out"), "--epochs", "1", "--batch", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    entries = json.loads(result.stdout)  # one object
    assert entries["processes"] == 2 and open_model(tmp_path / "out" / "model") is not None
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({**entries["recipe"], "accumulate": 2}))
    alone = found("train", home / "vit", "--data", home / "classes", "-o", tmp_path / "one", "--recipe", recipe)
    losses = [line["loss"] for line in alone["history"]]
    assert [line["loss"] for line in entries["history"]] == pytest.approx(losses, abs=1e-5)  # they train one model


def test_tensorboard_is_asked_for_by_name(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("train", home / "vit", "--data", home / "classes", *QUICK, "--tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = call(*given, "-o", tmp_path / "a")
    assert result.exit_code == 3 and "pip install 'softequiv[tensorboard]'" in result.stderr
    lines: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            lines.append((name, value, step))

        def flush(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", type(sys)("torch.utils.tensorboard"))
    sys.modules["torch.utils.tensorboard"].SummaryWriter = Writer  # type: ignore[attr-defined]
    history = found(*given, "-o", tmp_path / "b")["history"]
    assert [(value, step) for name, value, step in lines if name == "loss"] == [
        (line["loss"], line["epoch"]) for line in history
    ]


ERRORS = [
    (("train", "vit", "-d", "nix", "-o", "out"), 3, "there is no folder 'nix'"),
    (("train", "vit", "-d", "cifer10:x", "-o", "out"), 3, "did you mean cifar10?"),
    (("train", "vit", "-d", "nonsense:x", "-o", "out"), 3, "Known are mnist, cifar10"),
    (("train", "vit", "-d", "cifar10:nix.npz", "-o", "out"), 3, "there is no file nix.npz"),
    (("train", "vit", "-d", "mnist:vit", "-o", "out"), 3, "get the four files of MNIST"),
    (("train", "vit", "-d", "camvid:camvid", "-o", "out"), 3, "choose a model with a head for segmentation"),
    (("train", "segformer", "-d", "classes", "-o", "out", "--size", "64"), 3, "with a head for classification"),
    (("train", "vit", "-d", "classes", "-o", "out", "--size", "23"), 3, "cannot take inputs of shape"),
    (("train", "./nix", "-d", "classes", "-o", "out"), 3, "there is no folder './nix'"),
    (("train", "vit", "-d", "classes", "-o", "out", "--turn", "30grad"), 3, "cannot read the range '30grad'"),
    (("train", "vit", "-d", "classes", "-o", "out", "--augment", "flips"), 3, "got 'flips': did you mean flip?"),
    (("train", "vit", "-d", "masks:classes", "-o", "out"), 3, "pictures and masks lie in classes/images and"),
    (
        ("train", "segformer", "-d", "masks:pairs", "-o", "out", "--augment", "erase"),
        3,
        "erase would leave masks behind",
    ),
    (("train", "vit", "-d", "hub:some/name", "-o", "out"), 3, "pip install 'softequiv[hub]'"),
    (("train", "vit", "-d", "classes", "-o", "out", "--hold", "0"), 3, "for an error of 0, constrain the weights"),
    (("train", "vit", "-d", "classes", "-o", "out", "--hold", "1", "--penalty", "1"), 2, "give it or --penalty"),
    (("train", "vit", "-d", "classes", "-o", "out", "-g", "SO(x)", "-t", "3deg"), 3, "unknown group"),
    (("train", "vit", "-d", "classes", "-o", "out", "-g", "SO(3)", "-t", "3deg"), 3, "SO(3)"),
    (("train", "vit", "-d", "classes", "-o", "out", "--recipe", "nix.json"), 3, "nix.json cannot be read"),
    (("train", "vit", "-d", "classes", "-o", "out", "--recipe", "bad.json"), 3, "did you mean epochs?"),
    (("train", "vit", "-d", "classes", "-o", "out", "--recipe", "cut.json"), 3, "a recipe is JSON"),
    (("train", "vit", "-d", "classes", "-o", "out", "-g", "C4", "-s", "1.5"), 3, "got 1.5"),
    (("train", "vit", "-d", "classes", "-o", "out", "--rate", "1e30", "--batch", "4"), 3, "lower the rate"),
    (("train", "vit", "-d", "classes", "-o", "out", "-s", "0.5"), 2, "say for which group to soften"),
    (("train", "vit", "-d", "classes", "-o", "out", "--mode", "nonsense"), 2, "give it with --softness or --error"),
    (("train", "vit", "-d", "classes", "-o", "out", "-g", "C4", "-s", "0.5", "--mode", "nix"), 3, "unknown mode 'nix'"),
    (("train", "vit", "-d", "classes", "-o", "out", "-w", "30deg"), 2, "--within belongs to --error"),
    (("train", "vit", "-d", "classes", "-o", "out", "-g", "C4", "-e", "0.1"), 2, "--error needs --within, such as"),
    (("train", "vit", "-d", "classes", "-o", "out", "--epochs", "0"), 2, "--epochs"),
    (("train", "vit", "-d", "classes"), 2, "Missing option"),
    (("reproduce", "T0"), 3, "there is no experiment 'T0'; did you mean"),
    (("reproduce", "T1", "--scale", "huge"), 3, "the scales are smoke, small, full; got 'huge'"),
    (("reproduce",), 2, "say which: T1, T1b"),
    (("reproduce", "T1", "--jobs", "0"), 2, "--jobs"),
]
ENDED_ANYWAY = "lower the rate"  # found out in training, when the folder is there


@pytest.mark.parametrize(("arguments", "code", "says"), ERRORS, ids=[" ".join(error[0]) for error in ERRORS])
def test_what_goes_wrong_is_told_in_a_sentence(
    arguments: tuple[str, ...], code: int, says: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "bad.json").write_text('{"epoch": 3}')
    (tmp_path / "cut.json").write_text('{"epochs":')
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    result = call(*arguments, *(["--json"] if code == 3 else []))
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert says in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert "unexpected" not in result.stderr
    if says != ENDED_ANYWAY:
        assert sorted(os.listdir()) == before


def test_the_registry_offers_what_is_there_and_nothing_else() -> None:
    assert {"T1", "T1b"} <= set(registry.names())
    for name in registry.names():
        assert registry.experiment(name).name == name
    titles = found("reproduce", "--list")["experiments"]
    assert titles == {name: registry.experiment(name).title for name in registry.names()}


def test_reproduce_fills_its_cells_once_and_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[int] = []

    def work(settings: Any) -> dict[str, Any]:
        worked.append(settings["seed"])
        return {"figure": 1.0}

    def cells(scale: Scale) -> list[Cell]:
        return [Cell("tiny", {"seed": seed}) for seed in range(3)]

    def page(rows: Sequence[Row], scale: Scale) -> Page:
        return Page(f"{len(rows)} rows", ["All is well."])

    monkeypatch.setattr(registry, "experiment", lambda name: Experiment("tiny", "A tiny one", cells, work, page))
    for _ in range(2):
        entries = found("reproduce", "tiny", "--scale", "smoke", "--out", tmp_path)
        assert entries == {"experiment": "tiny", "scale": "smoke", "page": str(tmp_path / "tiny-smoke.md")}
    assert worked == [0, 1, 2] and "# 3 rows" in (tmp_path / "tiny-smoke.md").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_where_there_is_no_data_it_is_said_once(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path / "nix"))
    result = call("reproduce", "T1", "--scale", "small", "--out", tmp_path / "out", "--jobs", jobs)
    assert result.exit_code == 3 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert "mnist is not there; set the environment variable SOFTEQUIV_DATA" in line and "none of" in line


def test_contestants_take_turns_and_ratios_are_to_the_base() -> None:
    order: list[str] = []
    times = speed.turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order == ["a", "b"] * 3 and all(len(taken) == 3 for taken in times.values())
    slow = torch.randn(300, 300)
    found_ratios = speed.ratios({"one": lambda: slow @ slow, "ten": lambda: [slow @ slow for _ in range(10)]}, "one", 9)
    assert found_ratios["one"] == 1.0 and found_ratios["ten"] > 3


def test_the_contestants_on_pictures_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rep = speed.image_maps(4, "exact")
    theta = torch.randn(16, 16, dtype=torch.float64)
    ours = speed.hard_filtered(speed.cold_spectrum(rep), theta)
    assert torch.allclose(ours, speed.hard_filtered(speed.dense_spectrum(rep), theta), atol=1e-9)
    rule = speed.schur_rule(rep.source.rates()[0].numpy(), theta.numpy(), speed.CUTOFF)
    assert np.allclose(rule, se.schur(speed.CUTOFF)(theta, rep), atol=1e-9)


def test_every_baseline_is_timed_and_what_is_served_is_plain() -> None:
    found_costs = costs.image_costs(2, 8, 1, widths=(40, 40)) + costs.tensor_costs(4, 32, 1)
    names = [cost.name for cost in found_costs]
    for name in ("ours, baked", "RPP", "canonical, C18", "group CNN, C8", "penalty", "EMLP, O(5)"):
        assert name in names
    assert all(cost.inference > 0 and cost.parameters > 0 for cost in found_costs)
    served = [cost for cost in found_costs if cost.training is None]
    assert {cost.name for cost in served} == {"ours, baked", "RPP, merged"}
    plain = {cost.against: cost.parameters for cost in found_costs if cost.name == "plain"}
    assert all(cost.parameters == plain[cost.against] for cost in served)


def test_bench_prints_its_tables_with_their_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    title = "Maps of n x n pictures, action exact"
    whole = bench.parts()
    assert {title, "Maps of tensors", "Soft models", "Baselines"} <= set(whole)
    small = {title: lambda: bench.pictures("exact", (4,), (4,)), "Maps of tensors": bench.tensors}
    monkeypatch.setattr(bench, "parts", lambda compiled: small)
    part = found("bench")["parts"][title]
    assert part["columns"][1] == "SVD / ours" and part["rows"][0][0] == "4 x 4" and "Kronecker" in part["method"]
    result = call("bench")
    assert result.exit_code == 0 and "refused" in result.stdout and "4 x 4" in result.stdout


def test_soften_plan_and_certify_read_ranges_as_people_write_them() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 8, 5)

    text, angle = (se.soften(net(), "SO(2)", error=0.1, within=w) for w in ("30deg", se.degrees(30)))
    assert torch.equal(text.weight, angle.weight)
    assert str(se.plan(net(), "SO(2)", error=0.1, within="30deg")) == str(
        se.plan(net(), "SO(2)", error=0.1, within=se.degrees(30))
    )
    assert se.certify(text, "20deg") == se.certify(text, se.degrees(20)) != se.certify(text)
    for wrong in (lambda: se.certify(text, "wide"), lambda: se.soften(net(), "SO(2)", error=0.1, within="wide")):
        with pytest.raises(se.GroupError, match="cannot read the range 'wide'"):
            wrong()
