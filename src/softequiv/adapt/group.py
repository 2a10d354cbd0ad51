"""For which group is a model asked about? The one that a user names, else the one that it was softened for."""

from __future__ import annotations

from torch import Tensor, nn

from softequiv.errors import GroupError
from softequiv.groups import Group
from softequiv.groups.parse import as_group
from softequiv.nn import soft_weights


def group_of(model: nn.Module) -> Group | None:
    """The group that a model was softened for; None for a plain one.

    >>> from softequiv.adapt import soften
    >>> print(group_of(soften(nn.Conv2d(1, 2, 3), "C4", softness=0.5)), group_of(nn.Conv2d(1, 2, 3)))
    C4 None
    """
    groups = list(dict.fromkeys(weight.soft.rep.group for weight in soft_weights(model)))
    if len(groups) > 1:
        raise GroupError(
            f"this model is soft under {', '.join(map(str, groups))}, and not for one group; give a baked copy and the "
            "group"
        )
    return groups[0] if groups else None


def chosen_group(model: nn.Module, group: Group | str | None, doing: str) -> Group:
    """The group, by default the one that the model was softened for; `doing` says what it is needed for.

    >>> print(chosen_group(nn.Conv2d(1, 2, 3), "C4", "measure"))
    C4
    """
    if isinstance(group, Tensor):
        raise GroupError(
            f"group must be a group or its name, such as SO(2) or 'C18'; got a tensor of {tuple(group.shape)}: the "
            "data come before the group"
        )
    if group is not None:
        return as_group(group)
    own = group_of(model) if isinstance(model, nn.Module) else None
    if own is None:
        raise GroupError(f"this model has no soft weights: say for which group to {doing} it, such as group=SO(2)")
    return own
