"""Do augmentation and penalty, which leave the model untouched, minimise what they say, and does it help?"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from softequiv.actions import Acts, Moves, Pictures, Points, Still, Tokens
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.penalty import Divergence, Penalised
from softequiv.errors import SoftEquivError
from softequiv.measure.functional import kl_divergence

Objective = Callable[..., Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator
) -> Tensor:
    return loss(model(x), y)


class Logits(nn.Module):
    """Answers as models of transformers give them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(x)}


# augmentation


def test_class_labels_stand_still_and_every_picture_moves_by_its_own_element() -> None:
    moves, x, y = Moves(Pictures(), se.SO(2), count=50), drawn(6, 1, 5, 5), drawn(6, 25)
    found = Augmented(moves)(Logits(nn.Flatten()), x, y, functional.mse_loss, seeded())
    elements = [moves.elements[i] for i in moves.draw(6, seeded()).tolist()]
    assert len(set(elements)) > 3
    moved = torch.stack([Pictures()(picture, g) for picture, g in zip(x, elements, strict=True)])
    torch.testing.assert_close(found, functional.mse_loss(moved.flatten(1), y))
    assert found != Augmented(moves)(nn.Flatten(), x, y, functional.mse_loss, seeded(4))


def test_pixel_labels_and_futures_move_with_their_inputs() -> None:
    pictures = Moves(Pictures("nearest", fill=9), se.SO(2), se.degrees(60), count=20)
    labels = pictures.on(Pictures("nearest", fill=255))
    x = torch.arange(4 * 36).reshape(4, 6, 6) % 7
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(answers: Tensor, targets: Tensor) -> Tensor:
        seen.append((answers, targets))
        return answers.double().mean()

    Augmented(pictures, targets=labels)(nn.Identity(), x, x, loss, seeded())
    answers, targets = seen[0]
    outside = targets == 255
    assert outside.any() and torch.equal(answers == 9, outside) and torch.equal(answers[~outside], targets[~outside])
    tracks = Moves(Points(), se.SO(2), count=64)
    past = drawn(5, 8, 2)
    right = Augmented(tracks, targets=tracks)(nn.Identity(), past, past, functional.mse_loss, seeded())
    assert float(right) < 1e-20 < float(Augmented(tracks)(nn.Identity(), past, past, functional.mse_loss, seeded()))


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


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits in 16 x 16 pixels, with room to turn."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    wide = functional.interpolate(pictures, (12, 12), mode="bilinear")
    return functional.pad(wide, (2,) * 4), torch.tensor(data.target)


def trained(model: nn.Module, objective: Objective, steps: int) -> nn.Module:
    x, y = digits()
    torch.manual_seed(1)
    optimiser, order, generator = torch.optim.Adam(model.parameters(), 3e-3), seeded(0), seeded(1)
    for _ in range(steps):
        chosen = torch.randint(1200, (48,), generator=order)
        optimiser.zero_grad()
        objective(model, x[chosen], y[chosen], functional.cross_entropy, generator).backward()
        optimiser.step()
    return model.eval()


def test_strength_zero_is_plain_training_bit_for_bit() -> None:
    start, moves = network(), Moves(Pictures(), se.SO(2), count=10)
    states = [
        trained(copy.deepcopy(start), objective, 10).state_dict()
        for objective in (plain, Penalised(moves, 0.0), Penalised(moves, 1e-6))
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


# and it helps


@pytest.mark.parametrize(("divergence", "strengths"), [("squared", (0.0, 0.03, 0.5)), ("kl", (0.0, 0.1, 3.0))])
def test_a_larger_strength_gives_a_smaller_measured_error(divergence: Divergence, strengths: tuple[float, ...]) -> None:
    moves, (x, y) = Moves(Pictures("bilinear"), se.SO(2), se.degrees(60), count=256), digits()
    errors = []
    for strength in strengths:
        model = trained(network(), Penalised(moves, strength, divergence=divergence), 80)
        with torch.no_grad():
            assert float((model(x[1200:]).argmax(1) == y[1200:]).float().mean()) > 0.6  # by chance 0.1
            turned = moves(x[1200:], moves.cycle(0, len(x) - 1200))
            errors.append(float(kl_divergence(model(x[1200:]), model(turned)).mean()))
    assert errors[1] < 0.8 * errors[0] and errors[2] < 0.5 * errors[1]


def test_augmentation_reads_turned_digits_that_plain_training_does_not() -> None:
    moves, (x, y) = Moves(Pictures("bilinear"), se.SO(2), se.degrees(60), count=256), digits()
    turned = moves(x[1200:], moves.cycle(0, len(x) - 1200))
    with torch.no_grad():
        accuracy = [
            float((trained_model(turned).argmax(1) == y[1200:]).float().mean())
            for trained_model in (_learned(plain), _learned(Augmented(moves)))
        ]
    assert accuracy[1] > 0.7 and accuracy[1] > accuracy[0] + 0.1


def _learned(objective: Objective) -> nn.Module:
    with torch.enable_grad():
        return trained(network(), objective, 120)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda moves: Penalised(moves, -1.0), "got -1.0"),
        (lambda moves: Penalised(moves, float("nan")), "got nan"),
        (lambda moves: Penalised(moves, 1.0, divergence="cosine"), "unknown divergence 'cosine'"),
    ],
)
def test_mistakes_are_named(mistake: Callable[[Moves], object], sentence: str) -> None:
    with pytest.raises(SoftEquivError, match=sentence):
        mistake(Moves(Points(), se.SO(2), count=2))
