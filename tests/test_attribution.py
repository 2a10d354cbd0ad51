"""Do the parts of an error add up to it, and is the right layer blamed?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softequiv as se
from softequiv.actions import Pictures, Still, Tokens
from softequiv.errors import SoftEquivError
from softequiv.groups import Element
from softequiv.measure import attribute
from softequiv.measure.attribution import telescope
from softequiv.measure.causes import common_name
from softequiv.measure.cuts import find_cuts, replaced
from zoo import CASES, answer

C4 = se.C(4)
QUARTER = C4.element(1)
TURN = se.SO(2).element(se.degrees(45))


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """x + conv2(relu(conv1(x))): nothing inside the branch decides the answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.relu(self.conv1(x)))


def users_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.MaxPool2d(2),
        Residual(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


MODELS: dict[str, tuple[Any, int]] = {
    "vit": (CASES["vit"].model, 20),
    "resnet": (CASES["resnet"].model, 32),
    "users": (users_model, 16),
}


# --- the parts add up ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("g", [QUARTER, se.SO(2).element(0.4)], ids=["quarter", "0.4"])
def test_parts_add_up_to_the_whole(name: str, dtype: torch.dtype, g: Element) -> None:
    build, size = MODELS[name]
    model, x = build().to(dtype), pictures(2, 3, size, size).to(dtype)
    with torch.no_grad():
        cuts, _ = find_cuts(model, x, g.group)
        steps = telescope(model, x, g, cuts, Pictures(), Still())
        upright = answer(model, x)
        whole = answer(model, Pictures()(x, g)) - upright
    parts = steps[:-1] - steps[1:]
    assert len(parts) == len(cuts) + 1 > 4
    near = 1e-10 if dtype == torch.float64 else 1e-5
    assert float((parts.sum(0) - whole).norm()) <= near * float(whole.norm())
    assert float(whole.norm()) > 1e-3 * float(upright.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_holds_everything_that_the_answer_needs(name: str) -> None:
    """Replaced by the features of another input, it gives that input's answer; modules that do not are not used."""
    build, size = MODELS[name]
    model, x, other = build(), pictures(2, 3, size, size), pictures(2, 3, size, size, seed=1)
    cuts, _ = find_cuts(model, x, C4)
    for cut in cuts:
        kept: list[Tensor] = []
        module = model.get_submodule(cut.name)
        handle = module.register_forward_hook(
            lambda _, inputs, result, kept=kept: kept.append(
                (result if isinstance(result, Tensor) else result[0]).clone()
            )
        )
        with torch.no_grad():
            expected = answer(model, other)
            handle.remove()
            with replaced(module, kept[0]):
                assert torch.allclose(answer(model, x), expected, atol=1e-5), cut.name


def test_modules_inside_a_branch_are_no_cuts() -> None:
    cuts, behind = find_cuts(users_model(), pictures(2, 3, 16, 16), C4)
    assert [cut.name for cut in cuts] == ["0", "1", "3", "4", "5", "6", "7"]  # 2 writes into the tensor of 1
    assert behind == ("8",)
    contents = {cut.name: cut.contents for cut in cuts}
    assert contents["3"] == ("2", "3.conv1", "3.relu", "3.conv2")


def test_features_move_as_what_they_are() -> None:
    case = CASES["dinov2-registers"]
    cuts, _ = find_cuts(case.model(), case.input(), C4)
    kinds = [cut.acts for cut in cuts]
    assert kinds[0] == Pictures(padding="border")  # the projection, (N, D, 3, 3)
    assert kinds[1] == Tokens(3, 3, padding="border")
    assert Tokens(3, 3, extra=4, padding="border") in kinds  # a class token and three registers
    assert all(kind == Tokens(3, 3, extra=4, padding="border") for kind in kinds[2:])


def test_maps_with_channels_last_and_lopsided_padding_are_no_cuts() -> None:
    class ChannelsLast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 2, 3, 1)

    class ChannelsFirst(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 3, 1, 2)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        ChannelsLast(),
        ChannelsFirst(),
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(4, 4, 2),
        nn.Flatten(),
    )
    assert [cut.name for cut in find_cuts(net, pictures(2, 3, 8, 8), C4)[0]] == ["0", "2", "4"]


def test_affine_layers_on_single_pixels_are_never_to_blame() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    net[1].running_mean.normal_()
    found = {part.name: part for part in attribute(net, pictures(4, 3, 12, 12), se.SO(2), se.degrees(30)).parts}
    assert found["0"].size > 0.05 and found["3"].size > 0.05
    assert found["1"].size < 1e-5 and found["2"].size < 1e-5


def test_at_most_so_many_cuts() -> None:
    case = CASES["efficientnet"]
    everything, few = (find_cuts(case.model(), case.input(), C4, most=most)[0] for most in (1000, 5))
    assert len(everything) > 20 and len(few) == 5
    assert sum(len(cut.contents) for cut in few) <= sum(len(cut.contents) for cut in everything)
    assert few[-1].name == everything[-1].name


def test_the_model_is_left_as_it_was() -> None:
    model, x = users_model().train(), pictures(2, 3, 16, 16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attribute(model, x, C4)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# --- the right one is blamed -----------------------------------------------------------------------------------------


def equivariant_net() -> nn.Module:
    """Exactly C4-equivariant: symmetric kernels, odd sizes, no stride."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return se.bake(se.soften(net, "C4", softness=0.0)).eval()


def test_an_equivariant_net_has_no_parts() -> None:
    found = attribute(equivariant_net(), pictures(4, 3, 9, 9), C4, elements=3)
    assert found.exact and found.culprit is None
    assert float(found.gram.abs().max()) < 1e-9
    assert str(found).startswith("nothing to blame")


@pytest.mark.parametrize("place", ["0", "2", "4"])
def test_a_planted_kernel_is_named_first(place: str) -> None:
    net = equivariant_net()
    with torch.no_grad():
        net.get_submodule(place).weight[:, :, 0, 1] += 0.3
    found = attribute(net, pictures(4, 3, 9, 9), C4)
    assert found.culprit is not None and found.culprit.name == place
    assert found.culprit.share == pytest.approx(1.0, abs=1e-4)
    first = str(found).splitlines()[0]
    assert first.startswith(f"culprit: {place}, 100% of the error: kernel {place}.weight") and "soften" in first
    assert found.without(place) < 1e-4


def test_a_lopsided_stride_is_named_with_a_size_that_fits() -> None:
    net = equivariant_net()
    net[2].stride = (2, 2)
    assert attribute(net, pictures(4, 3, 9, 9), C4).exact
    first = str(attribute(net, pictures(4, 3, 10, 10), C4)).splitlines()[0]
    assert "culprit: 2," in first and "stride 2 leaves 1 of 10 pixels out" in first and "9 or 11 pixels" in first


def test_a_lopsided_stride_of_a_soft_model_is_named_too() -> None:
    case = CASES["resnet"]
    found = attribute(se.soften(case.model(), "C4", softness=0.0), case.input(32), C4)
    told = {part.name: part.causes[0].what for part in found.parts if part.size > 0.1}
    assert len(told) >= 2 and all("stride 2 leaves 1 of" in what for what in told.values())
    assert not found.note


def test_a_position_table_is_named() -> None:
    case = CASES["vit"]
    model = se.soften(case.model(), "C4", softness=0.0, skip=["*position_embeddings"])
    found = attribute(model, case.input(), C4)
    assert found.culprit is not None and found.culprit.share == pytest.approx(1.0, abs=1e-3)
    assert "position embedding vit.embeddings.position_embeddings" in found.verdict
    assert "only=['vit.embeddings.position_embeddings']" in found.verdict


def test_a_patch_embedding_is_named() -> None:
    case = CASES["vit"]
    model = se.soften(case.model(), "C4", softness=0.0, only=["*position_embeddings"])
    found = attribute(model, case.input(), C4)
    assert "patch embedding vit.embeddings.patch_embeddings.projection.weight" in found.verdict
    assert found.culprit is not None and found.culprit.share == pytest.approx(1.0, abs=1e-3)


def test_flattened_places_are_named() -> None:
    case = CASES["mlp"]
    assert "turns places into channels" in attribute(case.model(), case.input(), C4).verdict


def test_zero_padding_is_named_under_shifts() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = attribute(net, pictures(4, 3, 8, 8), se.Shifts(8, 8))
    assert "padding of 0" in found.verdict and "circular" in found.verdict
    net[0].padding_mode, net[0]._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]
    assert attribute(net, pictures(4, 3, 8, 8), se.Shifts(8, 8)).exact


def test_interpolation_of_the_input_is_named_where_nothing_else_is_to_blame() -> None:
    """Single pixels in, their mean out: only what resampling loses can matter."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = attribute(net, pictures(4, 3, 12, 12), se.SO(2), se.degrees(30))
    assert found.resampling > 0 and "interpolation of the input, and what leaves its frame" in found.verdict


def test_what_leaves_the_frame_of_a_map_is_not_taken_for_interpolation() -> None:
    """Smooth pictures and a lopsided kernel: turned there and back the picture keeps its middle."""
    torch.manual_seed(0)
    net, g = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), se.SO(2).element(0.5)
    x = nn.functional.avg_pool2d(nn.functional.avg_pool2d(pictures(4, 3, 56, 56), 9, 1), 9, 1)
    found = attribute(net, x, "SO(2)", elements=[g])
    assert "kernel 0.weight" in found.verdict
    with torch.no_grad():
        y, moved = net(x), net(Pictures()(x, g))
        back = net(Pictures()(Pictures()(x, g), g.inverse))
    inside = Pictures().valid(y, g) & Pictures().valid(y, g.inverse)
    whole = ((moved - Pictures()(y, g)) * inside).norm()
    assert found.resampling == pytest.approx(float(((back - y) * inside).norm() / whole), rel=1e-4)
    assert found.error == pytest.approx(float(whole / (Pictures()(y, g) * inside).norm()), rel=1e-4)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_only_zeros_mark_the_border_of_a_turned_picture(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    found = attribute(net, pictures(2, 3, 12, 12), se.SO(2), se.degrees(30), target=Still())
    kinds = {cause.kind for part in found.parts for cause in part.causes}
    assert ("padding" in kinds) == (mode == "zeros")


def test_a_maximum_reads_nothing_beyond_the_border() -> None:
    net = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = attribute(net, pictures(2, 3, 12, 12), se.SO(2), se.degrees(30))
    told = {part.name: {cause.kind for cause in part.causes} for part in found.parts}
    assert "padding" not in told["0"] and "padding" in told["1"]


class MeanOf(nn.Module):
    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.axes)


class ChannelsToTheEnd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("seed", range(3))
def test_flat_maps_and_channels_last_are_not_taken_for_pictures(seed: int) -> None:
    """16 channels of 17 x 17 places are no 16 tokens, and a cube of 16 x 16 x 16 may have its channels last."""
    torch.manual_seed(seed)
    flat = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(2), nn.ReLU(), MeanOf(-1), nn.Linear(16, 4)
    )
    cube = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), ChannelsToTheEnd(), nn.LayerNorm(16), MeanOf(1, 2), nn.Linear(16, 4)
    )
    for net, size in ((flat, 17), (cube, 16)):
        with torch.no_grad():
            net[0].weight.mul_(0.2)
            net[0].bias.mul_(5)
        found = attribute(net, pictures(8, 3, size, size), C4)
        assert found.culprit is not None and found.culprit.name == "0"
        assert found.culprit.share == pytest.approx(1.0, abs=1e-3)


def test_a_model_that_writes_into_its_input_gets_a_copy() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.ReLU(inplace=True), *users_model()), pictures(2, 3, 16, 16)
    kept = x.clone()
    found = attribute(net, x, C4)
    net[0].inplace = False
    assert torch.equal(x, kept) and found.error == pytest.approx(attribute(net, x, C4).error, rel=1e-5)


def test_remedies_are_ones_that_work() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    causes = {part.name: part.causes[0] for part in attribute(net, pictures(2, 3, 12, 12), C4).parts[:2]}
    assert "soften(" not in causes["0"].remedy and "cannot filter it" in causes["0"].remedy
    assert "soften(model, 'C4', softness=..., only=['1.weight'])" in causes["1"].remedy
    soft = se.soften(net, "C4", softness=0.5)
    causes = {part.name: part.causes[0] for part in attribute(soft, pictures(2, 3, 12, 12), C4).parts[:2]}
    assert "set_softness(model, ..., only=['1.weight'])" in causes["1"].remedy
    assert "where it has an error target, which that would drop, bake the model and soften" in causes["1"].remedy
    se.set_softness(soft, 0.0, only=["1.weight"])


def test_more_cuts_are_advised_where_some_were_left_out() -> None:
    class Lopsided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(x.shape[-1])

    net = nn.Sequential(Lopsided(), nn.ReLU(), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    few, all_of_them = (attribute(net, pictures(2, 3, 8, 8), C4, most=most).verdict for most in (1, 40))
    assert "most=" in few and "most=" not in all_of_them and "no known cause" in all_of_them


def test_an_unknown_ending_of_a_plot_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SoftEquivError, match="'foo' is not supported"):
        attribute(users_model(), pictures(2, 3, 16, 16), C4).plot(tmp_path / "parts.foo")


def test_quarter_turns_need_no_interpolation() -> None:
    assert attribute(users_model(), pictures(2, 3, 16, 16), C4).resampling == 0


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_shares_sum_to_one_and_errors_without_parts_follow_from_the_parts() -> None:
    model, x = users_model().double(), pictures(3, 3, 16, 16).double()
    found = attribute(model, x, C4, elements=[QUARTER])
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    with torch.no_grad():
        cuts, _ = find_cuts(model, x, C4)
        steps = telescope(model, x, QUARTER, cuts, Pictures(), Still())
        upright = answer(model, x)
    parts, whole = steps[:-1] - steps[1:], steps[0] - steps[-1]
    for i, part in enumerate(found.parts):
        assert part.share == pytest.approx(float((parts[i] * whole).sum() / whole.square().sum()), abs=1e-9)
        assert part.size == pytest.approx(float(parts[i].norm() / whole.norm()), abs=1e-9)
        assert part.without == pytest.approx(float((whole - parts[i]).norm() / whole.norm()), abs=1e-6)
    names = [part.name for part in found.parts]
    assert found.without(*names) == 0 and found.without() == pytest.approx(1.0)
    assert found.error == pytest.approx(float(whole.norm() / upright.norm()))


def test_the_table_is_sorted_and_the_dict_is_plain(tmp_path: Path) -> None:
    found = attribute(users_model(), pictures(3, 3, 16, 16), C4)
    lines = str(found).splitlines()
    assert lines[0].startswith("culprit: ") and lines[2].split()[:2] == ["part", "share"]
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[3:-1]]
    assert shares == sorted(shares, reverse=True) and len(shares) >= 3
    told = json.loads(json.dumps(found.to_dict()))
    assert told["parts"][0]["name"] == found.names[0] and told["verdict"] == lines[0]


def test_the_bar_chart_has_a_bar_for_each_part(tmp_path: Path) -> None:
    found = attribute(users_model(), pictures(3, 3, 16, 16), C4)
    found.plot(tmp_path / "parts.svg")
    drawing = (tmp_path / "parts.svg").read_text()
    assert all(f"<!-- {name} -->" in drawing for name in found.names)


@pytest.mark.parametrize(
    ("contents", "name"),
    [
        (("a.b.c",), "a.b.c"),
        (("a.b.c", "a.b.d"), "a.b"),
        (("a.b.c", "a.b.c.weight"), "a.b.c"),
        (("a.b", "c.d"), "a.b to c.d"),
        ((), ""),
    ],
)
def test_a_part_is_called_after_what_it_holds(contents: tuple[str, ...], name: str) -> None:
    assert common_name(contents) == name


def test_scores_per_pixel_are_attributed_inside_the_frame() -> None:
    case = CASES["cnn"]
    found = attribute(case.model(), case.input(), se.SO(2), elements=[se.SO(2).element(0.3)])
    assert sum(part.share for part in found.parts) == pytest.approx(1.0) and found.error > 0.01


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.zeros_like(x.mean((-2, -1))))


@pytest.mark.parametrize(
    ("model", "data", "group", "options", "words"),
    [
        (users_model(), pictures(0, 3, 16, 16), "C4", {}, "the data is empty"),
        (users_model(), pictures(2, 3, 16, 16), "SO(3)", {}, "does not act on pictures"),
        (users_model(), pictures(2, 3, 16, 16), "C1", {}, "moves nothing"),
        (users_model(), pictures(2, 3, 16, 16), "SO(2)", {"within": se.degrees(-1)}, "is empty"),
        (users_model(), pictures(2, 3, 16, 16), "SO(2)", {"acts": Still()}, "follows pictures"),
        (Constant(), pictures(2, 3, 16, 16), "C4", {}, "answers every input alike"),
        (users_model(), pictures(2, 3, 16, 16) / 0, "C4", {}, "inputs hold NaN or infinity"),
        (users_model(), pictures(2, 3, 16, 16), "C4", {"elements": [C4.identity]}, "identity moves nothing"),
        (users_model(), pictures(2, 3, 16, 16), "SO(2)", {"within": "1deg", "elements": [TURN]}, "outside the range"),
        (users_model(), pictures(2, 3, 16, 16), "C4", {"most": 0}, "most is a whole number of at least 1"),
        (users_model(), pictures(2, 3, 16, 16), "C4", {"batch_size": 0}, "batch_size is"),
        (users_model(), pictures(2, 3, 16, 16), "C4", {"target": "still"}, "target must be an action"),
        (nn.Linear(16, 3), pictures(16, 16), "C4", {}, r"got \(16,\)"),
        (nn.AdaptiveAvgPool2d(4), pictures(2, 3, 16, 16), "SO(2)", {"elements": [TURN]}, "stays inside the frame"),
    ],
)
def test_bad_input_gets_a_sentence(model: Any, data: Any, group: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SoftEquivError, match=words):
        attribute(model, data, group, **options)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(SoftEquivError, match="no part is called 'conv'"):
        attribute(users_model(), pictures(2, 3, 16, 16), C4).without("conv")
