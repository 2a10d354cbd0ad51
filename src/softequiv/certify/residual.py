"""How far can a group element move what a model's first layer makes of an input? The certified change of its weight
times the size of the input, for layers that the whole model goes through; both are checked on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.actions import Pictures, Vectors
from softequiv.adapt.find import Setting
from softequiv.adapt.group import chosen_group
from softequiv.asking import asked, at_home, evaluating
from softequiv.asking.answers import check_alone
from softequiv.asking.data import check_samples
from softequiv.certify.located import Located, located
from softequiv.certify.operator import as_hom, spectral_norm
from softequiv.certify.weight import certified, sum_rounding
from softequiv.errors import SoftEquivError
from softequiv.groups import C, D, Element, Group, Reflection
from softequiv.groups.angles import range_of
from softequiv.groups.base import elements_within
from softequiv.nn.layers import is_scalar
from softequiv.reps import Action, Rep

MOVED = 8  # elements of an infinite range that try whether a layer takes its input as it is
SAME_ANSWER = 1e-4  # answers in float32 to one signal in another order, relative to the spread of the scores


def embedding_residual(
    model: nn.Module,
    layer: str,
    x: Tensor,
    group: Group | str | None = None,
    within: float | str | None = None,
    *,
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> Tensor:
    """(sup_g ||W rho(g) - W||_op + rounding ||W||_F) ||x|| + that of b, (N,): how far h(g x) lies from the moved h(x).

    `layer` takes the input itself, with entries flattened at most, and the rest of the model sees the input through it
    alone; both are checked, on x, on noise and on moved copies of x. Covered are

    - linear layers whose outputs stand still: h(x) = W x + b, and h(g x) is compared with h(x);
    - patch embeddings, convolutions whose stride is their kernel, under C(2), C(4), D(1), D(2), D(4) and Reflection,
      which take patches to patches: h(g x) is compared with h(x), its tokens permuted by g. All later layers, positions
      included, must then ignore that permutation. It is checked on x for every g, which is evidence and no proof.

    Rounding is that of the weight's certificate, and of the bias b beside it, however small x is: of the layer itself,
    accumulated in float32 or better, not TF32. Where the layer answers in another precision than its weight has, as
    under autocast, there is none.

    >>> import softequiv as se
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> embedding_residual(net, "1", torch.ones(3, 1, 4, 4), "C4", grids={"1": (1, 4, 4)}).shape
    torch.Size([3])
    """
    check_samples(x)
    chosen, reach = of_range(model, group, within)
    weight = layer_weight(model, layer, Setting(chosen, action, grids))
    with evaluating(model):
        inputs = at_home(model, x)
        h = checked_output(model, layer, inputs)
        if isinstance(weight.module, nn.Linear):
            moved = turned_rows(weight.rep, inputs, some_elements(chosen, reach))
        else:
            check_patches(layer, weight.module, inputs)
            elements = permuting(chosen, reach)
            check_ignores(model, layer, inputs, h, elements)
            moved = (Pictures()(inputs, g) for g in elements)
        for copies in moved:
            taken(model, layer, copies)
    of_weight = certified(weight, reach)
    value = weight.value.to(torch.float64).flatten(1)
    if of_weight.operator is None or of_weight.rounding is None:
        raise SoftEquivError(f"{weight.name} is added, not multiplied by, and has no residual on an input")
    slope = of_weight.operator * spectral_norm(value) + of_weight.rounding * float(value.norm())
    sizes: Tensor = inputs.detach().flatten(1).to("cpu", torch.float64).norm(dim=1)
    terms = value.shape[1] + 1  # the products behind an output, and the bias
    return slope * sizes + bias_rounding(getattr(weight.module, "bias", None), terms, h[0, 0].numel())


def bias_rounding(bias: Tensor | None, terms: int, places: int) -> float:
    """How much the rounding of a bias adds to the change of a layer's output, at most: 2 s ||b|| at each place."""
    if bias is None:
        return 0.0
    return 2 * sum_rounding(bias.dtype, terms) * float(bias.detach().double().norm()) * math.sqrt(places)


def of_range(model: nn.Module, group: Group | str | None, within: float | str | None) -> tuple[Group, float]:
    """The group, by default the model's own, and the range, by default all of it."""
    chosen = chosen_group(model, group, "certify")
    reach = range_of(within)
    reach = math.inf if reach is None else reach
    chosen.reach(reach)
    return chosen, reach


def layer_weight(model: nn.Module, layer: str, setting: Setting) -> Located:
    """The weight of a layer on its representation, where the outputs of the layer stand still or are patches'."""
    weights = located(model, setting)
    found = next((weight for weight in weights if weight.name == f"{layer}.weight"), None)
    if found is None:
        raise SoftEquivError(
            f"{layer}.weight lives on no representation of {setting.group}, so that its residual is not known; there "
            f"are {', '.join(weight.name for weight in weights) or 'none'}: give grids= for a layer on flattened "
            "pictures"
        )
    maps = as_hom(found.rep)
    if not found.is_map or (maps is not None and not is_scalar(maps.target)):
        raise SoftEquivError(f"the outputs of {layer} turn with the input; take a layer whose outputs stand still")
    return found


@contextmanager
def after(model: nn.Module, layer: str, change: Callable[[Tensor], Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While open, the output of the layer is changed; the list fills with its inputs and outputs as they were."""
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, given: tuple[Any, ...], made: Any) -> Tensor:
        if not isinstance(made, Tensor) or not given or not isinstance(given[0], Tensor):
            raise SoftEquivError(f"{layer} must take and return a tensor to be smoothed; it gave {type(made).__name__}")
        calls.append((given[0], made.clone()))  # the model may write into its own
        return change(made)

    handle = model.get_submodule(layer).register_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def forced(model: nn.Module, layer: str, x: Tensor, h: Tensor) -> Tensor:
    """The model's answer where its layer gives h, whatever its input."""
    with after(model, layer, lambda _: h.clone()):
        return scores(asked(model, x))


def taken(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What the layer makes of x, or a sentence unless it takes x itself, once."""
    with after(model, layer, lambda h: h) as calls:
        scores(asked(model, x))
    check_once(layer, calls)
    given, h = calls[0]
    if given.dtype != x.dtype or given.numel() != x.numel() or not torch.equal(given.reshape(x.shape), x):
        raise SoftEquivError(
            f"{layer} does not take the input itself: its residual is known for inputs of the layer, so that only the "
            "first one can be smoothed with a certificate, and nothing before it may change what it is given, as ReLU "
            "and clamp do where they meet other signs and sizes"
        )
    module = model.get_submodule(layer)
    if isinstance(module, nn.Linear) and given.shape != (len(x), module.in_features):
        raise SoftEquivError(
            f"{layer} takes {tuple(given.shape)}, several rows of each sample; a linear layer is covered where it "
            "takes the sample as one row"
        )
    own = next(module.parameters()).dtype
    if h.dtype != own:
        raise SoftEquivError(
            f"{layer} answers in {h.dtype} and its weight is {own}, so that its rounding is not known; certify outside "
            f"of autocast, or the model in that precision, model.to({h.dtype})"
        )
    return h


def some_elements(group: Group, within: float) -> list[Element]:
    """Some elements of the range, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return [group.random(generator, None if math.isinf(within) else within) for _ in range(MOVED)]


def turned_rows(rep: Rep, x: Tensor, elements: list[Element]) -> Iterator[Tensor]:
    """x moved as a linear layer's certificate has it: its rows are vectors of the space that the weight reads."""
    maps = as_hom(rep)
    space = rep if maps is None else maps.source
    rows = x.flatten(1).unflatten(1, (-1, *space.shape))  # (N, channels, *space)
    return (Vectors(space)(rows, g).reshape(x.shape) for g in elements)


def checked_output(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What the layer makes of x, or a sentence unless it takes what the model is given, and the answers depend on that
    through the layer alone, sample by sample.
    """
    h = taken(model, layer, x)
    # less x, lest the inputs were drawn from the same seed and nothing be compared
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) - x
    for given in (other, -other):
        taken(model, layer, given)
    both = torch.cat([x, other])
    check_alone(model, both, asked(model, both), "votes on such answers certify nothing; keep running statistics")
    if not alike(forced(model, layer, x, h), forced(model, layer, other, h)):
        raise SoftEquivError(
            f"the answers depend on the input also beside {layer}, where no noise hides it; smooth a layer that all of "
            "the model goes through"
        )
    return h


def check_patches(layer: str, module: nn.Module, x: Tensor) -> None:
    """Raise a sentence unless a layer cuts pictures into patches and leaves no pixel out."""
    cuts = (
        isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size
        and module.kernel_size[0] == module.kernel_size[1]
        and module.padding in ("valid", (0, 0))
        and module.dilation == (1, 1)
        and module.groups == 1
        and x.ndim == 4
        and not any(size % module.kernel_size[0] for size in x.shape[-2:])
    )
    if not cuts:
        raise SoftEquivError(
            f"{layer} is neither a linear layer on flattened pictures nor a convolution that cuts pictures into whole "
            f"square patches (stride of its kernel, no padding, no groups); for {tuple(x.shape)} it has no residual"
        )


def permuting(group: Group, within: float) -> tuple[Element, ...]:
    """The elements in range, of a group that takes pixels to pixels and patches to patches."""
    if not (isinstance(group, Reflection) or (isinstance(group, (C, D)) and 4 % group.n == 0)):
        raise SoftEquivError(
            f"{group} does not take patches to patches; a patch embedding is covered under C(2), C(4), D(1), D(2), "
            "D(4) and Reflection"
        )
    return elements_within(group, within)


def check_ignores(model: nn.Module, layer: str, x: Tensor, h: Tensor, elements: tuple[Element, ...]) -> None:
    """Raise a sentence unless the later layers answer alike to a layer's output h and to the same moved by each g."""
    if h.shape[-2:].numel() == 1:  # one patch stays where it is
        return
    still = forced(model, layer, x, h)
    for g in elements:
        if not alike(forced(model, layer, x, Pictures()(h, g)), still):
            raise SoftEquivError(
                f"the layers after {layer} tell its patches from the same ones moved by {g}, so that they add a change "
                "of their own: soften positions and later weights with softness=0, or pool the patches"
            )


def alike(y: Tensor, other: Tensor) -> bool:
    """Whether two answers (N, K) are equal up to rounding; what all scores of a sample share decides on no class."""
    one, two = (part.double() - part.double().mean(1, keepdim=True) for part in (y, other))
    return float((one - two).abs().max()) <= SAME_ANSWER * max(float(one.abs().max()), 1e-30)


def scores(y: Tensor) -> Tensor:
    """Class scores (N, K), or a sentence."""
    if y.ndim != 2 or y.shape[1] < 2:
        raise SoftEquivError(f"votes are for classes and need scores (N, K) of at least 2; got {tuple(y.shape)}")
    return y


def check_once(layer: str, calls: list[tuple[Tensor, Tensor]]) -> None:
    """Raise a sentence unless a layer was called exactly once."""
    if len(calls) != 1:
        raise SoftEquivError(f"{layer} was called {len(calls)} times in one pass; smooth a layer that is called once")
