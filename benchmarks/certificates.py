"""Do the certificates of whole networks say something, and do they hold? Three kinds, each of a network trained on
MNIST, and each tried on 1,000 fresh draws.

Needs MNIST where SOFTEQUIV_DATA (or ../shared/data) is. Prints Markdown tables and writes
docs/results/certificates.json: `python benchmarks/certificates.py`, some minutes on one core. It fails where a
certificate does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from softequiv.actions import Moves, Pictures
from softequiv.baselines.group_cnn import GroupConv2d, LiftingConv2d
from softequiv.certify.statistical import bounded, changes, proportion_upper
from softequiv.experiments.base import data_folder
from softequiv.holding import Mixture, total_variation
from softequiv.tasks.mnist import MEAN, STD, mnist

ROOT = Path(__file__).resolve().parents[1]
SHOWN, TRIALS = 12_000, 1_000
CHANCE = 1e-6  # of calling a certificate violated that is not, in one trial
Labelled = tuple[Tensor, Tensor]  # pictures (N, 1, n, n) of values from 0 to 1, and labels


def trained(model: nn.Module, data: Labelled, epochs: int, batch: int = 128, rate: float = 2e-3) -> nn.Module:
    """The model after some passes over the data, ready for questions."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(data[0]), generator=generator).split(batch):
            optimizer.zero_grad()
            functional.cross_entropy(model(data[0][some]), data[1][some]).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of pictures that a model reads rightly."""
    return float((model(x).argmax(1) == y).float().mean())


def convolutional() -> nn.Sequential:
    """Two layers of kernels, and a head that sees where everything is."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)),
    )


# statistical


@torch.no_grad()
def statistical(
    train: Labelled, test: Labelled, *, epochs: int = 2, samples: int = 500, angles: int = 31, confidence: float = 0.99
) -> dict[str, Any]:
    """How often, of 1,000 certificates from fresh draws, does a bound lie below the true expectation?

    The truth is known: the population are the test pictures under equally many angles, every pair of them asked. A
    certificate sees `samples` of these pairs, drawn independently.
    """
    torch.manual_seed(0)
    free = convolutional()
    free(train[0][:2])
    with torch.enable_grad():
        trained(free, train, epochs)
    x, y = test
    moves = Moves(Pictures(), se.SO(2), elements=[se.SO(2).element(t) for t in turns(angles, 30)])
    answers = free(x)
    every = [free(moves(x, torch.full((len(x),), number))) for number in range(angles)]
    columns = [changes(se.Still(), moved, answers, None) for moved in every]
    table = {name: torch.stack([column[name] for column in columns]) for name in columns[0]}  # (angles, pictures)
    generator = torch.Generator().manual_seed(1)
    truth = {name: float(values.clamp(max=10).mean()) for name, values in table.items()}
    delta = (1 - confidence) / len(table)
    bounds: dict[str, list[float]] = {name: [] for name in table}
    missed = 0
    for _ in range(TRIALS):
        pick = torch.randint(angles * len(x), (samples,), generator=generator)
        found = {name: bounded(name, values.flatten()[pick], delta, None).bound for name, values in table.items()}
        missed += any(found[name] < truth[name] for name in table)
        for name, bound in found.items():
            bounds[name].append(bound)
    once = se.certify(free, se.degrees(30), "SO(2)", data=x[:samples], confidence=confidence)
    return {
        "accuracy": accuracy(free, x, y),
        "samples": samples,
        "confidence": confidence,
        "trials": TRIALS,
        "missed": missed,
        "allowed": (1 - confidence) * TRIALS,
        "truth": truth,
        "bound, mean": {name: sum(values) / TRIALS for name, values in bounds.items()},
        "bound, one call": {figure.name: figure.bound for figure in once.figures},
    }


def turns(count: int, degrees: float) -> list[float]:
    """Angles in radians, evenly over the range."""
    return torch.linspace(-1, 1, count).mul(degrees * torch.pi / 180).tolist()


# smoothing


class Noise(nn.Module):
    """Gaussian noise in training."""

    def __init__(self, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma

    def forward(self, h: Tensor) -> Tensor:
        return h + self.sigma * torch.randn_like(h) if self.training else h


@torch.no_grad()
def smoothed(
    train: Labelled,
    test: Labelled,
    error: float,
    *,
    degrees: float = 10,
    sigma: float = 1.0,
    epochs: int = 6,
    votes: int = 1000,
    width: int = 64,
) -> dict[str, Any]:
    """For how many pictures can no turn change the class, and does it for any, of fresh turns and fresh noise?

    Each certified picture is moved by the one of eight random elements that moves its embedding most.
    """
    torch.manual_seed(0)
    side = train[0].shape[-1]
    layers = nn.Linear(side**2, width), Noise(sigma), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)
    net = nn.Sequential(nn.Flatten(), *layers)
    within = se.degrees(degrees)
    se.soften(net, "SO(2)", error=error, within=within, grids={"1": (1, side, side)})
    with torch.enable_grad():
        trained(net, train, epochs)
    x, y = (part[:TRIALS] for part in test)
    model = se.Smoothed(net, "1", sigma)
    found = se.certify_smoothed(model, x, within=within, votes=votes)
    generator, rep, flat = torch.Generator().manual_seed(2), se.grid(se.SO(2), side, side), x.flatten(1).double()
    drawn = [rep.rho(se.SO(2).random(generator, within)) for _ in range(8)]
    moved = torch.stack([(flat @ matrix.T).to(x).reshape(x.shape) for matrix in drawn])
    far = torch.stack([(net[:2](some) - net[:2](x)).norm(dim=1) for some in moved])
    worst = moved[far.argmax(0), torch.arange(len(x))]
    counts = model.counts(worst, votes, 99)
    below = changed = 0
    for i in found.holds.nonzero().flatten().tolist():
        count = int(counts[i, found.prediction[i]])
        below += proportion_upper(count, votes, CHANCE) < float(found.moved_share[i])
        changed += int(counts[i].argmax()) != int(found.prediction[i])
    right = found.prediction == y
    return {
        "error": error,
        "degrees": degrees,
        "sigma": sigma,
        "accuracy, votes": float(right.float().mean()),
        "certified": float(found.holds.float().mean()),
        "certified and right": float((found.holds & right).float().mean()),
        "residual, largest measured / certified": float((far.max(0).values / found.residual).max()),
        "trials": int(found.holds.sum()),
        "class changed": changed,
        "fewer votes than certified": below,
    }


# mixture


def invariant() -> nn.Sequential:
    """A group convolutional network that quarter turns do not change: (N, channels, turns, H, W) inside."""
    turning = se.C(4)
    return nn.Sequential(
        *(LiftingConv2d(turning, 1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool3d((1, 2, 2))),
        *(GroupConv2d(turning, 12, 16, 5, padding=2), nn.ReLU(), nn.MaxPool3d((1, 2, 2))),
        *(GroupConv2d(turning, 16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool3d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )


@torch.no_grad()
def mixed(train: Labelled, test: Labelled, shares: Iterable[float], *, epochs: int = 3) -> list[dict[str, Any]]:
    """How far do answers of a mixture move under quarter turns, and for how many pictures is their class certain?"""
    torch.manual_seed(0)
    strict = invariant()
    free = convolutional()
    free(train[0][:2])
    with torch.enable_grad():
        for part in (strict, free):
            trained(part, train, epochs)
    x, y = (part[:TRIALS] for part in test)
    quarters = Moves(Pictures(), se.C(4), elements=list(se.C(4).elements())[1:])
    turned = quarters(x, quarters.draw(len(x), torch.Generator().manual_seed(3)))
    out = []
    for eps in shares:
        mixture = Mixture(strict, free, eps).eval()
        answers, moved = mixture(x), mixture(turned)
        found = total_variation(answers, moved)
        top = answers.exp().topk(2, 1).values
        sure = top[:, 0] - top[:, 1] > 2 * mixture.bound()
        out.append(
            {
                "eps": eps,
                "accuracy": accuracy(mixture, x, y),
                "accuracy, turned": accuracy(mixture, turned, y),
                "bound": mixture.bound(),
                "largest": float(found.max()),
                "mean": float(found.mean()),
                "class certain": float(sure.float().mean()),
                "trials": len(x),
                "beyond the bound": int((found > mixture.bound() + 1e-5).sum()),
                "certain class changed": int((sure & (answers.argmax(1) != moved.argmax(1))).sum()),
            }
        )
    return out


def digits() -> tuple[Labelled, Labelled]:
    """Training and test pictures of MNIST."""
    task = mnist(data_folder("mnist"), pad=0)
    parts = (task.train.batch(torch.arange(SHOWN)), task.test.batch(torch.arange(2000)))
    train, test = ((x * STD + MEAN, y) for x, y in parts)
    return train, test


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    cells = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in ([*rows[0]], ["---"] * len(rows[0]), *cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "certificates.json")
    out: Path = parser.parse_args().out
    train, test = digits()
    on_average = statistical(train, test)
    print(json.dumps(on_average, indent=1))
    votes = [smoothed(train, test, error) for error in (0.01, 0.005, 0.002)]
    print(table(votes))
    shares = mixed(train, test, (0.0, 0.1, 0.3, 1.0))
    print(table(shares))
    out.write_text(json.dumps({"statistical": on_average, "smoothed": votes, "mixed": shares}, indent=1) + "\n")
    held = on_average["missed"] <= on_average["allowed"]
    held &= all(not row["fewer votes than certified"] for row in votes)
    held &= all(not row["beyond the bound"] and not row["certain class changed"] for row in shares)
    if not held:
        raise SystemExit("a certificate does not hold")


if __name__ == "__main__":
    main()
