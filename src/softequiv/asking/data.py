"""In which forms does data come? A tensor, inputs with labels, a dict, or a loader of those: all read as one stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError

FORMS = (
    "give a tensor (N, C, H, W), a pair (inputs, labels), a dict with pixel_values and labels, "
    "or a DataLoader of such batches"
)


@dataclass(frozen=True)
class Batch:
    """Inputs (N, ...), and labels (N,) or (N, h, w) where they are known."""

    inputs: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.inputs.is_floating_point():
            raise SoftEquivError(
                f"inputs must be floating point, scaled as the model expects them; got {self.inputs.dtype}: "
                "convert and normalise them first"
            )
        if self.inputs.ndim < 2:
            raise SoftEquivError(f"a batch has a row for each sample; got inputs of shape {tuple(self.inputs.shape)}")
        if self.labels is not None:
            if self.labels.is_floating_point() or self.labels.is_complex():
                raise SoftEquivError(
                    f"labels must be whole numbers, one class each; got {self.labels.dtype}: take the argmax of "
                    "one-hot labels, and leave out targets that are no classes"
                )
            if self.labels.shape[:1] != self.inputs.shape[:1]:
                raise SoftEquivError(
                    f"{len(self.inputs)} inputs came with labels of shape {tuple(self.labels.shape)}; "
                    "every sample needs its own"
                )

    def split(self, size: int) -> Iterator[Batch]:
        """The same samples, `size` at a time."""
        for start in range(0, len(self.inputs), size):
            labels = None if self.labels is None else self.labels[start : start + size]
            yield Batch(self.inputs[start : start + size], labels)


def as_batch(item: Any) -> Batch | None:
    """One batch, or None where the item is none."""
    if isinstance(item, Tensor):
        return Batch(item)
    if isinstance(item, Mapping):
        inputs, labels = item.get("pixel_values"), item.get("labels")
        if not isinstance(inputs, Tensor) or not (labels is None or isinstance(labels, Tensor)):
            raise SoftEquivError(
                f"a dict batch needs the tensor pixel_values, and may have the tensor labels; it has "
                f"{', '.join(map(str, item)) or 'nothing'}"
            )
        return Batch(inputs, labels)
    if isinstance(item, (tuple, list)) and len(item) in (1, 2) and all(isinstance(part, Tensor) for part in item):
        return Batch(*item)
    return None


def as_whole(data: Any) -> Batch | None:
    """All data as one batch; None for a loader, such as a list of floating tensors. A tuple is no loader."""
    if isinstance(data, list) and len(data) > 1 and all(torch.is_tensor(x) and x.is_floating_point() for x in data):
        return None
    whole = as_batch(data)
    if whole is None and isinstance(data, tuple):
        raise unreadable(data)
    return whole


def unreadable(item: Any) -> SoftEquivError:
    """What to say of an item that is no batch."""
    parts = item if isinstance(item, (tuple, list)) else [item]
    found = ", ".join(type(part).__name__ for part in parts)
    return SoftEquivError(f"cannot read a batch of {found or 'nothing'}: {FORMS}")


def check_samples(x: Tensor) -> None:
    """Raise a sentence unless x is a batch of samples."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not len(x):
        got = f"a tensor of {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SoftEquivError(f"x must be one tensor (N, ...) of at least one sample; got {got}")


def batches(data: Any, size: int) -> Iterator[Batch]:
    """The data as batches: a whole tensor `size` samples at a time, a loader's batches as they come, none kept.

    >>> import torch
    >>> [len(batch.inputs) for batch in batches(torch.ones(5, 3, 8, 8), 2)]
    [2, 2, 1]
    """
    whole = as_whole(data)
    if whole is not None:
        yield from whole.split(size)
        return
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise SoftEquivError(f"cannot read data of type {type(data).__name__}: {FORMS}")
    for item in data:
        batch = as_batch(item)
        if batch is None:
            raise unreadable(item)
        if len(batch.inputs):
            yield batch


def count(data: Any, size: int) -> int | None:
    """How many batches there will be, where that is known."""
    whole = as_whole(data)
    if whole is not None:
        return -(-len(whole.inputs) // size)
    try:
        return len(data)
    except TypeError:
        return None


def inputs_of(data: Any, size: int) -> Iterator[Tensor]:
    """The inputs alone, in batches; their labels may be anything, such as forecasts.

    >>> import torch
    >>> [len(inputs) for inputs in inputs_of((torch.ones(3, 2), torch.ones(3)), 2)]
    [2, 1]
    """
    if isinstance(data, (Tensor, tuple, Mapping)) or (isinstance(data, list) and as_whole(data) is not None):
        data = unlabelled(data)
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        data = map(unlabelled, data)
    yield from (batch.inputs for batch in batches(data, size))


def unlabelled(item: Any) -> Any:
    """A batch without its labels; what is no batch as it is."""
    if isinstance(item, Mapping):
        return {key: value for key, value in item.items() if key != "labels"}
    return item[0] if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], Tensor) else item
