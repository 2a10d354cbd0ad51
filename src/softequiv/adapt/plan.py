"""A dry run: which weights will be filtered and how, which are left alone and why, and what geometry will spoil."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from softequiv._text import aligned
from softequiv.actions import Moves, Pictures
from softequiv.adapt.find import Found, Setting, Skipped, find, refuse_unready
from softequiv.adapt.geometry import Uneven
from softequiv.adapt.positions import Sizes, as_sizes
from softequiv.adapt.split import split
from softequiv.adapt.walk import uneven_layers
from softequiv.asking import inputs_of
from softequiv.errors import GainError, SoftEquivError
from softequiv.gains import Gain, LevelGain, least_distortion
from softequiv.gains import softness as softness_gain
from softequiv.groups import Group
from softequiv.groups.angles import range_of
from softequiv.groups.parse import as_group
from softequiv.nn import Soft, is_constraint, soft_weights
from softequiv.reps import Action
from softequiv.spectrum import spectrum

Softness = float | Mapping[str, float]
Error = float | Mapping[str, float]
Scope = Literal["layer", "network"]
BATCH = 256  # samples read at a time


@dataclass(frozen=True)
class Planned:
    """One weight that will be filtered."""

    found: Found
    soft: Soft
    shape: tuple[int, ...]

    @property
    def kept(self) -> str:
        """How many of how many directions stay, or what is promised instead."""
        if isinstance(self.soft.gain, LevelGain):
            kept = self.soft.gain.kept(spectrum(self.soft.rep))
            return f"{kept.directions:.4g} of {kept.total}"
        if isinstance(self.soft.gain, least_distortion):
            return f"error <= {self.soft.gain.error:g} within {self.soft.gain.within!r}"
        return str(self.soft.gain)

    @property
    def holds(self) -> str:
        """Whether training keeps what the filter did."""
        return "constraint" if is_constraint(self.soft.gain, self.soft.rep) else "starting point"


@dataclass(frozen=True)
class Plan:
    """What `soften` will do; print it."""

    group: Group
    action: Action
    weights: tuple[Planned, ...]
    skipped: tuple[Skipped, ...]
    uneven: tuple[Uneven, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        rows = [("weight", "what", "shape", "levels", "kept", "after training")]
        for weight in self.weights:
            levels = len(spectrum(weight.soft.rep).levels)
            shape = "x".join(map(str, weight.shape))
            rows.append((weight.found.name, weight.found.what, shape, str(levels), weight.kept, weight.holds))
        lines = aligned(rows)
        reasons = Counter(skipped.reason for skipped in self.skipped)
        lines.append(f"left alone: {len(self.skipped)} weights")
        for reason, count in reasons.most_common():
            example = next(skipped.name for skipped in self.skipped if skipped.reason == reason)
            lines.append(f"  {count} x {reason} ({example}{', ...' if count > 1 else ''})")
        lines += [f"geometry: {uneven}" for uneven in self.uneven]
        return "\n".join([f"{self.group}: {len(self.weights)} weights", *lines, *([self.note] if self.note else [])])


def check_asked(
    softness: Softness | None, error: Error | None, within: float | None, gain: Gain | None, scope: Scope, data: Any
) -> None:
    """Raise a sentence unless the user said in one way how equivariant, with all that belongs to it."""
    if sum(choice is not None for choice in (softness, error, gain)) != 1:
        raise GainError("say how equivariant in exactly one way: softness=..., error=... with within=..., or gain=...")
    if error is not None and within is None:
        raise GainError(f"error={error!r} needs within=..., the range it holds for, such as degrees(30)")
    if error is None and within is not None:
        raise GainError("within=... belongs to error=...; softness and gains need no range")
    if softness == {} or error == {}:
        raise GainError("an empty mapping names no weight; give names or patterns with their numbers")
    if gain is not None and not isinstance(gain, Gain):
        raise GainError(f"gain must be a gain, such as hard(1.0) or softness(0.5); got {gain!r}")
    if scope not in get_args(Scope):
        raise SoftEquivError(f"unknown scope {scope!r}; choose from {', '.join(map(repr, get_args(Scope)))}")
    if scope == "layer" and data is not None:
        raise SoftEquivError("data=... belongs to scope='network'; an error of each weight needs no samples")
    if scope == "network" and (error is None or isinstance(error, Mapping)):
        raise GainError("scope='network' shares out one error of the network: give error=..., one number")
    if scope == "network" and data is None:
        raise SoftEquivError("scope='network' needs data=..., some hundred samples on which the error is measured")


def chosen_gain(
    name: str, softness: Softness | None, error: Error | None, within: float | None, gain: Gain | None
) -> Gain:
    """The gain of one weight from what the user said."""
    if error is not None:
        return least_distortion(value_for(name, error), cast(float, within))
    return cast(Gain, gain) if softness is None else softness_gain(value_for(name, softness))


def value_for(name: str, values: float | Mapping[str, float]) -> float:
    """One number for all weights, or that of the first pattern that matches."""
    return values[first_match(name, values)] if isinstance(values, Mapping) else values


def first_match(name: str, patterns: Iterable[str]) -> str:
    """The pattern that decides on a weight."""
    return next(pattern for pattern in patterns if matches(name, pattern))


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a weight: by its name, with wildcards, or by a module that it is part of.

    >>> [matches("layer1.0.weight", pattern) for pattern in ("layer1.0.weight", "*.weight", "layer1", "layer")]
    [True, True, True, False]
    """
    return name == pattern or fnmatch.fnmatch(name, pattern) or name.startswith(pattern + ".")


def matching(
    names: Iterable[str],
    patterns: Iterable[str],
    skipped: Iterable[Skipped] = (),
    kind: str = "weight that can be softened",
) -> set[str]:
    """The names that any pattern matches; a pattern that matches none is an error with the reason or close matches."""
    names = list(names)
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise SoftEquivError(f"names and patterns are given as a list, such as ['*.weight']; got {patterns!r}")
    out: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SoftEquivError(f"weights are named by text, such as 'layer1' or '*.weight'; got {pattern!r}")
        hits = [name for name in names if matches(name, pattern)]
        if not hits:
            reason = next((item.reason for item in skipped if matches(item.name, pattern)), None)
            if reason is not None:
                raise SoftEquivError(f"{pattern!r} cannot be softened: {reason}")
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
            some = ", ".join([*names[:5], *(["..."] if names[5:] else [])]) or "none"
            near = f"close to it: {', '.join(close)}" if close else f"there are {some}"
            raise SoftEquivError(f"{pattern!r} names no {kind}; {near}")
        out.update(hits)
    return out


def plan(
    model: nn.Module,
    group: Group | str,
    *,
    softness: Softness | None = None,
    error: Error | None = None,
    within: float | str | None = None,
    gain: Gain | None = None,
    scope: Scope = "layer",
    data: Any = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
    image_size: int | None = None,
) -> Plan:
    """What `soften` with the same arguments will do, without doing it.

    `softness` and `error` are one number, or a mapping from names, modules or patterns of weights to numbers: the first
    match counts, and weights that nothing matches are left alone. `only` and `skip` are such names too; `grids` names
    linear layers on flattened pictures with their (channels, H, W). Geometry is checked at `image_size`, by default the
    one in the model's config.

    With `scope` "network" the error is one number for the whole classifier, the mean KL[F(x) || F(g x)] in nats over
    the samples x in `data` (a tensor, a pair with labels, or a loader) and g drawn within the range. It is shared out
    among the weights so that the network before training meets it, as `softequiv.adapt.split` says; each weight then
    has an error of its own.

    >>> import softequiv as se
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1))
    >>> print(se.plan(net, "C4", softness=0.0, image_size=32))
    C4: 1 weights
    weight    what    shape    levels  kept    after training
    0.weight  kernel  8x3x3x3  3       3 of 9  constraint
    left alone: 1 weights
      1 x a kernel of size one has no directions to filter (2.weight)
    """
    if action not in get_args(Action):
        raise SoftEquivError(f"unknown action {action!r}; choose from {', '.join(map(repr, get_args(Action)))}")
    if next(soft_weights(model), None) is not None:
        raise SoftEquivError("this model is soft already; turn the dial with set_softness, or bake it first")
    reach = range_of(within)
    check_asked(softness, error, reach, gain, scope, data)
    setting = Setting(as_group(group), action, grids)
    findings = list(find(model, setting))
    found = [finding for finding in findings if isinstance(finding, Found)]
    names = [finding.name for finding in found]
    skipped = [finding for finding in findings if isinstance(finding, Skipped)]
    chosen = matching(names, only, skipped) if only is not None else set(names)
    chosen -= matching(names, skip, skipped)
    skipped += [Skipped(name, "not chosen") for name in names if name not in chosen]
    what, values = ("softness", softness) if error is None else ("error", error)
    if isinstance(values, Mapping):
        named = matching(names, values, skipped)
        idle = values.keys() - {first_match(name, values) for name in named}
        if idle:
            raise GainError(
                f"the {what} of {min(idle)!r} would count for no weight: patterns before it match them all, and the "
                "first match counts; put it before them"
            )
        skipped += [Skipped(name, f"no {what} given for it") for name in names if name in chosen - named]
        chosen &= named
    if not found:
        raise SoftEquivError(
            f"no weight of {type(model).__name__} lives on a grid under {setting.group}: {_reasons(skipped)}"
        )
    found = [finding for finding in found if finding.name in chosen]
    if not found:
        raise SoftEquivError(f"only, skip and what is named leave none of {len(names)} weights to soften; choose again")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for finding in found:
        refuse_unready(model, finding)
        if finding.name not in parameters:
            raise SoftEquivError(f"{finding.name} is parametrised already; remove or merge that first, or skip it")
    size = (image_size, image_size) if image_size else config_sizes(model)
    uneven, note = (
        geometry(model, size, parameters, setting, [*(grids or ()), *(known.name for known in skipped)])
        if size
        else ((), "geometry not checked: give image_size=...")
    )
    if scope == "network":
        error, told = network_errors(model, found, setting.group, cast(float, error), cast(float, reach), data)
        note = "\n".join(filter(None, (told, note)))
    planned = []
    for finding in found:
        soft = Soft(finding.rep, chosen_gain(finding.name, softness, error, reach, gain), finding.layout)
        planned.append(Planned(finding, soft, tuple(parameters[finding.name].shape)))
    return Plan(setting.group, action, tuple(planned), tuple(skipped), uneven, note)


def network_errors(
    model: nn.Module, found: list[Found], group: Group, target: float, within: float, data: Any
) -> tuple[Mapping[str, float], str]:
    """The errors of weights that share one target of the network, and what they do to its error in words."""
    parts = list(inputs_of(data, BATCH))
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) != 1:
        raise SoftEquivError(f"scope='network' needs samples of one shape; data has {sorted(shapes) or 'none'}")
    x = torch.cat(parts)
    shared = split(model, found, target, x, Moves(Pictures(), group, within), within)
    return shared.errors, f"network: mean KL {shared.before:.3g} before, {shared.after:.3g} after, on {len(x)} samples"


def _reasons(skipped: list[Skipped]) -> str:
    return "; ".join(sorted({item.reason for item in skipped})[:3]) or "it has no weights"


def config_size(model: nn.Module) -> int | None:
    """The image size in a model's config, if it has one; the height where the width is another."""
    sizes = config_sizes(model)
    return sizes[0] if sizes else None


def config_sizes(model: nn.Module) -> Sizes | None:
    """(H, W) of the images in a model's config, if it says."""
    return as_sizes(getattr(getattr(model, "config", None), "image_size", None))


def geometry(
    model: nn.Module, size: Sizes, parameters: Mapping[str, nn.Parameter], setting: Setting, told: Collection[str]
) -> tuple[tuple[Uneven, ...], str]:
    """Layers that do not cover a picture of this size evenly, but for those that were told of."""
    channels = getattr(getattr(model, "config", None), "num_channels", None)
    if channels is None:
        first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = first.in_channels if first is not None else 3
    dtype = next(iter(parameters.values())).dtype
    uneven, stopped = uneven_layers(model, (1, channels, *size), dtype, setting.group, told)
    pixels = f"{size[0]}" if size[0] == size[1] else f"{size[0]} x {size[1]}"
    note = f"geometry not checked to the end at {pixels} pixels: the dry forward pass stopped with {stopped}"
    return tuple(uneven), note if stopped else ""
