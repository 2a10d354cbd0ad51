"""A filtered weight inside a torch module: one mechanism for every layer, with two ways to train it.

"parametrize": the stored parameter is Theta, and every forward pass sees W = gain(Theta) (torch's own parametrisation).
"project": the module stays plain, its stored weight is W itself, and `constraints.hold` projects it after each step.
Forward passes never change a parameter, and nothing derived enters the state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv._cache import on_the_cpu
from softequiv.errors import GainError, SoftEquivError, WeightError
from softequiv.gains import Composed, Cone, Gain, LevelGain, WeightFilter
from softequiv.gains.cone import nearest
from softequiv.nn.module import check_module
from softequiv.reps import Rep
from softequiv.spectrum import Filter, spectrum
from softequiv.spectrum.base import full_precision, in_one_step, traced_or_transformed
from softequiv.spectrum.transforms import tf32_allowed

Mode = Literal["parametrize", "project"]
MARK = "_soft_weights"  # where a plain module remembers what `hold` must project
ADAPTED = "base_layer"  # what PEFT calls the layer to which it adds
Fitted = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Layout:
    """Where the axes on which a group acts lie in a stored tensor; by default they are its last ones.

    `axis`: the stored axis that holds the space, flattened, `channels` times over; `skip` and `behind`: entries at its
    start and its end that the group leaves alone (class and register tokens); `groups`: the first axis holds so many
    independent maps (grouped convolution); `swap`: the first two axes are exchanged (transposed convolution).
    """

    axis: int | None = None
    skip: int = 0
    channels: int = 1
    groups: int = 1
    swap: bool = False
    behind: int = 0

    def read(self, stored: Tensor, rep: Rep) -> Tensor:
        """The stored tensor as (..., *rep.shape)."""
        if self.axis is not None:
            part = stored.narrow(self.axis, self.skip, self.channels * rep.dim).movedim(self.axis, -1)
            return part.unflatten(-1, (self.channels, *rep.shape))
        if self.groups > 1:
            stored = stored.unflatten(0, (self.groups, -1))
        return stored.transpose(-len(rep.shape), 1 - len(rep.shape)) if self.swap else stored

    def write(self, stored: Tensor, part: Tensor, rep: Rep) -> Tensor:
        """A tensor like `stored` with its group axes replaced by `part`."""
        if self.axis is not None:
            flat = part.flatten(part.ndim - len(rep.shape) - 1).movedim(-1, self.axis)
            if not (self.skip or self.behind):
                return flat
            first = stored.narrow(self.axis, 0, self.skip)
            last = stored.narrow(self.axis, stored.shape[self.axis] - self.behind, self.behind)
            return torch.cat([first, flat, last], self.axis)
        part = part.transpose(-len(rep.shape), 1 - len(rep.shape)) if self.swap else part
        return part.flatten(0, 1) if self.groups > 1 else part


PLAIN = Layout()


@dataclass(frozen=True)
class Soft:
    """What is done to one weight: its representation, its gain, and where its axes lie."""

    rep: Rep
    gain: Gain
    layout: Layout = PLAIN

    def __post_init__(self) -> None:
        if not isinstance(self.gain, Gain):
            raise GainError(f"a gain is softness(0.5), hard(1.0) or their like; got {self.gain!r}")


def through(apply: WeightFilter, soft: Soft, weight: Tensor) -> Tensor:
    """A stored tensor with its group axes filtered, in full precision inside autocast too."""
    if weight.is_meta or (isinstance(apply, Filter) and apply.side == "identity"):
        return weight
    with full_precision(weight):
        if soft.layout == PLAIN:
            return apply(weight)
        return soft.layout.write(weight, apply(soft.layout.read(weight, soft.rep)), soft.rep)


@dataclass(frozen=True)
class Sharing:
    """One linear filter, and the numbers of the weights that it serves; more than one if they are laid out plainly."""

    apply: Filter
    soft: Soft
    members: list[int]
    matrix: Tensor | None  # where the filter is one product with it


def sharing(filters: Iterable[tuple[Filter, Soft, torch.dtype, torch.device]]) -> list[Sharing]:
    """Which of some weights have one filter, dtype and device in common."""
    found: dict[tuple[object, ...], Sharing] = {}
    for number, (apply, soft, dtype, device) in enumerate(filters):
        plain = soft.layout == PLAIN
        key = (soft.rep, soft.gain, dtype, device) if plain else (number,)
        factor = apply.factor if plain and apply.gamma.dtype == dtype else None
        matrix = factor if factor is not None and factor.ndim == 2 else None
        found.setdefault(key, Sharing(apply, soft, [], matrix)).members.append(number)
    return list(found.values())


def through_linear(weights: Sequence[Tensor | None], filters: Iterable[Sharing]) -> list[Any]:
    """Each stored tensor that is there through its own filter; those that share one go together, as one long tensor."""
    done: list[Any] = [None] * len(weights)
    transformed = traced_or_transformed()
    for shared in filters:
        members = [number for number in shared.members if weights[number] is not None]
        own: list[Any] = [weights[number] for number in members]
        if not own:
            continue
        apart = transformed or torch._C._functorch.is_legacy_batchedtensor(own[0])  # torch cannot flatten these
        if apart or shared.soft.layout != PLAIN:
            for number, part in zip(members, own, strict=True):
                done[number] = through(shared.apply, shared.soft, part)
            continue
        flat: Tensor = torch._C._nn.flatten_dense_tensors(own)  # as DDP does: one call from Python for all of them
        if shared.matrix is None or tf32_allowed(flat):
            flat = through(shared.apply, shared.soft, flat.view(-1, *shared.soft.rep.shape))
        else:
            flat = times_matrix(flat, shared.matrix)
        for number, part in zip(members, torch._C._nn.unflatten_dense_tensors(flat.reshape(-1), own), strict=True):
            done[number] = part
    return done


def times_matrix(weight: Tensor, matrix: Tensor) -> Tensor:
    """Each d numbers of a weight in a row times (d, d), by the shortest way: Python takes longer than the product."""
    kind = weight.device.type
    autocast = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, False)
    try:
        return torch.mm(weight.reshape(-1, matrix.shape[0]), matrix)
    finally:
        torch.set_autocast_enabled(kind, autocast)


def product(weight: Tensor, factor: Tensor) -> Tensor:
    """A weight through a filter that is one product, of each number or of each d in a row."""
    return weight * factor if factor.ndim == 1 else times_matrix(weight, factor).view(weight.shape)


class Pass(Protocol):
    """A pass of a model for which weights were filtered ahead."""

    under_way: bool


@dataclass(slots=True)
class Prepared:
    """W = gain(Theta), filtered ahead of its use, and what it was made from; empty where nothing is ready.

    It serves while the pass is under way for which it was made, so that it cannot be out of date, and in the backward
    pass after it, in which checkpointed activations are computed again by the same steps.
    """

    weight: Tensor | None = None
    theta: Tensor | None = None
    version: int = 0
    fitted: Fitted | None = None
    during: Pass | None = None
    recorded: bool = False  # whether a backward pass may ask for it

    def fill(self, weight: Tensor, theta: Tensor, fitted: Fitted, during: Pass) -> None:
        """Have this ready from now on."""
        self.weight, self.theta, self.version, self.fitted = weight, theta, theta._version, fitted
        self.during, self.recorded = during, False

    def lasts(self) -> bool:
        """Whether the pass it was made for is under way, or a backward pass, which may compute parts of it again."""
        return (self.during is not None and self.during.under_way) or torch._C._current_graph_task_id() >= 0

    def during_another(self, own: Pass) -> bool:
        """Whether it is ready for a pass around this one, or for the backward pass of that."""
        return self.weight is not None and self.during is not own and self.lasts()

    def end(self, during: Pass) -> None:
        """The pass is over: let go of what its backward pass will not ask for."""
        if self.during is during and not self.recorded:
            self.forget()

    def forget(self) -> None:
        """Have nothing ready."""
        self.weight = self.theta = None

    def serve(self, theta: Tensor, fitted: Fitted) -> Tensor | None:
        """The weight, if filtering now would give the same value and the same gradient; otherwise nothing is ready any
        more, so that what was filtered at its access is so again in the backward pass.
        """
        weight = self.weight
        if weight is None:
            return None
        recording = torch.is_grad_enabled()
        if (
            theta is self.theta
            and theta._version == self.version
            and fitted is self.fitted
            and self.lasts()
            and not (recording and (weight.requires_grad != theta.requires_grad or weight.is_inference()))
        ):
            self.recorded |= recording
            return weight
        self.forget()
        return None


class FilteredWeight(nn.Module):
    """Theta -> W = gain(Theta), in float32 or float64 whatever autocast says; the filter follows the module around."""

    filter: WeightFilter
    held: WeightFilter
    factor: Tensor | None  # where the filter is one product, of each number or of each d in a row

    def __init__(self, soft: Soft, mode: Mode, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.mode = mode
        self.ready = Prepared()  # filled, never replaced: to set an attribute of a module takes longer
        self.order: tuple[str, ...] = ()  # of the module's parameters, for baking: torch moves what is parametrised
        self.set_soft(soft, dtype, device)

    def set_soft(self, soft: Soft, dtype: torch.dtype, device: torch.device) -> None:
        """Do this from now on, to weights of this dtype on this device."""
        place = torch.device("cpu") if device.type == "meta" else device  # the filter of no values has values
        fitted = (torch.float64 if dtype == torch.float64 else torch.float32, place)  # a new object each time
        with on_the_cpu():
            filter = soft.gain.on(soft.rep).to(*fitted)  # may refuse the gain, and then nothing has changed
            held = soft.gain.constraint(soft.rep).to(*fitted) if self.mode == "project" else filter
        self.soft, self.filter, self.held = soft, filter, held
        self.factor = filter.factor if isinstance(filter, Filter) and soft.layout == PLAIN else None
        self.shape = soft.rep.shape
        self.fitted = fitted  # last: by it what was prepared in another thread is known to be out of date

    def fit(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the filters anew, from exact ones, where the weight has another precision or place than before."""
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        if (precision, device) != self.fitted and device.type != "meta":
            self.set_soft(self.soft, precision, device)

    def forward(self, theta: Tensor) -> Tensor:
        theta = whole(theta)  # sharded where a weight is looked at between steps
        compiling = torch.compiler.is_compiling()
        if not compiling and (ready := self.ready.serve(theta, self.fitted)) is not None:
            return ready
        factor = None if compiling else self.factor
        if (
            factor is None
            or (theta.dtype, theta.device) != self.fitted
            or theta.shape[-len(self.shape) :] != self.shape
            or tf32_allowed(theta)
        ):
            return through(self.filter, self.soft, theta)
        return in_one_step(theta, partial(product, factor=factor))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """A weight that is assigned becomes Theta as it is: pretrained values are kept."""
        return weight

    def projected(self, weight: Tensor) -> Tensor:
        """The nearest weight that the gain's constraint admits."""
        self.fit(weight.dtype, weight.device)  # a plain module's marks do not travel with it
        return through(self.held, self.soft, weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FilteredWeight:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = fn(torch.empty(0, dtype=self.fitted[0]))
        self.fit(probe.dtype, probe.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ready": Prepared()}  # a copy filters for itself

    def extra_repr(self) -> str:
        return f"{self.soft.rep} under {self.soft.rep.group}, {self.soft.gain}, {self.mode}"


@dataclass(frozen=True)
class SoftWeight:
    """One soft weight of a model, as iteration shows it."""

    name: str
    module: nn.Module
    attribute: str
    filtered: FilteredWeight

    @property
    def soft(self) -> Soft:
        """Representation, gain and layout."""
        return self.filtered.soft

    @property
    def stored(self) -> nn.Parameter:
        """The parameter that the optimiser sees: Theta, or W itself in project mode."""
        if self.filtered.mode == "parametrize":
            lists: Any = self.module.parametrizations
            parameter: nn.Parameter = lists[self.attribute].original
            return parameter
        plain: nn.Parameter = getattr(self.module, self.attribute)
        return plain

    def value(self) -> Tensor:
        """The weight that the layer uses."""
        weight: Tensor = getattr(self.module, self.attribute)
        return weight

    def group_view(self) -> Tensor:
        """The weight that the layer uses, as (..., *rep.shape)."""
        return self.soft.layout.read(self.value(), self.soft.rep)


def softenable(module: nn.Module, attribute: str, mode: Mode = "parametrize", name: str = "") -> nn.Parameter:
    """The parameter that `soften_weight` would filter, or the reason why it cannot."""
    name = name or f"{type(module).__name__}.{attribute}"
    weight = unfiltered(module, attribute, mode, name)
    if weight.is_meta:
        raise WeightError(f"{name} has no values yet, it is on the meta device: load the model's weights first")
    if not torch.isfinite(weight).all():
        raise WeightError(f"{name} has entries that are not finite: mend it first")
    return weight


def unfiltered(module: nn.Module, attribute: str, mode: Mode, name: str) -> nn.Parameter:
    """A parameter that nothing filters yet, whatever its values."""
    if mode not in get_args(Mode):
        raise SoftEquivError(f"unknown mode {mode!r}; choose 'parametrize' or 'project'")
    weight = getattr(module, attribute, None)
    if not isinstance(weight, nn.Parameter):
        if not parametrize.is_parametrized(module, attribute):
            raise WeightError(f"{name} is not a parameter; choose another weight")
        if any(isinstance(step, FilteredWeight) for step in module.parametrizations[attribute]):  # type: ignore[index]
            raise WeightError(f"{name} is filtered already; bake the model first, or choose another weight")
        raise WeightError(f"{name} has another parametrisation, such as weight_norm; remove it first")
    if not weight.numel():
        raise WeightError(f"{name} of shape {tuple(weight.shape)} has no entries; choose another weight")
    return weight


def soften_weight(module: nn.Module, attribute: str, soft: Soft, mode: Mode = "parametrize") -> None:
    """Filter one parameter of a module from now on.

    >>> import softequiv as se
    >>> layer = nn.Conv2d(3, 8, 5)
    >>> soften_weight(layer, "weight", Soft(se.grid(se.C(4), 5, 5), se.softness(0)))
    >>> torch.allclose(layer.weight, layer.weight.rot90(1, (-2, -1)), atol=1e-6)
    True
    """
    softenable(module, attribute, mode)
    soften_new(module, attribute, soft, mode)


def soften_new(module: nn.Module, attribute: str, soft: Soft, mode: Mode) -> None:
    """Filter one parameter of a new module, which may have no values yet (on the meta device)."""
    weight = unfiltered(module, attribute, mode, f"{type(module).__name__}.{attribute}")
    layout = soft.layout
    spared, expected = layout.skip + layout.behind, layout.channels * soft.rep.dim
    if layout.axis is not None and spared + expected != weight.shape[layout.axis]:
        raise WeightError(
            f"{attribute} of shape {tuple(weight.shape)} has {weight.shape[layout.axis]} entries along axis "
            f"{layout.axis}; {spared} to skip and {layout.channels} of {soft.rep}, of {soft.rep.dim}, are "
            f"{spared + expected}: choose another layout"
        )
    filtered = FilteredWeight(soft, mode, weight.dtype, weight.device)
    view = layout.read(weight, soft.rep)
    if tuple(view.shape[view.ndim - len(soft.rep.shape) :]) != soft.rep.shape:
        raise WeightError(f"{attribute} of shape {tuple(weight.shape)} has no axes {soft.rep.shape} for {soft.rep}")
    if mode == "parametrize":
        filtered.order = tuple(module._parameters)
        parametrize.register_parametrization(module, attribute, filtered)
    else:
        with torch.no_grad():
            weight.copy_(filtered(weight))
        module.__dict__.setdefault(MARK, {})[attribute] = filtered


def soft_weights(model: nn.Module) -> Iterator[SoftWeight]:
    """All soft weights of a model, in the order of its modules.

    Whoever looks at them from here finds them filtered now: a pass for which they were made ready may have been
    interrupted from the keyboard, of which torch tells no hook.
    """
    check_module(model)
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if parametrize.is_parametrized(module):
            lists: Any = module.parametrizations
            for attribute, steps in lists.items():
                for step in steps:
                    if isinstance(step, FilteredWeight):
                        step.ready.forget()
                        yield SoftWeight(dot + attribute, module, attribute, step)
        for attribute, filtered in module.__dict__.get(MARK, {}).items():
            if prefix.rpartition(".")[2] == ADAPTED:
                raise SoftEquivError(
                    f"{dot}{attribute} is soft and inside a PEFT layer, which adds to it what no filter sees; merge "
                    "the adapter (merge_and_unload), or leave softened layers out of its target_modules"
                )
            yield SoftWeight(dot + attribute, module, attribute, filtered)


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is, or gathered where it is sharded over processes (FSDP2): then every process must ask."""
    sharded: Any = tensor
    gathered: Tensor = sharded.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


@torch.no_grad()
def replace_stored(stored: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Write change(stored) into a parameter; one that is sharded over processes (FSDP2) is gathered for it."""
    if not hasattr(stored, "full_tensor"):
        stored.copy_(change(stored))
        return
    from torch.distributed.tensor import distribute_tensor  # half a second that other users need not wait

    sharded: Any = stored
    changed = change(whole(stored))
    sharded.copy_(distribute_tensor(changed, sharded.device_mesh, sharded.placements, src_data_rank=None))


def nearest_in_cones(members: Iterable[tuple[Cone, Tensor, Soft]]) -> list[Tensor]:
    """The nearest tensor to each that lies in its cone; all of them on one device."""
    members = list(members)
    with torch.autocast(members[0][1].device.type, enabled=False):
        found = nearest([(cone, soft.layout.read(tensor, soft.rep)) for cone, tensor, soft in members])
        return [
            soft.layout.write(tensor, view, soft.rep) for (_, tensor, soft), view in zip(members, found, strict=True)
        ]


def set_gain(weight: SoftWeight, gain: Gain) -> None:
    """Give one soft weight another gain; in project mode its stored value, which has been through the gain so far, is
    filtered at once by what the new one takes beyond that.
    """
    stored, filtered, before = weight.stored, weight.filtered, weight.soft
    soft = Soft(before.rep, gain, before.layout)
    filtered.set_soft(soft, stored.dtype, stored.device)
    if filtered.mode == "project":
        further = beyond(before.gain, gain, soft.rep).to(*filtered.fitted)
        replace_stored(stored, lambda value: through(further, soft, value))


def beyond(before: Gain, after: Gain, rep: Rep) -> WeightFilter:
    """What takes a weight that has been through one gain on to another: min(1, after / before) of each level.

    Nothing grows, since what was taken away is not stored. A gain that depends on the weight starts anew.
    """
    if not (isinstance(before, LevelGain) and isinstance(after, LevelGain)):
        return after.on(rep)
    levels = spectrum(rep)
    had, has = before.gamma(levels), after.gamma(levels)
    return levels.filter(torch.where(has < had, has / had, (has > 0).to(had)))


def is_constraint(gain: Gain, rep: Rep) -> bool:
    """Whether training cannot undo the gain: hard subspaces and cones, not smooth or fractional levels."""
    apply = gain.on(rep)
    if isinstance(apply, Cone):
        return True
    filters = apply.filters if isinstance(apply, Composed) else (apply,)
    return all(isinstance(f, Filter) and bool(((f.gamma == 0) | (f.gamma == 1)).all()) for f in filters)
