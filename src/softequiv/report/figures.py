"""The paper's first figure, as a file: weights, features and error maps of a model at several softness, for two groups.

Written with matplotlib (extra `plot`), as SVG or PNG by the ending of the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.groups.parse import as_group
from softequiv.measure.plots import new_figure
from softequiv.report.build import largest, turned_to
from softequiv.report.layer import Shown, mosaic, show, shown_element, strongest, told

SOFTNESS = (0.0, 0.25, 0.5, 0.75, 1.0)
KERNELS, MAPS, COLUMNS = 16, 4, 4
ROWS = ("weights", "g f(x)", "f(gx)", "|f(gx) - g f(x)|")


def dial_figure(
    path: str | Path,
    model: nn.Module,
    picture: Tensor,
    *,
    groups: Sequence[Group | str] = ("C4", "C36"),
    levels: Sequence[float] = SOFTNESS,
    within: Sequence[float | None] | None = None,
) -> None:
    """Draw a plain model's first filtered layer at each softness, for each group, for one picture (C, H, W).

    `within` gives the range of each group, whose farthest element moves the picture; by default one step of the group.
    """
    if picture.ndim != 3:
        raise SoftEquivError(f"the figure shows one picture (C, H, W); got {tuple(picture.shape)}")
    chosen = [as_group(group) for group in groups]
    ranges = within or [None if len(group.lie) else 1.0 for group in chosen]
    figure = new_figure(1.9 * len(levels) + 0.6, 1.55 * len(ROWS) * len(chosen) + 0.4)
    axes = figure.subplots(len(ROWS) * len(chosen), len(levels), squeeze=False)
    for block, (group, reach) in enumerate(zip(chosen, ranges, strict=True)):
        g = shown_element(group, reach)
        shown = [show(turned_to(model, group, level), picture, g) for level in levels]
        for column, (level, sheets) in enumerate(zip(levels, sheets_of(shown), strict=True)):
            for row, (sheet, limit) in enumerate(sheets):
                axis = axes[block * len(ROWS) + row, column]
                axis.imshow(sheet.numpy(), cmap="PuOr_r", vmin=-limit, vmax=limit, interpolation="nearest")
                axis.set(xticks=[], yticks=[], frame_on=False)
                if column == 0:
                    axis.set_ylabel(ROWS[row], fontsize=9)
            axes[block * len(ROWS), column].set_title(
                f"softness {level:g}" + (f"\n{group}, {told(g)}" if column == 0 else ""), fontsize=9
            )
    figure.savefig(path, dpi=150)


def sheets_of(shown: Sequence[Shown]) -> list[list[tuple[Tensor, float]]]:
    """For each softness the pictures of the four rows, with what the last shade of each stands for."""
    freest = shown[-1]
    if freest.features is None:
        raise SoftEquivError("the first filtered layer of this model gives no maps, so there is nothing to draw")
    kernels, maps = strongest(freest.kernels, KERNELS), strongest(freest.features, MAPS)
    weight_limit = largest([s.kernels for s in shown])
    map_limit = largest([s.moved for s in shown if s.moved is not None])
    out = []
    for s in shown:
        features = [part for part in (s.turned, s.moved, s.difference) if part is not None]
        sheets = [(mosaic(s.kernels[kernels], COLUMNS), weight_limit)]
        out.append(sheets + [(mosaic(part[maps], MAPS // 2), map_limit) for part in features])
    return out
