"""When can no group element change a prediction, whatever the later layers do? Where noise after the first layer hides
what that layer lets through: its certified residual must be smaller than the radius of randomised smoothing.

Cohen, Rosenfeld & Kolter (2019), Certified adversarial robustness via randomized smoothing, with the noise on the
embedding instead of the input and the group's residual in place of an adversary's budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv.actions import Pictures, Vectors
from softequiv.adapt.find import Setting
from softequiv.adapt.group import chosen_group
from softequiv.asking import asked, at_home, check_finite, evaluating
from softequiv.asking.answers import check_alone
from softequiv.asking.data import check_samples
from softequiv.asking.proportion import proportion_upper
from softequiv.certify.certificate import span
from softequiv.certify.located import Located, located
from softequiv.certify.operator import as_hom, spectral_norm
from softequiv.certify.statistical import checked_confidence
from softequiv.certify.weight import certified, sum_rounding
from softequiv.errors import SoftEquivError, check_count, check_seed, checked_amount
from softequiv.groups import C, D, Element, Group, Reflection
from softequiv.groups.angles import range_of
from softequiv.groups.base import elements_within
from softequiv.nn.layers import is_scalar
from softequiv.nn.module import check_module
from softequiv.reps import Action, Rep

ABSTAINED = -1  # in place of a class
AT_ONCE = 1024  # samples in one call of the model
CHOOSING = 100  # votes that choose the class, before others count it
MOVED = 8  # elements of an infinite range that try whether a layer takes its input as it is
SAME_ANSWER = 1e-4  # answers in float32 to one signal in another order, relative to the spread of the scores


def certified_radius(sigma: float, top: float, next_best: float | None = None) -> float:
    """sigma / 2 (Phi^-1(top) - Phi^-1(next_best)): how far an embedding may move before its class can change.

    `top` is a lower bound on the share of votes for the first class under noise N(0, sigma^2), `next_best` an upper
    bound on that of any other, by default 1 - top; 0 where the first does not lead.

    >>> round(certified_radius(0.5, 0.8413447), 6), certified_radius(0.5, 0.4)
    (0.5, 0.0)
    """
    sigma = checked_sigma(sigma)
    other = 1 - top if next_best is None else next_best
    if not (0 <= top <= 1 and 0 <= other <= 1):
        raise SoftEquivError(f"shares of votes lie between 0 and 1; got {top} and {other}")
    if top <= other:
        return 0.0
    first, second = torch.special.ndtri(torch.tensor([top, other], dtype=torch.float64)).tolist()
    return float(sigma / 2 * (first - second))


class Smoothed(nn.Module):
    """A classifier that adds N(0, sigma^2) noise to the output of its module `layer`, and lets many draws vote.

    The answer, (N, K), is log((votes for k + 1/2) / (votes + K/2)), so that its softmax is about the share of votes.
    The noise comes from `seed` and is the same in every call. Costs `votes` forward passes.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> Smoothed(net, "1", sigma=0.5, votes=10)(torch.ones(5, 1, 2, 2)).shape
    torch.Size([5, 2])
    """

    def __init__(self, model: nn.Module, layer: str, sigma: float, *, votes: int = 100, seed: int = 0) -> None:
        super().__init__()
        check_module(model)
        sigma = checked_sigma(sigma)
        check_count("votes", votes)
        check_seed(seed)
        if layer not in dict(model.named_modules()) or not layer:
            known = [name for name, module in model.named_modules() if name and not list(module.children())]
            raise SoftEquivError(f"the model has no module {layer!r}; there are {', '.join(known[:8])} ...")
        self.model, self.layer, self.sigma, self.votes, self.seed = model, layer, float(sigma), votes, seed

    def forward(self, x: Tensor) -> Tensor:
        """Log shares of the votes, (N, K)."""
        counts = self.counts(x, self.votes, self.seed).to(torch.float32)
        return ((counts + 0.5) / (self.votes + counts.shape[1] / 2)).log()

    @torch.no_grad()
    def counts(self, x: Tensor, votes: int, seed: int) -> Tensor:
        """How many of so many noisy passes say each class: (N, K) int64."""
        check_count("votes", votes)
        total: Tensor | None = None
        source: torch.Generator | None = None

        def noisy(h: Tensor) -> Tensor:
            nonlocal source
            source = source or torch.Generator(h.device).manual_seed(seed)
            wide = torch.promote_types(h.dtype, torch.float32)
            noise = torch.randn(h.shape, generator=source, device=h.device, dtype=wide)
            return (h + self.sigma * noise).to(h.dtype)  # rounded with it, as if by the layers behind

        together = max(1, min(votes, AT_ONCE // max(1, len(x))))
        with after(self.model, self.layer, noisy) as calls:
            for start in range(0, votes, together):
                some = min(together, votes - start)
                calls.clear()
                y = scores(asked(self.model, x.repeat(some, *[1] * (x.ndim - 1))))
                check_finite(y, "answers")
                check_once(self.layer, calls)
                said = nn.functional.one_hot(y.argmax(1), y.shape[1]).unflatten(0, (some, len(x))).sum(0)
                total = said if total is None else total + said
        if total is None:
            raise SoftEquivError("there is nothing to vote on")
        return total


@dataclass(frozen=True, eq=False)
class SmoothedCertificate:
    """For each of N samples x: no g of the range changes the class of the smoothed model where `holds`; print it.

    The class is that of the infinite vote, argmax_k P[class of F(h + noise) is k] at the embedding h of x, and each
    sample's statement has probability `confidence` over the noise that was drawn. `prediction` is -1 where the votes
    leave no class above one half; `share` is the lower bound on its share (Clopper-Pearson), `radius` =
    sigma Phi^-1(share), and `residual` bounds what g does to the embedding.
    """

    group: Group
    within: float
    layer: str
    sigma: float
    votes: int
    confidence: float
    seed: int
    prediction: Tensor
    share: Tensor
    radius: Tensor
    residual: Tensor

    @property
    def holds(self) -> Tensor:
        """Where the radius exceeds the residual, (N,) bool."""
        return (self.prediction != ABSTAINED) & (self.residual < self.radius)

    @property
    def moved_share(self) -> Tensor:
        """Phi(Phi^-1(share) - residual / sigma), (N,): at least so many votes for the class are left at every g x."""
        left: Tensor = torch.special.ndtr(torch.special.ndtri(self.share) - self.residual / self.sigma)
        return left

    def __str__(self) -> str:
        n = len(self.prediction)
        rows: list[tuple[str, ...]] = [("", "smallest", "median", "largest")]
        for name, values in (("share", self.share), ("radius", self.radius), ("residual", self.residual)):
            rows.append((name, *(f"{float(v):.4g}" for v in (values.min(), values.median(), values.max()))))
        return "\n".join(
            [
                f"{self.group}, {span(self.within)}: noise of {self.sigma:g} after {self.layer}, {self.votes} votes, "
                f"seed {self.seed}",
                f"certified with confidence {self.confidence:g} for each sample: {int(self.holds.sum())} of {n} keep "
                "their class under every",
                f"  element; {int((self.prediction == ABSTAINED).sum())} abstained. Not certified: the same model "
                "without noise, and",
                "  true motions of pictures where the modelled action only comes close to them",
                *aligned(rows),
            ]
        )


def certify_smoothed(
    smoothed: Smoothed,
    x: Tensor,
    group: Group | str | None = None,
    within: float | str | None = None,
    *,
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
    votes: int = 1000,
    confidence: float = 0.999,
    seed: int = 1,
) -> SmoothedCertificate:
    """For which samples x (N, ...) can no g of the range change the class of the smoothed model?

    Those with `embedding_residual` < `certified_radius`(sigma, share), share the lower bound on the votes for the
    leading class: 100 votes choose it, `votes` others count it. The group is by default that of a soft model, the range
    all of it; `grids` and `action` as in `certify`.
    Confidence is for each sample; for all N at once ask for 1 - (1 - confidence) / N.

    >>> import softequiv as se
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = se.soften(net, "SO(2)", softness=0.0, grids={"1": (1, 8, 8)})
    >>> found = certify_smoothed(Smoothed(net, "1", 0.01), torch.randn(4, 1, 8, 8), within=se.degrees(30))
    >>> bool((found.residual < 1e-3).all())
    True
    """
    if not isinstance(smoothed, Smoothed):
        raise SoftEquivError(
            f"votes are those of a smoothed model; got {type(smoothed).__name__}: wrap it first, "
            "Smoothed(model, layer, sigma)"
        )
    confidence = checked_confidence(confidence)
    check_count("votes", votes)
    check_seed(seed)
    check_samples(x)
    model = smoothed.model
    chosen, reach = of_range(model, group, within)
    with evaluating(smoothed):
        inputs = at_home(model, x)
        residual = embedding_residual(model, smoothed.layer, inputs, chosen, reach, grids=grids, action=action)
        leading = smoothed.counts(inputs, CHOOSING, seed).argmax(1)
        counted = smoothed.counts(inputs, votes, seed + 1).gather(1, leading[:, None])[:, 0].tolist()
    share = [1 - proportion_upper(votes - count, votes, 1 - confidence) for count in counted]
    prediction = torch.where(torch.tensor(share) > 0.5, leading.cpu(), ABSTAINED)
    return SmoothedCertificate(
        group=chosen,
        within=reach,
        layer=smoothed.layer,
        sigma=smoothed.sigma,
        votes=votes,
        confidence=confidence,
        seed=seed,
        prediction=prediction,
        share=torch.tensor(share, dtype=torch.float64),
        radius=torch.tensor([certified_radius(smoothed.sigma, p) for p in share], dtype=torch.float64),
        residual=residual,
    )


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
        check_sees_through(model, layer, inputs)
        if isinstance(weight.module, nn.Linear):
            moved = turned_rows(weight.rep, inputs, some_elements(chosen, reach))
        else:
            check_patches(layer, weight.module, inputs)
            elements = permuting(chosen, reach)
            check_ignores(model, layer, inputs, elements)
            moved = (Pictures()(inputs, g) for g in elements)
        for copies in moved:
            h = taken(model, layer, copies)
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


def check_sees_through(model: nn.Module, layer: str, x: Tensor) -> None:
    """Raise a sentence unless the layer takes what the model is given, and the answers depend on it through the layer
    alone, sample by sample.
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


def check_ignores(model: nn.Module, layer: str, x: Tensor, elements: tuple[Element, ...]) -> None:
    """Raise a sentence unless the later layers answer alike to a layer's output and to the same moved by each g."""
    with after(model, layer, lambda h: h) as calls:
        asked(model, x)
    h = calls[0][1]
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


def checked_sigma(sigma: float) -> float:
    """The size of the noise, as Python's own number."""
    return float(checked_amount(sigma, "sigma, the standard deviation of the noise,", positive=True))
