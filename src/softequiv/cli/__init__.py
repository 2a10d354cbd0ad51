"""What can be done from a shell? `softequiv soften`, `plan`, `certify`, `measure`, `train`, `bake`, `report`,
`reproduce`, `sweep`, `bench`, `demo`, `doctor`: each parses its arguments, calls the library and prints.

Exit codes: 0 done; 1 the answer is no (a certificate does not hold, the self-test fails); 2 wrong usage; 3 an error,
printed to stderr as one sentence (`--debug` shows the traceback); 130 interrupted. With `--json`, stdout
carries one JSON object and nothing else.
"""

from __future__ import annotations

import os
import sys

FAILED, INTERRUPTED = 3, 130


def main() -> None:
    """The command `softequiv`."""
    for library in ("TRANSFORMERS", "HF_HUB"):  # their remarks are not this program's
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        from softequiv.cli.commands import app
    except ModuleNotFoundError as missing:
        if str(missing.name).split(".")[0] not in ("typer", "rich"):
            raise
        print("the command line needs typer and rich: pip install 'softequiv[cli]'", file=sys.stderr)
        sys.exit(FAILED)
    app(prog_name="softequiv")
