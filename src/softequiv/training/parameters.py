"""Which weights learn at which rate? Groups for an optimiser by depth, place and shape."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from softequiv.baselines.canonical import Canonical
from softequiv.errors import SoftEquivError
from softequiv.training.recipe import Recipe

NUMBERED = re.compile(r"(?:^|\.)(\d+)\.")


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
    head = head_name(model)
    depths = {name: depth_of(name) for name, _ in learning}
    top = max(depths.values()) + 1
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in learning:
        in_head = name == head or name.startswith(f"{head}.")
        depth = top if in_head else depths[name]
        rate = recipe.rate * recipe.layer_decay ** (top - depth)
        if in_head and recipe.head_rate is not None:
            rate = recipe.head_rate
        decays = recipe.optimizer != "adamw" or weight.ndim > 1
        groups[rate, recipe.weight_decay if decays else 0.0].append(weight)
    return [
        {"params": weights, "lr": rate, "full_rate": rate, "weight_decay": decay}
        for (rate, decay), weights in groups.items()
    ]


def depth_of(name: str) -> int:
    """The number of the block in which a weight stands, from 1; 0 before all blocks.

    >>> depth_of("vit.encoder.layer.3.output.weight"), depth_of("vit.embeddings.cls_token")
    (4, 0)
    """
    found = NUMBERED.search(name)
    return int(found[1]) + 1 if found else 0


def head_name(model: nn.Module) -> str:
    """The last module with weights of its own: what turns features into answers.

    >>> head_name(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    '2'
    """
    if isinstance(model, Canonical):  # its scorer comes after the model that answers
        return f"model.{head_name(model.model)}"
    owners = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    last = owners[-1] if owners else ""
    return last.split(".parametrizations")[0]
