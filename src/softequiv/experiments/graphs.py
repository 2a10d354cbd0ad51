"""What if a GPU were told of a whole forward or backward pass at once? Training by CUDA graphs.

A step of a small network is hundreds to thousands of kernels that take longer to launch than to run.
"""

from __future__ import annotations

import gc
import itertools
import warnings

import torch
from torch import Tensor, nn


def recorded(model: nn.Module, example: Tensor, calls: int = 1) -> None:
    """Let the forward and backward passes of training be CUDA graphs, one for each of the `calls` of a step, all with
    batches like the example; evaluation is as before, and so is training where there is no GPU.
    """
    if not torch.cuda.is_available():
        return
    gc.collect()  # graphs of an earlier model stand in cycles, and hold their memory until these are found
    torch.cuda.empty_cache()
    model.cuda().train()
    passes = tuple(_Pass(model) for _ in range(calls))
    try:
        torch.cuda.make_graphed_callables(passes, ((example.cuda(),),) * calls)
    except RuntimeError as refused:
        warnings.warn(f"no CUDA graph of {type(model).__name__}, trained kernel by kernel: {refused}", stacklevel=2)
        return
    turns, plain = itertools.cycle(passes), model.forward
    model.forward = lambda x: next(turns)(x) if model.training else plain(x)


class _Pass(nn.Module):
    """One call of a model, which may be recorded beside others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        answers: Tensor = type(self.model).forward(self.model, x)
        return answers
