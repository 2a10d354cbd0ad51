"""What does the first filtered layer do to a picture? Its kernels, its features of x and of gx, and how they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.actions import Pictures
from softequiv.asking.answers import asked, at_home, evaluating
from softequiv.groups import SO, Angle, C, D, Element, Group, O, Reflection
from softequiv.nn import soft_weights
from softequiv.nn.weight import SoftWeight

CONTINUED = Pictures(padding="border")  # features go on beyond the frame
FRAME = Pictures("nearest")  # its valid pixels are those that come from within the frame


@dataclass(frozen=True)
class Shown:
    """The layer at one softness: kernels (n, h, w) and maps (channels, H, W).

    `inside` (H, W) says where g f(x) comes from within the frame. Features are None where the output is no map.
    """

    kernels: Tensor
    features: Tensor | None
    turned: Tensor | None
    moved: Tensor | None
    inside: Tensor | None

    @property
    def difference(self) -> Tensor | None:
        """|f(gx) - g f(x)|, NaN where the frame cuts g f(x) off."""
        if self.moved is None or self.turned is None or self.inside is None:
            return None
        return torch.where(self.inside, (self.moved - self.turned).abs(), torch.nan)

    @property
    def error(self) -> float | None:
        """||f(gx) - g f(x)|| / ||f(x)|| inside the frame."""
        difference = self.difference
        if difference is None or self.features is None:
            return None
        size = float(self.features.norm())
        share = math.sqrt(float(self.inside.double().mean())) if self.inside is not None else 1.0
        return float(difference.nan_to_num().norm()) / (size * share) if size else 0.0


def shown_weight(model: nn.Module) -> SoftWeight:
    """The first filtered kernel of a soft model, or else its first filtered weight."""
    weights = list(soft_weights(model))
    return next((weight for weight in weights if isinstance(weight.module, nn.Conv2d)), weights[0])


def shown_element(group: Group, within: float | None) -> Element:
    """The farthest element of the range, along the first generator where the group is continuous."""
    reach = group.reach(within if within is not None else math.inf)
    if len(group.lie):
        turn = min(reach, float(within)) if isinstance(within, Angle) else reach  # where flips count, reach is longer
        return group.element(turn, *[0] * (len(group.lie) + len(group.steps) - 1))
    return max((g for g in group.elements() if g.length <= reach + 1e-9), key=lambda g: g.length)


def told(g: Element) -> str:
    """A move in words: turns of the plane by their angle, others as the group writes them.

    >>> from softequiv import SO, degrees
    >>> told(SO(2).element(degrees(30)))
    'a turn by 30 degrees'
    """
    if not (isinstance(g.group, (C, D, Reflection)) or g.group in (SO(2), O(2))):
        return str(g)
    if float(torch.linalg.det(g.matrix)) < 0:
        return f"the flip {g}"
    return f"a turn by {math.degrees(math.atan2(float(g.matrix[1, 0]), float(g.matrix[0, 0]))):.4g} degrees"


def show(model: nn.Module, x: Tensor, g: Element) -> Shown:
    """Look at the shown layer of a soft model for one picture (C, H, W) and one element."""
    weight = shown_weight(model)
    caught: list[Any] = []
    hook = weight.module.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
    try:
        with evaluating(model):
            asked(model, at_home(model, torch.stack([x, Pictures()(x, g)])))
            view = weight.group_view().detach()
    finally:
        hook.remove()
    kernels = view.reshape(-1, *(1, *weight.soft.rep.shape)[-2:]).double().cpu()
    output = caught[0] if caught else None
    if not (isinstance(output, Tensor) and output.ndim == 4 and min(output.shape[-2:]) > 1):
        return Shown(kernels, None, None, None, None)
    features, moved = output.double().cpu()
    inside = FRAME.valid(features, g)
    everywhere = torch.ones(features.shape[-2:], dtype=torch.bool)
    return Shown(kernels, features, CONTINUED(features, g), moved, everywhere if inside is None else inside)


def strongest(maps: Tensor, count: int) -> Tensor:
    """The indices of the largest maps (n, h, w) by norm, in their own order."""
    return maps.flatten(1).norm(dim=1).topk(min(count, len(maps))).indices.sort().values


def mosaic(maps: Tensor, columns: int) -> Tensor:
    """Maps (n, h, w) side by side with a gap of one pixel that is NaN.

    >>> mosaic(torch.ones(3, 2, 2), 2).shape
    torch.Size([5, 5])
    """
    n, height, width = maps.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    sheet = maps.new_full((rows * (height + 1) - 1, columns * (width + 1) - 1), torch.nan)
    for i, tile in enumerate(maps):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = tile
    return sheet
