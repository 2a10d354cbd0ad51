"""What do the readers answer to anything at all? A value or a sentence, never another error, whatever hypothesis makes
of settings, recipes, checkpoints, certificates, names and data files, drawn at random or damaged from good ones.

A few examples run with the other tests; `make fuzz` goes on with new ones for as long as it is told.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import softequiv as se
from softequiv.adapt.checkpoint import read_recipe, read_tensors, recipe
from softequiv.tasks.labels import check_inside, numbered_lines
from softequiv.tasks.mnist import idx
from softequiv.tasks.preprocessor import read_preprocessor
from softequiv.tasks.trajectories import read_rows, windows_of
from softequiv.training import Recipe
from softequiv.training.saved import read as read_training
from softequiv.training.saved import write as write_training

fewer = settings(max_examples=settings().max_examples * 2 // 5)  # where an example takes longer
WEIGHTS, NOTES = "model.safetensors", "softequiv.json"

numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**63, 10**400, 5e-324, 1e308])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=20)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def answered(read: Callable[[], Any]) -> Any:
    """What a reader gives, or None for a sentence; every other error is a defect."""
    try:
        return read()
    except se.SoftEquivError as problem:
        assert str(problem).strip()
        return None


@st.composite
def damaged(draw: st.DrawFn, good: Any) -> Any:
    """A good value of JSON with one to three places replaced, left out or added to."""
    told = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        place = told
        while isinstance(place, (dict, list)) and place:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key: Any = draw(st.sampled_from(keys))
            if draw(st.booleans()) and isinstance(place[key], (dict, list)) and place[key]:
                place = place[key]
                continue
            what = draw(st.sampled_from(["replace", "remove", "add"]))
            if what == "replace":
                place[key] = draw(anything)
            elif what == "remove":
                del place[key]
            elif isinstance(place, dict):
                place[draw(st.text(max_size=8))] = draw(anything)
            else:
                place.insert(key, draw(anything))
            break
    return told


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes with some changed, left out or put in, or cut short."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        what = draw(st.sampled_from(["change", "cut", "insert", "remove"]))
        if what == "change" and content:
            content[at] = draw(st.integers(0, 255))
        elif what == "cut":
            del content[at:]
        elif what == "remove":
            del content[at : at + draw(st.integers(1, 16))]
        else:
            content[at:at] = draw(st.binary(max_size=16))
    return bytes(content)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 5))


def softened() -> nn.Module:
    return se.soften(plain(), "SO(2)", error=0.2, within=se.degrees(30))


@cache
def saved() -> Path:
    """A good checkpoint, written once."""
    folder = Path(tempfile.mkdtemp(prefix="softequiv-fuzz-"))
    se.save(softened(), folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def tidied() -> Any:
    yield
    if saved.cache_info().currsize:
        shutil.rmtree(saved())
        saved.cache_clear()


def loads(notes: bytes, weights: bytes) -> None:
    """A checkpoint of these bytes is loaded into finite weights, or refused and the model left as it was."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / NOTES).write_bytes(notes)
        (Path(folder) / WEIGHTS).write_bytes(weights)
        model = plain()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if answered(lambda: se.load(model, folder)) is None:
            assert next(se.soft_weights(model), None) is None
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        else:
            assert all(bool(weight.value().isfinite().all()) for weight in se.soft_weights(model))
            assert all(bool(value.isfinite().all()) for value in se.stored_tensors(model).values())


# settings of a training


@given(anything)
def test_settings_of_any_json_are_read_or_refused(told: Any) -> None:
    found = answered(lambda: Recipe.parse(json.dumps(told)))
    assert found is None or Recipe.parse(found.to_json()) == found


@given(damaged(json.loads(Recipe(epochs=3).to_json())))
def test_damaged_settings_are_read_or_refused(told: Any) -> None:
    found = answered(lambda: Recipe.parse(json.dumps(told)))
    if found is not None:
        assert all(math.isfinite(found.factor(moment)) for moment in (0.0, 0.5, found.epochs))


@given(st.text() | st.binary())
def test_settings_of_any_text_are_read_or_refused(text: Any) -> None:
    answered(lambda: Recipe.parse(text))


# checkpoints


@given(damaged(recipe(softened())))
@fewer
def test_a_damaged_recipe_softens_a_model_whole_or_not_at_all(told: Any) -> None:
    loads(json.dumps(told).encode(), (saved() / WEIGHTS).read_bytes())


@given(st.data())
@fewer
def test_spoilt_bytes_of_a_recipe_soften_a_model_whole_or_not_at_all(data: st.DataObject) -> None:
    loads(data.draw(spoilt((saved() / NOTES).read_bytes())), (saved() / WEIGHTS).read_bytes())


@pytest.mark.parametrize("checked", [True, False], ids=["with checksum", "without"])
@given(data=st.data())
@fewer
def test_spoilt_weights_are_loaded_whole_or_not_at_all(checked: bool, data: st.DataObject) -> None:
    """With a checksum no change passes; without, what passes is finite."""
    good = (saved() / WEIGHTS).read_bytes()
    weights = data.draw(spoilt(good))
    notes = json.loads((saved() / NOTES).read_text())
    if not checked:
        del notes["sha256"]
    loads(json.dumps(notes).encode(), weights)
    if checked and weights != good:
        with tempfile.TemporaryDirectory() as folder, pytest.raises(se.SoftEquivError):
            shutil.copy(saved() / NOTES, folder)
            (Path(folder) / WEIGHTS).write_bytes(weights)
            se.load(plain(), folder)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_checkpoint_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, read in ((NOTES, read_recipe), (WEIGHTS, read_tensors), ("training", read_training)):
            (Path(folder) / name).write_bytes(content)
            answered(lambda name=name, read=read: read(Path(folder) / name))  # type: ignore[misc]


@cache
def training() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        tensors: dict[str, dict[str, Tensor]] = {
            "model": {"weight": torch.ones(3)},
            "moments": {"a/weight": torch.ones(3)},
        }
        write_training(Path(folder) / "t.safetensors", tensors, {"step": 3, "history": [{"loss": 0.5}]})
        return (Path(folder) / "t.safetensors").read_bytes()


@given(st.data())
def test_a_spoilt_training_is_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.safetensors").write_bytes(data.draw(spoilt(training())))
        answered(lambda: read_training(Path(folder) / "t.safetensors"))


@cache
def certificate() -> Any:
    return json.loads(se.certify(softened(), se.degrees(30)).to_json())


@given(st.data())
def test_a_damaged_certificate_is_read_or_refused(data: st.DataObject) -> None:
    told = data.draw(damaged(certificate()))
    found = answered(lambda: se.Certificate.from_json(json.dumps(told)))
    if found is not None:
        assert isinstance(str(found), str)
        answered(lambda: found.verify(plain()))


# names


@given(st.text(alphabet="SOCDUhiftsRefclonag()+,x× 0123456789") | st.text(max_size=30))
def test_a_name_is_a_group_or_refused(text: str) -> None:
    found = answered(lambda: se.parse_group(text))
    assert found is None or se.parse_group(found.name) == found


@given(st.text(alphabet="0123456789.eE+-degra° ") | st.text(max_size=20))
def test_a_text_is_a_range_or_refused(text: str) -> None:
    found = answered(lambda: se.parse_range(text))
    assert found is None or not math.isnan(found)


@given(st.text(max_size=60))
def test_a_name_in_a_list_stays_inside_or_is_refused(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_inside(name, "list, line 1")
        except se.SoftEquivError:
            return
        home = Path(folder).resolve()
        assert (home / name).resolve().is_relative_to(home)


# data files


@given(st.binary(max_size=64) | spoilt(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])))
def test_bytes_are_digits_or_refused(content: bytes) -> None:
    found = answered(lambda: idx(content, "digits"))
    assert found is None or 1 <= found.ndim <= 4


@given(st.binary(max_size=80))
def test_bytes_are_a_list_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "list.txt").write_bytes(content)
        found = answered(lambda: numbered_lines(Path(folder) / "list.txt", "write it again"))
        assert found is None or all(line.strip() for _, line in found)


WALK = "\n".join(f"{10 * step} {1 + step % 2} {0.5 * step} 2.0" for step in range(12)).encode()


@given(spoilt(WALK) | st.binary(max_size=80))
def test_bytes_are_a_walk_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.txt").write_bytes(content)
        rows = answered(lambda: read_rows(Path(folder) / "a.txt"))
        if rows is not None:
            windows = torch.from_numpy(windows_of(rows, 3))
            assert windows.shape[1:] == (3, 2) and bool(windows.float().isfinite().all())


PREPROCESSOR = {
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
    "resample": 2,
    "size": {"height": 20, "width": 20},
}


@given(damaged(PREPROCESSOR) | anything)
def test_a_damaged_preprocessor_is_read_or_refused(told: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(told))
        found = answered(lambda: read_preprocessor(Path(folder) / "preprocessor_config.json"))
        if found and "image_mean" in found and "image_std" in found:
            mean, std = (torch.tensor(found[name]) for name in ("image_mean", "image_std"))
            assert bool(((1 - mean) / std).isfinite().all())
