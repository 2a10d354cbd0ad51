"""Groups as people write them: "SO(2)", "C18", "D4", "O(5)", "SO(3)xS4"."""

from __future__ import annotations

import re
from collections.abc import Callable

from softequiv.errors import GroupError
from softequiv.groups.base import Group
from softequiv.groups.permutations import S, Shifts
from softequiv.groups.plane import C, D, Reflection
from softequiv.groups.products import product
from softequiv.groups.rotations import SO, O
from softequiv.groups.scaling import Scaling
from softequiv.groups.spacetime import Lorentz
from softequiv.groups.spin import SU2

LONGEST = 250  # characters of a name, so that every number in it fits into a float

# one line a group: how it is written, and what it is
FORMS: list[tuple[str, Callable[..., Group]]] = [
    (r"SO\((\d+)\)", lambda n: SO(int(n))),
    (r"O\((\d+)\)", lambda n: O(int(n))),
    (r"C(\d+)|C\((\d+)\)", lambda n: C(int(n))),
    (r"D(\d+)|D\((\d+)\)", lambda n: D(int(n))),
    (r"S(\d+)|S\((\d+)\)", lambda n: S(int(n))),
    (r"SU\(2\)", SU2),
    (r"(SO\+|SO|O)\(1,3\)", lambda kind: Lorentz(kind)),
    (r"Shifts\((\d+(?:,\d+)*)\)", lambda sizes: Shifts(*map(int, sizes.split(",")))),
    (r"Reflection", Reflection),
    (r"Scaling", Scaling),
]


def parse_group(text: str) -> Group:
    """The group that a name stands for; `parse_group(group.name) == group`.

    >>> parse_group("SO(3)xS4").name
    'SO(3)xS4'
    """
    if not isinstance(text, str):
        raise GroupError(f"the name of a group is a text, such as 'SO(2)' or 'C18'; got {text!r}")
    if len(text) > LONGEST:
        raise GroupError(
            f"no group has a name of {len(text)} characters, {text[:20]!r}...; write SO(2), C18 or their like"
        )
    factors = re.split(r"[x×*]", text.replace(" ", ""))
    return product(*(_parse_factor(factor, text) for factor in factors))


def as_group(group: Group | str) -> Group:
    """A group, also from its name."""
    if isinstance(group, str):
        return parse_group(group)
    if not isinstance(group, Group):
        raise GroupError(f"group must be a group or its name, such as SO(2) or 'C18'; got {group!r}")
    return group


def _parse_factor(factor: str, text: str) -> Group:
    for pattern, make in FORMS:
        match = re.fullmatch(pattern, factor, re.ASCII)
        if match:
            return make(*(group for group in match.groups() if group))
    raise GroupError(
        f"unknown group {factor!r} in {text!r}; write SO(n), O(n), Cn, Dn, Sn, SU(2), SO(1,3), SO+(1,3), O(1,3), "
        "Shifts(h,w), Reflection, Scaling, or a product such as 'SO(3)xS4'"
    )
