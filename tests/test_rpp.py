"""Residual pathways: the dial's two ends, the priors, and what merging leaves."""

import copy
import math

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.baselines.group_cnn import free_parameters
from softequiv.baselines.rpp import (
    RPPConv2d,
    RPPLinear,
    merged,
    parameter_groups,
    pathways,
    prior,
    rpp,
    set_mix,
)
from softequiv.errors import SoftEquivError
from softequiv.testing import assert_equivariant, equivariance_error

SO3 = se.SO(3)
SOURCE, TARGET = 4 * se.vector(SO3) + 2 * se.scalar(SO3), 3 * se.vector(SO3) + se.tensor(SO3, 2) + se.scalar(SO3)


def projected(weight: torch.Tensor, rep: se.Rep) -> torch.Tensor:
    """P_0 by a dense singular value decomposition of the stacked generators."""
    _, values, right = torch.linalg.svd(rep.rates().reshape(-1, rep.dim))
    kept = right[values < 1e-9]
    return (weight.reshape(-1, rep.dim) @ kept.T @ kept).reshape(weight.shape)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_the_weight_is_the_formula(mix):
    layer = RPPLinear(SOURCE, TARGET, mix=mix).double()
    lists = layer.parametrizations
    expected = projected(lists.weight.original0, SOURCE >> TARGET) + mix * lists.weight.original1
    assert torch.allclose(layer.weight, expected, atol=1e-10)
    shift = projected(lists.bias.original0, TARGET) + mix * lists.bias.original1
    assert torch.allclose(layer.bias, shift, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_without_the_free_path_a_layer_is_strict(dtype, tolerance):
    layer = RPPLinear(SOURCE, TARGET, mix=0.0).to(dtype)
    assert_equivariant(layer, SO3, SOURCE, TARGET, tolerance=tolerance)
    set_mix(layer, 0.2)
    assert equivariance_error(layer, SO3, SOURCE, TARGET) > 0.01
    group = se.C(4)
    fields = 2 * se.frequency(group, 1) + 3 * se.scalar(group)
    conv = RPPConv2d(fields, fields, 3, mix=0.0, padding=1).to(dtype)
    plain = conv(torch.zeros(1, fields.dim, 5, 5, dtype=dtype)).detach()
    x = torch.randn(2, fields.dim, 5, 5, dtype=dtype)
    conv.requires_grad_(False)
    turn = fields.steps()[0].to(dtype)

    def turned(y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ab,nbhw->nahw", turn, y.rot90(1, (-2, -1)))

    assert float((conv(turned(x)) - turned(conv(x))).norm() / (conv(x) - plain).norm()) < tolerance


def test_with_the_free_path_any_weight_is_reached():
    layer = RPPLinear(SOURCE, TARGET, mix=1.0).double()
    wanted = torch.randn_like(layer.weight)
    layer.weight = wanted
    assert torch.allclose(layer.weight, wanted, atol=1e-12)
    set_mix(layer, 0.0)
    assert torch.allclose(layer.weight, projected(wanted, SOURCE >> TARGET), atol=1e-10)


def test_the_parameters_are_twice_those_of_the_free_layer():
    free = sum(parameter.numel() for parameter in nn.Linear(SOURCE.dim, TARGET.dim).parameters())
    assert sum(parameter.numel() for parameter in RPPLinear(SOURCE, TARGET).parameters()) == 2 * free
    assert len(list(RPPLinear(SOURCE, TARGET, mix=0.5, learned=True).parameters())) == 4 + 2


def test_both_paths_start_with_the_variance_of_a_free_layer():
    torch.manual_seed(0)
    layer = RPPLinear(40 * se.vector(SO3), 40 * se.vector(SO3))
    (own, a, w), *_ = pathways(layer)
    free = float(nn.Linear(120, 120).weight.detach().std())
    assert float(own.strict(a).detach().std()) == pytest.approx(free, rel=0.1)
    assert float(w.detach().std()) == pytest.approx(free, rel=0.1)
    assert not torch.equal(a, w)


def test_decay_of_the_groups_is_the_gradient_of_the_prior():
    """On what the model sees: P_0 A and W_free."""
    layer = RPPLinear(SOURCE, TARGET, mix=0.4).double()
    examples, strict, free = 50, 0.7, 0.2
    groups = parameter_groups(layer, strict=strict, free=free, examples=examples)
    (prior(layer, strict=strict, free=free) / examples).backward()
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for own, a, w in pathways(layer):
        assert torch.allclose(own.strict(a.grad), decay[id(a)] * own.strict(a), atol=1e-12)
        assert torch.allclose(w.grad, decay[id(w)] * w, atol=1e-12)


def test_groups_hold_every_parameter_once_and_leave_the_dial_alone():
    net = nn.Sequential(rpp(nn.Conv2d(1, 4, 3), "C4", mix=0.5, learned=True), nn.BatchNorm2d(4))
    groups = parameter_groups(net, strict=1.0, free=0.1, examples=10, rest=0.3)
    names = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(names) == sorted(id(parameter) for parameter in net.parameters())
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.1, 10.0, 0.3, 0.0])


def test_a_tight_prior_on_the_free_path_gives_the_strict_solution():
    torch.manual_seed(0)
    x = torch.randn(400, SOURCE.dim)
    true = se.softness(0)(torch.randn(TARGET.dim, SOURCE.dim), SOURCE >> TARGET)
    y = x @ true.T + 0.1 * torch.randn(400, TARGET.dim)

    def trained(free: float) -> float:
        torch.manual_seed(1)
        layer = RPPLinear(SOURCE, TARGET)
        optimizer = torch.optim.Adam(parameter_groups(layer, strict=10.0, free=free, examples=400), lr=0.03)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.mse_loss(layer(x), y).backward()
            optimizer.step()
        assert nn.functional.mse_loss(layer(x), y) < 0.05 * y.var()
        return equivariance_error(layer, SO3, SOURCE, TARGET)

    assert trained(0.02) < 0.2 * trained(10.0)


def test_a_learned_dial_moves_and_stays_between_its_ends():
    layer = RPPLinear(SOURCE, TARGET, mix=0.5, learned=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(8, SOURCE.dim)).square().mean().backward()
        optimizer.step()
    mixes = [float(own.mix.detach()) for own, _, _ in pathways(layer)]
    assert all(0 < mix < 1 and mix != 0.5 for mix in mixes)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


def test_a_models_ends_are_itself_and_softness_zero():
    x = torch.randn(2, 1, 9, 9)
    net = small_net()
    plain, strict = net(x), se.soften(small_net(), "C4", softness=0.0)(x)
    given = rpp(net, "C4")
    assert torch.allclose(given(x), plain, atol=1e-6)
    set_mix(given, 0.0)
    assert torch.allclose(given(x), strict, atol=1e-6)
    assert torch.allclose(given(x.rot90(1, (-2, -1))), given(x), atol=1e-5)


def test_merging_leaves_the_plain_model_with_the_same_answers():
    net = rpp(small_net(), "C4", mix=0.3)
    x, stored = torch.randn(2, 1, 9, 9), copy.deepcopy(net.state_dict())
    plain = merged(net, copy=True)
    assert list(plain.state_dict()) == list(small_net().state_dict())
    assert torch.equal(plain(x), net(x)) and type(plain[0]) is nn.Conv2d
    assert all(torch.equal(value, stored[name]) for name, value in net.state_dict().items())
    assert merged(net) is net and torch.equal(net(x), plain(x))


@pytest.mark.parametrize("held", ["original0", "original1"])
def test_a_merged_weight_learns_where_one_of_its_paths_did(held):
    net = rpp(nn.Conv2d(1, 2, 3), "C4")
    getattr(net.parametrizations.weight, held).requires_grad_(False)
    assert merged(net, copy=True).weight.requires_grad
    net.requires_grad_(False)
    assert not merged(net).weight.requires_grad


def test_the_dial_is_set_in_the_models_own_precision():
    net = rpp(nn.Conv2d(1, 2, 3), "C4").double()
    set_mix(net, 0.1)
    (own, _, _) = next(pathways(net))
    assert float(own.mix) == 0.1


def test_baking_names_what_it_cannot_write_out_and_merging_leaves_filters_to_it():
    net = rpp(small_net(), "C4", mix=0.3, only=["0.weight"])
    se.soften(net, "C4", softness=0.5, only=["2.weight"])
    nn.utils.parametrizations.weight_norm(net[5])
    x = torch.randn(2, 1, 9, 9)
    answers = net(x)
    with pytest.raises(SoftEquivError, match=r"0\.weight is made by Pathways.*baselines\.merged"):
        se.bake(net)
    plain = se.bake(merged(net, copy=True))
    assert type(plain[0]) is type(plain[2]) is nn.Conv2d and hasattr(plain[5], "parametrizations")
    torch.testing.assert_close(plain(x), answers)


@pytest.mark.parametrize(("mix", "learned"), [(0.0, False), (0.3, False), (0.3, True)])
def test_numbers_to_learn_are_the_known_dimensions_of_the_strict_path_and_the_free_one(mix, learned):
    """SO(3) from 2 V + 1 to V: two maps V -> V, and nothing from or to a scalar, so that no bias stays."""
    source, target = 2 * se.vector(SO3) + se.scalar(SO3), se.vector(SO3)
    layer = RPPLinear(source, target, mix=mix, learned=learned)
    free = 7 * 3 + 3
    assert free_parameters(layer) == 2 + (free if mix else 0) + (2 if learned else 0)
    for _, strict, _ in pathways(layer):
        strict.requires_grad_(False)
    assert free_parameters(layer) == (free if mix else 0) + (2 if learned else 0)


def test_state_and_precision_travel():
    net, other = rpp(small_net(), "C4", mix=0.3), rpp(small_net(), "C4", mix=0.9)
    other.load_state_dict(net.state_dict())
    x = torch.randn(2, 1, 9, 9)
    assert torch.equal(net(x), other(x))
    assert torch.allclose(net.double()(x.double()), other(x).double(), atol=1e-5)


def test_it_learns_what_a_strict_net_cannot():
    """Bars upright or lying, at random places: an invariant net cannot tell, one with pathways can."""
    torch.manual_seed(0)
    x, y = torch.zeros(256, 1, 9, 9), torch.arange(256) % 2
    for picture, label, place in zip(x, y, torch.randint(9, (256,)), strict=True):
        picture[0, :, place] = 1 - label.float()
        picture[0, place, :] += label.float()

    def accuracy(mix: float) -> float:
        net = rpp(small_net(), "C4", mix=mix)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(120):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        return float((net(x).argmax(1) == y).float().mean())

    assert accuracy(1.0) > 0.95 and accuracy(0.0) < 0.7


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RPPLinear(SOURCE, TARGET, mix=1.5), "mix runs from 0"),
        (lambda: RPPLinear(SOURCE, TARGET, mix=0.0, learned=True), "start between"),
        (lambda: rpp(nn.Linear(3, 3), "C4"), "lives on a grid"),
        (lambda: rpp(nn.Conv2d(1, 1, 3), "C4", mix=-1.0), "mix runs from 0"),
        (lambda: rpp(rpp(nn.Conv2d(1, 1, 3), "C4"), "C4"), "parametrised already"),
        (lambda: se.soften(rpp(nn.Conv2d(1, 1, 3), "C4"), "C4", softness=0.5), "parametrised already"),
        (lambda: set_mix(nn.Linear(3, 3), 0.5), "no residual pathways"),
        (lambda: merged(nn.Linear(3, 3)), "no residual pathways"),
        (lambda: prior(RPPLinear(SOURCE, TARGET), strict=0.0, free=1.0), "positive"),
        (lambda: parameter_groups(RPPLinear(SOURCE, TARGET), strict=1.0, free=1.0, examples=0), "examples"),
        (lambda: parameter_groups(RPPLinear(SOURCE, TARGET), strict=1.0, free=1.0, examples=math.nan), "examples"),
        (lambda: parameter_groups(RPPLinear(SOURCE, TARGET), strict=1.0, free=1.0, examples=9, rest=-1.0), "rest=-1.0"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(SoftEquivError, match=words):
        call()


@pytest.mark.parametrize("learned", [False, True])
def test_tied_weights_stay_tied(learned):
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    second.weight = first.weight
    net = rpp(nn.Sequential(first, second), "C4", 0.5, learned=learned)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimiser.step()
    assert torch.equal(net[0].weight, net[1].weight)
    plain = merged(net)
    assert plain[0].weight is plain[1].weight


def test_what_was_registered_later_is_merged_too():
    net = rpp(nn.Conv2d(3, 8, 5), "C4")
    net.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert [name for name, _ in merged(net).named_parameters()] == ["weight", "bias", "extra"]
