"""What can go wrong, as sentences: every error of the library derives from `SoftEquivError` and names the value, the
reason and the remedy.
"""

from __future__ import annotations

import importlib
import math
from typing import Any


class SoftEquivError(ValueError):
    """Base of all errors raised for bad input."""


class GroupError(SoftEquivError):
    """A group, an element or a range that does not exist."""


class RepresentationError(SoftEquivError):
    """Representations that do not fit together, or a space on which the group does not act."""


class NotARepresentationError(RepresentationError):
    """Matrices that break a bracket or a relation of their group; the message says which."""


class GainError(SoftEquivError):
    """A cut-off, softness or error target outside its range."""


class WeightError(SoftEquivError):
    """A weight of the wrong shape, with non-finite entries, or of a type that cannot be filtered."""


class TooLargeError(SoftEquivError):
    """A problem too large for the only route that is left."""


class MissingDataError(SoftEquivError):
    """Data of an experiment that are not where they are looked for."""


class PerformanceWarning(UserWarning):
    """A correct but slow route was taken; the message states the size."""


def checked_number(value: Any, what: str, kind: type[SoftEquivError]) -> Any:
    """A real number, those of numpy and torch as Python's own, so that it can be compared and written down.

    >>> checked_number(0.5, "softness", GainError)
    0.5
    """
    try:
        number = float("" if isinstance(value, (str, bytes, bool)) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise kind(f"{what} is a number; got {str(value)[:60]!r}, a {type(value).__name__}") from None
    return value if isinstance(value, (int, float)) else number


def check_seed(seed: Any) -> None:
    """Raise a sentence unless it is a seed, from which the same can be drawn again.

    >>> check_seed(0)
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise SoftEquivError(
            f"a seed is a whole number of at least -2^63 and below 2^63; got {seed!r}: take a small one"
        )


def checked_amount(value: Any, what: str, *, positive: bool = False, remedy: str = "") -> Any:
    """A finite number of at least 0, or above 0 where it must be positive; those of numpy and torch as Python's own.

    >>> checked_amount(0.5, "the strength of a penalty")
    0.5
    """
    number = checked_number(value, what, SoftEquivError)
    if not 0 <= number < math.inf or (positive and number == 0):
        least = "above 0" if positive else "of at least 0"
        raise SoftEquivError(f"{what} is a finite number {least}; got {number!r}{remedy}")
    return number


def imported(module: str, needs: str, extra: str) -> Any:
    """A library of an extra, or a sentence: what needs it, and how to install it.

    >>> imported("tarot", "fortune telling needs cards", "cards")
    Traceback (most recent call last):
        ...
    softequiv.errors.SoftEquivError: fortune telling needs cards: pip install 'softequiv[cards]'
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SoftEquivError(f"{needs}: pip install 'softequiv[{extra}]'") from None


def check_count(what: str, value: Any, least: int = 1) -> None:
    """Raise a sentence unless the value is a whole number and not below the least.

    >>> check_count("channels", 8)
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SoftEquivError(f"{what} is a whole number of at least {least}; got {value!r}")
