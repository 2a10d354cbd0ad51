"""The command that trains: it opens model and data, softens where asked, and hands over to the library's loop."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.text import Text

from softequiv.adapt import soften
from softequiv.adapt.checkpoint import RECIPE
from softequiv.adapt.group import group_of
from softequiv.certify.located import own_range
from softequiv.cli import options, tables
from softequiv.cli.app import Answer, command
from softequiv.cli.given import asked, opened, read_group, read_range
from softequiv.errors import SoftEquivError
from softequiv.groups import SO
from softequiv.nn import Mode

if TYPE_CHECKING:
    from softequiv.training import Recipe


@command('softequiv train ./vit --data pictures/ --group "SO(2)" --error 0.3 --within 30deg --turn 30deg -o tuned/')
def train_command(
    model: options.Model,
    data: options.TrainData,
    out: options.TrainFolder,
    group: options.SomeGroup = None,
    softness: options.Softness = None,
    error: options.Error = None,
    within: options.Within = None,
    mode: options.Mode = "parametrize",
    turn: options.Turn = None,
    penalty: options.Penalty = 0.0,
    hold: options.Hold = None,
    augment: options.Augment = None,
    new_head: options.NewHead = False,
    size: options.Size = None,
    epochs: options.Epochs = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    recipe: options.RecipeFile = None,
    seed: options.TrainSeed = None,
    tensorboard: options.TensorBoard = False,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Fine-tune a plain or soft model.

    With --softness or --error, soften it first. Run the same command again to resume an interrupted training, or start
    it with torchrun or accelerate launch to use many devices.
    """
    from softequiv.tasks.images import nameless
    from softequiv.tasks.named import open_task
    from softequiv.tasks.preparation import described
    from softequiv.tasks.variations import variations
    from softequiv.training import heads
    from softequiv.training.tune import MODEL, Turns, finished, is_main, tune

    softening = softness is not None or error is not None
    if softening and group is None:
        raise typer.BadParameter("say for which group to soften, such as --group 'SO(2)'")
    if within is not None and not softening:
        raise typer.BadParameter("--within belongs to --error; --turn is the range of moved pictures")
    if mode != "parametrize" and not softening:
        raise typer.BadParameter("--mode says how weights are softened; give it with --softness or --error")
    if hold is not None and penalty:
        raise typer.BadParameter("--hold finds the price by itself; give it or --penalty")
    arguments = asked(str(group), softness, error, within, None, None, "exact") if softening else {}
    chosen, turned = read_group(group), read_range(turn)
    settings = settings_of(recipe, {"epochs": epochs, "batch": batch, "rate": rate, "seed": seed})
    decided: dict[str, Any] = {
        "model": model,
        "data": data,
        "group": group,
        "softness": softness,
        "error": error,
        "within": within,
        "mode": mode,
        "turn": turn,
        "penalty": penalty,
        "hold": hold,
        "augment": augment,
        "new_head": new_head,
        "size": size,
        "recipe": asdict(settings),
    }
    result = finished(out, decided)
    if result is not None and is_main():
        warnings.warn(
            f"{out} holds this training, done on the pictures as they were then; remove it to train anew", stacklevel=2
        )
    if result is None:
        net = opened(model, trust_remote_code, wide=True)
        pictures = open_task(data, net, size=size, seed=settings.seed, named=not new_head)
        for note in pictures.notes if is_main() else ():
            warnings.warn(note, stacklevel=2)
        if new_head:
            heads.new_head(net, pictures.task.classes, pictures.names, seed=settings.seed)
        elif pictures.names and nameless(net):
            heads.name_classes(net, pictures.names)
        if softening:
            soften(net, mode=cast(Mode, mode), **arguments)
        judged = own_range(net) if turned is None else turned
        turns = Turns(chosen or group_of(net) or SO(2), judged, turned is not None, penalty, hold)
        result = tune(
            net,
            pictures.task,
            settings,
            turns,
            out,
            decided,
            varied=variations(augment, pictures) if augment else None,
            pictures=described(pictures.prepared, net),
            tensorboard=tensorboard,
        )
    if not is_main():
        return Answer({}, ())
    home = out / MODEL
    last = Text(f"written to {home} and {out / 'result.json'}; next: {certifying(home, result['judged'])}")
    return Answer({**result, "out": str(out)}, (*tables.training_shown(result), last))


def certifying(model: Path, judged: Mapping[str, Any]) -> str:
    """The command that certifies a model that was written: its weights where they are soft, else its answers."""
    if (model / RECIPE).is_file():
        return f"softequiv certify {model}"
    within = "" if judged["within"] is None else f" --within {judged['within']}"
    return f"softequiv certify {model} --group {shlex.quote(judged['group'])}{within} --data HELD_OUT"


def settings_of(file: Path | None, given: dict[str, Any]) -> Recipe:
    """The recipe of fine-tuning; settings of a file go before it, and those given beside the file before both."""
    from softequiv.training import Recipe

    usual = Recipe(epochs=5, batch=64, rate=1e-4, weight_decay=0.05, clip=1.0)
    try:
        base = usual if file is None else Recipe.parse(file.read_text(encoding="utf-8"), usual)
    except (OSError, UnicodeDecodeError) as problem:
        raise SoftEquivError(f"the recipe {file} cannot be read ({problem}); give a JSON file of settings") from problem
    return replace(base, **{name: value for name, value in given.items() if value is not None})
