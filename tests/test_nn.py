"""Soft layers to build with: exact at softness 0, bounded beyond it, and trained to the same weight in both modes."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import softequiv as se
from draws import as_trained, spaces, weight, weight_reps
from softequiv.errors import RepresentationError, SoftEquivError, WeightError
from softequiv.groups import Element, Group
from softequiv.nn import (
    CopyBatchNorm,
    CopyNorm,
    Gated,
    Layout,
    Lengths,
    NormReLU,
    Soft,
    SoftConv1d,
    SoftConv2d,
    SoftConv3d,
    SoftConvTranspose1d,
    SoftConvTranspose2d,
    SoftConvTranspose3d,
    SoftLinear,
    SoftTable,
    VectorReLU,
    gated,
    is_constraint,
    set_gain,
    soft_weights,
    soften_weight,
)
from softequiv.reps import Rep, Sum
from softequiv.reps.grids import kernels

EXACT = 1e-5  # float32 rounding, relative to the larger of what goes in and what comes out
TRAINED = 1e-3
MODES = ("parametrize", "project")
BOOST = 0.5  # rapidity: larger boosts stretch features, and rounding with them

ORTHOGONAL = [se.SO(2), se.SO(3), se.O(5), se.S(4), se.C(4), se.D(4)]
GROUPS = [*ORTHOGONAL, se.Lorentz("SO+")]
PLANE = [se.C(4), se.D(4)]

seeds = st.integers(0, 2**31)
dials = st.floats(0.05, 0.95)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def element(group: Group, seed: int) -> Element:
    return group.random(generator(seed), None if group.compact else BOOST)


def turned(x: Tensor, rep: Rep, g: Element, dim: int = -1) -> Tensor:
    """Features whose channels at `dim` are moved by rho(g)."""
    return (x.movedim(dim, -1) @ rep.rho(g).to(x).mT).movedim(-1, dim)


def assert_same(a: Tensor, b: Tensor, x: Tensor, tolerance: float = EXACT) -> None:
    scale = max(float(a.detach().norm()), float(x.norm()))
    assert float((a - b).detach().norm()) <= tolerance * scale


def randomised(layer: nn.Module, seed: int) -> nn.Module:
    """The layer with standard normal parameters, so that no default hides a mistake."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(noise(*parameter.shape, seed=seed))
    return layer


@st.composite
def pairs(draw: st.DrawFn, groups: list[Group] = GROUPS) -> tuple[Rep, Rep]:
    """The types of a layer's two sides."""
    group = draw(st.sampled_from(groups))
    source, target = (draw(spaces(group)) * draw(st.integers(1, 2)) for _ in range(2))
    return source, target


# -- linear maps -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pairs(), seeds, st.sampled_from(MODES))
def test_a_linear_map_at_softness_zero_commutes_with_the_group_bias_included(types, seed, mode):
    source, target = types
    layer, x, g = SoftLinear(source, target, mode=mode), noise(5, source.dim, seed=seed), element(source.group, seed)
    assert_same(layer(turned(x, source, g)), turned(layer(x), target, g), x)


@settings(max_examples=40)
@given(pairs(), seeds, st.sampled_from(MODES))
def test_a_linear_map_at_softness_one_is_unconstrained(types, seed, mode):
    source, target = types
    layer = SoftLinear(source, target, se.softness(1), mode=mode)
    free, bias = noise(target.dim, source.dim, seed=seed), noise(target.dim, seed=seed + 1)
    with torch.no_grad():
        for soft, value in zip(soft_weights(layer), (free, bias), strict=True):
            soft.stored.copy_(value)
    se.project(layer)
    x = noise(3, source.dim, seed=seed)
    assert torch.equal(layer.weight, free) and torch.equal(layer.bias, bias)
    assert torch.equal(layer(x), nn.functional.linear(x, free, bias))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", GROUPS[:3] + GROUPS[-3:], ids=str)
def test_the_bias_of_a_vector_is_zero_and_that_of_a_scalar_is_free(group, mode):
    vector, scalar = se.vector(group), se.scalar(group)
    layer = SoftLinear(scalar, 3 * vector + 2 * scalar, mode=mode)
    randomised(layer, 0)
    se.project(layer)
    moving = 3 * vector.dim
    bias = layer.bias.detach()
    assert float(bias[:moving].abs().max()) < 1e-6 and float(bias[moving:].abs().min()) > 1e-3
    se.set_softness(layer, 1.0)
    randomised(layer, 0)
    assert float(layer.bias.detach()[:moving].abs().max()) > 1e-1


@pytest.mark.parametrize("group", [se.SO(3), se.Lorentz("SO+")], ids=str)
def test_a_bias_may_live_in_a_space_of_several_axes(group):
    """A matrix-valued bias is a multiple of the invariant tensor: the identity, or the metric."""
    layer = randomised(SoftLinear(se.vector(group), se.tensor(group, 2)), 3)
    n = group.lie.shape[-1]
    metric = torch.eye(n) if n == 3 else torch.diag(torch.tensor([1.0, -1, -1, -1]))
    matrix = layer.bias.detach().reshape(n, n)
    assert torch.allclose(matrix, matrix[0, 0] * metric, atol=1e-6) and float(matrix[0, 0].abs()) > 1e-3


def large_types() -> list[Any]:
    so3, o5, c4, d4 = se.SO(3), se.O(5), se.C(4), se.D(4)
    types = [
        64 * se.vector(so3) + 64 * se.scalar(so3),
        48 * se.vector(so3) + 24 * se.spin(so3, 2),
        64 * se.vector(o5),
        64 * se.vector(se.S(4)),
        48 * se.regular(c4) + 48 * se.frequency(c4, 1),
        32 * se.regular(d4),
        64 * se.vector(se.Lorentz()),
    ]
    return [pytest.param(rep, id=f"{rep.group}") for rep in types]


@pytest.mark.parametrize("gain", [se.softness(0), se.softness(0.3), se.softness(1), se.smooth(0.5, 1.0)], ids=str)
@pytest.mark.parametrize("space", large_types())
def test_initialisation_keeps_the_variance_of_a_plain_layer(space, gain):
    torch.manual_seed(0)
    x = noise(256, space.dim)
    soft, plain = SoftLinear(space, space, gain), nn.Linear(space.dim, space.dim)
    assert 1 / 1.5 < float((soft(x).std() / plain(x).std()).detach()) < 1.5


@pytest.mark.parametrize("group", PLANE, ids=str)
def test_initialisation_keeps_the_variance_of_a_plain_convolution(group):
    torch.manual_seed(0)
    fields = 12 * se.regular(group)
    x = noise(4, fields.dim, 9, 9)
    soft, plain = SoftConv2d(fields, fields, 3), nn.Conv2d(fields.dim, fields.dim, 3)
    assert 1 / 1.5 < float((soft(x).std() / plain(x).std()).detach()) < 1.5


STARTS = [se.softness(0.3), se.softness(1), se.hard(1.5), se.smooth(0.5, 1.0), se.least_distortion(0.2, se.degrees(90))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", STARTS, ids=str)
def test_new_layers_start_exactly_equivariant_whatever_their_gain_allows(gain, mode):
    torch.manual_seed(0)
    group = se.C(4)
    fields, g = 3 * se.frequency(group, 1) + 2 * se.scalar(group), group.element(1)
    linear = SoftLinear(fields, fields, gain, mode=mode)
    x = noise(5, fields.dim)
    assert_same(linear(turned(x, fields, g)), turned(linear(x), fields, g), x)
    conv = SoftConv2d(fields, fields, 3, gain, mode=mode)
    for part in [*soft_weights(linear), *soft_weights(conv)]:
        assert se.spectrum(part.soft.rep).largest_error(part.group_view()) < EXACT


def small_network(gain: Any, mode: Any) -> nn.Module:
    fields, plain = 3 * se.frequency(se.C(4), 1) + 2 * se.scalar(se.C(4)), 3 * se.scalar(se.C(4))
    return nn.Sequential(
        SoftConv2d(fields, gated(fields), 3, gain, mode=mode),
        Gated(fields, dim=1),
        CopyBatchNorm(fields, dim=1),
        SoftConvTranspose2d(fields, fields, 3, gain, mode=mode),
        NormReLU(fields, dim=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        SoftLinear(fields, plain, gain, mode=mode),
    )


def reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", STARTS, ids=str)
def test_parameters_that_are_reset_are_those_of_a_new_network(gain, mode):
    torch.manual_seed(0)
    new = small_network(gain, mode)
    old = small_network(gain, mode)
    torch.manual_seed(0)
    reset(old)
    for one, other in zip(new.parameters(), old.parameters(), strict=True):
        assert torch.equal(one, other)
    table = SoftTable(se.grid(se.SO(2), 5, 5), 2, gain, mode=mode)
    before = table().clone()
    table.reset_parameters()
    (part,) = soft_weights(table)
    assert not torch.equal(table(), before)
    assert se.spectrum(part.soft.rep).largest_error(part.group_view()) < EXACT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", STARTS, ids=str)
def test_a_network_built_without_values_is_the_one_whose_values_it_is_given(gain, mode):
    model, x = small_network(gain, mode), noise(2, 8, 7, 7)
    randomised(model, 0)
    se.project(model)
    with torch.device("meta"):
        emptied, assigned = small_network(gain, mode), small_network(gain, mode)
        SoftTable(se.grid(se.C(4), 3, 3), 2, gain, mode=mode)
    assert emptied(x.to("meta")).shape == model(x).shape
    emptied.to_empty(device="cpu").load_state_dict(model.state_dict())
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(emptied(x), model(x)) and torch.equal(assigned(x), model(x))


@pytest.mark.parametrize("gain", STARTS[:-1], ids=str)
def test_from_its_start_a_gradient_leads_wherever_the_gain_allows(gain):
    torch.manual_seed(0)
    fields = 3 * se.frequency(se.C(4), 1) + 2 * se.scalar(se.C(4))
    layer = SoftLinear(fields, fields, gain, bias=False)
    layer(noise(9, fields.dim)).square().sum().backward()
    (part,) = soft_weights(layer)
    levels = se.spectrum(part.soft.rep)
    moved = levels.analyse(part.stored.grad).abs()
    allowed = gain.gamma(levels)[levels.level_of] > 0
    assert bool((moved[allowed] > EXACT).all()) and not bool((moved[~allowed] > EXACT).any())


def test_a_new_weight_without_an_invariant_direction_does_not_start_at_zero():
    torch.manual_seed(0)
    group = se.SO(2)
    layer = SoftLinear(8 * se.frequency(group, 1), 8 * se.frequency(group, 2), se.softness(0.5))
    plain = nn.Linear(16, 16)
    assert float(layer.weight.detach().std()) == pytest.approx(float(plain.weight.detach().std()), rel=0.2)
    assert not layer.bias.any()


# -- convolutions of typed fields --------------------------------------------------------------------------------------


@st.composite
def fields(draw: st.DrawFn, group: Group, largest: int = 10, copies: int = 1) -> Rep:
    """A type of channels for pictures under quarter turns and flips, `copies` times over."""
    kinds = [se.scalar(group), se.frequency(group, 1), se.frequency(group, 2), se.regular(group)]
    rep = draw(st.sampled_from(kinds))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from(kinds)) * draw(st.integers(1, 2))
        if rep.dim + other.dim <= largest:
            rep = rep + other
    return rep * copies


@st.composite
def motions(draw: st.DrawFn, group: Group) -> tuple[int, int]:
    """Quarter turns, and flips before them."""
    return draw(st.integers(0, 3)), draw(st.integers(0, 1)) if isinstance(group, se.D) else 0


def moved(x: Tensor, rep: Rep, motion: tuple[int, int]) -> Tensor:
    """A typed picture (batch, channels, n, n) turned: its pixels by rot90 and flip, its channels by rho."""
    turns, flips = motion
    g = rep.group.element(turns, flips) if isinstance(rep.group, se.D) else rep.group.element(turns)
    return (turned(x, rep, g, 1).flip(-1) if flips else turned(x, rep, g, 1)).rot90(turns, (-2, -1))


@settings(max_examples=50)
@given(st.data())
def test_a_typed_convolution_turns_with_the_picture(data):
    """Any size, padding, stride and dilation that leaves no pixel over: then the sampled places are symmetric."""
    group = data.draw(st.sampled_from(PLANE))
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    source, target = (data.draw(fields(group, 10 if groups == 1 else 6, groups)) for _ in range(2))
    kernel, stride, dilation = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (1, 2), (1, 2)))
    reach = dilation * (kernel - 1) + 1
    padding = data.draw(st.integers(0, reach // 2))
    size = reach - 2 * padding + stride * data.draw(st.integers(2, 4))
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    if size > padding:
        options["padding_mode"] = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    layer = SoftConv2d(source, target, kernel, mode=data.draw(st.sampled_from(MODES)), **options)
    x, motion = noise(2, source.dim, size, size, seed=data.draw(seeds)), data.draw(motions(group))
    assert_same(layer(moved(x, source, motion)), moved(layer(x), target, motion), x)


@settings(max_examples=30)
@given(st.data())
def test_a_typed_transposed_convolution_turns_with_the_picture(data):
    group = data.draw(st.sampled_from(PLANE))
    groups = data.draw(st.sampled_from([1, 1, 2]))
    source, target = (data.draw(fields(group, 10 if groups == 1 else 6, groups)) for _ in range(2))
    kernel, stride = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    layer = SoftConvTranspose2d(source, target, kernel, stride=stride, padding=(kernel - 1) // 2, groups=groups)
    x, motion = noise(2, source.dim, 5, 5, seed=data.draw(seeds)), data.draw(motions(group))
    assert_same(layer(moved(x, source, motion)), moved(layer(x), target, motion), x)


@pytest.mark.parametrize("size,turns_exactly", [(9, True), (8, False)])
def test_stride_two_is_exact_where_it_fits_and_only_there(size, turns_exactly):
    """Stride 2 with a 3 x 3 kernel and padding 1 reads pixels 0, 2, 4, ...: symmetric for odd sizes alone."""
    source, target = 3 * se.scalar(se.C(4)), 2 * se.frequency(se.C(4), 1)
    layer, x = SoftConv2d(source, target, 3, stride=2, padding=1), noise(2, 3, size, size)
    error = (layer(moved(x, source, (1, 0))) - moved(layer(x), target, (1, 0))).norm() / layer(x).norm()
    assert (float(error.detach()) < EXACT) == turns_exactly


@pytest.mark.parametrize("group", PLANE, ids=str)
def test_depthwise_typed_fields_keep_to_themselves(group):
    vectors = 4 * se.frequency(group, 1)
    layer = SoftConv2d(vectors, vectors, 3, padding=1, groups=4, bias=False)
    assert layer.weight.shape == (8, 2, 3, 3)
    x = noise(1, 8, 7, 7)
    x[:, 2:] = 0
    assert float(layer(x)[:, :2].detach().norm()) > 0 and float(layer(x)[:, 2:].detach().norm()) == 0


def test_groups_cut_types_into_equal_parts_or_say_why_not():
    c4 = se.C(4)
    mixed = se.frequency(c4, 1) + se.scalar(c4)
    assert SoftConv2d(2 * mixed, 2 * mixed, 3, groups=2).weight.shape == (6, 3, 3, 3)
    unequal = 2 * se.frequency(c4, 1) + 2 * se.scalar(c4)
    with pytest.raises(RepresentationError, match=r"cannot be cut into 2 equal groups of channels; use 2 \*"):
        SoftConv2d(unequal, unequal, 3, groups=2)


@pytest.mark.parametrize("group", PLANE, ids=str)
def test_scalar_fields_have_symmetric_kernels(group):
    layer = SoftConv2d(3 * se.scalar(group), 8 * se.scalar(group), 5, padding=2)
    kernel = layer.weight.detach()
    assert torch.allclose(kernel, kernel.rot90(1, (-2, -1)), atol=1e-6)
    assert torch.allclose(kernel, kernel.flip(-1), atol=1e-6) == (group == se.D(4))
    assert torch.equal(layer.bias, layer.parametrizations.bias.original)


@settings(max_examples=20)
@given(st.data())
def test_a_two_layer_steerable_network_is_exactly_equivariant(data):
    group = data.draw(st.sampled_from(PLANE))
    hidden = 4 * se.scalar(group) + data.draw(fields(group))
    colours, answer = 3 * se.scalar(group), data.draw(fields(group, 6))
    net = nn.Sequential(
        SoftConv2d(colours, gated(hidden), 5, padding=2),
        Gated(hidden, dim=1),
        CopyNorm(hidden, dim=1),
        SoftConv2d(hidden, answer, 3, padding=1, stride=2),
    )
    x, motion = noise(2, 3, 9, 9, seed=data.draw(seeds)), data.draw(motions(group))
    assert_same(net(moved(x, colours, motion)), moved(net(x), answer, motion), x)


LINES = [(SoftConv1d, 1), (SoftConvTranspose1d, 1), (SoftConv3d, 3), (SoftConvTranspose3d, 3)]


@settings(max_examples=40)
@given(st.data(), st.sampled_from(LINES), seeds)
def test_signals_and_volumes_reflect(data, kind, seed):
    make, axes = kind
    group = se.Reflection()
    kinds = [se.scalar(group), se.vector(group), se.regular(group)]
    source, target = (
        data.draw(st.sampled_from(kinds)) * data.draw(st.integers(1, 3)) + data.draw(st.sampled_from(kinds))
        for _ in range(2)
    )
    layer = make(source, target, data.draw(st.sampled_from([2, 3])), stride=data.draw(st.integers(1, 2)))
    size = layer.kernel_size[0] + 4
    x, g = noise(2, source.dim, *[size] * axes, seed=seed), group.element(1)
    assert_same(layer(turned(x, source, g, 1).flip(-1)), turned(layer(x), target, g, 1).flip(-1), x)


def leak(layer: SoftConv2d, x: Tensor, motion: tuple[int, int]) -> Tensor:
    return layer(moved(x, layer.source, motion)) - moved(layer(x), layer.target, motion)


@settings(max_examples=30)
@given(st.data())
def test_a_leak_grows_with_softness_and_stays_within_its_certificate(data):
    """Compared: || f(g x) - g f(x) || / || f(x) ||, taken over the unit impulses of all channels at one pixel.

    With stride 1 and circular padding every pixel sees the same kernel W, so that these sums are ||W - g W|| and ||W||
    (Frobenius); white noise has the same ratio on average over its draws. The certificate bounds it for all elements
    no longer than g. A single picture may do worse than this average, which is why none is compared.
    """
    group = data.draw(st.sampled_from(PLANE))
    source, target = data.draw(fields(group)), data.draw(fields(group))
    motion = data.draw(motions(group).filter(any))
    size = 7
    layer = as_trained(SoftConv2d(source, target, 3, padding=1, padding_mode="circular", bias=False))
    impulses = torch.zeros(source.dim, source.dim, size, size)
    row, column = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    impulses[:, :, row, column] = torch.eye(source.dim)
    (soft,) = soft_weights(layer)
    turns, flips = motion
    g = group.element(turns, flips) if isinstance(group, se.D) else group.element(turns)
    last = 0.0
    with torch.no_grad():
        for softness in (0.0, 0.02, 0.05, 0.1, 0.3):
            se.set_softness(layer, softness)
            error, size_of = float(leak(layer, impulses, motion).norm()), float(layer(impulses).norm())
            assert error >= last * (1 - EXACT) - EXACT
            certified = se.spectrum(soft.soft.rep).error(soft.group_view(), g.length)
            assert error <= (certified + EXACT) * size_of + EXACT
            last = error


def test_a_quarter_turn_of_noise_leaks_what_is_certified_under_c4():
    """C4 has one generator, so the certificate for one step is attained, by white noise on average."""
    torch.manual_seed(0)
    c4 = se.C(4)
    options = {"padding": 2, "padding_mode": "circular", "bias": False}
    layer = as_trained(SoftConv2d(4 * se.regular(c4), 4 * se.frequency(c4, 1), 5, se.softness(0.2), **options))
    x = noise(64, 16, 15, 15)
    (soft,) = soft_weights(layer)
    certified = se.spectrum(soft.soft.rep).error(soft.group_view(), se.degrees(90))
    measured = float((leak(layer, x, (1, 0)).norm() / layer(x).norm()).detach())
    assert certified > 0.1 and measured == pytest.approx(certified, rel=0.02)


@pytest.mark.parametrize("gain", [se.softness(0), se.softness(0.5), se.hard(1.5)], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(SoftConv2d, {}), (SoftConv2d, {"groups": 2}), (SoftConvTranspose2d, {})],
    ids=["plain", "grouped", "transposed"],
)
@pytest.mark.parametrize("group", [se.C(4), se.SO(2)], ids=str)
def test_a_typed_convolution_compiles_into_one_graph(group, kind, options, gain):
    half = se.scalar(group) + se.frequency(group, 1)
    layer = kind(half + half, half + half, 3, gain, padding=1, **options)
    torch._dynamo.reset()
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), noise(2, layer.in_channels, 6, 6)
    gradients = [
        torch.autograd.grad(answers.square().sum(), list(layer.parameters())) for answers in (layer(x), compiled(x))
    ]
    assert_same(layer(x), compiled(x), x)
    for plain, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, traced, rtol=1e-4, atol=1e-5)


# -- nonlinearities and normalisation ----------------------------------------------------------------------------------


def nonlinearity(name: str, rep: Rep, dim: int, seed: int) -> tuple[nn.Module, Rep]:
    """A layer with drawn parameters, and the type that it takes."""
    return randomised(KINDS[name](rep, dim=dim), seed), gated(rep) if name == "gated" else rep


KINDS = {
    "gated": Gated,
    "norm relu": NormReLU,
    "copy norm": CopyNorm,
    "copy batch norm": CopyBatchNorm,
    "vector relu": VectorReLU,
}
NAMES = [name for name in KINDS if name != "vector relu"]  # which takes one space alone


@settings(max_examples=100)
@given(st.data(), st.sampled_from(NAMES), st.sampled_from([-1, 1]), seeds)
def test_nonlinearities_commute_with_the_group(data, name, dim, seed):
    group = data.draw(st.sampled_from(GROUPS if name == "gated" else ORTHOGONAL))
    rep = data.draw(spaces(group))
    layer, takes = nonlinearity(name, rep, dim, seed)
    shape = (4, takes.dim) if dim == -1 else (2, takes.dim, 3, 3)
    x, g = noise(*shape, seed=seed), element(group, seed)
    assert_same(layer(turned(x, takes, g, dim)), turned(layer(x), rep, g, dim), x)


@settings(max_examples=40)
@given(st.data(), st.sampled_from([-1, 1]), seeds)
def test_lengths_come_behind_what_they_are_of(data, dim, seed):
    group = data.draw(st.sampled_from(ORTHOGONAL))
    rep = data.draw(spaces(group))
    layer = Lengths(rep, dim=dim)
    shape = (4, rep.dim) if dim == -1 else (2, rep.dim, 3, 3)
    x, g = noise(*shape, seed=seed), element(group, seed)
    found = layer(x)
    assert torch.equal(found.narrow(dim, 0, rep.dim), x) and found.shape[dim] == layer.target.dim
    assert_same(layer(turned(x, rep, g, dim)), turned(found, layer.target, g, dim), x)


@settings(max_examples=40)
@given(st.sampled_from(ORTHOGONAL), st.data(), st.integers(1, 6), st.sampled_from([-1, 1]), seeds)
def test_vector_neurons_commute_with_the_group(group, data, copies, dim, seed):
    space = data.draw(spaces(group).filter(lambda rep: not isinstance(rep, Sum) and rep != se.scalar(group)))
    rep = copies * space
    layer, _ = nonlinearity("vector relu", rep, dim, seed)
    shape = (4, rep.dim) if dim == -1 else (2, rep.dim, 3, 3)
    x, g = noise(*shape, seed=seed), element(group, seed)
    assert_same(layer(turned(x, rep, g, dim)), turned(layer(x), rep, g, dim), x)


def test_nonlinearities_do_what_they_say():
    so3 = se.SO(3)
    rep = 2 * se.vector(so3) + se.scalar(so3)
    x = torch.tensor([3.0, 0, 4, 0, 1, 0, -2])
    cut = NormReLU(rep)
    with torch.no_grad():
        cut.bias.copy_(torch.tensor([-3.0, -3.0, 1.0]))
    assert torch.allclose(cut(x), torch.tensor([1.2, 0, 1.6, 0, 0, 0, -2]))
    assert torch.equal(Lengths(rep)(x), torch.tensor([3.0, 0, 4, 0, 1, 0, -2, 5, 1]))
    assert torch.allclose(CopyNorm(rep)(x), x / 10**0.5)  # squared lengths 25, 1, 4 of three copies
    gates = torch.tensor([0.0, 100.0])
    opened = Gated(rep, nn.ReLU())(torch.cat([x, gates]))
    assert torch.allclose(opened, torch.tensor([1.5, 0, 2, 0, 1, 0, 0]))
    neurons = VectorReLU(2 * se.vector(so3))
    with torch.no_grad():
        neurons.directions.weight.copy_(torch.tensor([[0.0, 1], [-1, 0]]))
    # the first copy looks along the second, (1, 1, 0); the second along minus the first
    y = neurons(torch.tensor([1.0, -3, 5, 1, 1, 0]))
    assert torch.allclose(y[:3], torch.tensor([2.0, -2, 5])) and torch.allclose(y[3:], torch.tensor([1.0, 1, 0]))


def test_batch_norm_of_scalars_is_that_of_torch():
    rep = 2 * se.scalar(se.SO(2)) + se.frequency(se.SO(2), 1) + se.scalar(se.SO(2))
    typed, plain, scalars = CopyBatchNorm(rep, dim=1), nn.BatchNorm2d(3), [0, 1, 4]
    for model in (typed, plain):
        randomised(model, 3)
    with torch.no_grad():
        typed.scale[[0, 1, 3]] = plain.weight
        typed.shift.copy_(plain.bias)
    for step in range(3):
        x = 2 + 3 * noise(64, rep.dim, 5, 5, seed=step)
        torch.testing.assert_close(typed(x)[:, scalars], plain(x[:, scalars]), rtol=1e-4, atol=1e-5)
    x = noise(4, rep.dim, 5, 5)
    torch.testing.assert_close(typed.eval()(x)[:, scalars], plain.eval()(x[:, scalars]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_commutes_with_the_group_and_keeps_places_apart(training):
    rep = 3 * se.frequency(se.SO(2), 1) + 2 * se.scalar(se.SO(2))
    layer = randomised(CopyBatchNorm(rep, dim=1), 0)
    x = 5 * noise(8, rep.dim, 4, 4)
    for _ in range(50):
        layer(x)
    x[..., 0] = 0  # a blank column
    layer.train(training)
    y = layer(x)
    assert float(y[:, :6, :, 0].abs().max().detach()) == 0
    g = se.SO(2).element(1.0)
    assert_same(layer(turned(x, rep, g, 1)), turned(y, rep, g, 1), x)
    if not training:
        assert_same(layer(x[:1]), y[:1], x)  # no sample hears of the others


def test_batch_norm_refuses_to_learn_from_one_value():
    layer = CopyBatchNorm(2 * se.vector(se.SO(3)))
    with pytest.raises(WeightError, match=r"got one of each; give it more, or eval\(\)"):
        layer(noise(1, 6))
    assert layer.eval()(noise(1, 6)).shape == (1, 6)


@pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
def test_what_is_rounding_stays_rounding_whatever_bias_is_learned(bias):
    rep = 3 * se.vector(se.SO(3)) + 2 * se.scalar(se.SO(3))
    layer, x = NormReLU(rep), 1e-7 * noise(9, rep.dim)
    nn.init.constant_(layer.bias, bias)
    assert float(layer(x).norm().detach()) <= float(x.norm())


@pytest.mark.parametrize("name", [*NAMES, "vector relu"])
@pytest.mark.parametrize("group", [se.SO(3), se.C(4), se.S(4), se.Lorentz()], ids=str)
def test_nonlinearities_compile_into_one_graph_and_are_exported(group, name):
    if name != "gated" and not group.orthogonal:
        pytest.skip("lengths are refused")
    rep = 3 * se.vector(group) if name == "vector relu" else 3 * se.vector(group) + 2 * se.scalar(group)
    layer, takes = nonlinearity(name, rep, -1, 0)
    x = noise(4, takes.dim)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(layer, (x,)).module()
    assert_same(layer(x), compiled(x), x)
    assert_same(layer(x), exported(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "vector relu"])
def test_gradients_flow_and_are_bounded_at_zero(name, dtype):
    rep = 4 * se.vector(se.SO(3))
    layer, takes = nonlinearity(name, rep, -1, 1)
    layer = layer.to(dtype)
    if name == "norm relu":
        nn.init.constant_(layer.bias, -0.5)  # above 0 it counts as 0
    for scale in (0.0, 1e-30, 1e-6, 300.0, 1.0):
        layer.zero_grad()
        x = (scale * noise(3, takes.dim)).to(dtype).requires_grad_()
        y = layer(x)
        y.sum().backward()
        grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in (y, *grads))
        assert all(float(tensor.abs().max()) < 1e8 for tensor in grads)
    assert all(float(tensor.abs().max()) > 0 for tensor in grads)


def test_lengths_are_refused_where_the_group_does_not_keep_them():
    for make in (NormReLU, CopyNorm, CopyBatchNorm, VectorReLU):
        with pytest.raises(RepresentationError, match=r"uses lengths, which .* does not keep; use Gated"):
            make(3 * se.vector(se.Lorentz()))
    with pytest.raises(RepresentationError, match="use Bilinear"):
        Lengths(3 * se.vector(se.Lorentz()))


def test_lengths_have_bounded_gradients_and_do_not_overflow():
    layer = Lengths(2 * se.vector(se.SO(3)))
    for scale, dtype in ((0.0, torch.float32), (300.0, torch.float16), (1e-30, torch.float32)):
        x = torch.full((4, 6), scale, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert bool(y.isfinite().all()) and float(x.grad.abs().max()) <= 2


@pytest.mark.parametrize("wrong", [2 * se.scalar(se.SO(3)), se.vector(se.SO(3)) + se.scalar(se.SO(3))], ids=str)
def test_vector_neurons_take_copies_of_one_space(wrong):
    with pytest.raises(RepresentationError, match="VectorReLU takes copies of one space"):
        VectorReLU(wrong)


@pytest.mark.parametrize("channels", [3, 5])
def test_a_gate_must_come_with_its_features(channels):
    with pytest.raises(WeightError, match="takes 4 channels"):
        Gated(se.vector(se.SO(3)))(torch.randn(2, channels))


@pytest.mark.parametrize("mode", MODES)
def test_types_that_read_little_of_the_input_start_as_strong_as_others(mode):
    """A type dies out over a few layers where its rows are shorter than those of torch's layer."""
    torch.manual_seed(0)
    group = se.SO(2)
    part = 40 * se.scalar(group) + 4 * se.frequency(group, 1)
    layers = [
        SoftLinear(part, part, mode=mode),
        SoftConv2d(part, part, 3, mode=mode),
        SoftConv2d(2 * part, 2 * part, 3, groups=2, mode=mode),
        SoftConvTranspose2d(2 * part, 2 * part, 3, groups=2, mode=mode),
    ]
    for layer in layers:
        axis = 1 if isinstance(layer, SoftConvTranspose2d) else 0
        usual = 1 / (3 * part.dim * layer.weight[0, 0].numel())  # the variance of entries of torch's layer
        scalars, vectors = layer.weight.detach().narrow(axis, 0, 48).split([40, 8], axis)
        for rows in (scalars, vectors):
            assert float(rows.square().mean()) / usual == pytest.approx(1, rel=0.15)


# -- networks from scratch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", [se.O(5), se.SO(3), se.Lorentz("SO+")], ids=str)
def test_a_network_for_points_is_equivariant_end_to_end(group, mode):
    """From two vectors and their products v_i w_j: one vector answer that turns along, and scalars that stay."""
    vector, scalar, matrix = se.vector(group), se.scalar(group), se.tensor(group, 2)
    source, hidden, answer = 2 * vector + matrix, 6 * vector + matrix + 12 * scalar, vector + 2 * scalar
    torch.manual_seed(0)
    net = nn.Sequential(
        SoftLinear(source, gated(hidden), mode=mode),
        Gated(hidden),
        SoftLinear(hidden, gated(hidden), mode=mode),
        Gated(hidden),
        SoftLinear(hidden, answer, mode=mode),
    )
    v, w = noise(8, vector.dim, seed=1), noise(8, vector.dim, seed=2)

    def features(v: Tensor, w: Tensor) -> Tensor:
        return torch.cat([v, w, (v[:, :, None] * w[:, None]).flatten(1)], 1)

    y = net(features(v, w)).detach()
    assert float(y[:, -2:].std(0).min()) > 1e-3 and float(y[:, : vector.dim].std(0).min()) > 1e-3
    for seed in range(4):
        g = element(group, seed)
        again = net(features(turned(v, vector, g), turned(w, vector, g))).detach()
        assert_same(again, turned(y, answer, g), y, 2 * EXACT)
        assert_same(again[:, -2:], y[:, -2:], y, 2 * EXACT)


# -- the two modes -----------------------------------------------------------------------------------------------------


@functools.cache
def problem() -> tuple[Rep, Rep, Tensor, Tensor]:
    """Least squares whose best map is far from equivariant: types, inputs and answers."""
    so2 = se.SO(2)
    source, target = 2 * se.vector(so2) + se.scalar(so2), se.vector(so2) + 2 * se.scalar(so2)
    x = noise(64, source.dim, seed=1)
    return source, target, x, x @ noise(source.dim, target.dim, seed=2) + noise(64, target.dim, seed=3)


def best(gain: Any) -> Tensor:
    """The least-squares map among all that a hard gain keeps, in closed form."""
    source, target, x, y = problem()
    rep = source >> target
    kept = gain.on(rep)(torch.eye(rep.dim, dtype=torch.float64).reshape(-1, *rep.shape)).flatten(1)
    values, vectors = torch.linalg.eigh(kept)
    basis = vectors[:, values > 0.5].mT.reshape(-1, *rep.shape)
    design = torch.einsum("bi,kji->kbj", x.double(), basis).flatten(1).mT
    coefficients = torch.linalg.lstsq(design, y.double().flatten()[:, None]).solution[:, 0]
    return torch.einsum("k,kji->ji", coefficients, basis).float()


FREE = se.softness(1)


def trained(
    gain: Any, mode: str, kind: str = "sgd", how: str = "plain", steps: int = 400, set_later: Any = None
) -> SoftLinear:
    """A linear map trained to convergence; `how` may skip steps (a scaler meets infinities) or accumulate gradients."""
    source, target, x, y = problem()
    torch.manual_seed(0)
    layer = as_trained(SoftLinear(source, target, gain, bias=False, mode=mode))
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda: torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(layer.parameters(), lr=0.1),
        "adamw": lambda: torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0),
    }[kind]()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10, enabled=how == "skipped")
    se.hold(layer, optimizer)
    parts = 4 if how == "accumulated" else 1
    for step in range(steps):
        if set_later is not None:
            set_later(layer, step)
        optimizer.zero_grad()
        for inputs, answers in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = (layer(inputs) - answers).square().mean() / parts
            scaler.scale(loss).backward()
        if how == "skipped" and step % 7 == 3:
            next(layer.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return layer


TRAININGS = [
    pytest.param(mode, kind, how, id=f"{mode}-{kind}-{how}")
    for mode in MODES
    for kind in ("sgd", "adam", "adamw")
    for how in ("plain", "skipped", "accumulated")
]


@pytest.mark.parametrize("mode,kind,how", TRAININGS)
@pytest.mark.parametrize("gain", [se.softness(0), se.hard(1.5)], ids=str)
def test_training_reaches_the_constrained_optimum(gain, mode, kind, how):
    layer, optimum = trained(gain, mode, kind, how), best(gain)
    assert float((layer.weight - optimum).detach().abs().max()) < TRAINED
    assert float((optimum - best(FREE)).abs().max()) > 0.1  # or the constraint would not matter


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("gain", [se.softness(0), se.hard(1.5)], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS])
def test_gradients_made_inside_a_step_are_held_as_well(kind, gain, by_name, mode):
    source, target, x, y = problem()
    torch.manual_seed(0)
    layer = as_trained(SoftLinear(source, target, gain, bias=False, mode=mode))
    lbfgs = kind is torch.optim.LBFGS
    optimizer = kind(layer.parameters(), lr=1.0 if lbfgs else 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    se.hold(layer, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(10 if lbfgs else 400):
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        if not lbfgs:
            schedule.step()
    assert loss is not None
    assert float((layer.weight - best(gain)).detach().abs().max()) < TRAINED


def test_what_an_optimiser_cannot_hold_is_refused():
    layer = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", error=0.1, within=se.degrees(30), mode="project")
    with pytest.raises(SoftEquivError, match=r"none of the model's soft weights, such as weight.*after softening"):
        se.hold(layer, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(SoftEquivError, match=r"error target of weight.*mode='parametrize'"):
        se.hold(layer, torch.optim.LBFGS(layer.parameters()))
    frozen = se.soften(nn.Conv2d(3, 8, 5).requires_grad_(False), "SO(2)", softness=0.5, mode="project")
    se.hold(frozen, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))  # nothing of it learns


def test_an_optimiser_that_accelerate_prepared_is_held():
    accelerate = pytest.importorskip("accelerate")
    layer = se.soften(nn.Conv2d(3, 8, 5), "C4", softness=0.0, mode="project")
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(layer.parameters(), lr=0.1))
    se.hold(layer, optimizer)
    layer(noise(2, 3, 9, 9)).square().sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.allclose(layer.weight, before)
    assert torch.allclose(layer.weight, layer.weight.rot90(1, (-2, -1)), atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", [se.smooth(0.5, 1.5), se.softness(0.99)], ids=str)
def test_training_undoes_a_starting_point(gain, mode):
    source, target, *_ = problem()
    assert not is_constraint(gain, source >> target)
    assert float((trained(gain, mode, steps=1500).weight - best(FREE)).detach().abs().max()) < TRAINED


@pytest.mark.parametrize("mode", MODES)
def test_training_does_not_undo_a_cone(mode):
    source, target, *_ = problem()
    gain, rep = se.least_distortion(0.1, se.degrees(30)), source >> target
    assert is_constraint(gain, rep)
    layer = trained(gain, mode)
    assert se.spectrum(rep).error(layer.weight, se.degrees(30)) <= 0.1 + 1e-5
    assert se.spectrum(rep).error(best(FREE), se.degrees(30)) > 0.2


@settings(max_examples=60)
@given(weight_reps(), st.floats(0, 5), st.floats(0.3, 3), st.floats(0.01, 1.5))
def test_which_gains_are_constraints(rep, b, s, eta):
    assert is_constraint(se.hard(b), rep)
    assert is_constraint(se.softness(0), rep) and is_constraint(se.softness(1), rep)
    assert is_constraint(se.least_distortion(eta, 1.0), rep)
    levels = se.spectrum(rep)
    fractional = bool((se.smooth(b, s).gamma(levels) != se.hard(b).gamma(levels)).any())
    assert is_constraint(se.smooth(b, s), rep) != fractional


# -- the dial ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(pairs(), dials, dials, seeds, st.sampled_from(MODES))
def test_the_dial_set_later_is_the_dial_set_at_first(types, first, later, seed, mode):
    source, target = types
    rep, theta = source >> target, noise(target.dim, source.dim, seed=seed)
    layer = nn.Linear(source.dim, target.dim)
    with torch.no_grad():
        layer.weight.copy_(theta)
    soften_weight(layer, "weight", Soft(rep, se.softness(first)), mode)
    se.set_softness(layer, later)
    kept = later if mode == "parametrize" else min(first, later)  # what was taken away is not stored
    assert_same(layer.weight, se.softness(kept)(theta, rep), theta)


@pytest.mark.parametrize("mode", MODES)
def test_a_dial_turned_in_many_small_steps_is_the_dial_turned_at_once(mode):
    layer = nn.Conv2d(3, 8, 5)
    theta = layer.weight.detach().clone()
    se.soften(layer, "SO(2)", softness=1.0, mode=mode)
    for step in range(101):
        se.set_softness(layer, 1 - step / 200)
    se.set_softness(layer, 0.5)
    assert_same(layer.weight, se.softness(0.5)(theta, se.grid(se.SO(2), 5, 5)), theta)


def test_a_dial_that_is_turned_to_a_target_keeps_it_in_project_mode():
    rep = se.grid(se.SO(2), 5, 5)
    layer = se.soften(nn.Conv2d(3, 8, 5), "SO(2)", softness=0.9, mode="project")
    (weight,) = soft_weights(layer)
    set_gain(weight, se.least_distortion(0.1, se.degrees(30)))
    assert se.spectrum(rep).error(layer.weight, se.degrees(30)) <= 0.1 + 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_softness_may_follow_a_schedule(mode):
    """From free to exact while training goes on: what comes out is the optimum of the last setting."""
    rep = problem()[0] >> problem()[1]
    seen = []

    def tighten(layer: nn.Module, step: int) -> None:
        if step % 20 == 0:
            se.set_softness(layer, max(0.0, 1 - step / 200))
            seen.append(se.spectrum(rep).largest_error(layer.weight))

    layer = trained(FREE, mode, set_later=tighten)
    assert seen[0] > 0.5 and seen[-1] < EXACT
    assert float((layer.weight - best(se.softness(0))).detach().abs().max()) < TRAINED


@pytest.mark.parametrize("mode", MODES)
def test_softness_per_layer(mode):
    group = se.SO(2)
    space = 2 * se.vector(group) + se.scalar(group)
    net = nn.Sequential(SoftLinear(space, space, mode=mode), SoftLinear(space, space, se.softness(0.5), mode=mode))
    se.set_softness(net, 0.25, only=["1.*"])
    gains = {weight.name: weight.soft.gain for weight in soft_weights(net)}
    assert gains == {name: se.softness(0.25 if name[0] == "1" else 0) for name in gains} and len(gains) == 4
    x, g = noise(3, space.dim), group.element(1.0)
    assert_same(net[0](turned(x, space, g)), turned(net[0](x), space, g), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", PLANE, ids=str)
def test_a_table_is_symmetric_at_softness_zero_and_free_at_one(group, mode):
    torch.manual_seed(0)
    space = se.grid(group, 7, 7)
    table = SoftTable(space, 16, mode=mode)
    assert torch.allclose(table(), table().rot90(1, (-2, -1)), atol=1e-6) and table().shape == (16, 7, 7)
    table().square().sum().backward()
    assert all(float(parameter.grad.abs().max()) > 0 for parameter in table.parameters())
    free = SoftTable(space, 16, FREE, mode=mode, std=0.5)
    assert torch.allclose(free(), free().rot90(1, (-2, -1)), atol=1e-6)  # at the start
    assert float(free().detach().std()) == pytest.approx(0.5, rel=0.2)
    assert not torch.allclose(as_trained(free)(), free().rot90(1, (-2, -1)), atol=0.1)
    assert parametrize.is_parametrized(table) == (mode == "parametrize")


# -- where a weight lies in a stored tensor ----------------------------------------------------------------------------


@settings(max_examples=80)
@given(weight_reps(largest=40), st.integers(0, 3), st.integers(1, 3), st.integers(-3, 2), seeds)
def test_an_axis_is_read_and_written_back(rep, skip, channels, axis, seed):
    layout = Layout(axis=axis, skip=skip, channels=channels)
    shape = [2, 3, 2]
    shape[axis] = skip + channels * rep.dim
    stored = noise(*shape, seed=seed)
    part = layout.read(stored, rep)
    assert part.shape[-len(rep.shape) :] == rep.shape and part.numel() == stored.numel() - skip * stored.numel() // (
        skip + channels * rep.dim
    )
    assert torch.equal(layout.write(stored, part, rep), stored)
    cleared = layout.write(stored, torch.zeros_like(part), rep)
    assert torch.equal(cleared.narrow(axis, 0, skip), stored.narrow(axis, 0, skip))
    assert float(cleared.narrow(axis, skip, channels * rep.dim).abs().max()) == 0


@settings(max_examples=60)
@given(st.integers(1, 3), st.booleans(), st.integers(1, 3), st.data(), seeds)
def test_kernels_are_read_group_by_group_and_written_back(groups, swap, kernel, data, seed):
    group = data.draw(st.sampled_from(PLANE))
    source, target = data.draw(fields(group, 4)), data.draw(fields(group, 4))
    assume(source.dim != target.dim)  # else a lost transposition would not show
    rep = (source >> target) @ se.grid(group, kernel, kernel)
    layout = Layout(groups=groups, swap=swap)
    first, second = (source.dim, target.dim) if swap else (target.dim, source.dim)
    stored = noise(groups * first, second, kernel, kernel, seed=seed)
    part = layout.read(stored, rep)
    assert tuple(part.shape) == ((groups,) if groups > 1 else ()) + rep.shape
    assert torch.equal(layout.write(stored, part, rep), stored)
    for i, one in enumerate(part if groups > 1 else part[None]):
        piece = stored[i * first : (i + 1) * first]
        assert torch.equal(one, piece.transpose(0, 1) if swap else piece)


@settings(max_examples=40)
@given(weight_reps(largest=40), seeds)
def test_filtering_through_a_layout_filters_the_weight(rep, seed):
    theta = weight(rep, seed, torch.float32, (2,))
    holder = nn.Module()
    holder.table = nn.Parameter(torch.cat([noise(3, seed=seed), theta.flatten()])[None])
    soften_weight(holder, "table", Soft(rep, se.softness(0.3), Layout(axis=1, skip=3, channels=2)))
    assert torch.equal(holder.table[0, :3], noise(3, seed=seed))
    assert_same(holder.table[0, 3:].reshape(theta.shape), se.softness(0.3)(theta, rep), theta)


def test_a_smooth_schur_rule_constrains_nothing_and_a_hard_one_does():
    rep = se.vector(se.SO(2)) >> 2 * se.vector(se.SO(2))
    assert is_constraint(se.schur(0.5), rep) and not is_constraint(se.schur(0.5, 1.0), rep)
    layer = as_trained(SoftLinear(se.vector(se.SO(2)), 2 * se.vector(se.SO(2)), se.schur(0.5, 1.0), mode="project"))
    before = layer.weight.detach().clone()
    se.project(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("gain", [se.softness(0.4), se.schur(0.5), se.least_distortion(0.2, se.degrees(90))], ids=str)
def test_a_filter_follows_its_module_to_another_precision_and_loses_nothing(gain):
    """A double-precision weight is filtered in double precision, also when the module was softened in single."""
    source, target = 2 * se.vector(se.SO(2)), se.vector(se.SO(2)) + se.scalar(se.SO(2))
    layer = as_trained(SoftLinear(source, target, gain)).double()
    theta = layer.parametrizations.weight.original.detach()
    assert torch.allclose(layer.weight, gain(theta, source >> target), rtol=0, atol=1e-14)
    assert layer.float().weight.dtype == torch.float32 and layer.half().weight.dtype == torch.float16


def test_filters_pass_batched_gradients_traces_and_autocast():
    """What records a filter's steps, batches them or casts them sees the same filter."""
    group = se.SO(3)
    space = 2 * se.vector(group) + 4 * se.scalar(group)
    layer, x = SoftLinear(space, space), torch.randn(5, space.dim)
    parameters, directions = list(layer.parameters()), torch.randn(3, 5, space.dim)
    together = torch.autograd.grad(layer(x), parameters, directions, is_grads_batched=True)
    for i, direction in enumerate(directions):
        one = torch.autograd.grad(layer(x), parameters, direction)
        assert all(torch.allclose(a[i], b, atol=1e-5) for a, b in zip(together, one, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, x)
    assert torch.allclose(traced(x), layer(x), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).float().square().sum().backward()
    gradient = parameters[0].grad if parameters[0].ndim == 2 else parameters[1].grad
    assert torch.allclose(se.softness(0)(gradient, space >> space), gradient, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("sizes,softness", [((3, 3), 0.9), ((3, 3), 0.0), ((7, 7), 0.5), ((8, 8), 0.5), ((9, 9), 0.5)])
def test_a_kernel_goes_the_short_way_to_the_same_weight_and_gradient(sizes, softness, dtype):
    """Bit for bit what the filter itself gives, with and without autocast, which stays as it was."""
    layer = nn.Conv2d(2, 3, sizes, dtype=dtype).to(memory_format=torch.channels_last)
    soften_weight(layer, "weight", Soft(se.grid(se.SO(2), *sizes), se.softness(softness)))
    (weight,) = soft_weights(layer)
    wanted = weight.soft.gain.on(weight.soft.rep).to(torch.promote_types(dtype, torch.float32), torch.device("cpu"))
    direction = noise(3, 2, *sizes).to(dtype)
    expected = wanted(weight.stored)
    (expected_gradient,) = torch.autograd.grad(expected, weight.stored, direction)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = layer.weight
            assert torch.is_autocast_enabled("cpu") == enabled
        (gradient,) = torch.autograd.grad(value, weight.stored, direction)
        assert torch.equal(value, expected) and torch.equal(gradient, expected_gradient)
    assert value.dtype == dtype


def test_a_kernel_of_another_size_is_refused_though_its_numbers_would_fit():
    layer = nn.Conv2d(2, 2, 3)
    soften_weight(layer, "weight", Soft(se.grid(se.C(4), 3, 3), se.softness(0)))
    layer.weight = torch.randn(2, 2, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(WeightError, match=r"trailing axes \(3, 3\); got shape \(2, 2, 6, 6\)"):
            layer.weight  # noqa: B018
        assert torch.is_autocast_enabled("cpu")


def test_a_kernel_follows_its_parameter_and_its_dial_at_every_read():
    """Nothing is remembered between two reads: edits that no version counter sees are seen."""
    rep = se.grid(se.SO(2), 3, 3)
    layer = nn.Conv2d(2, 2, 3)
    soften_weight(layer, "weight", Soft(rep, se.softness(0)))
    (weight,) = soft_weights(layer)
    for step, softness in enumerate((0.0, 0.4, 0.9, 1.0)):
        se.set_softness(layer, softness)
        weight.stored.data.copy_(noise(2, 2, 3, 3, seed=step))
        assert_same(layer.weight, se.softness(softness)(noise(2, 2, 3, 3, seed=step), rep), noise(2, 2, 3, 3))
        swapped = {"parametrizations.weight.original": noise(2, 2, 3, 3, seed=step + 9), "bias": layer.bias.detach()}
        x = noise(1, 2, 5, 5)
        found = torch.func.functional_call(layer, swapped, (x,))
        kernel = se.softness(softness)(swapped["parametrizations.weight.original"], rep)
        assert_same(found, nn.functional.conv2d(x, kernel, layer.bias), x)


@pytest.mark.parametrize("mode", MODES)
def test_a_gain_that_is_refused_changes_nothing(mode):
    net = nn.Conv2d(1, 1, 3)
    soften_weight(net, "weight", Soft(kernels(se.C(18), 3, 3, action="bilinear"), se.softness(0.5)), mode)
    (part,) = soft_weights(net)
    before = part.value().clone()
    with pytest.raises(SoftEquivError):
        set_gain(part, se.schur(0.1))
    assert part.soft.gain == se.softness(0.5)
    assert torch.equal(part.value(), before)


def test_a_layout_covers_its_axis():
    layer = nn.Linear(3, 5)
    with pytest.raises(WeightError, match="5 entries along axis 0"):
        soften_weight(layer, "bias", Soft(se.vector(se.O(1)), se.smooth(0.0, 2.0), Layout(axis=0)), "project")


def test_another_parametrisation_is_named():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 1, 3))
    with pytest.raises(WeightError, match="another parametrisation"):
        soften_weight(layer, "weight", Soft(se.grid(se.C(4), 3, 3), se.softness(0.5)))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: SoftLinear(3, 3), "maps between representations"),
        (lambda: SoftLinear(se.vector(se.SO(3)), se.vector(se.SO(3)), 0.5), "a gain is softness"),
        (lambda: NormReLU(2 * se.vector(se.SO(3)))(torch.zeros(2, 5)), "takes 6 channels"),
        (lambda: CopyNorm(2 * se.vector(se.SO(3)))(torch.zeros(2, 5)), "takes 6 channels"),
        (lambda: VectorReLU(2 * se.vector(se.SO(3)))(torch.zeros(2, 5)), "takes 6 channels"),
        (lambda: SoftTable(se.grid(se.C(4), 3, 3), 0, se.least_distortion(0.1, within=1.0)), "no entries"),
    ],
)
def test_layers_answer_wrong_types_by_a_sentence(act, words):
    with pytest.raises(SoftEquivError, match=words):
        act()
