"""One bounded, thread-safe memory of what was computed for equal arguments, so that a spectrum is built once per
representation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

CAPACITY_BYTES = 1 << 30  # a 64 x 64 grid's basis takes 134 MB; a ViT needs a few MB


def on_the_cpu() -> AbstractContextManager[Any]:
    """A context in which new tensors are on the CPU. Where they are so anyway it is empty: torch's own asks about every
    operation, which takes as long as a small spectrum.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


class Cache:
    """Least-recently-used results, bounded by the bytes of the tensors inside them."""

    def __init__(self, capacity: int = CAPACITY_BYTES) -> None:
        self.capacity = capacity
        self.used = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self.used = 0

    def get(self, key: Hashable, compute: Callable[[], R]) -> R:
        """The remembered result for `key`, or a new one."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                result: R = self._entries[key][0]
                return result
        # outside the lock: two threads may compute the same value, none waits for another's; and the same whatever the
        # caller is doing, since others will be given it
        with torch.inference_mode(False), torch.no_grad(), on_the_cpu():
            result = compute()
        with self._lock:
            if key not in self._entries:
                size = nbytes(result)
                self._entries[key] = (result, size)
                self.used += size
                while self.used > self.capacity and len(self._entries) > 1:
                    _, (_, dropped) = self._entries.popitem(last=False)
                    self.used -= dropped
            stored: R = self._entries[key][0]
            return stored


def nbytes(value: object) -> int:
    """Bytes of all tensors reachable through tuples and dataclasses."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(nbytes(item) for item in value)
    if is_dataclass(value):
        return sum(nbytes(getattr(value, field.name)) for field in fields(value))
    return 0


cache = Cache()


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Remember a pure function of hashable arguments in the one shared cache."""

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        return cache.get((function, args, tuple(sorted(kwargs.items()))), lambda: function(*args, **kwargs))

    return remembered
