"""How equivariant is a strict layer with a free one beside it? Residual pathway priors: W = W_strict + mix W_free.

Finzi, Benton, Wilson (2021), "Residual Pathway Priors for Soft Equivariance Constraints". Both paths have Gaussian
priors, W_strict = P_0 A with A ~ N(0, s_strict^2) and W_free ~ N(0, s_free^2), so that

    -log p(W_strict, W_free) = |W_strict|^2 / (2 s_strict^2) + |W_free|^2 / (2 s_free^2) + constant,

which is weight decay of one strength per path. The scalar `mix` is the dial that the soft-equivariance paper puts on
the free path: 0 is strict, 1 the original. What we changed: both paths are one parametrisation of one weight, so that a
forward pass multiplies once and any model can be given pathways; what they train, a plain layer can hold (`merged`).
"""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv.adapt import plan
from softequiv.errors import SoftEquivError, checked_number
from softequiv.groups import Group
from softequiv.nn import FilteredWeight, Layout, Soft, softenable
from softequiv.nn.layers import EXACT, kernel_soft, restored_scale
from softequiv.reps import Action, Rep

Model = TypeVar("Model", bound=nn.Module)


class Pathways(nn.Module):
    """(A, W_free) -> P_0 A + mix W_free, a parametrisation; a `learned` mix is the sigmoid of a parameter.

    A weight W that is assigned becomes A = W, W_free = W - P_0 W: with mix 1 it is used as it is, with 0 projected.
    """

    mix_held: Tensor

    def __init__(self, soft: Soft, like: Tensor, mix: float, learned: bool) -> None:
        super().__init__()
        self.strict = FilteredWeight(soft, "parametrize", like.dtype, like.device)
        self.order: tuple[str, ...] = ()  # of the module's parameters, for merging: torch moves what is parametrised
        value = torch.tensor(checked_mix(mix, learned), dtype=like.dtype, device=like.device)
        self.learned = learned
        if learned:
            self.mix_logit = nn.Parameter(value.logit())
        else:
            self.register_buffer("mix_held", value)

    @property
    def mix(self) -> Tensor:
        """How much of the free path counts, a number between 0 and 1."""
        return self.mix_logit.sigmoid() if self.learned else self.mix_held

    def forward(self, strict: Tensor, free: Tensor) -> Tensor:
        projected: Tensor = self.strict(strict)
        return projected + self.mix * free

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The paths for a weight that is assigned."""
        return weight, weight - self.strict(weight)


def checked_mix(mix: float, learned: bool = False) -> float:
    """A mix lies between 0 and 1; one that is learned must start inside."""
    mix = checked_number(mix, "mix", SoftEquivError)
    if not 0 <= mix <= 1:
        raise SoftEquivError(f"mix runs from 0 (strictly equivariant) to 1 (free path at full strength); got {mix!r}")
    if learned and mix in (0, 1):
        raise SoftEquivError(f"a learned mix cannot leave {mix}, where its gradient is zero; start between 0 and 1")
    return float(mix)


def _give_pathways(module: nn.Module, attribute: str, soft: Soft, mix: float, learned: bool) -> None:
    weight = softenable(module, attribute)
    pathways = Pathways(soft, weight, mix, learned)
    pathways.order = tuple(module._parameters)
    parametrize.register_parametrization(module, attribute, pathways)


def _new_pathways(layer: nn.Module, weight: Soft, target: Rep, mix: float, learned: bool) -> None:
    """Pathways for a new layer: the free path starts as torch's layer does, the strict one anew and of its variance."""
    fresh = copying.deepcopy(layer)
    fresh.reset_parameters()  # type: ignore[operator]
    _give_pathways(layer, "weight", weight, mix, learned)
    lists: Any = layer.parametrizations
    free: Any = fresh
    with torch.no_grad():
        lists.weight.original0.mul_(restored_scale(weight, lists.weight.original0))
        lists.weight.original1.copy_(free.weight)
    if layer.bias is not None:
        _give_pathways(layer, "bias", Soft(target, EXACT, Layout(axis=0)), mix, learned)
        with torch.no_grad():
            lists.bias.original1.copy_(free.bias)


class RPPLinear(nn.Linear):
    """A linear map between representations with two pathways, in weight and bias: 2 (d' d + d') parameters.

    >>> from softequiv import SO, vector
    >>> layer = RPPLinear(4 * vector(SO(3)), 2 * vector(SO(3)), mix=0.5)
    >>> layer(torch.zeros(5, 12)).shape, merged(layer, copy=True)(torch.zeros(5, 12)).shape
    (torch.Size([5, 6]), torch.Size([5, 6]))
    """

    def __init__(
        self, source: Rep, target: Rep, *, mix: float = 1.0, learned: bool = False, bias: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(source.dim, target.dim, bias=bias, **kwargs)
        self.source, self.target = source, target
        _new_pathways(self, Soft(source >> target, EXACT), target, mix, learned)


class RPPConv2d(nn.Conv2d):
    """A convolution of pictures whose channels carry representations, with two pathways.

    >>> from softequiv import C, scalar
    >>> RPPConv2d(3 * scalar(C(4)), 8 * scalar(C(4)), 5, mix=0.5)(torch.zeros(1, 3, 9, 9)).shape
    torch.Size([1, 8, 5, 5])
    """

    def __init__(
        self,
        source: Rep,
        target: Rep,
        kernel_size: int,
        *,
        mix: float = 1.0,
        learned: bool = False,
        action: Action = "exact",
        **kwargs: Any,
    ) -> None:
        super().__init__(source.dim, target.dim, kernel_size, **kwargs)
        self.source, self.target = source, target
        sizes = (self.kernel_size[0], self.kernel_size[1])
        soft = kernel_soft(source, target, sizes, EXACT, self.groups, False, action)
        _new_pathways(self, soft, target, mix, learned)


def rpp(
    model: Model,
    group: Group | str,
    mix: float = 1.0,
    *,
    learned: bool = False,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> Model:
    """Give two pathways to every weight of a model that `soften` would filter, in place: W = P_0 W + mix (W - P_0 W).

    With mix 1 the model computes what it did before, with 0 what softness 0 makes of it. The other arguments are those
    of `soften`.

    >>> net = nn.Conv2d(3, 8, 5)
    >>> before = net.weight.detach().clone()
    >>> torch.allclose(rpp(net, "C4").weight, before, atol=1e-6)
    True
    """
    checked_mix(mix, learned)
    todo = plan(model, group, softness=0.0, only=only, skip=skip, grids=grids, action=action).weights
    for weight in todo:  # all are checked before the first is touched
        softenable(model.get_submodule(weight.found.module), weight.found.attribute, name=weight.found.name)
    given: dict[Tensor, Any] = {}
    for weight in todo:
        module: Any = model.get_submodule(weight.found.module)
        tensor = getattr(module, weight.found.attribute)
        _give_pathways(module, weight.found.attribute, weight.soft, mix, learned)
        paths = module.parametrizations[weight.found.attribute]
        first = given.setdefault(tensor, paths)
        if first is not paths:  # tied weights stay so
            paths.original0, paths.original1 = first.original0, first.original1
            if learned:
                paths[0].mix_logit = first[0].mix_logit
    return model


Paths = tuple[Pathways, nn.Parameter, nn.Parameter]


def pathways(model: nn.Module) -> Iterator[Paths]:
    """Every weight of a model that has two paths: its parametrisation, A and W_free."""
    for module in model.modules():
        for steps in _pathways_of(module).values():
            yield steps[0], steps.original0, steps.original1


def _pathways_of(module: nn.Module) -> dict[str, Any]:
    """The weights of one module that have two paths, and what torch keeps of them."""
    lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
    return {name: steps for name, steps in lists.items() if isinstance(steps[0], Pathways)}


def known_pathways(model: nn.Module) -> list[Paths]:
    """The same, of a model that has some."""
    found = list(pathways(model))
    if not found:
        raise SoftEquivError("this model has no residual pathways; build it of RPPLinear, RPPConv2d, or call rpp")
    return found


def set_mix(model: nn.Module, mix: float) -> None:
    """Turn the dial of every pathway of a model.

    >>> net = rpp(nn.Conv2d(3, 8, 5), "C4")
    >>> set_mix(net, 0.0)
    >>> torch.allclose(net.weight, net.weight.rot90(1, (-2, -1)), atol=1e-6)
    True
    """
    for own, _, _ in known_pathways(model):
        value = torch.tensor(checked_mix(mix, own.learned), dtype=torch.float64)
        with torch.no_grad():
            (own.mix_logit if own.learned else own.mix_held).copy_(value.logit() if own.learned else value)


def prior(model: nn.Module, *, strict: float, free: float) -> Tensor:
    """-log p of both paths but for a constant, sum |P_0 A|^2 / (2 strict^2) + |W_free|^2 / (2 free^2): a scalar.

    `strict` and `free` are the standard deviations. Divided by the number of training examples it is what the mean
    loss of a batch takes on top.

    >>> net = rpp(nn.Conv2d(3, 8, 5), "C4")
    >>> bool(prior(net, strict=1.0, free=0.1) > prior(net, strict=1.0, free=1.0))
    True
    """
    checked_deviations(strict, free)
    terms = [
        own.strict(a).square().sum() / (2 * strict**2) + w.square().sum() / (2 * free**2)
        for own, a, w in known_pathways(model)
    ]
    return torch.stack(terms).sum()


def parameter_groups(
    model: nn.Module, *, strict: float, free: float, examples: int, rest: float = 0.0
) -> list[dict[str, Any]]:
    """The same prior as weight decay, for any optimiser: 1 / (examples s^2) per path, `rest` for other parameters.

    For SGD the decay is the gradient of `prior` / examples: what it does to A outside the equivariant weights has no
    effect on the model. Adam divides by the size of gradients, to which that part of A adds; where the prior is meant
    to the letter, add `prior` / examples to the loss instead. A learned mix does not decay.

    >>> net = rpp(nn.Conv2d(3, 8, 5), "C4")
    >>> [group["weight_decay"] for group in parameter_groups(net, strict=1.0, free=0.5, examples=1000)]
    [0.001, 0.004, 0.0]
    """
    checked_deviations(strict, free)
    if not examples >= 1:
        raise SoftEquivError(f"a prior is weighed against the number of training examples; got {examples}")
    if not rest >= 0:
        raise SoftEquivError(f"a weight decay is a number of at least 0; got rest={rest}")
    own = known_pathways(model)
    paths: list[list[nn.Parameter]] = [[a for _, a, _ in own], [w for _, _, w in own]]
    dials = [path.mix_logit for path, _, _ in own if path.learned]
    known = {id(parameter) for group in (*paths, dials) for parameter in group}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    decays = (1 / (examples * strict**2), 1 / (examples * free**2), rest)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay} for params, decay in zip((*paths, others), decays, strict=True)
    ]
    groups += [{"params": dials, "weight_decay": 0.0}] if dials else []
    return [group for group in groups if group["params"]]


def checked_deviations(strict: float, free: float) -> None:
    """Standard deviations are positive."""
    if not (strict > 0 and free > 0):
        raise SoftEquivError(f"standard deviations of a prior are positive numbers; got strict={strict}, free={free}")


@torch.no_grad()
def merged(model: Model, *, copy: bool = False) -> Model:
    """Write P_0 A + mix W_free into plain weights and drop the pathways; with `copy`, leave the original untouched.
    Modules without pathways stay as they are, filtered ones too.

    >>> net = rpp(nn.Conv2d(3, 8, 5), "C4", mix=0.3)
    >>> plain = merged(net, copy=True)
    >>> torch.equal(plain.weight, net.weight), [name for name, _ in plain.named_parameters()]
    (True, ['weight', 'bias'])
    """
    known_pathways(model)
    plain = copying.deepcopy(model) if copy else model
    tied: dict[Tensor, nn.Parameter] = {}
    for module in plain.modules():
        if _pathways_of(module):
            _merge(module, tied)
    return plain


def _merge(module: nn.Module, tied: dict[Tensor, nn.Parameter]) -> None:
    """Only the instance changes: torch's own removal would edit the class, which a deep copy shares."""
    lists: Any = module.parametrizations
    if not all(isinstance(step, Pathways) for steps in lists.values() for step in steps):
        raise SoftEquivError(f"{type(module).__name__} has other parametrisations; remove them before merging")
    order = max((steps[0].order for steps in lists.values()), key=len)
    plain = {}
    for name, steps in lists.items():
        learns = any(path.requires_grad for path in steps.parameters(False))
        own = nn.Parameter(getattr(module, name).detach().clone(), requires_grad=learns)
        shared = tied.setdefault(steps.original0, own)
        plain[name] = shared if torch.equal(shared, own) else own
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    every = {**module._parameters, **plain}
    module._parameters.clear()
    for name in sorted(every, key=lambda name: order.index(name) if name in order else len(order)):
        module.register_parameter(name, every[name])
