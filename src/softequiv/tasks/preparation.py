"""How is a picture made ready for a model? As the files beside the model say, for every command alike; what a training
used is told in the words of these files, so that it can lie beside the trained model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.adapt.opening import PREPROCESSOR, first_line
from softequiv.adapt.plan import config_size
from softequiv.errors import SoftEquivError
from softequiv.tasks.decoding import BICUBIC, BILINEAR, MODES, middle, pixels
from softequiv.tasks.files import Normalised
from softequiv.tasks.folders import IMAGENET
from softequiv.tasks.preprocessor import BYTE, Settings, frame, normalisation, preprocessor_of, read_preprocessor

NAMES = {"bilinear": BILINEAR, "bicubic": BICUBIC}  # timm's words for pillow's numbers
USUAL = {1: Normalised((0.0,), (1.0,)), 3: IMAGENET}  # by channels, where nothing says how pictures are normalised
PROCESSOR = "BitImageProcessor"  # of transformers: the shorter side scaled, then the middle cut out


@dataclass(frozen=True)
class Squares:
    """The shorter side becomes `shorter` pixels, or both where `squashed`, and the middle square of size x size is cut
    out; (x - mean) / std with x in [0, 1].

    Where the square is larger than the scaled picture, black is around it.
    """

    size: int
    shorter: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    resample: int = BILINEAR
    squashed: bool = False

    def __call__(self, picture: Any) -> Tensor:
        scaled = picture.resize((self.shorter, self.shorter), self.resample) if self.squashed else picture
        square = pixels(middle(scaled, self.size, self.shorter, self.resample))
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (square / 255 - mean) / std


@dataclass(frozen=True)
class Processed:
    """As the model's own processor of transformers says."""

    processor: Any
    path: Path = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Processed:
        """The processor of a preprocessor file."""
        import transformers

        processors: Any = transformers.AutoImageProcessor
        with _processing(path):
            return cls(processors.from_pretrained(path.parent), path)

    def __call__(self, picture: Any) -> Tensor:
        with _processing(self.path):
            pixels: Tensor = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels


Preparation = Squares | Processed


def preparation(model: nn.Module, size: int | None = None) -> tuple[Preparation, str]:
    """How a picture is made ready for a model, with `size` as squares of that side, and what had to be guessed."""
    if timm_settings(model):
        return timm_preparation(timm_settings(model), size), ""
    path = preprocessor_of(model)
    settings = read_preprocessor(path)
    known, channels = path.is_file(), channels_of(model)
    own = processed(model, size)
    if own is not None:
        return own, ""
    side, shorter = frame(settings, path) if size is None else (size, size)
    side = side or config_size(model)
    if side is None:
        raise SoftEquivError("the model does not say how large its pictures are; give --size")
    normalised = normalisation(settings, path, channels) if known else USUAL[channels]
    mean, std = (", ".join(map(str, values)) for values in (normalised.mean, normalised.std))
    note = f"no {PREPROCESSOR} beside the model: the mean {mean} and deviation {std} of its pictures are guessed"
    resample = settings.get("resample", BILINEAR)
    return Squares(side, shorter or side, normalised.mean, normalised.std, resample), "" if known else note


def processed(model: nn.Module, size: int | None) -> Processed | None:
    """The model's own processor, where there is one, for pictures of colours at its own size."""
    path = preprocessor_of(model)
    return Processed.read(path) if path.is_file() and size is None and channels_of(model) == 3 else None


def described(prepared: Preparation, model: nn.Module) -> Settings | None:
    """A preparation in the words of the file beside such a model; None where the model's own file stands for it.

    >>> described(Squares(28, 32), nn.Conv2d(3, 8, 3))["size"]
    {'shortest_edge': 32}
    """
    if isinstance(prepared, Processed):
        return None
    channels = channels_of(model)
    mean, std = (list(values * (channels if len(values) == 1 else 1)) for values in (prepared.mean, prepared.std))
    if timm_settings(model):
        name = next((name for name, number in NAMES.items() if number == prepared.resample), "bilinear")
        shape = (channels, prepared.size, prepared.size)
        share = prepared.size / prepared.shorter
        if math.floor(prepared.size / share) < prepared.shorter:  # rounding; timm would scale to a pixel less
            share = math.nextafter(share, 0)
        mode = "squash" if prepared.squashed else "center"
        scaled = {"interpolation": name, "crop_pct": share, "crop_mode": mode}
        return {"input_size": shape, **scaled, "mean": mean, "std": std}
    return {
        "image_processor_type": PROCESSOR,
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": prepared.shorter},
        "resample": prepared.resample,
        "do_center_crop": True,
        "crop_size": {"height": prepared.size, "width": prepared.size},
        "do_rescale": True,
        "rescale_factor": BYTE,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


def normalised(prepared: Preparation) -> Normalised:
    """How the numbers of a prepared picture came from bytes.

    >>> normalised(Squares(28, 28, (0.5,), (0.25,)))
    Normalised(mean=(0.5,), std=(0.25,), pad=0)
    """
    if isinstance(prepared, Squares):
        return Normalised(prepared.mean, prepared.std)
    return normalisation(read_preprocessor(prepared.path), prepared.path, channels=3)


def channels_of(model: nn.Module) -> int:
    """Colours of the pictures that a model takes."""
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    channels = int(getattr(getattr(model, "config", None), "num_channels", None) or first)
    if channels not in MODES:
        raise SoftEquivError(f"the model takes {channels} channels, and pictures have 1 or 3; measure it in Python")
    return channels


def timm_settings(model: nn.Module) -> Settings:
    """What a model of timm says about its pictures; nothing for others."""
    return getattr(model, "pretrained_cfg", None) or {}


def timm_preparation(settings: Settings, size: int | None) -> Squares:
    """As timm evaluates, to a pixel where the margins are uneven; middle squares of a size that is asked for."""
    normalised = tuple(settings["mean"]), tuple(settings["std"])
    resample = NAMES.get(settings.get("interpolation", "bilinear"), BILINEAR)
    if size:
        return Squares(size, size, *normalised, resample)
    side, mode = int(settings["input_size"][-1]), settings.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise SoftEquivError(
            f"the model's pictures are cut with timm's crop_mode {mode!r}, which is not known; give --size for middle "
            "squares"
        )
    shorter = max(1, math.floor(side / float(settings.get("crop_pct") or 1.0)))
    return Squares(side, shorter, *normalised, resample, mode == "squash")


@contextlib.contextmanager
def _processing(path: Path) -> Iterator[None]:
    """What goes wrong inside of transformers, in one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise SoftEquivError(
            f"{path} prepares no picture ({first_line(problem)[:200]}); correct it, or give --size to do without"
        ) from problem
