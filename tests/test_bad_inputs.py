"""What is answered to input that is wrong? One sentence of a fitting type, soon, with the model and the folder as they
were. Each row of the catalogue is a name, what is done, the type of the answer and words of it.

The other tests have rows of their own beside what they test; here is what crosses the whole library.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import shutil
import signal
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import softequiv as se
from softequiv.cli import commands
from softequiv.measure.bootstrap import exact_interval, interval
from softequiv.tasks import archives, cifar, masks
from softequiv.tasks.decoding import decoded
from softequiv.tasks.files import Labelled
from softequiv.tasks.folders import image_folder
from softequiv.tasks.images import open_images
from softequiv.tasks.mnist import idx
from softequiv.tasks.named import open_task
from softequiv.tasks.trajectories import read_scene
from softequiv.training import Recipe
from zoo import CASES

SECONDS = 20  # in which an answer must be there


@dataclass(frozen=True)
class Bad:
    """A wrong input: `act` is given an empty folder and must raise `error` with these `words`."""

    name: str
    act: Callable[[Path], Any]
    words: str
    error: type[se.SoftEquivError] = se.SoftEquivError


# the API


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 3))


def softening(**options: Any) -> Callable[[Path], Any]:
    return lambda _: se.soften(small(), **{"group": "C4", "softness": 0.5, **options})


def target(**options: Any) -> Callable[[Path], Any]:
    return lambda _: se.soften(small(), "SO(2)", **{"error": 0.1, "within": se.degrees(30), **options})


def flattened(grids: Any) -> Callable[[Path], Any]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
    return lambda _: se.soften(net, "C4", softness=0.5, grids=grids)


def changed(change: Callable[[nn.Conv2d], Any], mode: Any = "parametrize") -> Callable[[Path], Any]:
    """Soften a layer after something was done to it."""

    def act(_: Path) -> None:
        layer = nn.Conv2d(3, 8, 3)
        change(layer)
        se.soften(layer, "C4", softness=0.5, mode=mode)

    return act


def stored_as(kind: Callable[[Tensor], Tensor]) -> Callable[[nn.Conv2d], None]:
    def change(layer: nn.Conv2d) -> None:
        layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=False)

    return change


def in_inference(_: Path) -> None:
    with torch.inference_mode():
        net = small()
    se.soften(net, "C4", softness=0.5)


def loading(change: Callable[[dict[str, Tensor]], Any], dtype: torch.dtype = torch.float32) -> Callable[[Path], Any]:
    """Load tensors into a soft model, which must stay as it was when they are refused."""

    def act(_: Path) -> None:
        net = se.soften(small().to(dtype), "C4", softness=0.5)
        before = {name: value.detach().clone() for name, value in se.stored_tensors(net).items()}
        given = {name: value.clone() for name, value in before.items()}
        try:
            se.load_tensors(net, change(given))
        finally:
            assert all(torch.equal(value, before[name]) for name, value in se.stored_tensors(net).items())

    return act


def each(kind: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {name: kind(value) for name, value in tensors.items()}


def one(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["0.weight"][0, 0, 0, 0] = value
        return tensors

    return change


def baking(example: Any) -> Callable[[Path], Any]:
    def act(_: Path) -> None:
        net = se.soften(small(), "C4", softness=0.5)
        try:
            se.bake(net, example=example)
        finally:
            assert len(list(se.soft_weights(net))) == 2  # not half baked

    return act


def own_gain(folder: Path) -> None:
    from softequiv.gains import LevelGain

    @dataclass(frozen=True)
    class Mine(LevelGain):
        def gamma(self, of: Any) -> Tensor:
            return torch.ones_like(of.levels)

    try:
        se.save(se.soften(small(), "C4", gain=Mine()), folder / "out")
    finally:
        assert not (folder / "out").exists()


def diverged(mode: Any) -> nn.Module:
    net = se.soften(small(), "C4", softness=0.5, mode=mode)
    with torch.no_grad():
        next(iter(se.soft_weights(net))).stored.fill_(math.nan)
    return net


def pooled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def measuring(**options: Any) -> Callable[[Path], Any]:
    return lambda _: se.measure(pooled(), torch.rand(2, 1, 5, 5), "C4", **options)


def attributing(**options: Any) -> Callable[[Path], Any]:
    return lambda _: se.attribute(pooled(), torch.rand(2, 1, 5, 5), "C4", **options)


def bounding(x: Any) -> Callable[[Path], Any]:
    net, example = nn.Conv2d(1, 2, 3), torch.rand(1, 1, 5, 5)
    return lambda _: se.certify_network(net, "C4", 1, example).bound(x)


def drawing(where: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        pytest.importorskip("matplotlib")
        found = se.attribute(pooled(), torch.rand(2, 1, 5, 5), "C4")
        found.plot(folder / where if isinstance(where, str) else where)

    return act


NO_SEED = "a seed is a whole number of at least -2^63 and below 2^63; got "
MEASURED = [
    *(
        Bad(f"{what} by the seed {seed!r}", act(seed=seed), f"{NO_SEED}{seed!r}")
        for what, act in (("measured", measuring), ("attributed", attributing))
        for seed in (1.5, None, "a", True, 2**63)
    ),
    Bad(
        "certified by a seed beyond torch",
        lambda _: se.certify(pooled(), group="C4", data=torch.rand(9, 1, 5, 5), seed=2**70),
        NO_SEED,
    ),
    Bad("moved by a pool of no seed", lambda _: se.Moves(se.Pictures(), "SO(2)", seed=None), NO_SEED),  # type: ignore[arg-type]
    Bad("probes as text", measuring(probes="3"), "probes is a whole number of at least 1; got '3'"),
    Bad("batches of truth", measuring(batch_size=True), "batch_size is a whole number of at least 1; got True"),
    Bad("an ignored label as text", measuring(ignore_index="a"), "a whole number such as 255; got 'a'"),
    Bad("elements of truth", measuring(elements=True), "elements must be a whole number, or a list"),
    Bad("moved by a number", lambda _: se.Pictures()(torch.rand(1, 5, 5), 1.0), "moved by an element of a group"),  # type: ignore[arg-type]
    Bad("valid under a number", lambda _: se.Points().valid(torch.rand(5, 2), 1.0), "moved by an element of a group"),  # type: ignore[arg-type]
    Bad("verified on a function", lambda _: se.certify(small(), 1, "C4").verify(lambda z: z), "must be a torch module"),  # type: ignore[arg-type]
    Bad("bounded on a text", bounding("a"), "x must be one tensor (N, ...) of at least one sample; got str"),
    Bad("bounded on one number", bounding(torch.tensor(1.0)), "x must be one tensor (N, ...)"),
    Bad("drawn into no folder", drawing("none/a.svg"), "name a file such as shares.svg in a folder that exists"),
    Bad("drawn into no path", drawing(3), "a path is a text"),
    Bad("an interval of nothing", lambda _: interval(torch.zeros(0)), "no samples have no interval"),
    Bad("an exact interval of nothing", lambda _: exact_interval(torch.zeros(0)), "no samples have no interval"),
]


API = [
    Bad("softness as text", softening(softness="0.5"), "is a number; got '0.5', a str", se.GainError),
    Bad("softness as truth", softening(softness=True), "is a number; got 'True', a bool", se.GainError),
    Bad("softness as list", softening(softness=[0.5]), "is a number; got '[0.5]', a list", se.GainError),
    Bad("complex softness", softening(softness=0.5j), "is a number", se.GainError),
    Bad("softness as vector", softening(softness=torch.ones(2)), "is a number", se.GainError),
    Bad("infinite softness", softening(softness=math.inf), "got inf", se.GainError),
    Bad("negative softness in a mapping", softening(softness={"*": -0.1}), "got -0.1", se.GainError),
    Bad("text in a mapping", softening(softness={"0.weight": "half"}), "is a number; got 'half'", se.GainError),
    Bad("a dial turned to text", lambda _: se.set_softness(se.soften(small(), "C4", softness=1), "0"), "is a number"),  # type: ignore[arg-type]
    Bad("a dial turned too far", lambda _: se.set_softness(se.soften(small(), "C4", softness=1), 1.1), "got 1.1"),
    Bad("error as text", target(error="small"), "is a number; got 'small'", se.GainError),
    Bad("error as list", target(error=[0.1]), "is a number", se.GainError),
    Bad("error of nan", target(error=math.nan), "between 0 and 2", se.GainError),
    Bad("error less than rounding", target(error=1e-300), "less than rounding", se.GainError),
    Bad("error that no float has", target(error=5e-324), "less than rounding", se.GainError),
    Bad("range as list", target(within=[1]), "is a number", se.GainError),
    Bad("range of nan", target(within=math.nan), "is empty", se.GainError),
    Bad("range of no unit", target(within="30°C"), "cannot read the range '30°C'", se.GroupError),
    Bad("certificate over a list", lambda _: se.certify(se.soften(small(), "C4", softness=0), [1]), "is a number"),  # type: ignore[call-overload]
    Bad("cut-off as text", lambda _: se.hard("1"), "b of the gain Hard is a number; got '1'", se.GainError),  # type: ignore[arg-type]
    Bad("cut-off of none", lambda _: se.hard(None), "a NoneType", se.GainError),  # type: ignore[arg-type]
    Bad("cut-off beyond floats", lambda _: se.hard(10**400), "b of the gain Hard is a number", se.GainError),
    Bad("decay as text", lambda _: se.smooth(1.0, "1"), "s of the gain Smooth is a number", se.GainError),  # type: ignore[arg-type]
    Bad("decay of the Schur rule as text", lambda _: se.schur(1.0, "1"), "s of the gain Schur", se.GainError),  # type: ignore[arg-type]
    Bad("no group at all", softening(group=""), "unknown group ''", se.GroupError),
    Bad("group in bytes", softening(group=b"C4"), "a group or its name", se.GroupError),
    Bad("group of no turns", softening(group="C0"), "at least 1; got 0", se.GroupError),
    Bad("group of endless name", softening(group="C" + "9" * 5000), "no group has a name of 5001", se.GroupError),
    Bad("group of endless product", softening(group="C4x" * 3000 + "C4"), "no group has a name", se.GroupError),
    Bad("group of foreign digits", softening(group="C٤"), "unknown group", se.GroupError),
    Bad("product without factor", softening(group="C4x"), "unknown group ''", se.GroupError),
    Bad("group with a line end", softening(group="C4\n"), "unknown group 'C4\\n'", se.GroupError),
    Bad("grids that are a number", flattened(3), "grids is a mapping"),
    Bad("grid that is a number", flattened({"1": 48}), "is not (channels, H, W)"),
    Bad("grid of fractions", flattened({"1": (3.0, 4.0, 4.0)}), "in whole numbers"),
    Bad("grid of letters", flattened({"1": ("a", 4, 4)}), "in whole numbers"),
    Bad("grid of another size", flattened({"1": (3, 4, 5)}), "has 60 entries; the layer has 48"),
    Bad("grid of a layer by number", flattened({1: (3, 4, 4)}), "names 1, which is no linear layer"),
    Bad("grid below zero", flattened({"1": (-3, 4, -4)}), "at least 1"),
    Bad("weight of integers", changed(stored_as(lambda w: (9 * w).to(torch.int8))), "stored as torch.int8"),
    Bad("weight of one byte", changed(stored_as(lambda w: w.to(torch.float8_e4m3fn))), "float8"),
    Bad("complex weight", changed(stored_as(lambda w: w.to(torch.complex64))), "filtered: keep its two parts in two"),
    Bad(
        "scripted model",
        lambda _: se.plan(torch.jit.script(small()), "C4", softness=0),
        "the model was made by torch.jit",
    ),
    Bad("sparse weight", changed(stored_as(lambda w: w.to_sparse())), "make it dense first", se.WeightError),
    Bad("weight of infinity", changed(stored_as(lambda w: w / 0)), "not finite", se.WeightError),
    Bad("weight on meta", changed(lambda c: c.to("meta")), "meta device", se.WeightError),
    Bad(
        "weight that is one number",
        changed(stored_as(lambda w: w[:1, :1].expand(8, 3, 3, 3)), "project"),
        "shows one value in many places",
        se.WeightError,
    ),
    Bad("weights of inference mode", in_inference, "outside of it", se.WeightError),
    Bad(
        "lazy layer",
        lambda _: se.soften(nn.Sequential(nn.LazyConv2d(8, 3)), "C4", softness=0.5),
        "0.weight has no shape yet: run the model once",
        se.WeightError,
    ),
    Bad("tensors that are none", loading(lambda _: None), "a mapping from names to tensors; got NoneType"),
    Bad("tensors as lists", loading(each(Tensor.tolist)), "0.weight is no tensor but list"),
    Bad("tensors with a nan", loading(one(math.nan)), "0.weight has entries that are not finite"),
    Bad("tensors with infinity", loading(one(-math.inf)), "0.weight has entries that are not finite"),
    Bad("tensors of integers", loading(each(Tensor.int)), "holds torch.int32, the model torch.float32"),
    Bad("complex tensors", loading(each(lambda t: t.to(torch.complex64))), "holds torch.complex64"),
    Bad("tensors on meta", loading(each(lambda t: t.to("meta"))), "has no values, it is on the meta device"),
    Bad(
        "tensors that overflow half precision",
        loading(lambda t: {n: 1e6 * v.float() + 1e6 for n, v in t.items()}, torch.float16),
        "not finite in torch.float16",
    ),
    Bad("example of text", baking("picture"), "cannot take the example (TypeError"),
    Bad("example of other channels", baking(torch.zeros(1, 4, 9, 9)), "cannot take the example (RuntimeError"),
    Bad("example by an unknown name", baking({"q": torch.zeros(1)}), "unexpected keyword argument 'q'"),
    Bad("a gain of one's own, saved", own_gain, "Mine is a gain of your own"),
]


# checkpoints


def checkpoint(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Load a damaged checkpoint into a plain model, which must stay plain and as it was."""

    def act(folder: Path) -> None:
        se.save(se.soften(CASES["vit"].model(), "C4", softness=0.5), folder / "saved")
        damage(folder / "saved")
        model = CASES["vit"].model()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            se.load(model, folder / "saved")
        finally:
            assert next(se.soft_weights(model), None) is None
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    return act


def recipe(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change the recipe of a checkpoint."""

    def act(folder: Path) -> None:
        entries = json.loads((folder / "softequiv.json").read_text())
        edit(entries)
        (folder / "softequiv.json").write_text(json.dumps(entries))

    return checkpoint(act)


def gain(**entries: Any) -> Callable[[Path], Any]:
    return recipe(lambda told: [weight.update(gain=entries) for weight in told["weights"].values()])


def recipe_bytes(content: bytes) -> Callable[[Path], Any]:
    return checkpoint(lambda folder: (folder / "softequiv.json").write_bytes(content))


def tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    """Change the tensors of a checkpoint by hand, as their owner may: without their checksum."""

    def act(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        save_file(edit(held) or held, folder / "model.safetensors")
        entries = json.loads((folder / "softequiv.json").read_text())
        del entries["sha256"]
        (folder / "softequiv.json").write_text(json.dumps(entries))

    return checkpoint(act)


def safetensors(header: Any, content: bytes = bytes(4)) -> Callable[[Path], Any]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + content
    return checkpoint(lambda folder: (folder / "model.safetensors").write_bytes(whole))


def long_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def flip_one_bit(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def swapped(name: str) -> Callable[[Path], None]:
    """A folder where a file should be."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def linked(folder: Path) -> None:
    (folder / "softequiv.json").unlink()
    (folder / "softequiv.json").symlink_to(folder / "softequiv.json")


def saving(where: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        (folder / "file").write_text("mine")
        place = folder / where if isinstance(where, str) and "\0" not in where else where
        try:
            se.save(se.soften(small(), "C4", softness=0.5), place)
        finally:
            assert os.listdir(folder) == ["file"] and (folder / "file").read_text() == "mine"

    return act


FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
CHECKPOINTS = [
    Bad("one bit of the weights flipped", checkpoint(flip_one_bit), "damaged or changed; copy both again"),
    Bad("weights of another checkpoint", recipe(lambda r: r.update(sha256="0" * 64)), "has the checksum"),
    Bad("infinite weights", tensors(lambda t: {n: v / 0 for n, v in t.items()}), "not finite"),
    Bad("integers for weights", tensors(lambda t: {n: v.int() for n, v in t.items()}), "holds torch.int32"),
    Bad("truths for weights", tensors(lambda t: {n: v.bool() for n, v in t.items()}), "holds torch.bool"),
    Bad("transposed weights", tensors(lambda t: {n: v.mT.contiguous() for n, v in t.items() if v.ndim > 1}), "missing"),
    Bad("header longer than all memory", checkpoint(long_header), "cannot be read, it may be cut short"),
    Bad("header that is no JSON", safetensors(b"nonsense"), "cannot be read"),
    Bad("tensors that overlap", safetensors({"a": FLOAT, "b": FLOAT}), "cannot be read"),
    Bad("tensor of 2^80 entries", safetensors({"a": {**FLOAT, "shape": [2**40, 2**40]}}), "cannot be read"),
    Bad("tensor of negative size", safetensors({"a": {**FLOAT, "shape": [-1]}}), "cannot be read"),
    Bad("tensor of unknown kind", safetensors({"a": {**FLOAT, "dtype": "Q4"}}), "cannot be read"),
    Bad(
        "pickle under another name",
        checkpoint(lambda folder: torch.save({"a": 1}, folder / "model.safetensors")),
        "cannot be read",
    ),
    Bad("folder instead of weights", checkpoint(swapped("model.safetensors")), "holds no model.safetensors"),
    Bad("folder instead of recipe", checkpoint(swapped("softequiv.json")), "holds no softequiv.json"),
    Bad("recipe that links to itself", checkpoint(linked), "holds no softequiv.json"),
    Bad("recipe of zeros", recipe_bytes(bytes(100)), "is not JSON"),
    Bad("recipe of 100,000 brackets", recipe_bytes(b"[" * 100_000), "is not JSON: it is nested too deeply"),
    Bad("recipe of an endless number", recipe_bytes(b'{"format": ' + b"9" * 5000 + b"}"), "is not JSON"),
    Bad("recipe in another encoding", recipe_bytes('{"format": 1}'.encode("utf-16")), "its 'group' is None"),
    Bad("recipe without weights", recipe(lambda r: r.update(weights={})), "names no weights"),
    Bad("recipe for an endless group", recipe(lambda r: r.update(group="C" + "9" * 5000)), "no group has a name"),
    Bad("recipe for cubes", recipe(lambda r: r.update(group="SO(3)")), "SO(3) turns cubes"),
    Bad("recipe whose grid is a number", recipe(lambda r: r.update(grids={"classifier": 3})), "not a list of whole"),
    Bad("recipe whose grid is a text", recipe(lambda r: r.update(grids={"classifier": "ab"})), "not a list of whole"),
    Bad("recipe whose grid has gaps", recipe(lambda r: r.update(grids={"classifier": [None, 1]})), "not a list of"),
    Bad("gain of a list", gain(kind=["Hard"], b=1), "unknown gain ['Hard']"),
    Bad("gain of a mapping", gain(kind={"a": 1}), "unknown gain {'a': 1}"),
    Bad("gain of no number", gain(kind="Softness", s=None), "is a number; got 'None'"),
    Bad("gain of a truth", gain(kind="Softness", s=True), "is a number; got 'True'"),
    Bad("gain of nan", gain(kind="Softness", s=math.nan), "got nan"),
    Bad("cut-off beyond floats in a recipe", gain(kind="Hard", b=10**400), "b of the gain Hard is a number"),
    Bad("error below rounding in a recipe", gain(kind="LeastDistortion", error=1e-320, within=3.0), "less than"),
    Bad("range of text", gain(kind="LeastDistortion", error=0.1, within={"radians": "x"}), "cannot be read"),
    Bad("range without elements", gain(kind="LeastDistortion", error=0.1, within=1e-9), "no element of C4"),
    Bad("folder of none", lambda _: se.load(small(), None), "a path is a text"),  # type: ignore[arg-type]
    Bad("folder of a number", lambda _: se.load(small(), 3), "a path is a text"),  # type: ignore[arg-type]
    Bad("folder of a zero byte", lambda _: se.load(small(), "a\0b"), "no file has a name such as"),
    Bad("folder of an endless name", lambda _: se.load(small(), "x" * 5000), "5000 characters"),
    Bad("save over a file", saving("file"), "cannot be made a folder"),
    Bad("save below a file", saving("file/model"), "cannot be made a folder"),
    Bad("save under a zero byte", saving("a\0b"), "no file has a name such as"),
    Bad("save under none", saving(None), "a path is a text"),
]


# settings of a training


def settings(text: Any) -> Callable[[Path], Any]:
    return lambda _: Recipe.parse(text)


CONFIGS = [
    Bad("recipe of none", settings(None), "a recipe is JSON"),
    Bad("recipe that is no text", settings(b"\xff"), "a recipe is JSON"),
    Bad("recipe with a byte order mark", settings('\ufeff{"epochs": 3}'), "a recipe is JSON"),
    Bad("recipe of one number", settings("3"), "a JSON object of settings; got int"),
    Bad("recipe of nested lists", settings("[" * 100_000), "nested too deeply"),
    Bad("recipe of nested objects", settings('{"a":' * 100_000), "nested too deeply"),
    Bad("epochs of a truth", settings('{"epochs": true}'), "epochs is a whole number from 1; got True"),
    Bad("epochs of 5000 digits", settings('{"epochs": ' + "9" * 5000 + "}"), "this text is not"),
    Bad("epochs of 400 digits", settings('{"epochs": ' + "9" * 400 + "}"), "epochs lies below 2^62"),
    Bad("batch beyond torch", settings('{"batch": 9223372036854775808}'), "batch lies below 2^62"),
    Bad("rate of 400 digits", settings('{"rate": ' + "9" * 400 + "}"), "rate lies between 0 and inf"),
    Bad("rate of nan", settings('{"rate": NaN}'), "rate lies between 0 and inf; got nan"),
    Bad("rate as text", settings('{"rate": "1e-3"}'), "rate lies between"),
    Bad("seed below zero", settings('{"seed": -1}'), "seed is a whole number from 0; got -1"),
    Bad("optimizer as list", settings('{"optimizer": ["adam"]}'), "optimizer is one of adamw, adam, sgd"),
    Bad("schedule of nothing", settings('{"schedule": null}'), "schedule is one of cosine"),
    Bad("setting without a name", settings('{"": 1}'), "no setting ''"),
    Bad("settings by number", lambda _: Recipe.of({3: 4}), "no setting 3"),  # type: ignore[dict-item]
    Bad("settings as pairs", lambda _: Recipe.of([("epochs", 3)]), "a mapping from names to values; got list"),  # type: ignore[arg-type]
    Bad("no settings", lambda _: Recipe.of(None), "a mapping from names to values"),  # type: ignore[arg-type]
]


# pictures and how they are prepared


def made(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir()
    return folder


def draw(path: Path, shape: tuple[int, ...] = (24, 24, 3)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def classes(folder: Path, count: int = 5) -> Path:
    for number in range(count):
        for picture in range(4):
            draw(folder / f"class{number}" / f"{picture}.png")
    return folder


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side: int, *more: bytes) -> bytes:
    """The file of a black square."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


def picture(content: bytes, name: str = "a.png") -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        (folder / name).write_bytes(content)
        decoded(folder / name, "RGB")

    return act


def narrow(folder: Path) -> None:
    Image.new("RGB", (20_000, 1)).save(folder / "a.png")
    Labelled(224)(folder / "a.png", 0, random.Random(0))


def pictured(**options: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        task = image_folder(classes(folder), **{"size": 16, "validation": 0.25, **options})
        task.train.batch(torch.arange(1))

    return act


def prepared(content: bytes | str, size: int | None = 20) -> Callable[[Path], Any]:
    """Read pictures as a preprocessor file says."""

    def act(folder: Path) -> None:
        model: Any = CASES["vit"].model()
        model.config.name_or_path = str(folder)
        text = content if isinstance(content, bytes) else content.encode()
        (folder / "preprocessor_config.json").write_bytes(text)
        next(iter(open_images(classes(folder / "pictures"), model, size=size)))

    return act


def mean(values: str, deviations: str = "[1, 1, 1]") -> str:
    return f'{{"image_mean": {values}, "image_std": {deviations}}}'


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch hacked) (w) file\nshowpage\n"
)
PICTURES = [
    Bad("picture of 3.6 thousand million pixels", picture(png(60_000)), "exceeds limit"),
    Bad("picture of 144 million pixels in 64 bytes", picture(png(12_000)), "cannot be read as a picture"),
    Bad(
        "picture with 70 MB of text",
        picture(png(4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(70_000_000))))),
        "cannot be read as a picture",
    ),
    Bad("picture that is a program", picture(POSTSCRIPT), "cannot identify image file"),
    Bad("picture of another kind", picture(b"GIF89a" + bytes(50)), "cannot identify image file"),
    Bad("picture that is a drawing", picture(b"<svg/>"), "cannot identify image file"),
    Bad("picture of letters", picture(b"P3 2 2 255\n1 2 x", "a.ppm"), "cannot be read as a picture"),
    Bad("picture of no pixels", picture(b"P6 0 0 255\n", "a.ppm"), "cannot be read as a picture"),
    Bad("picture of an endless header", picture(b"P6 999999 999999 255\n", "a.ppm"), "exceeds limit"),
    Bad("picture that is a folder", lambda f: decoded(made(f / "a.png")), "cannot be read as a"),
    Bad("picture of 20,000 x 1 pixels", narrow, "20000 x 1 pixels is too narrow"),
    Bad("pictures of side 0", pictured(size=0), "a whole number of pixels, such as 224; got 0"),
    Bad("pictures of side -3", pictured(size=-3), "got -3"),
    Bad("pictures of side 1.5", pictured(size=1.5), "got 1.5"),
    Bad("pictures of side 10^6", pictured(size=10**6), "got 1000000"),
    Bad("pictures cut by 0", pictured(crop=0), "crop is the share"),
    Bad("pictures cut by nan", pictured(crop=math.nan), "crop is the share"),
    Bad("held out by text", pictured(validation="some"), "a fraction of the examples lies in (0, 1]; got 'some'"),
    Bad("split by a text", pictured(seed="x"), "a seed is a whole number"),
    Bad("split by a seed beyond torch", pictured(seed=2**70), "below 2^62"),
    Bad("classes as text", pictured(classes="x"), "the number of classes is a whole number"),
    Bad("folder that is none", lambda _: image_folder(None), "a path is a text"),  # type: ignore[arg-type]
    Bad("folder that is a picture", lambda f: image_folder(draw(f / "a.png")), "there is no folder"),
    Bad("task of none", lambda _: open_task(None, small()), "a path is a text"),  # type: ignore[arg-type]
    Bad("task of an endless name", lambda _: open_task("mnist:" + "x" * 5000, small()), "5000 characters"),
    Bad("preprocessor cut short", prepared("{"), "is not JSON"),
    Bad("preprocessor of a list", prepared("[]"), "holds no settings but list"),
    Bad("preprocessor of 100,000 brackets", prepared("[" * 100_000), "nested too deeply"),
    Bad("preprocessor that is no text", prepared(b"\xff\xfe{"), "is not JSON"),
    Bad("mean that is a number", prepared(mean("3")), "image_mean is 3"),
    Bad("mean of letters", prepared(mean('["a", "b", "c"]')), "a list of numbers"),
    Bad("mean of nan", prepared(mean("[NaN, 0, 0]")), "a list of numbers"),
    Bad("deviation of zero", prepared(mean("[0, 0, 0]", "[1, 0, 1]")), "not the positive deviations"),
    Bad("more deviations than means", prepared(mean("[0.5]", "[1, 1]")), "not the positive deviations"),
    Bad("normalised by nothing", prepared('{"do_normalize": true}'), "does not say how it normalises"),
    Bad("resampled by text", prepared('{"resample": "best"}'), "resample is 'best'"),
    Bad("resampled by an unknown number", prepared('{"resample": 99}'), "resample is 99"),
    Bad("processor that is none", prepared('{"image_processor_type": "os.system"}', None), "prepares no picture"),
    Bad(
        "processor of no size", prepared('{"size": "large", "image_processor_type": "ViTImageProcessor"}', None), "pre"
    ),
]


# masks, labels and lists


def masked(save: Callable[[Path], Any], **options: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        for number in range(5):
            draw(folder / "x" / f"{number}.png")
            (folder / "y").mkdir(exist_ok=True)
            save(folder / "y" / f"{number}.png")
        values = options.pop("values", masks.Values(3))
        chosen = {"size": 16, "test": 0.4, "validation": 0.4, **options}
        task = masks.mask_folders(folder / "x", folder / "y", values, **chosen)
        task.train.batch(torch.arange(len(task.train)))

    return act


def of_array(values: Any) -> Callable[[Path], Any]:
    return lambda path: Image.fromarray(values).save(path)


def listed(*lines: str) -> Callable[[Path], Any]:
    """Eight pictures listed in labels.tsv, then these lines."""

    def act(folder: Path) -> None:
        draw(folder / "secret.png")
        home = folder / "pictures"
        good = [f"{number}.png\t{number % 2}" for number in range(8)]
        for number in range(8):
            draw(home / f"{number}.png")
        (home / "labels.tsv").write_text("\n".join([*good, *lines]))
        image_folder(home, size=16, classes=2, validation=0.25)

    return act


def voc_list(line: str) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        (folder / "ImageSets" / "Segmentation").mkdir(parents=True)
        for split in ("train", "val"):
            (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(f"a\nb\nc\n{line}\n")
        for place in ("JPEGImages/a", "JPEGImages/b", "JPEGImages/c", "secret"):
            draw(folder / f"{place}.jpg")
            draw(folder / "SegmentationClass" / f"{place[-1]}.png", (24, 24))
        masks.voc(folder, size=16, validation=0.4)

    return act


def twice(mask: Path) -> None:
    """A mask, and its picture in another format as well."""
    Image.fromarray(ZEROS).save(mask)
    draw(mask.parent.parent / "x" / f"{mask.stem}.tif")


ZEROS = np.zeros((24, 24), np.uint8)
MASKS = [
    Bad("mask of real numbers", masked(lambda p: Image.fromarray(ZEROS / 1.0).save(p, "tiff")), "mode F"),
    Bad("mask of two bytes a pixel", masked(of_array(np.full((24, 24), 300, np.uint16))), "holds the value 300"),
    Bad("mask with transparency", masked(of_array(np.zeros((24, 24, 4), np.uint8))), "mode RGBA"),
    Bad("mask of grey and transparency", masked(of_array(np.zeros((24, 24, 2), np.uint8))), "mode LA"),
    Bad("mask of nothing", masked(lambda p: p.write_bytes(b"")), "cannot be read as a picture"),
    Bad("mask that is a folder", masked(lambda p: p.mkdir()), "has no mask"),
    Bad("mask of 3.6 thousand million pixels", masked(lambda p: p.write_bytes(png(60_000))), "exceeds limit"),
    Bad("mask of another size", masked(of_array(ZEROS[:12])), "24 x 12 and"),
    Bad("masks in a square of 0", masked(of_array(ZEROS), size=0), "a whole number of pixels"),
    Bad("masks in a square of -1", masked(of_array(ZEROS), size=-1), "got -1"),
    Bad("masks in a square of 2.5", masked(of_array(ZEROS), size=2.5), "got 2.5"),
    Bad("masks of no classes", lambda f: masked(of_array(ZEROS), values=masks.Values(0))(f), "1 to 255 classes; got 0"),
    Bad("masks of 300 classes", lambda f: masked(of_array(ZEROS), values=masks.Values(300))(f), "got 300"),
    Bad("ignored value that is a number", lambda _: masks.Values(2, ignored=255), "a tuple"),  # type: ignore[arg-type]
    Bad("mask of two pictures", masked(twice), "0.png and 0.tif have one mask, 0.png; keep one"),
    Bad("classes that are a text", lambda _: masks.Values("x"), "are whole numbers"),  # type: ignore[arg-type]
    Bad("list that leads out", voc_list("../secret"), "line 4: '../secret' leads out of the folder"),
    Bad("list that leads to the root", voc_list("/etc/passwd"), "leads out of the folder"),
    Bad("list that names one twice", voc_list("b"), "line 4: 'b' is in line 2 already"),
    Bad("list that names one twice in two ways", voc_list("./b"), "line 4: './b' is in line 2 already"),
    Bad("list with a zero byte", voc_list("a\0"), "no file has a name such as"),
    Bad("label that leads out", listed("../secret.png\t0"), "line 9: '../secret.png' leads out of the folder"),
    Bad("label that leads out by a bend", listed("images/../../secret.png\t0"), "leads out of the folder"),
    Bad("label that leads out backwards", listed("..\\secret.png\t0"), "leads out of the folder"),
    Bad("label on another drive", listed("C:\\secret.png\t0"), "leads out of the folder"),
    Bad("label of the root", listed("/secret.png\t0"), "leads out of the folder"),
    Bad("label with a zero byte", listed("a\0b.png\t0"), "no file has a name such as"),
    Bad("label of an endless name", listed("x" * 5000 + ".png\t0"), "5004 characters"),
    Bad("label that contradicts another", listed("3.png\t0"), "3.png is listed more than once"),
    Bad("label of nobody", listed("\t0"), "there is no picture ''"),
    Bad("label of a small two", listed("9.png\t²"), "not a file name, a tab and the number"),
    Bad("label of a space", listed("9.png\t "), "not a file name, a tab and the number"),
    Bad("labels that are a folder", lambda f: image_folder(made(f / "labels.tsv").parent), "holds no pictures"),
    Bad(
        "labels in another encoding", lambda f: ((f / "labels.tsv").write_text("a", "utf-16"), image_folder(f)), "no t"
    ),
]


# trajectories

WALK = "\n".join(f"{10 * step} 1 {0.5 * step} 2.0" for step in range(20))


def walk(more: str | bytes, **options: Any) -> Callable[[Path], Any]:
    content = more if isinstance(more, bytes) else f"{WALK}\n{more}".encode()

    def act(folder: Path) -> None:
        for split in ("train", "val", "test"):
            (folder / "eth" / split).mkdir(parents=True)
            (folder / "eth" / split / "a.txt").write_bytes(content)
        read_scene(folder, "eth", **{"past": 3, "future": 2, "together": 1, **options})

    return act


def zipped(fill: Callable[[zipfile.ZipFile], Any]) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for split in ("train", "val", "test"):
                archive.writestr(f"eth/{split}/a.txt", WALK)
            fill(archive)
        read_scene(folder / "a.zip", "eth", 3, 2, together=1)

    return act


def link_member(archive: zipfile.ZipFile) -> None:
    member = zipfile.ZipInfo("eth/train/b.txt")
    member.external_attr = 0o120777 << 16
    archive.writestr(member, "/etc/passwd")


TRAJECTORIES = [
    Bad("position beyond the Earth", walk("300 1 1e200 2"), "line 21: 1e200 2 lies beyond 1e+07 metres"),
    Bad("position that overflows", walk("300 1 1e400 2"), "not finite"),
    Bad("position of infinity", walk("300 1 infinity 2"), "not finite"),
    Bad("walk with commas", walk(WALK.replace(" ", ",").encode()), "line 1: a row is four numbers"),
    Bad("walk with a heading", walk(b"frame ped x y\n" + WALK.encode()), "line 1: a row is four numbers"),
    Bad("walk with zero bytes", walk("\0"), "a row is four numbers"),
    Bad("walk in another encoding", walk(WALK.encode("utf-16")), "is not a text file"),
    Bad("walk of one step", walk(b"0 1 0 0"), "are seen together for 5 successive steps"),
    Bad("pedestrian and a half", walk("300 1.5 1 2"), "frame and pedestrian are whole numbers"),
    Bad("past as text", walk("", past="x"), "all whole; got past=x"),
    Bad("past of a fraction", walk("", past=2.5), "all whole; got past=2.5"),
    Bad("company of none", walk("", together=None), "together=None"),
    Bad("scene that leads out", lambda f: read_scene(made(f / "a").parent, "../eth"), "holds no scene '../eth'"),
    Bad("scenes of none", lambda _: read_scene(None, "eth"), "a path is a text"),  # type: ignore[arg-type]
    Bad(
        "zip of more than memory should hold",
        lambda f: small_limit(zipped(lambda a: a.writestr("eth/train/b.txt", bytes(2_000_000))))(f),
        "a.zip unpacks to more than",
    ),
    Bad("zip of 3000 folders", zipped(lambda a: a.writestr("a/" * 3000 + "b", "")), "3000 folders down"),
    Bad("zip that leads to the root", zipped(lambda a: a.writestr("/etc/x", "")), "leads out of it"),
    Bad("zip that leads out backwards", zipped(lambda a: a.writestr("..\\x", "")), "leads out of it"),
    Bad("zip with a link, which is not followed", zipped(link_member), "got '/etc/passwd'"),
]


# archives and arrays


def tarred(*members: tuple[str, int, bytes, str]) -> Callable[[Path], Any]:
    """An archive of members (name, size, type, link), and look for a.bin in it."""

    def act(folder: Path) -> None:
        with tarfile.open(folder / "a.tar", "w") as archive:
            for name, size, kind, link in members:
                member = tarfile.TarInfo(name)
                member.size, member.type, member.linkname = size, kind, link
                archive.addfile(member, io.BytesIO(bytes(size)) if kind == tarfile.REGTYPE else None)
        archives.stored(folder / "a.tar", ["a.bin"], "get it")

    return act


def lying_tar(folder: Path) -> None:
    member = tarfile.TarInfo("a.bin")
    member.size = 2**60
    (folder / "a.tar").write_bytes(member.tobuf() + bytes(1024))
    archives.stored(folder / "a.tar", ["a.bin"], "get it")


def small_limit(act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """With a limit of one million bytes, as a true bomb would take the test a while to write."""

    def limited(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archives, "LARGEST", 1_000_000)
            act(folder)

    return limited


def gzipped(folder: Path) -> None:
    (folder / "a.bin.gz").write_bytes(gzip.compress(bytes(2_000_000)))
    archives.stored(folder, ["a.bin"], "get it")


def arrays(**changes: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        x, y = np.zeros((4, 3, 32, 32), np.uint8), np.arange(4)
        np.savez_compressed(folder / "c.npz", **{"x_train": x, "y_train": y, "x_test": x, "y_test": y, **changes})
        cifar.cifar10(folder / "c.npz", validation=0.5)

    return act


def header(shape: str) -> Callable[[Path], Any]:
    """Arrays that say that they have this shape, and hold nothing."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()

    def act(folder: Path) -> None:
        with zipfile.ZipFile(folder / "c.npz", "w") as archive:
            for name in ("x_train", "y_train", "x_test", "y_test"):
                archive.writestr(f"{name}.npy", array)
        cifar.cifar10(folder / "c.npz")

    return act


PLAIN = tarfile.REGTYPE
ARCHIVES = [
    Bad("archive of more than memory should hold", small_limit(tarred(("a.bin", 2_000_000, PLAIN, ""))), "unpacks to"),
    Bad("file of more than memory should hold", small_limit(gzipped), "a.bin.gz unpacks to more than"),
    Bad("arrays of more than memory should hold", small_limit(arrays(z=np.zeros(2_000_000))), "c.npz unpacks to"),
    Bad("archive with a hard link", tarred(("a.bin", 0, tarfile.LNKTYPE, "/etc/passwd")), "holds no a.bin"),
    Bad("archive with a pipe", tarred(("a.bin", 0, tarfile.FIFOTYPE, "")), "holds no a.bin"),
    Bad("archive with a device", tarred(("a.bin", 0, tarfile.CHRTYPE, "")), "holds no a.bin"),
    Bad("archive that leads out", tarred(("../x", 1, PLAIN, ""), ("a.bin", 1, PLAIN, "")), "outside its own folder"),
    Bad("archive that lies about a size", lying_tar, "unpacks to more than 1024 MB"),
    Bad("archive of none", lambda _: archives.stored(None, ["a"], "get it"), "a path is a text"),  # type: ignore[arg-type]
    Bad("arrays of 3 PB", header("(1000000000000, 3, 32, 32)"), "is damaged, cut short or holds pickles"),
    Bad("arrays beyond numpy", header("(99999999999999999999999, 3, 32, 32)"), "is damaged, cut short or holds"),
    Bad("arrays below zero", header("(-4, 3, 32, 32)"), "is damaged, cut short or holds pickles"),
    Bad("arrays that are code", header("__import__('os').abort()"), "is damaged, cut short or holds pickles"),
    Bad("complex labels", arrays(y_test=np.zeros(4, complex)), "labels are whole numbers"),
    Bad("labels of letters", arrays(y_test=np.array(list("abcd"))), "is damaged, cut short or holds pickles"),
    Bad("labels of dates", arrays(y_test=np.zeros(4, "M8[s]")), "is damaged, cut short or holds pickles"),
    Bad("labels of 2^63", arrays(y_test=np.full(4, 2**63, np.uint64)), "is none of 0..9"),
    Bad("labels in a table", arrays(y_test=np.zeros((4, 1), int)), "with labels (N,)"),
    Bad("pictures of real numbers", arrays(x_test=np.zeros((4, 3, 32, 32))), "bytes with labels"),
    Bad("no pictures", arrays(x_test=np.zeros((0, 3, 32, 32), np.uint8), y_test=np.arange(0)), "no examples"),
    Bad(
        "digits of 2^96 entries",
        lambda _: idx(bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"1", "digits"),
        "digits says that it holds",
    ),
]

# models that are none, and folders that hold none


def opening(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Open the folder of a model after something was done to it."""

    def act(folder: Path) -> None:
        vit: Any = CASES["vit"].model()
        vit.save_pretrained(folder / "vit")
        damage(folder / "vit")
        se.open_model(folder / "vit")

    return act


def config(**entries: Any) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **entries}))

    return opening(damage)


def config_text(text: str) -> Callable[[Path], Any]:
    return opening(lambda folder: (folder / "config.json").write_text(text))


def index(where: Any) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        told = (
            where if isinstance(where, str) and where == "{" else json.dumps({"weight_map": {n: where for n in names}})
        )
        (folder / "model.safetensors.index.json").write_text(told)

    return opening(damage)


NONE: Any = None
KIND: Any = nn.Conv2d
MODELS = [
    Bad("no model to soften", lambda _: se.soften(NONE, "C4", softness=0), "must be a torch module; got NoneType"),
    Bad("no model to plan", lambda _: se.plan(NONE, "C4", softness=0), "must be a torch module"),
    Bad("no model to certify", lambda _: se.certify(NONE, group="C4"), "must be a torch module"),
    Bad(
        "diverged weights to bake",
        lambda _: se.bake(diverged("parametrize")),
        "0.weight has entries that are not finite",
    ),
    Bad("diverged weights in place", lambda _: se.bake(diverged("project")), "training diverged; bake an earlier"),
    Bad("no model to bake", lambda _: se.bake(NONE), "must be a torch module"),
    Bad("no model to save", lambda f: se.save(NONE, f), "must be a torch module"),
    Bad("no model to load into", lambda f: checkpoint(lambda saved: se.load(NONE, saved))(f), "must be a torch module"),
    Bad(
        "no seed of a certificate",
        lambda _: se.certify(small(), group="C4", data=torch.zeros(8, 1, 9, 9), seed=NONE),
        "a seed is a whole number",
    ),
    Bad("degrees without their unit", target(within=30), r"'30deg'"),
    Bad("class instead of a model", lambda _: se.soften(KIND, "C4", softness=0), "got type"),
    Bad("names as one text", softening(only="0.weight"), "are given as a list"),
    Bad("names of a number", softening(skip=3), "are given as a list"),
    Bad("name that is a number", softening(only=[3]), "weights are named by text"),
    Bad("name of nothing", softening(skip=[None]), "weights are named by text"),
    Bad("softness for a number", softening(softness={3: 0.5}), "weights are named by text"),
    Bad("gain as text", softening(softness=None, gain="hard"), "gain must be a gain", se.GainError),
    Bad("gain as a class", softening(softness=None, gain=se.hard), "gain must be a gain", se.GainError),
    Bad("certificate of none", lambda _: se.Certificate.from_json(NONE), "is not JSON"),
    Bad("certificate of 100,000 brackets", lambda _: se.Certificate.from_json("[" * 100_000), "nested too deeply"),
    Bad("certificate of an endless number", lambda _: se.Certificate.from_json("9" * 5000), "is not JSON"),
    Bad("statistics of brackets", lambda _: se.StatisticalCertificate.from_json("[" * 100_000), "nested too deeply"),
    Bad("configuration of brackets", config_text("[" * 100_000), "config.json is not JSON: it is nested too deeply"),
    Bad("configuration of an endless number", config_text('{"a": ' + "9" * 5000 + "}"), "config.json is not JSON"),
    Bad("patches of no size", config(patch_size=0), "cannot be opened"),
    Bad("width of nothing", config(hidden_size=0), "cannot be opened"),
    Bad("layers as text", config(num_hidden_layers="9"), "cannot be opened"),
    Bad("architecture of a number", config(architectures=3), "cannot be opened"),
    Bad("model type of a list", config(model_type=["vit"]), "cannot be opened"),
    Bad("precision of a module", config(dtype="os"), "cannot be opened"),
    Bad("width of 2^40", config(hidden_size=2**40), "cannot be opened"),
    Bad("activation that is code", config(hidden_act="__import__('os')"), "cannot be opened"),
    Bad("index that leads out", index("../vit/model-00001-of-00001.safetensors"), "leads out of its folder"),
    Bad("index that leads to the root", index("/etc/passwd"), "leads out of its folder"),
    Bad("index of numbers", index(3), "leads out of its folder"),
    Bad("index cut short", index("{"), "is no index of weights"),
    Bad("model of an endless name", lambda _: se.open_model("x" * 5000), "5000 characters"),
    Bad("model of a number", lambda _: se.open_model(NONE), "a path is a text"),
]

CATALOGUE = [*API, *MEASURED, *MODELS, *CHECKPOINTS, *CONFIGS, *PICTURES, *MASKS, *TRAJECTORIES, *ARCHIVES]


@pytest.fixture(autouse=True)
def within_seconds() -> Iterator[None]:
    """An answer that does not come is none."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer in {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", CATALOGUE, ids=[bad.name for bad in CATALOGUE])
def test_bad_input_is_answered_by_a_sentence(bad: Bad, tmp_path: Path) -> None:
    with pytest.raises(bad.error) as caught:
        bad.act(tmp_path)
    sentence = " ".join(str(caught.value).split())
    assert bad.words in sentence and len(sentence) < 2000
    assert not list(tmp_path.rglob("*.part"))


def test_the_catalogue_is_large_and_names_everything_once() -> None:
    names = [bad.name for bad in CATALOGUE] + [command.name for command in COMMANDS]
    assert len(names) >= 100 and len(set(names)) == len(names)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    numbers: list[Any] = [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)]
    for number in numbers:
        se.save(se.soften(small(), "C4", softness=number), tmp_path)
        net = se.load(small(), tmp_path)
        assert [weight.soft.gain for weight in se.soft_weights(net)] == 2 * [se.softness(0.5)]


# the command line


@dataclass(frozen=True)
class Command:
    """A wrong command in a folder that holds a model, pictures and what `prepare` adds."""

    name: str
    arguments: tuple[str, ...]
    words: str
    prepare: Callable[[Path], Any] = lambda _: None
    code: int = 3


def text_file(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def spoilt_soft(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def prepare(folder: Path) -> None:
        shutil.copytree((folder / "soft").resolve(), folder / "spoilt")
        damage(folder / "spoilt")

    return prepare


def nan_inside(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["classifier.weight"][0, 0] = math.nan
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    entries = json.loads((folder / "softequiv.json").read_text())
    del entries["sha256"]
    (folder / "softequiv.json").write_text(json.dumps(entries))


TRAIN = ("train", "vit", "-d", "pictures", "-o", "out")
COMMANDS = [
    Command(
        "soften to an error below rounding",
        ("soften", "vit", "-g", "SO(2)", "-e", "1e-300", "-w", "9deg", "-o", "out"),
        "less than rounding",
    ),
    Command(
        "soften for an endless group",
        ("soften", "vit", "-g", "C" + "9" * 5000, "-s", "0", "-o", "out"),
        "no group has a name",
    ),
    Command("plan for letters", ("plan", "vit", "-g", "C4", "-s", "abc"), "unable to parse string as a number", code=2),
    Command("soften by an infinite dial", ("soften", "vit", "-g", "C4", "-s", "inf", "-o", "out"), "got inf"),
    Command(
        "open a checkpoint of another's weights", ("certify", "spoilt"), "damaged or changed", spoilt_soft(flip_one_bit)
    ),
    Command("open a checkpoint with a nan", ("certify", "spoilt"), "not finite", spoilt_soft(nan_inside)),
    Command("bake a checkpoint with a nan", ("bake", "spoilt", "-o", "out"), "not finite", spoilt_soft(nan_inside)),
    Command(
        "open a recipe of brackets",
        ("bake", "spoilt", "-o", "out"),
        "nested too deeply",
        spoilt_soft(text_file("softequiv.json", "[" * 100_000)),
    ),
    Command(
        "train by a recipe of brackets",
        (*TRAIN, "--recipe", "deep.json"),
        "nested too deeply",
        text_file("deep.json", "[" * 100_000),
    ),
    Command(
        "train by a recipe that is no text",
        (*TRAIN, "--recipe", "no.json"),
        "cannot be read",
        text_file("no.json", b"\xff\xfe\xff"),
    ),
    Command("train by a recipe that is a folder", (*TRAIN, "--recipe", "pictures"), "cannot be read"),
    Command(
        "train by an endless number",
        (*TRAIN, "--recipe", "big.json"),
        "epochs lies below 2^62",
        text_file("big.json", '{"epochs": ' + "9" * 400 + "}"),
    ),
    Command("train on data of an endless name", ("train", "vit", "-d", "x" * 5000, "-o", "out"), "5000 characters"),
    Command("train from a negative seed", (*TRAIN, "--seed", "-1"), "'--seed'", code=2),
    Command(
        "train on digits cut short",
        ("train", "vit", "-d", "mnist:digits", "-o", "out"),
        "holds no train-images",
        lambda f: made(f / "digits"),
    ),
    Command(
        "measure on a list that leads out",
        ("train", "vit", "-d", "listed", "-o", "out", "--new-head"),
        "leads out of the folder",
        lambda f: (draw(f / "listed" / "0.png"), (f / "listed" / "labels.tsv").write_text("../0.png\t0\n")),
    ),
    Command(
        "measure no picture but a program",
        ("measure", "soft", "-d", "programs"),
        "cannot be read as a picture",
        lambda f: (made(f / "programs") / "a.png").write_bytes(POSTSCRIPT),
    ),
    Command(
        "measure a bomb",
        ("measure", "soft", "-d", "bombs"),
        "exceeds limit",
        lambda f: (made(f / "bombs") / "a.png").write_bytes(png(60_000)),
    ),
    Command("report on nothing", ("report", "soft", "-d", "none", "-o", "page.html"), "there is no folder 'none'"),
    Command("verify by a folder", ("certify", "soft", "--verify", "pictures"), "cannot be read as a certificate"),
    Command(
        "verify by what is no text",
        ("certify", "soft", "--verify", "no.json"),
        "cannot be read as a certificate",
        text_file("no.json", b"\xff\xfe\xff"),
    ),
    Command("measure by the seed of nobody", ("measure", "soft", "-d", "pictures", "--seed", "x"), "'--seed'", code=2),
    Command("open a path with a zero byte", ("plan", "a\0b", "-g", "C4", "-s", "0"), "no file has a name such as"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain ViT, a soft one and pictures; nobody writes into these."""
    root = tmp_path_factory.mktemp("home")
    vit: Any = CASES["vit"].model()
    vit.save_pretrained(root / "vit")
    se.save_model(se.soften(se.open_model(root / "vit"), "C4", softness=0.5), root / "soft")
    classes(root / "pictures")
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", COMMANDS, ids=[command.name for command in COMMANDS])
def test_a_bad_command_is_answered_by_a_sentence(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vit", "soft", "pictures"):
        (tmp_path / name).symlink_to(home / name)
    command.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(os.listdir())
    result = CliRunner().invoke(commands.app, list(command.arguments))
    told = " ".join(result.stderr.split())
    assert (result.exit_code, result.stdout) == (command.code, ""), result.output
    assert command.words in told and "Traceback" not in told and "unexpected" not in told
    assert sorted(os.listdir()) == before  # neither results nor parts of them
