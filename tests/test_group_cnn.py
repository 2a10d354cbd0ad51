"""Group, steerable and relaxed convolutions: strict where the group moves pixels to pixels, the library's level 0, and
free in the limit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from digits import ABOVE_CHANCE, accuracy_on_digits
from softequiv.actions import Acts, Pictures, Still
from softequiv.baselines.group_cnn import (
    CentredHalving,
    GroupCNN,
    GroupConv2d,
    LiftingConv2d,
    free_parameters,
    kernel_turns,
    left_division,
)
from softequiv.baselines.paper import paper_soften
from softequiv.baselines.relaxed import (
    RelaxedConv2d,
    RelaxedGroupCNN,
    RelaxedGroupConv2d,
    RelaxedLiftingConv2d,
    neighbours,
    weight_sharing_penalty,
)
from softequiv.baselines.rpp import rpp
from softequiv.errors import GroupError, RepresentationError, SoftEquivError
from softequiv.groups import Element, Group
from softequiv.networks.steerable import fields, steerable_cnn
from softequiv.nn import CopyBatchNorm, SoftConv2d
from softequiv.nn.layers import kernel_soft
from softequiv.reps import regular
from softequiv.spectrum import spectrum
from softequiv.testing import assert_equivariant, equivariance_error

EXACT = {torch.float32: 1e-5, torch.float64: 1e-10}
QUARTERS = [se.C(1), se.C(2), se.C(4), se.D(1), se.D(2), se.D(4)]
OTHERS = [se.C(3), se.C(8), se.D(3), se.D(8)]
LIMITED = settings(max_examples=25)

dtypes = st.sampled_from(list(EXACT))
quarter_groups = st.sampled_from(QUARTERS)


@dataclass(frozen=True)
class OnGroup(Acts):
    """Feature maps (N, C, |G|, H, W): (u f)(x, h) = f(u^-1 x, u^-1 h), written with the regular representation."""

    def check(self, group: Group, x: Tensor) -> None:
        Pictures().check(group, x)

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        return torch.einsum("ab,...bhw->...ahw", regular(g.group).rho(g).to(x), Pictures()(x, g))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomised(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Standard normal parameters and uneven statistics, so that no default hides a mistake."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "coefficients" not in name:
                tensor.normal_()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm3d):
            norm.running_mean.normal_()  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if isinstance(norm, CopyBatchNorm):
            norm.running_mean.normal_()
            norm.running_square.uniform_(0.5, 2)
    return model.to(dtype)


# The two convolutions


@pytest.mark.parametrize("group", QUARTERS + OTHERS, ids=str)
def test_the_element_axis_moves_by_the_left_regular_representation(group: Group) -> None:
    table = left_division(group)
    for number, g in enumerate(group.elements()):
        moved = regular(group).rho(g.inverse).argmax(0)  # e_h goes to e_(g^-1 h)
        assert torch.equal(table[number], moved)


@pytest.mark.parametrize("group", [se.C(4), se.D(2), se.D(4)], ids=str)
def test_the_expanded_kernel_is_the_formula(group: Group) -> None:
    lifting, layer = LiftingConv2d(group, 2, 3, 3).double(), GroupConv2d(group, 2, 3, 4).double()
    elements = tuple(group.elements())
    number = {str(g.matrix.round().tolist()): i for i, g in enumerate(elements)}
    once, kernel = (
        x.expanded().unflatten(1, (2, -1)).unflatten(0, (3, len(elements))).detach() for x in (lifting, layer)
    )
    turned = Pictures()
    for i, g in enumerate(elements):
        assert torch.allclose(once[:, i, :, 0], turned(lifting.weight[:, :, 0], g))
        for j, h in enumerate(elements):
            between = number[str((g.inverse @ h).matrix.round().tolist())]
            assert torch.allclose(kernel[:, i, :, j], turned(layer.weight[:, :, between], g))


@LIMITED
@given(quarter_groups, st.integers(4, 9), st.integers(1, 4), dtypes)
def test_convolutions_are_exactly_equivariant(group: Group, size: int, kernel: int, dtype: torch.dtype) -> None:
    order = int(group.order)
    options = {"padding": kernel // 2}
    lifting = randomised(LiftingConv2d(group, 2, 3, kernel, **options), dtype)
    layer = randomised(GroupConv2d(group, 3, 2, kernel, **options), dtype)
    check = partial(assert_equivariant, group=group, tolerance=EXACT[dtype])
    if group.order > 1:
        check(lifting, rep_in=Pictures(), rep_out=OnGroup(), inputs=noise(2, 2, size, size))
        check(layer, rep_in=OnGroup(), rep_out=OnGroup(), inputs=noise(2, 3, order, size, size))


@pytest.mark.parametrize(("size", "kernel", "padding"), [(9, 3, 1), (8, 4, 1), (8, 2, 0), (7, 5, 0)])
def test_a_stride_that_fits_is_exactly_equivariant(size: int, kernel: int, padding: int) -> None:
    layer = randomised(GroupConv2d(se.D(4), 2, 2, kernel, stride=2, padding=padding))
    assert_equivariant(layer, se.D(4), OnGroup(), OnGroup(), inputs=noise(2, 2, 8, size, size), tolerance=1e-10)


def test_a_stride_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SoftEquivError, match="pad the picture to 9 pixels"):
        LiftingConv2d(se.C(4), 1, 2, 3, stride=2, padding=1)(torch.zeros(1, 1, 8, 8))


@given(st.integers(1, 9), st.integers(1, 9))
def test_halving_commutes_with_turns_and_keeps_constants(height: int, width: int) -> None:
    x, halve = noise(2, 3, height, width), CentredHalving()
    assert halve(x).shape == (2, 3, -(-height // 2), -(-width // 2))
    assert torch.allclose(halve(x.rot90(1, (-2, -1))), halve(x).rot90(1, (-2, -1)))
    assert torch.allclose(halve(x.flip(-1)), halve(x).flip(-1))
    assert torch.allclose(halve(torch.ones_like(x)), torch.ones(()).double())


@pytest.mark.parametrize("group", [se.C(3), se.C(4), se.C(8), se.D(2), se.D(4)], ids=str)
def test_a_group_cnn_is_level_0_of_regular_fields(group: Group) -> None:
    """The expanded kernels are all those of regular fields that the exact gain leaves alone: same space, same size."""
    for layer, source in (
        (LiftingConv2d(group, 2, 1, 3), 2 * se.scalar(group)),
        (GroupConv2d(group, 1, 2, 3), regular(group)),
    ):
        target = layer.out_channels * regular(group)
        soft = kernel_soft(source, target, (3, 3), se.softness(0), 1, False, "exact")
        kernel = layer.double().expanded().detach()
        view = soft.layout.read(kernel, soft.rep)
        assert torch.allclose(soft.gain(view, soft.rep), view, atol=1e-12)
        assert spectrum(soft.rep).invariants == layer.weight.numel()
        assert float((soft.gain(noise(*view.shape), soft.rep) - noise(*view.shape)).norm()) > 1  # it changes others


def test_it_answers_as_the_soft_convolution_of_regular_fields() -> None:
    group = se.D(4)
    layer = GroupConv2d(group, 2, 3, 3, padding=1).double()
    soft = SoftConv2d(2 * regular(group), 3 * regular(group), 3, padding=1).double()
    soft.weight = layer.expanded().detach()
    x = noise(2, 2, 8, 7, 7)
    with torch.no_grad():
        soft.bias = torch.zeros(24, dtype=torch.float64)
        assert torch.allclose(soft(x.flatten(1, 2)).unflatten(1, (3, 8)), layer(x))


@pytest.mark.parametrize("group", [se.C(8), se.D(3)], ids=str)
def test_a_bilinear_filter_is_resampled_once_per_element(group: Group) -> None:
    picture = functional.interpolate(noise(1, 1, 3, 3), size=9, mode="bicubic")
    outside = (torch.arange(9) - 4.0).square()
    picture = picture * (outside[:, None] + outside < 9)
    turns = kernel_turns(group, 9, "bilinear")
    for turn, g in zip(turns, group.elements(), strict=True):
        expected = Pictures(interpolation="bilinear")(picture, g)
        assert torch.allclose((turn @ picture.flatten()).reshape(9, 9), expected[0, 0], atol=1e-6)


# The strict classifiers


@pytest.mark.parametrize("size", [16, 15, 14, 9])
@pytest.mark.parametrize("dtype", list(EXACT), ids=str)
@pytest.mark.parametrize("group", [se.C(4), se.D(4)], ids=str)
def test_group_cnn_is_exactly_invariant(group: Group, dtype: torch.dtype, size: int) -> None:
    model = randomised(GroupCNN(group, 2, 5, (3, 4, 5)), dtype)
    assert_equivariant(model, group, Pictures(), Still(), inputs=noise(3, 2, size, size), tolerance=EXACT[dtype])


@pytest.mark.parametrize("size", [16, 15])
@pytest.mark.parametrize("dtype", list(EXACT), ids=str)
@pytest.mark.parametrize(
    ("group", "quarters"),
    [(se.C(4), se.C(4)), (se.D(4), se.D(4)), (se.C(8), se.C(4)), (se.SO(2), se.C(4)), (se.O(2), se.D(4))],
    ids=str,
)
def test_steerable_cnn_is_exactly_invariant(group: Group, quarters: Group, dtype: torch.dtype, size: int) -> None:
    model = randomised(steerable_cnn(group, 2, 5, (3, 4, 5)), dtype)
    assert_equivariant(model, quarters, Pictures(), Still(), inputs=noise(3, 2, size, size), tolerance=EXACT[dtype])


def smooth_discs(size: int = 29) -> Tensor:
    """Smooth pictures that end inside the inscribed disc, so that no turn loses any of them."""
    x = functional.interpolate(noise(8, 1, 7, 7), size=size, mode="bicubic")
    place = torch.linspace(-1, 1, size, dtype=torch.float64)
    radius = (place.square()[:, None] + place.square()).sqrt()
    return x * torch.sigmoid(20 * (0.8 - radius))


def turning_error(model: Callable[[Tensor], Tensor], group: Group, x: Tensor) -> float:
    """Worst change of what tells pictures apart, as a share of it."""
    with torch.no_grad():
        mean = model(x).mean(0)
        return equivariance_error(lambda data: model(data) - mean, group, Pictures(), Still(), inputs=x)


@pytest.mark.parametrize("group", [se.C(8), se.C(18), se.D(8)], ids=str)
def test_finer_groups_turn_better_than_a_plain_cnn(group: Group) -> None:
    x = smooth_discs()
    errors: dict[Group, float] = {}
    for which in (group, se.C(1)):
        models = []
        for seed in range(3):
            torch.manual_seed(seed)
            models.append(GroupCNN(which, 1, 5, (4, 8)).double().eval())
        errors[which] = sum(turning_error(model, group, x) for model in models) / len(models)
    assert errors[group] < 0.75 * errors[se.C(1)]


def test_numbers_to_learn_are_those_of_the_docstring() -> None:
    for group in (se.C(4), se.D(4)):
        order = int(group.order)
        head, norms = 10 * 16 + 10, 2 * (8 + 16)
        assert free_parameters(GroupCNN(group, 3, 10, (8, 16))) == 25 * (3 * 8 + order * 8 * 16) + head + norms
    for plane, ratio in ((se.C(4), 4), (se.C(8), 8), (se.D(4), 8), (se.SO(2), 8)):
        source, target = fields(plane, 4, 2), fields(plane, 8, 2)
        strict = SoftConv2d(source, target, 5, bias=False)
        assert free_parameters(strict) == pytest.approx(25 * source.dim * target.dim / ratio, rel=0.1)


# Relaxed convolutions


@pytest.mark.parametrize("banks", [1, 3])
@pytest.mark.parametrize("group", [se.C(4), se.D(4)], ids=str)
def test_relaxed_networks_start_strict(group: Group, banks: int) -> None:
    model = randomised(RelaxedGroupCNN(group, 2, 5, banks, (3, 4)))
    assert_equivariant(model, group, Pictures(), Still(), inputs=noise(3, 2, 9, 9), tolerance=1e-10)


def test_training_keeps_one_bank_strict_and_frees_two() -> None:
    x, labels = noise(8, 1, 9, 9), torch.arange(8) % 2
    errors = []
    for banks in (1, 2):
        torch.manual_seed(0)
        model = RelaxedGroupCNN(se.C(4), 1, 2, banks, (3, 4)).double()
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
        for _ in range(3):
            optimiser.zero_grad()
            functional.cross_entropy(model(x), labels).backward()
            optimiser.step()
        errors.append(equivariance_error(model, se.C(4), Pictures(), Still(), inputs=x))
    assert errors[0] < 1e-10
    assert errors[1] > 1e-4


@pytest.mark.parametrize("group", [se.C(4), se.D(2), se.C(8)], ids=str)
@pytest.mark.parametrize("relaxed", [RelaxedLiftingConv2d, RelaxedGroupConv2d])
def test_the_relaxed_kernel_is_the_formula(relaxed: type[RelaxedGroupConv2d], group: Group) -> None:
    layer = relaxed(group, 2, 3, 3, banks=2).double()
    nn.init.normal_(layer.coefficients)
    order = int(group.order)
    each = layer.filters.expanded().reshape(2, 3, order, -1)
    first, second = (layer.coefficients[l][None, :, None] * each[l] for l in range(2))
    assert torch.allclose(layer.expanded().reshape(3, order, -1), first + second)


def test_coefficients_of_the_element_read_from_reach_every_kernel_too_and_others_with_one_bank() -> None:
    """K(g, h) = sum_l w_l(h) rho(g) psi_l(g^-1 h), as the paper prints it, on a point, where no pixel turns."""
    for group in (se.C(3), se.D(3)):
        order, table = int(group.order), left_division(group)
        wanted, filters = noise(order, order), torch.zeros(order, order, dtype=torch.float64)
        for g in range(order):
            for h in range(order):
                filters[h, table[g, h]] = wanted[g, h]
        reached = torch.einsum("lh,lgh->gh", torch.eye(order, dtype=torch.float64), filters[:, table])
        assert torch.equal(reached, wanted)
    uneven = GroupConv2d(se.C(3), 1, 1, 1).double().expanded()[..., 0, 0] * torch.tensor([[1.0, 2.0, 3.0]]).double()
    ratio = uneven / uneven.roll((1, 1), (0, 1))  # K(g, h) / K(g s^-1, h s^-1) = w(h) / w(h s^-1)
    assert not torch.allclose(ratio, ratio[:, :1])  # where w(g) psi(g^-1 h) has the same for all h


@pytest.mark.parametrize("group", [se.C(3), se.C(4), se.D(2), se.D(3)], ids=str)
@pytest.mark.parametrize("relaxed", [RelaxedLiftingConv2d, RelaxedGroupConv2d])
def test_as_many_banks_as_elements_reach_every_kernel(relaxed: type[RelaxedGroupConv2d], group: Group) -> None:
    """With w_l(g) = 1 for l = g alone, psi_g(g^-1 h) = rho(g)^-1 K(g, h) gives any K."""
    order = int(group.order)
    layer = relaxed(group, 2, 1, 3, banks=order).double()
    sources = layer.filters.sources
    wanted = noise(order, 2, sources, 9)
    with torch.no_grad():
        layer.coefficients.copy_(torch.eye(order))
        for g, (turn, row) in enumerate(zip(layer.filters.turns, layer.filters.lookup, strict=True)):
            back = torch.linalg.solve(turn, wanted[g].mT).mT
            layer.filters.weight[g, :, row] = back.reshape(2, sources, 3, 3)
    assert torch.allclose(layer.expanded().flatten(), wanted.flatten(), atol=1e-10)


def test_the_penalty_is_the_mean_step_between_neighbours() -> None:
    group = se.D(3)
    model = RelaxedGroupCNN(group, 1, 2, 2, (2, 2))
    assert weight_sharing_penalty(model).item() == 0
    layers = [m for m in model.modules() if isinstance(m, (RelaxedLiftingConv2d, RelaxedGroupConv2d))]
    elements = list(group.elements())
    expected = 0.0
    for layer in layers:
        nn.init.normal_(layer.coefficients)
        w = layer.coefficients.tolist()
        steps = [
            abs(bank[i] - bank[j])
            for bank in w
            for i, g in enumerate(elements)
            for step in group.steps
            for j, h in enumerate(elements)
            if torch.allclose(g.matrix @ step, h.matrix)
        ]
        expected += sum(steps) / (2 * 6 * 2)
    assert weight_sharing_penalty(model).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("banks", [1, 2])
def test_relaxed_over_places_starts_as_an_ordinary_convolution(banks: int) -> None:
    layer = RelaxedConv2d(2, 3, 3, (6, 5), banks=banks, padding=1, padding_mode="circular").double()
    group, x = se.Shifts(6, 5), noise(2, 2, 6, 5)
    assert weight_sharing_penalty(layer).item() == 0
    assert_equivariant(layer, group, Pictures(), Pictures(), inputs=x, tolerance=1e-10)
    nn.init.normal_(layer.coefficients)
    assert equivariance_error(layer, group, Pictures(), Pictures(), inputs=x) > 0.1
    w = layer.coefficients.detach().reshape(banks, 6, 5)
    steps = [w[:, 1:] - w[:, :-1], w[:, :, 1:] - w[:, :, :-1]]  # opposite borders are no neighbours
    expected = torch.cat([step.abs().flatten() for step in steps]).mean()
    assert weight_sharing_penalty(layer).item() == pytest.approx(float(expected))


def test_as_many_banks_as_places_reach_every_locally_connected_layer() -> None:
    layer = RelaxedConv2d(2, 1, 3, (3, 4), banks=12, bias=False).double()
    wanted, x = noise(12, 2 * 9), noise(4, 2, 5, 6, seed=1)
    with torch.no_grad():
        layer.coefficients.copy_(torch.eye(12))
        layer.filters.weight.copy_(wanted.reshape(12, 2, 3, 3))
        patches = functional.unfold(x, 3)  # (N, in k^2, places)
        assert torch.allclose(layer(x).flatten(1), torch.einsum("pk,nkp->np", wanted, patches))


def test_relaxed_groups_of_channels_are_relaxed_convolutions_side_by_side() -> None:
    layer, x = RelaxedConv2d(4, 6, 3, (6, 6), banks=2, groups=2, bias=False).double(), noise(2, 4, 8, 8)
    layer.coefficients.data = noise(2, 36)
    sides = []
    for filters, half in zip(layer.filters.weight.chunk(2), x.chunk(2, 1), strict=True):
        side = RelaxedConv2d(2, 3, 3, (6, 6), banks=2, bias=False).double()
        side.filters.weight.data, side.coefficients.data = filters.detach(), layer.coefficients.detach()
        sides.append(side(half))
    assert torch.allclose(layer(x), torch.cat(sides, 1))


def test_the_penalty_pulls_back_to_the_strict_layer() -> None:
    layer = RelaxedGroupConv2d(se.C(4), 1, 2, 3, banks=2).double()
    nn.init.normal_(layer.coefficients)
    x = noise(2, 1, 4, 7, 7)
    before = equivariance_error(layer, se.C(4), OnGroup(), OnGroup(), inputs=x)
    optimiser = torch.optim.SGD([layer.coefficients], 0.02)
    for _ in range(2000):
        optimiser.zero_grad()
        weight_sharing_penalty(layer).backward()
        optimiser.step()
    assert equivariance_error(layer, se.C(4), OnGroup(), OnGroup(), inputs=x) < 0.05 * before


# Training, state, and bad input


@pytest.mark.parametrize(
    "build",
    [
        partial(GroupCNN, se.C(4)),
        partial(RelaxedGroupCNN, se.C(4), banks=3),
        partial(steerable_cnn, se.SO(2)),
    ],
    ids=["group", "relaxed", "steerable"],
)
def test_it_learns_digits(build: Callable[..., nn.Module]) -> None:
    assert accuracy_on_digits(build(in_channels=1, classes=10, widths=(8, 16, 32), kernel_size=3)) > ABOVE_CHANCE


def plain_cnn() -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise((1, 16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), CentredHalving()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 32, 10))


@pytest.mark.parametrize(
    "given",
    [partial(rpp, group="C4"), paper_soften, partial(se.soften, group="SO(2)", softness=0.5)],
    ids=["rpp", "paper", "ours"],
)
def test_a_plain_cnn_learns_digits_however_it_is_held(given: Callable[[nn.Module], nn.Module]) -> None:
    assert accuracy_on_digits(given(plain_cnn())) > ABOVE_CHANCE


@pytest.mark.parametrize("build", [GroupCNN, partial(RelaxedGroupCNN, banks=2)], ids=["group", "relaxed"])
def test_nothing_derived_is_saved_and_a_pass_changes_nothing(build: Callable[..., nn.Module]) -> None:
    model = build(se.C(8), 1, 3, widths=(2, 3)).eval()
    x = noise(2, 1, 8, 8).float()
    known = {"weight", "bias", "coefficients", "running_mean", "running_var", "num_batches_tracked"}
    assert {key.rpartition(".")[2] for key in model.state_dict()} <= known
    before = copy.deepcopy(model.state_dict())
    answers = model(x)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    other = build(se.C(8), 1, 3, widths=(2, 3)).eval()
    other.load_state_dict(before)
    assert torch.equal(other(x), answers)


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda: LiftingConv2d(se.SO(2), 1, 2, 3), GroupError, r"C\(n\) and D\(n\); got SO\(2\)"),
        (lambda: GroupConv2d(se.Shifts(4), 1, 2, 3), GroupError, "got Shifts"),
        (lambda: LiftingConv2d(se.C(4), 0, 2, 3), SoftEquivError, "in_channels is a whole number of at least 1; got 0"),
        (lambda: LiftingConv2d(se.C(4), 1, 2, 3, stride=0), SoftEquivError, "stride"),
        (lambda: LiftingConv2d(se.C(4), 2, 2, 3)(torch.zeros(1, 3, 8, 8)), SoftEquivError, r"got \(1, 3, 8, 8\)"),
        (lambda: GroupConv2d(se.C(4), 2, 2, 3)(torch.zeros(1, 2, 8, 8)), SoftEquivError, "LiftingConv2d first"),
        (lambda: GroupConv2d(se.C(4), 2, 2, 3)(torch.zeros(1, 2, 3, 8, 8)), SoftEquivError, r"\(N, 2, 4, H, W\)"),
        (lambda: LiftingConv2d(se.C(4), 1, 2, 5)(torch.zeros(1, 1, 4, 4)), SoftEquivError, "does not fit into 4"),
        (lambda: GroupCNN(se.C(4), 1, 2, ()), SoftEquivError, "width of one layer"),
        (lambda: GroupCNN(se.C(4), 1, 2, kernel_size=4), SoftEquivError, "odd kernel_size; got 4"),
        (lambda: steerable_cnn(se.SO(2), 1, 2, kernel_size=4), SoftEquivError, "odd kernel_size; got 4"),
        (lambda: steerable_cnn(se.SO(2), 1, 2, ()), SoftEquivError, "width of one layer"),
        (lambda: steerable_cnn(se.SO(3), 1, 2), RepresentationError, "frequencies belong to"),
        (lambda: GroupCNN(se.C(8), 1, 2, action="exactly"), SoftEquivError, "unknown action 'exactly'"),
        (
            lambda: steerable_cnn(se.SO(2), 1, 2, (0, 4)),
            SoftEquivError,
            "a width is a whole number of at least 1; got 0",
        ),
        (lambda: steerable_cnn(se.SO(2), 1, 2, kernel_size=-1), SoftEquivError, "kernel_size is a whole number"),
        (lambda: steerable_cnn(se.SO(2), 1, 2, frequencies=-1), SoftEquivError, "frequencies run from 0"),
        (lambda: RelaxedGroupCNN(se.C(4), 1, 2, 0), SoftEquivError, "at least one bank of filters; got banks=0"),
        (lambda: RelaxedLiftingConv2d(se.SO(2), 1, 2, 3, banks=2), GroupError, "got SO"),
        (lambda: RelaxedConv2d(1, 2, 3, (8, 8), banks=0), SoftEquivError, "at least one bank"),
        (lambda: RelaxedConv2d(1, 2, 3, (8, 8), banks=2)(torch.zeros(1, 1, 8, 8)), SoftEquivError, r"sizes=\(6, 6\)"),
        (lambda: RelaxedConv2d(1, 2, 3, (0, 8), banks=2), SoftEquivError, "a size of the answer is a whole number"),
        (lambda: RelaxedConv2d(2, 2, 3, (6, 6), banks=2)(torch.zeros(1, 1, 8, 8)), SoftEquivError, r"\(N, 2, H, W\)"),
        (lambda: RelaxedConv2d(2, 2, 3, (6, 6), banks=2)(torch.zeros(2, 8, 8)), SoftEquivError, r"got \(2, 8, 8\)"),
        (lambda: weight_sharing_penalty(nn.Linear(2, 2)), SoftEquivError, "Linear has no relaxed convolution"),
    ],
)
def test_bad_input_is_a_sentence(attempt: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()


def test_neighbours_are_products_from_the_right() -> None:
    group = se.D(3)
    elements = list(group.elements())
    for step, row in zip(group.steps, neighbours(group), strict=True):
        for g, number in zip(elements, row.tolist(), strict=True):
            assert torch.allclose(elements[number].matrix, g.matrix @ step)


def test_turns_are_exact_again_after_another_precision() -> None:
    layer = LiftingConv2d(se.C(8), 1, 1, 3)
    exact = kernel_turns(se.C(8), 3)
    assert torch.equal(layer.half().float().turns, exact.float())
    assert torch.equal(layer.double().turns, exact)
