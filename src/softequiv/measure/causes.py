"""Why does a part of a network break a symmetry, and what helps? Weights that move, lopsided windows, borders.

A weight is to blame only where the group really moves it: a filtered kernel under a stride leaves the stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from softequiv.actions import Vectors
from softequiv.adapt.geometry import Uneven, pair
from softequiv.adapt.positions import PatchGrid, dotted, tables
from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Shifts
from softequiv.reps import grid

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
MOVES = 2e-3  # a weight that moves by less, relative to its size, is symmetric up to rounding in half precision

Weight = Literal["kernel", "patch embedding", "position embedding"]
Kind = Weight | Literal["geometry", "flattening", "stride", "padding", "interpolation", ""]


@dataclass(frozen=True)
class Cause:
    """What kind of thing breaks the symmetry, which one, and what to do about it."""

    kind: Kind
    what: str
    remedy: str


RESAMPLING = Cause(
    "interpolation",
    "interpolation of the input, and what leaves its frame",
    "turn by quarters or flip, which lose nothing; or mask the data to the inscribed disc, continue its border with "
    "Pictures(padding='border'), or take a smaller range",
)
MIXING = Cause(
    "interpolation",
    "features between pixels and beyond the border, which can only be guessed",
    "low-pass the features, keep the maps larger, or leave their border out",
)
UNKNOWN = Cause("", "no known cause", "try what runs there step by step")
HIDDEN = Cause("", "no known cause", "look inside with more cuts: attribute(most=...)")


@dataclass(frozen=True)
class Circumstances:
    """What the network was tried on: elements, whether they resample pictures, and windows that lie lopsided.

    `soft` are the names of weights that are soft already, `fixed` those that `soften` leaves alone with its reasons,
    and `dropped` says whether there are more cuts than were used.
    """

    elements: tuple[Element, ...]
    resamples: bool
    uneven: tuple[Uneven, ...]
    soft: frozenset[str]
    fixed: Mapping[str, str]
    dropped: bool

    @property
    def shifts(self) -> bool:
        """Whether the moves are shifts, with which every kernel commutes."""
        return isinstance(self.elements[0].group, Shifts)

    def remedy(self, name: str) -> str:
        """What to do about a weight that the group moves."""
        if name in self.soft:
            return (
                f"filter it more: set_softness(model, ..., only=[{name!r}]); where it has an error target, which that "
                "would drop, bake the model and soften it again with a smaller error for this weight"
            )
        if name in self.fixed:
            return f"soften cannot filter it as it is: {self.fixed[name]}"
        first = "bake the model, then " if self.soft else ""
        return f"filter it: {first}soften(model, {str(self.elements[0].group)!r}, softness=..., only=[{name!r}])"


def causes(model: nn.Module, contents: Sequence[str], tried: Circumstances) -> tuple[Cause, ...]:
    """Everything in a part of the network that may break the symmetry, weights first."""
    found = [cause for name in contents for cause in in_weights(model, name, tried)]
    found += [
        Cause("geometry", f"stride or padding of {u.name}: {u.why}", u.remedy)
        for u in tried.uneven
        if u.name in contents
    ]
    found += [cause for name in contents for cause in in_windows(name, submodule(model, name), tried)]
    return tuple(found) or ((MIXING,) if tried.resamples else (HIDDEN,) if tried.dropped else (UNKNOWN,))


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this name; None for a parameter's."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def in_weights(model: nn.Module, name: str, tried: Circumstances) -> Iterator[Cause]:
    """Weights of a module, or a single parameter, that the group moves."""
    for kind, full, weight in weights_on_grids(model, name):
        if kind != "position embedding" and tried.shifts:
            continue
        share = moved_share(weight, tried.elements)
        if share > MOVES:
            yield Cause(
                kind,
                f"{kind} {full}, which the group moves by {100 * share:.0f}% of its size",
                tried.remedy(full),
            )


def weights_on_grids(model: nn.Module, name: str) -> Iterator[tuple[Weight, str, Tensor]]:
    """(kind, name, weight as (..., H, W)) of kernels and of tables of positions."""
    module = submodule(model, name)
    if isinstance(module, nn.Conv2d):
        if max(module.kernel_size) > 1:
            patch = module.stride == module.kernel_size
            yield "patch embedding" if patch else "kernel", f"{name}.weight", module.weight
        return
    inside = [""] if module is None else [below for below, _ in module.named_modules()]
    for below in inside:
        owner = name.rpartition(".")[0] if module is None else ".".join(filter(None, (name, below)))
        for attribute, found in tables(model, owner):
            full = dotted(owner, attribute)
            if isinstance(found, PatchGrid) and (module is not None or full == name):
                yield "position embedding", full, found.picture(getattr(model.get_submodule(owner), attribute))


def moved_share(weight: Tensor, elements: Sequence[Element]) -> float:
    """max_g ||g w - w|| / ||w|| for a weight (..., H, W), g as in `reps.grid`; 1 where the group does not act on it."""
    wide = weight.detach().double()
    try:
        acts = Vectors(grid(elements[0].group, *wide.shape[-2:]))
        return max(float((acts(wide, g) - wide).norm() / wide.norm().clamp_min(1e-300)) for g in elements)
    except SoftEquivError:
        return 1.0


def in_windows(name: str, module: nn.Module | None, tried: Circumstances) -> Iterator[Cause]:
    """What strides and borders do to moves that do not carry pixels to pixels, and flattening to all of them."""
    if isinstance(module, nn.Flatten):
        remedy = "pool over all places first, or name the next linear layer in soften(grids=...)"
        yield Cause("flattening", f"{name} turns places into channels", remedy)
    if isinstance(module, WINDOWS) and (tried.shifts or tried.resamples):
        window: Any = module
        if max(pair(window.stride)) > 1:
            remedy = "low-pass before it, or use a smaller stride"
            yield Cause("stride", f"stride of {name}, which misses what lies between", remedy)
        padded = window.padding == "same" or (window.padding != "valid" and max(pair(window.padding)) > 0)
        mode = padding_of(window) if padded else "circular"
        if tried.shifts and mode != "circular":
            yield Cause("padding", f"padding of {name}, which marks the border", "pad circularly")
        elif not tried.shifts and mode == "zeros":
            remedy = "pad by reflection, or leave the border out"
            yield Cause("padding", f"zero padding of {name}, which marks the border", remedy)


def padding_of(window: Any) -> str:
    """What a window reads beyond the border; a maximum, or a mean over what there is, reads nothing there."""
    if isinstance(window, nn.Conv2d):
        return window.padding_mode
    return "zeros" if getattr(window, "count_include_pad", False) else "nothing"


def common_name(contents: Sequence[str]) -> str:
    """The innermost module that holds all of them; the first and the last where that is the model itself."""
    shared: list[str] = []
    for level in zip(*(name.split(".") for name in contents), strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or " to ".join(dict.fromkeys([*contents[:1], *contents[-1:]]))
