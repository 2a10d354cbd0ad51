"""How far is a table? A line for each cell that ends, or a table that lives where somebody watches a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

SHOWN = 8  # cells that ended last

Tell = Callable[[str, str], None]


@dataclass
class Progress:
    """Cells that ended, of so many, with what went wrong."""

    total: int
    ended: list[tuple[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        """Seconds, if the others take as long as those that ended.

        >>> Progress(3, [("a", ""), ("b", "")], time.perf_counter() - 20).left > 9.9
        True
        """
        return (time.perf_counter() - self.began) / len(self.ended) * (self.total - len(self.ended))

    def line(self) -> str:
        """The last cell that ended."""
        name, problem = self.ended[-1]
        return f"[{len(self.ended)}/{self.total}] {name}: {problem or 'done'}; about {self.left:.0f} s left"

    def table(self, standing: Callable[[], str | None]) -> Any:
        """All of it, for rich."""
        from rich.table import Table

        failed = sum(bool(problem) for _, problem in self.ended)
        left = f"about {self.left:.0f} s left" if self.ended else "no cell has ended yet"
        table = Table("cell", "", title=f"{len(self.ended)} of {self.total} cells, {failed} failed; {left}")
        for name, problem in self.ended[-SHOWN:]:
            table.add_row(name, problem or "done", style="red" if problem else None)
        table.caption = standing()
        return table


@contextmanager
def watched(total: int, standing: Callable[[], str | None]) -> Iterator[Tell]:
    """A function to be called with each cell that ends and what went wrong.

    >>> with watched(2, lambda: None) as tell:
    ...     tell("seed=0", "")
    [1/2] seed=0: done; about 0 s left
    """
    progress = Progress(total)
    if total == 0 or standing() is None or not sys.stdout.isatty() or find_spec("rich") is None:

        def tell(name: str, problem: str) -> None:
            progress.ended.append((name, problem))
            print(progress.line(), flush=True)

        yield tell
        return
    from rich.live import Live

    with Live(get_renderable=lambda: progress.table(standing), refresh_per_second=1):
        yield lambda name, problem: progress.ended.append((name, problem))
