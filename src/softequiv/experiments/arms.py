"""Which ways to be equivariant stand side by side? Each arm takes a model and a dial, and gives what is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from softequiv.actions import Acts, Moves, Pictures, Still
from softequiv.adapt import soften
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.canonical import Canonical, WithPrior
from softequiv.baselines.paper import paper_soften
from softequiv.baselines.penalty import Penalised
from softequiv.baselines.rpp import rpp
from softequiv.errors import SoftEquivError
from softequiv.gains import LevelGain, hard
from softequiv.groups import C, D, Group
from softequiv.holding import HeldByMeasurement, Mixture, freeze_rest, limit_gain, noisy
from softequiv.nn import soft_weights
from softequiv.nn.layers import restored_scale
from softequiv.spectrum import spectrum
from softequiv.training.loop import Loss, Objective, plain

TURNS = 18  # rotations of the paper's finite groups
LONGER = "plain (twice as long)"  # trained on turned pictures: as many passes as a held target has
HALF_BATCHES = "held (half batches)"  # as many steps, too, as augmentation for twice as long
SOFT, TARGET = 0.9, 0.05  # softness below a target on the whole network; the target of a mixture

Grids = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Setting:
    """What all arms of a table are told: the group, the range they are judged by, how pictures move, how large, and how
    answers and labels move with them."""

    group: Group
    within: float
    acts: Pictures
    channels: int
    grids: Grids | None = None
    outputs: Acts = field(default_factory=Still)
    labels: Acts = field(default_factory=Still)

    @property
    def finite(self) -> Group:
        """The paper's finite group of the same kind."""
        return self.rotations(TURNS)

    @property
    def quarters(self) -> Group:
        """The finite group of the same kind that permutes pixels."""
        return self.rotations(4)

    def rotations(self, count: int) -> Group:
        """So many rotations, with reflections where the group has them."""
        return C(count) if self.group.name.startswith(("SO", "C")) else D(count)


@dataclass(frozen=True)
class Armed:
    """A model ready for training, what its training minimises, and what is called after each step."""

    model: nn.Module
    objective: Objective = plain
    after_step: tuple[Callable[[int], None], ...] = ()


Arm = Callable[[nn.Module, float, Setting], Armed]


def free(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The model as it is."""
    return Armed(model)


def free_any_angle(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The model as it is, trained on samples moved by all of the group, whatever the range of the table."""
    moves = Moves(setting.acts, setting.group)
    turning = Augmented(moves, moves.on(setting.labels))

    def objective(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
        return plain(model, *turning(x, y, generator), loss, generator)

    return Armed(model, objective)


def ours(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter: softness on the exact pixel rotation."""
    return Armed(soften(model, setting.group, softness=dial, grids=setting.grids))


def levels(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter: all levels up to the dial whole, and nothing of the others, so that training cannot undo it."""
    return Armed(soften(model, setting.group, gain=hard(dial + 0.5), grids=setting.grids))


def target(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter: every weight within a certified error over the range, projected after each step."""
    return Armed(soften(model, setting.group, error=dial, within=setting.within, grids=setting.grids, mode="project"))


def paper(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The paper's construction with its hard cut-off."""
    return Armed(paper_soften(model, setting.finite, softness=dial, grids=setting.grids))


def paper_smooth(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The paper's construction with its smooth cut-off."""
    return Armed(paper_soften(model, setting.finite, softness=dial, cutoff="smooth", grids=setting.grids))


def residual(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Residual pathways with a scalar on the free one."""
    return Armed(rpp(model, setting.group, dial, grids=setting.grids))


def canonical(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The picture turned upright first; the dial is the strength of the prior."""
    return Armed(Canonical(model, setting.finite, setting.channels), WithPrior(dial))


def penalised(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """A price on the divergence between answers; the dial is its strength."""
    moves = Moves(setting.acts, setting.group, setting.within)
    return Armed(model, Penalised(moves, dial, setting.outputs, "kl"))


def held(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """A target on the network's measured error over the range, held by a price; half of each batch is measured."""
    moves = Moves(setting.acts, setting.group, setting.within)
    return Armed(model, HeldByMeasurement(moves, dial, share=0.5, outputs=setting.outputs))


def held_labelled(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """A held target as `softequiv train` has it: all of each batch is measured, and its moved pictures are learnt from
    too, by their labels."""
    moves = Moves(setting.acts, setting.group, setting.within)
    return Armed(model, HeldByMeasurement(moves, dial, outputs=setting.outputs, targets=setting.labels))


def ours_held(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter, below a target on the network's measured error."""
    return held(ours(model, SOFT, setting).model, dial, setting)


def ours_noisy(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter, with noise of the size of the certified residual behind each weight."""
    soft = ours(model, dial, setting)
    noisy(soft.model, setting.within)
    return soft


def ours_limited(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter; no other weight may grow in norm."""
    soft = ours(model, dial, setting).model
    return Armed(soft, after_step=(limit_gain(soft),))


def ours_frozen(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Our filter; of all others the norms and the head alone learn."""
    soft = ours(model, dial, setting)
    freeze_rest(soft.model)
    return soft


def mixture(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """Probabilities averaged over quarter turns, and flips where the group has them, but for a share: the dial."""
    return Armed(Mixture.over_orbit(model, setting.quarters, dial, setting.acts))


def mixture_held(model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The mixture, below a target on its measured error."""
    return held(mixture(model, dial, setting).model, TARGET, setting)


ARMS: dict[str, Arm] = {
    "plain": free,
    LONGER: free,
    "plain (any angle)": free_any_angle,
    "ours": ours,
    "ours (levels)": levels,
    "ours (target)": target,
    "paper": paper,
    "paper (smooth)": paper_smooth,
    "RPP": residual,
    "canonical": canonical,
    "penalty": penalised,
    "held": held,
    "held + labels": held_labelled,
    HALF_BATCHES: held_labelled,
    "ours + held": ours_held,
    "ours + noise": ours_noisy,
    "ours + limit": ours_limited,
    "ours + frozen": ours_frozen,
    "mixture": mixture,
    "mixture + held": mixture_held,
}


def armed(name: str, model: nn.Module, dial: float, setting: Setting) -> Armed:
    """The arm of a name."""
    if name not in ARMS:
        raise SoftEquivError(f"there is no arm {name!r}; choose one of {', '.join(ARMS)}")
    return ARMS[name](model, dial, setting)


def trained_so(arm: str, turned: bool) -> bool:
    """Whether an arm is run on turned pictures, or on upright ones: half batches on upright ones alone, as they ask
    whether augmentation is beaten with as many passes.

    >>> trained_so("ours", True), trained_so(HALF_BATCHES, True)
    (True, False)
    """
    return not (turned and arm == HALF_BATCHES)


def batch_of(name: str, batch: int) -> int:
    """The samples of a step of an arm."""
    return batch // 2 if name == HALF_BATCHES else batch


def restore_variance(model: nn.Module) -> None:
    """Scale filtered weights that are still random up by what their filter takes, so that all stops start alike."""
    with torch.no_grad():
        for weight in soft_weights(model):
            weight.stored.mul_(restored_scale(weight.soft, weight.stored))


def kept(model: nn.Module) -> float | None:
    """The share of directions that the filters of a model keep, sum gamma^2 / N; None where it has no such filter.

    >>> import softequiv as se
    >>> kept(se.soften(nn.Conv2d(1, 1, 3), "SO(2)", gain=se.hard(0.5)))
    0.333...
    """
    whole, stays = 0, 0.0
    for weight in soft_weights(model):
        gain, rep = weight.soft.gain, weight.soft.rep
        if not isinstance(gain, LevelGain):
            return None
        levels = spectrum(rep)
        whole += rep.dim
        stays += float((gain.gamma(levels) ** 2 * levels.counts).sum())
    return stays / whole if whole else None
