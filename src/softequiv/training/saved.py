"""How does a training survive a kill? One file with weights, optimiser, averages and history, replaced whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from softequiv._files import read_json, written_whole
from softequiv.errors import SoftEquivError

WHOLE = StateDictOptions(full_state_dict=True)  # whole tensors under plain names
# An optimiser remembers nothing of weights that no loss has touched yet.
SOME = StateDictOptions(full_state_dict=True, strict=False)

Tensors = dict[str, Tensor]


def weights_of(model: nn.Module) -> Tensors:
    """A copy of all weights and buffers, whole; every process must ask."""
    state: Mapping[str, Any] = get_model_state_dict(model, options=WHOLE)
    return {name: value.detach().clone() for name, value in state.items()}


def set_weights(model: nn.Module, weights: Tensors) -> None:
    """Write weights and buffers of `weights_of` into a model."""
    set_model_state_dict(model, dict(weights), options=WHOLE)


def moments_of(model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """What an optimiser remembers, as tensors by weight and kind, and its settings, which are no tensors."""
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    tensors = {
        f"{kind}/{name}": value.detach().clone()
        for name, kinds in state["state"].items()
        for kind, value in kinds.items()
    }
    return tensors, {"param_groups": state["param_groups"]}


def set_moments(model: nn.Module, optimizer: Optimizer, tensors: Tensors, settings: Mapping[str, Any]) -> None:
    """The inverse of `moments_of`."""
    state: dict[str, Any] = {}
    for place, value in tensors.items():
        kind, _, name = place.partition("/")
        state.setdefault(name, {})[kind] = value
    set_optimizer_state_dict(model, optimizer, {"state": state, **settings}, options=SOME)
    untouched = {name for group in settings["param_groups"] for name in group["params"]} - state.keys()
    for name, weight in model.named_parameters():
        if name in untouched:
            optimizer.state.pop(weight, None)  # what torch's empty step left there


def fits(model: nn.Module, optimizer: Optimizer, weights: Tensors, settings: Mapping[str, Any]) -> bool:
    """Whether weights of `weights_of` and settings of `moments_of` are of this model and the weights that learn."""
    shapes = [{name: value.shape for name, value in part.items()} for part in (weights_of(model), weights)]
    learning = [
        {name for group in part["param_groups"] for name in group["params"]}
        for part in (moments_of(model, optimizer)[1], settings)
    ]
    return shapes[0] == shapes[1] and learning[0] == learning[1]


def write(path: Path, parts: Mapping[str, Tensors], told: Mapping[str, Any]) -> None:
    """Replace a saved training: tensors by part and name, and what is told beside them."""
    flat = {f"{part}/{name}": value.contiguous() for part, named in parts.items() for name, value in named.items()}
    with written_whole(path) as file:
        save_file(flat, file, metadata={"training": json.dumps(told)})


def read(path: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """What `write` wrote."""
    parts: dict[str, Tensors] = {}
    with saying_what_is_damaged(path), safe_open(path, framework="pt") as file:
        told = read_json((file.metadata() or {})["training"])
        for name in file.keys():  # noqa: SIM118
            part, _, rest = name.partition("/")
            parts.setdefault(part, {})[rest] = file.get_tensor(name)
    return parts, told


@contextmanager
def saying_what_is_damaged(path: Path) -> Iterator[None]:
    """What a saved training lacks, or why it cannot be read, as a sentence."""
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as problem:
        why = f"it has no {problem}" if isinstance(problem, KeyError) else problem
        raise SoftEquivError(
            f"{path} is no saved training that can be read ({why}); remove it to start anew"
        ) from problem
