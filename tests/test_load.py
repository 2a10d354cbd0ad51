"""Does it hold under load? A thousand models in one process, eight threads at once, a thousand layers, ViT-L and the
largest grids: memory stays flat, the cache bounded, and the weights the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import softequiv as se
from softequiv._cache import Cache, cache
from zoo import CASES

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")

START = """
import gc, json, resource, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import softequiv as se
from softequiv._cache import cache

def held():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""

MANY = """
def model():
    return nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 7))

memory, entries = [], []
for number in range(1000):
    way = {"softness": 0.3} if number % 2 else {"error": 0.2, "within": 3.1}
    group = ("C4", "C8", "D4", "SO(2)", "O(2)", "C360")[number % 6]
    net = se.soften(model(), group, mode="project" if number % 3 else "parametrize", **way)
    assert se.certify(net, 3.1).error < 2
    se.bake(net)
    if number % 100 == 99:
        memory.append(held())
        entries.append(len(cache))
print(json.dumps({"memory": memory, "entries": entries, "used": cache.used, "capacity": cache.capacity}))
"""

VIT_L = """
import transformers
sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
net = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=224, patch_size=16, **sizes)).eval()
se.soften(net, "SO(2)", error=0.2, within=se.degrees(30))
error = se.certify(net).error
with torch.no_grad():
    finite = bool(net(torch.randn(1, 3, 224, 224)).logits.isfinite().all())
se.bake(net)
print(json.dumps({"peak": peak(), "error": error, "finite": finite, "soft": len(list(se.soft_weights(net)))}))
"""

GRID = """
net = nn.Conv2d(3, 16, 64)
se.soften(net, "GROUP", softness=0.0)
error = se.certify(net, 3.0).error
se.bake(net)
turned = net.weight.detach().rot90(1, (-2, -1))
print(json.dumps({"peak": peak(), "error": error, "turned": float((turned - net.weight).norm() / net.weight.norm())}))
"""


def alone(script: str) -> Any:
    """What a script prints, as JSON, from a process of its own, so that its memory is its own too."""
    done = subprocess.run(
        [sys.executable, "-c", START + script], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@linux
def test_a_thousand_models_leave_memory_flat_and_the_cache_bounded() -> None:
    found = alone(MANY)
    assert max(found["memory"]) <= 1.05 * found["memory"][0]
    assert len(set(found["entries"])) == 1 and found["used"] <= found["capacity"]


def test_a_thousand_kinds_of_spectra_stay_within_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache forgets, and what it forgot is computed again with the same result."""
    small = Cache(capacity=100_000)
    monkeypatch.setattr(cache, "get", small.get)
    weight = torch.randn(8, 5, 5)
    first = {n: se.softness(0.3)(weight, se.grid(se.C(n), 5, 5)) for n in range(2, 1002)}
    assert small.used <= small.capacity and 0 < len(small) < 100
    for n in (2, 3, 360, 1000):
        assert torch.equal(se.softness(0.3)(weight, se.grid(se.C(n), 5, 5)), first[n])


@pytest.mark.parametrize("name", ["vit", "resnet", "segformer"])
def test_eight_threads_soften_as_one_does(name: str) -> None:
    def softened() -> dict[str, Tensor]:
        net = se.soften(CASES[name].model(), "SO(2)", error=0.2, within=se.degrees(30))
        return {weight.name: weight.value().detach().clone() for weight in se.soft_weights(net)}

    expected = softened()
    cache.clear()  # so that all of them compute the same spectra at once
    found: list[dict[str, Tensor]] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        found.append(softened())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(torch.equal(one[key], expected[key]) for one in found for key in expected)


def test_a_thousand_layers_are_planned_in_seconds() -> None:
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(1000)))
    start = time.perf_counter()
    found = se.plan(net, "SO(2)", softness=0.5, image_size=32)
    assert time.perf_counter() - start < 10
    assert len(found.weights) == 1000 and len(str(found).splitlines()) > 1000


@linux
def test_a_large_vit_is_softened_within_16_gb() -> None:
    found = alone(VIT_L)
    assert found["peak"] < 16 * 2**30 and found["finite"] and not found["soft"]
    assert found["error"] == pytest.approx(0.2, rel=1e-4)


@linux
@pytest.mark.parametrize("group", ["SO(2)", "C4", "D4"])
def test_a_grid_of_64_x_64_is_softened_within_16_gb(group: str) -> None:
    found = alone(GRID.replace("GROUP", group))
    assert found["peak"] < 16 * 2**30
    assert found["error"] < 1e-5 and found["turned"] < 1e-5


def test_a_deep_vit_softens_certifies_and_bakes() -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=200, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    net: Any = transformers.ViTForImageClassification(config)
    se.soften(net.eval(), "C4", softness=0.0)
    assert se.certify(net).error < 1e-5
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before: Tensor = net(picture).logits
        after: Tensor = se.bake(net)(picture).logits
    assert torch.equal(before, after)
