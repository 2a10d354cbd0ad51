"""Which model does a name stand for? A folder, a hub id or `timm:name` is opened, soft where it holds a recipe, and a
model is written so that its folder opens again.

Weights are read as safetensors alone: a pickle runs code when it is opened.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from softequiv._files import clear_unfinished, path_of, read_json, saying_what_failed, unfinished
from softequiv.adapt.checkpoint import RECIPE, WEIGHTS, as_written, load, load_tensors, read_tensors, save
from softequiv.errors import SoftEquivError
from softequiv.nn import soft_weights

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TIMM = "timm:"
TASKS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSemanticSegmentation": "AutoModelForSemanticSegmentation",
}
PICTURE_KEYS = ("input_size", "interpolation", "crop_pct", "mean", "std", "num_classes")  # of timm's configuration
NAMED = 3  # how many weights a warning names
PLAINLY = {r"parametrizations\.(\w+)\.original": r"\1"}  # for transformers: a soft model's names to the plain one's
HALF = (torch.float16, torch.bfloat16)


def open_model(name: str | Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model that a name stands for, in eval mode: a folder of transformers, of timm or of `save_model`, a hub id,
    or `timm:name`.

    A folder with a recipe gives a soft model. `trust_remote_code` lets a model run Python files of its own.

    >>> open_model("./no-such-folder")
    Traceback (most recent call last):
        ...
    softequiv.errors.SoftEquivError: there is no folder './no-such-folder'; give a folder with config.json and ...
    """
    text = str(path_of(name)) if not isinstance(name, str) else name
    path_of(text)
    if text.startswith(TIMM):
        return open_timm(text.removeprefix(TIMM))
    folder = local_folder(text, trust_remote_code)
    config = read_config(folder)
    refuse_pickles(folder)
    refuse_escapes(folder)
    with readable(folder):
        if "architecture" in config:
            return timm_folder(folder, config).eval()
        return transformers_folder(folder, config, trust_remote_code).eval()


def in_float32(model: nn.Module) -> nn.Module:
    """The same model with its float16 and bfloat16 weights and buffers made float32 in place, and a warning if any are.

    Small steps of training are lost in half precision, and CPUs are slow at it.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True):
    ...     in_float32(nn.Linear(2, 2).half()).weight.dtype
    torch.float32
    """
    found = {value.dtype for value in (*model.parameters(), *model.buffers())} & set(HALF)
    if found:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        warnings.warn(f"the weights are {names}; float32 is used instead", stacklevel=2)
        model._apply(lambda value: value.float() if value.dtype in HALF else value)
    return model


def save_model(model: nn.Module, folder: str | Path, *, pictures: Mapping[str, Any] | None = None) -> None:
    """Write a soft or plain model of transformers or timm into a new folder, which `open_model` opens again.

    Transformers' `from_pretrained` opens the folder of a plain one as well. The folder appears whole or not at all. It
    also holds how pictures are prepared for the model: what `pictures` says, in the terms of transformers'
    preprocessor_config.json or of timm's pretrained_cfg, else what stood in the folder that the model came from.
    """
    target = Path(folder)
    refuse_occupied(target)
    clear_unfinished(target)
    part = unfinished(target)
    shutil.rmtree(part, ignore_errors=True)
    try:
        with saying_what_failed(target):
            part.mkdir(parents=True)
            write_model(model, part, pictures)
            if target.is_dir():
                target.rmdir()
            os.replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_model(model: Any, folder: Path, pictures: Mapping[str, Any] | None) -> None:
    """Weights, configuration, what is known of pictures and, for a soft model, the recipe."""
    soft = next(soft_weights(model), None) is not None
    if soft:
        save(model, folder)
    if hasattr(model, "save_pretrained") and hasattr(model, "config"):
        if soft:
            written_config(model).save_pretrained(folder)
        else:
            model.save_pretrained(folder)
        source = Path(str(model.config.name_or_path)) / PREPROCESSOR
        if pictures is not None:
            (folder / PREPROCESSOR).write_text(json.dumps(pictures, indent=1))
        elif source.is_file():
            shutil.copyfile(source, folder / PREPROCESSOR)
    elif "architecture" in getattr(model, "pretrained_cfg", {}):
        (folder / CONFIG).write_text(json.dumps(timm_config(model, pictures or {}), indent=1))
        if not soft:
            save_file(as_written(model), folder / WEIGHTS, metadata={"format": "pt"})
    else:
        raise SoftEquivError(
            f"{type_before_parametrizations(model).__name__} is no model of transformers or timm, so no file could say "
            "how to build it again; write its weights with softequiv.save and build it in your own code"
        )


def written_config(model: Any) -> Any:
    """A copy of the configuration that names the class and the precision of the model, as save_pretrained writes it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type_before_parametrizations(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config


def refuse_occupied(target: Path) -> None:
    """A folder with files in it would mix two models."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SoftEquivError(f"{target} exists and is not an empty folder; choose another name, or remove it first")


def local_folder(name: str, trust_remote_code: bool = False) -> Path:
    """The folder of that name, or the one into which the hub's files of that name are downloaded once."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise SoftEquivError(
            f"there is no folder {name!r}; give a folder with {CONFIG} and {WEIGHTS}, a hub id or timm:name"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SoftEquivError(
            f"there is no folder {name!r}, and models of the hub need transformers: pip install "
            "'softequiv[transformers]'"
        ) from None
    patterns = ["*.json", "model*.safetensors", *(["*.py"] if trust_remote_code else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as problem:
        raise SoftEquivError(
            f"{name!r} is neither a folder here nor a model in the local cache, and the hub did not give it "
            f"({first_line(problem)}); check the spelling, download it once while online, or give a folder"
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """What the folder says about its model."""
    path = folder / CONFIG
    if not path.is_file():
        recipe = (folder / RECIPE).is_file()
        remedy = "softequiv.load it into a model built in code" if recipe else "save_pretrained writes one"
        raise SoftEquivError(f"{folder} holds no {CONFIG}, so nothing says which model it is; {remedy}")
    try:
        config = read_json(path.read_bytes())
    except ValueError as problem:
        raise SoftEquivError(f"{path} is not JSON: {problem}; copy it again") from None
    if not isinstance(config, dict):
        raise SoftEquivError(f"{path} holds no configuration but {type(config).__name__}; copy it again")
    return config


def refuse_pickles(folder: Path) -> None:
    """Weights must be there, as safetensors."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise SoftEquivError(
            f"{folder} holds its weights as a pickle only ({', '.join(pickles)}), which can run any code when opened; "
            "where you trust it, open it with transformers and write it again with save_pretrained"
        )
    raise SoftEquivError(f"{folder} holds no weights; it needs {WEIGHTS}, as save_pretrained writes it")


def refuse_escapes(folder: Path) -> None:
    """The index of weights in several files names files of its own folder."""
    for index in folder.glob("*.index.json"):
        try:
            told = read_json(index.read_bytes())
            files = set(told["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise SoftEquivError(f"{index} is no index of weights ({problem}); copy it again") from None
        for name in files:
            if not isinstance(name, str) or name != Path(name).name:
                raise SoftEquivError(f"{index} names {name!r}, which leads out of its folder; do not trust this model")


@contextlib.contextmanager
def readable(folder: Path) -> Iterator[None]:
    """What goes wrong on opening, in one sentence."""
    try:
        yield
    except SoftEquivError:
        raise
    except SafetensorError as problem:
        raise SoftEquivError(
            f"the weights in {folder} cannot be read, they may be cut short: {problem}; copy them again"
        ) from problem
    except Exception as problem:  # transformers and timm raise what their configurations make of theirs
        raise SoftEquivError(
            f"{folder} cannot be opened: {first_line(problem)} ({type(problem).__name__}); check {CONFIG} and the "
            "versions of the libraries"
        ) from problem


def first_line(problem: BaseException) -> str:
    """The first line of a message, without its full stop."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(". ")


def transformers_folder(folder: Path, entries: dict[str, Any], trust_remote_code: bool) -> nn.Module:
    """A model of transformers, soft where the folder has a recipe."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise SoftEquivError(
            f"{folder} holds a model of transformers, which is not installed: pip install 'softequiv[transformers]'"
        ) from None
    if "auto_map" in entries and entries.get("model_type") not in transformers.CONFIG_MAPPING and not trust_remote_code:
        raise SoftEquivError(
            f"{folder} needs Python code of its own to open; read its .py files, and where you trust them open it with "
            "trust_remote_code (--trust-remote-code)"
        )
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = getattr(transformers, auto_class(config.architectures or []))
    if (folder / RECIPE).is_file():
        plain = kind.from_config(config, dtype=config.dtype, trust_remote_code=trust_remote_code)
        return load(plain, folder)
    model, found = kind.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    refuse_filtered(found["unexpected_keys"], folder)
    opened = type(model).__name__
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    tell(set(broken), f"of {folder} hold NaN or infinity")
    tell(found["missing_keys"], f"are not in {folder}: {opened} starts with random values there")
    tell(found["unexpected_keys"], f"of {folder} have no place in {opened} and are left out")
    return model


def refuse_filtered(unexpected: Iterable[str], folder: Path) -> None:
    """Weights that transformers wrote of a soft model have names that a plain one does not know."""
    name = next((name for name in sorted(unexpected) if "parametrizations." in name), None)
    if name is not None:
        raise SoftEquivError(
            f"{folder} holds weights of a soft model ({name}) and no {RECIPE}, as save_pretrained and transformers' "
            "Trainer leave it, so that nothing says how they are filtered; open it with the class's own "
            f"from_pretrained(folder, key_mapping={PLAINLY}), soften it as it was softened, and write it with "
            "softequiv.save_model"
        )


def auto_class(architectures: list[str]) -> str:
    """The class of transformers that opens such a model with its head.

    >>> auto_class(["ViTForImageClassification"]), auto_class([])
    ('AutoModelForImageClassification', 'AutoModel')
    """
    found = (auto for name in architectures for task, auto in TASKS.items() if task in name)
    return next(found, "AutoModel")


def tell(names: set[str], what: str) -> None:
    """Warn of weights that did not find their place."""
    if names:
        some = ", ".join(sorted(names)[:NAMED]) + (", ..." if len(names) > NAMED else "")
        warnings.warn(f"{len(names)} weights ({some}) {what}", stacklevel=2)


def import_timm() -> Any:
    """timm, which is an extra."""
    try:
        return importlib.import_module("timm")
    except ImportError:
        raise SoftEquivError("models of timm need timm: pip install 'softequiv[timm]'") from None


def open_timm(name: str) -> nn.Module:
    """A pretrained model of timm, from the hub's safetensors."""
    timm = import_timm()
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay={"hf_hub_filename": WEIGHTS, "custom_load": False}
        )
    except (OSError, ValueError, RuntimeError) as problem:
        raise SoftEquivError(
            f"timm has no pretrained {name!r} as safetensors, or cannot reach it ({first_line(problem)}); check the "
            "spelling with timm.list_pretrained(), or download it once while online"
        ) from problem
    return model.eval()


def timm_folder(folder: Path, config: dict[str, Any]) -> nn.Module:
    """A model of timm, soft where the folder has a recipe."""
    timm = import_timm()
    model: nn.Module = timm.create_model(
        config["architecture"],
        num_classes=config.get("num_classes", 1000),
        pretrained_cfg_overlay=config.get("pretrained_cfg", {}),
        **config.get("model_args", {}),
    )
    if (folder / RECIPE).is_file():
        return load(model, folder)
    load_tensors(model, read_tensors(folder / WEIGHTS))
    return model


def timm_config(model: Any, pictures: Mapping[str, Any]) -> dict[str, Any]:
    """What timm needs to build a model again, in the form of its own config.json."""
    own = {**model.pretrained_cfg, **pictures}
    return {
        "architecture": own["architecture"],
        "num_classes": model.num_classes,
        "pretrained_cfg": {key: own[key] for key in PICTURE_KEYS if own.get(key) is not None},
    }
