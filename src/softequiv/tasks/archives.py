"""How are known files found? In a folder or inside a tar archive, gzipped or not, and read whole into memory.

Nothing is extracted and nothing unpickled; what is cut short or missing is said by name.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from softequiv.errors import SoftEquivError

ARCHIVES = (".tar", ".tar.gz", ".tgz")
BROKEN = (tarfile.TarError, EOFError, zlib.error, OSError)  # gzip.BadGzipFile is an OSError


def stored(source: str | Path, names: Sequence[str], remedy: str) -> dict[str, bytes]:
    """The contents of files of these names, in a folder (also one folder down, also as NAME.gz) or an archive.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.bin").write_bytes(b"12")
    ...     stored(folder, ["a.bin"], "write it")
    {'a.bin': b'12'}
    """
    source = Path(source)
    if source.is_dir():
        found = {name: _whole(path) for name in names if (path := located(source, name)) is not None}
    elif source.is_file() and source.name.endswith(ARCHIVES):
        found = _members(source, names)
    else:
        what = "is neither a folder nor one of " + ", ".join(ARCHIVES) if source.exists() else "does not exist"
        raise SoftEquivError(f"{source} {what}; {remedy}")
    missing = [name for name in names if name not in found]
    if missing:
        raise SoftEquivError(f"{source} holds no {', '.join(missing)}; {remedy}")
    return found


def located(folder: Path, name: str) -> Path | None:
    """Where a file of that name lies, plain before gzipped, here before one folder down."""
    for ending in ("", ".gz"):
        for path in (folder / (name + ending), *sorted(folder.glob(f"*/{name}{ending}"))):
            if path.is_file():
                return path
    return None


def _whole(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except BROKEN as problem:
        raise SoftEquivError(f"{path} is damaged or cut short ({problem}); download it again") from problem


def _members(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """One pass over the archive, as a gzipped one cannot be read from the middle."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as members:
            for member in members:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts:
                    raise SoftEquivError(
                        f"{archive} names a file {member.name!r} outside its own folder, which no data set does; "
                        "download it again from a source that you trust"
                    )
                content = members.extractfile(member) if member.isfile() and place.name in names else None
                if content is not None:
                    found[place.name] = content.read()
                    if len(found[place.name]) != member.size:
                        raise EOFError(f"{member.name} should have {member.size} bytes")
                    if len(found) == len(names):
                        break
    except BROKEN as problem:
        raise SoftEquivError(f"{archive} is damaged or cut short ({problem}); download it again") from problem
    return found
