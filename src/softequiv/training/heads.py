"""Does a model answer what is asked? Its answers are tried on two examples, and its last layer can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from softequiv.asking.answers import asked, at_home, evaluating
from softequiv.errors import SoftEquivError
from softequiv.tasks.classification import Classification
from softequiv.tasks.segmentation import Segmentation


def check_answers(model: nn.Module, task: Classification | Segmentation) -> None:
    """Raise a sentence unless the model gives scores of the task's classes: (N, K), or (N, K, h, w) of pixels."""
    x, _ = task.train.batch(torch.arange(min(2, len(task.train))))
    with evaluating(model):
        shape = tuple(asked(model, at_home(model, x)).shape)
    pixels = isinstance(task, Segmentation)
    if len(shape) != (4 if pixels else 2):
        wanted = "a class for every pixel, (N, K, h, w)" if pixels else "one class a picture, (N, K)"
        raise SoftEquivError(
            f"the data ask for {wanted}, and {type(model).__name__} answers {shape}; choose a model with a head "
            f"for {'segmentation' if pixels else 'classification'}"
        )
    if shape[1] != task.classes:
        raise SoftEquivError(
            f"the model answers {shape[1]} classes and the data have {task.classes}; give the model a new head "
            "(--new-head), or data of its own classes"
        )


def new_head(model: nn.Module, classes: int, names: Sequence[str] = (), *, seed: int = 0) -> None:
    """Replace the layer that gives the scores by one of so many classes, drawn anew by seed, in place.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 10))
    >>> new_head(net, 3)
    >>> net[1]
    Linear(in_features=4, out_features=3, bias=True)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if callable(getattr(model, "reset_classifier", None)):  # timm's own way
            model.reset_classifier(classes)  # type: ignore[operator]
            return
        place, old = last_layer(model)
        fresh = _alike(old, classes).to(old.weight.device, old.weight.dtype)
    parent, _, attribute = place.rpartition(".")
    setattr(model.get_submodule(parent), attribute, fresh)
    name_classes(model, list(names) or [f"LABEL_{number}" for number in range(classes)])
    if hasattr(model, "num_labels"):
        model.num_labels = classes  # type: ignore[assignment]


def name_classes(model: nn.Module, names: Sequence[str]) -> None:
    """Write what the classes are called into the configuration of a model of transformers."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}


def last_layer(model: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    """The layer that gives the scores, and its name: the last linear one, or the last of all where it is a 1 x 1
    convolution."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    ]
    if not found or not found[-1][0]:
        raise SoftEquivError(
            f"{type(model).__name__} has no layer inside that could be its head; build one with the right number of "
            "classes"
        )
    return found[-1]


def _alike(old: nn.Linear | nn.Conv2d, classes: int) -> nn.Linear | nn.Conv2d:
    bias = old.bias is not None
    if isinstance(old, nn.Linear):
        return nn.Linear(old.in_features, classes, bias)
    return nn.Conv2d(old.in_channels, classes, 1, bias=bias)
