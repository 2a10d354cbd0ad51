"""Are these labels, and is this a list of them? A line, name or number that is none is named with its file."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

from torch import Tensor

from softequiv._files import path_of
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


def check_inside(name: str, place: str) -> None:
    """Raise a sentence where a name in a list, found at `place`, leads out of the folder that the list is about.

    >>> check_inside("a/1.png", "list.txt, line 1")
    """
    path = PureWindowsPath(path_of(name))  # which knows the separators of all systems
    if path.drive or path.root or ".." in path.parts:
        raise SoftEquivError(f"{place}: {name!r} leads out of the folder; copy that file into it, and name it there")
