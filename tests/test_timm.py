"""Models of timm, where it is installed: found by structure, as those of transformers are.

`pip install --no-deps timm==1.0.30 torchvision==0.28.0` is enough here: two operator schemas stand in for torchvision's
compiled library, which a CPU build of torch has no match for.
"""

import importlib.util

import pytest
import torch

import softequiv as se

pytestmark = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")

# name, pixels that every stride covers evenly, how many weights are filtered at least
MODELS = [
    ("vit_tiny_patch16_224", {"img_size": 48}, 48, 2),
    ("deit_tiny_distilled_patch16_224", {"img_size": 48}, 48, 2),
    ("vit_small_patch14_dinov2", {"img_size": 42, "depth": 2}, 42, 2),
    ("resnet18", {}, 65, 10),
    ("convnext_atto", {}, 64, 5),
    ("efficientnet_lite0", {}, 65, 15),
]


@pytest.fixture(scope="module")
def timm():
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm")


@pytest.mark.parametrize(("name", "options", "size", "least"), MODELS, ids=[model[0] for model in MODELS])
def test_timm_models_turn_with_the_picture_at_softness_zero(timm, name, options, size, least):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options).eval()
    for parameter in model.parameters():
        if parameter.ndim == 3:  # position tables start at zero in some models, which would prove nothing
            torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        before = model(x)
        se.soften(model, "C4", softness=1.0)
        assert torch.equal(model(x), before)
        se.set_softness(model, 0.0)
        assert len(list(se.soft_weights(model))) >= least
        plain, turned = model(x), model(x.rot90(1, (-2, -1)))
        assert float((plain - turned).norm() / plain.norm()) < 1e-4
        baked = se.bake(model, copy=True)
        assert torch.equal(baked(x), plain)
        assert set(baked.state_dict()) == set(timm.create_model(name, num_classes=7, **options).state_dict())
