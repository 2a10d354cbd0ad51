"""Is it a torch module? A sentence says so where it is not, as a function easily stands in for one."""

from __future__ import annotations

from torch import nn

from softequiv.errors import SoftEquivError


def check_module(value: object, rule: str = "model must be a torch module") -> None:
    """Raise a sentence unless it is one.

    >>> check_module(nn.Identity())
    """
    if not isinstance(value, nn.Module):
        raise SoftEquivError(f"{rule}; got {type(value).__name__}: wrap a function in one")
