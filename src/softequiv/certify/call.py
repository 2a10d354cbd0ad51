"""What is one operation of a network's graph, and which picture does it take or make? What its rule needs to know."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from softequiv.certify.signals import How, Moving, Padded, Pixels, Range, Signal, Still, UnboundedError
from softequiv.groups import Shifts
from softequiv.reps import Rep


@dataclass(frozen=True)
class Call:
    """One operation of the graph: its arguments by name, where it stands, and the shape of its result."""

    op: str
    args: Mapping[str, Any]
    where: str
    shape: tuple[int, ...]
    elements: Range
    spaces: Mapping[str, Rep]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that some forms of an operation do not have."""
        return self.args.get(name, default)

    @property
    def x(self) -> Signal:
        """The first argument, which must be a signal, without a border that awaits a convolution."""
        return settled(next(iter(self.args.values())), self)

    def refuse(self, why: str) -> UnboundedError:
        """The refusal that names this operation."""
        return UnboundedError(f"{self.op} in {self.where}: {why}")


Rule = Callable[[Call], Signal]


def settled(signal: Any, call: Call) -> Signal:
    """A padded picture as a picture of its own, if it moves as one; the border may repeat pixels."""
    if not isinstance(signal, Signal):
        raise call.refuse("its first argument does not depend on the input")
    how = signal.how
    if not isinstance(how, Padded):
        return signal
    if isinstance(call.elements.group, Shifts):
        raise call.refuse(f"a {how.mode} border does not shift with the picture")
    refuse_lopsided(call, [before - after for before, after in how.border], "its padding")
    every = [(n, before, after) for n, (before, after) in zip(how.inside.sizes, how.border, strict=True)]
    repeats = math.prod(copies(*axis, how.mode) for axis in every)
    moves = as_picture(call, how.inside.channels, tuple(map(sum, every)))
    return signal.through(signal.shape, moves, math.sqrt(repeats))


def copies(n: int, before: int, after: int, mode: str) -> int:
    """How often padding an axis repeats a pixel at most."""
    if mode == "constant" or not (before or after):
        return 1
    places = functional.pad(torch.arange(float(n))[None, None], (before, after), mode=mode).long().flatten()
    return int(torch.bincount(places).max())


def refuse_lopsided(call: Call, excess: Sequence[int], what: str) -> None:
    """An axis that the group turns round must look alike from both ends."""
    turned = call.elements.reversed_axes[-len(excess) :]
    for axis, (surplus, turns) in enumerate(zip(excess, turned, strict=True)):
        if turns and surplus:
            raise call.refuse(f"{what} leaves pixels over at one end of axis {axis}, {abs(surplus)}; it cannot turn")


def refuse_unbatched(call: Call, x: Signal) -> None:
    """conv2d takes samples, channels and two axes of pixels; torch lets the first one be left out."""
    axes = re.search(r"\d(?=d)", call.op)
    if axes is not None and len(x.shape) != 2 + int(axes[0]):
        raise call.refuse(f"its input has shape {x.shape}; give an example with samples and channels before the pixels")


def picture(call: Call, x: Signal) -> Pixels:
    """The picture that an operation on pixels needs."""
    refuse_unbatched(call, x)
    if isinstance(x.how, Pixels) and not x.how.flat:
        return x.how
    if isinstance(x.how, Still) and len(x.shape) > 2 and math.prod(x.shape[2:]) == 1:
        return Pixels(x.shape[1], x.shape[2:])
    if isinstance(x.how, Moving) and not x.how.flat:
        raise refuse_mixing(call)
    raise call.refuse(f"it takes pictures, and its input {x.how}")


def refuse_mixing(call: Call) -> UnboundedError:
    """Turns by other angles than quarters mix pixels."""
    return call.refuse(f"{call.elements.group} does not permute pixels, and no such operation commutes with it")


def as_picture(call: Call, channels: int, sizes: tuple[int, ...]) -> How:
    """How a picture that an operation on pixels has made moves."""
    how = call.elements.picture(channels, sizes)
    if isinstance(how, Moving):
        raise refuse_mixing(call)
    return how


def outcome(call: Call) -> How:
    """How the result of an operation on pixels moves, from its shape."""
    return as_picture(call, call.shape[1], call.shape[2:])
