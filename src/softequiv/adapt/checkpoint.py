"""Save and resume a soft model: its stored parameters as safetensors under the plain model's names, its recipe as JSON.

Because the names are the plain model's, stock checkpoints load into a softened model and the other way round. Nothing
is ever unpickled, files appear whole or not at all, and the recipe records the checksum of the parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from softequiv._files import made_folder, path_of, read_json, written_whole
from softequiv._linalg import Frozen
from softequiv.adapt.plan import plan
from softequiv.adapt.soften import carry_out
from softequiv.errors import GroupError, SoftEquivError
from softequiv.gains import Gain, hard, least_distortion, schur, smooth, softness
from softequiv.groups import Angle, parse_group
from softequiv.nn import SoftWeight, project, set_gain, soft_weights
from softequiv.nn.soft import PLAIN, Soft
from softequiv.nn.weight import whole
from softequiv.reps import Action, Cube, Matrices, Rep, Square

WEIGHTS, RECIPE, FORMAT = "model.safetensors", "softequiv.json", 1
CHECKSUM = "sha256"  # the recipe's entry for the bytes of the parameters' file
ENTRIES: dict[str, type] = {"group": str, "action": str, "mode": str, "grids": dict, "weights": dict}
WEIGHT_ENTRIES: dict[str, type] = {"representation": str, "shape": list, "gain": dict}
GAINS: dict[str, type[Gain]] = {gain.__name__: gain for gain in (hard, smooth, schur, softness, least_distortion)}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that the optimiser trains, and the buffers, under the names of the plain model.

    Wrappers (data parallelism, averages of weights, torch.compile) are looked through; tied weights come under each of
    their names.

    >>> import softequiv as se
    >>> list(stored_tensors(se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5)))
    ['bias', 'weight']
    """
    return {plain_name(name): value for name, value in unwrapped(model).state_dict(keep_vars=True).items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data parallelism, an average of weights, or what torch.compile returns."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def plain_name(name: str) -> str:
    """a.parametrizations.weight.original is a.weight."""
    head, marker, tail = name.rpartition("parametrizations.")
    return head + tail.removesuffix(".original") if marker else name


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors under plain names into a plain or soft model; names and shapes must agree.

    A soft model also takes the names of its own `state_dict`, which a plain one refuses, as it would not filter what
    they hold. In project mode the weights are then projected onto their constraints, as after an optimiser step.

    >>> import softequiv as se
    >>> plain, net = nn.Conv2d(3, 8, 5), se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5)
    >>> load_tensors(net, plain.state_dict())
    >>> torch.equal(stored_tensors(net)["weight"], plain.weight)
    True
    """
    if isinstance(tensors, Mapping):
        own = unwrapped(model).state_dict()
        tensors = {plain_name(name) if name in own else name: value for name, value in tensors.items()}
    refuse_misfits(model, tensors)
    copy_tensors(model, tensors)
    project(model)


@torch.no_grad()
def copy_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors that fit into what a model stores."""
    for name, value in stored_tensors(model).items():
        value.copy_(tensors[name])


def refuse_misfits(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Spell out which names, shapes and values of a checkpoint the model cannot take."""
    own = stored_tensors(model)
    if not isinstance(tensors, Mapping):
        raise SoftEquivError(f"tensors are a mapping from names to tensors; got {type(tensors).__name__}")
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in own]
    both = [(name, value, tensors[name]) for name, value in own.items() if name in tensors]
    problems += [f"{name} {problem}" for name, value, given in both if (problem := misfit(value, given))]
    if problems:
        raise SoftEquivError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:5])}{' ...' * (len(problems) > 5)}"
        )


def misfit(own: Tensor, given: Any) -> str:
    """Why a tensor cannot be written into one of a model; empty where it can."""
    if not isinstance(given, Tensor):
        return f"is no tensor but {type(given).__name__}"
    if given.shape != own.shape:
        return f"has shape {tuple(given.shape)}, the model {tuple(own.shape)}"
    if given.is_meta:
        return "has no values, it is on the meta device"
    if (given.is_floating_point(), given.is_complex()) != (own.is_floating_point(), own.is_complex()):
        return f"holds {given.dtype}, the model {own.dtype}"
    if isinstance(own, nn.Parameter) and not torch.isfinite(given.to(own.dtype)).all():  # buffers may be masks of -inf
        return f"has entries that are not finite in {own.dtype}"
    return ""


def recipe(model: nn.Module) -> dict[str, Any]:
    """What was done to a model, as JSON can hold it."""
    weights = {weight.name: weight for weight in soft_weights(unwrapped(model))}
    if not weights:
        raise SoftEquivError("this model has no soft weights; use the model's own way to save it")
    refuse_two_ways(weights)
    flat = {
        name.rpartition(".")[0]: [weight.soft.layout.channels, *weight.soft.rep.shape]
        for name, weight in weights.items()
        if isinstance(weight.module, nn.Linear) and weight.soft.layout.axis == 1
    }
    first = next(iter(weights.values()))
    return {
        "format": FORMAT,
        "group": first.soft.rep.group.name,
        "action": action_of(first.soft.rep),
        "mode": first.filtered.mode,
        "grids": flat,
        "weights": {
            name: described(weight.soft, weight.stored.shape) | {"gain": written(weight.soft.gain)}
            for name, weight in weights.items()
        },
    }


def described(soft: Soft, shape: Sequence[int]) -> dict[str, Any]:
    """Which weight of which space this is, as JSON can hold it; `layout` has what is not plain."""
    layout = dataclasses.asdict(soft.layout)
    return {
        "representation": str(soft.rep),
        "matrices": fingerprint(soft.rep),
        "layout": {key: value for key, value in layout.items() if value != getattr(PLAIN, key)},
        "shape": list(shape),
    }


def fingerprint(rep: Rep) -> str | None:
    """The sha256 of the matrices that a user gave for a space or its group, to nine decimals; nothing where names say
    all.
    """
    given = users_matrices(rep)
    try:
        named = parse_group(rep.group.name) == rep.group
    except GroupError:
        named = False
    if not named:
        given += [rep.group.lie, rep.group.steps]
    digests = b"".join(Frozen(matrices.round(decimals=9)).digest for matrices in given)
    return hashlib.sha256(digests).hexdigest() if given else None


def users_matrices(rep: Rep) -> list[Tensor]:
    """The generators of every part of a space that a user gave."""
    own = [rep.lie(), rep.steps()] if isinstance(rep, Matrices) else []
    return own + [matrices for part in rep.parts for matrices in users_matrices(part)]


def missed(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Where two descriptions of a weight differ but for its gain; older files may lack an entry."""
    return [
        f"{key} {theirs[key]} in the checkpoint, {value} here"
        for key, value in ours.items()
        if key != "gain" and key in theirs and theirs[key] != value
    ]


def refuse_two_ways(weights: Mapping[str, SoftWeight]) -> None:
    """A recipe is for one group, one action and one mode."""
    first_name, first = next(iter(weights.items()))
    for name, weight in weights.items():
        for what, one, other in (
            ("group", first.soft.rep.group.name, weight.soft.rep.group.name),
            ("action", action_of(first.soft.rep), action_of(weight.soft.rep)),
            ("mode", first.filtered.mode, weight.filtered.mode),
        ):
            if one != other:
                raise SoftEquivError(
                    f"a checkpoint has one {what}; {first_name} has {one} and {name} has {other}: save the parts of "
                    "the model that were softened alike, each in a folder of its own"
                )


def action_of(rep: Rep) -> Action:
    """How a grid turns; lines and permutations know one way only."""
    if isinstance(rep, (Square, Cube)):
        return rep.action
    return next((found for found in map(action_of, rep.parts) if found != "exact"), "exact")


def written(gain: Gain) -> dict[str, Any]:
    """A gain as JSON."""
    if GAINS.get(type(gain).__name__) is not type(gain):
        raise SoftEquivError(
            f"{type(gain).__name__} is a gain of your own, which no file could name; bake the model, or use one of "
            f"{', '.join(GAINS)}"
        )
    values = dataclasses.asdict(gain)  # type: ignore[call-overload]
    if isinstance(values.get("within"), Angle):
        values["within"] = {"radians": float(values["within"])}
    return {"kind": type(gain).__name__, **values}


def read_gain(entry: Mapping[str, Any]) -> Gain:
    """A gain from JSON."""
    values = dict(entry)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in GAINS:
        raise SoftEquivError(f"the recipe names an unknown gain {kind!r}; known are {', '.join(GAINS)}")
    try:
        if isinstance(values.get("within"), dict):
            values["within"] = Angle(values["within"]["radians"])
        return GAINS[kind](**values)
    except (TypeError, KeyError, ValueError, OverflowError) as problem:
        raise SoftEquivError(f"the recipe's {kind} gain cannot be read: {problem}") from None


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a soft model's parameters and recipe into a folder, each file whole or not at all; `load` reads them.

    If the model's weights are sharded (FSDP2), every process must call this, and the first one writes.

    >>> import tempfile, softequiv as se
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     se.save(se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5), folder)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['model.safetensors', 'softequiv.json']
    """
    target, entries, tensors = path_of(folder), recipe(model), as_written(model)
    sharded = any(hasattr(value, "full_tensor") for value in stored_tensors(model).values())
    if sharded and torch.distributed.get_rank() > 0:
        return
    with written_whole(made_folder(target) / WEIGHTS) as part:
        save_file(tensors, part, metadata={"format": "pt"})
        entries[CHECKSUM] = checksum(part)
    with written_whole(target / RECIPE) as part:
        part.write_text(json.dumps(entries, indent=1))


def as_written(model: nn.Module) -> dict[str, Tensor]:
    """The stored tensors as they are written: whole, on the CPU, each with memory of its own."""
    return {name: whole(value.detach()).cpu().clone().contiguous() for name, value in stored_tensors(model).items()}


def checksum(path: Path) -> str:
    """The sha256 of a file's bytes."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Soften a plain model as the folder's recipe says, load its parameters, and return it.

    A soft model must have been softened by the same recipe but for its gains, which are set to those of the folder.

    >>> import tempfile, softequiv as se
    >>> net = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     se.save(net, folder)
    ...     torch.equal(load(nn.Conv2d(3, 8, 5), folder).weight, net.weight)
    True
    """
    home = path_of(folder)
    wanted, tensors = read_recipe(home / RECIPE), read_tensors(home / WEIGHTS)
    if CHECKSUM in wanted and wanted.pop(CHECKSUM) != checksum(home / WEIGHTS):
        raise SoftEquivError(
            f"{home / WEIGHTS} is not the file of which {RECIPE} has the checksum: it was damaged or changed; copy "
            f"both again, or where you changed it yourself take the entry {CHECKSUM!r} out of {RECIPE}"
        )
    reps = {weight.name: weight.soft.rep for weight in soft_weights(unwrapped(model))}
    if reps:
        refuse_difference(recipe(model), wanted)
    refuse_misfits(model, tensors)
    if reps:  # gains are state: training may turn the dial
        set_gains(unwrapped(model), read_gains(wanted, reps))
    else:
        apply_recipe(unwrapped(model), wanted)
    copy_tensors(model, tensors)
    return model


def read_gains(wanted: Mapping[str, Any], reps: Mapping[str, Rep]) -> dict[str, Gain]:
    """The gains of a recipe; one that does not fit its space is refused."""
    gains = {name: read_gain(entry["gain"]) for name, entry in wanted["weights"].items()}
    for name, rep in reps.items():
        gains[name].on(rep)
    return gains


def set_gains(model: nn.Module, gains: Mapping[str, Gain]) -> None:
    """Give each soft weight its gain."""
    for weight in soft_weights(model):
        set_gain(weight, gains[weight.name])


def refuse_missing(path: Path) -> None:
    """A file of a checkpoint must be there."""
    if not path.is_file():
        raise SoftEquivError(f"{path.parent} holds no {path.name}; it is not a folder that softequiv.save wrote")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    refuse_missing(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as problem:
        raise SoftEquivError(f"{path} cannot be read, it may be cut short: {problem}; copy it again") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe of a checkpoint, with the entries that a recipe has."""
    refuse_missing(path)
    try:
        wanted = read_json(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise SoftEquivError(f"{path} is not JSON: {problem}; copy it again") from None
    if not isinstance(wanted, dict) or wanted.get("format") != FORMAT:
        raise SoftEquivError(f"{path} is not a recipe of format {FORMAT}; it needs the softequiv that wrote it")
    for key, kind in ENTRIES.items():
        if not isinstance(wanted.get(key), kind):
            raise SoftEquivError(f"{path} is damaged: its {key!r} is {wanted.get(key)!r}, not a {kind.__name__}")
    if not wanted["weights"]:
        raise SoftEquivError(f"{path} is damaged: it names no weights")
    for name, sizes in wanted["grids"].items():
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise SoftEquivError(f"{path} is damaged: the grid of {name!r} is {sizes!r}, not a list of whole numbers")
    for name, entry in wanted["weights"].items():
        for key, kind in WEIGHT_ENTRIES.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise SoftEquivError(f"{path} is damaged: {name!r} has no {key!r} that is a {kind.__name__}")
    return wanted


def apply_recipe(model: nn.Module, wanted: Mapping[str, Any]) -> None:
    """Soften a plain model as a recipe says; a weight that the model does not have in that form is refused."""
    names = list(wanted["weights"])
    grids = {name: tuple(sizes) for name, sizes in wanted["grids"].items()}
    todo = plan(model, parse_group(wanted["group"]), softness=1.0, only=names, grids=grids, action=wanted["action"])
    planned = {weight.found.name: weight for weight in todo.weights}
    for name, entry in wanted["weights"].items():
        differences = missed(entry, described(planned[name].soft, planned[name].shape))
        if differences:
            raise SoftEquivError(f"the checkpoint does not fit the model: {name}: {'; '.join(differences)}")
    gains = read_gains(wanted, {name: weight.soft.rep for name, weight in planned.items()})
    carry_out(model, todo, wanted["mode"])
    set_gains(model, gains)


def refuse_difference(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Spell out where two recipes differ in more than gains."""
    differences = [
        f"{key}: {wanted.get(key)!r} in the checkpoint, {own[key]!r} here"
        for key in own
        if key != "weights" and wanted.get(key) != own[key]
    ]
    theirs, ours = wanted["weights"], own["weights"]
    differences += [f"{name} is soft in one of them only" for name in sorted(set(theirs) ^ set(ours))]
    differences += [
        f"{name}: {difference}" for name in ours if name in theirs for difference in missed(theirs[name], ours[name])
    ]
    if differences:
        raise SoftEquivError("the checkpoint was made by another recipe: " + "; ".join(differences[:5]))
