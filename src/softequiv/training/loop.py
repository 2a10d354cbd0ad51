"""The one training loop: any model, any task, any objective; on one core, a GPU, or many processes by accelerate.

A step takes the same examples in the same batches however many processes share them, and every batch has a random seed
of its own, made of the run's seed, the step and the batch. A training that resumes at any step, with any number of
processes, therefore gives the same result as one that was never interrupted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from softequiv._files import clear_unfinished, made_folder, path_of, written_whole
from softequiv.actions import Moves
from softequiv.adapt.opening import HALF, in_float32
from softequiv.asking.answers import tensor_of
from softequiv.errors import SoftEquivError
from softequiv.measure.progress import progress
from softequiv.nn import hold
from softequiv.nn.constraints import projected_weights
from softequiv.nn.module import check_module
from softequiv.tasks.base import Task
from softequiv.training.average import Average
from softequiv.training.parameters import optimizer_of
from softequiv.training.recipe import Recipe
from softequiv.training.saved import (
    Tensors,
    fits,
    moments_of,
    read,
    saying_what_is_damaged,
    set_moments,
    set_weights,
    weights_of,
    write,
)

Loss = Callable[[Tensor, Tensor], Tensor]
Objective = Callable[[nn.Module, Tensor, Tensor, Loss, torch.Generator], Tensor]
Transform = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]

CHECKPOINT, LOG = "training.safetensors", "log.jsonl"
# the streams of numbers that order the examples, and that drop out in the batches, downwards; the batches of a step
# draw from those from 0, and what is dropped must not depend on how a picture was varied
ORDER, DROPOUT = -1, -2
OVER, SLACK = "over the target", 0.2  # of a target that an objective holds: the running error above it, as a part of it
LARGE_PRIME, MASK = 1_000_003, 2**63 - 1


def plain(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """The objective of ordinary training: the task's loss."""
    return loss(tensor_of(model(x)), y)


@dataclass
class Fitted:
    """The result of a training: one line of figures for each evaluation, and the index of the best."""

    history: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None
    seconds: float = 0.0
    device: str = "cpu"


def fit(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    moves: Moves,
    *,
    objective: Objective = plain,
    transform: Transform | None = None,
    folder: str | Path | None = None,
    after_step: Sequence[Callable[[int], None]] = (),
) -> Fitted:
    """Train a model in place: theta <- argmin of the mean objective, by the recipe; it keeps the best weights seen.

    `moves` are the elements under which validation figures are computed; `transform` changes each batch before the
    objective sees it; `after_step` are called with the number of steps done. With a `folder`, the training is saved
    there every `save_every` steps and after each epoch, including the state of the objective and of the callbacks if
    they have a `state_dict` of tensors. A later call with the same arguments resumes it and ends with the same weights,
    also with another number of processes; batches become smaller if that number does not divide theirs.

    Weights softened in project mode are held to their constraint. Weights in half precision become float32 and stay so,
    since small steps would be lost in them; bf16 is the precision of the passes alone. If the objective holds a target,
    the best weights are chosen among those that keep it to within a fifth: accuracy is often highest before the price
    has had its effect.

    >>> from softequiv.actions import Still
    >>> from softequiv.groups import C
    >>> from softequiv.tasks import Classification, Held
    >>> x = torch.randn(64, 2)
    >>> half = Held(x, (x[:, 0] > 0).long())
    >>> task, recipe = Classification(half, half, half, classes=2), Recipe(epochs=20, rate=0.1, batch=16)
    >>> fit(nn.Linear(2, 2), task, recipe, Moves(Still(), C(1))).history[-1]["Acc"] > 0.9
    True
    """
    check_module(model)
    for value, kind in ((task, Task), (recipe, Recipe), (moves, Moves)):
        if not isinstance(value, kind):
            raise SoftEquivError(
                f"fit takes a model, a Task, a Recipe and Moves in this order; got {type(value).__name__} instead of "
                f"{kind.__name__}"
            )
    place = None if folder is None else path_of(folder)
    run = _Run(model, task, recipe, moves, objective, transform, place, after_step)
    steps = range(run.standing.step, recipe.epochs * run.per_epoch)
    device = run.accelerator.device
    # every step seeds what dropout draws from; what the caller draws next must not be the same after every training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for step in progress(steps, "training", len(steps)):
                run.take(step)
                run.look(step)
            return run.finish()
        finally:
            run.leave()


@dataclass
class _Standing:
    """Where a training stands; what a checkpoint tells beside its tensors."""

    step: int = 0
    loss: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Step:
    """What a step takes, of all processes together: so many examples, in so many batches."""

    examples: int
    batches: int

    @classmethod
    def of(cls, recipe: Recipe, examples: int, processes: int) -> _Step:
        """The recipe's batches in every process; few examples are shared out evenly."""
        batches = recipe.accumulate * processes
        if examples < batches:
            raise SoftEquivError(
                f"a step of {recipe.accumulate} batches in each of {processes} processes needs {batches} "
                f"examples, and there are {examples}; lower accumulate, start fewer processes, or give more"
            )
        return cls(min(recipe.batch, examples // batches) * batches, batches)

    def shared_by(self, processes: int) -> _Step:
        """The same examples in as many batches for each process, none of them larger."""
        batches = processes * math.ceil(self.batches / processes)
        if batches > self.examples:
            raise SoftEquivError(
                f"a step of this training takes {self.examples} examples, too few for {batches} batches in {processes} "
                "processes; start fewer processes"
            )
        return _Step(self.examples, batches)


class _Run:
    """A training under way."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        recipe: Recipe,
        moves: Moves,
        objective: Objective,
        transform: Transform | None,
        folder: Path | None,
        after_step: Sequence[Callable[[int], None]],
    ) -> None:
        self.accelerator = accelerator = _accelerator(recipe)
        self.model, self.recipe, self.moves = _wide(model.to(accelerator.device)), recipe, moves
        self.objective, self.transform, self.folder, self.after_step = objective, transform, folder, after_step
        with_state: list[Any] = [part for part in (objective, *after_step) if hasattr(part, "state_dict")]
        self.kept = {f"kept-{number}": part for number, part in enumerate(with_state)}
        self.task = task.to(accelerator.device)
        own = optimizer_of(model, recipe)
        if projected_weights(model):
            hold(model, own)
        if isinstance(model, FSDPModule):  # sharded already
            self.running: nn.Module = model
            self.optimizer = own
        else:
            self.running, prepared = accelerator.prepare(model, own)
            self.optimizer = prepared.optimizer
        self.average = Average(model, recipe.ema) if recipe.ema is not None else None
        self.standing = _Standing()
        self.best: Tensors | None = None
        # what a step's number means depends on these
        examples = {"training examples": task.train, "validation examples": task.validation}
        self.given = {name: part.fingerprint for name, part in examples.items()} if folder else {}
        if folder and (folder / CHECKPOINT).is_file():
            self.planned = self._resume(folder / CHECKPOINT)
        else:
            self.planned = _Step.of(recipe, len(task.train), accelerator.num_processes)
        self._agree()
        self.step = self.planned.shared_by(accelerator.num_processes)
        # a last short batch of an epoch waits for another epoch's order
        self.per_epoch = len(task.train) // self.step.examples
        if folder and accelerator.is_main_process:
            clear_unfinished(made_folder(folder) / CHECKPOINT)
        self.lost = torch.tensor(self.standing.loss, dtype=torch.float64, device=accelerator.device)
        self.began = time.perf_counter() - self.standing.seconds
        self.running.train()

    def take(self, step: int) -> None:
        """One step of the optimiser."""
        recipe, accelerator = self.recipe, self.accelerator
        epoch, place = divmod(step, self.per_epoch)
        factor = recipe.factor((step + 1) / self.per_epoch, 1 / self.per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_rate"] * factor
        order = _order(len(self.task.train), recipe.seed, epoch)
        examples, processes = self.step.examples, accelerator.num_processes
        batches = order[place * examples : (place + 1) * examples].tensor_split(self.step.batches)
        for number in range(accelerator.process_index, self.step.batches, processes):
            chosen = batches[number]
            generator = _seeded(recipe.seed, step, number)
            _seed_dropout(_seed(recipe.seed, step, DROPOUT - number), accelerator.device)
            x, y = self.task.train.in_epoch(epoch).batch(chosen)
            x = x.float() if x.dtype in HALF else x
            if self.transform is not None:
                x, y = self.transform(x, y, generator)
            share = len(chosen) * processes / examples  # processes are averaged
            apart = number + processes < self.step.batches  # gradients of all processes are added once a step
            with self._apart() if apart else nullcontext():
                with accelerator.autocast():
                    loss = self.objective(self.running, x, y, self.task.loss, generator) * share
                # accelerate's own backward and step look for packages on disk each time, and add nothing in fp32, bf16
                loss.backward()
            self.lost += loss.detach()
        if recipe.clip is not None:
            accelerator.clip_grad_norm_(self.running.parameters(), recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for call in self.after_step:
            call(step + 1)
        if self.average:
            self.average.update(step + 1)
        self.standing.step = step + 1

    def look(self, step: int) -> None:
        """After a step: evaluate at the end of an epoch, and save when it is time."""
        epoch, place = divmod(step + 1, self.per_epoch)
        ended = place == 0
        if ended:
            loss = self._mean_lost() / self.per_epoch
            self.lost.zero_()
            if not math.isfinite(loss):
                raise SoftEquivError(
                    f"the loss became {loss} in epoch {epoch} at a rate of {self.recipe.rate:g}; lower the rate, clip "
                    "gradients (clip=1.0), or train in fp32"
                )
            if epoch % self.recipe.evaluate_every == 0 or epoch == self.recipe.epochs:
                self._evaluate(epoch, loss)
        if ended or (self.recipe.save_every and (step + 1) % self.recipe.save_every == 0):
            self._save()

    def finish(self) -> Fitted:
        """The best weights, or the last, and what happened."""
        if self.recipe.keep == "best" and self.best is not None:
            set_weights(self.model, self.best)
        elif self.average:
            self.average.wear()
        seconds = time.perf_counter() - self.began
        return Fitted(self.standing.history, self.standing.best, seconds, str(self.accelerator.device))

    def leave(self) -> None:
        """Give the model back as it came, however the training ended."""
        self.accelerator.unwrap_model(self.running, keep_fp32_wrapper=False)
        # what accelerate leaves on the instance lacks the decorators that models of transformers rely on
        self.model.__dict__.pop("forward", None)
        self.model.eval()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Gradients stay in their process for now."""
        if isinstance(self.running, FSDPModule):
            self.running.set_requires_gradient_sync(False)
            yield
            self.running.set_requires_gradient_sync(True)
        else:
            with self.accelerator.no_sync(self.running):
                yield

    def _mean_lost(self) -> float:
        """The losses of this epoch so far, added, as the processes have them on average; every process must ask."""
        return float(self.accelerator.reduce(self.lost, "mean"))

    def _evaluate(self, epoch: int, loss: float) -> None:
        with self.average.worn() if self.average else nullcontext():
            with self.accelerator.autocast():  # as training has it
                own = self.task.figures(self.model, self.task.validation, self.moves, batch=2 * self.recipe.batch)
            figures = self._of_all(own)[0]  # processes that round otherwise must not choose otherwise
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # no backward pass did it, and the optimiser knows sharded weights alone
            held = {OVER: self.objective.over} if hasattr(self.objective, "over") else {}
            self.standing.history.append({"epoch": epoch, "loss": loss, **held, **figures})
            if self._is_best():
                self.standing.best, self.best = len(self.standing.history) - 1, weights_of(self.model)
        self.running.train()
        if self.folder and self.accelerator.is_main_process:
            with written_whole(self.folder / LOG) as part:
                part.write_text("".join(json.dumps(line) + "\n" for line in self.standing.history))

    def _is_best(self) -> bool:
        """Whether the last evaluation is the best: of those that keep a held target the one with the best score, and
        while none keeps it the one that is nearest to it."""

        def rank(line: dict[str, Any]) -> tuple[bool, float]:
            over = line.get(OVER, 0.0)
            return (True, line[self.task.score] * self.task.sign) if over <= SLACK else (False, -over)

        if self.standing.best is None:
            return True
        best, last = (rank(self.standing.history[number]) for number in (self.standing.best, -1))
        return math.isnan(best[1]) or last > best

    def _save(self) -> None:
        if not self.folder:
            return
        moments, settings = moments_of(self.model, self.optimizer)
        parts = {"model": weights_of(self.model), "optimizer": moments}
        parts |= {place: part.state_dict() for place, part in self.kept.items()}
        if self.best is not None:
            parts["best"] = self.best
        if self.average:
            with self.average.worn():
                parts["average"] = weights_of(self.model)
        self.standing.seconds, self.standing.loss = time.perf_counter() - self.began, self._mean_lost()
        told = {
            "standing": asdict(self.standing),
            "optimizer": settings,
            "recipe": asdict(self.recipe),
            "given": self.given,
            "step": asdict(self.planned),
        }
        if self.accelerator.is_main_process:
            write(self.folder / CHECKPOINT, parts, told)

    def _resume(self, path: Path) -> _Step:
        """Go on from a saved training; what its steps take."""
        parts, told = read(path)
        remedy = "use another folder, or remove it"
        with saying_what_is_damaged(path):
            before = {**told["recipe"], **told.get("given", {})}
        now = {**asdict(self.recipe), **self.given}
        changed = [name for name, value in now.items() if before.get(name) != value]
        changed += [] if "step" in told else ["examples of a step"]
        if changed:
            raise SoftEquivError(f"{path} was trained with other settings ({', '.join(changed)}); {remedy}")
        with saying_what_is_damaged(path):
            standing, planned = _Standing(**told["standing"]), _Step(**told["step"])
            weights, moments, settings = parts["model"], parts["optimizer"], told["optimizer"]
            averaged = parts["average"] if self.average else None
            best = parts["best"] if standing.best is not None else None
            fitting = fits(self.model, self.optimizer, weights, settings)
        if not fitting:
            raise SoftEquivError(f"{path} holds another model, or one whose learning weights are others; {remedy}")
        # first, because torch sets an optimiser up by an empty step, and steps in project mode touch the weights
        set_moments(self.model, self.optimizer, moments, settings)
        if self.average and averaged:
            set_weights(self.model, averaged)
            self.average = Average(self.model, self.average.decay)
        set_weights(self.model, weights)
        for place, part in self.kept.items():
            part.load_state_dict(parts.get(place, {}))
        self.standing, self.best = standing, best
        return planned

    def _agree(self) -> None:
        """Processes that found different things in the folder would train different models."""
        steps = self._of_all(self.standing.step)
        if len(set(steps)) > 1:
            raise SoftEquivError(
                f"the processes found different trainings in {self.folder} (steps done: {steps}); give them one folder "
                "that all of them see"
            )

    def _of_all(self, value: Any) -> list[Any]:
        """What every process has, in their order; every process must ask."""
        from accelerate.utils import gather_object

        found: list[Any] = gather_object([value])
        return found


def _accelerator(recipe: Recipe) -> Any:
    """accelerate's view of the processes and devices there are."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as missing:
        raise ImportError("training needs accelerate; install it with: pip install 'softequiv[train]'") from missing
    # accelerate keeps the first precision for all later runs of a process, and refuses another
    AcceleratorState._reset_state()
    # without cpu=True it lets the processes of torchrun train alone, each its own model, where there is no GPU
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision="bf16" if recipe.precision == "bf16" else "no")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > accelerator.num_processes:
        raise SoftEquivError(
            f"{started} processes were started (WORLD_SIZE) and accelerate sees {accelerator.num_processes}, so each "
            "would train alone; start them with torchrun or accelerate launch"
        )
    return accelerator


def _wide(model: nn.Module) -> nn.Module:
    """The model with float32 where it had halves; once sharded it must have come so."""
    if not isinstance(model, FSDPModule):
        return in_float32(model)
    found = next((weight.dtype for weight in model.parameters() if weight.dtype in HALF), None)
    if found is not None:
        raise SoftEquivError(f"the weights of the sharded model are {found}; call model.float() before fully_shard")
    return model


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=_seeded(seed, epoch, ORDER))


def _seed_dropout(seed: int, device: torch.device) -> None:
    """What torch.manual_seed does, for the two generators that a training draws from: it is called at every step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _seeded(seed: int, step: int, stream: int) -> torch.Generator:
    """The numbers of one step in one stream."""
    return torch.Generator().manual_seed(_seed(seed, step, stream))


def _seed(seed: int, step: int, stream: int) -> int:
    return (seed * LARGE_PRIME + step) * LARGE_PRIME + stream & MASK
