"""Are cells on a cluster those of one machine? Each is computed and counted once whatever dies: a worker, a node, or
the process that asked."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from softequiv.cli import commands
from softequiv.errors import MissingDataError, SoftEquivError
from softequiv.experiments.base import Experiment, reproduce
from softequiv.experiments.cells import Cell, Work, keep, read_row, run_cells
from softequiv.experiments.ray_cells import OnRay, there
from softequiv.experiments.watched import Progress
from test_experiments import cells, computed, page, work
from zoo import CASES

TESTS = str(Path(__file__).resolve().parent)


def test_without_ray_a_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SoftEquivError, match=r"need ray: pip install 'softequiv\[ray\]'"):
        run_cells(cells(tmp_path), work, tmp_path / "cells", runner=OnRay())
    assert list((tmp_path / "cells").iterdir()) == []


class Elsewhere:
    """A runner that sends cells through JSON, as another machine would, and hears of the last one first."""

    def __call__(self, given: Sequence[Cell], work: Work, folder: Path) -> Iterator[tuple[Cell, str]]:
        for cell in reversed(given):
            sent = Cell(cell.experiment, json.loads(json.dumps(cell.settings)))
            yield cell, keep(cell, json.loads(json.dumps(there(sent, work, 1, "data"))), folder)

    def standing(self) -> str | None:
        return "elsewhere"


def test_any_runner_fills_the_same_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTEQUIV_DATA", "here")  # which a worker leaves alone
    run_cells(cells(tmp_path, 2), work, tmp_path / "cells")
    rows = run_cells(cells(tmp_path), work, tmp_path / "cells", runner=Elsewhere())
    assert [row["square"] for row in rows] == [0, 1, 4, 9] and computed(tmp_path) == [0, 1, 2, 3]
    assert "[1/2] number=3" in capsys.readouterr().out
    with pytest.raises(SoftEquivError, match=r"1 of 6 cells failed.*number=5.*no such luck"):
        run_cells(cells(tmp_path, 6, fails=5), work, tmp_path / "cells", runner=Elsewhere())
    with pytest.raises(MissingDataError, match="digits are not there; fetch them; none of 1 cells was computed"):
        run_cells(cells(tmp_path, 1, lacks=0), work, tmp_path / "cells", runner=Elsewhere())
    experiment = Experiment("X", "Squares", lambda scale: cells(tmp_path), work, page)
    assert reproduce(experiment, "smoke", out=tmp_path / "out", runner=Elsewhere()).is_file()


def test_the_table_says_how_far_it_is() -> None:
    from rich.console import Console

    progress = Progress(4, [("seed=0", ""), ("seed=1", "ValueError: no")], time.perf_counter() - 10)
    out = io.StringIO()
    Console(width=80, file=out).print(progress.table(lambda: "2 nodes, 3 of 4 CPUs taken"))
    text = " ".join(out.getvalue().split())
    for part in ("2 of 4 cells, 1 failed;", "about 10 s left", "seed=1", "ValueError: no", "3 of 4 CPUs taken"):
        assert part in text
    assert "no cell has ended yet" in str(Progress(4).table(lambda: "").title)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:nowhere"])
def test_a_cluster_that_does_not_answer_is_told_in_a_sentence(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(SoftEquivError, match=r"no Ray cluster answers at .*127\.0\.0\.1:.*; start one with ray start"):
        run_cells(cells(tmp_path), work, tmp_path / "cells", runner=OnRay(address))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes: one that the asking process is on, and one that can be killed."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def seconds_until(done: Any, patience: float = 300) -> None:
    until = time.monotonic() + patience
    while not done():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.05)


def doomed_work(settings: Any) -> dict[str, Any]:
    """What a cell computes; on a node that is to die it never ends."""
    doomed = "DOOMED" in os.environ
    with Path(settings["log"]).open("a") as log:
        log.write(f"{settings['number']} {doomed:d}\n")
    time.sleep(1000 if doomed else settings["seconds"])
    return {"square": settings["number"] ** 2}


@pytest.mark.slow
def test_a_node_that_is_killed_loses_no_cell_and_none_counts_twice(cluster: Any, tmp_path: Path) -> None:
    second = cluster.add_node(num_cpus=2, env_vars={"DOOMED": "1"})
    given, runner = cells(tmp_path, 8, seconds=0.5), OnRay(cluster.address)
    states: list[str | None] = []

    def begun() -> list[tuple[int, bool]]:
        if not (tmp_path / "log").exists():
            return []
        return [(int(line[:-2]), line[-1] == "1") for line in (tmp_path / "log").read_text().splitlines()]

    def kill_when_busy() -> None:
        seconds_until(lambda: sum(doomed for _, doomed in begun()) == 2)
        states.append(runner.standing())
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_when_busy)
    killer.start()
    rows = run_cells(given, doomed_work, tmp_path / "cells", runner=runner)
    killer.join()
    assert [row["square"] for row in rows] == [number**2 for number in range(8)]
    assert states[0] is not None and states[0].startswith("2 nodes")
    lost = {number for number, doomed in begun() if doomed}
    assert len(lost) == 2 and sorted(number for number, doomed in begun() if not doomed) == list(range(8))
    assert len([*(tmp_path / "cells").iterdir()]) == 8  # one file each, also of those that began twice
    before = begun()
    assert run_cells(given, doomed_work, tmp_path / "cells", runner=runner) == rows and begun() == before


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_a_cell_that_fails_is_not_repeated(
    cluster: Any, tmp_path: Path
) -> None:
    runner = OnRay(cluster.address)
    with pytest.raises(SoftEquivError, match=r"1 of 4 cells failed.*number=1.*no such luck"):
        run_cells(cells(tmp_path, dies=3, fails=1), work, tmp_path / "cells", runner=runner)
    assert computed(tmp_path) == [0, 1, 2, 3, 3]
    (tmp_path / "log.dead").unlink()
    with pytest.raises(SoftEquivError, match=r"number=2.*its worker was lost 1 times \(WorkerCrashedError\)"):
        run_cells(cells(tmp_path, dies=2), work, tmp_path / "cells", runner=OnRay(cluster.address, retries=0))


DRIVER = """
import sys
from pathlib import Path
from test_experiments import cells, run_cells, work
from softequiv.experiments.ray_cells import OnRay
run_cells(cells(Path({folder!r}), 8, seconds=1.0), work, Path({folder!r}) / "cells", runner=OnRay({address!r}))
"""


@pytest.mark.slow
def test_the_process_that_asks_can_be_killed_and_started_again(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(folder=str(tmp_path), address=cluster.address))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL) as driver:
        seconds_until(lambda: len([*(tmp_path / "cells").glob("*.json")]) >= 2)
        driver.send_signal(signal.SIGKILL)
    given = cells(tmp_path, 8, seconds=1.0)
    done = [cell for cell in given if read_row(tmp_path / "cells", cell)]
    assert 2 <= len(done) < 8
    rows = run_cells(given, work, tmp_path / "cells", runner=OnRay(cluster.address))
    assert [row["square"] for row in rows] == [number**2 for number in range(8)]
    assert all(computed(tmp_path).count(cell.settings["number"]) == 1 for cell in done)


@pytest.mark.slow
def test_a_sweep_on_a_cluster_finds_what_one_here_finds(cluster: Any, tmp_path: Path) -> None:
    CASES["vit"].model().save_pretrained(tmp_path / "vit")
    given = ["sweep", str(tmp_path / "vit"), "-g", "SO(2)", "-s", "0.2", "-e", "0.1", "-w", "30deg", "--json"]
    found = []
    on_ray = ["--on", "ray", "--address", cluster.address]
    for place in (["-o", str(tmp_path / "a")], ["-o", str(tmp_path / "b"), *on_ray]):
        result = CliRunner().invoke(commands.app, [*given, *place])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["rows"])
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow
def test_a_cluster_of_its_own_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(SoftEquivError, match="no node of the cluster has 1 CPUs and 9999 GPUs for a cell; ask for"):
        run_cells(cells(tmp_path), work, tmp_path / "cells", runner=OnRay(gpus=9999))
    rows = run_cells(cells(tmp_path), work, tmp_path / "cells", runner=OnRay(cpus=0.5))
    assert [row["square"] for row in rows] == [0, 1, 4, 9] and not ray.is_initialized()
