"""Does anything that is opened run? No pickle, no text that is evaluated, no program, no code of a model unless asked:
neither in what the source calls, nor when hostile files are opened.
"""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import softequiv as se
from softequiv.tasks.cifar import cifar10
from softequiv.tasks.decoding import decoded
from softequiv.training.saved import read as read_training
from zoo import CASES

SOURCE = Path(__file__).resolve().parent.parent / "src" / "softequiv"
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "subprocess", "yaml", "urllib", "requests")
CALLS = ("eval", "exec", "compile", "__import__")  # as plain names: model.eval() is another
METHODS = ("torch.load", "torch.hub.load", "os.system", "os.popen", "numpy.fromfile")
UNPACKING = ("extractall", "extract", "unpack_archive")


def dotted(node: ast.expr) -> str:
    """The name of what is called: torch.hub.load."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def risks(text: str) -> list[str]:
    """What in a source text could run or write what a file holds."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            found += [name] * (name in CALLS or name in METHODS or name.rpartition(".")[2] in UNPACKING)
            for keyword in node.keywords:
                unsafe = keyword.arg in ("allow_pickle", "shell", "trust_remote_code")
                if unsafe and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                    found.append(f"{keyword.arg}=True")
    return found


def test_the_source_neither_unpickles_nor_evaluates_nor_starts_programs() -> None:
    assert {path.name: risks(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")} == {
        path.name: [] for path in SOURCE.rglob("*.py")
    }


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from subprocess import run",
        "eval('1')",
        "torch.load('a.pt')",
        "archive.extractall(folder)",
        "numpy.load('a', allow_pickle=True)",
        "AutoModel.from_pretrained('a', trust_remote_code=True)",
    ],
)
def test_the_look_at_the_source_sees_what_it_looks_for(line: str) -> None:
    assert len(risks(line)) == 1 and risks("model.eval()\nfile.read()") == []


class Hostile:
    """A pickle of it writes a file when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


def hostile_model(folder: Path, evil: bytes) -> None:
    vit: Any = CASES["vit"].model()
    vit.save_pretrained(folder / "vit")
    (folder / "vit" / "model.safetensors").unlink()
    (folder / "vit" / "pytorch_model.bin").write_bytes(evil)
    se.open_model(folder / "vit")


def hostile_code(folder: Path, evil: bytes) -> None:
    vit: Any = CASES["vit"].model()
    vit.save_pretrained(folder / "vit")
    entries = json.loads((folder / "vit" / "config.json").read_text())
    entries |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "vit" / "config.json").write_text(json.dumps(entries))
    (folder / "vit" / "mine.py").write_text(f"import pickle\npickle.loads({evil!r})\nclass Config: ...\n")
    se.open_model(folder / "vit")


def hostile_checkpoint(folder: Path, evil: bytes) -> None:
    se.save(se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5), folder / "soft")
    (folder / "soft" / "model.safetensors").write_bytes(evil)
    se.load(nn.Conv2d(3, 8, 5), folder / "soft")


def hostile_training(folder: Path, evil: bytes) -> None:
    (folder / "training.safetensors").write_bytes(evil)
    read_training(folder / "training.safetensors")


def hostile_batches(folder: Path, evil: bytes) -> None:
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        (folder / name).write_bytes(evil)
    cifar10(folder)


def hostile_arrays(folder: Path, evil: bytes) -> None:
    labels = np.array([0, Hostile(folder / "trace")], dtype=object)
    x, y = np.zeros((2, 3, 32, 32), np.uint8), np.zeros(2, int)
    np.savez(folder / "a.npz", x_train=x, y_train=labels, x_test=x, y_test=y)
    cifar10(folder / "a.npz")


def hostile_picture(folder: Path, evil: bytes) -> None:
    (folder / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    decoded(folder / "a.png", "RGB")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "opened",
    [
        hostile_model,
        hostile_code,
        hostile_checkpoint,
        hostile_training,
        hostile_batches,
        hostile_arrays,
        hostile_picture,
    ],
)
def test_a_hostile_file_is_refused_and_does_not_run(
    opened: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trace = tmp_path / "trace"
    with pytest.raises(se.SoftEquivError):
        opened(tmp_path, pickle.dumps(Hostile(trace)))
    assert not trace.exists()
    pickle.loads(pickle.dumps(Hostile(trace)))
    assert trace.exists()  # which it would have written


def test_pillow_is_asked_for_formats_that_start_no_programs(tmp_path: Path) -> None:
    """Encapsulated PostScript under the name of a picture would start Ghostscript where there is one."""
    from softequiv.tasks.decoding import FORMATS

    Image.init()
    assert set(FORMATS) <= set(Image.OPEN) and not {"EPS", "WMF", "PDF"} & set(FORMATS)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "a.png", "gif")
    with pytest.raises(se.SoftEquivError, match="cannot identify"):
        decoded(tmp_path / "a.png")


def test_a_checkpoint_records_the_checksum_of_its_weights(tmp_path: Path) -> None:
    from hashlib import sha256

    se.save(se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5), tmp_path)
    recorded = json.loads((tmp_path / "softequiv.json").read_text())["sha256"]
    assert recorded == sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    se.load(nn.Conv2d(3, 8, 5), tmp_path)
    (tmp_path / "softequiv.json").write_text(
        (tmp_path / "softequiv.json").read_text().replace(recorded, recorded[::-1])
    )
    with pytest.raises(se.SoftEquivError, match="has the checksum"):
        se.load(nn.Conv2d(3, 8, 5), tmp_path)


def test_a_checkpoint_without_a_checksum_is_still_read(tmp_path: Path) -> None:
    """Those of earlier versions have none, and an owner may take it out."""
    soft = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5)
    se.save(soft, tmp_path)
    entries = json.loads((tmp_path / "softequiv.json").read_text())
    del entries["sha256"]
    (tmp_path / "softequiv.json").write_text(json.dumps(entries))
    again: Any = se.load(nn.Conv2d(3, 8, 5), tmp_path)
    assert torch.equal(again.weight, soft.weight)
