"""Which pretrained models are fine-tuned, and how are they opened? Stand-ins from the data folder, others by hub id.

Every one takes pictures normalised by its task, and can be given another head or another picture size.
"""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from softequiv.adapt import open_model
from softequiv.errors import SoftEquivError
from softequiv.experiments.base import data_folder
from softequiv.tasks.files import Normalised, constants

Kind = Literal["AutoModelForImageClassification", "AutoModelForSemanticSegmentation"]

CLASSIFIER: Kind = "AutoModelForImageClassification"
SEGMENTER: Kind = "AutoModelForSemanticSegmentation"
POSITIONS = "position_embeddings"
RESNET56 = "resnet56_cifar10.safetensors"
BLOCKS = 9  # of each stage of a ResNet-56


def opened(source: str, normalised: Normalised) -> nn.Module:
    """The model of a hub id, or the stand-in of that name in the data folder, in float32."""
    if "/" in source:
        return open_model(source).float()
    folder = data_folder(source)
    if (folder / RESNET56).is_file():
        model = ResNet56()
        model.load_state_dict(load_file(folder / RESNET56))
        return Raw(model.float(), normalised).eval()
    return open_model(folder).float()


def with_head(model: Any, kind: Kind, classes: int, *, size: int | None = None, drop_path: float | None = None) -> Any:
    """A model of transformers with so many classes: its own weights wherever they fit, a new head where they do not.

    With `size`, tables of positions are read bicubically at the patches of pictures of that size, once, so that what
    is filtered is the table in use. `drop_path` applies where the architecture knows it.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = classes
    if size is not None:
        config.image_size = size
    if drop_path is not None and hasattr(config, "drop_path_rate"):
        config.drop_path_rate = drop_path
    headed = getattr(importlib.import_module("transformers"), kind).from_config(config).float()
    prefix = f"{headed.base_model_prefix}."
    found: dict[str, Tensor] = model.state_dict()
    if not any(name.startswith(prefix) for name in found):
        found = {f"{prefix}{name}": value for name, value in found.items()}
    own = headed.state_dict()
    fitting = {}
    for name, value in found.items():
        if name in own and name.endswith(POSITIONS):
            value = positions_of(value, own[name].shape[1])
        if name in own and own[name].shape == value.shape:
            fitting[name] = value
    lost = [name for name in own if name.startswith(prefix) and name not in fitting]
    if lost:
        raise SoftEquivError(
            f"{type(model).__name__} has no weights for {', '.join(lost[:3])} of {type(headed).__name__}; open a "
            "checkpoint of that architecture"
        )
    headed.load_state_dict(fitting, strict=False)
    return headed.eval()


def positions_of(table: Tensor, tokens: int) -> Tensor:
    """A table of positions (1, 1 + side^2, width) read bicubically on another square grid, its first token as it is.

    >>> positions_of(torch.ones(1, 17, 8), 65).shape
    torch.Size([1, 65, 8])
    """
    if table.shape[1] == tokens:
        return table
    old, new = (math.isqrt(count - 1) for count in (table.shape[1], tokens))
    grid = table[:, 1:].mT.unflatten(2, (old, old))
    read = functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False, antialias=new < old)
    return torch.cat([table[:, :1], read.flatten(2).mT], 1)


class PatchwiseLinear(nn.Module):
    """A linear map of every patch's token to scores of classes: (N, 3, H, W) to (N, classes, H / patch, W / patch)."""

    def __init__(self, backbone: Any, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.patch = int(backbone.config.patch_size)
        self.head = nn.Linear(backbone.config.hidden_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (side // self.patch for side in x.shape[-2:])
        tokens: Tensor = self.backbone(pixel_values=x).last_hidden_state
        scores: Tensor = self.head(tokens[:, -rows * columns :])
        found: Tensor = scores.mT.unflatten(2, (rows, columns))
        return found


class Raw(nn.Module):
    """A model that wants pictures from 0 to 1, given normalised ones."""

    def __init__(self, model: nn.Module, normalised: Normalised) -> None:
        super().__init__()
        self.model, self.normalised = model, normalised

    def forward(self, x: Tensor) -> Tensor:
        mean, std = constants((self.normalised.mean, self.normalised.std), x.device)
        answers: Tensor = self.model(x * std + mean)
        return answers


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        changed = stride > 1 or width_in != width
        layers = [nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)] if changed else []
        self.shortcut = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class ResNet56(nn.Module):
    """The residual network of CIFAR-10 with nine blocks a stage (He et al. 2016), pictures from 0 to 1.

    >>> ResNet56()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Residual(before, width, stride), *(Residual(width, width, 1) for _ in range(BLOCKS - 1)))
            for before, width, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # as GPUs want maps of few channels
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        answers: Tensor = self.linear(x.mean((-2, -1)))
        return answers
