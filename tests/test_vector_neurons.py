"""Do vector neurons compute their formulas, and commute exactly with rotations, up to whole forecasts?"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import softequiv as se
from draws import as_trained
from softequiv.actions import Points, Still
from softequiv.baselines.autoregressive import Autoregressive, ConstantVelocity
from softequiv.baselines.eqauto import EqAuto
from softequiv.baselines.vector_neurons import VNAttention, VNInvariant, VNLinear, VNNorm, VNReLU, quarter_turn
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.groups import Group
from softequiv.networks.forecaster import Forecaster
from softequiv.nn import SoftLinear, soft_weights
from softequiv.testing import assert_equivariant, equivariance_error

GROUPS: tuple[Group, ...] = (se.SO(2), se.O(2), se.SO(3), se.O(3))
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]


def features(group: Group, *lead: int) -> Tensor:
    """Drawn vectors in float64, (*lead, d)."""
    return torch.randn(*lead, se.vector(group).dim, dtype=torch.float64)


def layers(group: Group) -> dict[str, nn.Module]:
    return {
        "linear": VNLinear(8, 5, group),
        "cut": VNReLU(8, group),
        "leakless cut": VNReLU(8, group, slope=0),
        "norm": VNNorm(8),
        "attention": VNAttention(8, 2, group, causal=True),
        "stack": nn.Sequential(VNLinear(8, 8, group), VNReLU(8, group), VNNorm(8), VNAttention(8, 4, group)),
    }


# exactness


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("name", list(layers(se.SO(2))))
def test_layers_commute_with_their_group(name: str, group: Group, dtype: torch.dtype, tolerance: float) -> None:
    layer = layers(group)[name].to(dtype)
    rep, x = se.vector(group), features(group, 4, 6, 8)
    assert_equivariant(layer, group, rep, rep, inputs=x, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_invariant_head_does_not_turn(group: Group, dtype: torch.dtype, tolerance: float) -> None:
    head = VNInvariant(8, group).to(dtype)
    assert_equivariant(head, group, se.vector(group), Still(), inputs=features(group, 4, 8), tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_free_forecasts_of_eqauto_turn_with_the_past(group: Group, dtype: torch.dtype, tolerance: float) -> None:
    model, past = EqAuto(group, width=24, layers=4).to(dtype), features(group, 4, 8)
    past = past - past[:, -1:]  # so that forecasts are not measured against a far place
    assert_equivariant(
        lambda x: model.forecast(x, 12), group, Points(), Points(), inputs=past, dtype=dtype, tolerance=tolerance
    )


def test_right_angles_tell_left_from_right() -> None:
    """The maps of SO(2) commute with rotations alone, those of O(2) with reflections too."""
    rep, x = se.vector(se.O(2)), features(se.O(2), 4, 8)
    assert equivariance_error(VNLinear(8, 5, se.SO(2)), se.O(2), rep, rep, inputs=x) > 0.1
    assert equivariance_error(VNLinear(8, 5, se.O(2)), se.O(2), rep, rep, inputs=x) < 1e-5


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_linear_layer_has_every_map_that_commutes(group: Group) -> None:
    """Its weights give as many independent maps as there are equivariant ones."""
    rep, layer = se.vector(group), VNLinear(3, 2, group).double()
    free = se.spectrum(3 * rep >> 2 * rep).invariants
    assert sum(weight.numel() for weight in layer.parameters()) == free
    maps = []
    for i in range(free):
        with torch.no_grad():
            layer.mix.weight.zero_().view(-1)[i] = 1
        maps.append(layer(torch.eye(3 * rep.dim, dtype=torch.float64).unflatten(-1, (3, rep.dim))).flatten())
    assert torch.linalg.matrix_rank(torch.stack(maps)) == free


# formulas


def test_linear_maps_mix_vectors_and_their_quarter_turns() -> None:
    layer, x = VNLinear(3, 2, se.SO(2)).double(), features(se.SO(2), 5, 3)
    real, turned = layer.mix.weight.split(3, 1)
    for n in range(5):
        for i in range(2):
            mixed = sum(real[i, j] * x[n, j] + turned[i, j] * quarter_turn(x[n, j]) for j in range(3))
            torch.testing.assert_close(layer(x)[n, i], mixed)
    assert torch.equal(quarter_turn(torch.tensor([1.0, 0.0])), torch.tensor([0.0, 1.0]))  # as the group turns


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_what_points_against_the_direction_is_cut(slope: float) -> None:
    layer, x = VNReLU(4, se.SO(3), slope).double(), features(se.SO(3), 5, 4)
    k, y = layer.directions(x), layer(x)
    for n in range(5):
        for c in range(4):
            along = x[n, c] @ k[n, c]
            cut = x[n, c] if along >= 0 else x[n, c] - along * k[n, c] / (k[n, c] @ k[n, c])
            torch.testing.assert_close(y[n, c], slope * x[n, c] + (1 - slope) * cut)
    assert ((y * k).sum(-1) < -1e-9).any() == (slope > 0)


def test_a_cut_of_nothing_has_finite_gradients() -> None:
    x = torch.zeros(2, 4, 3, requires_grad=True)
    VNReLU(4, se.SO(3))(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_the_norm_follows_its_formula_and_keeps_speeds_apart() -> None:
    norm, x = VNNorm(4).double(), features(se.SO(3), 5, 4)
    with torch.no_grad():
        norm.scale.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        norm.floor.fill_(0.5)
    for n in range(5):
        mean = sum(float(x[n, c] @ x[n, c]) for c in range(4)) / 4
        for c in range(4):
            torch.testing.assert_close(norm(x)[n, c], (c + 1) * x[n, c] / math.sqrt(mean + 0.25), rtol=1e-7, atol=1e-9)
    assert norm(x).norm() > 1.1 * norm(x / 4).norm()


def test_invariants_are_inner_products_with_the_frame() -> None:
    head, x = VNInvariant(4, se.SO(3)).double(), features(se.SO(3), 5, 4)
    frame = head.frame(x)
    expected = [torch.stack([x[n, c] @ frame[n, j] for c in range(4) for j in range(3)]) for n in range(5)]
    torch.testing.assert_close(head(x), torch.stack(expected))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_weighs_values_by_inner_products_of_queries_and_keys(causal: bool, biased: bool) -> None:
    heads, steps, size = 2, 5, 3
    layer, x = VNAttention(4, heads, se.SO(3), causal=causal).double(), features(se.SO(3), 2, steps, 4)
    bias = torch.randn(heads, steps, steps, dtype=torch.float64) if biased else None
    query, key, value = layer.query(x), layer.key(x), layer.value(x)
    mixed = torch.zeros_like(x)
    for n in range(2):
        for head in range(heads):
            mine = slice(2 * head, 2 * head + 2)
            for t in range(steps):
                seen = range(t + 1) if causal else range(steps)
                logits = torch.stack([(query[n, t, mine] * key[n, s, mine]).sum() / math.sqrt(2 * size) for s in seen])
                if bias is not None:
                    logits = logits + bias[head, t, list(seen)]
                mixed[n, t, mine] = sum(w * value[n, s, mine] for w, s in zip(logits.softmax(0), seen, strict=True))
    torch.testing.assert_close(layer(x, bias), layer.out(mixed))


# what both forecasters share


def forecasters() -> dict[str, Autoregressive]:
    torch.manual_seed(0)
    return {
        "EqAuto": EqAuto(width=16, layers=2),
        "plain": Forecaster(16, layers=2),
        "soft": as_trained(Forecaster(16, layers=2, group=se.SO(2), gain=se.softness(0.5))),
        "strict": Forecaster(16, layers=2, group=se.SO(2)),
        "the paper's": as_trained(Forecaster(16, layers=2, group=se.SO(2), gain=se.softness(0.5), typed=False)),
        "constant velocity": ConstantVelocity(),
    }


@pytest.fixture(params=list(forecasters()))
def forecaster(request: pytest.FixtureRequest) -> Autoregressive:
    return forecasters()[request.param].double()


def test_a_step_is_answered_from_the_steps_up_to_it_alone(forecaster: Autoregressive) -> None:
    """Answer j follows position j + 1; whatever comes later, its own target first of all, leaves it unchanged."""
    x = features(se.SO(2), 3, 10)
    answers = forecaster(x)
    assert answers.shape == (3, 9, 2)
    for place in range(2, 10):
        other = x.clone()
        other[:, place:] += torch.randn(3, 10 - place, 2)
        changed = (forecaster(other) - answers).abs().amax((0, 2))
        assert (changed[: place - 1] < 1e-12).all() and (changed[place - 1 :] > 1e-6).all()


def test_a_forecast_is_the_next_answer_again_and_again(forecaster: Autoregressive) -> None:
    past = features(se.SO(2), 3, 8)
    track = past
    for _ in range(12):
        track = torch.cat([track, forecaster(track)[:, -1:]], 1)
    torch.testing.assert_close(forecaster.forecast(past, 12), track[:, 8:])


def test_where_a_track_lies_does_not_matter(forecaster: Autoregressive) -> None:
    past, place = features(se.SO(2), 3, 8), torch.tensor([30.0, -20.0], dtype=torch.float64)
    torch.testing.assert_close(forecaster.forecast(past + place, 12), forecaster.forecast(past, 12) + place)


def test_forecasts_leave_weights_as_they_are() -> None:
    model = forecasters()["soft"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.forecast(torch.randn(3, 8, 2), 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# the plain and the soft forecaster


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("group", [se.SO(2), se.O(2), se.C(8), se.SO(3)], ids=str)
def test_softness_0_forecasts_turn_with_the_past(group: Group, dtype: torch.dtype, tolerance: float) -> None:
    model, past = Forecaster(24, layers=4, heads=2, group=group).to(dtype), features(group, 4, 8)
    past = past - past[:, -1:]
    assert_equivariant(
        lambda x: model.forecast(x, 12), group, Points(), Points(), inputs=past, dtype=dtype, tolerance=tolerance
    )


@pytest.mark.parametrize("name", ["plain", "soft", "the paper's"])
def test_other_forecasters_tell_directions_apart(name: str) -> None:
    model, past = forecasters()[name].double(), features(se.SO(2), 4, 8)
    assert equivariance_error(lambda x: model.forecast(x, 12), se.SO(2), Points(), Points(), inputs=past) > 0.1


def test_linear_maps_are_plain_without_a_group_and_soft_with_one() -> None:
    plain, soft = Forecaster(16), Forecaster(16, group=se.SO(2))
    free = Forecaster(16, group=se.SO(2), gain=se.softness(1))
    assert not list(soft_weights(plain))
    linear = [module for module in soft.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(module, SoftLinear) for module in linear) and len(linear) == 4 * 6 + 2
    for found in soft_weights(free):
        weight = torch.randn(found.soft.rep.shape)
        assert torch.equal(found.filtered(weight), weight)


def test_the_papers_network_has_equivariant_maps_between_ordinary_functions() -> None:
    """Softness 0 makes every linear map commute, and still not the network."""
    model = Forecaster(16, layers=2, group=se.SO(2), typed=False).double()
    for module in model.modules():
        if isinstance(module, SoftLinear):
            assert_equivariant(module, se.SO(2), module.source, module.target)
    past = features(se.SO(2), 4, 8)
    assert equivariance_error(lambda x: model.forecast(x, 12), se.SO(2), Points(), Points(), inputs=past) > 0.1


def test_networks_of_one_width_are_of_one_size_within_a_fifth() -> None:
    """Gates and lengths are what the typed one adds; EqAuto adds the directions of its cuts."""
    counts = {
        name: sum(weight.numel() for weight in model.parameters())
        for name, model in {
            "plain": Forecaster(),
            "soft": Forecaster(group=se.SO(2)),
            "the paper's": Forecaster(group=se.SO(2), typed=False),
            "EqAuto": EqAuto(),
        }.items()
    }
    assert counts["the paper's"] == counts["plain"]
    assert all(abs(count / counts["plain"] - 1) < 0.2 for count in counts.values()), counts


# bad input


def test_bad_input_is_answered_with_a_sentence() -> None:
    with pytest.raises(RepresentationError, match="SO\\(n\\) or O\\(n\\); got C4"):
        VNLinear(2, 2, se.C(4))
    with pytest.raises(SoftEquivError, match="takes 2 vectors of 3 coordinates"):
        VNLinear(2, 2, se.SO(3))(torch.zeros(5, 2, 2))
    with pytest.raises(SoftEquivError, match="at least one vector in and out; got 0 and 2"):
        VNLinear(0, 2, se.SO(3))
    for wrong in (torch.zeros(5, 1, 3), torch.zeros(5, 2, 3).long(), torch.zeros(2)):
        with pytest.raises(SoftEquivError, match="takes 2 floating-point vectors"):
            VNNorm(2)(wrong)
    with pytest.raises(SoftEquivError, match="channels is a whole number of at least 1; got 0"):
        VNNorm(0)
    with pytest.raises(SoftEquivError, match=r"\(N, T, C, d\); got a tensor of \(5, 1, 2\)"):
        VNAttention(1, 1, se.SO(2))(torch.zeros(5, 1, 2))
    with pytest.raises(SoftEquivError, match="heads is a whole number of at least 1; got 0"):
        EqAuto(width=16, heads=0)
    with pytest.raises(SoftEquivError, match="layers is a whole number of at least 1; got 0"):
        EqAuto(width=16, layers=0)
    with pytest.raises(SoftEquivError, match="floating-point numbers of metres"):
        EqAuto(width=16, layers=1)(torch.zeros(3, 8, 2, dtype=torch.uint8))
    with pytest.raises(SoftEquivError, match=r"at least one step; got steps=1\.5"):
        EqAuto(width=16, layers=1).forecast(torch.zeros(3, 8, 2), 1.5)  # type: ignore[arg-type]
    with pytest.raises(SoftEquivError, match="slope of a leaky cut"):
        VNReLU(2, se.SO(3), slope=2)
    with pytest.raises(SoftEquivError, match="6 vectors cannot be shared out among 4 heads"):
        VNAttention(6, 4, se.SO(3))
    with pytest.raises(SoftEquivError, match="choose a multiple of 12"):
        EqAuto(se.SO(3), width=16)
    with pytest.raises(RepresentationError, match="choose a multiple of 16"):
        Forecaster(15, group=se.SO(2))
    with pytest.raises(SoftEquivError, match="name it, such as group=SO"):
        Forecaster(gain=se.softness(0.5))
    with pytest.raises(SoftEquivError, match="tracks of 2 coordinates; got tracks of 3"):
        Forecaster(16, layers=1)(torch.zeros(4, 8, 3))
    with pytest.raises(SoftEquivError, match="at two steps or more"):
        Forecaster(16, layers=1).forecast(torch.zeros(3, 1, 2), 12)
    with pytest.raises(SoftEquivError, match="at least one step; got steps=0"):
        EqAuto(width=16, layers=1).forecast(torch.zeros(3, 8, 2), 0)
