"""How are known files found? In a folder or inside a tar archive, gzipped or not, and read whole into memory.

Nothing is extracted and nothing unpickled; what is cut short, missing or unpacks to more than memory should hold is
said by name.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from softequiv._files import path_of
from softequiv.errors import SoftEquivError

ARCHIVES = (".tar", ".tar.gz", ".tgz")
LARGEST = 1 << 30  # bytes, unpacked; the largest file of the known data sets has 150 million
BROKEN = (tarfile.TarError, EOFError, zlib.error, OSError)  # gzip.BadGzipFile is an OSError


def stored(source: str | Path, names: Sequence[str], remedy: str) -> dict[str, bytes]:
    """The contents of files of these names, in a folder (also one folder down, also as NAME.gz) or an archive.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.bin").write_bytes(b"12")
    ...     stored(folder, ["a.bin"], "write it")
    {'a.bin': b'12'}
    """
    source = path_of(source)
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
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except BROKEN as problem:
        raise SoftEquivError(f"{path} is damaged or cut short ({problem}); download it again") from problem
    check_unpacked([len(content)], path)
    return content


def check_unpacked(sizes: Iterable[int], source: Path) -> None:
    """Raise a sentence where files of these sizes, all together, are more than any known data set."""
    if sum(sizes) > LARGEST:
        raise SoftEquivError(
            f"{source} unpacks to more than {LARGEST >> 20} MB, which no known data set does; download it again from a "
            "source that you trust"
        )


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
                    check_unpacked([member.size, *map(len, found.values())], archive)
                    found[place.name] = content.read()
                    if len(found[place.name]) != member.size:
                        raise EOFError(f"{member.name} should have {member.size} bytes")
                    if len(found) == len(names):
                        break
    except BROKEN as problem:
        raise SoftEquivError(f"{archive} is damaged or cut short ({problem}); download it again") from problem
    return found
