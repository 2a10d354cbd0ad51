"""Which arguments do commands share? Their names, forms and help, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or timm:name.", show_default=False)]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let the model run Python files of its own.")]

Group = Annotated[str, typer.Option("--group", "-g", help="The group: SO(2), C18, D4, Reflection.", show_default=False)]
OwnGroup = Annotated[
    str | None, typer.Option("--group", "-g", help="The group: SO(2), C18, D4; by default the soft model's own.")
]
Within = Annotated[str | None, typer.Option("--within", "-w", help="The range: 30deg, 0.5rad, or a path length.")]
OwnRange = Annotated[
    str | None,
    typer.Option("--within", "-w", help="The range: 30deg, 0.5rad; by default the model's target, else all of it."),
]
Softness = Annotated[float | None, typer.Option("--softness", "-s", help="The dial: 0 is equivariant, 1 unchanged.")]
Error = Annotated[float | None, typer.Option("--error", "-e", help="The most that a weight may change; with --within.")]
Scope = Annotated[
    str,
    typer.Option("--scope", help="layer: --error is for each weight; network: for the answers, a KL on --data."),
]
ScopeData = Annotated[
    Path | None, typer.Option("--data", "-d", help="With --scope network: the pictures to measure it on.")
]
Mode = Annotated[
    str, typer.Option("--mode", help="parametrize filters in the forward pass, project keeps plain modules.")
]
Only = Annotated[list[str] | None, typer.Option("--only", help="A weight or pattern to soften; repeat for more.")]
Skip = Annotated[list[str] | None, typer.Option("--skip", help="A weight or pattern to leave alone; repeat for more.")]
ActionName = Annotated[str, typer.Option("--action", help="How the group turns a grid of pixels.")]
ImageSize = Annotated[int | None, typer.Option("--image-size", help="Check the geometry at this size.", min=1)]

NewFolder = Annotated[Path, typer.Option("--out", "-o", help="The folder to write; it must be new.")]
CertificateFile = Annotated[Path | None, typer.Option("--out", "-o", help="Write the certificate as JSON.")]
VerifiedFile = Annotated[Path | None, typer.Option("--verify", help="Does this certificate hold for the model?")]
Page = Annotated[Path, typer.Option("--out", "-o", help="The page to write.")]

Data = Annotated[
    Path, typer.Option("--data", "-d", help="A folder of pictures; folders in it are classes.", show_default=False)
]
SomeImages = Annotated[Path | None, typer.Option("--images", help="Compare the modelled action on these pictures.")]
HeldOut = Annotated[
    Path | None,
    typer.Option("--data", "-d", help="Certify the answers, on average over pictures like these held-out ones."),
]
Confidence = Annotated[
    float | None, typer.Option("--confidence", help="With --data: how sure; 0.99 if not given.", show_default=False)
]
Size = Annotated[int | None, typer.Option("--size", help="Side of the pictures, instead of the model's own.", min=1)]
Limit = Annotated[int | None, typer.Option("--limit", help="Take so many pictures, drawn at random.", min=1)]
Most = Annotated[int, typer.Option("--limit", help="Take at most so many pictures, drawn at random.", min=1)]
Elements = Annotated[int, typer.Option("--elements", help="Group elements drawn for every picture.", min=1)]
Jacobians = Annotated[
    int, typer.Option("--jacobians", help="Pictures for the relative error, the slow figure; 0 leaves it out.", min=0)
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Pictures at a time.", min=1)]
Seed = Annotated[int, typer.Option("--seed", help="The seed of everything random.")]
CertificateSeed = Annotated[
    int | None, typer.Option("--seed", help="The seed of pictures and elements; 0 if not given.", show_default=False)
]

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
    Path, typer.Option("--out", "-o", help="The folder to write; the same command goes on from what it finds there.")
]
SomeGroup = Annotated[
    str | None,
    typer.Option("--group", "-g", help="The group: SO(2), C18, D4; by default the soft model's own, else SO(2)."),
]
Turn = Annotated[
    str | None, typer.Option("--turn", "-t", help="Train on pictures moved within this range, such as 30deg.")
]
Penalty = Annotated[
    float, typer.Option("--penalty", help="The price of answers that differ for moved pictures.", min=0)
]
Hold = Annotated[
    float | None, typer.Option("--hold", help="Hold the KL of answers for moved pictures at this target.", min=0)
]
Augment = Annotated[
    str | None,
    typer.Option(
        "--augment", help="Vary training pictures: crop, flip, randaugment, erase, mixup, cutmix; joined by commas."
    ),
]
NewHead = Annotated[bool, typer.Option("--new-head", help="Replace the last layer by one for the data's classes.")]
Epochs = Annotated[
    int | None, typer.Option("--epochs", help="How often the pictures are gone through, in whole batches.", min=1)
]
Batch = Annotated[int | None, typer.Option("--batch", help="Pictures a step and process.", min=1)]
Rate = Annotated[float | None, typer.Option("--rate", help="The learning rate at its highest.", min=0)]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe", help="Settings of the training as JSON, the others being as usual; options given beside it win."
    ),
]
TrainSeed = Annotated[int | None, typer.Option("--seed", help="The seed of splits, order, turns and new head.", min=0)]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write the log for TensorBoard as well.")]

ExperimentName = Annotated[str | None, typer.Argument(metavar="NAME", help="T1, T1b, ...; see --list.")]
ExperimentList = Annotated[bool, typer.Option("--list", help="Show what can be reproduced.")]
ScaleName = Annotated[str, typer.Option("--scale", help="smoke: seconds; small: a workstation; full: as in the paper.")]
Results = Annotated[Path, typer.Option("--out", "-o", help="The folder of pages, figures and finished cells.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Cells side by side, each in a process.", min=1)]
Unfinished = Annotated[
    bool, typer.Option("--unfinished", help="Compute nothing; write the page from the cells that are there.")
]
On = Annotated[str, typer.Option("--on", help="Where cells are computed: here, or ray, a cluster.")]
Address = Annotated[
    str | None, typer.Option("--address", help="The Ray cluster: HOST:PORT or auto; by default one started here.")
]
CellCPUs = Annotated[float, typer.Option("--cpus", help="CPUs for each cell on Ray.", min=0)]
CellGPUs = Annotated[float, typer.Option("--gpus", help="GPUs for each cell on Ray; 0.5 shares one.", min=0)]
Retries = Annotated[
    int, typer.Option("--retries", help="How often a cell on Ray runs again that lost its worker.", min=0)
]
Compiled = Annotated[bool, typer.Option("--compiled", help="Time compiled models as well; compiling takes minutes.")]
