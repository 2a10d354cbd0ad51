"""Is a table of positions taken where its rows are the patches of a picture, and only there?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import softequiv as se
from softequiv.adapt.positions import PatchGrid, tables

EXACT = 1e-5  # float32 rounding through a few layers, relative to the largest score
WIDE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SHORT = {key: value for key, value in WIDE.items() if key != "intermediate_size"}


def detr(positions: str = "sine") -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    sizes = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim", "layers")
    }
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=backbone,
        d_model=32,
        position_embedding_type=positions,
        **sizes,
    )
    return transformers.DetrForObjectDetection(config)


def sam() -> nn.Module:
    config = transformers.SamVisionConfig(
        mlp_dim=64, image_size=128, patch_size=16, window_size=14, global_attn_indexes=[1], output_channels=16, **SHORT
    )
    return transformers.SamVisionModel(config)


def vitdet() -> nn.Module:
    config = transformers.VitDetConfig(
        image_size=64, pretrain_image_size=32, patch_size=16, use_relative_position_embeddings=True, **SHORT
    )
    return transformers.VitDetModel(config)


def texts_and_pictures(kind: Any, model: Any, places: int) -> nn.Module:
    text = {"vocab_size": 50, "max_position_embeddings": places, "bos_token_id": 0, "eos_token_id": 1, **WIDE}
    return model(kind(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **WIDE}))  # type: ignore


def siglip() -> nn.Module:
    return texts_and_pictures(transformers.SiglipConfig, transformers.SiglipModel, 64)


def owlvit() -> nn.Module:
    return texts_and_pictures(transformers.OwlViTConfig, transformers.OwlViTModel, 16)


def vilt() -> nn.Module:
    config = transformers.ViltConfig(image_size=32, patch_size=8, max_position_embeddings=16, vocab_size=50, **WIDE)
    return transformers.ViltModel(config)


def whisper() -> nn.Module:
    sizes = {
        f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim", "layers")
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return transformers.WhisperModel(transformers.WhisperConfig(d_model=32, vocab_size=60, **sizes, **tokens))


def yolos(detections: int = 100) -> nn.Module:
    config = transformers.YolosConfig(
        image_size=[224, 224], patch_size=16, num_detection_tokens=detections, use_mid_position_embeddings=True, **WIDE
    )
    return transformers.YolosModel(config)


def vivit() -> nn.Module:
    return transformers.VivitModel(
        transformers.VivitConfig(image_size=56, num_frames=32, tubelet_size=[2, 14, 14], **WIDE)
    )


def videomae() -> nn.Module:
    config = transformers.VideoMAEConfig(image_size=32, patch_size=8, num_frames=4, tubelet_size=2, **WIDE)
    return transformers.VideoMAEModel(config)


def levit() -> nn.Module:
    config = transformers.LevitConfig(
        image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[1, 2, 3], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    return transformers.LevitModel(config)


def mllama() -> nn.Module:
    config = transformers.MllamaVisionConfig(
        image_size=32,
        patch_size=8,
        num_global_layers=1,
        attention_heads=2,
        vision_output_dim=96,
        intermediate_layers_indices=[0, 1],
        supported_aspect_ratios=[[1, 1], [1, 2]],
        **WIDE,
    )
    return transformers.MllamaVisionModel(config)


def llava() -> nn.Module:
    vision = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **WIDE}
    text = {"model_type": "llama", "vocab_size": 50, **WIDE}
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text))


def vit(height: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=(height, width), patch_size=8, num_labels=5, **WIDE)
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # tables that start at zero would prove nothing
                parameter.copy_(torch.randn(parameter.shape) * parameter[0].numel() ** -0.5)
    return model


def clip() -> nn.Module:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=32, patch_size=8, **WIDE))


def beit() -> nn.Module:
    config = transformers.BeitConfig(image_size=32, patch_size=8, use_absolute_position_embeddings=True, **WIDE)
    return transformers.BeitModel(config)


def ijepa() -> nn.Module:
    return transformers.IJepaModel(transformers.IJepaConfig(image_size=32, patch_size=8, **WIDE))


def mae() -> nn.Module:
    decoder = {f"decoder_{key}": value for key, value in WIDE.items()}
    return transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(image_size=32, patch_size=8, **WIDE, **decoder))


def pvt() -> nn.Module:
    config = transformers.PvtConfig(
        image_size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    )
    return transformers.PvtModel(config)


def hiera() -> nn.Module:
    config = transformers.HieraConfig(
        image_size=[64, 64],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1,
    )
    return transformers.HieraModel(config)


class Own(nn.Module):
    """Patches of 4 x 4 pixels, or none, and a table in front of or behind them."""

    def __init__(self, table: Tensor, patches: bool = True, name: str = "pos_embed", **stated: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4 if patches else 1)
        self.register_parameter(name, nn.Parameter(table))
        vars(self).update(stated)


def fixed(registered: bool, name: str = "pos_embed") -> nn.Module:
    """Positions that are not trained, beside a convolution that cuts patches."""
    model, table = nn.Module(), torch.randn(1, 16, 8)
    model.patches = nn.Conv2d(3, 8, 4, stride=4)
    if registered:
        model.register_buffer(name, table)
    else:
        model.pos_embed = table
    return nn.Sequential(model)


def biases(displacements: int, window: tuple[int, ...] | None) -> nn.Module:
    """A table of biases by displacement, and the window that its module states."""
    model = nn.Module()
    model.relative_position_bias_table = nn.Parameter(torch.randn(displacements, 2))
    if window:
        model.window_size = window  # type: ignore[assignment]
    return nn.Sequential(model, nn.Conv2d(3, 8, 3))


def timm_like() -> nn.Module:
    """A table of the model itself, whose patches are cut by a child that states their grid."""
    model, embed = nn.Module(), nn.Module()
    embed.proj, embed.grid_size = nn.Conv2d(3, 8, 4, stride=4), (2, 6)
    model.patch_embed, model.pos_embed = embed, nn.Parameter(torch.randn(1, 14, 8))
    return model


def torchvision_like() -> nn.Module:
    """A table of a child, whose parent cuts the patches and states the sizes."""
    model, encoder = nn.Module(), nn.Module()
    encoder.pos_embedding = nn.Parameter(torch.randn(1, 17, 8))
    model.conv_proj, model.encoder = nn.Conv2d(3, 8, 4, stride=4), encoder
    model.image_size, model.patch_size = 16, 4
    return model


def grids(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The tables that are found, with their grids and how many tokens stand before these."""
    return {
        f"{name}.{attribute}".strip("."): (*found.sizes, found.layout.skip)
        for name, _ in model.named_modules()
        for attribute, found in tables(model, name)
        if isinstance(found, PatchGrid)
    }


def reasons(model: nn.Module, group: str = "Reflection") -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in se.plan(model, group, softness=0.0).skipped}


LEFT_ALONE: list[tuple[str, Callable[[], nn.Module], str, str]] = [
    ("detr", detr, "model.query_position_embeddings.weight", "its rows are queries"),
    ("sam displacements", sam, "vision_encoder.layers.0.attn.rel_pos_h", "its rows are displacements"),
    ("sam", sam, "vision_encoder.pos_embed", r"its channels come last.*not \(1, 8, 8, width\)"),
    ("vitdet", vitdet, "encoder.layer.1.attention.rel_pos_w", "its rows are displacements"),
    ("siglip", siglip, "text_model.embeddings.position_embedding.weight", "its rows are places in a text"),
    ("owl-vit", owlvit, "text_model.embeddings.position_embedding.weight", "its rows are places in a text"),
    ("vilt", vilt, "embeddings.text_embeddings.position_embeddings.weight", "its rows are places in a text"),
    ("whisper", whisper, "decoder.embed_positions.weight", "its rows are places in a text"),
    ("whisper sound", whisper, "encoder.embed_positions.weight", "nothing says that 1500 positions are patches"),
    ("yolos", yolos, "embeddings.position_embeddings", "it has rows for detections behind"),
    ("yolos with four", lambda: yolos(4), "embeddings.position_embeddings", "it has rows for detections behind"),
    ("yolos between", yolos, "encoder.interpolation.mid_position_embeddings", "no axes of 1 x 1 x 297 x 32 are known"),
    ("vivit", vivit, "embeddings.position_embeddings", "257 positions are not the 4 x 4 patches"),
    (
        "no patches",
        lambda: Own(torch.randn(1, 16, 8), patches=False),
        "pos_embed",
        "nothing says that 16 positions are patches of a picture.*state image_size and patch_size.*soften_weight",
    ),
    (
        "another name",
        lambda: Own(torch.randn(1, 16, 8), name="pos"),
        "pos",
        "nothing says that 16 positions are patches of a picture",
    ),
    (
        "another size",
        lambda: Own(torch.randn(1, 16, 8), image_size=32),
        "pos_embed",
        "16 positions are not the 8 x 8 patches of its pictures and up to 8 other tokens before them.*soften_weight",
    ),
    ("no square", lambda: Own(torch.randn(1, 61, 8)), "pos_embed", "61 positions are no square grid.*state image_size"),
    (
        "frames",
        lambda: Own(torch.randn(1, 16, 8), name="temporal_pos_embed"),
        "temporal_pos_embed",
        "its rows are frames",
    ),
    (
        "rows",
        lambda: Own(torch.randn(16, 8), name="row_embed"),
        "row_embed",
        "its rows are the rows or columns of pict",
    ),
    (
        "detr, learned",
        lambda: detr("learned"),
        "model.position_embedding.column_embeddings.weight",
        "the rows or columns",
    ),
    ("detr, waves", detr, "model.position_embedding", "positions are fixed waves.*tell rows from columns"),
    ("a buffer", lambda: fixed(registered=True), "0.pos_embed", "it is no parameter, so it stays.*make it one"),
    ("a tensor", lambda: fixed(registered=False), "0.pos_embed", "it is no parameter, so it stays.*make it one"),
    ("a buffer of waves", lambda: fixed(True, "pe"), "0.pe", "nothing says that 16 positions are patches"),
    ("videomae", videomae, "embeddings.position_embeddings", "32 positions are not the 4 x 4 patches"),
    ("levit", levit, "encoder.stages.0.layers.0.module.attention_biases", "biases of attention by displacement.*apart"),
    ("mllama", mllama, "gated_positional_embedding.embedding", "nothing says whether 17 x 32 are channels or places"),
    ("a map of scales", lambda: Own(torch.randn(8, 16, 16), name="scale"), "scale", "nothing says whether 8 x 16 x 16"),
    (
        "a norm",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 4, 4])),
        "1.weight",
        "each of 8 x 4 x 4 places",
    ),
    (
        "its shift",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 4, 4])),
        "1.bias",
        "each of 8 x 4 x 4 places",
    ),
    (
        "words",
        siglip,
        "text_model.embeddings.token_embedding.weight",
        "looked up by number, and nothing says that they",
    ),
    ("rotary text", llava, "model.language_model.rotary_emb", "rotary positions of a text"),
    ("class token", lambda: vit(32, 32), "vit.embeddings.cls_token", "acts on channels"),
    (
        "a window of frames",
        lambda: biases(1521, (5, 7, 7)),
        "0.relative_position_bias_table",
        "its window is .5, 7, 7.",
    ),
    ("no window", lambda: biases(16, None), "0.relative_position_bias_table", "16 displacements.*no window is stated"),
    ("a map of its own", lambda: Own(torch.randn(6, 4, 4)), "pos_embed", "no axis of 6 x 4 x 4 is known to run over"),
    ("a cube", lambda: Own(torch.randn(1, 4, 4, 4)), "pos_embed", "no axes of 1 x 4 x 4 x 4 are known to be a grid"),
]


@pytest.mark.parametrize(("build", "name", "reason"), [pytest.param(*row[1:], id=row[0]) for row in LEFT_ALONE])
def test_tables_of_anything_else_are_left_alone_and_say_why(build: Any, name: str, reason: str) -> None:
    model = build()
    assert name not in grids(model)
    assert re.search(reason, reasons(model)[name])


def test_a_table_of_the_model_itself_is_named_once() -> None:
    model = biases(16, None)[0]
    model.patches = nn.Conv2d(3, 8, 3)
    assert [left.name for left in se.plan(model, "C4", softness=0.0).skipped] == ["relative_position_bias_table"]


def test_object_queries_stay_as_many_as_they_were() -> None:
    model = detr()
    before = model.model.query_position_embeddings.weight.detach().clone()
    se.soften(model, "C4", softness=0.0)
    assert torch.equal(model.model.query_position_embeddings.weight, before)


def test_asking_for_such_a_table_is_answered_with_the_reason() -> None:
    with pytest.raises(se.SoftEquivError, match="cannot be softened: its rows are queries"):
        se.soften(detr(), "C4", softness=0.0, only=["*query_position*"])


FOUND: list[tuple[str, Callable[[], nn.Module], dict[str, tuple[int, ...]]]] = [
    ("vit", lambda: vit(32, 32), {"vit.embeddings.position_embeddings": (4, 4, 1)}),
    ("wide vit", lambda: vit(32, 128), {"vit.embeddings.position_embeddings": (4, 16, 1)}),
    ("vitdet", vitdet, {"embeddings.position_embeddings": (2, 2, 1)}),
    ("siglip", siglip, {"vision_model.embeddings.position_embedding.weight": (4, 4, 0)}),
    ("owl-vit", owlvit, {"vision_model.embeddings.position_embedding.weight": (4, 4, 1)}),
    ("vilt", vilt, {"embeddings.position_embeddings": (4, 4, 1)}),
    ("clip", clip, {"embeddings.position_embedding.weight": (4, 4, 1)}),
    ("beit", beit, {"embeddings.position_embeddings": (4, 4, 1)}),
    ("i-jepa", ijepa, {"embeddings.position_embeddings": (4, 4, 0)}),
    ("mae", mae, {"vit.embeddings.position_embeddings": (4, 4, 1), "decoder.decoder_pos_embed": (4, 4, 1)}),
    (
        "pvt, whose stages have tables of their own",
        pvt,
        {
            "encoder.patch_embeddings.0.position_embeddings": (8, 8, 0),
            "encoder.patch_embeddings.1.position_embeddings": (4, 4, 1),
        },
    ),
    ("hiera, whose patches overlap", hiera, {"embeddings.position_embeddings": (16, 16, 0)}),
    ("beside patches", lambda: Own(torch.randn(1, 26, 8)), {"pos_embed": (5, 5, 1)}),
    ("a picture's size", lambda: Own(torch.randn(1, 9, 8), image_size=(4, 32)), {"pos_embed": (1, 8, 1)}),
    (
        "sizes of pictures and patches",
        lambda: nn.Sequential(Own(torch.randn(1, 32, 8), patches=False, image_size=(16, 32), patch_size=4)),
        {"0.pos_embed": (4, 8, 0)},
    ),
    ("a grid", lambda: Own(torch.randn(1, 9, 8), grid_size=(4, 2)), {"pos_embed": (4, 2, 1)}),
    ("timm", timm_like, {"pos_embed": (2, 6, 2)}),
    ("torchvision", torchvision_like, {"encoder.pos_embedding": (4, 4, 1)}),
    ("a map", lambda: Own(torch.randn(1, 8, 5, 5)), {"pos_embed": (5, 5, 0)}),
    ("a wide map", lambda: Own(torch.randn(1, 8, 4, 6), image_size=(16, 24)), {"pos_embed": (4, 6, 0)}),
]


@pytest.mark.parametrize(("build", "expected"), [pytest.param(*row[1:], id=row[0]) for row in FOUND])
def test_tables_over_patches_are_found_with_their_grid(build: Any, expected: dict[str, tuple[int, ...]]) -> None:
    assert grids(build()) == expected


@pytest.mark.parametrize("sizes", [(32, 32), (32, 128)])
def test_pictures_of_any_sides_may_be_flipped_at_softness_zero(sizes: tuple[int, int]) -> None:
    model = vit(*sizes)
    plan = se.plan(model, "Reflection", softness=0.0)
    assert plan.note == "" and plan.uneven == ()
    x = torch.randn(2, 3, *sizes)
    with torch.no_grad():
        plain = model(x).logits
        assert (model(x.flip(-1)).logits - plain).abs().max() > 100 * EXACT * plain.abs().max()
        se.soften(model, "Reflection", softness=0.0)
        soft = model(x).logits
        assert (model(x.flip(-1)).logits - soft).abs().max() < EXACT * soft.abs().max()


def test_a_quarter_turn_does_not_act_on_a_grid_that_is_not_square() -> None:
    plan = se.plan(vit(32, 128), "C4", softness=0.0)
    assert [weight.found.what for weight in plan.weights] == ["patch embedding"]
    assert "C4 turns squares, and (4, 16) is not one" in str(plan)


def test_a_table_that_is_not_found_can_be_filtered_by_hand() -> None:
    model = Own(torch.randn(1, 17, 8), patches=False)
    gain, layout = se.softness(0), se.nn.Layout(axis=1, skip=1)
    se.nn.soften_weight(model, "pos_embed", se.nn.Soft(se.grid(se.C(4), 4, 4), gain, layout))
    (weight,) = se.soft_weights(model)
    assert torch.allclose(weight.group_view(), weight.group_view().rot90(1, (-2, -1)), atol=EXACT)


def test_biases_of_a_class_token_stay_behind_those_of_a_window() -> None:
    model = biases(9 * 5 + 3, (5, 3))
    table = model[0].relative_position_bias_table.detach().clone()
    se.soften(model, "Reflection", softness=0.0)
    soft = model[0].relative_position_bias_table
    picture = soft[:45].unflatten(0, (9, 5))
    assert torch.equal(soft[45:], table[45:]) and not torch.equal(soft[:45], table[:45])
    assert torch.allclose(picture, picture.flip(1), atol=EXACT)
