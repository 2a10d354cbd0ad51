"""A filtered weight inside a torch module: one mechanism for every layer, with two ways to train it.

"parametrize": the stored parameter is Theta, and every forward pass sees W = gain(Theta) (torch's own parametrisation).
"project": the module stays plain, its stored weight is W itself, and `constraints.hold` projects it after each step.
Forward passes never change a parameter, and nothing derived enters the state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv._cache import on_the_cpu
from softequiv.errors import SoftEquivError, WeightError
from softequiv.gains import Composed, Cone, Gain, LevelGain, WeightFilter
from softequiv.nn.module import check_module
from softequiv.nn.soft import PLAIN, Soft, through, times_matrix
from softequiv.reps import Rep
from softequiv.spectrum import Filter, spectrum
from softequiv.spectrum.base import in_one_step
from softequiv.spectrum.transforms import tf32_allowed

Mode = Literal["parametrize", "project"]
MARK = "_soft_weights"  # where a plain module remembers what `hold` must project
ADAPTED = "base_layer"  # what PEFT calls the layer to which it adds
Fitted = tuple[torch.dtype, torch.device]


def product(weight: Tensor, factor: Tensor) -> Tensor:
    """A weight through a filter that is one product, of each number or of each d in a row."""
    return weight * factor if factor.ndim == 1 else times_matrix(weight, factor).view(weight.shape)


class Pass(Protocol):
    """A pass of a model for which weights were filtered ahead."""

    under_way: bool


@dataclass(slots=True)
class Prepared:
    """W = gain(Theta), filtered ahead of its use, and what it was made from; empty if nothing is ready.

    It is served during the pass that it was made for, and during backward passes, in which checkpointed activations
    are recomputed and must take the same steps.
    """

    weight: Tensor | None = None
    theta: Tensor | None = None
    version: int = 0
    fitted: Fitted | None = None
    during: Pass | None = None
    recorded: bool = False  # whether a backward pass may ask for it

    def fill(self, weight: Tensor, theta: Tensor, fitted: Fitted, during: Pass) -> None:
        """Hold this from now on."""
        self.weight, self.theta, self.version, self.fitted = weight, theta, theta._version, fitted
        self.during, self.recorded = during, False

    def lasts(self) -> bool:
        """Whether the pass it was made for is under way, or a backward pass, which may recompute parts of it."""
        return (self.during is not None and self.during.under_way) or torch._C._current_graph_task_id() >= 0

    def during_another(self, own: Pass) -> bool:
        """Whether it was made for a pass around this one, and is still to be served."""
        return self.weight is not None and self.during is not own and self.lasts()

    def end(self, during: Pass) -> None:
        """The pass is over: release what its backward pass will not ask for."""
        if self.during is during and not self.recorded:
            self.forget()

    def forget(self) -> None:
        """Hold nothing."""
        self.weight = self.theta = None

    def serve(self, theta: Tensor, fitted: Fitted) -> Tensor | None:
        """The weight, if filtering now would give the same value and gradient. If not, it is dropped for good: what was
        filtered at its access must be filtered at its access again when the backward pass recomputes it.
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
        """Filter in this way from now on, weights of this dtype on this device."""
        place = torch.device("cpu") if device.type == "meta" else device  # filters always have values
        fitted = (torch.float64 if dtype == torch.float64 else torch.float32, place)  # a new object each time
        with on_the_cpu():
            filter = soft.gain.on(soft.rep).to(*fitted)  # may refuse the gain, and then nothing has changed
            held = soft.gain.constraint(soft.rep).to(*fitted) if self.mode == "project" else filter
        self.soft, self.filter, self.held = soft, filter, held
        self.factor = filter.factor if isinstance(filter, Filter) and soft.layout == PLAIN else None
        self.shape = soft.rep.shape
        self.fitted = fitted  # last: by it what was prepared in another thread is known to be out of date

    def fit(self, dtype: torch.dtype, device: torch.device) -> None:
        """Rebuild the filters from exact ones if the weight has changed its precision or device."""
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
        self.fit(weight.dtype, weight.device)  # a plain module's `to` does not reach its marks
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
    """One soft weight of a model, as `soft_weights` yields it."""

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

    Values that were filtered ahead for a pass are dropped here, since torch calls no hook after a KeyboardInterrupt.

    >>> import softequiv as se
    >>> net = se.soften(nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU()), "C4", softness=0.5)
    >>> [weight.name for weight in soft_weights(net)]
    ['0.weight']
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


def set_gain(weight: SoftWeight, gain: Gain) -> None:
    """Give one soft weight another gain.

    In project mode the stored value, which has been through the old gain, is filtered at once by what the new gain
    removes beyond the old one.
    """
    stored, filtered, before = weight.stored, weight.filtered, weight.soft
    soft = Soft(before.rep, gain, before.layout)
    filtered.set_soft(soft, stored.dtype, stored.device)
    if filtered.mode == "project":
        further = beyond(before.gain, gain, soft.rep).to(*filtered.fitted)
        replace_stored(stored, lambda value: through(further, soft, value))


def beyond(before: Gain, after: Gain, rep: Rep) -> WeightFilter:
    """The filter from a weight that has been through one gain to what another leaves: min(1, after / before) by level.

    Nothing grows back, since what was removed is not stored. A gain that depends on the weight is applied as it is.
    """
    if not (isinstance(before, LevelGain) and isinstance(after, LevelGain)):
        return after.on(rep)
    levels = spectrum(rep)
    had, has = before.gamma(levels), after.gamma(levels)
    return levels.filter(torch.where(has < had, has / had, (has > 0).to(had)))


def is_constraint(gain: Gain, rep: Rep) -> bool:
    """Whether training cannot undo the gain: true of subspaces and cones, not of smooth or fractional levels."""
    apply = gain.on(rep)
    if isinstance(apply, Cone):
        return True
    filters = apply.filters if isinstance(apply, Composed) else (apply,)
    return all(isinstance(f, Filter) and bool(((f.gamma == 0) | (f.gamma == 1)).all()) for f in filters)
