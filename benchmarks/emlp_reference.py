"""How long does EMLP take to find an equivariant basis? A stand-alone reference for our own spectrum benchmarks.

This file imports nothing of softequiv and is run by an interpreter of its own. EMLP 1.0.3 states no version of JAX. All
three cases run with the versions below; with jax 0.10.2 and numpy 2.4.6 the T4 case ends in a TypeError:

    python3 -m venv emlp-env
    emlp-env/bin/pip install emlp==1.0.3 jax==0.4.20 jaxlib==0.4.20 numpy==1.26.4 scipy==1.11.4 six
    emlp-env/bin/python benchmarks/emlp_reference.py

Every case runs in a fresh process with empty caches. The clock covers the call of `equivariant_basis()` alone, with the
compilation that JAX does inside it, and not the import of EMLP or the construction of group and representation.
One JSON object goes to standard output: {case: {"seconds": s, "dims": [n, k], "error": null or a sentence}}, where the
basis has k vectors of length n. A case that fails or runs out of time has null for what it did not produce.
Versions go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

# case: (group, degree, rank), the maps T_rank -> T_rank of that group.
CASES: dict[str, tuple[str, int, int]] = {
    "O(5) T2->T2": ("O", 5, 2),
    "SO(3) T3->T3": ("SO", 3, 3),
    "SO(3) T4->T4": ("SO", 3, 4),
}
MARK = "RESULT "  # begins the one line of a child's output that its parent reads; EMLP prints lines of its own


def solve(case: str) -> None:
    """Time one cold solve in this process and print its result as a marked line of JSON."""
    from time import perf_counter

    import emlp
    import jax
    from emlp.reps import T

    group_name, degree, rank = CASES[case]
    group = getattr(emlp.groups, group_name)(degree)
    maps = (T(rank) >> T(rank))(group)
    type(maps).solcache.clear()  # shared by all representations of the process
    jax.clear_caches()
    jax.block_until_ready(jax.numpy.ones(1))  # wake the backend: its start-up is no part of the solve

    start = perf_counter()
    basis = jax.block_until_ready(maps.equivariant_basis())
    seconds = perf_counter() - start
    print(MARK + json.dumps({"seconds": round(seconds, 4), "dims": list(basis.shape), "error": None}), flush=True)


def run_case(case: str, limit: float) -> dict[str, Any]:
    """Run one case in a fresh process for at most `limit` seconds, import included."""
    failed: dict[str, Any] = {"seconds": None, "dims": None}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, os.path.abspath(__file__), "--solve", case]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"no result within the time limit of {limit:g} s"}
    for line in child.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    if child.returncode < 0:
        return {**failed, "error": f"killed by signal {-child.returncode}"}
    return {**failed, "error": lines[-1] if lines else f"exit status {child.returncode} without a message"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time EMLP's equivariant bases; one JSON object on standard output.")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds allowed per case (default: 300)")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case; may be repeated")
    parser.add_argument("--solve", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.solve:
        solve(arguments.solve)
        return
    print(", ".join(f"{name} {metadata.version(name)}" for name in ("emlp", "jax", "jaxlib", "numpy")), file=sys.stderr)
    results: dict[str, dict[str, Any]] = {}
    for case in arguments.case or CASES:
        print(f"{case} ...", file=sys.stderr, flush=True)
        results[case] = run_case(case, arguments.limit)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
