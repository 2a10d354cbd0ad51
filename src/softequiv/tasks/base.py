"""What does a problem consist of? Examples to learn from and to be asked about, a loss, and figures of merit.

A task knows neither groups of its own nor how models are trained: both are told it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.errors import SoftEquivError

Prepare = Callable[[Tensor], Tensor]
Problem = TypeVar("Problem", bound="Task")


def unchanged(inputs: Tensor) -> Tensor:
    """Inputs that are ready as they are."""
    return inputs


class Examples(ABC):
    """Inputs and targets by number, in a fixed order; who shuffles is the loop."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ready for the model and their targets, on the examples' device."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Examples:
        """The same examples, whose batches are on that device."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A SHA-256 of what the examples are, to tell two data sets apart."""

    @abstractmethod
    def part(self, numbers: Tensor) -> Examples:
        """The examples of these numbers, for a split or a few labels."""

    @abstractmethod
    def labels(self) -> Tensor:
        """The label of every example, (N,) int64 on the CPU; refused where targets are no labels."""

    def in_epoch(self, epoch: int) -> Examples:
        """The examples of one pass over them: others than before only where something is drawn as they are read."""
        return self

    def held(self) -> Examples:
        """The same examples in memory; themselves where they are."""
        return self

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in their order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.batch(torch.arange(start, min(start + size, len(self))))


@dataclass(frozen=True)
class Held(Examples):
    """Examples held in memory, or on the device: (N, ...) each. Pictures are kept as bytes and prepared per batch.

    >>> digits = Held(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.arange(5), lambda x: x / 255)
    >>> [len(labels) for _, labels in digits.batches(2)]
    [2, 2, 1]
    """

    inputs: Tensor
    targets: Tensor
    prepare: Prepare = field(default=unchanged, compare=False)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise SoftEquivError(f"{len(self.inputs)} inputs and {len(self.targets)} targets; give each input its own")
        if not len(self.inputs):
            raise SoftEquivError("there are no examples; check the folder or the split they come from")

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        numbers = numbers.to(self.inputs.device)
        return self.prepare(self.inputs[numbers]), self.targets[numbers]

    def to(self, device: torch.device | str) -> Held:
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    @property
    def fingerprint(self) -> str:
        parts = (self.inputs, self.targets)
        return hashlib.sha256(b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)).hexdigest()

    def part(self, numbers: Tensor) -> Held:
        numbers = numbers.to(self.inputs.device)
        return replace(self, inputs=self.inputs[numbers], targets=self.targets[numbers])

    def labels(self) -> Tensor:
        if self.targets.ndim != 1 or self.targets.is_floating_point():
            raise SoftEquivError(
                f"targets of shape {tuple(self.targets.shape)} and {self.targets.dtype} are no labels; only examples "
                "with one label each can be balanced by class"
            )
        return self.targets.cpu().long()


@dataclass(frozen=True)
class Task(ABC):
    """A problem: examples, loss, and figures. `score` is the figure that chooses the best model; `sign` -1: less is
    better."""

    train: Examples
    validation: Examples
    test: Examples

    score: ClassVar[str]
    sign: ClassVar[int] = 1

    @abstractmethod
    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, from the model's tensor of answers."""

    @abstractmethod
    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        """The paper's figures of merit on these examples, sample i also moved by element i of `moves`, cyclically."""

    def mapped(self: Problem, change: Callable[[Examples], Examples]) -> Problem:
        """The same problem with each part of its examples changed."""
        return replace(self, train=change(self.train), validation=change(self.validation), test=change(self.test))

    def held(self: Problem) -> Problem:
        """The same problem with its examples in memory."""
        return self.mapped(lambda examples: examples.held())

    def to(self: Problem, device: torch.device | str) -> Problem:
        """The same problem with its examples on a device."""
        return self.mapped(lambda examples: examples.to(device))
