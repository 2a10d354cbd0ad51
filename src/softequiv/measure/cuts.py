"""Where can a network be cut in two? At modules whose output alone decides the rest.

Such a module is found by substitution: with its output replaced by the one for another input, the network's answer is
that other input's. Modules inside a residual branch fail this test; the sum behind the branch passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from softequiv.actions import Acts, Pictures, Still, Tokens
from softequiv.adapt.checkpoint import plain_name
from softequiv.adapt.positions import MOST_PREFIX_TOKENS, square_grid
from softequiv.asking.answers import asked, check_finite
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.measure.progress import progress

MOST_CUTS = 40
IDLE = (nn.Identity, nn.Dropout, nn.Dropout2d)  # in eval mode
MAP_LAYERS = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.GroupNorm, nn.MaxPool2d, nn.AvgPool2d)  # (N, C, H, W)
SAME = 1e-4  # two answers are one when they differ by less, relative to how far the answers to two inputs are apart


@dataclass(frozen=True)
class Cut:
    """A module whose output decides the answer, how the group moves that output, and what ran since the last cut.

    `contents` are the names of the innermost modules, and of parameters that an outer module used by itself.
    """

    name: str
    acts: Acts
    contents: tuple[str, ...]


def feature(result: Any) -> Tensor | None:
    """The first tensor of what a module returned."""
    if isinstance(result, Mapping):
        result = next(iter(result.values()), None)
    elif isinstance(result, (tuple, list)):
        result = result[0] if result else None
    return result if isinstance(result, Tensor) else None


def with_feature(result: Any, value: Tensor) -> Any:
    """The same result with its first tensor replaced."""
    if isinstance(result, Tensor):
        return value
    if isinstance(result, Mapping):
        changed: Any = copy.copy(result)
        changed[next(iter(result))] = value
        return changed
    parts = [value, *result[1:]]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


@contextmanager
def replaced(module: nn.Module, value: Tensor) -> Iterator[None]:
    """The module returns `value` whatever it is given. A copy, as the next layer may write into it."""
    handle = module.register_forward_hook(lambda _, inputs, result: with_feature(result, value.clone()))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def watched(modules: Mapping[str, nn.Module], note: Callable[[str, Any], None]) -> Iterator[None]:
    """`note(name, result)` is called after each of the modules, in order of execution."""
    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_hook(lambda _, inputs, result, name=name: note(name, result)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def features_of(model: nn.Module, x: Tensor, names: list[str]) -> tuple[Tensor, list[Tensor]]:
    """F(x), and the features that the named modules return on the way."""
    kept: dict[str, Tensor] = {}

    def note(name: str, result: Any) -> None:
        kept[name] = feature(result).clone()  # type: ignore[union-attr]  # a cut returned a tensor when it was found

    with watched({name: model.get_submodule(name) for name in names}, note):
        y = asked(model, x)
    return y, [kept[name] for name in names]


class Recording(TorchFunctionMode):
    """What ran in one forward pass, in order: modules with their features, and parameters used outside of them."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self.parameters = parameters
        self.order: list[str] = []
        self.features: dict[str, tuple[Tensor, Tensor]] = {}  # the tensor itself, and a copy

    def note(self, name: str, result: Any) -> None:
        """After a module."""
        value = feature(result)
        again = name in self.order
        self.order.append(name)
        if again:
            self.features.pop(name, None)  # which of its calls to replace could not be said
        elif value is not None and value.is_floating_point():
            self.features[name] = (value, value.clone())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        for value in [part for one in given for part in (one if isinstance(one, (tuple, list)) else [one])]:
            if id(value) in self.parameters:
                self.order.append(self.parameters[id(value)])
        return func(*args, **(kwargs or {}))


def is_machinery(name: str) -> bool:
    """Whether a module only makes a weight."""
    return "parametrizations" in name.split(".")


def is_innermost(module: nn.Module) -> bool:
    """Whether a module holds no other."""
    return all(is_machinery(name) for name, _ in module.named_modules() if name)


def outer_parameters(model: nn.Module) -> dict[int, str]:
    """Parameters of modules that hold other modules, such as position tables and class tokens, by identity."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        if not is_innermost(model.get_submodule(plain.rpartition(".")[0])):
            found[id(parameter)] = plain
    return found


def is_cube(h: Tensor) -> bool:
    """Whether a map's shape (N, n, n, n) does not tell if channels are first or last."""
    return h.ndim == 4 and h.shape[1] == h.shape[2] == h.shape[3]


class Grids:
    """How the group moves features of each shape: maps as pictures, tokens as the grid last seen, vectors not."""

    def __init__(self, group: Group, acts: Pictures, x: Tensor) -> None:
        self.group, self.samples = group, len(x)
        # no layer makes zeros of what lies outside; continued, the border is left alone by affine pointwise layers
        self.pictures = Pictures(acts.interpolation, "border")
        self.square = x.shape[-1] == x.shape[-2]
        self.side = x.shape[-1]

    def acts_on(self, h: Tensor, module: nn.Module) -> Acts | None:
        """The action, or None where it cannot be told, or the group does not act on such features of the module."""
        told = any(isinstance(part, MAP_LAYERS) for part in module.modules())
        try:
            acts = None if is_cube(h) and not told else self.by_shape(h)
            if acts is not None:
                acts.check(self.group, h)
        except SoftEquivError:
            return None
        return acts

    def by_shape(self, h: Tensor) -> Acts | None:
        """The action on features (N, D), (N, tokens, D) or (N, C, H, W)."""
        if len(h) != self.samples or h.ndim not in (2, 3, 4):
            return None
        if h.ndim == 2 or h[0, 0].numel() == 1 or (h.ndim == 3 and h.shape[1] == 1):
            return Still()
        if h.ndim == 3:
            return self.tokens(*h.shape[1:]) if self.square else None
        if self.square and h.shape[-1] != h.shape[-2]:
            return None  # channels last, or a strip
        self.side = h.shape[-1]
        return self.pictures

    def tokens(self, count: int, width: int) -> Acts | None:
        """Tokens on the grid last seen, or else on the one with fewest extra tokens; None for flat maps (C, H * W)."""
        if width == self.side**2:
            return None
        if 0 <= count - self.side**2 <= MOST_PREFIX_TOKENS:
            return Tokens(self.side, self.side, count - self.side**2, self.pictures.interpolation, "border")
        found = square_grid(count)
        if found is None:
            return None
        extra, self.side = found
        return Tokens(self.side, self.side, extra, self.pictures.interpolation, "border")


def noise_like(x: Tensor, seed: int) -> Tensor:
    """Two samples of noise with the mean and spread of the data."""
    noise = torch.randn(2, *x.shape[1:], generator=torch.Generator().manual_seed(seed)).to(x)
    return x.mean() + (x.std() if x.numel() > 1 else 1.0) * noise


@torch.no_grad()
def find_cuts(
    model: nn.Module,
    x: Tensor,
    group: Group,
    acts: Pictures = Pictures(),  # noqa: B008  (frozen)
    most: int = MOST_CUTS,
) -> tuple[list[Cut], tuple[str, ...]]:
    """The cuts in order of execution, and what runs behind the last: x (N, C, H, W) says how inputs look.

    Of modules that return one and the same tensor the innermost stays; of more than `most` cuts, every so many. A
    module that runs twice is none.

    >>> from softequiv import C
    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> [cut.name for cut in find_cuts(net, torch.randn(2, 1, 8, 8), C(4))[0]]
    ['0', '1', '2']
    """
    modules = {name: module for name, module in model.named_modules() if name and not is_machinery(name)}
    pair, there = noise_like(x, 0), noise_like(x, 1)[:1]
    shapes, recording = (Recording(outer_parameters(model)) for _ in range(2))
    with watched(modules, shapes.note), shapes:
        asked(model, pair)
    with watched(modules, recording.note), recording:  # one sample, as below: kernels may round by batch size
        answer = asked(model, pair[:1])
    check_finite(answer, "the model's answers to noise")
    apart = float((answer - asked(model, there)).abs().max())
    if not apart > 0:
        raise SoftEquivError("the model answers every input alike, so there is nothing to attribute; check its weights")
    seen, candidates = {id(answer)}, []
    for name, (value, copied) in recording.features.items():
        is_answer = copied.shape == answer.shape and torch.equal(copied, answer)
        if id(value) not in seen and not is_answer and not pads_one_side(modules[name]):
            seen.add(id(value))
            candidates.append((name, copied))
    grids = Grids(group, acts, pair)
    found: list[tuple[str, Acts]] = []
    for name, value in progress(candidates, "finding cuts", len(candidates)):
        moves = grids.acts_on(shapes.features[name][1], modules[name])
        if moves is not None and decides(model, modules[name], value, there, answer, SAME * apart):
            found.append((name, moves))
    if len(found) > most:
        found = [found[i] for i in torch.linspace(0, len(found) - 1, most).round().long().tolist()]
    told = {name for name, module in modules.items() if is_innermost(module) and not isinstance(module, IDLE)}
    told |= set(recording.parameters.values())
    return segments(found, [name for name in recording.order if name in told or name in dict(found)], told)


def pads_one_side(module: nn.Module) -> bool:
    """Whether a module moves the middle of the map, so that the group acts on its output about another centre."""
    pads = getattr(module, "padding", None)
    return isinstance(pads, tuple) and len(pads) == 4 and pads[:2] + pads[2:] != pads[1::-1] + pads[:1:-1]


def decides(model: nn.Module, module: nn.Module, value: Tensor, other: Tensor, answer: Tensor, near: float) -> bool:
    """Whether the model answers `answer` to another input once the module returns `value`."""
    try:
        with replaced(module, value):
            return float((asked(model, other) - answer).abs().max()) <= near
    except (SoftEquivError, TypeError):  # a result that cannot be rebuilt, or is not taken
        return False


def segments(found: list[tuple[str, Acts]], order: list[str], told: set[str]) -> tuple[list[Cut], tuple[str, ...]]:
    """The cuts with what ran before each, and what ran behind the last; of all that ran, `told` is worth telling."""
    cuts, start = [], 0
    for name, acts in found:
        end = order.index(name) + 1
        cuts.append(Cut(name, acts, once(order[start:end], told)))
        start = end
    return cuts, once(order[start:], told)


def once(names: list[str], told: set[str]) -> tuple[str, ...]:
    """Those worth telling, each once, in order."""
    return tuple(dict.fromkeys(name for name in names if name in told))
