"""How are shares drawn? One bar for each part, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softequiv._files import path_of
from softequiv.errors import SoftEquivError


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, which is an extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise SoftEquivError("pictures need matplotlib: pip install 'softequiv[plot]'") from missing
    return Figure(figsize=(width, height), layout="constrained")


def share_bars(names: Sequence[str], shares: Sequence[float], path: str | Path, title: str) -> None:
    """Horizontal bars of the shares in per cent, the largest in red, written in the format of the path's ending."""
    figure = new_figure(8, 1.2 + 0.22 * len(names))
    axes = figure.subplots()
    colours = ["#c0392b" if share == max(shares) else "#4a6fa5" for share in shares]
    axes.barh(range(len(names)), [100 * share for share in shares], color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("share of the error, per cent")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path_of(path))
    except (ValueError, OSError) as problem:
        raise SoftEquivError(
            f"cannot draw {str(path)!r}: {problem}; name a file such as shares.svg in a folder that exists"
        ) from problem
