"""How far is long work? A bar where somebody watches a terminal and rich is installed; silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterable[Item]:
    """The same items, with a bar on stderr that counts them.

    >>> list(progress(range(3), "counting"))
    [0, 1, 2]
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=what, total=total, console=Console(stderr=True), transient=True)
