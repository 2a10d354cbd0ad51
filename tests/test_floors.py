"""Do imports point down only? Every file is parsed, and each import of ours must come from a lower floor."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "softequiv"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE

# Bottom to top. Rooms on one floor do not import each other; a room may import itself and all floors below it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "_linalg", "_cache", "_files", "_text", "_version"),  # helpers for everyone, free among themselves
    ("groups",),
    ("reps",),
    ("actions",),
    ("spectrum",),
    ("gains",),
    ("nn",),
    ("asking",),
    ("adapt",),
    ("certify", "measure"),
    ("baselines",),
    ("networks",),
    ("holding",),
    ("tasks",),
    ("training",),
    ("report",),
    ("experiments",),
    ("cli",),
)
EXEMPT = ("__init__", "testing", "__main__")  # the package's front door, and the test helpers that ship with it

HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}


def files_of(root: Path) -> list[Path]:
    """Every Python file of the package below `root`, in a fixed order."""
    return sorted(root.rglob("*.py"))


def room_of(path: Path, root: Path) -> str:
    """The first name below the package: `reps/grid.py` is in `reps`, `errors.py` in `errors`."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def imported_rooms(path: Path, root: Path) -> list[tuple[int, str]]:
    """Line and room of every import of the package's own modules, wherever in the file it stands.

    An import of the package itself counts as the room `__init__`.
    """
    # The dotted name of the package that holds this file: what one leading dot means.
    here = (PACKAGE, *path.relative_to(root).parts[:-1])
    rooms: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        targets: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            # `from softequiv import x`: x is a room if there is such a file or folder, else a name of the front door.
            targets = [(*module, alias.name) for alias in node.names] if module == (PACKAGE,) else [module]
        for target in targets:
            if target[0] != PACKAGE:
                continue
            name = target[1] if len(target) > 1 else "__init__"
            is_room = name in HEIGHT or (root / name).is_dir() or (root / f"{name}.py").is_file()
            rooms.append((node.lineno, name if is_room else "__init__"))
    return rooms


def violations(root: Path) -> list[str]:
    """One sentence for each import that does not point down, and for each room without a floor."""
    found: list[str] = []
    unknown: set[str] = set()
    for path in files_of(root):
        room = room_of(path, root)
        if room in EXEMPT:
            continue
        if room not in HEIGHT:
            if room not in unknown:
                unknown.add(room)
                found.append(f"{PACKAGE}.{room} has no floor: add it where it belongs in FLOORS, tests/test_floors.py.")
            continue
        for line, target in imported_rooms(path, root):
            where = f"{path.relative_to(root)}:{line}"
            if target == room:
                continue
            if target in EXEMPT:
                what = f"the package {PACKAGE} itself" if target == "__init__" else f"{PACKAGE}.{target}"
                found.append(f"{where} imports {what}, which is above all floors: import the module that defines it.")
            elif target not in HEIGHT:
                continue  # reported above, as a room without a floor
            elif HEIGHT[target] > HEIGHT[room]:
                found.append(f"{where} imports {PACKAGE}.{target} from {PACKAGE}.{room}: imports point down only.")
            elif HEIGHT[target] == HEIGHT[room] != 0:
                found.append(f"{where} imports {PACKAGE}.{target} from {PACKAGE}.{room}, its neighbour on one floor.")
    return found


def test_imports_point_down_only() -> None:
    assert files_of(SOURCE), f"no Python files found under {SOURCE}"
    assert violations(SOURCE) == []


def small_house(root: Path, files: dict[str, str]) -> Path:
    """Write a made-up package below `root` and return its folder."""
    house = root / PACKAGE
    for name, text in files.items():
        path = house / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return house


@pytest.mark.parametrize(
    "statement",
    [
        "import softequiv.nn",
        "import softequiv.nn.linear as linear",
        "from softequiv.nn import Linear",
        "from softequiv.nn.linear import Linear",
        "from softequiv import nn",
        "from .. import nn",
        "from ..nn import Linear",
        "from ..nn.linear import Linear",
        "def late():\n    from ..nn import Linear",
        "if True:\n    import softequiv.nn",
    ],
)
def test_an_upward_import_is_caught_however_it_is_written(tmp_path: Path, statement: str) -> None:
    house = small_house(tmp_path, {"groups/so.py": statement, "nn/linear.py": ""})
    assert [sentence.split(":")[0] for sentence in violations(house)] == [str(Path("groups") / "so.py")]


def test_downward_and_inner_imports_are_allowed(tmp_path: Path) -> None:
    house = small_house(
        tmp_path,
        {
            "__init__.py": "from .cli import main\nfrom .groups import SO",
            "testing.py": "from .nn import Linear",
            "errors.py": "from . import _linalg\nimport os",
            "_linalg.py": "import torch\nfrom torch import nn",
            "groups/__init__.py": "from .so import SO\nfrom ..errors import SoftEquivError",
            "groups/so.py": "from . import base\nfrom .base import Group\nfrom softequiv.errors import SoftEquivError",
            "groups/base.py": "",
            "nn/linear.py": "import torch.nn\nfrom ..gains import hard\nfrom ..groups.so import SO",
            "nn/conv.py": "from .._linalg import solve\nfrom .linear import Linear",
            "gains/__init__.py": "",
        },
    )
    assert violations(house) == []


def test_helpers_import_nothing_above_them(tmp_path: Path) -> None:
    house = small_house(tmp_path, {"_cache.py": "from .groups import SO", "groups/__init__.py": ""})
    assert len(violations(house)) == 1


@pytest.mark.parametrize(("room", "neighbour"), [("certify", "measure"), ("measure", "certify")])
def test_neighbours_on_one_floor_do_not_import_each_other(tmp_path: Path, room: str, neighbour: str) -> None:
    house = small_house(tmp_path, {f"{room}.py": f"from .{neighbour} import x", f"{neighbour}.py": "x = 1"})
    (sentence,) = violations(house)
    assert "neighbour" in sentence


def test_the_front_door_is_not_imported_from_inside(tmp_path: Path) -> None:
    house = small_house(tmp_path, {"groups/so.py": "import softequiv as se", "nn/a.py": "from softequiv import SO"})
    assert len(violations(house)) == 2


def test_a_room_without_a_floor_is_reported_once(tmp_path: Path) -> None:
    house = small_house(tmp_path, {"attic/a.py": "", "attic/b.py": "from ..nn import Linear", "nn/linear.py": ""})
    (sentence,) = violations(house)
    assert "softequiv.attic has no floor: add it" in sentence
