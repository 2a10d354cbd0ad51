"""What if every picture is first turned upright? A small network finds its orientation, any model answers for the
upright picture, and its answer is turned back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.actions import Acts, Moves, Pictures, Still, in_disc
from softequiv.asking.answers import tensor_of
from softequiv.baselines.group_cnn import CentredHalving, GroupCNN, checked_plane
from softequiv.errors import SoftEquivError, check_count, checked_amount
from softequiv.groups import C, Group
from softequiv.measure.frame import inside

Selection = Literal["straight-through", "soft"]
Scorer = Callable[[Group, int, Sequence[int]], nn.Module]

TURNS = C(18)
STILL = Still()
BORDER_REPEATED = Pictures("bilinear", "border")


class Orientation(nn.Module):
    """Scores of a group CNN, (N, C, H, W) to (N, |G|), permuted as the picture turns: s(u x)_g = s(x)_{u^-1 g}.

    One convolution a width. Exact to rounding for C(1), C(2), C(4), D(1), D(2), D(4).

    >>> Orientation(C(4), 1, (4, 4, 4))(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, group: Group, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.network = GroupCNN(group, in_channels, 1, widths)

    def forward(self, x: Tensor) -> Tensor:
        everywhere = self.network.features(x).mean((-2, -1))  # (N, width, |G|)
        scores: Tensor = self.network.head(everywhere.mT)[..., 0]
        return scores


class Energies(nn.Module):
    """Scores s(x)_g = -e(g^-1 x) of an ordinary CNN e, which is asked about all |G| turned copies of a picture.

    The largest score is at argmin_g e(g^-1 x): canonicalisation by optimisation. e knows nothing of the group, and the
    scores are permuted all the same; exactly where turns are exact.

    >>> Energies(C(4), 1, (4, 4, 4))(torch.randn(2, 1, 8, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, group: Group, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        if not widths:
            raise SoftEquivError("energies need the width of one layer at least, such as widths=(8, 16, 16)")
        for what, value in (("in_channels", in_channels), *(("a width", width) for width in widths)):
            check_count(what, value)
        self.turns = Moves(Pictures("bilinear"), group, elements=tuple(checked_plane(group).elements())).inverse()
        layers: list[nn.Module] = []
        for before, after in pairwise([in_channels, *widths]):
            convolution = nn.Conv2d(before, after, 5, padding=2, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), CentredHalving()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        copies = torch.stack([self.turns.acts(x, g) for g in self.turns.elements], 1).flatten(0, 1)  # (N |G|, C, H, W)
        energies: Tensor = self.head(self.features(copies).mean((-2, -1)))
        return -energies.reshape(len(x), len(self.turns))


class Canonical(nn.Module):
    """F(x) = g f(g^-1 x) with g = argmax_g s(x)_g, equivariant whatever the model f: as s(u x)_{u g} = s(x)_g, a turned
    picture is turned back by as much more. Invariant, F(x) = f(g^-1 x), where answers stand still.

    Kaba et al. 2023, "Equivariance with learned canonicalization functions"; Mondal et al. 2023, "Equivariant
    adaptation of large pretrained models". Exact for C(1), C(2), C(4), D(1), D(2), D(4), but for pictures of two equal
    best scores, such as symmetric ones. For other groups turns resample, and a turned picture has lost its corners;
    what we changed is that scores see the inscribed disc alone, and do not judge by corners. How far the choice
    follows a picture is then a matter of training: see `WithPrior`.

    Cost: one forward pass of the model and one of the scorer, a group convolution over |G| elements, at every
    inference; hard choices are made on the CPU, one wait for the device each. Straight-through training and soft
    selection also turn the picture (and pictures of answers) |G| times.

    Args:
        model: (N, in_channels, H, W) to a tensor, or to a result with logits, as models of transformers give.
        widths: channels of the scorer's layers.
        scorer: `Orientation`, or `Energies` for the optimisation-based form.
        selection: "straight-through" turns by the best g, with the gradient of sum_g p_g g^-1 x, p = softmax(s);
            "soft" turns by that convex combination itself, and answers back by sum_g p_g g y.
        outputs: how answers move: `Still()` for class scores, `Pictures()` for those of pixels.
        turns: how the picture is turned; by default what turns into the frame repeats the border.
        size: scores are of the picture halved until no side is longer.
        margin: pixels by which the border is repeated on all sides first, so that less is turned out of the frame:
            nothing where it is at least 0.21 of the size. The model must take the larger picture; answers are cropped.

    >>> from softequiv.testing import assert_equivariant
    >>> model = Canonical(nn.Flatten(), C(4), in_channels=1, widths=(4, 4, 4)).double()
    >>> assert_equivariant(model, C(4), Pictures(), Still(), inputs=torch.randn(2, 1, 8, 8))
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group = TURNS,
        in_channels: int = 3,
        widths: Sequence[int] = (8, 16, 16),
        *,
        scorer: Scorer = Orientation,
        selection: Selection = "straight-through",
        outputs: Acts = STILL,
        turns: Pictures = BORDER_REPEATED,
        size: int = 64,
        margin: int = 0,
    ) -> None:
        super().__init__()
        if selection not in get_args(Selection):
            raise SoftEquivError(f"unknown selection {selection!r}; choose one of {', '.join(get_args(Selection))}")
        for what, value, least in (("size", size, 2), ("margin", margin, 0)):
            if not isinstance(value, int) or value < least:
                raise SoftEquivError(f"{what} is a whole number of pixels, at least {least}; got {value!r}")
        if margin and not isinstance(outputs, (Still, Pictures)):
            raise SoftEquivError(f"answers that move by {outputs} have no margin to crop; use margin=0")
        self.group, self.in_channels, self.selection = checked_plane(group), in_channels, selection
        self.size, self.margin = size, margin
        self.model, self.scorer, self.halving = model, scorer(group, in_channels, widths), CentredHalving()
        self.turns = Moves(turns, group, elements=tuple(group.elements()))
        self.upright, self.back = self.turns.inverse(), self.turns.on(outputs)

    def scores(self, x: Tensor) -> Tensor:
        """s(x), (N, |G|), in the order of `group.elements()`; the identity is first."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise SoftEquivError(f"pictures are (N, {self.in_channels}, H, W); got {tuple(x.shape)}")
        while max(x.shape[-2:]) > self.size:
            x = self.halving(x)
        own = next(self.scorer.parameters()).dtype
        with torch.autocast(x.device.type, enabled=False):  # a choice by rounded scores would not turn with x
            scores: Tensor = self.scorer(in_disc(x).to(own))
        return scores

    def prior(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """mean -log p(g x)_g, an element g drawn for each upright picture: a scalar, see `WithPrior`."""
        turned = self.turns.draw(len(x), generator)
        return prior_loss(self.scores(self.turns(x, turned)), turned)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        answers = tensor_of(self.model(self._selected(self.upright, self._padded(x), scores)))
        if isinstance(self.back.acts, Still):
            return answers
        return self._cropped(self._selected(self.back, answers, scores), x)

    @torch.no_grad()
    def valid(self, x: Tensor) -> Tensor | None:
        """Which pixels of answers of the size of x the model has seen, (N, H, W) bool; None where all.

        Others were turned out of its frame, and their answers are what `outputs` fills in.
        """
        padded = self._padded(x)
        if self.selection == "soft":
            seen = inside(self.back.acts, padded, *self.back.elements)
            seen = None if seen is None else seen.expand(len(x), -1, -1)
        else:
            seen = self.back.valid(padded, self.scores(x).argmax(1))
        return None if seen is None else self._cropped(seen, x)

    def _selected(self, moves: Moves, z: Tensor, scores: Tensor) -> Tensor:
        """z moved by the elements that the scores select."""
        if self.selection == "soft" and not z.is_floating_point():
            raise SoftEquivError(
                f"soft selection mixes pictures and needs floating-point ones; got {z.dtype}: convert them, or use "
                "selection='straight-through'"
            )
        shares = scores.softmax(1).to(z.dtype).unflatten(0, (-1, *(1,) * (z.ndim - 1))).movedim(-1, 0)
        if self.selection == "soft":
            return torch.stack([p * moves.acts(z, g) for p, g in zip(shares, moves.elements, strict=True)]).sum(0)
        moved = moves(z, scores.argmax(1))
        if not shares.requires_grad:
            return moved
        still = z.detach()
        for p, g in zip(shares - shares.detach(), moves.elements, strict=True):  # zeros, with the slope of p
            moved = moved + p * moves.acts(still, g)
        return moved

    def _padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (self.margin,) * 4, mode="replicate") if self.margin else x

    def _cropped(self, answers: Tensor, x: Tensor) -> Tensor:
        """Answers for the padded picture without its margin, which is as much smaller as they are."""
        if not self.margin:
            return answers
        cuts = []
        for found, size in zip(answers.shape[-2:], x.shape[-2:], strict=True):
            cut, rest = divmod(self.margin * found, size + 2 * self.margin)
            if rest:
                raise SoftEquivError(
                    f"answers of {found} for {size + 2 * self.margin} pixels have no whole margin to crop; choose a "
                    f"margin that the model's stride divides instead of {self.margin}"
                )
            cuts.append(slice(cut, found - cut))
        return answers[..., cuts[0], cuts[1]]


def prior_loss(scores: Tensor, turned: Tensor) -> Tensor:
    """KL[delta_g || softmax(scores)] = mean -log p_g for upright pictures turned by the elements g of these numbers.

    Shapes: (N, |G|) and (N,) to a scalar. Pictures as they come are turned by number 0, the identity.

    >>> import math
    >>> round(prior_loss(torch.zeros(3, 4), torch.tensor([0, 1, 2])).item(), 4) == round(math.log(4), 4)
    True
    """
    return functional.cross_entropy(scores, turned.to(scores.device, non_blocking=True))


@dataclass(frozen=True)
class WithPrior:
    """A training objective: loss(F(x), y) + strength * mean -log p(g x)_g, for a model that is or holds a `Canonical`.

    The prior keeps the orientations that a pretrained model knows (Mondal et al. 2023, whose released settings have
    strength 100), and is true only where x has the orientation of the pretraining data. What we changed: they ask for
    p(x)_e. That is the same where scores turn exactly with the picture; elsewhere, as under C(18), a scorer learns to
    prefer e by how pixels resample, whatever the picture, and no longer follows it. So each sample is first turned by
    an element g drawn for it. One forward pass of the model, two of the scorer.

    >>> model = Canonical(nn.Flatten(), C(4), in_channels=1, widths=(4, 4, 4))
    >>> loss = WithPrior()(model, torch.randn(2, 1, 8, 8), torch.zeros(2, 64), functional.mse_loss)
    >>> loss.requires_grad
    True
    """

    strength: float = 100.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", checked_amount(self.strength, "the strength of a prior"))

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        canonical = next((part for part in model.modules() if isinstance(part, Canonical)), None)
        if canonical is None:
            raise SoftEquivError(
                f"{type(model).__name__} holds no Canonical, so there is no prior; wrap the model first"
            )
        prior = canonical.prior(x, generator)
        return loss(tensor_of(model(x)), y) + self.strength * prior
