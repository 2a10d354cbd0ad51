"""How are files named, written and read? A path is refused where it could be none; a file is written under a
temporary name, then renamed, and appears whole or not at all; JSON is read so that every text that is none is a
ValueError.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from softequiv.errors import SoftEquivError

LONGEST_NAME = 255  # bytes of a file's name, on all usual file systems
HOST = re.sub(r"\W", "-", platform.node())[:32]


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """The temporary path to write to; it becomes `path` if nothing goes wrong, and vanishes if something does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with written_whole(Path(folder) / "a.txt") as part:
    ...         _ = part.write_text("all of it")
    ...     [p.name for p in Path(folder).iterdir()]
    ['a.txt']
    """
    target = Path(path)
    part = unfinished(target)
    try:
        with saying_what_failed(target):
            yield part
            os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):  # where there is no such folder nothing was left either
            part.unlink(missing_ok=True)


@contextmanager
def saying_what_failed(target: Path) -> Iterator[None]:
    """A disk that fills, or a place where nothing can be written, as a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise SoftEquivError(
            f"{target} could not be written ({reason}); make room on the disk and start again, or choose another place"
        ) from problem


def made_folder(path: Path) -> Path:
    """The folder of that name, with those above it; where there can be none, a sentence says so.

    >>> made_folder(Path()).is_dir()
    True
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SoftEquivError(
            f"{path} cannot be made a folder ({problem.strerror or problem}); choose another name"
        ) from problem
    return path


def unfinished(target: Path) -> Path:
    """A new place to write what becomes `target`, a file or folder; other threads, processes and machines that share
    the folder may be writing the same, each in a place of its own.
    """
    return target.with_name(f".{target.name}.{HOST}.{os.getpid()}.{secrets.token_hex(4)}.part")


def clear_unfinished(target: Path) -> None:
    """Remove what processes of this machine that are no more left of a file or folder that they were writing; it can be
    large.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{HOST}\.(\d+)\.[0-9a-f]+\.part")
    for part in target.parent.glob(".*.part"):
        found = pattern.fullmatch(part.name)
        if found and not lives(int(found[1])):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    """Whether a process of this machine has that number; where asking would end it, on Windows, all are said to."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # someone else's, or a number that no process has
        return True
    return True


def read_json(text: str | bytes) -> Any:
    """What a JSON text holds; one that is cut short, no text, nested too deeply or of endless numbers is a ValueError.

    >>> read_json('{"epochs": 3}')
    {'epochs': 3}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except TypeError as problem:
        raise ValueError(str(problem)) from None


def path_of(value: Any) -> Path:
    """A path from what a user gave; what names no file on any system is refused.

    >>> path_of("data").name
    'data'
    """
    if not isinstance(value, (str, os.PathLike)):
        raise SoftEquivError(f"a path is a text such as 'data/pictures'; got {value!r}")
    path = Path(value)
    if "\0" in str(path) or any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        raise SoftEquivError(
            f"no file has a name such as {str(path)[:60]!r}, of {len(str(path))} characters; check the path"
        )
    return path
