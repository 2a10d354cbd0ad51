"""How fast is it on this machine? Contestants take turns in one run, so that a busy moment meets all alike, and only
ratios are told.

`softequiv bench` and the programs in benchmarks/ measure with what stands here: spectra against other ways to get them,
and a training step and an inference of models against the plain one.
"""

from __future__ import annotations

import importlib
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from softequiv._cache import cache
from softequiv.adapt import bake, soften
from softequiv.asking.answers import tensor_of
from softequiv.errors import PerformanceWarning, TooLargeError
from softequiv.experiments.schur_rule import schur_rule
from softequiv.gains import hard
from softequiv.groups import SO, Group, O
from softequiv.nn import hold
from softequiv.nn.constraints import projected_weights
from softequiv.reps import Action, Hom, Rep, grid, tensor
from softequiv.spectrum import Spectrum, dense, spectrum
from softequiv.spectrum.routes import LARGEST_DENSE
from softequiv.training.loop import Objective, Transform, plain

CUTOFF = 1.5
SOFTNESS = 0.9  # at which models are timed

# group and rank of the maps T_rank -> T_rank
TENSOR_CASES: dict[str, tuple[Group, int]] = {
    "O(5) T2->T2": (O(5), 2),
    "SO(3) T3->T3": (SO(3), 3),
    "SO(3) T4->T4": (SO(3), 4),
}

Work = Callable[[], object]


def seconds(work: Work) -> float:
    """The time that work takes, until the devices are done with it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start


def turns(contestants: Mapping[str, Work], rounds: int, at_least: float = 0.0) -> dict[str, list[float]]:
    """The times of each, taken in turns, for so many rounds and so many seconds at least.

    >>> times = turns({"a": lambda: sum(range(10)), "b": lambda: None}, rounds=3)
    >>> [len(taken) for taken in times.values()]
    [3, 3]
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    start, done = perf_counter(), 0
    while done < rounds or perf_counter() - start < at_least:
        for name, work in contestants.items():
            times[name].append(seconds(work))
        done += 1
    return times


def race(contestants: Mapping[str, Work], rounds: int = 5, at_least: float = 3.0) -> dict[str, float]:
    """The best time of each."""
    return {name: min(times) for name, times in turns(contestants, rounds, at_least).items()}


def ratios(contestants: Mapping[str, Work], base: str, rounds: int) -> dict[str, float]:
    """The median time of each, divided by that of `base`, after one round that does not count."""
    turns(contestants, 1)
    medians = {name: statistics.median(times) for name, times in turns(contestants, rounds).items()}
    return {name: value / medians[base] for name, value in medians.items()}


# --- spectra


def image_maps(n: int, action: Action) -> Hom:
    """Linear maps from n x n pictures to n x n pictures under rotation."""
    picture = grid(SO(2), n, n, action=action)
    return picture >> picture


def cold_spectrum(rep: Rep) -> Spectrum:
    """A spectrum that nobody has computed before."""
    cache.clear()
    return spectrum(rep)


def cold_generator(n: int, action: Action) -> Any:
    """The generator of rotations of n x n pictures as a numpy array that nobody has computed before."""
    cache.clear()
    return image_maps(n, action).source.rates()[0].numpy()


def hard_filtered(found: Spectrum, theta: Tensor) -> Tensor:
    """One weight filtered by a hard cut-off."""
    return found.filter(hard(CUTOFF).gamma(found))(theta)


def dense_spectrum(rep: Rep, largest: int = LARGEST_DENSE) -> Spectrum:
    """The spectrum by the singular values of the whole matrix, without the warning that it is slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        return dense(rep, largest)


def svd_seconds(rep: Rep, theta: Tensor) -> tuple[float, bool]:
    """One run of the dense route, and whether LAPACK converged; it may give up on so many equal singular values."""
    start = perf_counter()
    try:
        hard_filtered(dense_spectrum(rep, largest=rep.dim), theta)  # of any size: who asks for it means to wait
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return perf_counter() - start, False
    return perf_counter() - start, True


@dataclass(frozen=True)
class SpectrumCost:
    """Seconds on maps of n x n pictures: ours to build and to apply, two bare eigendecompositions, the paper's Schur
    rule with its generator where scipy is there, and the SVD of the Kronecker matrix where it was run."""

    n: int
    action: str
    build: float
    apply: float
    eigh: float
    schur: float | None = None
    svd: float | None = None

    @property
    def ours(self) -> float:
        """To build a spectrum and filter one weight."""
        return self.build + self.apply


def spectrum_cost(n: int, action: Action, *, svd: bool, rounds: int = 3, at_least: float = 0.5) -> SpectrumCost:
    """What a spectrum costs, beside a yardstick of linear algebra and the way of brute force."""
    rep = image_maps(n, action)
    found = cold_spectrum(rep)
    theta = torch.randn(n * n, n * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    square = theta + 1j * theta.flip(0)
    hermitian = square + square.mH
    contestants: dict[str, Work] = {
        "build": lambda: cold_spectrum(image_maps(n, action)),
        "apply": lambda: hard_filtered(found, theta),
        "eigh": lambda: (torch.linalg.eigh(hermitian), torch.linalg.eigh(hermitian)),
    }
    if find_spec("scipy"):
        contestants["schur"] = lambda: schur_rule(cold_generator(n, action), theta.numpy(), CUTOFF)
    times = race(contestants, rounds, at_least)
    return SpectrumCost(n, action, svd=svd_seconds(rep, theta)[0] if svd else None, **times)


def tensor_maps(case: str) -> Hom:
    """Linear maps between tensors of one rank."""
    group, rank = TENSOR_CASES[case]
    return tensor(group, rank) >> tensor(group, rank)


def dense_over_ours(case: str, rounds: int = 3) -> float | None:
    """How many times longer the SVD takes on maps of tensors; None where it is refused for its size."""
    rep = tensor_maps(case)
    try:
        slow = seconds(lambda: dense_spectrum(rep))
    except TooLargeError:
        return None
    return slow / race({"ours": lambda: cold_spectrum(tensor_maps(case))}, rounds, 0.0)["ours"]


# --- models


def training_step(
    model: nn.Module, x: Tensor, y: Tensor, objective: Objective = plain, transform: Transform | None = None
) -> Work:
    """One step of AdamW on one batch of labelled pictures, as a function; weights in project mode are held."""
    model = model.to(x.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if projected_weights(model):
        hold(model, optimizer)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        batch = (x, y) if transform is None else transform(x, y, generator)
        objective(model, *batch, nn.functional.cross_entropy, generator).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference(model: nn.Module, x: Tensor) -> Work:
    """One forward pass in eval mode, as a function."""
    model = model.to(x.device).eval()

    def ask() -> Tensor:
        with torch.no_grad():
            return tensor_of(model(x))

    return ask


def soft_variants(build: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """A model as it is, soft in both modes, and baked."""
    return {
        "plain": build(),
        "parametrize": soften(build(), SO(2), softness=SOFTNESS),
        "project": soften(build(), SO(2), softness=SOFTNESS, mode="project"),
        "baked": bake(soften(build(), SO(2), softness=SOFTNESS)),
    }


def soft_ratios(
    build: Callable[[], nn.Module], x: Tensor, y: Tensor, *, rounds: int, compiled: bool = False
) -> dict[str, tuple[float, float]]:
    """A training step and an inference of each variant against the plain model."""
    models = soft_variants(build)
    if compiled:
        for model in models.values():
            model.compile()
    training = ratios({name: training_step(model, x, y) for name, model in models.items()}, "plain", rounds)
    answers = ratios({name: inference(model, x) for name, model in models.items()}, "plain", rounds)
    return {name: (training[name], answers[name]) for name in models}


def small_models(pixels: int) -> dict[str, Callable[[], nn.Module]]:
    """A ViT and a ResNet with random weights that train on any machine; they need transformers."""
    transformers: Any = importlib.import_module("transformers")
    vit = transformers.ViTConfig(
        image_size=pixels, patch_size=8, hidden_size=192, num_hidden_layers=4, num_attention_heads=3,
        intermediate_size=768, num_labels=10,
    )  # fmt: skip
    resnet = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return {
        "ViT, 4 layers of 192": lambda: cast(nn.Module, transformers.ViTForImageClassification(vit)),
        "ResNet-18, half as wide": lambda: cast(nn.Module, transformers.ResNetForImageClassification(resnet)),
    }
