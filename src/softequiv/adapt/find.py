"""Which weights of this model live on a grid? Found by structure and type, not by the names of one library's release.

A finder takes one module of the model and yields what it recognises there: weights with their representation, or
weights that it must leave alone, with the reason. A new family of models is one new finder in `FINDERS`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from softequiv.adapt.positions import BY_HAND, as_sizes, by, dotted, holders, holds_words, tables
from softequiv.errors import RepresentationError, SoftEquivError, TooLargeError, WeightError
from softequiv.groups import Group
from softequiv.nn import Layout
from softequiv.reps import Action, Rep, grid
from softequiv.reps.grids import kernels

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CLASS_DISPLACEMENTS = 3  # from the class token, to it, and from it to itself
WAVES = re.compile(r"(sine|sinus|sincos|fourier).*(pos|emb|enc)|(pos|emb|enc).*(sine|sinus|sincos|fourier)")


@dataclass(frozen=True)
class Setting:
    """What the finders need to know: the group, how it acts on pixels, and the grids behind flattened linear layers."""

    group: Group
    action: Action = "exact"
    grids: Mapping[str, tuple[int, ...]] | None = None

    def grid(self, *sizes: int) -> Rep:
        """The action on a grid of these sizes."""
        return grid(self.group, *sizes, action=self.action)

    def kernels(self, *sizes: int) -> Rep:
        """The action on weights that are laid over pictures of these sizes."""
        return kernels(self.group, *sizes, action=self.action)


@dataclass(frozen=True)
class Found:
    """A weight that can be filtered: parameter `attribute` of the module called `module`."""

    module: str
    attribute: str
    what: str
    rep: Rep
    layout: Layout = Layout()  # noqa: RUF009  (frozen)

    @property
    def name(self) -> str:
        """The parameter's name in the plain model."""
        return dotted(self.module, self.attribute)


@dataclass(frozen=True)
class Skipped:
    """A weight that is left alone, and why."""

    name: str
    reason: str


Finding = Found | Skipped
Finder = Callable[[nn.Module, str, Setting], Iterator[Finding]]


def find(model: nn.Module, setting: Setting) -> Iterator[Finding]:
    """Everything that the finders recognise, and every other weight matrix with the reason why it stays."""
    refuse_foreign_layers(model)
    refuse_unknown_grids(model, setting)
    known: set[str] = set()
    for name, module in model.named_modules():
        for finder in FINDERS:
            for finding in finder(model, name, setting):
                known.add(finding.name)
                yield finding
        for attribute, parameter in module.named_parameters(recurse=False):
            full = dotted(name, attribute)
            if full not in known and not nn.parameter.is_lazy(parameter) and parameter.ndim > 1:
                yield Skipped(full, unrecognised(module, parameter))


def unrecognised(module: nn.Module, weight: nn.Parameter) -> str:
    """Why a weight stays that no finder knows."""
    if isinstance(module, nn.Embedding):
        return "its rows are looked up by number, and nothing says that they are places of a picture"
    vector = sum(size > 1 for size in weight.shape) < 2
    if vector or isinstance(module, nn.Linear) or type(module).__module__.startswith("torch.nn"):
        return "acts on channels, which carry no representation of the group"
    return f"nothing says whether {by(weight.shape)} are channels or places of a picture; {BY_HAND}"


def refuse_foreign_layers(model: nn.Module) -> None:
    """LoRA and quantised layers keep a weight that is not the one they use; filtering it would give a wrong model. What
    torch.jit made has weights, and no layers to be known by.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SoftEquivError(
                f"{name or 'the model'} was made by torch.jit, which leaves no layers to filter: soften and bake the "
                "model before you script or trace it"
            )
        origin = type(module).__module__.split(".")
        if origin[0] == "peft" or hasattr(module, "lora_A"):
            raise SoftEquivError(
                f"{name or 'the model'} is a PEFT layer: merge it first (merge_and_unload), then soften"
            )
        if "quantized" in origin:
            raise SoftEquivError(
                f"{name or 'the model'} is a quantised {type(module).__name__}: soften and bake the model before you "
                "quantise it"
            )
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and not (weight.is_floating_point() and weight.dtype.itemsize > 1):
            remedy = "keep its two parts in two layers" if weight.is_complex() else "dequantise the model"
            raise SoftEquivError(
                f"{dotted(name, 'weight')} is stored as {weight.dtype}, which cannot be filtered: "
                f"{remedy} before softening it"
            )


def refuse_unready(model: nn.Module, found: Found) -> None:
    """A weight that has no values of its own yet, or none that can be changed."""
    name, weight = found.name, model.get_submodule(found.module)._parameters.get(found.attribute)
    if weight is None:  # made by a parametrisation, of which others speak
        return
    reason = ""
    if nn.parameter.is_lazy(weight):
        reason = "has no shape yet: run the model once on an example, which makes its lazy layers"
    elif weight.layout != torch.strided:
        reason = f"is stored as {weight.layout}: make it dense first, by weight.to_dense()"
    elif weight.is_inference():
        reason = "was made in inference mode, where nothing can be changed: build the model outside of it"
    elif any(step == 0 and size > 1 for step, size in zip(weight.stride(), weight.shape, strict=True)):
        reason = "is a view that shows one value in many places: make it a tensor of its own, by weight.clone()"
    if reason:
        raise WeightError(f"{name} {reason}")


def refuse_unknown_grids(model: nn.Module, setting: Setting) -> None:
    """Every layer that `grids` names must exist."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not isinstance(setting.grids or {}, Mapping):
        raise SoftEquivError(f"grids is a mapping from layers to (channels, H, W); got {setting.grids!r}")
    for name, sizes in (setting.grids or {}).items():
        if not isinstance(sizes, (tuple, list)) or not all(isinstance(size, int) for size in sizes):
            raise SoftEquivError(f"grids[{name!r}] = {sizes!r} is not (channels, H, W) in whole numbers")
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.3) or names[:3]
            raise SoftEquivError(
                f"grids names {name!r}, which is no linear layer; there are {', '.join(close) or 'none'}"
            )


def on_grid(
    name: str, attribute: str, what: str, space: Callable[..., Rep], sizes: tuple[int, ...], layout: Layout
) -> Finding:
    """A weight on a grid, or the reason why the group does not act there."""
    full = dotted(name, attribute)
    if max(sizes) == 1:
        return Skipped(full, "a kernel of size one has no directions to filter")
    try:
        return Found(name, attribute, what, space(*sizes), layout)
    except (RepresentationError, TooLargeError) as error:
        return Skipped(full, str(error))


def convolutions(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Kernels, patch embeddings among them: one grid per pair of channels."""
    module = model.get_submodule(name)
    if isinstance(module, CONVOLUTIONS):
        patch = module.stride == module.kernel_size and max(module.kernel_size) > 1
        what = "patch embedding" if patch else "kernel"
        yield on_grid(name, "weight", what, setting.kernels, tuple(module.kernel_size), Layout())


def positions(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Absolute position tables over the patches of a picture."""
    for attribute, grid_or_reason in tables(model, name):
        if isinstance(grid_or_reason, str):
            yield Skipped(dotted(name, attribute), grid_or_reason)
        else:
            sizes, layout = grid_or_reason.sizes, grid_or_reason.layout
            yield on_grid(name, attribute, "positions", setting.grid, sizes, layout)


def relative_biases(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Tables of biases by displacement, ((2h - 1)(2w - 1), heads) as in Swin; BEiT has rows for its class token behind
    them, and LeViT an order of its own.
    """
    module = model.get_submodule(name)
    for attribute, table in module.named_parameters(recurse=False):
        if attribute.endswith("attention_biases"):
            yield Skipped(
                dotted(name, attribute),
                "biases of attention by displacement, in an order that is not known, are not filtered; attention still "
                "tells directions apart",
            )
        elif attribute.endswith("relative_position_bias_table"):
            count, window = table.shape[0], getattr(module, "window_size", None)
            half = as_sizes((math.isqrt(count) + 1) // 2 if window is None else window)
            sizes = tuple(2 * size - 1 for size in half or ())
            behind = count - math.prod(sizes)
            if half and behind in (0, CLASS_DISPLACEMENTS):
                layout = Layout(axis=0, behind=behind)
                yield on_grid(name, attribute, "relative bias", setting.grid, sizes, layout)
            else:
                stated = "no window is stated" if window is None else f"its window is {window}"
                yield Skipped(dotted(name, attribute), f"{count} displacements are not those of a window; {stated}")


def fixed_positions(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Positions without a table, which are fixed functions of coordinates: rotary ones, and waves."""
    path = holders(model, name)
    kind = type(path[0]).__name__.lower()
    if "rope" in kind or "rotary" in kind:
        if len(path) > 1 and holds_words(path[1]):
            yield Skipped(name, "rotary positions of a text, which has no rows and columns")
            return
        yield Skipped(
            name,
            "rotary positions are fixed functions of row and column, with nothing to filter; attention still "
            "tells directions apart",
        )
    elif WAVES.search(kind) and next(path[0].parameters(), None) is None:
        yield Skipped(
            name, "positions are fixed waves, with nothing to filter; those of a picture tell rows from columns"
        )


def norms_of_maps(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Normalisation over several axes, which has a weight of its own for every place."""
    module = model.get_submodule(name)
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
        for attribute, weight in module.named_parameters(recurse=False):
            yield Skipped(
                dotted(name, attribute),
                f"has a value for each of {by(weight.shape)} places and is not filtered; normalise channels only",
            )


def coordinate_biases(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Swin V2's biases of attention, which a small network makes from displacements."""
    if name.rpartition(".")[2] in ("continuous_position_bias_mlp", "cpb_mlp"):
        for attribute, weight in model.get_submodule(name).named_parameters():
            if weight.ndim > 1:
                yield Skipped(
                    f"{name}.{attribute}",
                    "makes the biases of attention from coordinates, which the group moves, and is not filtered; "
                    "attention still tells directions apart",
                )


def patch_merging(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Swin's steps between stages: a linear map on the channels of 2 x 2 neighbours, one after another, with a norm
    before it (V1: 4 C channels) or behind it (V2: 2 C).
    """
    module = model.get_submodule(name)
    norm, linear = getattr(module, "norm", None), getattr(module, "reduction", None)
    if not isinstance(norm, nn.LayerNorm) or not isinstance(linear, nn.Linear):
        return
    halved, normed = linear.in_features == 2 * linear.out_features, norm.weight.numel()
    if normed == linear.in_features or (halved and normed == linear.out_features):
        yield Skipped(
            dotted(name, "reduction.weight"),
            "merges 2 x 2 neighbours and is not filtered; the model tells directions apart here",
        )


def flattened(model: nn.Module, name: str, setting: Setting) -> Iterator[Finding]:
    """Linear layers on flattened pictures, as the user lists them: grids={"fc1": (1, 28, 28)}."""
    module = model.get_submodule(name)
    sizes = (setting.grids or {}).get(name)
    if sizes is None:
        return
    if not isinstance(module, nn.Linear) or math.prod(sizes) != module.in_features:
        raise SoftEquivError(
            f"grids[{name!r}] = {sizes} has {math.prod(sizes)} entries; the layer has {module.in_features} inputs: "
            "give (channels, H, W)"
        )
    yield on_grid(name, "weight", "flattened grid", setting.kernels, sizes[1:], Layout(axis=1, channels=sizes[0]))


FINDERS: tuple[Finder, ...] = (
    convolutions,
    positions,
    relative_biases,
    fixed_positions,
    norms_of_maps,
    coordinate_biases,
    patch_merging,
    flattened,
)
