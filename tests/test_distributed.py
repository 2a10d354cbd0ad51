"""Is a training shared out over processes the training of one? Its losses, its certificate, what is left behind, and
how it goes on with other processes than it began with.

The file is also the program that the processes run: torchrun starts it with the jobs as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import softequiv as se
from leaving import leave_together
from softequiv.adapt.opening import open_model
from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Held
from softequiv.tasks.classification import Classification
from softequiv.training import Recipe, fit, tune
from softequiv.training.loop import _Run, _Step
from softequiv.training.saved import set_weights, weights_of
from test_training import STILL, KilledError, killing, numbers
from zoo import CASES

SAME_LOSS = 1e-5
TUNED = "tuned"  # a job for `tuned`
BASE = Recipe(epochs=3, batch=8, rate=1e-2, save_every=1, seed=3)
FULL = replace(BASE, accumulate=2, ema=0.9, clip=1.0, keep="last")


@dataclass(frozen=True)
class Job:
    """One training: where, in which mode, whole on every process or sharded, and whether it is cut short."""

    folder: str
    mode: str = "parametrize"
    sharded: bool = False
    drawing: bool = True  # dropout and noise
    cut: int = 0
    recipe: dict[str, Any] | None = None


def network(job: Job) -> nn.Module:
    torch.manual_seed(1)
    dropout = nn.Dropout(0.1 if job.drawing else 0.0)
    net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Flatten(), dropout, nn.Linear(8, 3))
    return se.soften(net, "SO(2)", error=0.2, within=se.degrees(30), mode=job.mode)


def noisy(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return x + 0.1 * torch.randn(x.shape, generator=generator), y


def train(job: Job) -> None:
    """Run a job; each process tells its history and certificate, and writes the baked model."""
    net, folder = network(job), Path(job.folder)
    if job.sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
    recipe = BASE if job.recipe is None else Recipe.of(job.recipe)
    transform = noisy if job.drawing else None
    try:
        fitted = fit(net, numbers(), recipe, STILL, transform=transform, folder=folder, after_step=[killing(job.cut)])
    except KilledError:
        return
    whole = network(job)
    set_weights(whole, weights_of(net))
    certificate = se.certify(whole)
    rank = os.environ.get("RANK", "0")
    told = {"history": fitted.history, "error": certificate.error, "asked": [w.asked for w in certificate.weights]}
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    save_file(se.bake(whole).state_dict(), folder / f"baked-{rank}.safetensors")


def tuned(folder: Path) -> None:
    """Tune a classifier as the command does; processes share it by FSDP2, as accelerate has them do on GPUs."""
    task = Classification(*(pictures(seed) for seed in range(3)), classes=5)
    model = se.soften(CASES["vit"].model(), "SO(2)", error=0.2, within="30deg")
    recipe = Recipe(epochs=2, batch=4, rate=1e-3, accumulate=2)
    if torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        tune.fit = lambda net, *given, **more: fit(fully_shard(net, mesh=mesh), *given, **more)
        recipe = replace(recipe, accumulate=1)
    tune.POOL = 16
    tune.tune(model, task, recipe, tune.Turns(se.SO(2), se.degrees(30)), folder, {})


def pictures(seed: int) -> Held:
    x = torch.randn(16, 3, 20, 20, generator=torch.Generator().manual_seed(seed))
    return Held(x, torch.arange(16) % 5)


def trained_by(processes: int, *jobs: Job) -> None:
    """Run jobs, one after another, in processes started by torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, __file__, json.dumps([asdict(job) for job in jobs])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


def told(job: Job, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(job.folder) / f"told-{rank}.json").read_text())
    return found


def curve(job: Job) -> Tensor:
    lines = told(job)["history"]
    assert [json.loads(line) for line in (Path(job.folder) / "log.jsonl").read_text().splitlines()] == lines
    return torch.tensor([[line["loss"], line["error"]] for line in lines])


def baked(job: Job, rank: int = 0) -> dict[str, Tensor]:
    return load_file(Path(job.folder) / f"baked-{rank}.safetensors")


def assert_same_training(one: Job, other: Job) -> None:
    assert curve(one).shape == curve(other).shape == (BASE.epochs, 2)
    assert torch.allclose(curve(one), curve(other), rtol=0, atol=SAME_LOSS)
    assert told(one)["asked"] == told(other)["asked"]
    assert told(one)["error"] == pytest.approx(told(other)["error"], abs=1e-6)
    for name, value in baked(one).items():
        assert torch.allclose(value, baked(other)[name], rtol=0, atol=1e-4), name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes did, in one start: all that the tests look at, and trainings that were cut."""
    root = tmp_path_factory.mktemp("ranks")
    train(Job(str(root / "one to two"), cut=5, recipe=asdict(replace(BASE, accumulate=2))))
    shutil.copytree(root / "one to two", root / "two" / "one to two")
    jobs = [
        Job(str(root / "two" / f"{mode} {sharded}"), mode, sharded, recipe=asdict(FULL))
        for mode in ("parametrize", "project")
        for sharded in (False, True)
    ]
    jobs += [Job(str(root / "two" / name), cut=5) for name in ("cut", "again")]
    jobs += [Job(str(root / "two" / name)) for name in ("again", "whole")]
    jobs += [Job(str(root / "two" / "still cut"), drawing=False, cut=5)]
    jobs += [Job(str(root / "two" / "sharded cut"), "project", True, cut=9, recipe=asdict(FULL))]
    jobs += [Job(str(root / "two" / "one to two"), recipe=asdict(replace(BASE, accumulate=2)))]
    jobs += [Job(str(root / "two" / "tuned"), TUNED)]
    trained_by(2, *jobs)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("mode", ["parametrize", "project"])
def test_two_processes_train_the_model_of_one(home: Path, mode: str, sharded: bool) -> None:
    two = Job(str(home / "two" / f"{mode} {sharded}"))
    one = Job(str(home / f"one {mode} {sharded}"), mode, recipe=asdict(replace(FULL, accumulate=4)))
    train(one)
    assert_same_training(one, two)
    assert told(two)["error"] <= 0.2 * (1 + 1e-4)
    assert told(two, 0) == told(two, 1)
    digests = [hashlib.sha256((Path(two.folder) / f"baked-{r}.safetensors").read_bytes()).digest() for r in (0, 1)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_processes_dropout_and_noise_included(home: Path) -> None:
    one = Job(str(home / "whole"), recipe=asdict(replace(BASE, accumulate=2)))
    train(one)
    resumed = Job(str(home / "two" / "cut"))
    assert len(told_lines(resumed)) == 1  # the first epoch of three was done
    train(resumed)
    assert_same_training(one, resumed)


@pytest.mark.slow
def test_a_training_goes_on_with_more_processes_dropout_and_noise_included(home: Path) -> None:
    one = Job(str(home / "whole for two"), recipe=asdict(replace(BASE, accumulate=2)))
    train(one)
    assert_same_training(one, Job(str(home / "two" / "one to two")))


@pytest.mark.slow
def test_a_sharded_training_goes_on_in_one_process(home: Path) -> None:
    one = Job(str(home / "whole project"), "project", recipe=asdict(replace(FULL, accumulate=4)))
    resumed = Job(str(home / "two" / "sharded cut"), "project", recipe=asdict(FULL))
    train(one)
    train(resumed)
    assert_same_training(one, resumed)


@pytest.mark.slow
def test_processes_that_do_not_divide_the_batches_take_the_same_examples(home: Path) -> None:
    one = Job(str(home / "still whole"), drawing=False, recipe=asdict(replace(BASE, batch=16)))
    train(one)
    three = Job(str(home / "two" / "still cut"), drawing=False)
    trained_by(3, three)
    assert_same_training(one, three)


@pytest.mark.slow
def test_a_model_that_was_sharded_is_left_behind_whole(home: Path) -> None:
    tuned(home / "tuned")
    found = []
    for folder in (home / "tuned", home / "two" / "tuned"):
        result = json.loads((folder / "result.json").read_text())
        model = open_model(folder / "model")
        assert se.certify(model).error <= 0.2 * (1 + 1e-4)
        with torch.no_grad():
            found.append((result["history"], result["test"], model(pictures(2).inputs).logits))
    (one, tested, answers), (two, tested_two, answers_two) = found
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=SAME_LOSS)
    assert tested == pytest.approx(tested_two, abs=1e-4) and torch.allclose(answers, answers_two, atol=1e-4)


@pytest.mark.slow
def test_a_training_cut_and_taken_up_by_as_many_processes_is_the_same_to_the_bit(home: Path) -> None:
    whole, again = (Job(str(home / "two" / name)) for name in ("whole", "again"))
    assert told(whole) == told(again)
    assert all(torch.equal(value, baked(again)[name]) for name, value in baked(whole).items())


def test_a_step_keeps_its_examples_whoever_shares_them() -> None:
    step = _Step.of(Recipe(batch=8, accumulate=2), 64, 2)
    assert step == _Step(32, 4) == step.shared_by(2) == step.shared_by(1) == step.shared_by(4)
    assert [step.shared_by(n).batches for n in (3, 5, 32)] == [6, 5, 32]
    with pytest.raises(SoftEquivError, match="takes 32 examples, too few for 33 batches in 33 processes; start fewer"):
        step.shared_by(33)


def test_processes_that_would_train_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(str(tmp_path))
    fit(network(job), numbers(), replace(BASE, epochs=1), STILL)  # accelerate has looked: one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SoftEquivError, match=r"2 processes were started .* accelerate sees 1, so each would"):
        train(job)


def test_processes_that_see_different_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Run, "_of_all", lambda run, value: [value, value + 5])
    with pytest.raises(
        SoftEquivError, match=r"different trainings in .* \(steps done: \[0, 5\]\); give them one folder"
    ):
        train(Job(str(tmp_path)))


def told_lines(job: Job) -> list[str]:
    return (Path(job.folder) / "log.jsonl").read_text().splitlines()


if __name__ == "__main__":
    PartialState(cpu=True)  # before the first mesh
    for given in json.loads(sys.argv[1]):
        job = Job(**given)
        tuned(Path(job.folder)) if job.mode == TUNED else train(job)
        torch.distributed.barrier()
    leave_together(Path(job.folder))
