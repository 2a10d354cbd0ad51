"""What does each way to be equivariant cost? Numbers to learn, a training step and an inference of every baseline, as
ratios to the plain model with the same body, taken in turns in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softequiv.actions import Moves, Pictures
from softequiv.adapt import bake, soften
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.blurpool import BlurPool2d
from softequiv.baselines.canonical import Canonical, WithPrior
from softequiv.baselines.emlp import EMLP, EMLPRPP, MLP
from softequiv.baselines.eqauto import EqAuto
from softequiv.baselines.group_cnn import CentredHalving, GroupCNN, free_parameters
from softequiv.baselines.paper import paper_soften
from softequiv.baselines.penalty import Penalised
from softequiv.baselines.relaxed import RelaxedGroupCNN
from softequiv.baselines.rpp import merged, rpp
from softequiv.experiments.speed import SOFTNESS, Work, inference, ratios, training_step
from softequiv.gains import softness
from softequiv.groups import SO, C, O, degrees
from softequiv.networks.forecaster import Forecaster
from softequiv.networks.steerable import steerable_cnn
from softequiv.reps import vector
from softequiv.training.loop import Loss, Objective, Transform, plain

WIDTHS = (40, 80, 160)  # feature maps: divisible by 4, 5 and 8, so that all networks have as many
CLASSES, CHANNELS = 10, 3
RANGE = 30
POOL = 256  # turns drawn once
PLAIN = "plain"


@dataclass(frozen=True)
class Contestant:
    """A model, what its training minimises and does to batches; `served` where it is not trained in this form."""

    model: nn.Module
    objective: Objective = plain
    transform: Transform | None = None
    served: bool = False


@dataclass(frozen=True)
class Cost:
    """One line of the table; ratios to the plain model of the same body. A model that is only served has no step."""

    name: str
    against: str
    parameters: int
    training: float | None
    inference: float


def centred(channels: int) -> nn.Module:
    """The halving of all networks but the one that blurs."""
    return CentredHalving()


def plain_cnn(
    widths: Sequence[int] = WIDTHS, halving: Callable[[int], nn.Module] = centred, channels: int = CHANNELS
) -> nn.Sequential:
    """Convolutions of 5 x 5 with batch norm, ReLU and halving, a mean over the picture and a linear head."""
    layers: list[nn.Module] = []
    for before, after in zip((channels, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 5, padding=2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(halving(after))
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def on_any_model(build: Callable[[], nn.Module]) -> dict[str, Contestant]:
    """Every way that takes a model as it is."""
    moves = Moves(Pictures(), SO(2), degrees(RANGE), count=POOL)
    return {
        PLAIN: Contestant(build()),
        "ours, parametrize": Contestant(soften(build(), SO(2), softness=SOFTNESS)),
        "ours, error target": Contestant(soften(build(), SO(2), error=0.3, within=degrees(RANGE))),
        "ours, project": Contestant(soften(build(), SO(2), softness=SOFTNESS, mode="project")),
        "ours, baked": Contestant(bake(soften(build(), SO(2), softness=SOFTNESS)), served=True),
        "the paper's construction": Contestant(paper_soften(build(), softness=SOFTNESS)),
        "RPP": Contestant(rpp(build(), SO(2), 0.5)),
        "RPP, merged": Contestant(merged(rpp(build(), SO(2), 0.5)), served=True),
        "augmentation": Contestant(build(), transform=Augmented(moves)),
        "penalty": Contestant(build(), Penalised(moves, 1.0, divergence="kl")),
        "canonical, C18": Contestant(Canonical(build(), C(18), CHANNELS), WithPrior(1.0)),
    }


def convolutional(widths: Sequence[int] = WIDTHS) -> dict[str, Contestant]:
    """The ways on a CNN, and networks of other layers with as many feature maps."""

    def shared(number: int) -> list[int]:
        return [width // number for width in widths]

    return {
        **on_any_model(lambda: plain_cnn(widths)),
        "BlurPool": Contestant(plain_cnn(widths, BlurPool2d)),
        "group CNN, C4": Contestant(GroupCNN(C(4), CHANNELS, CLASSES, shared(4))),
        "group CNN, C8": Contestant(GroupCNN(C(8), CHANNELS, CLASSES, shared(8))),
        "relaxed group CNN, C4, 2 banks": Contestant(RelaxedGroupCNN(C(4), CHANNELS, CLASSES, 2, shared(4))),
        "steerable CNN, SO(2)": Contestant(steerable_cnn(SO(2), CHANNELS, CLASSES, shared(5), frequencies=2)),
    }


def tensorial(channels: int) -> dict[str, Contestant]:
    """EMLP and its residual pathways beside an MLP of as many channels: two vectors to one, under O(5)."""
    source, target = 2 * vector(O(5)), vector(O(5))
    return {
        PLAIN: Contestant(MLP(source, target, channels)),
        "EMLP, O(5)": Contestant(EMLP(source, target, channels)),
        "EMLP-RPP, O(5)": Contestant(EMLPRPP(source, target, channels)),
    }


def autoregressive(width: int) -> dict[str, Contestant]:
    """Transformers that forecast tracks: plain, of vector neurons, and of our typed maps at softness 0."""
    return {
        PLAIN: Contestant(Forecaster(width), mean_square),
        "EqAuto, SO(2)": Contestant(EqAuto(SO(2), width), mean_square),
        "ours, typed, strict": Contestant(Forecaster(width, group=SO(2), gain=softness(0)), mean_square),
    }


def mean_square(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """A loss for answers that have no labels."""
    answers: Tensor = model(x)
    return answers.square().mean()


def costs(contestants: dict[str, Contestant], x: Tensor, y: Tensor, against: str, rounds: int) -> list[Cost]:
    """Every contestant against the plain one, on one batch."""
    steps: dict[str, Work] = {
        name: training_step(one.model, x, y, one.objective, one.transform)
        for name, one in contestants.items()
        if not one.served
    }
    training = ratios(steps, PLAIN, rounds)
    answers: dict[str, Work] = {name: inference(one.model, x) for name, one in contestants.items()}
    served = ratios(answers, PLAIN, rounds)
    return [
        Cost(name, against, free_parameters(one.model), training.get(name), served[name])
        for name, one in contestants.items()
    ]


def image_costs(
    batch: int, pixels: int, rounds: int, widths: Sequence[int] = WIDTHS, device: str = "cpu"
) -> list[Cost]:
    """The costs of all that answers for pictures, on random ones."""
    torch.manual_seed(0)
    x = torch.randn(batch, CHANNELS, pixels, pixels, device=device)
    y = torch.randint(CLASSES, (batch,), device=device)
    return costs(convolutional(widths), x, y, f"CNN of {' / '.join(map(str, widths))} maps", rounds)


def tensor_costs(batch: int, channels: int, rounds: int, device: str = "cpu") -> list[Cost]:
    """The costs of all that answers for vectors, on random ones; labels stand for a loss, and are those of five."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 10, device=device), torch.randint(5, (batch,), device=device)
    return costs(tensorial(channels), x, y, f"MLP of {channels} channels", rounds)


def track_costs(batch: int, width: int, rounds: int, device: str = "cpu") -> list[Cost]:
    """The costs of all that forecasts, on random tracks of 19 steps: each step is asked for the next."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 19, 2, device=device).cumsum(1), torch.zeros(batch, device=device)
    return costs(autoregressive(width), x, y, f"transformer of width {width}", rounds)
