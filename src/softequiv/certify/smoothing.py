"""When can no group element change a prediction, whatever the later layers do? Where noise after the first layer hides
what that layer lets through: its certified residual must be smaller than the radius of randomised smoothing.

Cohen, Rosenfeld & Kolter (2019), Certified adversarial robustness via randomized smoothing, with the noise on the
embedding instead of the input and the group's residual in place of an adversary's budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv.asking import asked, at_home, check_finite, evaluating
from softequiv.asking.data import check_samples
from softequiv.asking.proportion import proportion_upper
from softequiv.certify.certificate import span
from softequiv.certify.residual import after, check_once, embedding_residual, of_range, scores
from softequiv.certify.statistical import checked_confidence
from softequiv.errors import SoftEquivError, check_count, check_seed, checked_amount
from softequiv.groups import Group
from softequiv.nn.module import check_module
from softequiv.reps import Action

ABSTAINED = -1  # in place of a class
AT_ONCE = 1024  # samples in one call of the model
CHOOSING = 100  # votes that choose the class, before others count it


def checked_sigma(sigma: float) -> float:
    """The size of the noise, as Python's own number."""
    return float(checked_amount(sigma, "sigma, the standard deviation of the noise,", positive=True))


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

    Those with `embedding_residual` < `certified_radius`(sigma, share), where `share` is the lower bound on the share of
    votes for the leading class: 100 votes choose the class, and `votes` others are counted. The group is by default
    that of a soft model, the range all of it; `grids` and `action` are as in `certify`. The confidence is for each
    sample; for all N at once ask for 1 - (1 - confidence) / N.

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
