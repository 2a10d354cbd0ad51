"""Which settings decide a training? One frozen value that can be written down, read again and compared."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from softequiv._files import read_json
from softequiv.errors import SoftEquivError

Optimizer = Literal["adamw", "adam", "sgd"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["fp32", "bf16"]

MOST = 2**62  # torch's generators and sizes take no larger numbers


@dataclass(frozen=True)
class Recipe:
    """How long, how fast, and with what.

    The rate rises over `warmup` epochs and falls to zero by `schedule`. `head_rate` is the rate of the last layer with
    weights; `layer_decay` multiplies the rate once for every block below it, across stages: the stem is below all
    blocks, and layers behind the last block have its rate. Decoupled weight decay (adamw) leaves biases and other
    vectors alone; adam and sgd decay every weight. With `ema`, an exponential average of the weights is evaluated and
    kept, whose decay after t steps is min(ema, (1 + t) / (10 + t)), so that short runs forget their first weights too.
    Each epoch shuffles the examples and drops the last, incomplete batch: 100 examples make one batch of 64. `keep`
    says which model is kept: the best on the validation examples, or the last.

    >>> recipe = Recipe(epochs=3, rate=1e-3)
    >>> Recipe.parse(recipe.to_json()) == recipe
    True
    """

    epochs: int = 10
    batch: int = 128
    optimizer: Optimizer = "adamw"
    rate: float = 1e-3
    head_rate: float | None = None
    weight_decay: float = 0.0
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    clip: float | None = None
    layer_decay: float = 1.0
    ema: float | None = None
    precision: Precision = "fp32"
    accumulate: int = 1
    keep: Literal["best", "last"] = "best"
    evaluate_every: int = 1
    save_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "evaluate_every"):
            self._whole(name, 1)
        if self.save_every is not None:
            self._whole("save_every", 1)
        self._whole("seed", 0)
        for name, low, high in (
            ("rate", 0.0, math.inf),
            ("weight_decay", 0.0, math.inf),
            ("warmup", 0.0, float(self.epochs)),
            ("layer_decay", 0.0, 1.0),
        ):
            self._number(name, low, high)
        for name, high in (("head_rate", math.inf), ("clip", math.inf), ("ema", 1.0)):
            if getattr(self, name) is not None:
                self._number(name, 0.0, high)
        if self.ema == 1:
            raise SoftEquivError("an average with ema = 1 stays at the first weights; choose less, such as 0.999")
        if self.clip == 0:
            raise SoftEquivError("gradients clipped to 0 teach nothing; choose more, such as 1, or leave clip out")
        for name, known in (
            ("optimizer", get_args(Optimizer)),
            ("schedule", get_args(Schedule)),
            ("precision", get_args(Precision)),
            ("keep", ("best", "last")),
        ):
            if getattr(self, name) not in known:
                raise SoftEquivError(f"{name} is one of {', '.join(known)}; got {getattr(self, name)!r}")

    def _whole(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise SoftEquivError(f"{name} is a whole number from {low}; got {value!r}")
        if value >= MOST:
            raise SoftEquivError(f"{name} lies below 2^62; got a number of {value.bit_length()} bits")

    def _number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or value > sys.float_info.max:
            raise SoftEquivError(f"{name} lies between {low:g} and {high:g}; got {str(value)[:60]}")

    def factor(self, moment: float, step: float = 0.0) -> float:
        """The rate of the step that ends at a moment, in epochs, as a share of the full one; `step` is its length.

        >>> [round(Recipe(epochs=4, warmup=2, schedule="linear").factor(t, 1), 2) for t in (1, 2, 3, 4)]
        [0.5, 1.0, 1.0, 0.5]
        >>> Recipe(epochs=2, warmup=2).factor(2)  # nothing is left to fall
        1.0
        """
        if moment < self.warmup:
            return moment / self.warmup
        left = max(self.epochs - self.warmup, step)
        gone = max(0.0, moment - step - self.warmup) / left if left else 0.0
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * gone))
        return 1 - gone if self.schedule == "linear" else 1.0

    def to_json(self) -> str:
        """Every setting by name."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, text: str, usual: Recipe | None = None) -> Recipe:
        """The recipe of a JSON text, with the settings of `usual` for those that it leaves out. Unknown settings are
        refused with the nearest known name."""
        try:
            told = read_json(text)
        except ValueError as problem:
            raise SoftEquivError(
                f'a recipe is JSON, such as {{"epochs": 10}}; this text is not: {problem}'
            ) from problem
        if not isinstance(told, dict):
            raise SoftEquivError(f"a recipe is a JSON object of settings; got {type(told).__name__}")
        return cls.of(told, usual)

    @classmethod
    def of(cls, settings: Mapping[str, Any], usual: Recipe | None = None) -> Recipe:
        """The recipe of settings by name, with those of `usual` for the rest."""
        if not isinstance(settings, Mapping):
            raise SoftEquivError(f"settings are a mapping from names to values; got {type(settings).__name__}")
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; the settings are {', '.join(known)}"
                raise SoftEquivError(f"a recipe has no setting {name!r}{hint}")
        return replace(usual or cls(), **settings)
