"""Which arguments do commands share? Their names, forms and help, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or timm:NAME.", show_default=False)]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let the model run Python code of its own.")]

Group = Annotated[str, typer.Option("--group", "-g", help="Group, such as SO(2), C18 or D4.", show_default=False)]
OwnGroup = Annotated[
    str | None, typer.Option("--group", "-g", help="Group: SO(2), C18, D4, ...; default: that of the soft model.")
]
Within = Annotated[str | None, typer.Option("--within", "-w", help="Range: 30deg, 0.5rad, or a path length.")]
OwnRange = Annotated[
    str | None,
    typer.Option(
        "--within", "-w", help="Range: 30deg, 0.5rad, ...; default: that of the model's error target, else all."
    ),
]
Softness = Annotated[float | None, typer.Option("--softness", "-s", help="From 0 (equivariant) to 1 (unchanged).")]
Error = Annotated[
    float | None, typer.Option("--error", "-e", help="Largest relative change of a weight; needs --within.")
]
Scope = Annotated[
    str,
    typer.Option(
        "--scope", help="What --error limits. layer: each weight; network: the KL of the answers, measured on --data."
    ),
]
ScopeData = Annotated[Path | None, typer.Option("--data", "-d", help="With --scope network: a folder of pictures.")]
Mode = Annotated[
    str,
    typer.Option(
        "--mode", help="parametrize: filter in every forward pass; project: filter plain weights after every step."
    ),
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Soften only this weight or pattern; repeatable.")]
Skip = Annotated[list[str] | None, typer.Option("--skip", help="Leave this weight or pattern alone; repeatable.")]
ActionName = Annotated[str, typer.Option("--action", help="How pixels turn: exact, su2, central or bilinear.")]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Check the geometry at this picture size.", min=1)]

NewFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must be new.")]
CertificateFile = Annotated[Path | None, typer.Option("--out", "-o", help="Write the certificate to this JSON file.")]
VerifiedFile = Annotated[Path | None, typer.Option("--verify", help="Check this certificate file against the model.")]
Page = Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")]

Data = Annotated[
    Path, typer.Option("--data", "-d", help="A folder of pictures; sub-folders are classes.", show_default=False)
]
SomeImages = Annotated[
    Path | None,
    typer.Option("--images", help="Compare the rotation in the certificate with a true one on these pictures."),
]
HeldOut = Annotated[
    Path | None, typer.Option("--data", "-d", help="Certify the answers, using this folder of held-out pictures.")
]
Confidence = Annotated[
    float | None, typer.Option("--confidence", help="Confidence, with --data; default: 0.99.", show_default=False)
]
Size = Annotated[int | None, typer.Option("--size", help="Side of the pictures; default: the model's own.", min=1)]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Use so many pictures, drawn at random; default: all.", min=1)
]
Most = Annotated[int, typer.Option("--limit", help="Use at most so many pictures, drawn at random.", min=1)]
Elements = Annotated[int, typer.Option("--elements", help="Group elements drawn for each picture.", min=1)]
Jacobians = Annotated[
    int, typer.Option("--jacobians", help="Pictures for the relative error, which is slow; 0 leaves it out.", min=0)
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Pictures in a batch.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
CertificateSeed = Annotated[int | None, typer.Option("--seed", help="Random seed; default: 0.", show_default=False)]

TrainData = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        help="A folder of pictures in class folders, or mnist:PATH, cifar10:PATH, cifar100:PATH, camvid:PATH, "
        "voc:PATH, ade20k:PATH, masks:PATH, hub:NAME.",
        show_default=False,
    ),
]
TrainFolder = Annotated[
    Path, typer.Option("--out", "-o", help="Folder to write; run the same command again to resume a training.")
]
SomeGroup = Annotated[
    str | None,
    typer.Option("--group", "-g", help="Group: SO(2), C18, D4, ...; default: that of the soft model, else SO(2)."),
]
Turn = Annotated[
    str | None, typer.Option("--turn", "-t", help="Move training pictures within this range, such as 30deg.")
]
Penalty = Annotated[
    float, typer.Option("--penalty", help="Strength of a penalty on answers that change with moves.", min=0)
]
Hold = Annotated[
    float | None,
    typer.Option("--hold", help="Hold the KL between answers to original and moved pictures at this target.", min=0),
]
Augment = Annotated[
    str | None,
    typer.Option("--augment", help="More augmentation, by commas: crop, flip, randaugment, erase, mixup, cutmix."),
]
NewHead = Annotated[bool, typer.Option("--new-head", help="Replace the last layer by one for the data's classes.")]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="Number of epochs; incomplete batches are left out.", min=1)
]
Batch = Annotated[int | None, typer.Option("--batch", help="Pictures in a step, for each process.", min=1)]
Rate = Annotated[float | None, typer.Option("--rate", help="Highest learning rate.", min=0)]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="JSON file of training settings; other options override it.")
]
TrainSeed = Annotated[
    int | None, typer.Option("--seed", help="Random seed of splits, order, moves and a new head.", min=0)
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write the log for TensorBoard.")]

ExperimentName = Annotated[str | None, typer.Argument(metavar="NAME", help="Experiment, such as T1; see --list.")]
ExperimentList = Annotated[bool, typer.Option("--list", help="List the experiments.")]
ScaleName = Annotated[str, typer.Option("--scale", help="smoke: seconds; small: a workstation; full: as in the paper.")]
Results = Annotated[Path, typer.Option("--out", "-o", help="Folder of pages, figures and finished cells.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Cells to compute at once, each in its own process.", min=1)]
Unfinished = Annotated[
    bool, typer.Option("--unfinished", help="Compute nothing; write the page from the finished cells.")
]
On = Annotated[str, typer.Option("--on", help="Where to compute cells: here, or ray (a cluster).")]
Address = Annotated[
    str | None, typer.Option("--address", help="Ray cluster: HOST:PORT, or auto; default: start one on this machine.")
]
CellCPUs = Annotated[float, typer.Option("--cpus", help="CPUs for each cell on Ray.", min=0)]
CellGPUs = Annotated[float, typer.Option("--gpus", help="GPUs for each cell on Ray; 0.5 shares one.", min=0)]
Retries = Annotated[int, typer.Option("--retries", help="Retries of a cell on Ray whose worker was lost.", min=0)]
Compiled = Annotated[bool, typer.Option("--compiled", help="Also time compiled models; compiling takes minutes.")]
