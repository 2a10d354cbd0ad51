"""scikit-learn's digits, and how well a model reads those that it was not shown, after a short training."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.training.loop import Objective, Transform, plain

ABOVE_CHANCE = 0.85  # of ten digits; chance is 0.1
SHOWN = 1200  # of 1797
BATCH = 48

Pictures = tuple[Tensor, Tensor]


@cache
def digits() -> Pictures:
    """Pictures (1797, 1, 8, 8) of values from 0 to 1, and labels."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


@cache
def roomy_digits() -> Pictures:
    """The same in 16 x 16 pixels, with room to turn."""
    pictures, labels = digits()
    return functional.pad(functional.interpolate(pictures, (12, 12), mode="bilinear"), (2,) * 4), labels


def trained(
    model: nn.Module,
    data: Pictures,
    epochs: int,
    rate: float,
    objective: Objective = plain,
    transform: Transform | None = None,
) -> nn.Module:
    """Learn from the digits that are shown, and be ready for questions."""
    torch.manual_seed(1)  # of dropout
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    order, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    model.train()
    with torch.enable_grad():
        for _ in range(epochs):
            for chosen in torch.randperm(SHOWN, generator=order).split(BATCH):
                x, y = (part[chosen] for part in data)
                if transform is not None:
                    x, y = transform(x, y, generator)
                optimiser.zero_grad()
                objective(model, x, y, functional.cross_entropy, generator).backward()
                optimiser.step()
    return model.eval()


def unseen(data: Pictures) -> Pictures:
    """The digits that were not shown."""
    return data[0][SHOWN:], data[1][SHOWN:]


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor) -> float:
    """The share of pictures that a model reads rightly."""
    return float((model(pictures).argmax(1) == labels).float().mean())


def accuracy_on_digits(model: nn.Module, epochs: int = 6, rate: float = 1e-2) -> float:
    """The share of unseen digits that a model reads rightly after so many epochs."""
    return accuracy(trained(model, digits(), epochs, rate), *unseen(digits()))
