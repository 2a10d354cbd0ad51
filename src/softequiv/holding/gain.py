"""How much may the layers that we do not filter amplify what the filtered ones let through? No more than a bound times
what they did at first; or they do not learn at all, or by low-rank updates only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from softequiv.adapt.find import CONVOLUTIONS
from softequiv.adapt.plan import matching
from softequiv.errors import SoftEquivError, WeightError, checked_amount
from softequiv.nn import soft_weights
from softequiv.nn.weight import replace_stored

LAYERS = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
SQUARINGS = 6  # of a Gram matrix: its 64th power, of which the largest singular value is all but alone
TINY = 1e-30
ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # of nn.MultiheadAttention
LIMITED = "weight of a linear or convolution layer without soft weights"


def untouched(model: nn.Module) -> list[str]:
    """The names of linear and convolution layers without soft weights, in order, as PEFT's `target_modules` takes them.

    Layers of types of their own, such as those inside `nn.MultiheadAttention`, and convolutions in groups are left out,
    as LoRA does not know them.

    >>> import softequiv as se
    >>> layers = nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 2)
    >>> untouched(se.soften(nn.Sequential(*layers), "C4", softness=0))
    ['2', '3']
    """
    return [
        name
        for name, module in _free_layers(model).items()
        if type(module) in LAYERS and getattr(module, "groups", 1) == 1
    ]


def freeze_rest(model: nn.Module, learn: Iterable[str] = ()) -> list[str]:
    """Freeze all but soft weights, norms, the head and what `learn` names, in place; return the names of what learns.

    The head is what `get_output_embeddings` or `get_classifier` returns, else the linear layer whose outputs no layer
    takes, else the last module with weights of its own, which it also is if it is a convolution with such outputs. If
    several linear layers qualify, `learn` must say which of them learn. Frozen weights downstream amplify the residual
    as much as they did before training, and no more.

    >>> import softequiv as se
    >>> layers = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 2)
    >>> freeze_rest(se.soften(nn.Sequential(*layers), "C4", softness=0))
    ['0.parametrizations.weight.original', '3.weight', '3.bias']
    """
    soft = {id(weight.stored) for weight in soft_weights(model)}
    if not soft:
        raise SoftEquivError("this model has no soft weights that could go on learning; call soften first")
    named = dict(model.named_parameters())
    chosen = matching(named, learn, kind="parameter of this model")
    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    kept = [module for module in modules if isinstance(module, NORMS) or type(module).__name__.endswith("Norm")]
    open_ = soft | {
        id(weight) for module in (*kept, *_heads(model, modules[-1], chosen)) for weight in module.parameters()
    }
    for name, weight in named.items():
        weight.requires_grad_(id(weight) in open_ or name in chosen)
    return [name for name, weight in named.items() if weight.requires_grad]


def _heads(model: nn.Module, end: nn.Module, named: Iterable[str]) -> Sequence[nn.Module]:
    """What the model says is its head, or the linear layer whose outputs no layer takes, or else its last module."""
    for question in ("get_output_embeddings", "get_classifier"):
        told = getattr(model, question, lambda: None)()
        parts = told if isinstance(told, tuple) else (told,)
        heads = [part for part in parts if isinstance(part, nn.Module) and next(part.parameters(), None) is not None]
        if heads:
            return heads
    taken = {getattr(module, size, None) for module in model.modules() for size in ("in_features", "in_channels")}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    last = {name: module for name, module in linear.items() if module.out_features not in taken}
    if not last or (isinstance(end, CONVOLUTIONS) and end.out_channels not in taken):
        return [end]
    outputs = list(last.values())[-1].out_features
    rivals = {name: module for name, module in last.items() if module.out_features == outputs}
    if len(rivals) == 1:
        return list(rivals.values())
    chosen = [module for name, module in rivals.items() if any(own.startswith(f"{name}.") for own in named)]
    if not chosen:
        raise SoftEquivError(
            f"each of {', '.join(rivals)} may be the head, as they have one number of outputs, which no layer takes; "
            f"say which of them learn, such as learn=['{next(iter(rivals))}.*']"
        )
    return chosen


class GainLimit:
    """The callback of `limit_gain`: after a step of the optimiser, it scales back every layer beyond its limit.

    Its state are the `limits`, the largest norms allowed, by weight.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], bound: float) -> None:
        self._weights = dict(weights)
        self.limits = {name: bound * float(schatten_norm(_matrix(weight))) for name, weight in weights.items()}

    def __call__(self, step: int | None = None) -> None:
        """W <- W min(1, limit / ||W||), for every layer; to be called after each step."""
        for name, weight in self._weights.items():
            if weight.requires_grad:
                factor = (self.limits[name] / schatten_norm(_matrix(weight)).clamp(min=TINY)).clamp(max=1)
                replace_stored(weight, factor.to(weight.dtype).mul)

    def state_dict(self) -> dict[str, Tensor]:
        """The limits."""
        return {name: torch.tensor(limit, dtype=torch.float64) for name, limit in self.limits.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the limits that `state_dict` gave."""
        if set(state) != set(self.limits):
            raise SoftEquivError("this state limits other layers than those of this model; build both with one choice")
        self.limits = {name: float(limit) for name, limit in state.items()}


@torch.no_grad()
def schatten_norm(matrix: Tensor) -> Tensor:
    """(sum_i s_i^128)^(1/128) of the singular values of an (m, n) matrix, in at least float32: ().

    It is never below the spectral norm, and above it by a factor of min(m, n)^(1/128) at most, 1.05 for 768. The sum is
    the trace of the Gram matrix after six squarings; unlike a power iteration it remembers nothing, and a leading
    direction that comes up overnight does not escape it.

    >>> schatten_norm(torch.diag(torch.tensor([3.0, -4.0])))
    tensor(4.0000)
    """
    x = matrix if matrix.dtype == torch.float64 else matrix.float()
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    trace = gram.trace().clamp(min=TINY)
    log = trace.log()
    for squaring in range(1, SQUARINGS + 1):
        gram = gram / trace
        gram = gram @ gram
        trace = gram.trace().clamp(min=TINY)
        log = log + trace.log() / 2**squaring
    return (log / 2).exp()


def limit_gain(
    model: nn.Module, bound: float = 1.0, *, only: Iterable[str] | None = None, skip: Iterable[str] = ()
) -> GainLimit:
    """Keep ||W|| <= bound * ||W_0|| for every linear and convolution layer that we do not filter.

    W_0 is the weight as it is now, as a matrix (out, in * kernel); what `nn.MultiheadAttention` stores as one weight is
    one. Norms are `schatten_norm`, the spectral norm to a few per cent and never below it: ||W||_op <= limit after
    every call, to rounding, and limit <= 1.06 bound ||W_0||_op for up to 1,700 rows or columns. A convolution's own
    norm is at most sqrt(kernel entries) times its matrix's. Biases and norms' scales are free. A call makes the Gram
    matrix of each weight and squares it six times: with n = min(out, in * kernel), as many products as a forward pass
    of n rows and 6 n^3. `only` and `skip` are names or patterns of weights; a weight that is 0 everywhere or not a
    parameter, as under weight_norm, cannot be limited and must be left out.

    Give it to `fit` as `after_step=[limit]`, or call it after `optimizer.step()`; an optimiser calls it itself after
    `optimizer.register_step_post_hook(lambda *_: limit())`.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> limit, before = limit_gain(net, skip=["1.*"]), torch.linalg.matrix_norm(net[0].weight, 2)
    >>> with torch.no_grad():
    ...     _ = net[0].weight.mul_(7)
    >>> limit()
    >>> torch.allclose(torch.linalg.matrix_norm(net[0].weight, 2), before, rtol=1e-3)
    True
    """
    factor = float(
        checked_amount(bound, "the bound on layers' norms, as a factor of what they are now,", positive=True)
    )
    found = {f"{name}.weight".lstrip("."): layer.weight for name, layer in _free_layers(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            stored = {own: getattr(module, own) for own in ATTENTION}
            found |= {f"{name}.{own}".lstrip("."): weight for own, weight in stored.items() if weight is not None}
    chosen = matching(found, only, kind=LIMITED) if only is not None else set(found)
    chosen -= matching(found, skip, kind=LIMITED)
    if not chosen:
        raise SoftEquivError(f"{type(model).__name__} has no linear or convolution layer left to limit")
    return GainLimit({name: _scalable(name, weight) for name, weight in found.items() if name in chosen}, factor)


def _scalable(name: str, weight: object) -> nn.Parameter:
    """A weight that has a norm and can be scaled back, or a sentence that says why not."""
    if not isinstance(weight, nn.Parameter):
        raise WeightError(
            f"{name} is no parameter but made of others, as by weight_norm, and cannot be scaled back; remove the "
            f"parametrisation first, or leave the layer out with skip=[{name!r}]"
        )
    if not _matrix(weight).any():
        raise WeightError(
            f"{name} is 0 everywhere, and a multiple of that would keep it there for good; leave the layer out with "
            f"skip=[{name!r}], or limit it once it has learnt something"
        )
    return weight


def _free_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers without soft weights."""
    soft = {id(weight.module) for weight in soft_weights(model)}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, LAYERS) and id(module) not in soft
    }


def _matrix(weight: Tensor) -> Tensor:
    """(out, in * kernel)."""
    whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.detach().flatten(1)
