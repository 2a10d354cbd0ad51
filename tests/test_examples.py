"""Examples and documentation run: the worked example, and every python block of the README and the docs."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WORKED_EXAMPLE = ROOT / "examples" / "worked_example.py"


def python_blocks(page: str) -> list[str]:
    """What stands between ```python and ```."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_only_python_blocks_are_found() -> None:
    page = "```text\nno\n```\n\n```python\nyes = 1\n```\nbetween\n```python\nalso = yes\n```\n"
    assert python_blocks(page) == ["yes = 1\n", "also = yes\n"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share their names, as a reader would type them one after another."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(python_blocks(page.read_text()), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_readme_shows_code() -> None:
    assert python_blocks((ROOT / "README.md").read_text())


def test_no_page_waits_for_a_figure() -> None:
    for page in PAGES:
        assert not re.findall(r"@[A-Z]+@", page.read_text()), f"{page.name} has places that were never filled"


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}, which does not exist"


def test_every_page_stands_in_the_sites_navigation() -> None:
    """As strict builds have it; pages that git does not know yet count too, unless it ignores them."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "docs"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("this is no clone")
    pages = {line.removeprefix("docs/") for line in found.stdout.split() if line.endswith(".md")}
    there = {page for page in pages if (ROOT / "docs" / page).is_file()}
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"^ *- .*: (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(there)


def test_the_worked_example_gives_the_papers_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(WORKED_EXAMPLE))["main"](["--out", str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    for row in ("2 3 1 -> 3 2 1", "-1 4 2 -> -2 3 2", "3 -1 5 -> 3 -1 5"):
        assert row in printed
    assert (tmp_path / "dial.png").stat().st_size > 10_000


def test_the_worked_example_measures_no_more_than_it_certifies(tmp_path: Path) -> None:
    example = runpy.run_path(str(WORKED_EXAMPLE))
    kernels = example["smooth_kernels"](8, 7)
    assert example["measured"](kernels) <= example["certified"](kernels) + 1e-9


@pytest.mark.parametrize("program", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda program: program.stem)
def test_a_benchmark_finds_what_it_imports(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(program.parent)
    assert callable(runpy.run_path(str(program), run_name=program.stem)["main"])
