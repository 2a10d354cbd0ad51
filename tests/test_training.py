"""Does the loop train, choose, save and resume as it says? A run cut anywhere ends as if it had not been."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from softequiv._files import HOST
from softequiv.actions import Moves, Pictures, Still
from softequiv.errors import SoftEquivError
from softequiv.experiments.backbones import ResNet56
from softequiv.holding import GainLimit, HeldByMeasurement, limit_gain
from softequiv.tasks.base import Examples, Held, Task
from softequiv.tasks.classification import Classification
from softequiv.training import Recipe, fit, saved
from softequiv.training.average import Average
from softequiv.training.loop import plain
from softequiv.training.parameters import head_names, parameter_groups

STILL = Moves(Still(), se.C(1))


@dataclass(frozen=True)
class Numbers(Task):
    """A small regression, whose score is minus its error."""

    score = "error"
    sign = -1

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(answers, targets)

    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            errors = [self.loss(model(x), y) * len(y) for x, y in examples.batches(batch)]
        return {"error": float(sum(errors)) / len(examples)}


def numbers(count: int = 64) -> Numbers:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 5, 5, generator=generator)
    y = x.flatten(1) @ torch.randn(25, 3, generator=generator)
    held = Held(x, y)
    return Numbers(held, held.part(torch.arange(count // 2)), held)


def network(mode: str | None = None) -> nn.Module:
    torch.manual_seed(1)
    parts = nn.Conv2d(1, 8, 5), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 3)
    net = nn.Sequential(*parts)
    return se.soften(net, "SO(2)", softness=0.5, mode=mode) if mode else net


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


class KilledError(Exception):
    pass


def killing(at: int) -> Callable[[int], None]:
    def kill(step: int) -> None:
        if step == at:
            raise KilledError

    return kill


@pytest.mark.parametrize("mode", [None, "parametrize", "project"])
@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "sgd", "rate": 0.01}, {"ema": 0.9, "accumulate": 2, "clip": 1.0}]
)
def test_a_run_cut_anywhere_ends_as_if_it_had_not_been(tmp_path, mode, changes):
    recipe = replace(Recipe(epochs=3, batch=8, rate=1e-2, save_every=2, seed=3), **changes)
    whole = network(mode)
    expected = fit(whole, numbers(), recipe, STILL)
    for at in (1, 3, 8, 11):
        folder = tmp_path / str(at)
        with pytest.raises(KilledError):
            fit(network(mode), numbers(), recipe, STILL, folder=folder, after_step=[killing(at)])
        again = network(mode)
        found = fit(again, numbers(), recipe, STILL, folder=folder)
        assert same(weights(again), weights(whole)), at
        assert found.history == expected.history
        lines = (folder / "log.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected.history


def test_what_the_objective_and_later_calls_remember_is_taken_up_too(tmp_path):
    recipe = Recipe(epochs=3, batch=8, rate=1e-2, save_every=2)

    def parts(net: nn.Module) -> tuple[HeldByMeasurement, GainLimit]:
        moves = Moves(Pictures(), se.C(4))
        held = HeldByMeasurement(moves, target=1e-3, divergence="squared")
        return held, limit_gain(net, 1.0)

    whole, again = network(), network()
    price, limit = parts(whole)
    fit(whole, numbers(), recipe, STILL, objective=price, after_step=[limit])
    cut = network()
    first, second = parts(cut)
    with pytest.raises(KilledError):
        fit(cut, numbers(), recipe, STILL, objective=first, after_step=[second, killing(11)], folder=tmp_path)
    later, last = parts(again)
    fit(again, numbers(), recipe, STILL, objective=later, after_step=[last, killing(0)], folder=tmp_path)
    assert later.price == price.price > 0
    assert same(weights(again), weights(whole))


def test_a_finished_run_is_not_trained_again(tmp_path):
    recipe = Recipe(epochs=2, batch=16, rate=1e-2)
    first, second = network(), network()
    fit(first, numbers(), recipe, STILL, folder=tmp_path)
    steps: list[int] = []
    fit(second, numbers(), recipe, STILL, folder=tmp_path, after_step=[steps.append])
    assert steps == []
    assert same(weights(first), weights(second))


def test_what_a_killed_process_left_of_a_saved_training_is_cleared(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, living = (tmp_path / f".training.safetensors.{HOST}.{pid}.0a1b2c3d.part" for pid in (gone.pid, os.getppid()))
    left.touch()
    living.touch()
    fit(network(), numbers(), Recipe(epochs=1, batch=16, rate=1e-2), STILL, folder=tmp_path)
    assert living.exists() and not left.exists()


def test_the_best_model_on_the_validation_examples_is_kept():
    task, net = numbers(), network()
    recipe = Recipe(epochs=30, batch=16, rate=0.3, schedule="constant")  # too fast to get better every time
    fitted = fit(net, task, recipe, STILL)
    errors = [line["error"] for line in fitted.history]
    assert fitted.best == errors.index(min(errors)) < len(errors) - 1
    assert task.figures(net, task.validation, STILL)["error"] == pytest.approx(min(errors))


@pytest.mark.parametrize(
    ("overs", "errors", "best"),
    [
        ([3.0, 0.15, 0.1, -0.5], [0.1, 0.5, 0.4, 0.6], 2),  # the best of those that keep it
        ([3.0, 0.9, 1.5], [0.1, 0.5, 0.4], 1),  # none does: the nearest
    ],
)
def test_of_a_held_target_the_weights_that_keep_it_come_first(overs, errors, best):
    class Priced:
        over = math.nan

        def __call__(self, *arguments) -> Tensor:
            return plain(*arguments)

    @dataclass(frozen=True)
    class Known(Numbers):
        def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
            return {"error": next(told)}

    told, measured, objective, task = iter(errors), iter(overs), Priced(), numbers()
    fitted = fit(
        network(),
        Known(task.train, task.validation, task.test),
        Recipe(epochs=len(overs), batch=64, rate=1e-2),
        STILL,
        objective=objective,
        after_step=[lambda _: setattr(objective, "over", next(measured))],
    )
    assert fitted.best == best
    assert [line["over the target"] for line in fitted.history] == overs


def test_the_last_model_is_kept_on_request_and_the_average_is_the_average():
    task, recipe = numbers(), Recipe(epochs=2, batch=16, rate=1e-2, keep="last", ema=0.5)
    seen: list[dict[str, Tensor]] = []
    net = network()
    start = weights(net)
    fit(net, task, recipe, STILL, after_step=[lambda _: seen.append(weights(net))])
    average = start["0.weight"]
    for taken, step in enumerate(seen, 1):
        decay = min(0.5, (1 + taken) / (10 + taken))
        average = decay * average + (1 - decay) * step["0.weight"]
    assert torch.allclose(net.state_dict()["0.weight"], average, atol=1e-6)


def test_an_average_forgets_the_first_weights_in_a_short_training():
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    average = Average(net, 0.999)
    nn.init.zeros_(net.weight)
    for step in range(1, 51):
        average.update(step)
    assert average.values["weight"].item() < 1e-4


def test_what_is_dropped_out_does_not_depend_on_how_a_picture_was_varied():
    draws: list[tuple[Tensor, Tensor]] = []

    def varied(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        draws.append((torch.rand(16, generator=generator), torch.rand(16)))
        return x, y

    fit(network(), numbers(), Recipe(epochs=1, batch=16), STILL, transform=varied)
    assert not any(torch.equal(*pair) for pair in draws)
    assert len({tuple(numbers.tolist()) for pair in draws for numbers in pair}) == 2 * len(draws)


def test_a_training_leaves_what_its_caller_draws_next_alone():
    net = network()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fit(net, numbers(), Recipe(epochs=1, batch=16), STILL)
    assert torch.equal(torch.rand(3), expected)


def test_accumulated_batches_are_one_large_batch():
    def trained(batch: int, parts: int) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(25, 3))
        fit(net, numbers(), Recipe(epochs=2, batch=batch, accumulate=parts, rate=0.1, keep="last"), STILL)
        return net[1].weight.detach()

    assert torch.allclose(trained(16, 1), trained(4, 4), atol=1e-5)


def test_constraints_hold_after_training_in_project_mode():
    net = network("project")
    fit(net, numbers(), Recipe(epochs=3, batch=8, rate=1e-1), STILL)
    kernel = net[0].weight.detach()
    se.project(net)
    assert torch.allclose(net[0].weight, kernel, atol=1e-6)
    assert not torch.allclose(kernel, network("project")[0].weight, atol=1e-2)


def test_the_rate_rises_and_falls():
    recipe = Recipe(epochs=10, warmup=2, schedule="cosine")
    rates = [recipe.factor(t / 10, 0.1) for t in range(1, 101)]
    assert max(rates) == 1.0 and rates[0] == pytest.approx(0.05)
    assert all(a >= b for a, b in itertools.pairwise(rates[20:]))
    assert rates[-1] < 0.01


def test_layers_below_learn_more_slowly_and_vectors_do_not_decay():
    net = nn.ModuleDict({"start": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])})
    net["end"] = nn.Linear(2, 2)
    groups = parameter_groups(net, Recipe(rate=1.0, layer_decay=0.5, head_rate=7.0, weight_decay=0.1))
    rate = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    decay = {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}
    assert [rate[id(net["blocks"][i].weight)] for i in range(3)] == [0.125, 0.25, 0.5]
    assert rate[id(net["start"].weight)] == 0.0625 and rate[id(net["end"].weight)] == 7.0
    assert decay[id(net["end"].bias)] == 0.0 and decay[id(net["end"].weight)] == 0.1


def rates_of(model: nn.Module, decay: float = 0.65) -> dict[str, float]:
    """The rate of every weight by its name, in the order in which they stand."""
    groups = parameter_groups(model, Recipe(rate=1.0, layer_decay=decay))
    rates = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    return {name: rates[id(weight)] for name, weight in model.named_parameters()}


def vit() -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=3, **sizes))


def dinov2() -> nn.Module:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(num_hidden_layers=3, **sizes))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [2, 3]}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes))


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [8] * 4, "depths": [1, 2, 1, 1], "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes))


def regnet() -> nn.Module:
    """Squeeze and excitation has two layers of its own, in the middle of a block."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 8}
    return transformers.RegNetForImageClassification(transformers.RegNetConfig(**sizes))


class DenseNet(nn.Module):
    """Numbers at the end of names, as timm has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.denseblock1, self.denseblock2 = nn.Conv2d(3, 4, 3), nn.Module(), nn.Module()
        for block in (self.denseblock1, self.denseblock2):
            for number in (1, 2):
                layer = nn.Module()
                layer.conv1, layer.conv2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)
                block.add_module(f"denselayer{number}", layer)
        self.classifier = nn.Linear(4, 2)


def mobilenet() -> nn.Module:
    """Its stem and its blocks are one row, as in torchvision's MobileNetV3."""

    def block() -> nn.Module:
        inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Sequential(nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)))
        return nn.ModuleDict({"block": inner.append(nn.Conv2d(4, 4, 1))})

    features = nn.Sequential(nn.Conv2d(3, 4, 3), block(), block())
    return nn.ModuleDict({"features": features, "classifier": nn.Linear(4, 2)})


# by model: the stem, the blocks from the first to the last, and what stands behind the last
LAID_OUT: dict[str, tuple[Callable[[], nn.Module], list[str], list[str], list[str]]] = {
    "ViT": (vit, ["vit.embeddings"], [f"vit.layers.{i}" for i in range(3)], ["vit.layernorm"]),
    "DINOv2": (dinov2, ["dinov2.embeddings"], [f"dinov2.encoder.layer.{i}" for i in range(3)], ["dinov2.layernorm"]),
    "ResNet": (
        resnet,
        ["resnet.embedder"],
        [f"resnet.encoder.stages.{i}.layers.{j}" for i, depth in ((0, 2), (1, 3)) for j in range(depth)],
        [],
    ),
    "RegNet": (
        regnet,
        ["regnet.embedder"],
        [f"regnet.encoder.stages.{i}.layers.{j}" for i, j in ((0, 0), (1, 0), (1, 1))],
        [],
    ),
    "DenseNet": (DenseNet, ["conv0"], [f"denseblock{i}.denselayer{j}" for i in (1, 2) for j in (1, 2)], []),
    "MobileNetV3": (mobilenet, ["features.0"], ["features.1", "features.2"], []),
    "ResNet-56": (ResNet56, ["conv1", "bn1"], [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(9)], []),
    "SegFormer": (
        segformer,
        ["segformer.stages.0.patch_embeddings"],
        [f"segformer.stages.{i}.blocks.{j}" for i, j in ((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))],
        [
            "segformer.stages.3.layer_norm",
            "decode_head.linear_projections",
            "decode_head.linear_fuse",
            "decode_head.batch_norm",
        ],
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("softened", [False, True])
def test_rates_rise_block_by_block_from_the_stem_to_the_head(name, softened):
    build, stem, blocks, behind = LAID_OUT[name]
    model = build()
    if softened:
        se.soften(model, "C4", softness=0.5)
    rates = rates_of(model)

    def rates_in(place: str) -> set[float]:
        return {rate for own, rate in rates.items() if own.startswith(f"{place}.")}

    below = len(blocks)
    for place, steps in (
        *((place, below + 1) for place in stem),
        *((place, below - number) for number, place in enumerate(blocks)),
        *((place, 1) for place in behind),
        (head_names(model)[0], 0),
    ):
        assert rates_in(place) == {0.65**steps}, place
    assert [*rates.values()] == sorted(rates.values())


def test_a_parametrised_weight_of_the_model_itself_is_of_the_stem_and_not_the_head():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(2, 2))
            self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.head = nn.Linear(2, 2)

    net = Net()
    nn.utils.parametrize.register_parametrization(net, "positions", nn.Identity())
    assert head_names(net) == ["head"]
    assert rates_of(net, 0.5)["parametrizations.positions.original"] == 0.125


def test_the_rate_of_the_head_is_that_of_both_heads_and_not_of_an_auxiliary_one_alone():
    names = ("body", "head", "head_dist", "auxiliary_head")
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    groups = parameter_groups(net, Recipe(rate=1.0, head_rate=7.0))
    rate = {id(weight): group["lr"] for group in groups for weight in group["params"]}
    assert [rate[id(net[name].weight)] for name in names] == [1.0, 7.0, 7.0, 7.0]
    assert head_names(nn.ModuleDict({"aux_classifier": nn.Linear(2, 2)})) == ["aux_classifier"]  # nothing else answers
    net.num_classes, net["head"] = 3, nn.Linear(2, 3)
    assert head_names(net) == ["head"]


def test_layers_in_a_row_are_blocks_where_there_are_none_larger():
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2, 2)
    net = nn.Sequential(*layers)
    rates = rates_of(net, 0.5)
    assert [rates[f"{place}.weight"] for place in (0, 1, 3, 5)] == [0.25, 0.25, 0.5, 1.0]
    assert set(rates_of(nn.Linear(2, 2), 0.5).values()) == {1.0}


@pytest.mark.parametrize("mode", [None, "parametrize", "project"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_halves_are_trained_in_float32(mode, precision):
    net, task = network(mode).half(), numbers()
    with pytest.warns(UserWarning, match="the weights are float16; float32 is used instead"):
        fitted = fit(net, task, Recipe(epochs=2, batch=16, rate=1e-2, precision=precision), STILL)
    tensors = [*net.parameters(), *net.buffers()]
    assert {value.dtype for value in tensors if value.is_floating_point()} == {torch.float32}
    assert math.isfinite(fitted.history[-1]["error"])


def test_data_in_half_precision_follow_their_model():
    x = torch.randn(32, 2).to(torch.bfloat16)
    held = Held(x, (x[:, 0] > 0).long())
    with pytest.warns(UserWarning, match="the weights are bfloat16"):
        fit(nn.Linear(2, 2).to(torch.bfloat16), Classification(held, held, held, classes=2), Recipe(epochs=1), STILL)


def test_float64_stays():
    net, task = plain_network().double(), numbers()
    wide = Held(task.train.inputs.double(), task.train.targets.double())
    fit(net, Numbers(wide, wide, wide), Recipe(epochs=1), STILL)
    assert {value.dtype for value in net.parameters()} == {torch.float64}


def test_bf16_leaves_a_plain_model_behind():
    net = network()
    fit(net, numbers(), Recipe(epochs=1, batch=16, precision="bf16"), STILL)
    assert net.forward.__func__ is nn.Sequential.forward
    assert net(torch.zeros(2, 1, 5, 5)).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs is a whole number from 1; got 0"),
        ({"batch": 1.5}, "batch is a whole number from 1; got 1.5"),
        ({"rate": -1.0}, "rate lies between 0 and inf; got -1.0"),
        ({"rate": float("nan")}, "rate lies between"),
        ({"warmup": 20.0}, "warmup lies between 0 and 10; got 20.0"),
        ({"optimizer": "lion"}, "optimizer is one of adamw, adam, sgd; got 'lion'"),
        ({"ema": 2.0}, "ema lies between 0 and 1"),
        ({"epoch": 3}, "no setting 'epoch'; did you mean epochs?"),
        ({"save_every": 0}, "save_every is a whole number from 1"),
        ({"rate": float("inf")}, "rate lies between 0 and inf; got inf"),
        ({"ema": 1.0}, "an average with ema = 1 stays at the first weights"),
        ({"clip": 0.0}, "gradients clipped to 0 teach nothing"),
        ({"seed": 2**70}, "seed lies below"),
    ],
)
def test_recipes_that_make_no_sense_are_answered_by_a_sentence(settings, words):
    with pytest.raises(SoftEquivError, match=words.replace("(", r"\(").replace("?", r"\?")):
        Recipe.of(settings)


@pytest.mark.parametrize("text", ["", "[1]", "{epochs: 3}", '{"epochs": "three"}'])
def test_a_recipe_that_cannot_be_read_is_answered_by_a_sentence(text):
    with pytest.raises(SoftEquivError):
        Recipe.parse(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "model must be a torch module; got NoneType"),
        ({"task": 3}, "got int instead of Task"),
        ({"recipe": {"epochs": 1}}, "got dict instead of Recipe"),
        ({"moves": None}, "got NoneType instead of Moves"),
        ({"folder": 3}, "a path is a text"),
    ],
)
def test_what_is_no_training_is_answered_by_a_sentence(given, words):
    usual = {"model": network(), "task": numbers(), "recipe": Recipe(epochs=1), "moves": STILL}
    with pytest.raises(SoftEquivError, match=words):
        fit(**{**usual, **given})


def test_a_folder_is_named_by_a_text_and_is_no_file(tmp_path):
    recipe = Recipe(epochs=1, batch=16)
    fit(network(), numbers(), recipe, STILL, folder=str(tmp_path / "out"))
    assert (tmp_path / "out" / "training.safetensors").is_file()
    with pytest.raises(SoftEquivError, match=r"log\.jsonl cannot be made a folder"):
        fit(network(), numbers(), recipe, STILL, folder=tmp_path / "out" / "log.jsonl")


def test_other_settings_do_not_take_up_a_saved_run(tmp_path):
    fit(network(), numbers(), Recipe(epochs=1), STILL, folder=tmp_path)
    with pytest.raises(SoftEquivError, match="other settings \\(rate\\)"):
        fit(network(), numbers(), Recipe(epochs=1, rate=0.5), STILL, folder=tmp_path)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_saved_run_that_cannot_be_read_is_answered_by_a_sentence(tmp_path, content):
    (tmp_path / "training.safetensors").write_bytes(content)
    with pytest.raises(SoftEquivError, match="no saved training that can be read"):
        fit(network(), numbers(), Recipe(epochs=1), STILL, folder=tmp_path)


def test_a_loss_that_is_no_number_is_answered_by_a_sentence():
    with pytest.raises(SoftEquivError, match="the loss became"):
        fit(network(), numbers(), Recipe(epochs=40, batch=8, rate=1e8, optimizer="sgd"), STILL)


def test_a_frozen_model_is_answered_by_a_sentence():
    with pytest.raises(SoftEquivError, match="no weight of this model learns"):
        fit(network().requires_grad_(False), numbers(), Recipe(epochs=1), STILL)


def test_few_examples_are_shared_out_evenly():
    recipe = Recipe(epochs=2, batch=64, rate=1e-2)
    one, two = plain_network(), plain_network()
    fit(one, numbers(6), recipe, STILL)
    fit(two, numbers(6), replace(recipe, accumulate=2), STILL)  # of 3, not of 6 and none
    for name, value in weights(one).items():
        assert torch.allclose(value, weights(two)[name], atol=1e-5), name
    with pytest.raises(SoftEquivError, match=r"a step of 7 batches .* needs 7 examples, and there are 6"):
        fit(network(), numbers(6), replace(recipe, accumulate=7), STILL)


def plain_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 3))


class Shared(nn.Module):
    """One layer under two names, and one that no loss touches before it is `late`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.idle = nn.Linear(25, 25), nn.Linear(25, 3), nn.Linear(25, 3)
        self.second = self.first
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.flatten(1)).relu())
        return self.last(x) + self.idle(x) if self.late else self.last(x)


def test_shared_weights_come_back_after_their_average_was_worn():
    recipe = Recipe(epochs=4, batch=16, rate=1e-2, ema=0.5, keep="last")
    often, once = Shared(), Shared()
    fit(often, numbers(), recipe, STILL)
    fit(once, numbers(), replace(recipe, evaluate_every=4), STILL)
    assert same(weights(often), weights(once))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_is_taken_up_whose_loss_has_not_touched_every_weight(tmp_path, optimizer):
    recipe = Recipe(epochs=3, batch=16, rate=1e-2, save_every=1, optimizer=optimizer)

    def waking(net: Shared) -> Callable[[int], None]:
        def wake(step: int) -> None:
            net.late = step >= 8

        return wake

    whole, cut, again = Shared(), Shared(), Shared()
    fit(whole, numbers(), recipe, STILL, after_step=[waking(whole)])
    with pytest.raises(KilledError):
        fit(cut, numbers(), recipe, STILL, folder=tmp_path, after_step=[waking(cut), killing(6)])
    fit(again, numbers(), recipe, STILL, folder=tmp_path, after_step=[waking(again)])
    assert same(weights(again), weights(whole))


def cut_from(path: Path, name: str) -> None:
    """Take a part of its tensors, or what is told under a name, out of a saved training."""
    parts, told = saved.read(path)
    *outer, last = name.split("/")
    place: dict[str, object] = {"parts": parts, "told": told}
    for step in outer:
        place = place[step]  # type: ignore[assignment]
    del place[last]
    saved.write(path, parts, told)


@pytest.mark.parametrize(
    "name",
    [
        *("told/recipe", "told/standing", "told/optimizer", "told/optimizer/param_groups", "told/step/batches"),
        *("parts/model", "parts/optimizer", "parts/average", "parts/best"),
    ],
)
def test_what_a_saved_run_lacks_is_said(tmp_path, name):
    recipe = Recipe(epochs=2, batch=8, ema=0.9)
    fit(network(), numbers(), recipe, STILL, folder=tmp_path)
    cut_from(tmp_path / "training.safetensors", name)
    words = rf"no saved training that can be read \(.*{name.split('/')[-1]}.*\); remove it to start anew"
    with pytest.raises(SoftEquivError, match=words):
        fit(network(), numbers(), recipe, STILL, folder=tmp_path)


@pytest.mark.parametrize("told", [3, [], {"recipe": 3}, {"recipe": []}])
def test_a_saved_run_that_tells_something_else_is_answered_by_a_sentence(tmp_path, told):
    saved.write(tmp_path / "training.safetensors", {"model": {"0": torch.zeros(1)}}, told)
    with pytest.raises(SoftEquivError, match="no saved training that can be read"):
        fit(network(), numbers(), Recipe(epochs=1), STILL, folder=tmp_path)


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        (network, lambda: numbers(32), "training examples, validation examples"),
        (plain_network, numbers, "another model"),
        (lambda: frozen_below(network()), numbers, "learning weights are others"),
    ],
)
def test_another_model_or_other_data_do_not_take_up_a_saved_run(tmp_path, model, task, words):
    recipe = Recipe(epochs=2, batch=8)
    fit(network(), numbers(), recipe, STILL, folder=tmp_path)
    before = (tmp_path / "training.safetensors").read_bytes()
    with pytest.raises(SoftEquivError, match=words):
        fit(model(), task(), recipe, STILL, folder=tmp_path)
    assert (tmp_path / "training.safetensors").read_bytes() == before


def frozen_below(net: nn.Module) -> nn.Module:
    net[0].requires_grad_(False)  # type: ignore[index, operator]
    return net


def test_a_full_disk_is_answered_by_a_sentence_and_the_last_save_stays(tmp_path, monkeypatch):
    recipe = Recipe(epochs=2, batch=16, rate=1e-2)
    whole, again = network(), network()
    expected = fit(whole, numbers(), recipe, STILL)
    written = saved.save_file

    def fills(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
        if (tmp_path / "training.safetensors").exists():
            file.write_bytes(b"half of it")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        written(tensors, file, metadata=metadata)

    monkeypatch.setattr(saved, "save_file", fills)
    with pytest.raises(SoftEquivError, match=r"No space left on device.*make room on the disk and start again"):
        fit(network(), numbers(), recipe, STILL, folder=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.jsonl", "training.safetensors"]
    monkeypatch.setattr(saved, "save_file", written)
    assert fit(again, numbers(), recipe, STILL, folder=tmp_path).history == expected.history
    assert same(weights(again), weights(whole))


def test_a_run_that_fails_gives_the_model_back_as_it_came():
    net = network()
    with pytest.raises(KilledError):
        fit(net, numbers(), Recipe(epochs=1, batch=16, precision="bf16"), STILL, after_step=[killing(1)])
    assert "forward" not in net.__dict__ and not net.training


def test_a_score_that_is_no_number_is_not_the_best():
    @dataclass(frozen=True)
    class Wild(Numbers):
        def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
            seen.append(super().figures(model, examples, moves, batch=batch)["error"])
            return {"error": seen[-1] if len(seen) > 1 else math.nan}

    seen: list[float] = []
    task = numbers()
    fitted = fit(network(), Wild(task.train, task.validation, task.test), Recipe(epochs=3, rate=1e-2), STILL)
    assert fitted.best == 1 + seen[1:].index(min(seen[1:]))
