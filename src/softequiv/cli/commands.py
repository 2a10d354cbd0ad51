"""The commands: each opens what it is given, calls one function of the library, and returns the answer.

Those that train and time stand in files of their own, and are all of them here once this one is imported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import RenderableType
from rich.text import Text
from torch import nn

from softequiv._files import made_folder
from softequiv.adapt import bake, plan
from softequiv.adapt.opening import refuse_occupied, save_model
from softequiv.adapt.soften import carry_out
from softequiv.certify import Certificate, StatisticalCertificate, certify
from softequiv.cli import doctor, experiments, options, sweeps, tables, training
from softequiv.cli.app import Answer, app, command
from softequiv.cli.given import asked, opened, opened_for_moves, own_group, read_certificate, read_group, read_range
from softequiv.errors import SoftEquivError
from softequiv.measure import measure
from softequiv.nn import Mode, soft_weights
from softequiv.reps import Action
from softequiv.tasks.images import Images, open_images

__all__ = ["app", "experiments", "sweeps", "training"]

GAP_PICTURES = 16  # on which a certificate compares the modelled action with a true one


@command('softequiv plan ./vit --group "SO(2)" --softness 0.8')
def plan_command(
    model: options.Model,
    group: options.Group,
    softness: options.Softness = None,
    error: options.Error = None,
    within: options.Within = None,
    scope: options.Scope = "layer",
    data: options.ScopeData = None,
    limit: options.Most = 256,
    only: options.Only = None,
    skip: options.Skip = None,
    action: options.ActionName = "exact",
    image_size: options.ImageSize = None,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Show what soften would do.

    List the weights that it would filter, those that it would leave alone and why, and the strides and borders that
    break the symmetry.
    """
    arguments = asked(group, softness, error, within, only, skip, action, scope, data)
    net = opened(model, trust_remote_code)
    found = plan(net, image_size=image_size, data=some_pictures(data, net, image_size, limit), **arguments)
    return Answer(tables.plan_entries(found), tables.plan_shown(found))


@command('softequiv soften ./vit --group "SO(2)" --error 0.2 --within 30deg -o soft/')
def soften_command(
    model: options.Model,
    group: options.Group,
    out: options.NewFolder,
    softness: options.Softness = None,
    error: options.Error = None,
    within: options.Within = None,
    scope: options.Scope = "layer",
    data: options.ScopeData = None,
    limit: options.Most = 256,
    mode: options.Mode = "parametrize",
    only: options.Only = None,
    skip: options.Skip = None,
    action: options.ActionName = "exact",
    image_size: options.ImageSize = None,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Filter the weights of a model to make it equivariant.

    Write the soft model to a folder, together with a recipe that records what was done.
    """
    arguments = asked(group, softness, error, within, only, skip, action, scope, data)
    refuse_occupied(out)
    net = opened(model, trust_remote_code)
    found = plan(net, image_size=image_size, data=some_pictures(data, net, image_size, limit), **arguments)
    carry_out(net, found, cast(Mode, mode))
    save_model(net, out)
    last = Text(f"written to {out}; next: softequiv certify {out}")
    return Answer({**tables.plan_entries(found), "mode": mode, "out": str(out)}, (*tables.plan_shown(found), last))


@command("softequiv certify soft/ -o certificate.json")
def certify_command(
    model: options.Model,
    group: options.OwnGroup = None,
    within: options.OwnRange = None,
    action: options.ActionName = "exact",
    images: options.SomeImages = None,
    data: options.HeldOut = None,
    confidence: options.Confidence = None,
    size: options.Size = None,
    limit: options.Limit = None,
    seed: options.CertificateSeed = None,
    out: options.CertificateFile = None,
    verify: options.VerifiedFile = None,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Certify how equivariant a model is.

    Bound the change of every filtered weight under any element of the range. With --data, bound the change of the
    answers instead, on average over pictures like those given and over elements of the range, with the stated
    confidence. With --verify, check an existing certificate against the model, and exit with code 1 if it does not
    hold; one over data needs the same --data, --size and --limit.
    """
    if verify is not None:
        if action != "exact" or any(given is not None for given in (group, within, images, confidence, seed, out)):
            raise typer.BadParameter("--verify takes everything from the certificate; leave the other options out")
        return verified(verify, model, trust_remote_code, data, size, limit)
    if data is None and confidence is not None:
        raise typer.BadParameter("--confidence belongs to --data, the held-out pictures")
    if data is not None and (images is not None or action != "exact"):
        raise typer.BadParameter("--images and --action are for a certificate of weights, --data for answers; give one")
    asked_group, asked_range = read_group(group), read_range(within)
    net = opened(model, trust_remote_code, wide=data is not None)
    asked_group = asked_group or own_group(net)
    if data is not None:
        pictures = open_images(data, net, size=size, limit=limit, seed=seed or 0)
        sure = 0.99 if confidence is None else confidence
        of_data = certify(net, asked_range, asked_group, data=pictures, confidence=sure, seed=seed or 0)
        return kept(of_data, json.loads(of_data.to_json()), tables.statistical_shown(of_data), out)
    some = None
    if images is not None:
        shown = open_images(images, net, size=size, limit=GAP_PICTURES, seed=seed or 0, batch=GAP_PICTURES)
        some = pictures_of(shown)[0]
    found = certify(net, asked_range, asked_group, action=cast(Action, action), images=some)
    return kept(found, tables.certificate_entries(found), tables.certificate_shown(found), out)


def verified(
    file: Path, model: str, trust_remote_code: bool, data: Path | None, size: int | None, limit: int | None
) -> Answer:
    """Whether the certificate in a file holds for a model."""
    certificate = read_certificate(file)
    net = opened(model, trust_remote_code, wide=isinstance(certificate, StatisticalCertificate))
    if isinstance(certificate, Certificate):
        if any(given is not None for given in (data, size, limit)):
            raise typer.BadParameter("this certificate is of weights; leave --data, --size and --limit out")
        result = certificate.verify(net)
        style = "green" if result.ok else "red"
        return Answer(dataclasses.asdict(result), (Text(str(result), style=style),), 0 if result.ok else 1)
    if data is None:
        raise typer.BadParameter("this certificate is over data; give the same pictures with --data")
    pictures = open_images(data, net, size=size, limit=limit, seed=certificate.seed)
    changes = certificate.differences(net, pictures)
    told = "not verified:\n  " + "\n  ".join(changes) if changes else "verified: same weights, pictures and figures"
    entries = {"ok": not changes, "changes": list(changes)}
    return Answer(entries, (Text(told, style="red" if changes else "green"),), 1 if changes else 0)


def kept(
    found: Certificate | StatisticalCertificate,
    entries: Mapping[str, Any],
    shown: tuple[RenderableType, ...],
    out: Path | None,
) -> Answer:
    """A certificate as an answer, and in its file where there is to be one."""
    if out is None:
        return Answer(entries, shown)
    made_folder(out.parent)
    found.save(out)
    return Answer({**entries, "out": str(out)}, (*shown, Text(f"written to {out}")))


def some_pictures(folder: Path | None, net: nn.Module, size: int | None, limit: int) -> Images | None:
    """The pictures of a folder, if one was given."""
    return None if folder is None else open_images(folder, net, size=size, limit=limit)


def pictures_of(images: Images) -> tuple[Any, Any]:
    """The first batch as (pictures, labels or None)."""
    batch = next(iter(images))
    return batch if isinstance(batch, tuple) else (batch, None)


@command("softequiv measure soft/ --data pictures/ --within 30deg")
def measure_command(
    model: options.Model,
    data: options.Data,
    group: options.OwnGroup = None,
    within: options.OwnRange = None,
    elements: options.Elements = 4,
    jacobians: options.Jacobians = 16,
    batch_size: options.BatchSize = 32,
    size: options.Size = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Measure how a model's answers change as pictures move.

    Move the pictures of a folder by elements of the group, and print each figure with a 95% interval.
    """
    net, asked_group, asked_range = opened_for_moves(model, trust_remote_code, group, within)
    images = open_images(data, net, size=size, limit=limit, seed=seed, batch=batch_size)
    found = measure(
        *(net, images, asked_group, asked_range),
        elements=elements,
        batch_size=batch_size,
        jacobians=jacobians,
        seed=seed,
    )
    found = dataclasses.replace(found, notes=(*found.notes, *images.notes))
    return Answer(found.to_dict(), tables.measurement_shown(found))


@command("softequiv bake soft/ -o plain/")
def bake_command(model: options.Model, out: options.NewFolder, trust_remote_code: options.TrustCode = False) -> Answer:
    """Turn a soft model back into a plain one.

    Write the filtered weights under their original names, so that transformers or timm can open the folder.
    """
    refuse_occupied(out)
    net = opened(model, trust_remote_code)
    names = [weight.name for weight in soft_weights(net)]
    if not names:
        raise SoftEquivError(f"{model} has no soft weights, so there is nothing to bake; soften it first")
    save_model(bake(net), out)
    return Answer(
        {"weights": names, "out": str(out)}, (Text(f"{len(names)} weights baked; a plain model is in {out}"),)
    )


@command("softequiv report soft/ --data pictures/ -o report.html")
def report_command(
    model: options.Model,
    data: options.Data,
    out: options.Page = Path("report.html"),
    group: options.OwnGroup = None,
    within: options.OwnRange = None,
    size: options.Size = None,
    limit: options.Most = 64,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustCode = False,
) -> Answer:
    """Write a report as one HTML page.

    It has a slider for softness, the certificate, the measurements, and the layers that cause the error. The page
    loads nothing from the network.
    """
    from softequiv import report

    net, asked_group, asked_range = opened_for_moves(model, trust_remote_code, group, within)
    images = open_images(data, net, size=size, limit=limit, seed=seed, batch=limit)
    pictures, labels = pictures_of(images)
    settings = {"opened": model, "pictures from": str(data), "seed": str(seed)}
    settings |= {"remark": "; ".join(images.notes)} if images.notes else {}
    found = report.build(net, pictures, labels, group=asked_group, within=asked_range, settings=settings)
    report.write_report(out, found)
    notes = [Text(note) for note in images.notes]
    return Answer(
        {"out": str(out), "pictures": len(pictures), "notes": list(images.notes)},
        (*notes, Text(f"written to {out}: open it in a browser")),
    )


@command("softequiv demo")
def demo_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")] = Path("demo"),
    seed: options.Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Run in seconds; the figures mean nothing.")] = False,
) -> Answer:
    """Run the whole workflow on digits, in a minute or two.

    Train a small model, soften, certify and measure it, compare it with alternatives, and write a report; offline.
    """
    from softequiv.experiments import demo

    page = demo.run(folder, seed=seed, quick=quick)
    return Answer({"out": str(page)}, ())  # it has told its story while it went


@command("softequiv doctor")
def doctor_command() -> Answer:
    """Check the installation.

    List versions, devices, extras and the data folder, and soften and certify a small layer.
    """
    from softequiv.experiments.base import data_root

    versions, devices, extras = doctor.versions(), doctor.devices(), doctor.extras()
    data, test = data_root().resolve(), doctor.self_test()
    found = data.is_dir()
    entries = {
        "ok": test.ok,
        "versions": versions,
        "devices": devices,
        "extras": {
            extra.name: {"present": extra.present, "versions": extra.versions, "install": extra.install}
            for extra in extras
        },
        "data": {"folder": str(data), "found": found},
        "self_test": {"ok": test.ok, "asked": test.asked, "certified": test.certified, "problem": test.problem},
    }
    rows = [*versions.items()]
    rows += [("device", device) for device in devices]
    for extra in extras:
        having = ", ".join(f"{name} {version or 'missing'}" for name, version in extra.versions.items())
        rows.append((f"extra {extra.name}", having if extra.present else f"{having}: {extra.install}"))
    rows.append(("data", f"{data}" if found else f"not found at {data}; only experiments need it: set SOFTEQUIV_DATA"))
    shown = (tables.table(("what", "found"), rows), Text(str(test), style="bold green" if test.ok else "bold red"))
    return Answer(entries, shown, 0 if test.ok else 1)
