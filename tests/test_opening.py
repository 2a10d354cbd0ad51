"""What must hold for models in folders: what was written opens again as it was, and nothing but weights is read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from torch import nn

import softequiv as se
from softequiv._files import HOST
from softequiv.adapt import opening
from softequiv.adapt.opening import open_model, save_model
from zoo import CASES, answer

FAMILIES = ("vit", "deit", "dinov3", "resnet", "segformer", "swin")


def folder_of(name: str, root: Path) -> Path:
    """A family as transformers writes it."""
    folder = root / name
    CASES[name].model().save_pretrained(folder)
    return folder


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    return folder_of("vit", tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_transformers_opens_with_its_class_and_its_answers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = open_model(folder_of(name, tmp_path))
    assert type(model) is type(expected) and not model.training
    with torch.no_grad():
        assert torch.equal(answer(model, case.input()), answer(expected, case.input()))


@pytest.mark.parametrize("mode", ["parametrize", "project"])
@pytest.mark.parametrize("name", ["vit", "segformer", "dinov3"])
def test_a_soft_model_opens_again_with_the_same_recipe_answers_and_certificate(
    name: str, mode: Any, tmp_path: Path
) -> None:
    case = CASES[name]
    model = open_model(folder_of(name, tmp_path))
    se.soften(model, "SO(2)", error=0.1, within=se.degrees(30), mode=mode)
    save_model(model, tmp_path / "soft")
    again = open_model(tmp_path / "soft")
    assert [w.name for w in se.soft_weights(again)] == [w.name for w in se.soft_weights(model)]
    assert se.certify(again) == se.certify(model)
    with torch.no_grad():
        assert torch.equal(answer(again, case.input()), answer(model, case.input()))


def test_a_soft_model_that_transformers_wrote_is_refused_with_the_way_to_open_it(vit: Path, tmp_path: Path) -> None:
    trained = se.soften(open_model(vit), "SO(2)", softness=0.5)
    trained.save_pretrained(tmp_path / "trainer")
    with pytest.raises(se.SoftEquivError, match=r"holds weights of a soft model .*key_mapping=\{.*save_model"):
        open_model(tmp_path / "trainer")
    kind = transformers.ViTForImageClassification
    again = se.soften(kind.from_pretrained(tmp_path / "trainer", key_mapping=opening.PLAINLY), "SO(2)", softness=0.5)
    assert torch.equal(answer(again, CASES["vit"].input()), answer(trained, CASES["vit"].input()))


def test_tensors_under_the_names_of_a_soft_state_dict_are_loaded() -> None:
    one, other = (se.soften(CASES["cnn"].model(), "SO(2)", softness=0.5) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    se.load_tensors(other, one.state_dict())
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in other.state_dict().items())
    with pytest.raises(se.SoftEquivError, match=r"unexpected .*parametrizations\.weight\.original"):
        se.load_tensors(CASES["cnn"].model(), one.state_dict())  # which would answer unfiltered
    with pytest.raises(se.SoftEquivError, match=r"unexpected .*parametrizations\.weight\.original"):
        se.load_tensors(se.soften(CASES["cnn"].model(), "SO(2)", softness=0.5, mode="project"), one.state_dict())


def test_half_precision_stays_half(vit: Path, tmp_path: Path) -> None:
    model = open_model(vit).bfloat16()
    save_model(se.soften(model, "C4", softness=0.5), tmp_path / "soft")
    again = open_model(tmp_path / "soft")
    stored = se.stored_tensors(model)
    for name, value in se.stored_tensors(again).items():
        assert value.dtype == stored[name].dtype and torch.equal(value, stored[name]), name


def test_a_baked_folder_is_a_plain_one_for_transformers(vit: Path, tmp_path: Path) -> None:
    model = se.soften(open_model(vit), "C4", softness=0.0)
    expected = {weight.name: weight.value().detach().clone() for weight in se.soft_weights(model)}
    save_model(se.bake(model), tmp_path / "plain")
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "plain", use_safetensors=True)
    assert list(again.state_dict()) == list(transformers.ViTForImageClassification.from_pretrained(vit).state_dict())
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"config.json", "model.safetensors"}
    for name, value in expected.items():
        assert torch.equal(again.get_parameter(name), value), name


def test_the_preprocessor_travels_with_the_model(vit: Path, tmp_path: Path) -> None:
    text = '{"image_processor_type": "ViTImageProcessor", "size": {"height": 20, "width": 20}}'
    (vit / "preprocessor_config.json").write_text(text)
    save_model(se.soften(open_model(vit), "C4", softness=0.5), tmp_path / "soft")
    save_model(se.bake(open_model(tmp_path / "soft")), tmp_path / "plain")
    assert (tmp_path / "plain" / "preprocessor_config.json").read_text() == text


def test_a_folder_with_files_is_never_written_into(vit: Path) -> None:
    before = {path.name: path.read_bytes() for path in vit.iterdir()}
    with pytest.raises(se.SoftEquivError, match="not an empty folder; choose another name"):
        save_model(se.soften(open_model(vit), "C4", softness=0.5), vit)
    assert {path.name: path.read_bytes() for path in vit.iterdir()} == before


def test_an_interrupted_save_leaves_nothing(vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = se.soften(open_model(vit), "C4", softness=0.5)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "written_config", stop)
    with pytest.raises(KeyboardInterrupt):
        save_model(model, tmp_path / "soft")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit"]


def test_a_save_clears_what_killed_processes_left_of_the_same_folder(vit: Path, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended, living = gone.pid, os.getppid()
    left = [
        f".soft.{HOST}.{ended}.0a1b2c3d.part",
        f".soft.{HOST}.{living}.0a1b2c3d.part",
        f".soft.another-machine.{ended}.0a1b2c3d.part",
        f".soft.old.{HOST}.{ended}.0a1b2c3d.part",
        ".soft.notes.part",
    ]
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    save_model(se.soften(open_model(vit), "C4", softness=0.5), tmp_path / "soft")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["vit", "soft", *left[1:]])


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_and_never_opened(vit: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (vit / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    open_model(vit)  # the safetensors beside it are enough
    (vit / "model.safetensors").unlink()
    with pytest.raises(se.SoftEquivError, match=r"pickle only \(pytorch_model.bin\), which can run any code"):
        open_model(vit)
    assert not sprung.exists()


def test_code_of_a_model_runs_only_where_it_is_trusted(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    (vit / "own.py").write_text(
        "import pathlib, transformers\n"
        f"pathlib.Path({str(ran)!r}).touch()\n"
        "class OwnConfig(transformers.ViTConfig):\n    model_type = 'own-vit'\n"
        "class OwnModel(transformers.ViTForImageClassification):\n    config_class = OwnConfig\n"
    )
    config = json.loads((vit / "config.json").read_text())
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForImageClassification": "own.OwnModel"}
    (vit / "config.json").write_text(json.dumps({**config, "model_type": "own-vit", "auto_map": auto}))
    with pytest.raises(se.SoftEquivError, match="trust_remote_code"):
        open_model(vit)
    assert not ran.exists()
    assert type(open_model(vit, trust_remote_code=True)).__name__ == "OwnModel"


def test_weights_without_a_place_are_told(vit: Path, tmp_path: Path) -> None:
    config = json.loads((vit / "config.json").read_text())
    shutil.copytree(vit, tmp_path / "headless")
    (tmp_path / "headless" / "config.json").write_text(json.dumps({**config, "architectures": ["ViTModel"]}))
    with pytest.warns(UserWarning, match=r"classifier.*have no place in ViTModel and are left out"):
        open_model(tmp_path / "headless")
    transformers.ViTModel(transformers.ViTConfig(**config), add_pooling_layer=False).save_pretrained(tmp_path / "body")
    (tmp_path / "body" / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"classifier.*starts with random values there"):
        open_model(tmp_path / "body")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda vit: cut_short(vit / "model.safetensors"), "cannot be read, they may be cut short"),
        (lambda vit: (vit / "model.safetensors").write_bytes(b"nothing"), "cannot be read, they may be cut short"),
        (lambda vit: (vit / "model.safetensors").unlink(), "holds no weights; it needs model.safetensors"),
        (lambda vit: (vit / "config.json").unlink(), "holds no config.json, so nothing says which model it is"),
        (lambda vit: (vit / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda vit: (vit / "config.json").write_text("[]"), "holds no configuration but list"),
        (lambda vit: (vit / "config.json").write_text('{"model_type": "nix"}'), "cannot be opened"),
        (lambda vit: (vit / "softequiv.json").write_text("{}"), "is not a recipe of format"),
    ],
)
def test_damaged_folders_are_refused_in_a_sentence(damage: Any, says: str, vit: Path) -> None:
    damage(vit)
    with pytest.raises(se.SoftEquivError, match=says):
        open_model(vit)


def test_a_soft_folder_cut_short_is_refused(vit: Path, tmp_path: Path) -> None:
    soft = tmp_path / "soft"
    save_model(se.soften(open_model(vit), "C4", softness=0.5), soft)
    (soft / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(se.SoftEquivError, match=r"softequiv\.load it into a model built in code"):
        open_model(soft)
    (tmp_path / "config.json").rename(soft / "config.json")
    cut_short(soft / "model.safetensors")
    with pytest.raises(se.SoftEquivError, match="cut short"):
        open_model(soft)


@pytest.mark.parametrize("name", ["./nix", "/nix/nix", "nix/", "a/b/c", "~/nix-nix"])
def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(se.SoftEquivError, match="there is no folder"):
        open_model(name)


def test_a_hub_id_opens_as_its_folder_does_and_offline_it_is_told(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(vit)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", download)
        assert isinstance(open_model("some/vit"), transformers.ViTForImageClassification)
    assert asked == {"some/vit": ["*.json", "model*.safetensors"]}  # neither pickles nor code
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(se.SoftEquivError, match=r"'some/vit' is neither a folder here nor .* download it once"):
        open_model("some/vit")


def test_a_model_that_no_file_describes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(se.SoftEquivError, match=r"Conv2d is no model of transformers or timm.*softequiv\.save"):
        save_model(se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5), tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.fixture
def small_timm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in with timm's one function, and the calls that it saw."""
    calls: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        if name != "net":
            raise RuntimeError(f"Unknown model ({name})")
        classes = options.get("num_classes", 4)
        model: Any = nn.Sequential(
            nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
        )
        model.num_classes = classes
        own = {"architecture": name, "input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "url": "x"}
        model.pretrained_cfg = {**own, **options.get("pretrained_cfg_overlay", {})}
        return model

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    return calls


def test_models_of_timm_come_as_safetensors_and_their_folders_open_again(
    small_timm: list[dict[str, Any]], tmp_path: Path
) -> None:
    model: Any = open_model("timm:net")
    assert small_timm[0]["pretrained"] and small_timm[0]["pretrained_cfg_overlay"]["hf_hub_filename"].endswith(
        "tensors"
    )
    x = torch.randn(2, 3, 32, 32)
    save_model(se.soften(model, "C4", softness=0.3), tmp_path / "soft")
    soft: Any = open_model(tmp_path / "soft")
    assert list(se.soft_weights(soft)) and torch.equal(soft(x), model(x))
    save_model(se.bake(soft), tmp_path / "plain")
    plain: Any = open_model(tmp_path / "plain")
    assert not list(se.soft_weights(plain)) and torch.equal(plain(x), model(x))
    assert plain.pretrained_cfg["mean"] == [0.5] * 3 and small_timm[-1]["num_classes"] == 4
    with pytest.raises(se.SoftEquivError, match=r"timm has no pretrained 'nix'.*Unknown model"):
        open_model("timm:nix")


def test_missing_libraries_are_named(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(se.SoftEquivError, match=r"pip install 'softequiv\[timm\]'"):
        open_model("timm:net")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(se.SoftEquivError, match=r"pip install 'softequiv\[transformers\]'"):
        open_model(vit)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(se.SoftEquivError, match=r"pip install 'softequiv\[transformers\]'"):
        open_model("some/vit")
