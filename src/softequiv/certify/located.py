"""Which weights of a model does a certificate speak of, on which representations, and for which range by default?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv.adapt.bake import bake
from softequiv.adapt.find import CONVOLUTIONS, Found, Setting, find, refuse_unready
from softequiv.adapt.group import group_of
from softequiv.adapt.positions import dotted
from softequiv.certify.operator import as_hom
from softequiv.errors import WeightError
from softequiv.gains.cone import LeastDistortion
from softequiv.groups import Group
from softequiv.groups.angles import range_of
from softequiv.nn import Layout, soft_weights
from softequiv.nn.weight import whole
from softequiv.reps import Rep

ROUNDING = 1e-9  # of a range, relative


@dataclass(frozen=True)
class Located:
    """A weight of a model with its representation, and the error target that it was softened for, if any."""

    name: str
    module: nn.Module
    attribute: str
    rep: Rep
    layout: Layout
    target: LeastDistortion | None = None

    @property
    def value(self) -> Tensor:
        """The stored value that the layer uses, on the CPU, whole."""
        weight = whole(getattr(self.module, self.attribute).detach())
        if weight.is_meta:
            raise WeightError(f"{self.name} has no values yet, it is on the meta device: load the weights first")
        if not torch.isfinite(weight).all():
            raise WeightError(f"{self.name} has entries that are not finite, of which nothing can be certified")
        return weight.cpu()

    @property
    def is_map(self) -> bool:
        """Whether the layer multiplies by this weight; tables and biases are added."""
        layer = isinstance(self.module, (nn.Linear, *CONVOLUTIONS)) and self.attribute == "weight"
        return layer or as_hom(self.rep) is not None

    def asked(self, reach: float) -> float | None:
        """The error that was asked for, if its range contains path lengths up to `reach`, so that it bounds theirs."""
        if self.target is None or self.rep.group.reach(self.target.within) < reach * (1 - ROUNDING):
            return None
        return self.target.error


def located(model: nn.Module, setting: Setting) -> list[Located]:
    """The soft weights of a model that is soft for this group; else those that live on a grid once it is plain."""
    own = group_of(model)
    if own == setting.group:
        return [
            Located(w.name, w.module, w.attribute, w.soft.rep, w.soft.layout, target_of(w.soft.gain))
            for w in soft_weights(model)
        ]
    plain = bake(model, copy=True) if own else model
    every = [found for found in find(plain, setting) if isinstance(found, Found)]
    for found in every:
        refuse_unready(plain, found)
    return [Located(f.name, plain.get_submodule(f.module), f.attribute, f.rep, f.layout) for f in every]


def target_of(gain: Any) -> LeastDistortion | None:
    """The error target, where a gain is one."""
    return gain if isinstance(gain, LeastDistortion) else None


def own_range(model: nn.Module) -> float | None:
    """The range of a soft model's error targets; None where its weights have none, or not one and the same."""
    targets = [target_of(weight.soft.gain) for weight in soft_weights(model)]
    ranges = {None if target is None else target.within for target in targets}
    return ranges.pop() if len(ranges) == 1 else None


def certified_range(model: nn.Module, group: Group, within: float | str | None) -> float:
    """The range as a number: by default that of the model's error targets for this group, else the whole group."""
    found = range_of(within)
    if found is None and group == group_of(model):
        found = own_range(model)
    return math.inf if found is None else found


def flattened_grids(weights: list[Located]) -> dict[str, tuple[int, ...]]:
    """The (channels, H, W) of linear layers on flattened pictures, under the names of the layers."""
    return {
        weight.name.rpartition(".")[0]: (weight.layout.channels, *weight.rep.shape)
        for weight in weights
        if isinstance(weight.module, nn.Linear) and weight.layout.axis == 1
    }


def bakeable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under the name that it has in the plain model, with the value that the model uses."""
    for prefix, module in model.named_modules():
        if "parametrizations" in prefix.split("."):
            continue  # what a parametrised weight is made from; the weight itself comes with its own module
        made = list(cast(Any, module).parametrizations) if parametrize.is_parametrized(module) else []
        for attribute in (*made, *(name for name, _ in module.named_parameters(recurse=False))):
            yield dotted(prefix, attribute), getattr(module, attribute).detach()
