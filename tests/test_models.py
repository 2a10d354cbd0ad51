"""What must hold for every model family, group, gain and mode: one matrix of cases through shared behaviours.

The families are small configurations of the real classes (zoo.py). Every behaviour sees a part of the matrix, and no
two behaviours the same part.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import logging
import os
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
import transformers
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import softequiv as se
from leaving import leave_together
from softequiv.nn import Layout, Soft, SoftLinear, SoftWeight, soften_weight
from zoo import CASES, Case, answer

EXACT = 1e-5  # float32 rounding through a few layers, relative to the largest score
SAME_LOSS = 1e-5  # two processes add in another order
ERROR, WITHIN = 0.1, {"SO(2)": se.degrees(30), "Reflection": 1.0}  # quarter turns for the rest
QUARTER = se.degrees(90)

GROUPS = ("C4", "SO(2)", "D4", "Reflection")
GAINS = ("softness 0", "softness .5", "softness 1", "smooth", "error")
MODES = ("parametrize", "project")

Cell = tuple[str, str, str, str]


def matrix(part: int, parts: int, gains: tuple[str, ...] = GAINS) -> list[Any]:
    """Every `parts`-th cell of family x group x gain x mode, from `part` on."""
    cells: list[Cell] = list(itertools.product(CASES, GROUPS, gains, MODES))
    return [pytest.param(cell, id="-".join(cell).replace(" ", "")) for cell in cells[part::parts]]


def within(group: str) -> float:
    return WITHIN.get(group, QUARTER)


def arguments(group: str, gain: str) -> dict[str, Any]:
    """The gain as `soften` takes it."""
    if gain == "error":
        return {"error": ERROR, "within": within(group)}
    if gain == "smooth":
        return {"gain": se.smooth(0.5, 1.0)}
    return {"softness": float(gain.split()[1])}


def softened(case: Case, group: str = "C4", gain: str = "softness 0", mode: str = "parametrize") -> nn.Module:
    return se.soften(case.model(), group, grids=case.grids, mode=mode, **arguments(group, gain))  # type: ignore


def soft_cell(cell: Cell) -> tuple[Case, nn.Module]:
    name, group, gain, mode = cell
    return CASES[name], softened(CASES[name], group, gain, mode)


def optimiser(model: nn.Module, kind: Any = torch.optim.Adam, lr: float = 1e-3) -> torch.optim.Optimizer:
    """An optimiser that keeps the constraints; `hold` does nothing to a parametrised model."""
    made: torch.optim.Optimizer = kind(model.parameters(), lr=lr)
    se.hold(model, made)
    return made


def step(model: nn.Module, made: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    made.zero_grad()
    loss = nn.functional.mse_loss(answer(model, x), target)
    loss.backward()
    made.step()
    return loss.item()


def target_for(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.randn(answer(model, x).shape, generator=torch.Generator().manual_seed(2))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def turned(x: Tensor) -> Tensor:
    return x.rot90(1, (-2, -1))


def turn_error(case: Case, model: nn.Module, size: int, **kwargs: Any) -> float:
    """How far the answer is from turning as it should with the picture, relative to its size."""
    x = case.input(size)
    with torch.no_grad():
        before, after = answer(model, x, **kwargs), answer(model, turned(x), **kwargs)
    expected = turned(before) if case.turns == "with the picture" else before
    return float((after - expected).abs().max() / before.abs().max())


def certified(weight: SoftWeight, group: str) -> float:
    return se.spectrum(weight.soft.rep).error(weight.group_view(), within(group))


# shared behaviours, each on its part of the matrix


@pytest.mark.parametrize("cell", matrix(0, 11))
def test_forward_is_pure(cell: Cell) -> None:
    case, model = soft_cell(cell)
    before, x = tensors_of(model), case.input()
    with torch.no_grad():
        answers = [answer(model, x) for _ in range(3)]
    assert equal(before, tensors_of(model))
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", ["softness .5", "error"])
def test_a_thousand_passes_change_no_bit(mode: str, gain: str) -> None:
    case = CASES["mlp"]
    model, x = softened(case, "SO(2)", gain, mode), case.input(batch=1)
    before = tensors_of(model)
    with torch.no_grad():
        for _ in range(1000):
            model(x)
    assert equal(before, tensors_of(model))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_softness_one_is_the_original_bit_for_bit(name: str, mode: str) -> None:
    case = CASES[name]
    for group in GROUPS:
        model, plain, x = softened(case, group, "softness 1", mode), case.model(), case.input()
        assert equal({k: v.detach() for k, v in se.stored_tensors(model).items()}, sorted_like(model, plain))
        assert all(torch.equal(weight.value(), weight.stored) for weight in se.soft_weights(model))
        with torch.no_grad():
            assert torch.equal(answer(model, x), answer(plain, x))


def sorted_like(model: nn.Module, plain: nn.Module) -> dict[str, Tensor]:
    values = tensors_of(plain)
    return {name: values[name] for name in se.stored_tensors(model)}


@pytest.mark.parametrize("cell", matrix(1, 11))
def test_state_dict_is_the_same_in_train_and_eval(cell: Cell) -> None:
    _, model = soft_cell(cell)
    trained = tensors_of(model.train())
    assert equal(trained, tensors_of(model.eval()))
    assert sum(value.numel() for value in trained.values()) == sum(
        v.numel() for v in CASES[cell[0]].model().state_dict().values()
    )


@pytest.mark.parametrize("cell", matrix(2, 9))
def test_training_reduces_a_loss(cell: Cell) -> None:
    case, model = soft_cell(cell)
    x, made = case.input(), optimiser(model)
    target = target_for(model, x)
    losses = [step(model, made, x, target) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cell", matrix(3, 11))
def test_a_deep_copy_is_independent(cell: Cell) -> None:
    case, model = soft_cell(cell)
    x, before, twin = case.input(), tensors_of(model), copy.deepcopy(model)
    with torch.no_grad():
        expected = answer(model, x)
        assert torch.equal(answer(twin, x), expected)
    step(twin, optimiser(twin, lr=0.1), x, target_for(twin, x))
    assert equal(before, tensors_of(model))
    with torch.no_grad():
        assert torch.equal(answer(model, x), expected)
        assert not torch.equal(answer(twin, x), expected)


@pytest.mark.parametrize("cell", matrix(4, 11))
def test_baking_gives_the_plain_model_back(cell: Cell) -> None:
    case, model = soft_cell(cell)
    x, plain, before = case.input(), case.model(), tensors_of(model)
    with torch.no_grad():
        expected = answer(model, x)
        baked = se.bake(model, copy=True)
        assert torch.equal(answer(baked, x), expected)
        assert torch.equal(answer(model, x), expected)  # the original is still soft and working
    assert equal(before, tensors_of(model))
    assert next(se.soft_weights(model), None) is not None
    assert next(se.soft_weights(baked), None) is None
    assert [type(m) for m in baked.modules()] == [type(m) for m in plain.modules()]
    assert [(n, v.dtype, v.shape) for n, v in baked.state_dict().items()] == [
        (n, v.dtype, v.shape) for n, v in plain.state_dict().items()
    ]


@pytest.mark.parametrize("cell", matrix(7, 21))
def test_a_baked_model_can_be_pickled(cell: Cell) -> None:
    case, model = soft_cell(cell)
    # before any forward pass, in which transformers adds hooks to some families that nothing can pickle
    restored = pickle.loads(pickle.dumps(se.bake(model, copy=True)))
    with torch.no_grad():
        assert torch.equal(answer(restored, case.input()), answer(model, case.input()))


@pytest.mark.parametrize("cell", matrix(5, 11))
def test_save_and_load_give_the_same_model(cell: Cell, tmp_path: Path) -> None:
    case, model = soft_cell(cell)
    se.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "softequiv.json"]
    loaded = se.load(case.model(), tmp_path)
    assert equal(tensors_of(model), tensors_of(loaded))
    assert [(w.name, w.soft, w.filtered.mode) for w in se.soft_weights(model)] == [
        (w.name, w.soft, w.filtered.mode) for w in se.soft_weights(loaded)
    ]
    with torch.no_grad():
        assert torch.equal(answer(model, case.input()), answer(loaded, case.input()))
    assert equal(tensors_of(se.load(model, tmp_path)), tensors_of(loaded))  # into a model that is soft already


@pytest.mark.parametrize("cell", matrix(6, 11))
def test_stock_checkpoints_load_into_soft_models_and_back(cell: Cell) -> None:
    case, model = soft_cell(cell)
    stock = {name: torch.randn_like(v) if v.is_floating_point() else v for name, v in case.model().state_dict().items()}
    for name in stock:
        if "running_var" in name:
            stock[name] = stock[name].abs() + 0.5
    se.load_tensors(model, stock)
    name, group, gain, mode = cell
    if mode == "parametrize":
        assert all(torch.equal(value, stock[name]) for name, value in se.stored_tensors(model).items())
    if gain in ("softness 0", "error"):
        limit = ERROR if gain == "error" else 0.0
        assert max(certified(weight, group) for weight in se.soft_weights(model)) <= limit + EXACT
    plain = case.model()
    plain.load_state_dict({name: value.detach() for name, value in se.stored_tensors(model).items()}, strict=True)


# exactness, and where geometry prevents it


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["C4", "D4"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact_at])
def test_softness_zero_turns_exactly_where_geometry_allows(name: str, group: str, mode: str) -> None:
    case = CASES[name]
    size = case.exact_at
    assert size is not None
    plan = se.plan(case.model(), group, softness=0.0, grids=case.grids, image_size=size)
    assert plan.uneven == () and plan.note == ""
    assert turn_error(case, softened(case, group, "softness 0", mode), size) < EXACT
    assert turn_error(case, case.model(), size) > 100 * EXACT  # the plain model does not


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact_at is None])
def test_families_that_no_size_makes_exact_say_what_spoils_it(name: str) -> None:
    case = CASES[name]
    assert case.spoiler
    assert turn_error(case, softened(case), case.size) > 100 * EXACT
    plan = str(se.plan(case.model(), "C4", softness=0.0, image_size=case.size))
    expected = {
        "dinov3": "rotary positions are fixed functions of row and column",
        "segformer-stock": "stride 4 leaves 3 of 32 pixels out on one side",
        "swin-merging": "merges 2 x 2 neighbours and is not filtered",
        "swin-odd-window": "windows of 3 are shifted by 1",
        "strips": "C4 turns squares, and (7, 1) is not one",
    }
    assert expected[name] in plan


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.uneven_at and case.exact_at])
def test_the_plan_warns_where_geometry_does_not_allow_it(name: str) -> None:
    case = CASES[name]
    plan = se.plan(case.model(), "C4", softness=0.0, image_size=case.uneven_at)
    assert plan.uneven
    names = dict(case.model().named_modules())
    for uneven in plan.uneven:
        assert uneven.name in names
        assert "cannot turn with the picture" in str(uneven)
    if name not in ("vit", "deit"):  # these refuse other sizes
        assert case.uneven_at is not None
        assert turn_error(case, softened(case), case.uneven_at) > 10 * EXACT


def test_resnet_at_224_and_225() -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 4, 4, 4], depths=[1, 1, 1, 1])
    model = transformers.ResNetForImageClassification(config)
    uneven = se.plan(model, "C4", softness=0.0, image_size=224).uneven
    assert uneven[0].name == "resnet.embedder.embedder.convolution"
    assert "stride 2 leaves 1 of 224 pixels out" in str(uneven[0]) and "223 or 225" in str(uneven[0])
    assert se.plan(model, "C4", softness=0.0, image_size=225).uneven == ()


def test_patch_14_at_512_and_518() -> None:
    config = transformers.Dinov2Config(
        image_size=518, patch_size=14, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, mlp_ratio=1
    )
    model = transformers.Dinov2Model(config)
    (uneven,) = se.plan(model, "C4", softness=0.0, image_size=512).uneven
    assert uneven.name == "embeddings.patch_embeddings.projection"
    assert "stride 14 leaves 8 of 512 pixels out" in str(uneven) and "504 or 518" in str(uneven)
    assert se.plan(model, "C4", softness=0.0).uneven == ()  # the size in its config


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ([nn.Conv2d(3, 3, 4, padding="same")], "'same' padding is 1 before and 2 after"),
        ([nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 3, 3, stride=2)], "padded by 0 before and 1 after"),
        ([nn.ZeroPad2d((0, 3, 0, 3)), nn.ReLU()], "padded by 0 before and 3 after"),
        ([nn.Conv2d(3, 3, 3, padding=1), nn.AvgPool2d(3)], "stride 3 leaves 1 of 16 pixels out"),
        ([nn.Conv2d(3, 3, 3, padding=1), nn.AvgPool2d(32, ceil_mode=True)], None),
        ([nn.ZeroPad2d(1), nn.Conv2d(3, 3, 3)], None),
        ([nn.Conv2d(3, 3, 3, padding="same")], None),
        ([nn.Conv2d(3, 3, 3, padding="valid", dilation=2)], None),
    ],
)
def test_lopsided_padding_is_seen(layers: list[nn.Module], sentence: str | None) -> None:
    plan = se.plan(nn.Sequential(*layers, nn.Conv2d(3, 3, 3, padding=1)), "C4", softness=0.0, image_size=16)
    assert plan.note == ""
    assert [sentence in str(uneven) for uneven in plan.uneven] == ([] if sentence is None else [True])


def test_a_dry_run_that_stops_keeps_what_it_saw() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(7, 5))
    plan = se.plan(model, "C4", softness=0.0, image_size=32)
    assert [uneven.name for uneven in plan.uneven] == ["0"]
    assert "not checked to the end at 32 pixels" in plan.note


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_leaves_no_trace(name: str) -> None:
    """Not in the model (Swin shrinks its windows to a small picture), nor in caches that models share (DINOv3)."""
    case = CASES[name]
    model, twin, x = case.model().train(), case.model().train(), case.input()
    state = {key: (type(value), str(value)) for key, value in attributes(model).items()}
    se.plan(model, "C4", softness=0.0, grids=case.grids, image_size=case.size)
    se.plan(model, "C4", softness=0.0, grids=case.grids, image_size=8)
    assert {key: (type(value), str(value)) for key, value in attributes(model).items()} == state
    assert equal(tensors_of(model), tensors_of(twin)) and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(answer(model.eval(), x), answer(twin.eval(), x))


def attributes(model: nn.Module) -> dict[str, object]:
    """What modules remember besides tensors and modules."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, (int, float, str, tuple, list))
    }


@pytest.mark.parametrize(("name", "size"), [("vit", 30), ("vit", 35), ("deit", 32), ("dinov2", 70)])
def test_positions_keep_working_at_another_resolution(name: str, size: int) -> None:
    case = CASES[name]
    kwargs = {} if name == "dinov2" else {"interpolate_pos_encoding": True}
    assert turn_error(case, softened(case), size, **kwargs) < EXACT
    assert turn_error(case, case.model(), size, **kwargs) > 100 * EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "prefix"), [("vit", 1), ("deit", 2), ("dinov2", 1), ("dinov2-registers", 1)])
def test_class_and_register_tokens_are_untouched(name: str, prefix: int, mode: str) -> None:
    case = CASES[name]
    plain, baked = tensors_of(case.model()), tensors_of(se.bake(softened(case, mode=mode)))
    (table,) = [key for key in plain if key.endswith("position_embeddings")]
    assert torch.equal(plain[table][:, :prefix], baked[table][:, :prefix])
    assert not torch.equal(plain[table], baked[table])
    tokens = [key for key in plain if key.endswith("token") or key.endswith("tokens")]
    assert tokens and all(torch.equal(plain[key], baked[key]) for key in tokens)


# kernels


def test_a_lazy_layer_may_be_skipped() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(8, 3))
    soft = se.soften(model, "C4", softness=0.0, skip=["1"])
    assert [weight.name for weight in se.soft_weights(soft)] == ["0.weight"]
    assert soft(torch.randn(1, 3, 9, 9)).shape == (1, 8, 5, 5)
    with pytest.raises(se.WeightError, match=r"1\.weight has no shape yet: run the model once"):
        se.certify(nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(8, 3)), group="C4")


def test_kernels_that_are_not_square_stay_and_say_why() -> None:
    case = CASES["strips"]
    plan = se.plan(case.model(), "C4", softness=0.0)
    assert [weight.found.name for weight in plan.weights] == ["0.weight"]
    reasons = {skipped.name: skipped.reason for skipped in plan.skipped}
    assert set(reasons) == {"2.weight", "3.weight"}
    assert "(1, 7)" in reasons["2.weight"] and "(7, 1)" in reasons["3.weight"]
    plain, baked = tensors_of(case.model()), tensors_of(se.bake(softened(case)))
    assert all(torch.equal(plain[key], baked[key]) for key in ("2.weight", "3.weight"))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["cnn", "strips", "convnext"])
def test_channels_are_not_mixed(name: str, group: str) -> None:
    model = softened(CASES[name], group, "softness .5")
    for weight in se.soft_weights(model):
        before = weight.value().detach().clone()
        with torch.no_grad():
            weight.stored[0, 0] += torch.randn_like(weight.stored[0, 0])
        changed = (weight.value() - before).detach().flatten(2).abs().amax(-1) > 1e-6
        assert changed.sum() == 1 and changed[0, 0]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"padding_mode": "circular"},
        {"padding_mode": "reflect"},
        {"padding_mode": "replicate"},
        {"groups": 4},
        {"groups": 8},
        {"dilation": 2, "padding": 4},
        {"bias": False},
        {"stride": 2},
    ],
    ids=str,
)
def test_options_of_a_convolution_are_kept(kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(8, 8, 5, **{"padding": 2, **kwargs})
    model = se.soften(nn.Sequential(copy.deepcopy(plain)), "C4", softness=0.0)
    x = torch.randn(2, 8, 13, 13)
    with torch.no_grad():
        assert torch.allclose(model(turned(x)), turned(model(x)), atol=EXACT)
        plain.weight.copy_(model[0].weight)
        assert torch.equal(plain(x), model(x))


def test_channels_last() -> None:
    for name, mode in itertools.product(("cnn", "resnet", "convnext", "mobilenet-v2"), MODES):
        case = CASES[name]
        x, model = case.input(), softened(case, "C4", "softness .5", mode)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        first = se.soften(case.model().to(memory_format=torch.channels_last), "C4", softness=0.5, mode=mode)
        expected, y = answer(model, x), x.to(memory_format=torch.channels_last)
        for other in (last, first):
            found = answer(other, y)
            found.sum().backward()
            assert torch.allclose(found, expected, atol=EXACT)
            strides = {key: value.stride() for key, value in se.stored_tensors(other).items()}
            baked = se.bake(other, copy=True)
            assert torch.allclose(answer(baked, y), expected, atol=EXACT)
            assert {key: value.stride() for key, value in baked.state_dict().items()} == strides


# training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit", "resnet", "cnn"])
def test_an_average_of_weights_is_soft_too(name: str, mode: str) -> None:
    case = CASES[name]
    model = softened(case, mode=mode)
    x, made = case.input(), optimiser(model)
    target, average = target_for(model, x), AveragedModel(model)
    for _ in range(3):
        step(model, made, x, target)
        average.update_parameters(model)
    size = case.exact_at
    assert size is not None
    assert turn_error(case, average.module.eval(), size) < EXACT
    assert len(list(se.soft_weights(average))) == len(list(se.soft_weights(model)))
    assert not torch.equal(answer(average, x), answer(model, x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit", "dinov2", "swin"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, mode: str) -> None:
    case = CASES[name]
    plain, saving = softened(case, "C4", "softness .5", mode), softened(case, "C4", "softness .5", mode)
    saving.gradient_checkpointing_enable()
    for model in (plain, saving):
        torch.manual_seed(0)
        answer(model.train(), case.input()).square().sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, atol=EXACT)  # type: ignore[arg-type]


def test_checkpointing_a_soft_layer() -> None:
    case = CASES["cnn"]
    model, x = softened(case, "SO(2)", "error"), case.input()
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_training_resumes_where_it_was_saved(name: str, mode: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = softened(case, "C4", "softness .5", mode)
    x, made = case.input(), optimiser(model)
    target = target_for(model, x)
    for _ in range(2):
        step(model, made, x, target)
    se.save(model, tmp_path)
    state = copy.deepcopy(made.state_dict())
    resumed = se.load(case.model(), tmp_path)
    again = optimiser(resumed)
    again.load_state_dict(state)
    assert step(model, made, x, target) == step(resumed, again, x, target)
    assert equal(tensors_of(model), tensors_of(resumed))


def invariant(view: Tensor, weight: SoftWeight) -> Tensor:
    return se.softness(0)(view, weight.soft.rep)


def pulled_away(name: str, group: str, gain: str, mode: str) -> Iterator[float]:
    """The largest certified error of any weight before and after each of twenty steps towards rough weights."""
    model = softened(CASES[name], group, gain, mode)
    weights = list(se.soft_weights(model))
    views = [weight.group_view() for weight in weights]
    noise = [3 * torch.randn(view.shape, generator=torch.Generator().manual_seed(3)) for view in views]
    rough = [r + invariant(view.detach() - r, w) for r, view, w in zip(noise, views, weights, strict=True)]
    made = optimiser(model, torch.optim.SGD, lr=0.1)
    yield max(certified(weight, group) for weight in weights)
    for _ in range(20):
        made.zero_grad()
        torch.stack([(w.group_view() - r).square().sum() for w, r in zip(weights, rough, strict=True)]).sum().backward()
        made.step()
        yield max(certified(weight, group) for weight in weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "group"), [("cnn", "SO(2)"), ("vit", "SO(2)"), ("vit", "C4"), ("swin", "D4")])
def test_an_error_target_holds_after_every_step(name: str, group: str, mode: str) -> None:
    errors = list(pulled_away(name, group, "error", mode))
    assert max(errors) <= ERROR + EXACT
    assert errors[-1] > ERROR / 2  # and the loss did pull


@pytest.mark.parametrize("mode", MODES)
def test_a_smooth_gain_drifts_where_a_target_holds(mode: str) -> None:
    smooth = list(pulled_away("cnn", "SO(2)", "smooth", mode))
    target = list(pulled_away("cnn", "SO(2)", "error", mode))
    assert smooth[-1] > 1.5 * smooth[0] > 1.5 * ERROR
    assert target[-1] <= ERROR + EXACT
    assert max(pulled_away("cnn", "SO(2)", "softness 0", mode)) < EXACT  # hard levels are constraints as well


# precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", ["C4", "SO(2)", "D4"])
@pytest.mark.parametrize("name", ["vit", "cnn", "resnet"])
def test_autocast_filters_in_float32(name: str, group: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    model, x = softened(case, group), case.input()
    weights = list(se.soft_weights(model))
    expected = [weight.value().detach() for weight in weights]
    with torch.autocast("cpu", dtype=dtype):
        for weight, value in zip(weights, expected, strict=True):
            assert torch.equal(weight.value(), value)  # bit for bit, whatever the precision around it
            view = weight.group_view()
            assert (view - turned(view)).norm() < 2e-6 * view.norm()
        found = answer(model, x)
        filtered = [weight.value() for weight in weights]
    assert found.dtype == dtype
    found.float().square().sum().backward()
    for weight, value in zip(weights, filtered, strict=True):
        assert weight.stored.grad is not None and weight.stored.grad.dtype == torch.float32
        gradients = []
        for result in (value, weight.value()):  # the way back, of a filter under autocast and of one outside
            weight.stored.grad = None
            (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
            gradients.append(weight.stored.grad)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("mode", MODES)
def test_half_models_filter_in_float32_and_round_last(mode: str) -> None:
    case = CASES["vit"]
    for model in (
        softened(case, mode=mode).to(torch.bfloat16),
        se.soften(case.model().to(torch.bfloat16), "C4", softness=0.0, mode=mode),  # type: ignore[arg-type]
    ):
        for weight in se.soft_weights(model):
            assert weight.value().dtype == torch.bfloat16
            view = weight.group_view().float()
            assert (view - turned(view)).abs().max() <= 2**-8 * view.abs().max()  # one rounding of bfloat16
        assert se.bake(model, copy=True).state_dict().keys() == case.model().state_dict().keys()
        assert answer(model, case.input().to(torch.bfloat16)).isfinite().all()


# compile and export


class Answer(nn.Module):
    """A model that returns its one tensor, for exporters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return answer(self.model, x)


needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++", "c++")),
    reason="torch.compile needs a C++ compiler, and none is on the PATH",
)


@pytest.mark.parametrize(
    ("name", "gain", "backend"),
    [
        pytest.param("mlp", "softness .5", "inductor", marks=needs_compiler),
        pytest.param("vit", "softness .5", "inductor", marks=[needs_compiler, pytest.mark.slow]),
        ("resnet", "softness 0", "aot_eager"),
        ("cnn", "smooth", "aot_eager"),
        ("mlp", "error", "aot_eager"),
    ],
)
def test_compile_in_one_graph(name: str, gain: str, backend: str) -> None:
    case = CASES[name]
    model, x = softened(case, "C4", gain), case.input()
    expected = answer(model, x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = answer(compiled, x)
    found.square().sum().backward()
    assert torch.allclose(found, expected, atol=EXACT)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert torch.allclose(parameter.grad, gradient, atol=1e-4 * float(gradient.abs().max()) + 1e-6)


def launched(model: nn.Module, x: Tensor) -> list[dict[str, int]]:
    """What each graph of a compiled training step calls, and how often: fused kernels as one kind, others by name."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found = answer(compiled, x)
        with contextlib.suppress(RuntimeError):  # kernels that do nothing leave indices that are out of bounds
            found.float().square().sum().backward()

    torch._dynamo.reset()
    compiled = torch.compile(model.train())
    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)  # no C++ compiler
    with unbuilt, torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1):
        _, codes = run_and_get_code(step)
    assert codes and len(codes) % 2 == 0  # forward and backward of each graph
    called = [re.findall(r"(cpp_fused|extern_kernels\.\w+|torch\.ops\.[\w.]+)\w*\(", code) for code in codes]
    return [dict(Counter(calls)) for calls in called]


@pytest.mark.parametrize("name", ["resnet", pytest.param("vit", marks=pytest.mark.slow), "segformer"])
def test_a_compiled_soft_model_launches_no_more_kernels_than_the_plain_one(name: str) -> None:
    case = CASES[name]
    plain = launched(case.model(), case.input())
    soft = launched(se.soften(case.model(), "SO(2)", softness=0.5), case.input())
    assert sum(calls["cpp_fused"] for calls in plain) > 10  # the pattern finds them
    for ours, theirs in zip(soft, plain, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(count <= theirs[kind] for kind, count in ours.items())


def test_a_compiled_filter_of_three_by_three_adds_up_without_a_reduction() -> None:
    """A GPU gives a reduction of nine terms sixteen threads for each number, and most of them wait."""
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    for size in (3, 7):
        model, x = se.soften(nn.Conv2d(2, 2, size), "SO(2)", softness=0.5), torch.randn(1, 2, 8, 8)
        torch._dynamo.reset()
        called.clear()
        assert torch.allclose(torch.compile(model, fullgraph=True, backend=backend)(x), model(x), atol=EXACT)
        assert ("sum" in called) == (size == 7)


@pytest.mark.parametrize("name", ["vit", "resnet", "segformer", "cnn"])
def test_export_of_the_baked_model_agrees(name: str) -> None:
    case = CASES[name]
    model, x = softened(case, "C4", "softness .5"), case.input()
    with torch.no_grad():
        for kind in (se.bake(model, copy=True), model):
            program = torch.export.export(Answer(kind).eval(), (x,))
            assert torch.allclose(program.module()(x), answer(model, x), atol=EXACT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit", "resnet", "segformer"])
def test_onnx_of_the_baked_model_agrees(name: str) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")
    reference = pytest.importorskip("onnx.reference", reason="the check needs onnx")
    case = CASES[name]
    model, x = softened(case, "C4", "softness .5"), case.input()
    program = torch.onnx.export(Answer(se.bake(model, copy=True)).eval(), (x,), dynamo=True, verbose=False)
    assert program is not None
    run = reference.ReferenceEvaluator(program.model_proto)
    (found,) = run.run(None, {run.input_names[0]: x.numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), answer(model, x), atol=EXACT)


# bake


@pytest.mark.parametrize("name", ["vit", "segformer", "swin", "mobilenet-v2"])
def test_a_baked_model_saves_and_loads_as_any_other(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, x = softened(case), case.input()
    baked = se.bake(model, copy=True)
    baked.save_pretrained(tmp_path)
    loaded = type(baked).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(answer(loaded, x), answer(model, x))


def test_baking_reports_the_largest_difference(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["segformer"]
    with caplog.at_level(logging.INFO, "softequiv"):
        se.bake(softened(case), example=case.input())
        se.bake(softened(case), example={"pixel_values": case.input()})
    sentences = [record.getMessage() for record in caplog.records if record.name == "softequiv"]
    assert sentences == ["baked 6 weights; largest change of an output: 0.0e+00"] * 2


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: [y], lambda y: {"logits": y}])
def test_baking_compares_whatever_a_model_returns(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    with caplog.at_level("INFO", logger="softequiv"):
        se.bake(se.soften(Net(1, 2, 3), "C4", softness=0.0), example=torch.randn(1, 1, 5, 5))
    assert "largest change of an output: 0.0e+00" in caplog.text


def test_baking_keeps_each_module_in_its_mode() -> None:
    model = softened(CASES["resnet"]).train()
    frozen = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in frozen:
        module.eval()
    modes, before = [module.training for module in model.modules()], tensors_of(model)
    baked = se.bake(model, copy=True, example=CASES["resnet"].input())
    assert [module.training for module in model.modules()] == modes
    assert not any(module.training for module in baked.modules() if isinstance(module, nn.BatchNorm2d))
    assert equal(before, tensors_of(model))
    with pytest.raises(ValueError, match="channel"):  # an input that the model refuses
        se.bake(model, copy=True, example=torch.randn(1, 4, 33, 33))
    assert [module.training for module in model.modules()] == modes


def test_baking_keeps_what_is_frozen_and_tied() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv).requires_grad_(False)
    soft = se.soften(model, "C4", softness=0.0)
    baked = se.bake(soft, copy=True)
    assert baked[0] is baked[2] and not baked[0].weight.requires_grad
    assert torch.equal(baked[0].weight, soft[0].weight)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("softness", [0.4, {"0": 0.4, "1": 0.0}, {"1": 0.4}], ids=["alike", "otherwise", "one of them"])
def test_baking_keeps_tensors_shared_that_are_filtered_alike(
    softness: Any, copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    soft = se.soften(model, "C4", softness=softness)
    values = [layer.weight.detach().clone() for layer in soft]
    with caplog.at_level(logging.WARNING, "softequiv"):
        baked = se.bake(soft, copy=copied)
    assert all(torch.equal(layer.weight, value) for layer, value in zip(baked, values, strict=True))
    alike = softness == 0.4
    assert (baked[0].weight is baked[1].weight) == alike
    told = [] if alike else ["0.weight and 1.weight shared one tensor but not one filter: each has its own tensor now"]
    assert caplog.messages == told


def test_baking_takes_the_example_that_a_processor_makes() -> None:
    case = CASES["vit"]
    batch = transformers.BatchFeature({"pixel_values": case.input()})
    assert turn_error(case, se.bake(softened(case), example=batch), case.size) < EXACT


@pytest.mark.parametrize("only", [["0"], ["1"], None])
def test_a_tensor_that_layers_share_is_filtered_for_each_of_them_or_not_at_all(only: list[str] | None) -> None:
    """Parametrised, each layer has a filter of its own; in project mode one stored value would have to be both."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    with pytest.raises(se.WeightError, match=r"0\.weight and 1\.weight are one tensor.*use mode='parametrize'"):
        se.soften(model, "C4", softness=0.4, only=only, mode="project")
    assert torch.equal(model[0].weight, before) and next(se.soft_weights(model), None) is None
    soft = se.soften(model, "C4", softness=0.4, only=only)
    filtered = soft_once(before)
    for number in ("0", "1"):
        chosen = only is None or number in only
        assert torch.allclose(soft.get_submodule(number).weight, filtered if chosen else before, atol=1e-6)


def test_a_checkpoint_does_not_filter_a_shared_tensor_twice_either(tmp_path: Path) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))

    se.save(se.soften(layers(), "C4", softness=0.4, mode="project"), tmp_path / "soft")
    tied = layers()
    tied[1].weight = tied[0].weight
    with pytest.raises(se.WeightError, match="are one tensor"):
        se.load(tied, tmp_path / "soft")
    assert next(se.soft_weights(tied), None) is None


def soft_once(weight: Tensor) -> Tensor:
    return se.softness(0.4)(weight, se.grid(se.C(4), 3, 3))


def test_a_layer_that_stands_in_two_places_can_be_projected() -> None:
    conv = nn.Conv2d(4, 4, 3)
    expected = soft_once(conv.weight.detach().clone())
    model = se.soften(nn.Sequential(conv, nn.ReLU(), conv), "C4", softness=0.4, mode="project")
    assert torch.allclose(model[2].weight, expected, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_pickling(mode: str) -> None:
    case = CASES["resnet"]
    model = softened(case, mode=mode)
    buffer = io.BytesIO()
    torch.save(se.bake(model, copy=True), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        assert torch.equal(answer(loaded, case.input()), answer(model, case.input()))


# refusals: one sentence each


def conv_with(values: Tensor) -> nn.Module:
    conv = nn.Conv2d(3, 8, 3)
    conv.weight = nn.Parameter(values, requires_grad=values.is_floating_point())
    return nn.Sequential(conv)


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(CASES["vit"].model(), {nn.Linear}, dtype=torch.qint8)


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(CASES["vit"].model(), peft.LoraConfig(target_modules=["q_proj"]))


REFUSALS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("peft", lambda: se.soften(with_lora(), "C4", softness=0.0), se.SoftEquivError, "PEFT layer: merge it first"),
    (
        "peft inside",
        lambda: se.soften(with_lora().base_model.model, "C4", softness=0.0),
        se.SoftEquivError,
        "q_proj is a PEFT layer: merge it first",
    ),
    (
        "int8",
        lambda: se.soften(conv_with(torch.ones(8, 3, 3, 3, dtype=torch.int8)), "C4", softness=0.0),
        se.SoftEquivError,
        "0.weight is stored as torch.int8, which cannot be filtered: dequantise",
    ),
    (
        "float8",
        lambda: se.soften(conv_with(torch.ones(8, 3, 3, 3).to(torch.float8_e4m3fn)), "C4", softness=0.0),
        se.SoftEquivError,
        "0.weight is stored as torch.float8_e4m3fn, which cannot be filtered: dequantise",
    ),
    (
        "quantised",
        lambda: se.soften(quantised(), "C4", softness=0.0),
        se.SoftEquivError,
        "q_proj is a quantised Linear: soften and bake the model before",
    ),
    (
        "meta",
        lambda: se.soften(CASES["vit"].model().to("meta"), "C4", softness=0.0),
        se.WeightError,
        "position_embeddings has no values yet, it is on the meta device",
    ),
    (
        "nan",
        lambda: se.soften(conv_with(torch.full((8, 3, 3, 3), torch.nan)), "C4", softness=0.0),
        se.WeightError,
        "0.weight has entries that are not finite: mend it first",
    ),
    (
        "unknown only",
        lambda: se.soften(CASES["vit"].model(), "C4", softness=0.0, only=["vit.embeddings.patch_embedings"]),
        se.SoftEquivError,
        "names no weight that can be softened; close to it: .*vit.embeddings.patch_embeddings.projection.weight",
    ),
    (
        "only what cannot",
        lambda: se.soften(CASES["vit"].model(), "C4", softness=0.0, only=["classifier.weight"]),
        se.SoftEquivError,
        "'classifier.weight' cannot be softened: acts on channels",
    ),
    (
        "unknown grid",
        lambda: se.soften(CASES["mlp"].model(), "C4", softness=0.0, grids={"7": (3, 8, 8)}),
        se.SoftEquivError,
        "grids names '7', which is no linear layer; there are 1, 3",
    ),
    (
        "wrong grid",
        lambda: se.soften(CASES["mlp"].model(), "C4", softness=0.0, grids={"1": (3, 8, 9)}),
        se.SoftEquivError,
        "216 entries; the layer has 192 inputs",
    ),
    (
        "twice",
        lambda: se.soften(softened(CASES["cnn"]), "C4", softness=0.0),
        se.SoftEquivError,
        "soft already; turn the dial with set_softness, or bake it first",
    ),
    (
        "twice, projected",
        lambda: se.soften(softened(CASES["cnn"], mode="project"), "C4", softness=0.0),
        se.SoftEquivError,
        "soft already",
    ),
    (
        "softness and error",
        lambda: se.soften(CASES["cnn"].model(), "C4", softness=0.0, error=0.1),
        se.GainError,
        "in exactly one way",
    ),
    (
        "planning for a soft model",
        lambda: se.plan(softened(CASES["cnn"]), "C4", softness=0.0),
        se.SoftEquivError,
        "soft already; turn the dial with set_softness, or bake it first",
    ),
    ("neither", lambda: se.soften(CASES["cnn"].model(), "C4"), se.GainError, "in exactly one way"),
    (
        "error without within",
        lambda: se.soften(CASES["cnn"].model(), "C4", error=0.1),
        se.GainError,
        r"error=0.1 needs within=..., the range it holds for, such as degrees\(30\)",
    ),
    (
        "within without error",
        lambda: se.soften(CASES["cnn"].model(), "C4", softness=0.0, within=1.0),
        se.GainError,
        "within=... belongs to error=...",
    ),
    (
        "a range without elements",
        lambda: se.soften(CASES["cnn"].model(), "C4", error=0.1, within=se.degrees(30)),
        se.GroupError,
        "contains no element of C4 but the identity",
    ),
    (
        "a group that acts on nothing",
        lambda: se.soften(CASES["vit"].model(), "SO(3)", softness=0.0),
        se.SoftEquivError,
        r"no weight of ViTForImageClassification lives on a grid under SO\(3\)",
    ),
    (
        "a model without grids",
        lambda: se.soften(nn.Linear(3, 4), "C4", softness=0.0),
        se.SoftEquivError,
        "no weight of Linear lives on a grid under C4",
    ),
    ("an unknown group", lambda: se.soften(CASES["cnn"].model(), "Q8", softness=0.0), se.GroupError, "unknown group"),
    (
        "no group",
        lambda: se.soften(CASES["cnn"].model(), 4, softness=0.0),  # type: ignore[arg-type]
        se.GroupError,
        "a group or its name",
    ),
    (
        "an unknown mode",
        lambda: se.soften(CASES["cnn"].model(), "C4", softness=0.0, mode="x"),  # type: ignore[arg-type]
        se.SoftEquivError,
        "unknown mode 'x'; choose",
    ),
    (
        "an unknown action",
        lambda: se.soften(CASES["cnn"].model(), "C4", softness=0.0, action="x"),  # type: ignore[arg-type]
        se.SoftEquivError,
        "unknown action 'x'; choose",
    ),
    (
        "set_softness on a plain model",
        lambda: se.set_softness(CASES["cnn"].model(), 0.5),
        se.GainError,
        "no soft weights; call soften first",
    ),
    (
        "set_softness of an unknown weight",
        lambda: se.set_softness(softened(CASES["cnn"]), 0.5, only=["0.wieght"]),
        se.SoftEquivError,
        "close to it: 0.weight",
    ),
    (
        "saving a plain model",
        lambda: se.save(CASES["cnn"].model(), "nowhere"),
        se.SoftEquivError,
        "no soft weights; use the model's own way",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "kind", "sentence"), [pytest.param(*row[1:], id=row[0]) for row in REFUSALS])
def test_refusals_are_sentences(call: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_model_is_left_as_it_was(mode: str) -> None:
    model = CASES["cnn"].model()
    with torch.no_grad():
        model[4].weight[0, 0, 0, 0] = torch.nan  # the last of three
    before = tensors_of(model)
    with pytest.raises(se.WeightError, match=r"4\.weight"):
        se.soften(model, "C4", softness=0.0, mode=mode)  # type: ignore[arg-type]
    assert next(se.soft_weights(model), None) is None
    assert all(
        torch.equal(a, b)
        for (n, a), b in zip(before.items(), tensors_of(model).values(), strict=True)
        if n != "4.weight"
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_dial_can_be_turned_later(mode: str) -> None:
    case = CASES["vit"]
    model = softened(case, gain="softness 1", mode=mode)
    se.set_softness(model, 0.0, only=["*position*"])
    errors = {w.name: certified(w, "C4") for w in se.soft_weights(model)}
    assert [error < EXACT for error in errors.values()] == ["position" in name for name in errors]
    se.set_softness(model, 0.0)
    assert turn_error(case, model, case.size) < EXACT


# checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    se.save(softened(CASES["vit"], "C4", "softness .5"), tmp_path / "saved")
    return tmp_path / "saved"


def test_a_checkpoint_of_another_recipe_is_refused_with_the_difference(folder: Path) -> None:
    case = CASES["vit"]
    for model, sentences in [
        (softened(case, "D4", "softness .5"), ["group: 'C4' in the checkpoint, 'D4' here"]),
        (softened(case, "C4", "softness .5", "project"), ["mode: 'parametrize' in the checkpoint, 'project' here"]),
        (
            se.soften(case.model(), "C4", softness=0.5, only=["*position*"]),
            ["projection.weight is soft in one of them"],
        ),
        (
            se.soften(CASES["cnn"].model(), "C4", softness=0.5),
            ["0.weight is soft in one of them only"],
        ),
    ]:
        before = tensors_of(model)
        with pytest.raises(se.SoftEquivError, match="another recipe") as refusal:
            se.load(model, folder)
        assert all(sentence in str(refusal.value) for sentence in sentences)
        assert equal(before, tensors_of(model))


@pytest.mark.parametrize("mode", ["parametrize", "project"])
def test_a_gain_that_training_turned_is_loaded_with_the_weights(tmp_path: Path, mode: Any) -> None:
    def built() -> nn.Module:
        vectors = 4 * se.vector(se.SO(3))
        return nn.Sequential(*[SoftLinear(vectors, vectors, se.softness(0.5), mode=mode) for _ in range(2)])

    trained = built()
    se.set_softness(trained, 0.1, only=["0.*"])
    trained.double()
    se.save(trained, tmp_path)
    loaded = se.load(built().double(), tmp_path)
    assert [weight.soft.gain for weight in se.soft_weights(loaded)] == [
        weight.soft.gain for weight in se.soft_weights(trained)
    ]
    x = torch.randn(2, 12, dtype=torch.float64)
    assert torch.equal(loaded(x), trained(x))


QUARTER_TURN = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
HALF = se.softness(0.5)


def of_matrices(*steps: Tensor) -> nn.Module:
    spaces = [se.representation(se.C(4), steps=[step], name="mine") for step in steps]
    return SoftLinear(2 * spaces[0], 2 * spaces[-1], HALF)


def of_group(step: Tensor) -> nn.Module:
    group = se.group_from(steps=[step], name="mine")
    return SoftLinear(2 * se.vector(group), 2 * se.vector(group), HALF)


def of_layout(**layout: int) -> nn.Module:
    table = nn.Embedding(17, 4)
    soften_weight(table, "weight", Soft(se.grid(se.C(4), 4, 4), HALF, Layout(axis=0, **layout)))
    return table


@pytest.mark.parametrize(
    ("saved", "other", "word"),
    [
        (lambda: of_matrices(QUARTER_TURN, QUARTER_TURN), lambda: of_matrices(QUARTER_TURN, -torch.eye(2)), "matrices"),
        (lambda: of_group(QUARTER_TURN), lambda: of_group(-QUARTER_TURN), "matrices"),
        (lambda: of_group(QUARTER_TURN), lambda: of_group(torch.diag(torch.tensor([1.0, -1.0]))), "matrices"),
        (lambda: of_layout(skip=1), lambda: of_layout(behind=1), "layout"),
    ],
    ids=["representation", "group", "flip", "layout"],
)
def test_a_checkpoint_of_other_matrices_or_another_layout_is_refused(tmp_path: Path, saved, other, word) -> None:
    model = saved()
    se.save(model, tmp_path)
    assert equal(tensors_of(se.load(saved(), tmp_path)), tensors_of(model))
    with pytest.raises(se.SoftEquivError, match=f"another recipe: .*{word}"):
        se.load(other(), tmp_path)
    path = tmp_path / "softequiv.json"
    entries = json.loads(path.read_text())
    for weight in entries["weights"].values():  # as it was written before
        del weight["matrices"], weight["layout"]
    path.write_text(json.dumps(entries))
    assert equal(tensors_of(se.load(saved(), tmp_path)), tensors_of(model))


def other_vit(**kwargs: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**{"image_size": 20, "patch_size": 5, "num_labels": 5, **sizes, **kwargs})
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"hidden_size": 48}, r"position_embeddings has shape \(1, 17, 32\), the model \(1, 17, 48\)"),
        ({"patch_size": 4}, r"position_embeddings has shape \(1, 17, 32\), the model \(1, 26, 32\)"),
        ({"num_labels": 7}, r"classifier.weight has shape \(5, 32\), the model \(7, 32\)"),
        ({"num_hidden_layers": 3}, r"missing vit.*layers?\.2"),
        ({"num_hidden_layers": 1}, r"unexpected vit.*layers?\.1"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_shape_is_refused_with_the_difference(
    folder: Path, kwargs: dict[str, Any], sentence: str
) -> None:
    model = other_vit(**kwargs)
    before = tensors_of(model)
    with pytest.raises(se.SoftEquivError, match=sentence):
        se.load(model, folder)
    assert equal(before, tensors_of(model))  # still plain, nothing half loaded


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "softequiv.json"
        entries = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))

    return edit


def regained(**gain: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "softequiv.json"
        entries = json.loads(path.read_text())
        next(iter(entries["weights"].values()))["gain"] = gain
        path.write_text(json.dumps(entries))

    return edit


def cut(keep: slice) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[keep])

    return edit


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "softequiv.json").unlink(), "holds no softequiv.json"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
        (shutil.rmtree, "holds no softequiv.json"),
        (lambda f: (f / "softequiv.json").write_text("{nope"), "is not JSON"),
        (lambda f: (f / "softequiv.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
        (lambda f: (f / "softequiv.json").write_text("[]"), "not a recipe of format 1"),
        (edited(format=2), "not a recipe of format 1"),
        (edited(group=None), "damaged: its 'group' is None"),
        (edited(group="Q8"), "unknown group 'Q8'"),
        (edited(mode=None), "damaged: its 'mode' is None"),
        (edited(mode="x"), "unknown mode 'x'"),
        (edited(action="x"), "unknown action 'x'"),
        (edited(grids=3), "damaged: its 'grids' is 3"),
        (edited(weights=3), "damaged: its 'weights' is 3"),
        (edited(weights={"x": 3}), "damaged: 'x' has no 'representation'"),
        (
            edited(weights={"x": {"representation": "3x3", "shape": [1], "gain": {}}}),
            "'x' names no weight that can be softened",
        ),
        (regained(), "unknown gain None"),
        (regained(kind="x"), "unknown gain 'x'"),
        (regained(kind="Softness", t=1), "Softness gain cannot be read"),
        (regained(kind="Softness", s="x"), "Softness gain cannot be read"),
        (regained(kind="Softness", s=3), "softness runs from 0"),
        (regained(kind="LeastDistortion", error=0.1, within={}), "LeastDistortion gain cannot be read"),
        (cut(slice(0, 0)), "cannot be read, it may be cut short"),
        (cut(slice(0, 300)), "cannot be read, it may be cut short"),
        (cut(slice(0, -300)), "cannot be read, it may be cut short"),
    ],
)
def test_damaged_checkpoints_are_refused_in_a_sentence(
    folder: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(folder)
    model = CASES["vit"].model()
    with pytest.raises(se.SoftEquivError, match=sentence):
        se.load(model, folder)
    assert next(se.soft_weights(model), None) is None


def test_tensors_that_do_not_fit_are_refused() -> None:
    model = softened(CASES["cnn"])
    before, tensors = tensors_of(model), dict(se.stored_tensors(CASES["cnn"].model()))
    tensors["stray"] = tensors.pop("0.weight")
    with pytest.raises(se.SoftEquivError, match=r"missing 0\.weight; unexpected stray"):
        se.load_tensors(model, tensors)
    assert equal(before, tensors_of(model))


# several processes


def distributed_losses(rank: int, kind: str, mode: str, gain: str, folder: str) -> None:
    """Three training steps on this process's half of a batch; the mean loss over processes goes to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    case = CASES["cnn"]
    model: nn.Module = softened(case, "C4", gain, mode)
    x = case.input(batch=4)
    target = target_for(model, x)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        wrapped = fully_shard(model, mesh=mesh)
    made = optimiser(model, torch.optim.SGD, lr=0.05)
    half = slice(2 * rank, 2 * rank + 2)
    losses = []
    for _ in range(3):
        loss = torch.tensor(step(wrapped, made, x[half], target[half]))
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / 2)
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    leave_together(Path(folder))


def losses_in_two_processes(kind: str, mode: str, gain: str, folder: Path) -> list[float]:
    torch.multiprocessing.spawn(distributed_losses, (kind, mode, gain, str(folder)), nprocs=2)
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.parametrize(
    ("kind", "mode", "gain"),
    [
        ("ddp", "parametrize", "softness .5"),
        ("ddp", "project", "error"),
        ("fsdp2", "parametrize", "softness .5"),
        ("fsdp2", "project", "softness 0"),
    ],
)
def test_two_processes_give_the_loss_of_one(kind: str, mode: str, gain: str, tmp_path: Path) -> None:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    case = CASES["cnn"]
    model = softened(case, "C4", gain, mode)
    x = case.input(batch=4)
    target, made = target_for(model, x), optimiser(model, torch.optim.SGD, lr=0.05)
    expected = [step(model, made, x, target) for _ in range(3)]
    assert np.allclose(losses_in_two_processes(kind, mode, gain, tmp_path), expected, atol=SAME_LOSS)


# real weights and pictures


def data(*parts: str) -> Path:
    root = Path(os.environ.get("SOFTEQUIV_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}; point SOFTEQUIV_DATA at the data")
    return path


def test_a_trained_vit_on_real_pictures() -> None:
    folder, pictures = data("vit-cifar10"), np.load(data("cifar10", "cifar10_2k2k.npz"))
    images = next(value for key, value in pictures.items() if "test" in key and value.ndim == 4)[:64]
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    x = (torch.from_numpy(images).float() / 255 - mean[:, None, None]) / std[:, None, None]
    plain = transformers.ViTForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(x).logits
        free = se.soften(copy.deepcopy(plain), "C4", softness=1.0)
        assert torch.equal(free(x).logits, expected)
        strict = se.soften(copy.deepcopy(plain), "C4", softness=0.0)
        logits = strict(x).logits
        scale = logits.abs().max()
        for turns in (1, 2, 3):
            assert (strict(x.rot90(turns, (-2, -1))).logits - logits).abs().max() < EXACT * scale
        assert (plain(turned(x)).logits - expected).abs().max() > 0.1 * expected.abs().max()
