"""Are these labels, and is this a list of them? A line or a number that is none is named with its file."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from softequiv.errors import SoftEquivError


def check_range(labels: Tensor, classes: int, name: str) -> None:
    """Raise a sentence naming the file and the first label that is none of 0..classes-1; labels (N,)."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        number = int(wrong[0])
        raise SoftEquivError(
            f"{name}: label {int(labels[number])} of example {number} is none of 0..{classes - 1}; "
            "check that the file belongs to this data set"
        )


def numbered_lines(path: Path, remedy: str) -> list[tuple[int, str]]:
    """The lines of a list that are not empty, with their numbers from 1."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # as some editors of tables write
    except UnicodeDecodeError as problem:
        raise SoftEquivError(f"{path} is no text ({problem}); {remedy}") from problem
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SoftEquivError(f"{path} lists no pictures; {remedy}")
    return found
