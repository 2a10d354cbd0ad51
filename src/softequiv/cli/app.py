"""How does a command speak? It returns an answer, which is printed as tables or as JSON; an error becomes one sentence
and an exit code. All commands share this, and the options `--json` and `--debug`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from softequiv._version import __version__
from softequiv.cli import FAILED, INTERRUPTED
from softequiv.errors import SoftEquivError

WIDTH = 160  # where no terminal says how wide it is, lines are not cut short
CODES = (
    "Exit codes: 0 done, 1 the answer is no (certificate not verified, self-test failed), 2 wrong usage, 3 error, "
    "130 interrupted."
)

ORDER = (
    *("plan", "soften", "certify", "measure", "train", "bake", "report", "reproduce", "sweep", "bench", "demo"),
    "doctor",
)


class InOrder(TyperGroup):
    """A group that lists its commands in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names; commands missing from `ORDER` come last."""
        return sorted(super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    cls=InOrder,
    help="Make a model as equivariant as you ask, and know how equivariant it is.",
    epilog=CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(asked: bool) -> None:
    """`--version`: print it and leave."""
    if asked:
        print(f"softequiv {__version__}")
        raise typer.Exit


@app.callback()
def overview(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """Options before the command; the help text is that of `app`."""


@dataclass(frozen=True)
class Answer:
    """What a command found: `entries` for scripts, `shown` for people, and the exit code. An answer without entries,
    as of a process other than the main one, is not printed."""

    entries: Mapping[str, Any]
    shown: tuple[RenderableType, ...]
    code: int = 0


Command = Callable[..., Answer]
SHARED = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


def command(example: str) -> Callable[[Command], Command]:
    """Register a function as a command, under its name without `_command`, with an example in its help."""

    def register(function: Command) -> Command:
        own = inspect.signature(function, eval_str=True)
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for name, kind in SHARED.items()
        ]

        @functools.wraps(function)
        def run(as_json: bool, debug: bool, **arguments: Any) -> None:
            raise typer.Exit(answered(functools.partial(function, **arguments), as_json, debug))

        parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own.parameters.values()]
        signature = inspect.Signature([*parameters, *shared], return_annotation=None)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: item.annotation for name, item in signature.parameters.items()}
        name = function.__name__.removesuffix("_command")
        app.command(name, epilog=f"Example: {example}\n\n{CODES}")(run)
        return function

    return register


def answered(work: Callable[[], Answer], as_json: bool, debug: bool) -> int:
    """Do the work, print its answer or what went wrong, and give the exit code."""
    try:
        aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
        with warnings.catch_warnings(), aside:  # what the library prints on its way is no JSON
            warnings.showwarning = remark
            answer = work()
        tell(answer, as_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (typer.BadParameter, BrokenPipeError):  # wrong usage, and a reader who has seen enough: typer knows both
        raise
    except Exception as problem:  # every one of them is told in a sentence
        if debug:
            traceback.print_exc()
        print(f"softequiv: {sentence(problem)}", file=sys.stderr)
        return FAILED
    return answer.code


def sentence(problem: Exception) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(problem).split())
    if isinstance(problem, (SoftEquivError, OSError)):
        return text
    return f"unexpected {type(problem).__name__}: {text}; run it again with --debug and report what you see"


def remark(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning without the line of code that gave it."""
    print(f"note: {' '.join(str(message).split())}", file=sys.stderr)


def tell(answer: Answer, as_json: bool) -> None:
    """Print an answer to stdout."""
    if not answer.entries:
        return
    if as_json:
        print(json.dumps(strict(answer.entries), indent=1, ensure_ascii=False))
        return
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for item in answer.shown:
        console.print(item)


def strict(value: Any) -> Any:
    """The same value with null for numbers that JSON does not have.

    >>> strict({"a": [1.0, float("inf")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
