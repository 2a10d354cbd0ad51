"""Which tables hold one vector for every patch of a picture, and on which grid do the patches lie?

A table counts where its rows are the patches that its model cuts pictures into, as the convolution beside it and the
sizes that the model states have it. A count alone says little: a hundred queries are no 10 x 10 picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from softequiv.nn import Layout

MOST_PREFIX_TOKENS = 8  # class, distillation and register tokens before the grid
PICTURE_SIZES = ("pretrain_image_size", "image_size", "img_size")  # the first is that of the table where both are there
POSITIONS = re.compile(r"pos(ition(al|s)?)?_?emb")
ROWS_OR_COLUMNS = re.compile(r"(^|[._])(row|col|column|height|width|[xyhw])_[^.]*(pos|emb)[^.]*$")
NO_PATCHES = {
    "displacements": re.compile(r"rel_pos|relative[^.]*$"),
    "frames": re.compile(r"(^|[._])(time|temporal|frame)[^.]*$"),
    "the rows or columns of pictures": ROWS_OR_COLUMNS,
    "queries": re.compile(r"quer[^.]*$"),
    "places in a text": re.compile(r"(^|[._])text"),
}
BY_HAND = "if they are a grid, filter the table by softequiv.nn.soften_weight, which takes the grid and the layout"
NO_PARAMETER = "it is no parameter, so it stays, and the model tells places apart: make it one, which is then filtered"

Sizes = tuple[int, int]


@dataclass(frozen=True)
class PatchGrid:
    """H x W patches in a table: its last two axes, or rows of one axis behind those of other tokens."""

    sizes: Sizes
    layout: Layout = Layout()  # noqa: RUF009  (frozen)

    def picture(self, table: Tensor) -> Tensor:
        """The table as (..., H, W), without other tokens."""
        axis = self.layout.axis
        if axis is None:
            return table
        return table.narrow(axis, self.layout.skip, math.prod(self.sizes)).movedim(axis, -1).unflatten(-1, self.sizes)


def square_grid(tokens: int) -> tuple[int, int] | None:
    """(prefix tokens, side) with tokens = prefix + side^2 and the shortest prefix."""
    for prefix in range(MOST_PREFIX_TOKENS + 1):
        side = math.isqrt(max(tokens - prefix, 0))
        if side > 1 and side * side == tokens - prefix:
            return prefix, side
    return None


def tables(model: nn.Module, name: str) -> Iterator[tuple[str, PatchGrid | str]]:
    """The tables of positions in one module: the parameter, and its grid of patches or the reason why it has none. A
    buffer or another tensor that is such a table comes with a reason, as only parameters are filtered.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.image_size = (32, 64)
    ...         self.patches = nn.Conv2d(3, 16, 8, stride=8)
    ...         self.pos_embed = nn.Parameter(Tensor(1, 33, 16))
    >>> [(attribute, grid.sizes, grid.layout.skip) for attribute, grid in tables(Net(), "")]
    [('pos_embed', (4, 8), 1)]
    """
    path = holders(model, name)
    if isinstance(path[0], nn.Embedding):
        if "position" in name.rpartition(".")[2] or ROWS_OR_COLUMNS.search(name):
            yield "weight", patch_grid(name, path[0].weight, path[1:])
        return
    for attribute, table in path[0].named_parameters(recurse=False):
        named = "pos" in attribute or ROWS_OR_COLUMNS.search(attribute)
        if named and not attribute.endswith("relative_position_bias_table") and table.ndim > 1:
            yield attribute, patch_grid(dotted(name, attribute), table, path)
    for attribute, tensor in other_tensors(path[0]).items():
        if ("pos" in attribute or attribute == "pe") and tensor.is_floating_point() and tensor.ndim > 1:
            found = patch_grid(dotted(name, attribute), tensor, path)
            yield attribute, found if isinstance(found, str) else NO_PARAMETER


def other_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module that are no parameters: its buffers, and attributes that it does not register."""
    loose = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {**dict(module.named_buffers(recurse=False)), **loose}


def holders(model: nn.Module, name: str) -> list[nn.Module]:
    """The module of this name and those that hold it, innermost first."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]


def patch_grid(name: str, table: Tensor, path: Sequence[nn.Module]) -> PatchGrid | str:
    """The grid of patches in a table of this name, which the modules on the path hold, innermost first."""
    rows = next((what for what, pattern in NO_PATCHES.items() if pattern.search(name)), None)
    if rows is None and holds_words(path[0]):
        rows = "places in a text"
    if rows is not None:
        return f"its rows are {rows}, not the patches of a picture"
    if any("detection" in key for key, _ in path[0].named_parameters(recurse=False)):
        return "it has rows for detections behind those of its patches, and only tokens before them can be told apart"
    grids = stated_grids(path)
    called = POSITIONS.search(name.rpartition(".")[2]) is not None
    if table.ndim == 4:
        return picture_axes(tuple(table.shape), grids, called)
    if table.ndim > 4 or math.prod(table.shape[:-2]) > 1:
        return f"no axis of {by(table.shape)} is known to run over patches; {BY_HAND}"
    axis, count = table.ndim - 2, table.shape[-2]
    for sizes in grids:
        if 0 <= count - math.prod(sizes) <= MOST_PREFIX_TOKENS and max(sizes) > 1:
            return PatchGrid(sizes, Layout(axis=axis, skip=count - math.prod(sizes)))
    if grids:
        return (
            f"{count} positions are not the {by(grids[0])} patches of its pictures and up to {MOST_PREFIX_TOKENS} "
            f"other tokens before them; {BY_HAND}"
        )
    square = square_grid(count)
    if not called or not patch_convolutions(path[0]):
        return (
            f"nothing says that {count} positions are patches of a picture: put the table beside the convolution that "
            f"cuts it into patches, or state image_size and patch_size on a module that holds both; {BY_HAND}"
        )
    if square is None:
        return (
            f"{count} positions are no square grid with up to {MOST_PREFIX_TOKENS} extra tokens: state image_size and "
            "patch_size on the module that holds them"
        )
    prefix, side = square
    return PatchGrid((side, side), Layout(axis=axis, skip=prefix))


def picture_axes(shape: tuple[int, ...], grids: Sequence[Sizes], called: bool) -> PatchGrid | str:
    """The grid in a table (1, width, H, W), which may be read at another size than that of the patches."""

    def fits(sizes: tuple[int, ...]) -> bool:
        return sizes in grids or (called and sizes[0] == sizes[1] > 1)

    first, last = shape[-3:-1], shape[-2:]
    if shape[0] == 1 and fits(last) and not fits(first):
        return PatchGrid((last[0], last[1]))
    if shape[0] == 1 and fits(first) and not fits(last):
        return f"its channels come last, and only tables (1, width, H, W) are read, not (1, {by(first, ', ')}, width)"
    return f"no axes of {by(shape)} are known to be a grid of patches; {BY_HAND}"


def holds_words(module: nn.Module) -> bool:
    """Whether a table of words stands in a module: one of anything but positions and types of tokens."""
    named = [name for name, child in module.named_children() if isinstance(child, nn.Embedding)]
    return any("pos" not in name and "type" not in name for name in named)


def stated_grids(path: Sequence[nn.Module]) -> list[Sizes]:
    """The grids of patches that a model states for a table: outright, by a convolution, or by the size of a patch."""
    near = list(path[0].children())
    picture = stated(near, path, PICTURE_SIZES)
    patch = stated(near, path, ("patch_size",))
    outright = stated(near, path[:1], ("grid_size",))
    grids = [outright] if outright else []
    if picture:
        grids += filter(None, (outputs(conv, picture) for conv in patch_convolutions(path[0])))
        grids += [(picture[0] // patch[0], picture[1] // patch[1])] if patch and min(patch) > 0 else []
    return grids


def stated(near: Iterable[nn.Module], path: Iterable[nn.Module], names: Sequence[str]) -> Sizes | None:
    """The first size of one of these names, on modules beside a table, then on its holders and in their configs."""
    places: list[Any] = [*near, *(place for module in path for place in (module, getattr(module, "config", None)))]
    found = (as_sizes(getattr(place, name, None)) for place in places for name in names)
    return next((sizes for sizes in found if sizes), None)


def as_sizes(value: Any) -> Sizes | None:
    """(H, W) of a number or a pair; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(size, int) for size in value):
        return value[0], value[1]
    return None


def patch_convolutions(module: nn.Module) -> list[nn.Conv2d]:
    """Strided convolutions of a module or of one of its children."""
    below = [child for own in module.children() for child in (own, *own.children())]
    return [conv for conv in below if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1]


def outputs(conv: nn.Conv2d, picture: Sizes) -> Sizes | None:
    """How many places a convolution has on a picture; None where it does not fit."""
    padding: Any = (0, 0) if isinstance(conv.padding, str) else conv.padding  # a stride goes with 'valid' only
    sizes = [
        (picture[axis] + 2 * padding[axis] - conv.dilation[axis] * (conv.kernel_size[axis] - 1) - 1)
        // conv.stride[axis]
        + 1
        for axis in (0, 1)
    ]
    return (sizes[0], sizes[1]) if min(sizes) > 0 else None


def dotted(module: str, attribute: str) -> str:
    """The name of what a module of this name holds; that of the model itself is empty.

    >>> dotted("layer1.0", "weight"), dotted("", "weight")
    ('layer1.0.weight', 'weight')
    """
    return f"{module}.{attribute}" if module else attribute


def by(sizes: Iterable[int], times: str = " x ") -> str:
    """Sizes in words."""
    return times.join(map(str, sizes))
