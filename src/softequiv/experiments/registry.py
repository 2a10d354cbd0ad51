"""Which experiments are there? Their names and where each lies; one is imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec

from softequiv.errors import SoftEquivError
from softequiv.experiments.base import Experiment

HERE = __package__

# name: module:object in this folder; one whose module is not there is not offered
PLACES = {
    "T1": "t1:T1",
    "T1b": "t1b:T1B",
    "T2": "t2:T2",
    "T3": "t3:T3",
    "T4": "t4:T4",
    "T5": "t5:T5",
    "T6": "t6:T6",
    "T7": "t7:T7",
    "F1": "f1:F1",
    "F2": "f2:F2",
    "F3": "f3:F3",
    "F4": "f4:F4",
    "F5": "f5:F5",
    "hard-vs-smooth": "hard_vs_smooth:HARD_VS_SMOOTH",
    "full-equivariant": "full_equivariant:FULL_EQUIVARIANT",
    "softness-selection": "softness_selection:SOFTNESS_SELECTION",
    "whole-network": "whole_network:WHOLE_NETWORK",
    "typed-vit": "typed_vit:TYPED_VIT",
}


def names() -> list[str]:
    """The experiments that can be run, in the order of the paper.

    >>> names()[:2]
    ['T1', 'T1b']
    """
    return [name for name, place in PLACES.items() if find_spec(f"{HERE}.{place.partition(':')[0]}")]


def experiment(name: str) -> Experiment:
    """The experiment of a name, in large or small letters.

    >>> experiment("t1").title
    'MNIST: from invariant to free'
    """
    known = {own.lower(): own for own in names()}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 2, cutoff=0.4)
        hint = f"did you mean {' or '.join(known[own] for own in near)}? " if near else ""
        raise SoftEquivError(f"there is no experiment {name!r}; {hint}Known are {', '.join(known.values())}")
    module, _, attribute = PLACES[known[name.lower()]].partition(":")
    found = getattr(importlib.import_module(f"{HERE}.{module}"), attribute)
    assert isinstance(found, Experiment)
    return found
