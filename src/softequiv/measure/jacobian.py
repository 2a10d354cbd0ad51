"""How much does an answer move with its input? The Frobenius norm of the Jacobian, per sample of a batch.

Exact where the outputs are few, one backward pass for each; by random probes where they are many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError

EXACT_OUTPUTS = 64  # up to here one backward pass per output costs no more than good probes would
PROBES = 32
AT_ONCE = 8  # backward passes that share one sweep; each holds its own gradients of all features
MOST_ENTRIES = 2**22  # of answers times passes in one sweep


def jacobian_square(
    fn: Callable[[Tensor], Tensor], x: Tensor, *, probes: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """||J_F(x_n)||_F^2 for every sample: x (N, ...) -> (N,), where the samples do not influence each other.

    Exactly sum_k ||J^T e_k||^2 over the outputs, or with `probes` = m the mean of ||J^T v||^2 over m random sign
    vectors v (Hutchinson): unbiased, with variance 2 (||J J^T||_F^2 - sum_k (J J^T)_kk^2) / m.

    >>> jacobian_square(lambda x: 3 * x, torch.ones(2, 4))
    tensor([36., 36.])
    """
    if probes is not None and probes < 1:
        raise SoftEquivError(f"the Jacobian needs at least one probe; got probes={probes}")
    if not x.is_floating_point():
        raise SoftEquivError(f"a Jacobian is taken with respect to floating-point inputs; got {x.dtype}")
    with torch.inference_mode(False), torch.enable_grad():
        point = x.detach().clone().requires_grad_()
        y = fn(point)
    if y.shape[:1] != x.shape[:1]:
        raise SoftEquivError(f"{len(x)} samples gave an answer of shape {tuple(y.shape)}; one row a sample is needed")
    if y.grad_fn is None:
        raise SoftEquivError("the answer has no derivative with respect to the input; is it computed under no_grad?")
    outputs = y[:1].numel()
    at_once = max(1, min(AT_ONCE, MOST_ENTRIES // max(1, y.numel())))
    total = torch.zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for places in torch.arange(outputs if probes is None else probes, device=y.device).split(at_once):
        if probes is None:
            rows = torch.nn.functional.one_hot(places, outputs).to(y.dtype)[:, None].expand(-1, len(x), -1)
        else:
            signs = torch.randint(2, (len(places), len(x), outputs), generator=generator, dtype=torch.int8)
            rows = (2 * signs - 1).to(y.device, y.dtype)
        pulled = pulled_back(y, point, rows.reshape(len(places), *y.shape))
        total += pulled.reshape(len(places), len(x), -1).to(total.dtype).square().sum((0, 2))
    return total if probes is None else total / probes


def pulled_back(y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """J^T v for each of the rows v: (m, *y.shape) -> (m, *x.shape), one by one where y cannot be swept at once."""
    try:
        return torch.autograd.grad(y, x, rows, retain_graph=True, is_grads_batched=True)[0]
    except RuntimeError:  # an autograd function without vmap
        pass
    try:
        return torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in rows])
    except RuntimeError as problem:
        raise SoftEquivError(f"the model's derivative cannot be taken ({str(problem).splitlines()[0]})") from problem


def jacobian_norm(
    fn: Callable[[Tensor], Tensor], x: Tensor, *, probes: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """||J_F(x_n)||_F for every sample, the root of `jacobian_square`: x (N, ...) -> (N,).

    >>> jacobian_norm(lambda x: 3 * x, torch.ones(2, 4))
    tensor([6., 6.])
    """
    return jacobian_square(fn, x, probes=probes, generator=generator).sqrt()


def probes_for(outputs: int, probes: int = PROBES) -> int | None:
    """None, which is exact, where the outputs are few enough; else the number of probes."""
    return None if outputs <= max(EXACT_OUTPUTS, probes) else probes
