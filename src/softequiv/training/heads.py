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
from softequiv.training.parameters import head_names


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
    """Replace the layer that gives the scores by one of so many classes, drawn anew by seed, in place; where answers
    are the mean of two such layers, both, and that of an auxiliary head too.

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
        fresh = {place: _alike(model, place, classes) for place in head_names(model) or [""]}
    for place, layer in fresh.items():
        parent, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)
    name_classes(model, list(names) or [f"LABEL_{number}" for number in range(classes)])
    if hasattr(model, "num_labels"):
        model.num_labels = classes  # type: ignore[assignment]


def name_classes(model: nn.Module, names: Sequence[str]) -> None:
    """Write what the classes are called into the configuration of a model of transformers."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}


def _alike(model: nn.Module, place: str, classes: int) -> nn.Linear | nn.Conv2d:
    """A layer like that of a name, for so many classes."""
    old = model.get_submodule(place)
    fresh: nn.Linear | nn.Conv2d | None = None
    if place and isinstance(old, nn.Linear):
        fresh = nn.Linear(old.in_features, classes, old.bias is not None)
    if place and isinstance(old, nn.Conv2d) and old.kernel_size == (1, 1):
        fresh = nn.Conv2d(old.in_channels, classes, 1, bias=old.bias is not None)
    if fresh is None:
        raise SoftEquivError(
            f"{type(model).__name__} has no layer inside that could be its head; build one with the right number of "
            "classes"
        )
    return fresh.to(next(old.parameters()))
