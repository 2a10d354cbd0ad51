"""Do the numbers stay right where floats end? Weights of every size and precision, empty, broken and rank-deficient
ones, the smallest grids, and groups of one element and of very many: each gives what the formula says, or a sentence.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softequiv as se

WAYS: dict[str, dict[str, Any]] = {
    "softness 0": {"softness": 0.0},
    "softness .5": {"softness": 0.5},
    "error": {"error": 0.1, "within": se.degrees(30)},
    "smooth": {"gain": se.smooth(1.0, 1.0)},
    "schur": {"gain": se.schur(1.5)},
}
# up to where the norm of a kernel, which bounds its coordinates, is still a number of float32
SCALES = [1e-300, 1e-45, 1e-38, 1e-30, 1e-15, 1.0, 1e15, 1e30, 1e37, 1e300]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def layer(weight: Tensor) -> nn.Conv2d:
    """A convolution with this weight, (out, in, k, k)."""
    net = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[-1], bias=False, dtype=weight.dtype)
    with torch.no_grad():
        net.weight.copy_(weight)
    return net


def filtered(weight: Tensor, group: str = "SO(2)", mode: Any = "parametrize", **way: Any) -> Tensor:
    return se.soften(layer(weight), group, mode=mode, **way).weight.detach()


def averaged(weight: Tensor, group: se.Group) -> Tensor:
    """What is exactly equivariant: the mean of rho(g) W over all elements of a finite group."""
    rep = se.grid(group, *weight.shape[-2:])
    mean = torch.stack([rep.rho(g) for g in group.elements()]).mean(0)
    return (weight.double().flatten(-2) @ mean.T).view_as(weight)


def worst_change(weight: Tensor, group: se.Group, reach: float, elements: int = 25) -> float:
    """max_g ||rho(g) W - W|| / ||W|| over elements of one Lie coordinate up to `reach`."""
    rep, flat = se.grid(group, *weight.shape[-2:]), weight.double().flatten(-2)
    moved = [
        flat @ rep.rho(group.element(t)).T
        for t in torch.linspace(-reach, reach, elements, dtype=torch.float64).tolist()
    ]
    return max(float((m - flat).norm() / flat.norm()) for m in moved)


def precision(weight: Tensor) -> float:
    """The rounding of the weight's own numbers, relative to the largest: coarse where they are nearly zero."""
    kind = torch.finfo(weight.dtype)
    return 40 * max(kind.eps, kind.smallest_normal * kind.eps / float(weight.double().abs().max()))


@pytest.mark.parametrize("mode", ["parametrize", "project"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_of_any_size_is_filtered_as_one_of_size_one(dtype: torch.dtype, way: str, mode: str) -> None:
    """gain(a W) = a gain(W), computed in float64 at size one, as far as the weight's own numbers go."""
    base, tried = torch.randn(4, 3, 5, 5, dtype=torch.float64), 0
    for scale in SCALES:
        weight = (base * scale).to(dtype)
        largest = weight.double().abs().max()
        if not weight.isfinite().all() or not largest:
            continue
        tried += 1
        unit = weight.double() / largest
        expected = filtered(unit, **WAYS[way])
        found = filtered(weight, mode=mode, **WAYS[way]).double() / largest
        assert float((found - expected).norm()) < precision(weight) * float(unit.norm()), scale
    assert tried >= (1 if dtype == torch.float16 else 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_promise_is_kept_at_any_size(dtype: torch.dtype) -> None:
    """The error target holds by the certificate and by turning the weight itself."""
    for scale in SCALES:
        weight = (torch.randn(4, 3, 5, 5, dtype=torch.float64) * scale).to(dtype)
        if not weight.isfinite().all() or weight.double().abs().max() < torch.finfo(dtype).smallest_normal:
            continue
        net = se.soften(layer(weight), "SO(2)", error=0.1, within=se.degrees(30))
        rounding = 20 * torch.finfo(dtype).eps + precision(weight)
        certified = se.certify(net, se.degrees(30))["weight"].error
        turned = worst_change(net.weight.detach().double() / float(weight.double().abs().max()), se.SO(2), math.pi / 6)
        assert turned <= certified + 1e-9 and certified <= 0.1 + rounding, scale


@pytest.mark.parametrize("mode", ["parametrize", "project"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_stay_zeros_with_gradients_that_are_numbers(dtype: torch.dtype, way: str, mode: Any) -> None:
    net = se.soften(layer(torch.zeros(4, 3, 5, 5, dtype=dtype)), "SO(2)", mode=mode, **WAYS[way])
    assert not net.weight.any() and se.certify(net, se.degrees(30))["weight"].error == 0
    net(torch.ones(1, 3, 5, 5, dtype=dtype)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_one_broken_entry_is_named_and_nothing_is_changed(way: str, broken: float) -> None:
    first, second = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
    with torch.no_grad():
        second.weight[0, 1, 2, 0] = broken
    net, before = nn.Sequential(first, second), first.weight.detach().clone()
    with pytest.raises(se.WeightError, match=r"1\.weight has entries that are not finite"):
        se.soften(net, "SO(2)", **WAYS[way])
    assert next(se.soft_weights(net), None) is None and torch.equal(first.weight, before)


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_of_low_rank_is_filtered_like_any_other(way: str) -> None:
    """One kernel many times over gives its filtered kernel many times over, and rank never grows."""
    kernel, mix = torch.randn(1, 1, 5, 5, dtype=torch.float64), torch.randn(6, 4, 1, 1, dtype=torch.float64)
    found = filtered(mix * kernel, **WAYS[way])
    alone = filtered(kernel, **WAYS[way])
    torch.testing.assert_close(found, mix * alone, rtol=0, atol=1e-12)
    assert int(torch.linalg.matrix_rank(found.flatten(0, 1).flatten(1))) <= 1


@pytest.mark.parametrize("side", [2, 3, 5])
@pytest.mark.parametrize("group", ["C1", "C2", "C4", "C360", "D1", "D4", "Reflection"])
def test_softness_zero_is_the_mean_over_the_group(group: str, side: int) -> None:
    weight = torch.randn(3, 2, side, side, dtype=torch.float64)
    found = filtered(weight, group, softness=0.0)
    torch.testing.assert_close(found, averaged(weight, se.parse_group(group)), rtol=0, atol=1e-9)
    torch.testing.assert_close(filtered(weight, group, softness=1.0), weight, rtol=0, atol=0)


def test_a_group_of_one_element_constrains_nothing() -> None:
    weight = torch.randn(3, 2, 4, 4)
    ways: list[dict[str, Any]] = [{"softness": 0.0}, {"softness": 0.5}, {"gain": se.hard(0)}]
    for way in [*ways, {"error": 0.1, "within": 3.0}]:
        net = se.soften(layer(weight), "C1", **way)
        torch.testing.assert_close(net.weight, weight)
        assert se.certify(net)["weight"].error == 0


def test_many_turns_are_all_turns() -> None:
    """C(360) and SO(2) have the same invariants on a small grid, and finer turns move less for each step."""
    weight = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(filtered(weight, "C360", softness=0.0), filtered(weight, softness=0.0))
    coarse, fine = (se.spectrum(se.grid(se.C(n), 5, 5)).levels[1] for n in (360, 36_000))
    assert float(fine) == pytest.approx(float(coarse) / 100, rel=1e-3)


@pytest.mark.parametrize("name", ["C1000001", "D1000000000000", "C" + "9" * 200])
def test_turns_too_fine_for_floats_are_refused(name: str) -> None:
    """Their levels would lie within the tolerance of level 0, and every weight would count as equivariant."""
    with pytest.raises(se.GroupError, match=r"at most 1000000 turns.*use SO\(2\) or O\(2\)"):
        se.parse_group(name)


def test_the_finest_turns_are_still_told_from_standing_still() -> None:
    found = filtered(torch.randn(3, 2, 5, 5, dtype=torch.float64), "C1000000", softness=0.0)
    assert float((found.rot90(1, (-2, -1)) - found).norm()) < 1e-9
    assert se.spectrum(se.grid(se.C(10**6), 5, 5)).invariants == se.spectrum(se.grid(se.SO(2), 5, 5)).invariants


@pytest.mark.parametrize("group", ["C1", "C4", "D4", "SO(2)", "O(2)", "Reflection", "Shifts(1,1)"])
def test_a_grid_of_one_pixel_has_nothing_to_filter(group: str) -> None:
    with pytest.raises(se.SoftEquivError, match="a kernel of size one has no directions to filter"):
        se.soften(nn.Conv2d(3, 8, 1), group, softness=0.0)
    parsed = se.parse_group(group)
    assert (
        se.spectrum(se.grid(parsed, 1, 1)).invariants == 1 and se.hard(0)(torch.ones(1, 1), se.grid(parsed, 1, 1)) == 1
    )


def test_a_grid_of_two_pixels_keeps_its_mean_under_every_turn() -> None:
    weight = torch.randn(3, 2, 2, 2, dtype=torch.float64)
    for group in ("C4", "D4", "SO(2)", "O(2)"):
        expected = weight.mean((-2, -1), keepdim=True).expand_as(weight)
        torch.testing.assert_close(filtered(weight, group, softness=0.0), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("error", [1e-12, 1e-9, 1e-6, 1e-3, 1.999])
def test_the_smallest_and_largest_targets_are_met(error: float) -> None:
    weight = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    net = se.soften(layer(weight), "SO(2)", error=error, within=se.degrees(30))
    assert net.weight.isfinite().all()
    certified = se.certify(net, se.degrees(30))["weight"].error
    assert certified <= error * (1 + 1e-4) + 1e-14
    if 1e-6 <= error < 1:
        assert certified >= 0.99 * error  # and no more is taken away than need be


def test_wide_and_narrow_ranges_are_the_limits_of_others() -> None:
    weight = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    wide = [filtered(weight, error=0.1, within=reach) for reach in (math.pi, 6.28, math.inf)]
    assert torch.equal(wide[0], wide[1]) and torch.equal(wide[1], wide[2])
    torch.testing.assert_close(filtered(weight, error=0.1, within=1e-300), weight)  # nothing moves


@pytest.mark.parametrize("share", [0.999, 0.99, 0.9, 0.75])
def test_a_weight_just_outside_of_its_target_is_brought_inside(share: float) -> None:
    """A weight that meets a target exactly, asked for a little less, changes a little; asked for more, not at all."""
    rep, within = se.grid(se.SO(2), 5, 5), se.degrees(30)
    weight = se.least_distortion(0.2, within)(torch.randn(8, 5, 5, dtype=torch.float64), rep)
    found = se.least_distortion(share * 0.2, within)(weight, rep)
    assert se.spectrum(rep).error(found, within) == pytest.approx(share * 0.2, rel=1e-6)
    assert float((found - weight).norm() / weight.norm()) < 1.5 * (1 - share)
    torch.testing.assert_close(se.least_distortion(0.2 / share, within)(weight, rep), weight)


@pytest.mark.parametrize("error", [0.2, 0.3, 0.45, 0.7, 0.9, 1.2])
def test_the_derivative_of_a_target_is_right_whichever_levels_lie_above_it(error: float) -> None:
    rep = se.grid(se.SO(2), 4, 4)
    weight = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: se.least_distortion(error, se.degrees(60))(w, rep), weight)


def test_a_target_that_is_a_levels_own_change_is_met() -> None:
    rep, within = se.grid(se.SO(2), 5, 5), se.degrees(30)
    for change in se.spectrum(rep).chord(within).tolist()[1:]:
        found = se.least_distortion(change, within)(torch.randn(8, 5, 5, dtype=torch.float64), rep)
        assert found.isfinite().all() and se.spectrum(rep).error(found, within) <= change * (1 + 1e-6)
