"""Does a command that is killed, again and again, at any moment, end with the figures of one that nobody disturbed?"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from softequiv.adapt.opening import open_model
from softequiv.training import saved
from zoo import CASES

KILLS = 20
PATIENCE = 300  # seconds for a command that takes a few
PRELOADED = ["softequiv.cli.commands", "softequiv.experiments.t6", "softequiv.training.tune", "transformers"]


def command(arguments: list[str], log: Path) -> None:
    """What a process does: a command of the shell, with few turns to draw."""
    from softequiv.cli import main
    from softequiv.training import tune

    tune.POOL = 16
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.argv = ["softequiv", *arguments]
        main()


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Processes that need not import everything first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def started(server: ForkServerContext, arguments: list[str], log: Path) -> ForkServerProcess:
    process = server.Process(target=command, args=(arguments, log))
    process.start()
    return process


def finished(server: ForkServerContext, arguments: list[str], log: Path) -> float:
    """Run a command to its end; how long it took."""
    began = time.perf_counter()
    process = started(server, arguments, log)
    process.join(PATIENCE)
    assert process.exitcode == 0, log.read_text()
    return time.perf_counter() - began


def killed_until_done(
    server: ForkServerContext,
    arguments: Callable[[Path], list[str]],
    root: Path,
    readable: Callable[[Path], None],
    found: Callable[[Path], Any],
) -> int:
    """Kill a command KILLS times, starting it again each time, in a new folder whenever it was faster than its killer;
    how many of the folders came to their end, each as if undisturbed."""
    log = root / "log.txt"
    finished(server, arguments(root / "first"), log)  # the server imports before its first process
    whole = root / "whole"
    duration = finished(server, arguments(whole), log)
    expected = found(whole)
    assert expected == found(root / "first")
    draws, kills, done = random.Random(0), 0, 0
    folder = root / "0"
    while kills < KILLS:
        process = started(server, arguments(folder), log)
        process.join(draws.uniform(0, duration))
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            readable(folder)
            continue
        assert process.exitcode == 0, log.read_text()
        assert found(folder) == expected
        done += 1
        folder = root / str(done)
    finished(server, arguments(folder), log)
    assert found(folder) == expected
    return done + 1


def whole_files(folder: Path) -> list[Path]:
    """All files but those that say by their name that they are not finished."""
    return [p for p in folder.rglob("*") if p.is_file() and not any(n.endswith(".part") for n in p.parts)]


def readable(folder: Path) -> None:
    """Every file there can be read to its end."""
    for path in whole_files(folder):
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()]
        elif path.name == "training.safetensors":
            assert saved.read(path)[1]["standing"]["step"] > 0
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    if (folder / "model").is_dir():
        open_model(folder / "model")


@pytest.mark.slow
def test_a_training_killed_at_twenty_moments_ends_as_if_undisturbed(server: ForkServerContext, tmp_path: Path) -> None:
    CASES["vit"].model().save_pretrained(tmp_path / "vit")
    draws = np.random.default_rng(0)
    for label in range(5):
        (tmp_path / "pictures" / f"class{label}").mkdir(parents=True)
        for number in range(5):
            pixels = draws.integers(0, 40, (24, 24, 3), dtype=np.uint8) + np.uint8(40 * label)
            Image.fromarray(pixels).save(tmp_path / "pictures" / f"class{label}" / f"{number}.png")
    recipe = {"epochs": 4, "batch": 4, "rate": 0.01, "save_every": 1, "ema": 0.9}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    soft = ["--group", "SO(2)", "--error", "0.2", "--within", "30deg", "--turn", "30deg"]
    given = [str(tmp_path / "vit"), "-d", str(tmp_path / "pictures"), "--recipe", str(tmp_path / "recipe.json"), *soft]

    def found(folder: Path) -> dict[str, Any]:
        weights = load_file(folder / "model" / "model.safetensors")
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())
        result = json.loads((folder / "result.json").read_text())
        figures = {name: result[name] for name in ("history", "best", "test", "data")}
        return {**figures, "weights": {name: value.numpy().tobytes() for name, value in weights.items()}}

    root = tmp_path / "runs"
    root.mkdir()
    killed_until_done(server, lambda folder: ["train", *given, "-o", str(folder)], root, readable, found)


@pytest.mark.slow
def test_an_experiment_killed_at_twenty_moments_ends_as_if_undisturbed(
    server: ForkServerContext, tmp_path: Path
) -> None:
    def found(folder: Path) -> dict[str, Any]:
        cells = {path.name: json.loads(path.read_text()) for path in (folder / "cells").rglob("*.json")}
        figures = {name: cell["figures"] for name, cell in cells.items()}
        return {**figures, "table": (folder / "T6-smoke.csv").read_text()}

    def arguments(folder: Path) -> list[str]:
        return ["reproduce", "T6", "--scale", "smoke", "--out", str(folder)]

    killed_until_done(server, arguments, tmp_path, readable, found)
