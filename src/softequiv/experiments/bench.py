"""What do the pages on performance say on this machine? Every ratio of theirs that needs no weights from elsewhere,
with the method beside it, in a few minutes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch

from softequiv.experiments.costs import image_costs, plain_cnn, tensor_costs, track_costs
from softequiv.experiments.speed import TENSOR_CASES, dense_over_ours, small_models, soft_ratios, spectrum_cost
from softequiv.reps import Action

# sides of pictures, and those of them for the SVD, which takes half a minute at 8 x 8: once is enough
SIZES: dict[Action, tuple[Sequence[int], Sequence[int]]] = {
    "exact": ((4, 6, 8, 10, 12, 14, 16, 24, 32), (4, 6, 8)),
    "su2": ((4, 6, 8, 10, 12, 14, 16, 24), (4, 6)),
}
ROUNDS = 9
BATCH, PIXELS = 16, 64


@dataclass(frozen=True)
class Part:
    """One table: its method is told below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    method: str


def machine() -> str:
    """What the ratios were taken on.

    >>> "thread" in machine()
    True
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{device}, torch {torch.__version__}, {threads} thread{'s' * (threads != 1)}"


def parts(compiled: bool = False) -> dict[str, Callable[[], Part]]:
    """Each table by its title, measured when it is called."""
    return {
        **{
            f"Maps of n x n pictures, action {action}": partial(pictures, action, *sizes)
            for action, sizes in SIZES.items()
        },
        "Maps of tensors": tensors,
        "Soft models": partial(models, compiled),
        "Baselines": baselines,
    }


def pictures(action: Action, sizes: Sequence[int], svd_sizes: Sequence[int]) -> Part:
    """Spectra of maps of pictures against brute force, the paper's rule and bare linear algebra."""
    found = [spectrum_cost(n, action, svd=n in svd_sizes) for n in sizes]
    rows = [
        (
            f"{cost.n} x {cost.n}",
            fold(None if cost.svd is None else cost.svd / cost.ours),
            fold(None if cost.schur is None else cost.schur / cost.ours),
            fold(cost.ours / cost.eigh),
        )
        for cost in found
    ]
    method = (
        "ours: build a spectrum with an empty cache and filter one weight of n^4 entries, float64, CPU; best of 3 "
        "rounds at least, in turns. SVD: of the Kronecker matrix, one run. Schur rule: the paper's, in plain Python, "
        "with its generator. "
        "eigh: two bare eigendecompositions of n^2 x n^2 complex matrices."
    )
    columns = ("n x n", "SVD / ours", "Schur rule / ours", "ours / two eigh")
    return Part(f"Maps of n x n pictures, action {action}", columns, rows, method)


def tensors() -> Part:
    """Spectra of maps of tensors against brute force."""
    rows = [(case.replace("->", " to "), fold(dense_over_ours(case), "refused")) for case in TENSOR_CASES]
    method = "dense: the SVD of the whole matrix, one run, refused above 6000 dimensions; ours: best of 3, empty cache."
    return Part("Maps of tensors", ("maps", "dense / ours"), rows, method)


def models(compiled: bool = False) -> Part:
    """What a soft model costs to train and to ask."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 3, PIXELS, PIXELS, device=device), torch.randint(10, (BATCH,), device=device)
    builds = {"CNN, 3 layers": plain_cnn, **(small_models(PIXELS) if find_spec("transformers") else {})}
    rows = []
    for name, build in builds.items():
        for fused in (False, True) if compiled else (False,):
            found = soft_ratios(build, x, y, rounds=ROUNDS, compiled=fused)
            told = [f"{value:.2f}" for variant in ("parametrize", "project", "baked") for value in found[variant]]
            rows.append((f"{name}{', compiled' if fused else ''}", *told))
    method = (
        f"median time of {ROUNDS} rounds in turns, divided by the plain model's: a step of AdamW on {BATCH} pictures "
        f"of {PIXELS} pixels, float32, and a forward pass; every weight on a grid softened under SO(2) at softness 0.9."
    )
    if len(builds) == 1:
        method += " ViT and ResNet need transformers: pip install 'softequiv[transformers]'."
    columns = ("model", *(f"{v}, {what}" for v in ("parametrize", "project", "baked") for what in ("step", "ask")))
    return Part("Soft models", columns, rows, method)


def baselines() -> Part:
    """What people would use instead costs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = [
        *image_costs(BATCH, PIXELS // 2, ROUNDS, device=device),
        *tensor_costs(4 * BATCH, 128, ROUNDS, device),
        *track_costs(4 * BATCH, 64, ROUNDS, device),
    ]
    rows = [
        (
            f"{cost.name} ({cost.against})" if cost.name == "plain" else cost.name,
            f"{cost.parameters:,}",
            "as plain" if cost.training is None else f"{cost.training:.2f}",
            f"{cost.inference:.2f}",
        )
        for cost in found
    ]
    method = (
        f"median time of {ROUNDS} rounds in turns, divided by that of the plain network above with as many feature "
        f"maps; {BATCH} pictures of {PIXELS // 2} pixels, and {4 * BATCH} pairs of vectors for EMLP. Networks trained "
        "with augmentation or a penalty are plain ones when asked: their inference shows the noise."
    )
    return Part("Baselines", ("network", "numbers to learn", "training step", "inference"), rows, method)


def fold(ratio: float | None, absent: str = "-") -> str:
    """A ratio as people read it.

    >>> fold(6396.2), fold(0.0634), fold(None)
    ('6,396 x', '0.063 x', '-')
    """
    if ratio is None:
        return absent
    return f"{ratio:,.0f} x" if ratio >= 10 else f"{ratio:.2g} x"
