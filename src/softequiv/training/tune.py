"""How is an opened model tuned and left behind? Trained by the loop in a folder, tested, and written with its result.

The folder says what was asked, so that the same call goes on where it stopped and another one is refused.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softequiv._files import made_folder, written_whole
from softequiv.actions import Moves, Pictures, Still
from softequiv.adapt.opening import in_float32, save_model
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.penalty import Penalised
from softequiv.certify.certificate import versions
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.holding import HeldByMeasurement
from softequiv.tasks.classification import Classification
from softequiv.tasks.segmentation import MASKS, Segmentation
from softequiv.tasks.variations import Variations
from softequiv.training.board import BOARD, Board
from softequiv.training.heads import check_answers
from softequiv.training.loop import CHECKPOINT, LOG, Objective, fit, plain
from softequiv.training.recipe import Recipe
from softequiv.training.saved import set_weights, weights_of

ASKED, RESULT, MODEL = "asked.json", "result.json", "model"
POOL = 1024  # elements that stand for a range

Figures = dict[str, Any]


@dataclass(frozen=True)
class Turns:
    """By what pictures are moved: elements of a group within a range, None being all of it; the test has others than
    the training. There, pictures are moved if `trained`; a `penalty` above 0 is the price of answers that differ, and
    with `hold` the price is what keeps their divergence at that target.
    """

    group: Group
    within: float | None
    trained: bool = False
    penalty: float = 0.0
    hold: float | None = None


def is_main() -> bool:
    """Whether this process is the one that writes and speaks; torchrun and accelerate number theirs."""
    return os.environ.get("RANK", "0") == "0"


def _one_by_one(asked: Figures) -> Figures:
    """What was asked for, with the settings of its recipe among the others."""
    return {name: value for name, value in asked.items() if name != "recipe"} | (asked.get("recipe") or {})


def finished(folder: Path, asked: Mapping[str, Any]) -> Figures | None:
    """The result of a tuning that is done; None where it is not, or where its model was removed and is to be written
    again. A folder of another tuning is refused, and so is one of other files."""
    if not folder.exists():
        return None
    before = _read(folder / ASKED)
    # a process that was killed, or is beside this one, may have begun to write
    if before is None and folder.is_dir() and all(path.name.endswith(".part") for path in folder.iterdir()):
        return None
    if before is None:
        raise SoftEquivError(f"{folder} exists and holds no training; choose another name, or remove it first")
    then, now = _one_by_one(before), _one_by_one(json.loads(json.dumps(asked)))
    changed = [name for name in now if then.get(name) != now[name]]
    if changed:
        raise SoftEquivError(
            f"{folder} holds a training with other settings ({', '.join(changed)}); choose another name, or remove it"
        )
    result = _read(folder / RESULT)
    if result is None or (folder / MODEL).is_dir():
        return result
    if not (folder / CHECKPOINT).is_file():
        raise SoftEquivError(
            f"{folder} holds a result, but neither its {MODEL} nor the {CHECKPOINT} to write it again from; remove the "
            "folder to train anew, or choose another name"
        )
    return None


def tune(
    model: nn.Module,
    task: Classification | Segmentation,
    recipe: Recipe,
    turns: Turns,
    folder: Path,
    asked: Mapping[str, Any],
    *,
    varied: Variations | None = None,
    pictures: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> Figures:
    """Train a model in a folder and test it; what result.json then holds. The model is in the folder `model` there.

    `asked` is what decided model and task, as JSON can hold it; `varied` is what is done to training pictures beside
    turning them; `pictures` is what `save_model` writes of them.
    """
    model = in_float32(model)
    check_answers(model, task)
    known, unseen = (Moves(task.acts, turns.group, turns.within, count=POOL, seed=recipe.seed + i) for i in (0, 1))
    known(task.train.batch(torch.zeros(1, dtype=torch.long))[0], torch.zeros(1, dtype=torch.long))  # can they act?
    outputs, labels = (Pictures(), MASKS) if isinstance(task, Segmentation) else (Still(), Still())
    held = None
    if turns.hold is not None:
        held = HeldByMeasurement(known, turns.hold, outputs=outputs, targets=labels if turns.trained else None)
    objective: Objective = held or (Penalised(known, turns.penalty, outputs, "kl") if turns.penalty else plain)
    whole = copy.deepcopy(model)  # FSDP2 does not give back the model that it shards
    # a held target learns from moved pictures beside upright ones
    turning = Augmented(known, known.on(labels)) if turns.trained and held is None else None
    with _asked(folder, asked):
        watched = [Board(folder)] if tensorboard and is_main() else []
        fitted = fit(
            model,
            task,
            recipe,
            known,
            objective=objective,
            transform=(varied or Variations()).around(turning),
            folder=folder,
            after_step=watched,
        )
    for board in watched:
        board()
    task = task.to(fitted.device)
    parts = {"train": task.train, "validation": task.validation, "test": task.test}
    result = {
        "asked": dict(asked),
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "judged": {"group": turns.group.name, "within": None if turns.within is None else repr(turns.within)},
        "versions": versions(),
        "data": {name: {"examples": len(part), "sha256": part.fingerprint} for name, part in parts.items()},
        "device": torch.cuda.get_device_name() if fitted.device.startswith("cuda") else fitted.device,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "seconds": round(fitted.seconds, 2),
        "history": fitted.history,
        "best": fitted.best,
        "held": held and {"target": held.target, "price": held.price, "error": held.error},
        "test": task.figures(model, task.test, unseen, batch=2 * recipe.batch),
    }
    weights = weights_of(model)
    if is_main():
        set_weights(whole, weights)
        shutil.rmtree(folder / MODEL, ignore_errors=True)  # of a run that was stopped between the two files
        save_model(whole.cpu(), folder / MODEL, pictures=pictures)
        _write(folder / RESULT, result)
    return result


@contextmanager
def _asked(folder: Path, asked: Mapping[str, Any]) -> Iterator[None]:
    """A folder that says what was asked, unless the training ends in an error before it is saved: then there is nothing
    to go on with, and another one may take its place."""
    if is_main():
        _write(made_folder(folder) / ASKED, asked)
    try:
        yield
    except BaseException:
        if is_main() and not (folder / CHECKPOINT).is_file():
            for name in (ASKED, LOG):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / BOARD, ignore_errors=True)
        raise


def _read(path: Path) -> Figures | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, entries: Mapping[str, Any]) -> None:
    with written_whole(path) as part:
        part.write_text(json.dumps(entries, indent=1), encoding="utf-8")
