"""Angles as people write them: a float in radians that knows that it is an angle, so that a group may turn it into a
path length.
"""

from __future__ import annotations

import math
import re

from softequiv.errors import GroupError, checked_number


class Angle(float):
    """An angle in radians."""

    def __repr__(self) -> str:
        return f"{math.degrees(self):g}deg"

    __str__ = __repr__


def degrees(value: float) -> Angle:
    """An angle given in degrees.

    >>> degrees(30)
    30deg
    """
    return Angle(math.radians(checked_number(value, "an angle in degrees", GroupError)))


def radians(value: float) -> Angle:
    """An angle given in radians.

    >>> radians(math.pi)
    180deg
    """
    return Angle(checked_number(value, "an angle in radians", GroupError))


def parse_range(text: str) -> float:
    """Read "30deg", "0.5rad" or a plain path length such as "2".

    >>> parse_range("30deg"), parse_range("2")
    (30deg, 2.0)
    """
    match = re.fullmatch(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(deg|°|rad|)\s*", text)
    if not match:
        raise GroupError(
            f"cannot read the range {text!r}; write an angle such as '30deg' or '0.5rad', or a path length such as '2'"
        )
    value, unit = float(match[1]), match[2]
    return degrees(value) if unit in ("deg", "°") else radians(value) if unit == "rad" else value


def range_of(within: float | str | None) -> float | None:
    """A range, also as people write it, such as "30deg".

    >>> range_of("30deg"), range_of(2.0)
    (30deg, 2.0)
    """
    return parse_range(within) if isinstance(within, str) else within
