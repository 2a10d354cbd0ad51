"""Synthetic regression: targets by hand, what the group leaves alone, figures, and that they can be learned."""

import math

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.actions import Moves, Vectors
from softequiv.baselines.emlp import EMLP, EMLPRPP, MLP
from softequiv.errors import SoftEquivError
from softequiv.tasks.regression import (
    EPSILON,
    Regression,
    inertia,
    inertia_target,
    matrix_element,
    matrix_element_target,
    o5_target,
    synthetic_o5,
)
from softequiv.testing import assert_equivariant, equivariance_error


def own_units(task: Regression, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = task.train.batch(numbers)
    return x.double(), y.double() * task.scale + task.shift


def test_the_o5_target_is_the_formula():
    x, y = own_units(synthetic_o5(0.4, train=20), torch.arange(20))
    for row, found in zip(x.tolist(), y[:, 0].tolist(), strict=True):
        a, b = row[:5], row[5:]
        first, second = math.hypot(*a), math.hypot(*b)
        wanted = math.sin(first) - second**3 / 2 + sum(map(math.prod, zip(a, b, strict=True))) / (first * second)
        wanted += (
            0.4
            * (abs(a[0]) + abs(a[1]) + abs(b[0]) + abs(b[1]))
            / (abs(a[2]) + abs(a[3]) + abs(b[2]) + abs(b[3]) + EPSILON)
        )
        assert found == pytest.approx(wanted, abs=1e-4)


def test_the_moment_of_inertia_is_the_formula():
    x, y = own_units(inertia(train=5), torch.arange(5))
    for row, found in zip(x, y, strict=True):
        wanted = torch.zeros(3, 3, dtype=torch.float64)
        for mass, place in zip(row[:5], row[5:].reshape(5, 3), strict=True):
            wanted += mass * (place @ place * torch.eye(3) - torch.outer(place, place))
        assert torch.allclose(found, wanted, atol=1e-4)
    assert bool((x[:, :5] > 0).all())


def test_the_matrix_element_is_the_formula():
    """Expanded into dot products: 4 (p1.p2 p3.p4 - b p1.p3 - a p2.p4 + 4 a b)."""
    x, y = own_units(matrix_element(train=20), torch.arange(20))
    p = x.reshape(-1, 4, 4)
    metric = torch.tensor([1.0, -1, -1, -1], dtype=torch.float64)
    dot = torch.einsum("nai,i,nbi->nab", p, metric, p)
    a, b = dot[:, 0, 2] - dot[:, 0, 0], dot[:, 1, 3] - dot[:, 1, 1]
    wanted = 4 * (dot[:, 0, 1] * dot[:, 2, 3] - b * dot[:, 0, 2] - a * dot[:, 1, 3] + 4 * a * b)
    assert torch.allclose(y[:, 0], wanted, atol=1e-4)


def test_the_truth_moves_as_its_type_says_and_gamma_breaks_it():
    o5 = synthetic_o5()
    assert_equivariant(lambda x: o5_target(x, 0.0), se.O(5), o5.source, o5.target)
    assert equivariance_error(lambda x: o5_target(x, 0.3), se.O(5), o5.source, o5.target) > 0.01
    turned = inertia()
    assert_equivariant(inertia_target, se.SO(3), turned.source, turned.target)
    element = matrix_element()
    assert_equivariant(matrix_element_target, se.Lorentz(), element.source, element.target, within=1.0)


@pytest.mark.parametrize("make", [synthetic_o5, inertia, matrix_element])
def test_targets_are_normalised_by_what_is_trained_on(make):
    task = make(train=400, validation=7, test=9)
    assert [len(part) for part in (task.train, task.validation, task.test)] == [400, 7, 9]
    y = task.train.batch(torch.arange(400))[1].double()
    assert float(y.square().mean()) == pytest.approx(1.0, abs=1e-5)
    assert task.shift == 0.0 or float(y.mean()) == pytest.approx(0.0, abs=1e-5)
    assert (task.shift == 0.0) == (task.target != se.scalar(task.source.group))


def test_draws_are_the_same_for_a_seed_and_the_test_set_for_any_training_set():
    numbers = torch.arange(50)
    small, large, other = (synthetic_o5(train=n, seed=s) for n, s in ((100, 0), (300, 0), (100, 1)))
    assert small.train.fingerprint == synthetic_o5(train=100).train.fingerprint != other.train.fingerprint
    assert torch.equal(small.test.batch(numbers)[0], large.test.batch(numbers)[0])
    assert not torch.equal(small.test.batch(numbers)[0], small.train.batch(numbers)[0])


class Exact(nn.Module):
    """The normalised truth, or a part of it."""

    def __init__(self, task: Regression, target, factor: float = 1.0) -> None:
        super().__init__()
        self.task, self.truth, self.factor = task, target, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (self.truth(x.double()) - self.task.shift).to(x.dtype) / self.task.scale


def test_the_figures_are_their_formulas():
    task = inertia(test=300)
    moves = Moves(task.acts, se.SO(3), count=50)
    perfect = task.figures(Exact(task, inertia_target), task.test, moves, batch=128)
    assert perfect["MSE"] < 1e-10 and perfect["aMSE"] < 1e-10 and perfect["relMSE"] < 1e-10
    assert perfect["eErr"] < 1e-5
    x, y = task.test.batch(torch.arange(300))
    half = task.figures(Exact(task, inertia_target, 0.5), task.test, moves, batch=128)
    assert half["relMSE"] == pytest.approx(0.25, abs=1e-5)
    assert half["MSE"] == pytest.approx(0.25 * float(y.square().mean()), rel=1e-4)

    class Biased(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.eye(3)[0].expand(len(x), 3, 3)

    found = task.figures(Biased(), task.test, moves, batch=128)
    answers = Biased()(x)
    turned = torch.stack([Vectors(task.target)(a, moves.elements[i % 50]) for i, a in enumerate(answers)])
    assert found["eErr"] == pytest.approx(float((answers - turned).flatten(1).norm(dim=1).mean()), rel=1e-4)
    assert task.score in found and task.sign == -1


def test_the_relative_error_is_in_the_targets_own_units():
    task = synthetic_o5(0.3, test=400)
    found = task.figures(Exact(task, lambda x: o5_target(x, 0.3) + 1), task.test, Moves(task.acts, se.O(5), count=10))
    x, _ = task.test.batch(torch.arange(400))
    truth = o5_target(x.double(), 0.3)
    assert found["relMSE"] == pytest.approx(400 / float(truth.square().sum()), rel=1e-3)
    assert found["aMSE"] > found["MSE"] and found["eErr"] > 0.01


@pytest.mark.parametrize("make", [EMLP, EMLPRPP, MLP])
def test_the_baselines_learn_it(make):
    torch.manual_seed(0)
    task = synthetic_o5(0.3, train=1000, test=1000)
    net = make(task.source, task.target, channels=60, layers=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        for numbers in torch.randperm(1000, generator=generator).split(100):
            x, y = task.train.batch(numbers)
            optimizer.zero_grad()
            task.loss(net(x), y).backward()
            optimizer.step()
    found = task.figures(net, task.test, Moves(task.acts, se.O(5), count=100))
    assert found["MSE"] < 0.35  # the mean has 1
    assert (found["eErr"] < 1e-5) == (make is EMLP)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: synthetic_o5(train=0), "examples to train is a whole number of at least 1; got 0"),
        (lambda: inertia(validation=2.5), "examples to validate is a whole number"),
        (lambda: matrix_element(test="many"), "examples to test is a whole number"),
        (lambda: inertia(seed=-1), "a seed is a whole number from 0"),
        (lambda: matrix_element(seed=1.5), "a seed is a whole number from 0"),
        (lambda: synthetic_o5("large"), "gamma is a number; got 'large'"),
        (lambda: synthetic_o5(epsilon=0.0), "epsilon"),
        (lambda: synthetic_o5(math.nan), "gamma"),
        (lambda: synthetic_o5(train=5).loss(torch.zeros(5), torch.zeros(5, 1)), "do not fit"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(SoftEquivError, match=words):
        call()
