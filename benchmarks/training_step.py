"""What does a soft model cost to train? Time of a training step as a ratio to the unmodified model, in one run.

Batch 128, 224 pixels, bf16 autocast, AdamW, every filterable weight softened under SO(2); plain and soft models take
turns, so that a drift of the clock meets all alike, ten steps at a time, as training does not wait for each. Beside the
wall clock, the time that the GPU's kernels take: where the first ratio is larger, the GPU waits for Python. Needs
`transformers`; on a CPU it runs tiny sizes, to check that it works. `--json PATH` writes the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Collection
from operator import truediv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
)

import softequiv as se
from softequiv.experiments.speed import turns
from softequiv.nn import SoftLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SIZE, ROUNDS, AT_A_TIME = (128, 224, 12, 10) if DEVICE == "cuda" else (2, 64, 3, 1)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ViT-B/16": lambda: ViTForImageClassification(ViTConfig(image_size=SIZE, num_labels=1000)),
    "DINOv2-B": lambda: Dinov2ForImageClassification(Dinov2Config(image_size=518, num_labels=1000)),
    "ResNet-50": lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
    "SegFormer-B0": lambda: SegformerForSemanticSegmentation(SegformerConfig(num_labels=21)),
}


LINEAR = "SoftLinear"
WAYS = ("parametrize", "project", "baked", "target", "target, project")


def told(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def stepper(model: nn.Module, compiled: bool) -> Callable[[], None]:
    """One training step on random data, as a function."""
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    if any(weight.filtered.mode == "project" for weight in se.soft_weights(model)):
        se.hold(model, optimizer)
    pixels = torch.randn(BATCH, 3, SIZE, SIZE, device=DEVICE)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits: Tensor = forward(pixel_values=pixels).logits
        loss = logits.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def kernel_time(step: Callable[[], None], steps: int = 3) -> float:
    """Seconds that the GPU computes in one step."""
    if DEVICE != "cuda":
        return float("nan")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step()
        synchronise()
    return sum(event.device_time_total for event in trace.key_averages()) / 1e6 / steps


def repeated(step: Callable[[], None], count: int) -> Callable[[], None]:
    """Several steps as one function."""

    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def ratios(build: Callable[[], nn.Module], compiled: bool, ways: Collection[str]) -> dict[str, float]:
    """Median time of a step for every variant, divided by the plain model's, in alternating rounds."""
    variants: dict[str, Callable[[], nn.Module]] = {
        "plain": build,
        "parametrize": lambda: se.soften(build(), "SO(2)", softness=0.5),
        "project": lambda: se.soften(build(), "SO(2)", softness=0.5, mode="project"),
        "baked": lambda: se.bake(se.soften(build(), "SO(2)", softness=0.5)),
        "target": lambda: se.soften(build(), "SO(2)", error=0.2, within="30deg"),
        "target, project": lambda: se.soften(build(), "SO(2)", error=0.2, within="30deg", mode="project"),
    }
    steps = {}
    for name in [name for name in variants if name == "plain" or name in ways]:
        steps[name] = stepper(variants[name](), compiled)
        for _ in range(5 if DEVICE == "cuda" else 1):
            steps[name]()
    times = turns({name: repeated(step, AT_A_TIME) for name, step in steps.items()}, ROUNDS)
    base = statistics.median(times["plain"])
    kernels = {name: kernel_time(step) for name, step in steps.items()}
    return (
        {"milliseconds": 1e3 * base / AT_A_TIME, "kernel milliseconds": 1e3 * kernels["plain"]}
        | {name: statistics.median(map(truediv, t, times["plain"])) for name, t in times.items()}
        | {f"{name}, kernels": t / kernels["plain"] for name, t in kernels.items()}
    )


def linear_ratio(tokens: int, compiled: bool) -> dict[str, tuple[float, float]]:
    """Equivariant SoftLinear 768 -> 768 with multiplicities against nn.Linear, forward and backward, many at a time."""
    out = {}
    x = torch.randn(tokens, 768, device=DEVICE, requires_grad=True)
    for label, group, space in [
        ("SO(3), 192 scalars + 192 vectors", se.SO(3), lambda g: 192 * se.scalar(g) + 192 * se.vector(g)),
        ("C4, 192 regular", se.C(4), lambda g: 192 * se.regular(g)),
        ("SO(2), 256 scalars + 256 vectors", se.SO(2), lambda g: 256 * se.scalar(g) + 256 * se.vector(g)),
    ]:
        rep = space(group)
        layers = {"plain": nn.Linear(768, 768).to(DEVICE), "soft": SoftLinear(rep, rep).to(DEVICE)}
        if compiled:
            layers = {name: torch.compile(layer) for name, layer in layers.items()}
        steps = {name: lambda layer=layer: layer(x).sum().backward() for name, layer in layers.items()}
        many = {name: repeated(step, 10 * AT_A_TIME) for name, step in steps.items()}
        times = {name: taken[2:] for name, taken in turns(many, ROUNDS // 2 + 2).items()}  # two to warm up
        wall = statistics.median(times["soft"]) / statistics.median(times["plain"])
        out[label] = (wall, kernel_time(steps["soft"]) / kernel_time(steps["plain"]))
    return out


def linear_table(figures: dict[str, object], eager_only: bool) -> None:
    """Print and keep the ratios of a SoftLinear, at both precisions of products."""
    print("\nSoftLinear 768 to 768 on 25,000 tokens, float32, forward and backward, ratio to nn.Linear:\n")
    print("| precision | run | representation | wall | kernels |\n|---|---|---|---|---|")
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for compiled in (False,) if eager_only or DEVICE == "cpu" else (False, True):
            run = "compiled" if compiled else "eager"
            figures[f"linear {precision} {run}"] = found_linear = linear_ratio(25_000, compiled)
            for label, (wall, kernels) in found_linear.items():
                print(f"| {precision} | {run} | {label} | {wall:.3f} | {kernels:.3f} |", flush=True)
            torch._dynamo.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=[*MODELS, LINEAR], choices=[*MODELS, LINEAR])
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--eager-only", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    figures: dict[str, object] = {"device": device, "torch": torch.__version__, "batch": BATCH, "pixels": SIZE}
    print(f"training step, batch {BATCH}, {SIZE} pixels, {device}\n")
    print(f"| model | run | plain (ms) | {' | '.join(WAYS)} | kernels (ms) | parametrize | project |")
    print("|" + "---|" * (6 + len(WAYS)))
    for name in [name for name in arguments.models if name in MODELS]:
        for compiled in (False,) if arguments.eager_only or DEVICE == "cpu" else (False, True):
            run = "compiled" if compiled else "eager"
            figures[f"{name} {run}"] = found = ratios(MODELS[name], compiled, arguments.ways)
            cells = " | ".join(told(found.get(key)) for key in WAYS)
            kernels = " | ".join(told(found.get(f"{key}, kernels")) for key in ("parametrize", "project"))
            print(
                f"| {name} | {run} | {found['milliseconds']:.1f} | {cells} "
                f"| {found['kernel milliseconds']:.1f} | {kernels} |",
                flush=True,
            )
            with contextlib.suppress(AttributeError):
                torch._dynamo.reset()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    if LINEAR in arguments.models:
        linear_table(figures, arguments.eager_only)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
