"""The command line, run in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from softequiv.cli import commands


def call(*arguments: Any) -> Any:
    """Run a command."""
    return CliRunner().invoke(commands.app, [str(argument) for argument in arguments])


def found(*arguments: Any) -> Any:
    """The JSON object that a command prints."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
