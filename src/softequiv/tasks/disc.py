"""How is a model judged without what turning loses at the corners? On pictures that are empty outside a disc."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from softequiv.actions import in_disc
from softequiv.measure.functional import IGNORE_INDEX
from softequiv.tasks.base import Examples


@dataclass(frozen=True)
class InDisc(Examples):
    """The same examples with `fill` outside the inscribed disc, where masks belong to no class.

    >>> from softequiv.tasks.base import Held
    >>> InDisc(Held(torch.ones(1, 1, 4, 4), torch.tensor([7]))).batch(torch.tensor([0]))[0][0, 0, 0]
    tensor([0., 1., 1., 0.])
    """

    whole: Examples
    fill: float = 0.0

    def __len__(self) -> int:
        return len(self.whole)

    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.whole.batch(numbers)
        return in_disc(inputs, self.fill), in_disc(targets, IGNORE_INDEX) if targets.ndim == 3 else targets

    def to(self, device: torch.device | str) -> InDisc:
        return replace(self, whole=self.whole.to(device))

    def part(self, numbers: Tensor) -> InDisc:
        return replace(self, whole=self.whole.part(numbers))

    def labels(self) -> Tensor:
        return self.whole.labels()

    def in_epoch(self, epoch: int) -> InDisc:
        return replace(self, whole=self.whole.in_epoch(epoch))

    def held(self) -> InDisc:
        return replace(self, whole=self.whole.held())

    @property
    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint} in a disc on {self.fill:g}"
