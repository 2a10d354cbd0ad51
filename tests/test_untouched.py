"""Do augmentation and penalty, which leave the model untouched, minimise what they say, and does it help?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from digits import accuracy, roomy_digits, trained, unseen
from softequiv.actions import Acts, Moves, Pictures, Points, Still, Tokens
from softequiv.asking import kl_divergence
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.penalty import Divergence, Penalised
from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Group
from softequiv.holding import HeldByMeasurement
from softequiv.tasks.segmentation import MASKS
from softequiv.training.loop import plain


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Logits(nn.Module):
    """Answers as models of transformers give them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(x)}


# augmentation


def test_class_labels_stand_still_and_every_picture_moves_by_its_own_element() -> None:
    moves, x, y = Moves(Pictures(), se.SO(2), count=50), drawn(6, 1, 5, 5), torch.arange(6)
    found, labels = Augmented(moves)(x, y, seeded())
    elements = [moves.elements[i] for i in moves.draw(6, seeded()).tolist()]
    assert len(set(elements)) > 3
    moved = torch.stack([Pictures()(picture, g) for picture, g in zip(x, elements, strict=True)])
    torch.testing.assert_close(found, moved)
    assert torch.equal(labels, y) and not torch.equal(found, Augmented(moves)(x, y, seeded(4))[0])


def test_pixel_labels_and_futures_move_with_their_inputs() -> None:
    pictures = Moves(Pictures("nearest", fill=9), se.SO(2), se.degrees(60), count=20)
    x = torch.arange(4 * 36).reshape(4, 6, 6) % 7
    moved, masks = Augmented(pictures, targets=pictures.on(MASKS))(x, x, seeded())
    outside = masks == 255
    assert outside.any() and torch.equal(moved == 9, outside) and torch.equal(moved[~outside], masks[~outside])
    tracks, past = Moves(Points(), se.SO(2), count=64), drawn(5, 8, 2)
    turned, future = Augmented(tracks, targets=tracks)(past, past, seeded())
    torch.testing.assert_close(turned, future, rtol=0, atol=1e-12)
    assert not torch.allclose(turned, Augmented(tracks)(past, past, seeded())[1])


def test_augmentation_goes_before_any_objective() -> None:
    moves, x, y = Moves(Pictures(), se.C(4)), drawn(6, 1, 5, 5), drawn(6, 25)
    penalised, model = Penalised(moves, 2.0), Logits(nn.Flatten())
    generator, again = seeded(), seeded()
    found = penalised(model, *Augmented(moves)(x, y, generator), functional.mse_loss, generator)
    moved = moves(x, moves.draw(6, again))
    torch.testing.assert_close(found, penalised(model, moved, y, functional.mse_loss, again))


def test_targets_moved_by_other_elements_are_refused() -> None:
    with pytest.raises(SoftEquivError, match="targets by other elements"):
        Augmented(Moves(Points(), se.SO(2), count=4), targets=Moves(Points(), se.SO(2), count=4, seed=1))


# penalty


@pytest.mark.parametrize(
    ("shape", "inputs", "outputs", "divergence", "axis"),
    [
        ((7, 1, 5, 5), Pictures(), Still(), "squared", -1),
        ((7, 1, 5, 5), Pictures(), Still(), "kl", -1),
        ((7, 3, 9, 9), Pictures(), Pictures("bilinear"), "squared", 1),
        ((7, 3, 9, 9), Pictures(), Pictures("bilinear"), "kl", 1),
        ((7, 37, 3), Tokens(6, 6, extra=1), Tokens(6, 6, extra=1), "squared", -1),
        ((7, 6, 2), Points(), Points(), "squared", -1),
    ],
    ids=str,
)
def test_the_penalty_is_the_mean_divergence_of_what_stays_inside(
    shape: tuple[int, ...], inputs: Acts, outputs: Acts, divergence: Divergence, axis: int
) -> None:
    torch.manual_seed(0)
    grid = nn.Conv2d(3, 3, 3, padding=1) if len(shape) == 4 and shape[1] == 3 else nn.Linear(shape[-1], shape[-1])
    model = nn.Sequential(grid, nn.Tanh(), nn.Flatten() if isinstance(outputs, Still) else nn.Identity()).double()
    moves, x = Moves(inputs, se.SO(2), count=30), drawn(*shape)
    objective = Penalised(moves, 2.5, outputs=outputs, divergence=divergence)
    y = torch.zeros_like(model(x))
    found = objective(Logits(model), x, y, functional.mse_loss, seeded())
    total, count = 0.0, 0
    for i, number in enumerate(moves.draw(7, seeded()).tolist()):
        g, one = moves.elements[number], x[i : i + 1]
        moved, expected = model(inputs(one, g)), outputs(model(one), g)
        error = kl_divergence(expected, moved, axis) if divergence == "kl" else (moved - expected).pow(2).sum(axis)
        inside = outputs.valid(expected[0], g)
        kept = error if inside is None else error[inside.reshape(1, *error.shape[1:])]
        total, count = total + float(kept.detach().sum()), count + kept.numel()
    torch.testing.assert_close(found, functional.mse_loss(model(x), y) + 2.5 * total / count)
    assert total > 0


def test_a_model_that_commutes_pays_nothing() -> None:
    tracks, past = Moves(Points(), se.SO(2), count=64), drawn(5, 8, 2)
    commuting = Penalised(tracks, 1e6, outputs=Points())(nn.Identity(), past, past, functional.mse_loss, seeded())
    breaking = Penalised(tracks, 1e6)(nn.Identity(), past, past, functional.mse_loss, seeded())
    assert float(commuting) < 1e-15 and float(breaking) > 1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 10)
    )


@pytest.mark.parametrize("objective", [Penalised, HeldByMeasurement])
def test_maps_of_moved_pictures_cannot_stand_still(objective: Callable[..., Any]) -> None:
    moves, x, net = Moves(Pictures(), se.C(4)), torch.rand(5, 1, 8, 8), nn.Conv2d(1, 4, 3, padding=1)
    with pytest.raises(SoftEquivError, match=r"\(5, 4, 8, 8\) are maps, .* outputs=\.\.\., such as Pictures\(\)"):
        objective(moves, 1.0)(net, x, x, lambda answers, _: answers.mean())
    objective(moves, 1.0, outputs=Pictures())(net, x, x, lambda answers, _: answers.mean())


@dataclass(frozen=True)
class OwnMaps(Acts):
    """Maps (N, K, H, W) of which a user masks the places, one mask for all channels."""

    def check(self, group: Group, x: Tensor) -> None:
        pass

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        return x

    def valid(self, x: Tensor, g: Element) -> Tensor:
        return torch.ones(1, *x.shape[-2:], dtype=torch.bool)


def test_masks_that_are_not_of_whole_vectors_are_refused() -> None:
    x = torch.rand(4, 4, 4, 4)  # of one size along all axes, so that any mask would broadcast
    with pytest.raises(SoftEquivError, match=r"got a mask of \(4, 1, 4, 4\): maps \(N, K, H, W\) move by Pictures"):
        Penalised(Moves(Pictures(), se.C(4)), 1.0, outputs=OwnMaps())(nn.Identity(), x, x, functional.mse_loss)


def test_strength_zero_is_plain_training_bit_for_bit() -> None:
    start, moves = network(), Moves(Pictures(), se.SO(2), count=10)
    states = [
        trained(copy.deepcopy(start), roomy_digits(), 1, 3e-3, objective).state_dict()
        for objective in (plain, Penalised(moves, 0.0), Penalised(moves, 1e-6))
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


# and it helps


@pytest.mark.parametrize(("divergence", "strengths"), [("squared", (0.0, 0.03, 0.5)), ("kl", (0.0, 0.1, 3.0))])
def test_a_larger_strength_gives_a_smaller_measured_error(divergence: Divergence, strengths: tuple[float, ...]) -> None:
    moves, data = Moves(Pictures("bilinear"), se.SO(2), se.degrees(60), count=256), roomy_digits()
    x, labels = unseen(data)
    turned, errors = moves(x, moves.cycle(0, len(x))), []
    for strength in strengths:
        model = trained(network(), data, 3, 3e-3, Penalised(moves, strength, divergence=divergence))
        assert accuracy(model, x, labels) > 0.6  # by chance 0.1
        with torch.no_grad():
            errors.append(float(kl_divergence(model(x), model(turned)).mean()))
    assert errors[1] < 0.8 * errors[0] and errors[2] < 0.5 * errors[1]


def test_augmentation_reads_turned_digits_that_plain_training_does_not() -> None:
    moves, data = Moves(Pictures("bilinear"), se.SO(2), se.degrees(60), count=256), roomy_digits()
    x, labels = unseen(data)
    turned = moves(x, moves.cycle(0, len(x)))
    upright, augmented = (
        accuracy(trained(network(), data, 5, 3e-3, transform=transform), turned, labels)
        for transform in (None, Augmented(moves))
    )
    assert augmented > 0.7 and augmented > upright + 0.1


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda moves: Penalised(moves, -1.0), "got -1.0"),
        (lambda moves: Penalised(moves, float("nan")), "got nan"),
        (lambda moves: Penalised(moves, 1.0, divergence="cosine"), "unknown divergence 'cosine'"),
        (
            lambda moves: Penalised(moves, 1.0, outputs=Pictures()).penalty(
                *[torch.ones(2, 2, 2)] * 2, moves.cycle(0, 2)
            ),
            r"\(N, K, H, W\); got \(2, 2, 2\)",
        ),
    ],
)
def test_mistakes_are_named(mistake: Callable[[Moves], object], sentence: str) -> None:
    with pytest.raises(SoftEquivError, match=sentence):
        mistake(Moves(Points(), se.SO(2), count=2))
