"""What does a shell give? Texts, which become models, groups, ranges and arguments of the library here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, cast, get_args

import typer
from torch import nn

from softequiv.adapt.group import group_of
from softequiv.adapt.opening import in_float32, open_model
from softequiv.adapt.plan import Scope
from softequiv.certify import Certificate, StatisticalCertificate
from softequiv.certify.kept import text_of
from softequiv.certify.located import own_range
from softequiv.errors import GroupError, SoftEquivError
from softequiv.groups import Group, parse_group, parse_range
from softequiv.reps import Action


def opened(name: str, trust_remote_code: bool, *, wide: bool = False) -> nn.Module:
    """The model of that name, if `wide` in float32 where its weights are halves; a bar is shown for downloads only."""
    if Path(name).is_dir() or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    net = open_model(name, trust_remote_code=trust_remote_code)
    return in_float32(net) if wide else net


def read_group(text: str | None) -> Group | None:
    """A group as people write it."""
    return None if text is None else parse_group(text)


def read_range(text: str | None) -> float | None:
    """A range as people write it."""
    return None if text is None else parse_range(text)


def own_group(model: nn.Module) -> Group:
    """The group that a model was softened for."""
    group = group_of(model)
    if group is None:
        raise GroupError("this model has no soft weights, so say for which group, such as --group 'SO(2)'")
    return group


def opened_for_moves(
    name: str, trust_remote_code: bool, group: str | None, within: str | None
) -> tuple[nn.Module, Group, float | None]:
    """A model in float32, with the group and the range it is asked about: its own where none is given."""
    asked_group, asked_range = read_group(group), read_range(within)
    net = opened(name, trust_remote_code, wide=True)
    return net, asked_group or own_group(net), own_range(net) if asked_range is None else asked_range


def read_certificate(path: Path) -> Certificate | StatisticalCertificate:
    """The certificate in a file, of weights or of answers."""
    if not path.exists():
        raise SoftEquivError(f"there is no certificate {path}; softequiv certify MODEL -o {path} writes one")
    with contextlib.suppress(ValueError, AttributeError):
        if json.loads(text_of(path)).get("kind") == "statistical":
            return StatisticalCertificate.load(path)
    return Certificate.load(path)


def asked(
    group: str,
    softness: float | None,
    error: float | None,
    within: str | None,
    only: list[str] | None,
    skip: list[str] | None,
    action: str,
    scope: str = "layer",
    data: Path | None = None,
) -> dict[str, Any]:
    """What `plan` and `soften` of the library take, from what a shell gives; the pictures are not opened yet."""
    if scope in get_args(Scope) and (scope == "network") != (data is not None):
        raise typer.BadParameter("--scope network and --data, the pictures to measure it on, belong together")
    if error is not None and softness is None and within is None:
        raise typer.BadParameter("--error needs --within, such as 30deg")
    if (softness is None) == (error is None) or (error is None) != (within is None):
        raise typer.BadParameter("say how equivariant in one way: --softness, or --error together with --within")
    return {
        "group": parse_group(group),
        "softness": softness,
        "error": error,
        "within": read_range(within),
        "only": only or None,
        "skip": skip or (),
        "action": cast(Action, action),
        "scope": cast(Scope, scope),
    }
