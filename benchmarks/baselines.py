"""What does each baseline cost beside ours? Numbers to learn, training step and inference as ratios to the plain model.

All networks have as many feature maps, and take turns on one batch of random pictures, float32, AdamW; medians. On a
GPU batches are larger. `--json PATH` writes the figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from softequiv.experiments.costs import Cost, image_costs, tensor_costs, track_costs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, PIXELS, ROUNDS, CHANNELS = (256, 64, 30, 384) if DEVICE == "cuda" else (16, 32, 15, 128)


def line(cost: Cost) -> str:
    training = "as plain" if cost.training is None else f"{cost.training:.2f}"
    return f"| {cost.name} | {cost.against} | {cost.parameters:,} | {training} | {cost.inference:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = [
        *image_costs(BATCH, PIXELS, ROUNDS, device=DEVICE),
        *tensor_costs(4 * BATCH, CHANNELS, ROUNDS, DEVICE),
        *track_costs(4 * BATCH, 64, ROUNDS, DEVICE),
    ]
    print("| network | against | numbers to learn | training step | inference |\n|---|---|---|---|---|")
    print("\n".join(map(line, found)))
    told = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": BATCH,
        "pixels": PIXELS,
        "rounds": ROUNDS,
        "rows": [asdict(cost) for cost in found],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
