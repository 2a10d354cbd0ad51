"""How does a table look in a terminal? As lines with the columns one under the other."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, with columns of one width.

    >>> aligned([("weight", "shape"), ("a", "3x3")])
    ['weight  shape', 'a       3x3']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
