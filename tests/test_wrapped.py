"""Is a soft model saved, certified and baked as what it is, also inside wrappers, adapters and averages, and where its
weights were changed by hand?
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import softequiv as se
from leaving import leave_together
from softequiv._cache import cache
from softequiv.training.average import Average

WITHIN = se.degrees(30)
MODES = ["parametrize", "project"]
ROUNDING = 1e-5


def two_kernels() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.Conv2d(4, 4, 5))


def held(mode: str = "project") -> nn.Sequential:
    return se.soften(two_kernels(), "SO(2)", error=0.1, within=WITHIN, mode=mode)


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "averaged": AveragedModel,
    "averaged and compiled": lambda model: AveragedModel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_saved_and_loaded_as_the_one_inside(wrap, mode, tmp_path):
    soft = held(mode)
    se.save(wrap(soft), tmp_path)
    plain, wrapped = two_kernels(), wrap(held(mode))
    with torch.no_grad():
        for weight in se.soft_weights(wrapped):
            weight.stored.zero_()
    se.load(plain, tmp_path), se.load(wrapped, tmp_path)
    x = torch.randn(2, 1, 12, 12)
    assert torch.equal(plain(x), soft(x)) and torch.allclose(wrapped(x), soft(x), atol=ROUNDING)


@pytest.mark.parametrize(
    "second, sentence",
    [
        ({"group": "C4"}, r"one group; 0.weight has SO\(2\) and 1.weight has C4: save the parts"),
        ({"action": "bilinear"}, r"one action; 0.weight has exact and 1.weight has bilinear"),
        ({"mode": "project"}, r"one mode; 0.weight has parametrize and 1.weight has project"),
    ],
)
def test_a_model_softened_in_two_ways_is_not_saved_as_one(second, sentence, tmp_path):
    net = two_kernels()
    se.soften(net[0], "SO(2)", softness=0.5)
    se.soften(net[1], **{"group": "SO(2)", "softness": 0.5, **second})
    with pytest.raises(se.SoftEquivError, match=sentence):
        se.save(net, tmp_path)
    assert not list(tmp_path.iterdir())
    se.save(net[0], tmp_path / "first"), se.save(net[1], tmp_path / "second")


def test_nothing_is_promised_of_a_soft_weight_to_which_an_adapter_adds(tmp_path):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(held(), peft.LoraConfig(target_modules=["0"]))
    optimizer = torch.optim.SGD(tuned.parameters(), lr=0.1)
    for promise in (se.certify, se.bake, lambda m: se.save(m, tmp_path), lambda m: se.hold(m, optimizer)):
        with pytest.raises(se.SoftEquivError, match=r"0\.base_layer\.weight is soft and inside a PEFT layer.*merge"):
            promise(tuned)
    merged = tuned.merge_and_unload()
    assert se.certify(merged).error <= 0.1 + ROUNDING


@pytest.mark.parametrize("change", ["stock weights", "training without hold"])
def test_weights_that_left_their_constraint_are_not_baked(change):
    soft = held()
    if change == "stock weights":
        soft.load_state_dict(two_kernels().state_dict())
    else:
        optimizer = torch.optim.SGD(soft.parameters(), lr=0.1)
        soft(torch.randn(4, 1, 12, 12)).square().sum().backward()
        optimizer.step()
    with pytest.raises(se.SoftEquivError, match=r"0.weight is .* of its norm away.*without hold.*project\(model\)"):
        se.bake(soft, copy=True)
    se.project(soft)
    assert se.certify(se.bake(soft), WITHIN, "SO(2)").error <= 0.1 + ROUNDING


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_no_reason_not_to_bake(dtype):
    assert next(se.bake(held().to(dtype)).parameters()).dtype == dtype
    strict = se.soften(two_kernels().to(dtype), "C4", softness=0.0, mode="project")
    assert type(se.bake(strict)[0]) is nn.Conv2d


def test_an_average_of_weights_within_a_target_is_within_it():
    """The invariant parts of two weights may cancel in their average, and what is left is what the group moves."""
    soft, rep = held(), se.grid(se.SO(2), 5, 5)
    own, torchs = Average(soft, 0.5), AveragedModel(soft)
    torchs.update_parameters(soft)
    with torch.no_grad():
        soft[0].weight.sub_(2 * se.softness(0)(soft[0].weight, rep))
    own.update(100), torchs.update_parameters(soft)

    def error() -> float:
        return se.spectrum(rep).error(soft[0].weight.detach(), WITHIN)

    assert error() <= 0.1 + ROUNDING
    with own.worn():
        assert error() <= 0.1 + ROUNDING
    soft = torchs.module
    assert error() > 0.2
    se.project(soft)
    assert error() <= 0.1 + ROUNDING


@pytest.mark.parametrize("meanwhile", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_what_is_remembered_is_the_same_whatever_the_caller_was_doing(meanwhile):
    cache.clear()
    net, fresh = two_kernels(), two_kernels()
    with meanwhile():
        se.spectrum(se.grid(se.SO(2), 5, 5))
    se.soften(fresh, "SO(2)", error=0.1, within=WITHIN)
    fresh(torch.randn(1, 1, 12, 12)).sum().backward()
    cache.clear()
    se.soften(net, "SO(2)", error=0.1, within=WITHIN)
    assert torch.equal(net[0].weight, fresh[0].weight)


def save_and_certify_sharded(rank: int, mode: str, folder: str) -> None:
    """One of two processes that share a model by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = fully_shard(held(mode), mesh=init_device_mesh("cpu", (2,)))
    assert se.certify(net).error <= 0.1 + ROUNDING
    se.save(net, Path(folder, "saved"))
    leave_together(Path(folder))


@pytest.mark.parametrize("mode", MODES)
def test_a_model_sharded_over_processes_is_certified_and_saved_whole(mode, tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    torch.multiprocessing.spawn(save_and_certify_sharded, (mode, str(tmp_path)), nprocs=2)
    again, expected = se.load(two_kernels(), tmp_path / "saved"), held(mode)
    for own, other in zip(se.soft_weights(again), se.soft_weights(expected), strict=True):
        assert torch.equal(own.stored, other.stored)
