"""What must hold for pictures on their way to a model: every command and transformers itself make them ready alike, and
a trained model lies beside what it was trained with."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

from shell import found
from softequiv.adapt.opening import open_model, save_model
from softequiv.errors import SoftEquivError
from softequiv.tasks.images import open_images
from softequiv.tasks.named import open_task
from softequiv.tasks.preparation import Squares, described, preparation
from softequiv.tasks.preprocessor import frame, normalisation, read_preprocessor
from softequiv.training import tune

SIDE, CLASSES = 16, 3
ROUNDING = 1e-5  # of numbers of about 1, added in another order
VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
BIT = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 20},
    "crop_size": {"height": SIDE, "width": SIDE},
}
MEANS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
SETTINGS: dict[str, dict[str, Any]] = {
    "squashed": {**VIT, **MEANS},
    "not normalised": {**VIT, **MEANS, "do_normalize": False},
    "not rescaled": {**VIT, **MEANS, "do_rescale": False},
    "rescaled to 0..2": {**VIT, **MEANS, "rescale_factor": 2 / 255},
    "cut": {**BIT, **MEANS},
    "cut to a rectangle": {**BIT, **MEANS, "crop_size": {"height": 12, "width": SIDE}},
    "bicubic": {**BIT, **MEANS, "resample": 3},
    "cut without scaling": {**BIT, **MEANS, "do_resize": False},
    "as ResNet and ConvNeXT": {**MEANS, "image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 8}},
}


def vit(folder: Path, settings: dict[str, Any] | None = None, channels: int = 3) -> nn.Module:
    """A small ViT opened from its folder, with a preprocessor file where there are settings."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=SIDE,
        patch_size=4,
        num_channels=channels,
        num_labels=CLASSES,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return open_model(folder)


def write_pictures(folder: Path, count: int = 10, shape: tuple[int, int] = (20, 27)) -> Path:
    """Classes that differ in brightness, in folders train and test; not square."""
    draws = np.random.default_rng(0)
    for part in ("train", "test"):
        for label in range(CLASSES):
            for number in range(count):
                path = folder / part / f"class{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = draws.integers(0, 60, (*shape, 3)) + 80 * label
                Image.fromarray(noise.astype(np.uint8)).save(path)
    return folder


def asked(folder: Path, model: nn.Module, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures of folder/test as training and as measuring see them."""
    task = open_task(str(folder), model, size=size).task
    seen = task.test.batch(torch.arange(len(task.test)))[0]
    measured = [batch[0] for batch in open_images(folder / "test", model, size=size)]
    return seen, torch.cat(measured)


def of_transformers(model_folder: Path, pictures: Path) -> torch.Tensor:
    """The same pictures as transformers makes them ready."""
    process: Any = transformers.AutoImageProcessor.from_pretrained(model_folder)
    paths = sorted((pictures / "test").rglob("*.png"))
    return process(images=[Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("name", SETTINGS)
def test_training_measuring_and_transformers_see_the_same_pictures(name: str, tmp_path: Path) -> None:
    model, pictures = vit(tmp_path / "vit", SETTINGS[name]), write_pictures(tmp_path / "pictures", 2)
    for seen in asked(pictures, model):
        assert torch.equal(seen, of_transformers(tmp_path / "vit", pictures))


@pytest.mark.parametrize("size", [None, 12])
@pytest.mark.parametrize("settings", [None, {**VIT, **MEANS}, {**VIT, **MEANS, "do_normalize": False}])
def test_what_was_used_is_what_the_saved_folder_says(
    settings: dict[str, Any] | None, size: int | None, tmp_path: Path
) -> None:
    model, pictures = vit(tmp_path / "vit", settings), write_pictures(tmp_path / "pictures", 2)
    used, measured = asked(pictures, model, size)
    save_model(model, tmp_path / "new", pictures=described(preparation(model, size)[0], model))
    for seen in (measured, *asked(pictures, open_model(tmp_path / "new")), of_transformers(tmp_path / "new", pictures)):
        torch.testing.assert_close(seen, used, atol=ROUNDING, rtol=ROUNDING)


@pytest.mark.parametrize("shorter", [16, 12, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_squares_are_told_and_read_again(shorter: int, channels: int, tmp_path: Path) -> None:
    prepared = Squares(12, shorter, (0.1,) * channels, (0.5,) * channels)
    told = described(prepared, nn.Conv2d(channels, 8, 3))
    assert told is not None
    assert frame(told, tmp_path) == (12, shorter)
    read = normalisation(told, tmp_path, channels)
    assert read.mean == pytest.approx(prepared.mean) and read.std == pytest.approx(prepared.std)
    model = vit(tmp_path / "vit", dict(told), channels)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 27, 3), dtype=np.uint8))
    picture = picture.convert({1: "L", 3: "RGB"}[channels])
    torch.testing.assert_close(preparation(model)[0](picture), prepared(picture), atol=ROUNDING, rtol=ROUNDING)


def test_a_square_larger_than_the_picture_is_black_around_it() -> None:
    square = Squares(6, 4)(Image.new("L", (4, 4), 255))
    assert square[0, 1:5, 1:5].eq(1).all() and square.sum() == 16


def test_what_a_model_of_timm_was_trained_with_is_in_its_configuration() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    model.pretrained_cfg = {"architecture": "x", "input_size": (3, 224, 224), "mean": (0.5,), "std": (0.5,)}  # type: ignore[assignment]
    told = described(Squares(56, 64, (0.5,), (0.25,), resample=3), model)
    assert told == {
        "input_size": (3, 56, 56),
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "crop_mode": "center",
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
    }


CUT_BY_TIMM = [(224, 0.9), (224, 0.875), (224, 0.95), (240, 0.96), (288, 0.94), (380, 0.922), (16, 1.0)]


@pytest.mark.parametrize("mode", [None, "center", "squash"])
@pytest.mark.parametrize(("side", "share"), CUT_BY_TIMM)
def test_squares_of_timm_are_cut_from_floored_sides_and_told_so_that_they_are_again(
    side: int, share: float, mode: str | None
) -> None:
    settings = {"input_size": (3, side, side), "mean": (0.0,), "std": (1.0,), "crop_pct": share, "crop_mode": mode}
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    model.pretrained_cfg = settings  # type: ignore[assignment]
    prepared = preparation(model)[0]
    assert isinstance(prepared, Squares) and prepared.shorter == math.floor(side / share)
    model.pretrained_cfg = {**settings, **(described(prepared, model) or {})}  # type: ignore[assignment]
    again = preparation(model)[0]
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    assert torch.equal(again(picture), prepared(picture))
    scaled = math.floor(side / share)
    shape = (scaled, scaled) if mode == "squash" else (scaled * 400 // 300, scaled)
    left, top = ((length - side) // 2 for length in shape)
    cut = picture.resize(shape, 2).crop((left, top, left + side, top + side))
    assert torch.allclose(prepared(picture), torch.from_numpy(np.asarray(cut).transpose(2, 0, 1) / 255).float())
    model.pretrained_cfg = {**settings, "crop_mode": "border"}  # type: ignore[assignment]
    with pytest.raises(SoftEquivError, match="crop_mode 'border', which is not known; give --size"):
        preparation(model)
    assert preparation(model, 8)[0] == Squares(8, 8, (0.0,), (1.0,))


def test_every_shorter_side_is_told_to_timm_without_rounding() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    model.pretrained_cfg = {"input_size": (3, 224, 224)}  # type: ignore[assignment]
    for shorter in range(8, 300):
        told = described(Squares(224, shorter), model) or {}
        assert math.floor(224 / told["crop_pct"]) == shorter


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [28, 40])
def test_digits_in_a_folder_are_framed_as_those_of_mnist(size: int, channels: int, tmp_path: Path) -> None:
    digits = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        images = struct.pack(">4B3I", 0, 0, 8, 3, 20, 28, 28) + digits.tobytes()
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        labels = struct.pack(">4BI", 0, 0, 8, 1, 20) + bytes(number % 10 for number in range(20))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    opened = open_task(f"mnist:{tmp_path}", vit(tmp_path / "vit", channels=channels), size=size)
    seen = opened.task.test.batch(torch.arange(1))[0][0]
    picture = Image.fromarray(digits[0]).convert({1: "L", 3: "RGB"}[channels])
    torch.testing.assert_close(opened.prepared(picture), seen, atol=ROUNDING, rtol=ROUNDING)


def test_colours_in_a_folder_are_normalised_as_those_of_cifar(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    numbers = np.arange(20) % 10
    np.savez(tmp_path / "cifar.npz", x_train=pixels, y_train=numbers, x_test=pixels, y_test=numbers)
    opened = open_task(f"cifar10:{tmp_path / 'cifar.npz'}", nn.Conv2d(3, 8, 3))
    picture = Image.fromarray(pixels[0].transpose(1, 2, 0))
    seen = opened.task.test.batch(torch.arange(1))[0][0]
    torch.testing.assert_close(opened.prepared(picture), seen, atol=ROUNDING, rtol=ROUNDING)


TRAINED = [
    (None, ()),
    ({**VIT, **MEANS}, ()),
    ({**VIT, **MEANS}, ("--size", SIDE)),
    ({**VIT, **MEANS, "do_normalize": False}, ()),
]


@pytest.mark.parametrize(("settings", "more"), TRAINED)
def test_a_trained_model_measures_as_it_was_tested(
    settings: dict[str, Any] | None, more: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "POOL", 16)
    vit(tmp_path / "vit", settings)
    pictures = write_pictures(tmp_path / "pictures")
    quick = ("--epochs", 8, "--batch", 9, "--rate", 0.01, *more)
    trained = found("train", tmp_path / "vit", "--data", pictures, "-o", tmp_path / "out", *quick)
    measured = found(
        "measure", tmp_path / "out" / "model", "--data", pictures / "test", "-g", "SO(2)", "--jacobians", 0
    )
    assert trained["test"]["Acc"] == measured["rows"]["accuracy"]["value"] > 0.6
    soft = ("-g", "SO(2)", "--softness", 0.5)
    found("train", tmp_path / "vit", "--data", pictures, "-o", tmp_path / "soft", *quick, *soft)
    files = [(tmp_path / out / "model" / "preprocessor_config.json").read_text() for out in ("out", "soft")]
    assert files[0] == files[1]


def test_pictures_of_two_shapes_are_named_in_training_too(tmp_path: Path) -> None:
    model, pictures = vit(tmp_path / "vit", {**VIT, "do_resize": False}), write_pictures(tmp_path / "pictures", 2)
    Image.new("RGB", (9, 9)).save(pictures / "test" / "class0" / "0.png")
    with pytest.raises(SoftEquivError, match="keeps their shapes; cut them to squares with --size"):
        asked(pictures, model)


def test_a_model_without_a_file_has_that_told(tmp_path: Path) -> None:
    model, pictures = vit(tmp_path / "vit"), write_pictures(tmp_path / "pictures", 2)
    notes = open_task(str(pictures), model).notes
    assert notes == open_images(pictures / "test", model).notes and "are guessed" in notes[0]


def test_a_file_that_prepares_no_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    for factor in (0, "small", 1e9):
        path.write_text(json.dumps({"rescale_factor": factor}))
        with pytest.raises(SoftEquivError, match=r"rescale_factor is .*, and should be a positive number"):
            read_preprocessor(path)
    with pytest.raises(SoftEquivError, match=r"the side of pictures is 2\.5, and should be a number of pixels"):
        frame({"size": 2.5}, path)
