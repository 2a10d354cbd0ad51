"""What must hold for the command line: it says what the library says, as tables or JSON, and errors in a sentence."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import softequiv as se
from shell import call, found
from softequiv.adapt.opening import open_model, save_model
from softequiv.cli import app as cli_app
from softequiv.cli import commands, doctor, given
from softequiv.errors import SoftEquivError
from softequiv.tasks.images import open_images
from softequiv.tasks.preparation import Squares
from zoo import CASES

COMMANDS = (
    "soften",
    "plan",
    "certify",
    "measure",
    "train",
    "bake",
    "report",
    "reproduce",
    "sweep",
    "bench",
    "demo",
    "doctor",
)
CLASSES = 5
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 20, "width": 20},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.3, 0.4],
}


def draw(path: Path, shape: tuple[int, ...] = (24, 30, 3)) -> None:
    """A picture of noise, the same for the same path and shape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng([*path.name.encode(), *path.parent.name.encode()])
    Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain ViT, a soft one, pictures in one folder and in classes; nobody writes into these."""
    root = tmp_path_factory.mktemp("home")
    CASES["vit"].model().save_pretrained(root / "vit")
    (root / "vit" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    CASES["segformer"].model().save_pretrained(root / "segformer")
    for number in range(CLASSES):
        for picture in range(2):
            draw(root / "classes" / f"class{number}" / f"{picture}.png")
    for picture in range(3):
        draw(root / "loose" / f"{picture}.png")
    result = call("soften", root / "vit", "-g", "SO(2)", "-e", 0.2, "-w", "30deg", "-o", root / "soft")
    assert result.exit_code == 0, result.output
    return root


def test_every_command_is_there_with_an_example_and_the_exit_codes() -> None:
    overview = call("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in overview
        text = " ".join(call(name, "--help").stdout.split())
        assert f"Example: softequiv {name}" in text and "Exit codes: 0 done, 1 the answer is no" in text
        assert "--json" in text and "--debug" in text
    assert "Exit codes" in overview
    assert overview.index("\n  plan ") < overview.index("\n  train ") < overview.index("\n  doctor ")


def test_plan_says_what_the_library_plans(home: Path) -> None:
    arguments = ("plan", home / "vit", "--group", "C4", "--softness", 0.5, "--skip", "*position*", "--image-size", 22)
    expected = se.plan(open_model(home / "vit"), "C4", softness=0.5, skip=["*position*"], image_size=22)
    entries = found(*arguments)
    assert [weight["name"] for weight in entries["weights"]] == [weight.found.name for weight in expected.weights]
    assert len(entries["left_alone"]) == len(expected.skipped)
    assert [item["why"] for item in entries["geometry"]] == [item.why for item in expected.uneven] != []
    shown = call(*arguments).stdout
    for line in (*(weight.kept for weight in expected.weights), *(f"geometry: {item}" for item in expected.uneven)):
        assert " ".join(line.split()) in " ".join(shown.split())


def test_soften_certify_verify_measure_and_bake_follow_each_other(home: Path, tmp_path: Path) -> None:
    plain, soft, page = tmp_path / "plain", tmp_path / "soft", tmp_path / "papers" / "certificate.json"
    softened = found(
        "soften",
        home / "vit",
        "--group",
        "SO(2)",
        "--error",
        0.1,
        "--within",
        "0.5rad",
        "--mode",
        "project",
        "-o",
        soft,
    )
    assert softened["out"] == str(soft) and softened["mode"] == "project"
    certified = found("certify", soft, "-o", page)
    expected = se.certify(open_model(soft))
    assert certified["error"] == expected.error == pytest.approx(0.1, rel=1e-4)
    assert certified["within"] == {"radians": 0.5}
    assert se.Certificate.load(page) == expected
    assert found("certify", soft, "--verify", page) == {"ok": True, "changes": [], "recomputed": 2, "total": 2}
    assert found("measure", soft, "--data", home / "loose")["within"] == 0.5  # the model's own target
    baked = found("bake", soft, "-o", plain)
    assert len(baked["weights"]) == 2
    again = transformers.AutoModelForImageClassification.from_pretrained(plain, use_safetensors=True)
    assert set(again.state_dict()) == set(CASES["vit"].model().state_dict())
    assert call("certify", plain, "--verify", page).exit_code == 0
    text = call("certify", plain, "--group", "SO(2)", "--within", "0.5rad").stdout
    assert "largest error 0.1" in text and "vit.embeddings.position_embeddings" in text


def test_a_soft_folder_opened_again_has_the_figures_that_soften_gave(home: Path) -> None:
    model = se.soften(open_model(home / "vit"), "SO(2)", error=0.2, within=se.degrees(30))
    entries, expected = found("certify", home / "soft"), json.loads(se.certify(model).to_json())
    assert entries["weights"] == expected["weights"] and entries["sha256"] == expected["sha256"]


def test_a_certificate_that_does_not_hold_is_a_no(home: Path, tmp_path: Path) -> None:
    page = tmp_path / "certificate.json"
    assert call("certify", home / "vit", "--group", "C4", "-o", page).exit_code == 0
    result = call("certify", home / "segformer", "--verify", page)
    assert result.exit_code == 1 and "is missing from the model" in result.stdout
    result = call("certify", home / "segformer", "--verify", page, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


def test_certify_compares_the_action_on_pictures(home: Path) -> None:
    assert found("certify", home / "soft")["gaps"] == []
    assert found("certify", home / "soft", "--images", home / "loose")["gaps"] != []


def test_the_seed_draws_the_pictures_that_the_action_is_compared_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "GAP_PICTURES", 1)
    arguments = ("certify", home / "soft", "--images", home / "loose", "--seed")
    gaps = [json.dumps(found(*arguments, seed)["gaps"]) for seed in range(8)]
    assert len(set(gaps)) > 1 and gaps[0] == json.dumps(found(*arguments[:-1])["gaps"])


def test_certify_over_data_is_that_of_the_library(home: Path, tmp_path: Path) -> None:
    page, model = tmp_path / "answers.json", open_model(home / "soft")
    images = open_images(home / "classes", model, seed=3)
    expected = se.certify(model, data=images, confidence=0.9, seed=3)
    arguments = ("certify", home / "soft", "--data", home / "classes", "--confidence", 0.9, "--seed", 3, "-o", page)
    entries = found(*arguments)
    assert se.StatisticalCertificate.load(page) == expected and expected.within == se.degrees(30)
    assert [figure["bound"] for figure in entries["figures"]] == [figure.bound for figure in expected.figures]
    shown = call(*arguments).stdout
    assert "with confidence 0.9" in shown and "flip rate" in shown and "not certified: any single picture" in shown
    again = ("--verify", page, "--data", home / "classes")
    assert found("certify", home / "soft", *again) == {"ok": True, "changes": []}
    result = call("certify", home / "vit", *again)
    assert result.exit_code == 1 and "weights_sha256 was" in result.stdout
    plain = found("certify", home / "vit", "-g", "C4", "--data", home / "loose")
    assert plain["confidence"] == 0.99 and plain["samples"] == 3


def test_soften_shares_out_a_target_of_the_network(home: Path, tmp_path: Path) -> None:
    arguments = (home / "vit", "-g", "C4", "-e", 1e-3, "-w", "90deg", "--scope", "network", "-d", home / "loose")
    planned = found("plan", *arguments)
    assert planned["note"].startswith("network: mean KL")
    softened = found("soften", *arguments, "-o", tmp_path / "soft")
    assert softened["weights"] == planned["weights"]
    model = open_model(tmp_path / "soft")
    images = open_images(home / "loose", model)
    errors = se.plan(open_model(home / "vit"), "C4", error=1e-3, within="90deg", scope="network", data=images).weights
    assert [weight.soft.gain for weight in se.soft_weights(model)] == [weight.soft.gain for weight in errors]


def test_measure_gives_the_figures_of_the_library_on_the_same_pictures(home: Path) -> None:
    entries = found("measure", home / "soft", "--data", home / "classes", "--elements", 2, "--batch-size", 4)
    model = open_model(home / "soft")
    process: Any = transformers.AutoImageProcessor.from_pretrained(home / "vit")
    paths = sorted((home / "classes").rglob("*.png"))
    pictures = process(images=[Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    labels = torch.arange(CLASSES).repeat_interleave(2)
    expected = se.measure(model, (pictures, labels), "SO(2)", se.degrees(30), elements=2, batch_size=4)
    assert entries["samples"] == 2 * CLASSES and "accuracy moved" in entries["rows"]
    for row in expected.rows:
        assert entries["rows"][row.name]["value"] == pytest.approx(row.value, rel=1e-4), row.name
    shown = call("measure", home / "soft", "--data", home / "classes", "--elements", 2, "--batch-size", 4).stdout
    assert f"{expected['iErr'].value:.3g}"[:4] in shown and "SO(2), within 30deg: 10 samples" in shown


def test_measure_takes_maps_of_scores_and_says_what_it_guessed(home: Path) -> None:
    entries = found(
        *("measure", home / "segformer", "--group", "C4", "--data", home / "classes"),
        *("--size", 33, "--limit", 3, "--batch-size", 2, "--jacobians", 0),
    )
    assert entries["samples"] == 3 and "eErr" in entries["rows"] and "relative error" not in entries["rows"]
    assert any("are guessed" in note for note in entries["notes"])


def test_report_and_demo_write_their_page(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    entries = found("report", home / "soft", "--data", home / "loose", "-o", page)
    assert entries == {"out": str(page), "pictures": 3, "notes": []}
    assert "<html" in page.read_text(encoding="utf-8")
    calls = []

    def run(folder: Path, seed: int = 0, quick: bool = False) -> Path:
        calls.append((folder, seed, quick))
        print("training")
        return folder / "report.html"

    monkeypatch.setitem(
        sys.modules, "softequiv.experiments", types.SimpleNamespace(demo=types.SimpleNamespace(run=run))
    )
    assert found("demo", tmp_path, "--seed", 3, "--quick") == {"out": str(tmp_path / "report.html")}
    assert calls == [(tmp_path, 3, True)]
    assert call("demo").stdout == "training\n"


def test_doctor_is_green_and_lists_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOFTEQUIV_DATA", str(tmp_path / "nothing"))
    entries = found("doctor")
    assert entries["ok"] and entries["self_test"]["certified"] == pytest.approx(0.1, rel=1e-4)
    assert entries["versions"]["torch"] == torch.__version__ and entries["devices"][0].startswith("cpu")
    assert entries["data"] == {"folder": str(tmp_path / "nothing"), "found": False}
    shown = call("doctor")
    assert shown.exit_code == 0 and "self-test passed" in shown.stdout and "SOFTEQUIV_DATA" in shown.stdout
    lines = ["typer>=0.12; extra == 'cli'", 'no-such-thing>=1 ; extra == "images"', "pytest; extra == 'dev'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: lines)
    extras = found("doctor")["extras"]
    assert set(extras) == {"cli", "images"} and extras["cli"]["present"] and not extras["images"]["present"]
    missing = call("doctor")
    assert missing.exit_code == 0 and "pip install 'softequiv[images]'" in missing.stdout


def test_doctor_looks_for_data_where_experiments_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "clone").mkdir()
    monkeypatch.delenv("SOFTEQUIV_DATA", raising=False)
    monkeypatch.chdir(tmp_path / "clone")
    assert found("doctor")["data"] == {"folder": str((tmp_path / "shared" / "data").resolve()), "found": True}


@pytest.mark.parametrize("certified", [0.2, math.nan])
def test_a_doctor_whose_guarantee_fails_is_not_content(certified: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "certify", lambda _: types.SimpleNamespace(error=certified))
    result = call("doctor", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False
    assert "self-test failed" in call("doctor").stdout


def broken_home(home: Path, tmp_path: Path) -> Path:
    """Beside what works, everything that does not."""
    for name in ("vit", "soft", "loose"):
        (tmp_path / name).symlink_to(home / name)
    for name in ("pickle", "cut"):
        shutil.copytree(home / "vit", tmp_path / name)
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "pytorch_model.bin")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "empty").mkdir()
    draw(tmp_path / "spoilt" / "0.png")
    (tmp_path / "spoilt" / "1.png").write_text("no picture")
    draw(tmp_path / "mixed" / "0.png")
    draw(tmp_path / "mixed" / "class" / "0.png")
    (tmp_path / "page.json").write_text("{")
    return tmp_path


HALF = ("-g", "C4", "-s", "0.5")
ERRORS = [
    (("plan", "vit", "-g", "SO(x)", "-s", "0.5"), 3, "unknown group 'SO('"),
    (("plan", "vit", "-g", "SO(2)", "-e", "0.1", "-w", "30grad"), 3, "cannot read the range '30grad'"),
    (("certify", "vit", "-g", "SO(2)", "-w", "-30deg"), 3, "-30"),
    (("plan", "./nix", *HALF), 3, "there is no folder './nix'"),
    (("plan", "pickle", *HALF), 3, "pickle only (pytorch_model.bin), which can run any code"),
    (("plan", "cut", *HALF), 3, "may be cut short"),
    (("plan", "vit", "-g", "C4", "-s", "1.5"), 3, "softness runs from 0 (equivariant) to 1 (unconstrained); got 1.5"),
    (("plan", "vit", "-g", "C4", "-s", "nan"), 3, "got nan"),
    (("plan", "vit", "-g", "C4", "-e", "-1", "-w", "30deg"), 3, "-1"),
    (("plan", "vit", *HALF, "--only", "vit.embedings.*"), 3, "close to it: vit.embeddings.position_embeddings"),
    (("plan", "vit", *HALF, "--action", "nix"), 3, "unknown action 'nix'"),
    (("soften", "vit", *HALF, "--mode", "nix", "-o", "out"), 3, "unknown mode 'nix'"),
    (("soften", "vit", *HALF, "-o", "soft"), 3, "is not an empty folder"),
    (("soften", "soft", *HALF, "-o", "out"), 3, "soft already"),
    (("bake", "vit", "-o", "out"), 3, "nothing to bake"),
    (("certify", "vit"), 3, "--group 'SO(2)'"),
    (("certify", "soft", "--verify", "nix.json"), 3, "no certificate nix.json; softequiv certify MODEL -o nix.json"),
    (("certify", "soft", "--verify", "page.json"), 3, "page.json is not JSON"),
    (("certify", "soft", "-o", "page.json/page.json"), 3, "page.json cannot be made a folder (File exists)"),
    (("measure", "soft", "-d", "nix"), 3, "there is no folder 'nix'"),
    (("measure", "soft", "-d", "empty"), 3, "empty holds no pictures; known endings are .jpg"),
    (("measure", "soft", "-d", "spoilt"), 3, "1.png cannot be read as a picture"),
    (("measure", "soft", "-d", "mixed"), 3, "beside folders of pictures"),
    (("measure", "vit", "-d", "loose"), 3, "--group 'SO(2)'"),
    (("measure", "vit", "-g", "SO(3)", "-d", "loose"), 3, "SO(3)"),
    (("measure", "soft", "-d", "loose", "--size", "23"), 3, "cannot take inputs of shape"),
    (
        ("plan", "vit", *HALF, "-e", "0.1", "-w", "30deg"),
        2,
        "in one way: --softness, or --error together with --within",
    ),
    (("plan", "vit", "-g", "C4"), 2, "in one way"),
    (("plan", "vit", "-g", "C4", "-e", "0.1"), 2, "--error needs --within, such as 30deg"),
    (("plan", "vit", *HALF, "-e", "0.1"), 2, "in one way"),
    (("plan", "vit", "-s", "0.5"), 2, "Missing option"),
    (("plan", "vit", "-g", "C4", "-s", "half"), 2, "'--softness'"),
    (("certify", "soft", "--verify", "page.json", "-o", "x"), 2, "--verify takes everything from the certificate"),
    (("certify", "soft", "--verify", "page.json", "--seed", "0"), 2, "--verify takes everything from the certificate"),
    (("certify", "soft", "--verify", "page.json", "--action", "bilinear"), 2, "--verify takes everything"),
    (("certify", "soft", "--confidence", "0.9"), 2, "--confidence belongs to --data"),
    (("certify", "soft", "--images", "loose", "--data", "loose"), 2, "give one"),
    (("certify", "soft", "--action", "pixels", "--data", "loose"), 2, "give one"),
    (("plan", "vit", "-g", "C4", "-e", "1", "-w", "30deg", "--scope", "both", "-d", "loose"), 3, "unknown scope"),
    (("certify", "soft", "--data", "loose", "--confidence", "2"), 3, "between 0 and 1"),
    (("plan", "vit", "-g", "C4", "-e", "0.1", "-w", "30deg", "--scope", "network"), 2, "belong together"),
    (("plan", "vit", "-g", "C4", "-e", "0.1", "-w", "30deg", "--scope", "x"), 3, "unknown scope 'x'"),
    (("dance",), 2, "dance"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), ERRORS, ids=[" ".join(error[0]) for error in ERRORS])
def test_what_goes_wrong_is_told_in_a_sentence(
    arguments: tuple[str, ...], code: int, says: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(broken_home(home, tmp_path))
    before = sorted(os.listdir())
    result = call(*arguments, *(["--json"] if code == 3 else []))
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert says in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
    assert sorted(os.listdir()) == before
    if code == 3:
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("softequiv: ")]
        assert result.stderr.splitlines()[-1] == line


def test_debug_shows_the_traceback_with_the_same_exit_code() -> None:
    result = call("plan", "./nix", *HALF, "--debug")
    assert result.exit_code == 3 and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("softequiv: there is no folder")


def test_an_unforeseen_error_and_an_interruption_have_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: BaseException) -> Any:
        def work(*_: Any, **__: Any) -> None:
            raise problem

        return work

    monkeypatch.setattr(given, "open_model", fail(KeyboardInterrupt()))
    assert call("plan", "vit", *HALF).exit_code == 130
    monkeypatch.setattr(given, "open_model", fail(ZeroDivisionError("first\nsecond")))
    result = call("plan", "vit", *HALF)
    assert result.exit_code == 3
    assert result.stderr == (
        "softequiv: unexpected ZeroDivisionError: first second; run it again with --debug and report what you see\n"
    )


def test_warnings_are_remarks_on_stderr(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "vit", tmp_path / "headless")
    path = tmp_path / "headless" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["ViTModel"]}))
    result = call("plan", tmp_path / "headless", *HALF, "--json")
    assert json.loads(result.stdout)["weights"]
    assert "note: 2 weights (classifier.bias, classifier.weight) of" in result.stderr


def test_half_precision_is_computed_with_in_float32_and_a_certificate_of_weights_keeps_their_bytes(
    home: Path, tmp_path: Path
) -> None:
    half, wide = tmp_path / "half", tmp_path / "wide"
    rounded = open_model(home / "vit").half()
    save_model(rounded, half)
    save_model(rounded.float(), wide)
    for folder in (half, wide):
        shutil.copy(home / "vit" / "preprocessor_config.json", folder)
    for command, more in (("measure", ["--jacobians", 0]), ("certify", ["-w", "30deg"])):
        given = ["-g", "SO(2)", "-d", home / "loose", *more]
        first, second = (call(command, folder, *given, "--json") for folder in (half, wide))
        assert first.exit_code == 0 and first.stdout == second.stdout
        assert "note: the weights are float16; float32 is used instead" in first.stderr
        assert "float32" not in second.stderr
    certificate = tmp_path / "data.json"
    assert call("certify", half, *given, "-o", certificate).exit_code == 0
    assert call("certify", half, "--verify", certificate, "-d", home / "loose").exit_code == 0
    page = call("report", half, "-g", "C4", "-d", home / "loose", "-o", tmp_path / "page.html")
    assert page.exit_code == 0 and "float32 is used instead" in page.stderr
    of_weights = tmp_path / "weights.json"
    certified = call("certify", half, "-g", "C4", "-o", of_weights)
    assert certified.exit_code == 0 and "float32" not in certified.stderr
    assert call("certify", half, "--verify", of_weights).exit_code == 0
    assert call("certify", wide, "--verify", of_weights).exit_code == 1


def test_the_version_is_told() -> None:
    assert call("--version").stdout == f"softequiv {se.__version__}\n"


def test_json_has_no_numbers_that_json_does_not_have() -> None:
    assert cli_app.strict({"a": (1, math.inf, {"b": math.nan}), "c": "x"}) == {"a": [1, None, {"b": None}], "c": "x"}


@pytest.mark.parametrize(
    ("folders", "names", "expected"),
    [
        (["cat", "ant", "bee"], ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),  # the folders' order, for want of names
        (["n02", "n01440764", "n01443537"], ["fish", "shark", "x"], None),
        (["n01443537", "n01440764"], ["fish", "shark"], [0, 1]),  # ImageNet's, whose order all models have
        (["cat", "Ant", "bee"], ["Cat", "bee", "ant"], [2, 1, 0]),  # in whatever case
        (["cat", "ant", "bee"], ["x", "y", "z"], None),  # as many classes, but others
        (["cat", "ant", "bee"], ["cat", "bee", "ant"], [2, 1, 0]),  # by the model's own numbers
        (["cat", "bee"], ["cat", "bee", "ant"], [1, 0]),  # also where not all classes have pictures
        (["cat", "bee"], ["x", "y", "z"], None),  # nobody knows which is which
    ],
)
def test_class_folders_get_the_numbers_of_the_model(
    folders: list[str], names: list[str], expected: list[int] | None, tmp_path: Path
) -> None:
    for folder in folders:
        draw(tmp_path / folder / "deeper" / "0.PNG")
    names_of = dict(enumerate(names))
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], id2label=names_of, label2id={v: k for k, v in names_of.items()}
    )
    images = open_images(tmp_path, transformers.ResNetForImageClassification(config), size=8)
    assert [path.parts[-3] for path in images.paths] == sorted(folders)
    assert images.labels == (None if expected is None else tuple(expected))
    assert any("labels not used" in note for note in images.notes) == (expected is None)


@pytest.mark.parametrize("parts", [("train", "val", "test"), ("train", "valid"), ("val", "test")])
def test_the_parts_of_a_training_are_not_taken_for_classes(parts: tuple[str, ...], tmp_path: Path) -> None:
    """A model without names for as many classes as parts would be told how often it sees which part a picture is of."""
    for part in parts:
        draw(tmp_path / part / "cat" / "0.png")
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=len(parts))
    )
    with pytest.raises(SoftEquivError, match=f"{', '.join(parts)}, which are parts.*such as .*{parts[-1]}$"):
        open_images(tmp_path, model, size=8)
    assert len(open_images(tmp_path / parts[-1], model, size=8).paths) == 1
    draw(tmp_path / "wheels" / "train" / "0.png")  # a class, as long as no other part stands beside it
    draw(tmp_path / "wheels" / "car" / "0.png")
    assert len(open_images(tmp_path / "wheels", model, size=8).paths) == 2


def test_pictures_are_cut_scaled_and_normalised(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 14, 3), dtype=np.uint8)
    square = Squares(10, 10, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))(Image.fromarray(pixels))
    expected = (pixels[:, 2:12] / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    assert np.allclose(square.numpy(), expected.transpose(2, 0, 1), atol=1e-6)
    grey = Squares(5, 10)(Image.fromarray(pixels[:, :10, 0]))
    assert np.allclose(grey.numpy(), pixels[None, 2:7, 2:7, 0] / 255)


def test_a_limit_draws_the_same_pictures_for_the_same_seed(home: Path) -> None:
    model = open_model(home / "vit")
    drawn = [open_images(home / "classes", model, limit=4, seed=seed).paths for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 4


def shell(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    surroundings = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=surroundings, check=False)


def test_the_overview_and_the_doctor_need_the_core_and_typer_alone() -> None:
    others = ("transformers", "huggingface_hub", "timm", "PIL", "matplotlib", "torchmetrics", "sklearn", "scipy")
    result = shell(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({others!r}))  # importing any of them fails\n"
        "from softequiv.cli import main\n"
        "for word in ('--help', 'doctor'):\n"
        "    sys.argv = ['softequiv', word]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(word, end.code)"
    )
    lines = result.stdout.splitlines()
    assert "--help 0" in lines and lines[-1] == "doctor 0" and lines[-2].startswith("self-test passed"), result


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_the_extra_is_named(missing: str) -> None:
    result = shell(f"import sys; sys.modules[{missing!r}] = None\nfrom softequiv.cli import main; main()")
    assert result.returncode == 3 and result.stdout == ""
    assert result.stderr == "the command line needs typer and rich: pip install 'softequiv[cli]'\n"


def test_the_module_runs_as_the_command_and_is_quiet(home: Path) -> None:
    command = [sys.executable, "-m", "softequiv", "certify", str(home / "soft"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stderr == ""
    assert json.loads(result.stdout)["group"] == "SO(2)"


def test_shells_can_complete() -> None:
    code = "import sys; sys.argv = ['softequiv']\nfrom softequiv.cli import main; main()"
    words = {"COMP_WORDS": "softequiv ce", "COMP_CWORD": "1"}
    assert shell(code, _SOFTEQUIV_COMPLETE="complete_bash", **words).stdout.split() == ["certify"]
