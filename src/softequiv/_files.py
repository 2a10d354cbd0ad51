"""How is a file written? Under a temporary name, then renamed: it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    part = target.with_name(f".{target.name}.{os.getpid()}.part")  # processes may write the same file
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
