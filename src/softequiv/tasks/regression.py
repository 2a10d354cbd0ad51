"""Which functions of vectors are learned? Synthetic regression: an O(5) invariant that is broken by gamma, moments of
inertia under SO(3), and a Lorentz invariant matrix element.

Data as in Finzi, Welling, Wilson (2021), "A Practical Method for Constructing Equivariant Multilayer Perceptrons for
Arbitrary Matrix Groups"; gamma is what "Tunable Soft Equivariance with Guarantees" (2026) adds to the first. Targets
are divided by their standard deviation over the training examples, and scalars, which no group moves, are centred.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from softequiv.actions import Moves, Vectors
from softequiv.asking.answers import asked, at_home, evaluating
from softequiv.errors import SoftEquivError, check_count, checked_number
from softequiv.groups import SO, Lorentz, O
from softequiv.reps import Rep, scalar, tensor, vector
from softequiv.tasks.base import Examples, Held, Task
from softequiv.tasks.splits import check_split_seed

EPSILON = 1e-3  # the paper leaves it open; the four |N(0, 1)| beside it are smaller less than once in 10^13
BODIES = 5  # in the moments of inertia

Sample = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Regression(Task):
    """Vectors of `source`, (N, *source.shape), to vectors of `target`; a target in its own units is y scale + shift."""

    source: Rep
    target: Rep
    scale: float
    shift: float

    score: ClassVar[str] = "MSE"
    sign: ClassVar[int] = -1

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error of normalised targets: 1 is what their mean achieves."""
        return nn.functional.mse_loss(fitting(answers, targets), targets)

    @property
    def acts(self) -> Vectors:
        """How the group moves inputs: `Moves(task.acts, task.source.group)`."""
        return Vectors(self.source)

    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        """MSE, relative MSE and equivariance error; the first also on moved inputs, against moved targets (aMSE).

            MSE    = mean |F(x) - y|^2                       normalised targets, mean over coordinates
            relMSE = sum |F(x) - y|^2 / sum |y|^2            targets in their own units
            eErr   = mean |F(g x) - g F(x)|_2                normalised answers

        The paper gives a relative MSE without its denominator; sum |y|^2 is our reading. aMSE presumes that the truth
        moves with its input, which the paper's gamma breaks.
        """
        after, seen, coordinates = moves.on(Vectors(self.target)), 0, 0
        wrong = moved_wrong = size = change = 0.0
        with evaluating(model):
            for inputs, targets in examples.batches(batch):
                x = at_home(model, inputs)
                y, chosen = targets.to(x), moves.cycle(seen, len(x))
                answers, turned = asked(model, x), asked(model, moves(x, chosen))
                wrong += squares(fitting(answers, y) - y)
                moved_wrong += squares(turned - after(y, chosen))
                size += squares(y.double() * self.scale + self.shift)
                change += float((turned - after(answers, chosen)).double().flatten(1).norm(dim=1).sum())
                seen, coordinates = seen + len(x), coordinates + y.numel()
        return {
            "MSE": wrong / coordinates,
            "aMSE": moved_wrong / coordinates,
            "relMSE": wrong * self.scale**2 / size if size else 0.0,
            "eErr": change / seen,
        }


def fitting(answers: Tensor, targets: Tensor) -> Tensor:
    """The answers, if they have the targets' shape; anything else would be spread out over them."""
    if answers.shape != targets.shape:
        raise SoftEquivError(f"answers of shape {tuple(answers.shape)} do not fit targets of {tuple(targets.shape)}")
    return answers


def squares(x: Tensor) -> float:
    """The sum of all squares, in double precision."""
    return float(x.double().square().sum())


def synthetic_o5(
    gamma: float = 0.0,
    *,
    train: int = 1000,
    validation: int = 1000,
    test: int = 5000,
    seed: int = 0,
    epsilon: float = EPSILON,
) -> Regression:
    """x1, x2 ~ N(0, I) in five dimensions, and a number that O(5) leaves alone where gamma is 0:

        sin|x1| - |x2|^3 / 2 + x1.x2 / (|x1| |x2|)
            + gamma (|x1^1| + |x1^2| + |x2^1| + |x2^2|) / (|x1^3| + |x1^4| + |x2^3| + |x2^4| + epsilon),

    upper indices for coordinates. Inputs are (N, 10), x1 first.

    >>> task = synthetic_o5(0.3, train=100)
    >>> task.train.batch(torch.arange(4))[0].shape, task.target.dim
    (torch.Size([4, 10]), 1)
    """
    gamma, epsilon = (checked_number(*told, SoftEquivError) for told in ((gamma, "gamma"), (epsilon, "epsilon")))
    if not (math.isfinite(gamma) and epsilon > 0):
        raise SoftEquivError(f"gamma is a number and epsilon a positive one; got gamma={gamma}, epsilon={epsilon}")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 10, dtype=torch.float64, generator=generator)
        return x, o5_target(x, gamma, epsilon)

    group = O(5)
    return drawn(sample, 2 * vector(group), scalar(group), train, validation, test, seed)


def o5_target(x: Tensor, gamma: float, epsilon: float = EPSILON) -> Tensor:
    """The function of `synthetic_o5`, (N, 10) to (N, 1)."""
    a, b = x[:, :5], x[:, 5:]
    first, second = a.square().sum(1, keepdim=True).sqrt(), b.square().sum(1, keepdim=True).sqrt()
    sizes = a.abs() + b.abs()
    broken = sizes[:, 0:2].sum(1, keepdim=True) / (sizes[:, 2:4].sum(1, keepdim=True) + epsilon)
    return first.sin() - second.pow(3) / 2 + (a * b).sum(1, keepdim=True) / (first * second) + gamma * broken


def inertia(*, train: int = 1000, validation: int = 1000, test: int = 5000, seed: int = 0) -> Regression:
    """The moment of inertia of five bodies about the origin, sum_i m_i (|r_i|^2 I - r_i r_i^T), under SO(3).

    Masses log(1 + e^z) and places are made of standard normal numbers; inputs are five masses, then five places,
    (N, 20), targets (N, 3, 3).

    >>> inertia(train=10).train.batch(torch.arange(4))[1].shape
    torch.Size([4, 3, 3])
    """
    group = SO(3)

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 4 * BODIES, dtype=torch.float64, generator=generator)
        x[:, :BODIES] = nn.functional.softplus(x[:, :BODIES])
        return x, inertia_target(x)

    source = BODIES * scalar(group) + BODIES * vector(group)
    return drawn(sample, source, tensor(group, 2), train, validation, test, seed)


def inertia_target(x: Tensor) -> Tensor:
    """The function of `inertia`, (N, 20) to (N, 3, 3)."""
    masses, places = x[:, :BODIES], x[:, BODIES:].reshape(-1, BODIES, 3)
    outer = torch.einsum("nb,nbi,nbj->nij", masses, places, places)
    traces = torch.einsum("nii->n", outer)
    return traces[:, None, None] * torch.eye(3, dtype=x.dtype, device=x.device) - outer


def matrix_element(*, train: int = 1000, validation: int = 1000, test: int = 5000, seed: int = 0) -> Regression:
    """The square of the matrix element of electron-muon scattering from four momenta, under the Lorentz group SO(1,3):

        4 (p1^m p3^n - (p1.p3 - p1.p1) eta^mn) (p2_m p4_n - (p2.p4 - p2.p2) eta_mn),

    momenta from N(0, 1/16), that is not on their mass shells; inputs (N, 16).

    >>> matrix_element(train=10).train.batch(torch.arange(4))[0].shape
    torch.Size([4, 16])
    """
    group = Lorentz()

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 16, dtype=torch.float64, generator=generator) / 4
        return x, matrix_element_target(x)

    return drawn(sample, 4 * vector(group), scalar(group), train, validation, test, seed)


def matrix_element_target(x: Tensor) -> Tensor:
    """The function of `matrix_element`, (N, 16) to (N, 1)."""
    p = x.reshape(-1, 4, 4)
    eta = torch.diag(torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=x.dtype, device=x.device))
    low = p @ eta
    dot = torch.einsum("nai,nbi->nab", p, low)
    first = torch.einsum("ni,nj->nij", p[:, 0], p[:, 2]) - (dot[:, 0, 2] - dot[:, 0, 0])[:, None, None] * eta
    second = torch.einsum("ni,nj->nij", low[:, 1], low[:, 3]) - (dot[:, 1, 3] - dot[:, 1, 1])[:, None, None] * eta
    return 4 * (first * second).sum((1, 2))[:, None]


def drawn(sample: Sample, source: Rep, target: Rep, train: int, validation: int, test: int, seed: int) -> Regression:
    """A task of so many drawn examples, in float32; which test examples are drawn does not depend on how many train."""
    for count, part in ((train, "to train"), (validation, "to validate"), (test, "to test")):
        check_count(f"the number of examples {part}", count)
    check_split_seed(seed)
    splits = [
        sample(count, torch.Generator().manual_seed(3 * seed + place))
        for place, count in enumerate((train, validation, test))
    ]
    y = splits[0][1]
    shift = float(y.mean()) if target == scalar(target.group) else 0.0
    scale = float((y - shift).square().mean().sqrt()) or 1.0
    first, second, third = (Held(x.float(), ((own - shift) / scale).float()) for x, own in splits)
    return Regression(first, second, third, source, target, scale, shift)
