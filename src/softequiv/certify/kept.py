"""How is a certificate kept? As JSON text that names its group and range; what is damaged is said when it is read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from softequiv._files import read_json, written_whole
from softequiv.errors import GroupError, SoftEquivError
from softequiv.groups import Angle, Group, parse_group


def write_text(text: str, path: str | Path) -> None:
    """Write a certificate's text into a file, whole or not at all."""
    with written_whole(path) as part:
        part.write_text(text)


def text_of(path: str | Path) -> str:
    """The text of a certificate's file."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise SoftEquivError(f"{path} cannot be read as a certificate: {problem}") from None


def entries_of(text: str, where: str, what: str, marks: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a certificate's text, if they have the marks of what it should be."""
    try:
        entries = read_json(text)
    except ValueError as problem:
        raise SoftEquivError(f"{where} is not JSON, it may be cut short: {problem}; certify the model again") from None
    if not isinstance(entries, dict) or any(entries.get(name) != mark for name, mark in marks.items()):
        raise SoftEquivError(
            f"{where} is not a {what} of format {marks['format']}; it needs the softequiv that wrote it"
        )
    return entries


@contextlib.contextmanager
def saying_what_is_damaged(where: str) -> Iterator[None]:
    """Entries that are missing, or are not what is written there, as a sentence."""
    try:
        yield
    except GroupError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as problem:
        raise SoftEquivError(
            f"{where} is a damaged certificate: {type(problem).__name__}: {problem}; certify the model again"
        ) from None


def fitting(value: Any, kind: Any, name: str) -> Any:
    """A value read from JSON, if it is of the kind that is written there."""
    choices = get_args(kind) or (kind,)
    literal = get_origin(kind) is Literal
    fits = value in choices if literal else type(value) in choices or (float in choices and type(value) is int)
    if not fits:
        raise TypeError(f"{name} is {value!r}")
    return float(value) if not literal and float in choices and value is not None else value


def write_range(within: float) -> dict[str, Any]:
    """A range as JSON can hold it."""
    if math.isinf(within):
        return {"whole group": True}
    return {"radians": float(within)} if isinstance(within, Angle) else {"length": float(within)}


def read_range(entry: Mapping[str, Any]) -> float:
    """A range from JSON."""
    if entry.get("whole group"):
        return math.inf
    return Angle(entry["radians"]) if "radians" in entry else float(entry["length"])


def refuse_unnamed(group: Group) -> None:
    """A file names its group; only groups that their name stands for come back from it."""
    with contextlib.suppress(GroupError):
        if parse_group(group.name) == group:
            return
    raise GroupError(
        f"{group.name} is a group of your own, and a file can only name those of the library: keep the certificate as "
        "it is, or certify for a named group"
    )
