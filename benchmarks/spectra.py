"""How long does it take to make a weight equivariant, and how does that grow?

Compares `se.spectrum` with the dense Kronecker SVD, the paper's Schur rule, bare eigendecompositions and EMLP, and
prints Markdown tables. `--write` puts them into docs/performance.md and draws docs/growth.svg; `--emlp INTERPRETER`
lets benchmarks/emlp_reference.py run in the same run with an interpreter that has EMLP.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import matplotlib
import numpy as np
import torch

import softequiv as se
from softequiv._cache import nbytes
from softequiv.experiments.bench import fold
from softequiv.experiments.schur_rule import schur_rule
from softequiv.experiments.speed import (
    CUTOFF,
    TENSOR_CASES,
    cold_spectrum,
    dense_spectrum,
    image_maps,
    seconds,
    spectrum_cost,
    svd_seconds,
    tensor_maps,
)
from softequiv.experiments.t7 import PAPER_SCHUR, PAPER_SVD

SIZES = (4, 6, 8, 10, 12, 14, 16, 24, 32)
SVD_SIZES = (4, 6, 8)  # 8 x 8 pixels are a dense matrix of 4096 x 4096; 10 x 10 would be one of 10000 x 10000
ACTIONS = ("exact", "su2")
FITTED = 144  # slopes are fitted from this d on, where fixed costs no longer matter

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "growth.svg"
BEGIN, END = "<!-- spectra: begin -->", "<!-- spectra: end -->"


# --- measuring


@dataclass(frozen=True)
class ImageResult:
    """Seconds on n x n pictures, bytes of the spectrum, and bytes by which the process grew."""

    n: int
    build: float
    apply: float
    schur: float
    eigh: float
    svd: float | None
    svd_converged: bool
    held: int
    peak: int

    @property
    def ours(self) -> float:
        return self.build + self.apply


def measure_images(n: int, action: str) -> ImageResult:
    rep = image_maps(n, action)
    theta = torch.randn(n * n, n * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = se.schur(CUTOFF)(theta, rep)
    assert np.allclose(schur_rule(rep.source.rates()[0].numpy(), theta.numpy(), CUTOFF), expected, atol=1e-9)
    cost = spectrum_cost(n, action, svd=False, rounds=5, at_least=3.0)
    svd, converged = svd_seconds(rep, theta) if n in SVD_SIZES else (None, True)
    held, peak = nbytes(cold_spectrum(rep)), int(child("--peak", action, str(n)))
    return ImageResult(n, cost.build, cost.apply, cost.schur, cost.eigh, svd, converged, held, peak)


def child(*arguments: str) -> str:
    """What this program prints in a fresh process."""
    return subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True).stdout


def print_peak(action: str, n: int) -> None:
    """Bytes by which this process grows at most while it builds a spectrum; 0 where the system does not tell."""
    own = Path("/proc/self")
    if not (own / "clear_refs").exists():
        print(0)
        return
    cold_spectrum(image_maps(4, action))
    (own / "clear_refs").write_text("5")  # the high-water mark starts again from the present size
    before = resident(own, "VmRSS")
    cold_spectrum(image_maps(n, action))
    print(resident(own, "VmHWM") - before)


def resident(process: Path, field: str) -> int:
    return 1024 * int(process.joinpath("status").read_text().split(f"{field}:")[1].split()[0])


def print_solve(case: str) -> None:
    """Seconds and invariants of the first spectrum in this process."""
    torch.ones(1).sum()  # wake the backend, as the EMLP reference does
    start = perf_counter()
    found = se.spectrum(tensor_maps(case))
    print(json.dumps({"seconds": perf_counter() - start, "invariants": found.invariants}))


@dataclass(frozen=True)
class TensorResult:
    """One cold solve of each kind; `emlp` as emlp_reference.py reports it, `dense` None where it is refused."""

    case: str
    dim: int
    ours: float
    invariants: int
    dense: float | None
    emlp: dict[str, object] | None


def measure_tensors(interpreter: str | None) -> list[TensorResult]:
    emlp = {}
    if interpreter:
        reference = [interpreter, str(Path(__file__).with_name("emlp_reference.py"))]
        emlp = json.loads(subprocess.run(reference, stdout=subprocess.PIPE, text=True, check=True).stdout)
    results = []
    for case in TENSOR_CASES:
        rep, own = tensor_maps(case), json.loads(child("--solve", case))
        try:
            dense = seconds(lambda rep=rep: dense_spectrum(rep))
        except se.TooLargeError:
            dense = None
        results.append(TensorResult(case, rep.dim, own["seconds"], own["invariants"], dense, emlp.get(case)))
    return results


# --- showing


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def ms(value: float) -> str:
    return f"{1000 * value:.{max(0, 1 - math.floor(math.log10(1000 * value)))}f} ms"


def mb(value: int) -> str:
    return f"{value / 1e6:.2g} MB" if value < 1e8 else f"{value / 1e6:.0f} MB"


def svd_ratio(r: ImageResult) -> str:
    if r.svd is None:
        return "-"
    return fold(r.svd / r.ours) if r.svd_converged else f"gave up after {fold(r.svd / r.ours)}"


def image_table(results: list[ImageResult]) -> str:
    header = ["n x n", "build", "apply", "SVD / ours", "Schur rule / ours", "ours / two `eigh`"]
    header += ["paper's SVD", "paper's Schur"]
    rows = [
        [f"{r.n} x {r.n}", ms(r.build), ms(r.apply), svd_ratio(r), fold(r.schur / r.ours)]
        + [fold(r.ours / r.eigh)]
        + [f"{seconds[r.n]:g} s" if r.n in seconds else "-" for seconds in (PAPER_SVD, PAPER_SCHUR)]
        for r in results
    ]
    return table(header, rows)


def tensor_table(results: list[TensorResult]) -> str:
    header = ["maps", "dimensions", "ours", "invariants", "EMLP's basis", "EMLP / ours", "dense / ours"]
    rows = []
    for r in results:
        basis, ratio = "-", "-"
        if r.emlp:
            basis = str(r.emlp["dims"][1]) if r.emlp["dims"] else str(r.emlp["error"])
            ratio = fold(r.emlp["seconds"] and r.emlp["seconds"] / r.ours)
        dense = fold(r.dense / r.ours) if r.dense else "refused"
        rows.append([r.case.replace("->", " to "), str(r.dim), ms(r.ours), str(r.invariants), basis, ratio, dense])
    return table(header, rows)


def slope(results: list[ImageResult], value: Callable[[ImageResult], float]) -> float:
    """Exponent p of value ~ d^p for d = n^2 from FITTED on, by least squares."""
    large = [r for r in results if r.n**2 >= FITTED]
    return float(np.polyfit([2 * math.log(r.n) for r in large], [math.log(value(r)) for r in large], 1)[0])


def growth_table(images: dict[str, list[ImageResult]]) -> str:
    header = ["n x n", "d"]
    header += [f"{what}, {action}" for action in images for what in ("build", "held", "peak")]
    rows = []
    for results in zip(*images.values(), strict=True):
        cells = [cell for r in results for cell in (ms(r.build), mb(r.held), mb(r.peak))]
        rows.append([f"{results[0].n} x {results[0].n}", str(results[0].n ** 2), *cells])
    fits = [
        f"{p:.1f}"
        for results in images.values()
        for p in (slope(results, lambda r: r.build), slope(results, lambda r: r.held), math.nan)
    ]
    rows.append(["power of d", f"{FITTED} on", *(fit.replace("nan", "") for fit in fits)])
    return table(header, rows)


def targets_table(images: dict[str, list[ImageResult]], tensors: list[TensorResult]) -> str:
    rows = []
    for action, results in images.items():
        at = {r.n: r for r in results}
        svd = "the SVD" if at[8].svd_converged else "the SVD (until it gave up)"
        rows.append(verdict(f"8 x 8, {action}: 1,000 times faster than {svd}", at[8].svd / at[8].ours, 1000, True))
        rows.append(verdict(f"14 x 14, {action}: within 4 times two `eigh`", at[14].ours / at[14].eigh, 4, False))
    for r in tensors:
        if r.emlp and r.emlp["seconds"]:
            case = r.case.replace("->", " to ")
            rows.append(verdict(f"{case}: 20 times faster than EMLP", r.emlp["seconds"] / r.ours, 20, True))
    return table(["target", "measured", "met"], rows)


def verdict(target: str, measured: float, bound: float, at_least: bool) -> list[str]:
    met = measured >= bound if at_least else measured <= bound
    return [target, fold(measured), "yes" if met else "no"]


def draw(images: dict[str, list[ImageResult]], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "softequiv", "svg.fonttype": "none", "font.size": 10}
    figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    exact, su2 = images["exact"], images["su2"]
    lines = [
        ("Kronecker SVD", exact, lambda r: r.svd, "#D55E00", "s:"),
        ("paper's Schur rule", exact, lambda r: r.schur, "#E69F00", "^--"),
        ("two bare eigh", exact, lambda r: r.eigh, "#777777", "x-."),
        ("ours, apply", exact, lambda r: r.apply, "#009E73", "v-"),
        ("ours, build, su2", su2, lambda r: r.build, "#56B4E9", "D-"),
        ("ours, build, exact", exact, lambda r: r.build, "#0072B2", "o-"),
    ]
    for label, results, value, colour, style in lines:
        plot_line(time, label, [(r.n**2, value(r)) for r in results if value(r)], colour, style)
    bytes_lines = [
        ("peak, su2", su2, lambda r: r.peak, "#56B4E9", "D--"),
        ("peak, exact", exact, lambda r: r.peak, "#0072B2", "o--"),
        ("held, both", exact, lambda r: r.held, "#009E73", "v-"),
    ]
    for label, results, value, colour, style in bytes_lines:
        points = [(r.n**2, value(r) / 1e6) for r in results if value(r) > 1e6 or label.startswith("held")]
        plot_line(memory, label, points, colour, style)
    for axes, quantity in ((time, "seconds"), (memory, "megabytes")):
        axes.set(xscale="log", yscale="log", xlabel="d = n x n pixels (the weight has d x d entries)", ylabel=quantity)
        axes.set_xticks([n * n for n in (4, 6, 8, 12, 16, 24, 32)], ["16", "36", "64", "144", "256", "576", "1024"])
        axes.minorticks_off()
        axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    time.set_title(
        f"Time: build grows as d^{slope(exact, lambda r: r.build):.1f} (exact), "
        f"d^{slope(su2, lambda r: r.build):.1f} (su2)",
        fontsize=10,
    )
    memory.set_title(f"Memory: the spectrum grows as d^{slope(exact, lambda r: r.held):.1f}", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def plot_line(axes: object, label: str, points: list[tuple[float, float]], colour: str, style: str) -> None:
    axes.plot(*zip(*points, strict=True), style, label=label, color=colour, markersize=5, linewidth=1.5)


def report(images: dict[str, list[ImageResult]], tensors: list[TensorResult], emlp: bool) -> str:
    parts = [
        f"Python {platform.python_version()}, torch {torch.__version__}, float64, {torch.get_num_threads()} "
        f"thread{'s' * (torch.get_num_threads() > 1)}."
    ]
    for action, results in images.items():
        parts += [f"### Maps of n x n pictures, action `{action}`", image_table(results)]
    parts += ["### Maps of tensors", tensor_table(tensors)]
    if not emlp:
        parts.append("EMLP was left out of this run (`--emlp INTERPRETER` includes it).")
    parts += ["### Growth", growth_table(images), "### Targets", targets_table(images, tensors)]
    return "\n\n".join(parts)


def write(text: str, images: dict[str, list[ImageResult]]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    draw(images, PLOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time equivariant operators; Markdown tables on standard output.")
    parser.add_argument("--emlp", metavar="INTERPRETER", help="a Python interpreter that has EMLP")
    parser.add_argument("--write", action="store_true", help="update docs/performance.md and docs/growth.svg")
    parser.add_argument("--peak", nargs=2, metavar=("ACTION", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--solve", choices=list(TENSOR_CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.peak[0], int(arguments.peak[1]))
    elif arguments.solve:
        print_solve(arguments.solve)
    else:
        images: dict[str, list[ImageResult]] = {action: [] for action in ACTIONS}
        for n in SIZES:
            for action in ACTIONS:
                print(f"{n} x {n}, {action} ...", file=sys.stderr, flush=True)
                images[action].append(measure_images(n, action))
        tensors = measure_tensors(arguments.emlp)
        text = report(images, tensors, bool(arguments.emlp))
        print(text)
        if arguments.write:
            write(text, images)


if __name__ == "__main__":
    main()
