"""Small configurations of the real model classes, built from their configs: nothing is downloaded.

A case says how its answer turns with the picture, at which size geometry lets it do so exactly, and where not, why not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

PROTOTYPES: dict[str, nn.Module] = {}


@dataclass(frozen=True)
class Case:
    """One model family.

    `exact_at` is the image size at which softness 0 under C4 is exact; None where no size is, and `spoiler` says what
    prevents it. `uneven_at` is a size at which the plan must warn. `turns`: "not at all" for class scores, "with the
    picture" for maps of scores.
    """

    name: str
    build: Callable[[], nn.Module]
    size: int
    exact_at: int | None
    uneven_at: int | None = None
    turns: Literal["not at all", "with the picture"] = "not at all"
    spoiler: str = ""
    grids: Mapping[str, tuple[int, ...]] | None = field(default=None, hash=False)
    channels: int = 3

    def model(self) -> nn.Module:
        """A fresh model with fixed random weights and statistics, in eval mode."""
        if self.name not in PROTOTYPES:
            PROTOTYPES[self.name] = self.prototype()
        return copy.deepcopy(PROTOTYPES[self.name])

    def prototype(self) -> nn.Module:
        """Weights as large as their inputs are many, so that every one of them matters for the answer."""
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "layer_scale" not in name:  # tables that start at zero would prove nothing
                    fan_in = max(1, parameter[0].numel()) if parameter.shape[0] > 1 else parameter.shape[-1]
                    parameter.copy_(torch.randn(parameter.shape) * fan_in**-0.5)
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                    module.running_mean.normal_(0, 0.1)
                    module.running_var.uniform_(0.5, 1.5)
                    module.weight.uniform_(0.5, 1.5)
        return model.eval()

    def input(self, size: int | None = None, batch: int = 2) -> Tensor:
        """A random picture."""
        n = size or self.size
        return torch.randn(batch, self.channels, n, n, generator=torch.Generator().manual_seed(1))


def answer(model: nn.Module, x: Tensor, **kwargs: Any) -> Tensor:
    """The one tensor that a model is asked for: logits, the pooled state, or what a plain module returns."""
    result = model(x, **kwargs)
    if isinstance(result, Tensor):
        return result
    found: Tensor = result.logits if hasattr(result, "logits") else result.pooler_output
    return found


WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LABELS = {"num_labels": 5}


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=20, patch_size=5, **WIDE, **LABELS))


def deit() -> nn.Module:
    return transformers.DeiTForImageClassification(
        transformers.DeiTConfig(image_size=20, patch_size=4, **WIDE, **LABELS)
    )


def beit() -> nn.Module:
    """Biases by displacement, with three rows behind them for the class token."""
    config = transformers.BeitConfig(image_size=20, patch_size=5, use_relative_position_bias=True, **WIDE, **LABELS)
    return transformers.BeitForImageClassification(config)


def dinov2_config(kind: Any, **kwargs: Any) -> Any:
    return kind(
        image_size=42,
        patch_size=14,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        **kwargs,
        **LABELS,
    )


def dinov2() -> nn.Module:
    return transformers.Dinov2ForImageClassification(dinov2_config(transformers.Dinov2Config))


def dinov2_registers() -> nn.Module:
    config = dinov2_config(transformers.Dinov2WithRegistersConfig, num_register_tokens=3)
    return transformers.Dinov2WithRegistersForImageClassification(config)


def dinov3() -> nn.Module:
    return transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(image_size=24, patch_size=6, num_register_tokens=2, **WIDE)
    )


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], **LABELS)
    return transformers.ResNetForImageClassification(config)


def segformer(sr_ratios: tuple[int, ...] = (3, 5)) -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=list(sr_ratios),
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        **LABELS,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def stock_segformer() -> nn.Module:
    return segformer((8, 4))


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, **LABELS)
    return transformers.ConvNextForImageClassification(config)


def convnext_v2() -> nn.Module:
    config = transformers.ConvNextV2Config(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, **LABELS)
    return transformers.ConvNextV2ForImageClassification(config)


def swin(depths: tuple[int, ...] = (2,), window: int = 4) -> nn.Module:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=list(depths),
        num_heads=[2] * len(depths),
        window_size=window,
        **LABELS,
    )
    return transformers.SwinForImageClassification(config)


def swin_merging() -> nn.Module:
    return swin((2, 2))


def swin_odd_window() -> nn.Module:
    return swin((2,), 3)


def efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(
        image_size=31,
        width_coefficient=0.0125,
        depth_coefficient=0.1,
        hidden_dim=16,
        kernel_sizes=[3, 5, 3],
        in_channels=[32, 16, 24],
        out_channels=[16, 24, 32],
        strides=[1, 2, 2],
        num_block_repeats=[1, 1, 1],
        expand_ratios=[1, 2, 2],
        depthwise_padding=[],
        **LABELS,
    )
    return transformers.EfficientNetForImageClassification(config)


def mobilenet_v2() -> nn.Module:
    config = transformers.MobileNetV2Config(
        image_size=65, depth_multiplier=0.25, expand_ratio=2.0, finegrained_output=True, **LABELS
    )
    return transformers.MobileNetV2ForImageClassification(config)


def cnn() -> nn.Module:
    """Circular padding, groups and dilation; its answer is a map."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 5, padding=4, dilation=2, groups=4, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="reflect"),
        nn.Conv2d(8, 5, 1),
    )


def strips() -> nn.Module:
    """Kernels of 1 x 7 and 7 x 1 pixels, as in Inception."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, (1, 7), padding=(0, 3)), nn.Conv2d(8, 5, (7, 1))
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 5))


CASES = {
    case.name: case
    for case in (
        Case("vit", vit, 20, 20, uneven_at=22),
        Case("deit", deit, 20, 20, uneven_at=22),
        Case("beit", beit, 20, 20, uneven_at=22),
        Case("dinov2", dinov2, 42, 42, uneven_at=45),
        Case("dinov2-registers", dinov2_registers, 42, 42, uneven_at=45),
        Case("dinov3", dinov3, 24, None, spoiler="rotary positions tell rows from columns"),
        Case("resnet", resnet, 33, 33, uneven_at=32),
        Case("segformer", segformer, 33, 33, uneven_at=37, turns="with the picture"),
        Case(
            "segformer-stock",
            stock_segformer,
            32,
            None,
            uneven_at=32,
            turns="with the picture",
            spoiler="overlapping patches need an odd map and the reduction of keys an even one",
        ),
        Case("convnext", convnext, 32, 32, uneven_at=36),
        Case("convnext-v2", convnext_v2, 32, 32, uneven_at=36),
        Case("swin", swin, 32, 32, uneven_at=40),
        Case("swin-merging", swin_merging, 32, None, spoiler="patch merging is a linear layer on 2 x 2 neighbours"),
        Case(
            "swin-odd-window",
            swin_odd_window,
            24,
            None,
            uneven_at=24,
            spoiler="a shift of 1 in windows of 3 is lopsided",
        ),
        Case("efficientnet", efficientnet, 31, 31, uneven_at=32),
        Case("mobilenet-v2", mobilenet_v2, 65, 65, uneven_at=64),
        Case("cnn", cnn, 12, 12, turns="with the picture"),
        Case("strips", strips, 12, None, spoiler="kernels that are not square stay as they are"),
        Case("mlp", mlp, 8, 8, grids={"1": (3, 8, 8)}),
    )
}
