"""Does the plan name every layer whose shape keeps it from turning with the picture, and no other?"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from zoo import CASES

EXACT = 1e-5  # float32 rounding through a few layers, relative to the largest value


class Call(nn.Module):
    """A function that no module stands for."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OwnKernel(nn.Module):
    """A kernel (1, 1, h, w) that is no convolution's weight."""

    def __init__(self, kernel: Tensor) -> None:
        super().__init__()
        self.register_buffer("kernel", kernel)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x[:, :1], self.kernel, padding=1)  # type: ignore[arg-type]


def behind(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), layer).eval()


def error(model: nn.Module, move: Callable[[Tensor], Tensor], size: tuple[int, int], group: str) -> float:
    """How far the softened model is from moving with the picture, relative to its answer; 1 for another shape."""
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    soft = se.soften(copy.deepcopy(model), group, softness=0.0)
    with torch.no_grad():
        expected, found = move(soft(x)), soft(move(x))
    return float((found - expected).abs().max() / expected.abs().max()) if found.shape == expected.shape else 1.0


def turn_error(layer: nn.Module, size: int) -> float:
    torch.manual_seed(0)
    return error(behind(layer), lambda x: x.rot90(1, (-2, -1)), (size, size), "C4")


SPOILED: list[tuple[str, nn.Module, int, str]] = [
    (
        "output padding",
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        8,
        "output_padding adds 1 pixels on one side, so it cannot turn with the picture; use a kernel of 4 and "
        "output_padding=0",
    ),
    (
        "output padding, dilated",
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2),
        8,
        "output_padding adds 1 pixels on one side, so it cannot turn with the picture; use output_padding=0",
    ),
    ("dilation", nn.Conv2d(3, 4, 3, padding=(1, 2), dilation=(1, 2)), 9, "its padding is 1 along the height and 2"),
    ("dilation alone", nn.Conv2d(3, 4, 3, padding="same", dilation=(1, 2)), 9, "its dilation is 1 along the height"),
    (
        "stride",
        nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1),
        9,
        "its stride is 2 along the height and 1 along the width",
    ),
    ("padding", nn.Conv2d(3, 4, 3, padding=(1, 0)), 9, "its padding is 1 along the height and 0 along the width"),
    (
        "padding that is a step of its own",
        nn.Conv2d(3, 4, 3, padding=(1, 0), padding_mode="circular"),
        9,
        "the height is padded by 2 pixels and the width by 0, so it cannot turn with the picture; pad both alike",
    ),
    ("kernel", nn.AvgPool2d((2, 4), stride=2, padding=(0, 1)), 8, "its kernel is 2 along the height and 4"),
    ("transposed", nn.ConvTranspose2d(3, 4, 3, stride=(2, 1)), 8, "its stride is 2 along the height"),
    ("one side of the height", nn.ZeroPad2d((0, 0, 0, 1)), 8, "8 pixels are padded by 0 before and 1 after"),
    ("upsampling", nn.Upsample(scale_factor=1.5), 9, "9 pixels are resized to 13, counted from one side"),
    ("upsampling smoothly", nn.Upsample(scale_factor=1.5, mode="bilinear"), 9, "9 pixels are resized to 13, counted"),
    ("upsampling one axis", nn.Upsample(scale_factor=(2, 1)), 8, "resized to 16 along the height and to 8 along the"),
    ("downsampling", nn.Upsample(scale_factor=0.5), 8, "8 pixels are resized to 4, counted from one side"),
    ("a call of max_pool2d", Call(lambda x: functional.max_pool2d(x, 2)), 9, "stride 2 leaves 1 of 9 pixels out"),
    (
        "a call with indices",
        Call(lambda x: functional.max_pool2d(x, 2, return_indices=True)[0]),
        9,
        "stride 2 leaves 1 of 9 pixels out",
    ),
    ("a call of avg_pool2d", Call(lambda x: functional.avg_pool2d(x, kernel_size=2)), 9, "stride 2 leaves 1 of 9"),
    ("a call of interpolate", Call(lambda x: functional.interpolate(x, 13)), 9, "9 pixels are resized to 13"),
    (
        "a call of conv2d",
        Call(lambda x: functional.conv2d(x, x.new_ones(3, 3, 2, 2), stride=2)),
        9,
        "stride 2 leaves 1",
    ),
    ("a pool by powers", nn.LPPool2d(2, 2), 9, "stride 2 leaves 1 of 9 pixels out"),
    (
        "patches",
        Call(lambda x: functional.unfold(x, 2, stride=2).unflatten(1, (3, 4)).mean((1, 2))),
        9,
        "stride 2 leaves",
    ),
    (
        "a kernel of its own",
        OwnKernel(torch.arange(9.0).view(1, 1, 3, 3)),
        9,
        "a 3 x 3 kernel of its own, which is not",
    ),
    ("pixels to channels", nn.PixelUnshuffle(2), 8, "it exchanges channels and the pixels of a block in an order that"),
    (
        "channels to pixels",
        Call(lambda x: functional.pixel_shuffle(x.repeat(1, 4, 1, 1) * torch.arange(12).view(-1, 1, 1).to(x), 2)),
        8,
        "it exchanges channels and the",
    ),
]

KEPT: list[tuple[str, nn.Module, int]] = [
    ("transposed", nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1), 8),
    ("transposed, odd", nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), 8),
    ("upsampling", nn.Upsample(scale_factor=2), 9),
    ("upsampling smoothly", nn.Upsample(size=13, mode="bilinear"), 9),
    ("upsampling with corners", nn.Upsample(size=13, mode="bilinear", align_corners=True), 9),
    ("adaptive", nn.AdaptiveAvgPool2d(3), 8),
    ("dilation", nn.Conv2d(3, 4, 3, padding=2, dilation=2), 9),
    ("a call of max_pool2d", Call(lambda x: functional.max_pool2d(x, 2)), 8),
    ("a kernel of its own that blurs", OwnKernel(torch.ones(1, 1, 3, 3)), 9),
]


@pytest.mark.parametrize(("layer", "size", "words"), [pytest.param(*row[1:], id=row[0]) for row in SPOILED])
def test_the_plan_names_what_keeps_a_layer_from_turning(layer: nn.Module, size: int, words: str) -> None:
    plan = se.plan(behind(layer), "C4", softness=0.0, image_size=size)
    (uneven,) = plan.uneven
    assert uneven.name == "1" and words in str(uneven) and str(uneven) in str(plan)
    assert turn_error(layer, size) > 100 * EXACT


@pytest.mark.parametrize(("layer", "size"), [pytest.param(*row[1:], id=row[0]) for row in KEPT])
def test_the_plan_is_silent_where_a_layer_turns(layer: nn.Module, size: int) -> None:
    plan = se.plan(behind(layer), "C4", softness=0.0, image_size=size)
    assert plan.uneven == () and plan.note == ""
    assert turn_error(layer, size) < EXACT


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, stride=(1, 2), padding=1),
        nn.Conv2d(3, 4, 3, padding=(1, 2), dilation=(1, 2)),
        nn.MaxPool2d((2, 1)),
        nn.Upsample(scale_factor=(1.5, 2)),
        nn.Sequential(nn.ZeroPad2d((0, 0, 0, 1)), nn.Conv2d(3, 4, 3)),
    ],
    ids=str,
)
def test_a_flip_asks_nothing_of_the_other_axis(layer: nn.Module) -> None:
    assert se.plan(behind(layer), "Reflection", softness=0.0, image_size=9).uneven == ()
    torch.manual_seed(0)
    assert error(behind(layer), lambda x: x.flip(-1), (9, 9), "Reflection") < EXACT


def test_a_function_of_the_model_itself_is_named_so() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return functional.max_pool2d(self.conv(x), 2)

    plan = se.plan(Pooled(), "C4", softness=0.0, image_size=9)
    assert "geometry: the model: stride 2 leaves 1 of 9 pixels out on one side" in str(plan)


class Tokens(nn.Module):
    """Nine patches of four channels, pooled or not, in front of a linear layer."""

    def __init__(self, path: Callable[[Tensor], Tensor], features: int) -> None:
        super().__init__()
        self.patches, self.path, self.linear = nn.Conv2d(3, 4, 3, stride=3), path, nn.Linear(features, 5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.linear(self.path(self.patches(x).relu()))
        return answer if answer.ndim == 2 else answer.mean(1)


PLACES: list[tuple[str, nn.Module, str]] = [
    ("flattened", Tokens(lambda y: y.flatten(1), 36), "on 3 x 3 places, so it cannot turn with the picture; say so, "),
    ("dropped", Tokens(lambda y: functional.dropout(y.view(len(y), -1)), 36), "grids={'linear': (4, 3, 3)}, or pool"),
    ("mixed", Tokens(lambda y: y.flatten(2), 9), "a linear layer that mixes 3 x 3 places"),
    (
        "mixed after all",
        Tokens(lambda y: y.flatten(2).transpose(1, 2).tanh().permute(0, 2, 1), 9),
        "mixes 3 x 3 places",
    ),
    ("cut by hand", Tokens(lambda y: functional.unfold(y, 3, stride=3).mT, 36), "on patches of 3 x 3 pixels"),
    ("pooled", Tokens(lambda y: y.mean((-2, -1)), 4), ""),
    ("pooled by a layer", Tokens(lambda y: functional.adaptive_avg_pool2d(y, 1).flatten(1), 4), ""),
    ("tokens", Tokens(lambda y: y.flatten(2).mT, 4), ""),
    ("as many features as places", Tokens(lambda y: y.flatten(2).mT[:, :4, [0, 1, 2, 3, 0, 1, 2, 3, 0]], 9), ""),
]


@pytest.mark.parametrize(("model", "words"), [pytest.param(*row[1:], id=row[0]) for row in PLACES])
def test_the_plan_names_linear_layers_that_tell_places_apart(model: nn.Module, words: str) -> None:
    model.eval()
    uneven = [str(found) for found in se.plan(model, "C4", softness=0.0, image_size=9).uneven]
    assert [found.startswith("linear: ") and words in found for found in uneven] == [True] * bool(words)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    soft = se.soften(copy.deepcopy(model), "C4", softness=0.0)
    with torch.no_grad():
        assert (soft(x.rot90(1, (-2, -1))) - soft(x)).abs().max() > 100 * EXACT or not words


def test_a_linear_layer_whose_grid_is_told_turns() -> None:
    model, grids = Tokens(lambda y: y.flatten(1), 36), {"linear": (4, 3, 3)}
    assert se.plan(model, "C4", softness=0.0, image_size=9, grids=grids).uneven == ()
    soft, x = se.soften(model, "C4", softness=0.0, grids=grids), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert (soft(x.rot90(1, (-2, -1))) - soft(x)).abs().max() < EXACT


def test_attribution_does_not_blame_a_linear_layer_for_places_that_are_filtered() -> None:
    x, words = torch.randn(2, 3, 9, 9), "linear layer on 3 x 3 places"
    flat = Tokens(lambda y: y.flatten(1), 36)
    assert words in str(se.attribute(flat, x, "C4"))
    soft = se.soften(flat, "C4", softness=0.5, grids={"linear": (4, 3, 3)})
    assert words not in str(se.attribute(soft, x, "C4"))


def test_the_dry_run_draws_no_random_numbers() -> None:
    model = behind(nn.Upsample(scale_factor=2))
    before = torch.random.get_rng_state()
    se.plan(model, "C4", softness=0.0, image_size=8)
    assert torch.equal(before, torch.random.get_rng_state())


def swin_v2() -> nn.Module:
    config = transformers.Swinv2Config(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    return transformers.Swinv2Model(config)


def test_swin_v2_says_what_tells_directions_apart() -> None:
    reasons = {skipped.name: skipped.reason for skipped in se.plan(swin_v2(), "C4", softness=0.0).skipped}
    biases = [reason for name, reason in reasons.items() if "continuous_position_bias_mlp" in name]
    assert len(biases) == 8 and all("makes the biases of attention from coordinates" in reason for reason in biases)
    assert "merges 2 x 2 neighbours" in reasons["encoder.layers.0.downsample.reduction.weight"]


def aimv2(native: bool) -> nn.Module:
    config = transformers.Aimv2VisionConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        is_native=native,
    )
    return transformers.Aimv2VisionModel(config)


def test_positions_that_are_made_as_the_model_runs_tell_directions_apart() -> None:
    (told,) = se.plan(aimv2(True), "C4", softness=0.0).uneven
    assert "embeddings: it makes waves of rows and columns as it runs" in str(told)
    assert se.plan(aimv2(False), "C4", softness=0.0).uneven == ()


def test_rotary_positions_are_told_of_once() -> None:
    planned = se.plan(CASES["dinov3"].model(), "C4", softness=0.0)
    assert "rotary positions" in str(planned) and planned.uneven == ()
