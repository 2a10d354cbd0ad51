"""Which weights learn at which rate? Groups for an optimiser by depth, place and shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from softequiv.baselines.canonical import Canonical
from softequiv.errors import SoftEquivError
from softequiv.tasks.images import class_count
from softequiv.training.recipe import Recipe

AUXILIARY = {"auxiliary_head", "aux_classifier"}  # of segmenters of transformers and torchvision


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over the weights that learn; each group keeps its full rate as `full_rate`.

    >>> optimizer = optimizer_of(nn.Linear(2, 2), Recipe(rate=0.1, weight_decay=0.5))
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.1, 0.5), (0.1, 0.0)]
    """
    groups = parameter_groups(model, recipe)
    fused = all(weight.is_cuda for group in groups for weight in group["params"])  # one kernel for all weights
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=fused)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, fused=fused)
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True, fused=fused)


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weights by (rate, decay): layer decay by depth, the head's own rate, no decoupled decay of vectors."""
    learning = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not learning:
        raise SoftEquivError("no weight of this model learns (requires_grad is False everywhere); unfreeze some")
    heads, depths = head_names(model), depths_of(model)
    below = {place_of(name) for name, _ in model.named_parameters()} - {*heads}
    top = max((depths[place] for place in below), default=-1) + 1
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in learning:
        in_head = place_of(name) in heads
        depth = top if in_head else depths[place_of(name)]
        rate = recipe.rate * recipe.layer_decay ** (top - depth)
        if in_head and recipe.head_rate is not None:
            rate = recipe.head_rate
        decays = recipe.optimizer != "adamw" or weight.ndim > 1
        groups[rate, recipe.weight_decay if decays else 0.0].append(weight)
    return [
        {"params": weights, "lr": rate, "full_rate": rate, "weight_decay": decay}
        for (rate, decay), weights in groups.items()
    ]


def depths_of(model: nn.Module) -> dict[str, int]:
    """How many blocks have begun at each module, in the order of modules: none in the stem, all behind the last block.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    >>> depths_of(net)
    {'': 0, '0': 1, '1': 1, '2': 2}
    """
    blocks = blocks_of(model)
    places = [place for place, _ in model.named_modules()]
    return dict(zip(places, accumulate(int(place in blocks) for place in places), strict=True))


def blocks_of(model: nn.Module) -> list[str]:
    """The innermost numbered modules of several matrices that stand in a row of such, or inside no other; where there
    are none, numbered ones of one matrix.

    Stages hold blocks. The layers of a block, or beside each other in a head, have one matrix each, and where one of
    them has more, as squeeze and excitation has, the layers beside it say that it is no block. Numbers may stand at
    the end of names, as in `denselayer1`, where none stands alone.

    >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    >>> blocks_of(nn.ModuleDict({"stages": nn.ModuleList([stage]), "heads": nn.ModuleList([nn.Linear(2, 2)])}))
    ['stages.0.0', 'stages.0.1']
    """
    alone, ending = (_matrices(model, digits) for digits in (str.isdigit, lambda part: part[-1:].isdigit()))
    matrices = next((found for found in (alone, ending) if max(found.values(), default=0) > 1), alone)
    several = [place for place, count in matrices.items() if count > 1] or list(matrices)
    layers = {_row(place) for place, count in matrices.items() if count == 1}
    found = [p for p in several if _row(p) not in layers or not any(p.startswith(f"{other}.") for other in several)]
    return [place for place in found if not any(other.startswith(f"{place}.") for other in found)]


def _matrices(model: nn.Module, numbered: Callable[[str], bool]) -> Counter[str]:
    """How many matrices each numbered module holds, in their order."""
    found: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        parts = place_of(name).split(".")
        if weight.ndim > 1:
            found.update(".".join(parts[: end + 1]) for end, part in enumerate(parts) if numbered(part))
    return found


def _row(place: str) -> str:
    return place.rpartition(".")[0]


def place_of(name: str) -> str:
    """The module in which a parameter stands, one that is parametrised where it stood before.

    >>> place_of("layers.0.weight"), place_of("layers.0.parametrizations.weight.original")
    ('layers.0', 'layers.0')
    """
    parts = name.split(".")
    end = parts.index("parametrizations") if "parametrizations" in parts else -1
    return ".".join(parts[:end])


def head_names(model: nn.Module) -> list[str]:
    """The layers that turn features into scores: first the last module with weights of its own, of those that give as
    many scores as the model has classes, if any do; then the one beside it that learnt from a teacher, since answers
    are the mean of both, and that of an auxiliary head.

    >>> head_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    ['2']
    >>> head_names(nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "head", "head_dist", "aux_classifier")}))
    ['head_dist', 'head', 'aux_classifier']
    """
    if isinstance(model, Canonical):  # its scorer comes after the model that answers
        return [f"model.{name}" for name in head_names(model.model)]
    owners = {place_of(name) for name, _ in model.named_parameters()}
    modules = {place: module for place, module in model.named_modules() if place in owners}
    count = class_count(model)
    scoring = [place for place, module in modules.items() if count and count == _outputs(module)]
    places = scoring or [*modules]
    auxiliary = [place for place in places if AUXILIARY & {*place.split(".")}]
    others = [place for place in places if place not in auxiliary]
    if not others:
        return auxiliary[-1:]
    last = others[-1]
    return [last, *(place for place in others if _twins(place, last)), *auxiliary[-1:]]


def _outputs(module: nn.Module) -> int | None:
    found: int | None = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
    return found


def _twins(one: str, other: str) -> bool:
    """Whether two names differ in one part, and there by a word for what a teacher taught: head and head_dist, or
    cls_classifier and distillation_classifier."""
    parts = one.split("."), other.split(".")
    differ = [[{*part.split("_")} for part in pair] for pair in zip(*parts, strict=False) if pair[0] != pair[1]]
    if len(parts[0]) != len(parts[1]) or len(differ) != 1:
        return False
    mine, theirs = differ[0]
    return bool(mine & theirs) and any(word.startswith("dist") for word in mine ^ theirs)
