"""Is everything in place? Versions, devices, extras, data, and a small model softened and certified."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import nn

from softequiv._version import __version__
from softequiv.adapt import soften
from softequiv.certify import certify
from softequiv.groups import degrees

OWN = "softequiv"
CORE = ("torch", "numpy", "safetensors")
OF_USERS = re.compile(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]")  # name>=1; extra == 'cli'
ASKED, WITHIN = 0.1, degrees(30)
SLACK = 1e-4  # what float32 may add to the asked error


@dataclass(frozen=True)
class Extra:
    """One extra of the package, its libraries with their versions, and how to get what is missing."""

    name: str
    versions: dict[str, str | None]

    @property
    def present(self) -> bool:
        """Whether all its libraries are installed."""
        return None not in self.versions.values()

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f"pip install '{OWN}[{self.name}]'"


@dataclass(frozen=True)
class SelfTest:
    """A small convolution softened for an error: what was asked and what was certified."""

    asked: float
    certified: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the guarantee was given and holds."""
        return not self.problem and self.certified <= self.asked * (1 + SLACK)

    def __str__(self) -> str:
        if self.problem:
            return f"self-test failed: {self.problem}; install softequiv and torch again"
        word = "passed" if self.ok else "failed"
        return f"self-test {word}: an error of {self.asked:g} within {WITHIN} was asked, {self.certified:.4g} certified"


def version(name: str) -> str | None:
    """The installed version of a distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """What the core runs on."""
    found = {name: version(name) or "unknown" for name in CORE}
    return {OWN: __version__, **found, "python": platform.python_version(), "platform": platform.platform(terse=True)}


def extras(requirements: Sequence[str] | None = None) -> list[Extra]:
    """The extras that the package declares, but for that of its developers.

    >>> [extra.name for extra in extras(["numpy>=1", "typer>=0.12; extra == 'cli'", "pytest; extra == 'dev'"])]
    ['cli']
    """
    if requirements is None:
        requirements = [] if version(OWN) is None else metadata.requires(OWN) or []
    named: dict[str, dict[str, str | None]] = {}
    for line in requirements:
        match = OF_USERS.match(line)
        if match and match[2] != "dev" and match[1] != OWN:
            named.setdefault(match[2], {})[match[1]] = version(match[1])
    return [Extra(name, found) for name, found in named.items()]


def devices() -> list[str]:
    """Where models can run."""
    found = [f"cpu, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index}, {about.name}, {about.total_memory / 2**30:.0f} GiB")
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def self_test() -> SelfTest:
    """Soften a small convolution for an error and certify it."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = soften(nn.Conv2d(3, 8, 5), "SO(2)", error=ASKED, within=WITHIN)
        return SelfTest(ASKED, certify(net).error)
    except Exception as problem:  # the doctor reports illness, and has none
        return SelfTest(ASKED, math.nan, f"{type(problem).__name__}: {problem}")
