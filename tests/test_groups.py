"""Groups: names, elements, products, path lengths, covering radii."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softequiv as se
from draws import ALL_GROUPS, COMPACT, FINITE
from softequiv.errors import GroupError
from softequiv.groups import evaluate
from softequiv.groups.rotations import orthogonal_log

groups = st.sampled_from(ALL_GROUPS)
seeds = st.integers(0, 2**31)


def drawn(group: se.Group, seed: int) -> se.Element:
    return group.random(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group", ALL_GROUPS, ids=str)
def test_a_name_parses_to_an_equal_hashable_group(group):
    assert se.parse_group(group.name) == group
    assert hash(se.parse_group(group.name)) == hash(group)
    assert str(group) == group.name
    assert group != se.C(7) and group.unit


@given(groups, seeds, seeds)
def test_products_and_inverses_agree_with_the_defining_matrices(group, a, b):
    g, h = drawn(group, a), drawn(group, b)
    product = g.matrix @ h.matrix
    scale = max(1.0, float(product.abs().max()))
    assert torch.allclose((g @ h).matrix, product, atol=1e-9 * scale)
    eye = torch.eye(len(product), dtype=torch.float64)
    assert torch.allclose(g.inverse.matrix @ g.matrix, eye, atol=1e-9 * float(g.matrix.abs().max()) ** 2)
    assert g.inverse.length == pytest.approx(g.length)


@given(groups, seeds)
def test_an_element_is_found_again_from_its_matrix(group, seed):
    g = drawn(group, seed)
    again = group.element_of(g.matrix)
    assert torch.allclose(again.matrix, g.matrix, atol=1e-9 * float(g.matrix.abs().max()))
    assert again.length <= g.length + 1e-7 or not group.compact


@given(st.sampled_from([g for g in ALL_GROUPS if g.compact]), seeds)
def test_no_element_lies_beyond_the_covering_radius(group, seed):
    assert drawn(group, seed).length <= group.covering_radius + 1e-7


@pytest.mark.parametrize("group", FINITE, ids=str)
def test_a_finite_group_lists_its_order_and_reaches_its_covering_radius(group):
    elements = list(group.elements())
    assert len(elements) == group.order == len({str(g.matrix.round(decimals=6)) for g in elements})
    assert max(g.length for g in elements) == pytest.approx(group.covering_radius)
    assert not elements[0].word


@pytest.mark.parametrize("n", range(2, 8))
def test_the_covering_radius_of_rotations_is_attained_by_half_turns_in_every_plane(n):
    half_turns = torch.diag(torch.tensor([-1.0] * (n // 2 * 2) + [1.0] * (n % 2), dtype=torch.float64))
    assert se.SO(n).element_of(half_turns).length == pytest.approx(math.pi * math.sqrt(n // 2))


@pytest.mark.parametrize("group", ALL_GROUPS, ids=str)
def test_relations_and_periods_hold(group):
    eye = torch.eye(group.lie.shape[-1], dtype=torch.float64)
    for word in group.relations:
        assert torch.allclose(evaluate(word, group.lie, group.steps), eye, atol=1e-12)
    for generator, period in zip(group.lie, group.periods, strict=True):
        if period is not None:
            assert torch.allclose(torch.linalg.matrix_exp(period * generator), eye, atol=1e-9)
            assert not torch.allclose(torch.linalg.matrix_exp(period / 2 * generator), eye, atol=1e-2)


@given(st.integers(2, 7), seeds)
def test_flows_of_at_most_a_half_turn_are_shortest_and_need_no_logarithm(n, seed):
    generator = torch.Generator().manual_seed(seed)
    shortest = se.SO(n).element_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(se.SO, "element_of", None)
        g = se.SO(n).random(generator, math.pi)
    assert g.length == pytest.approx(shortest(g.matrix).length, abs=1e-9)


@given(st.integers(2, 7), seeds)
def test_the_logarithm_of_a_rotation_is_skew_shortest_and_exact(n, seed):
    matrix = drawn(se.SO(n), seed).matrix
    log = orthogonal_log(matrix)
    assert torch.allclose(torch.linalg.matrix_exp(log), matrix, atol=1e-10)
    assert torch.allclose(log, -log.T)
    assert torch.linalg.matrix_norm(log, 2) <= math.pi + 1e-9


def test_haar_sampling_of_so3_has_the_known_distribution_of_angles():
    generator = torch.Generator().manual_seed(0)
    angles = torch.tensor([se.SO(3).random(generator).length for _ in range(4000)])
    # density (1 - cos t) / pi on [0, pi]: mean pi/2 + 2/pi
    assert float(angles.mean()) == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.04)


@pytest.mark.parametrize("group", COMPACT + FINITE, ids=str)
def test_random_elements_average_to_the_invariant_projector(group):
    """A Haar mean of rho(g) projects onto what all elements fix; an independent null space gives the same."""
    generator = torch.Generator().manual_seed(1)
    count = 3000 if group.order > 50 else 1500
    mean = sum(group.random(generator).matrix for _ in range(count)) / count
    rates = torch.cat([group.lie, group.steps - torch.eye(group.lie.shape[-1], dtype=torch.float64)])
    fixed = torch.eye(group.lie.shape[-1], dtype=torch.float64)
    if rates.numel():
        _, values, right = torch.linalg.svd(rates.reshape(-1, rates.shape[-1]))
        null = right[(torch.cat([values, torch.zeros(len(right) - len(values))]) < 1e-9)]
        fixed = null.T @ null
    assert float((mean - fixed).abs().max()) < 5 / math.sqrt(count)


def test_ranges_are_read_as_people_write_them():
    assert se.parse_range("30deg") == pytest.approx(math.pi / 6)
    assert isinstance(se.parse_range("30deg"), se.Angle)
    assert se.parse_range("0.5rad") == 0.5 and se.parse_range("2") == 2.0
    assert se.C(18).reach(se.degrees(40)) == 2 and se.C(18).reach(3) == 3
    assert se.SO(2).reach(se.degrees(90)) == pytest.approx(math.pi / 2)
    assert se.D(4).reach(se.degrees(90)) == pytest.approx(math.hypot(1, 1))


@given(st.sampled_from([g for g in ALL_GROUPS if g.order > 1]), seeds, st.floats(1.0, 3.0))
def test_a_random_element_within_a_range_is_within_it(group, seed, within):
    assert group.random(torch.Generator().manual_seed(seed), within=within).length <= within + 1e-9


def test_a_group_from_generators_composes_words():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    mine = se.group_from(lie=[turn], steps=[torch.diag(torch.tensor([-1.0, 1.0]))], name="mine", covering_radius=4.0)
    g = mine.element(0.3, 1)
    assert (g @ g).length == pytest.approx(math.hypot(0.6, 2)) and mine.covering_radius == 4.0
    assert torch.allclose((g @ g).matrix, g.matrix @ g.matrix)
    assert mine == se.group_from(
        lie=[turn], steps=[torch.diag(torch.tensor([-1.0, 1.0]))], name="mine", covering_radius=4.0
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: se.parse_group("E8"), "unknown group 'E8'"),
        (lambda: se.SO(0), "at least 1; got 0"),
        (lambda: se.C(2.5), "got 2.5"),
        (lambda: se.S(-1), "got -1"),
        (lambda: se.Shifts(), "size of each axis"),
        (lambda: se.Lorentz("P"), "got 'P'"),
        (lambda: se.SO(2).element(1.0, 2.0), "1 Lie coordinates and 0 step counts"),
        (lambda: se.C(4).element(0.5), "whole numbers"),
        (lambda: se.SO(2).element(math.nan), "finite"),
        (lambda: se.SO(2).element(1.0) @ se.C(4).element(1), "one group"),
        (lambda: se.SO(2).reach(0.0), "empty"),
        (lambda: se.SO(2).reach(-1.0), "empty"),
        (lambda: se.C(18).reach(se.degrees(10)), "no element of C18 but the identity"),
        (lambda: se.S(4).reach(se.degrees(10)), "has no angles"),
        (lambda: list(se.SO(2).elements()), "only finite groups"),
        (lambda: se.S(3).permutation([0, 0, 1]), "lists each of 0..2 once"),
        (lambda: se.parse_range("thirty"), "'thirty'"),
        (lambda: se.group_from(), "at least one generator"),
        (lambda: se.group_from(lie=[torch.zeros(2, 3)]), "square"),
        (lambda: se.group_from(lie=[torch.zeros(2, 2), torch.zeros(3, 3)]), "one size"),
        (lambda: se.group_from(lie=[torch.full((2, 2), math.inf)]), "not finite"),
        (lambda: se.group_from(lie=[torch.eye(2, dtype=torch.complex64)]), "complex"),
        (lambda: se.group_from(steps=[torch.zeros(2, 2)]), "singular"),
        (lambda: se.group_from(lie=[torch.zeros(2, 2)]).element_of(torch.eye(2)), "generators only"),
        (lambda: se.group_from(lie=[torch.zeros(2, 2)]).element(math.nan), "finite"),
        (lambda: se.group_from(steps=[torch.eye(2)]).element(1.5), "whole numbers"),
        (lambda: se.parse_range("1.2.3"), "'1.2.3'"),
        (lambda: se.parse_group("C(18"), "unknown group 'C(18'"),
    ],
)
def test_bad_input_is_answered_by_a_sentence(make, words):
    with pytest.raises(GroupError, match=re.escape(words)):
        make()


def test_generators_that_a_caller_changes_are_the_callers_own():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    own = se.group_from(lie=[turn], steps=[turn])
    for read in (lambda: se.SO(3).lie, lambda: se.O(2).lie, lambda: own.lie, lambda: own.steps, se.vector(own).lie):
        before = read().clone()
        read().mul_(0.5)
        assert torch.equal(read(), before)


def test_generators_do_not_keep_the_context_in_which_they_were_first_asked_for():
    with torch.device("meta"):
        assert se.SO(9).lie.device.type == "cpu"
    with torch.inference_mode():
        assert not se.vector(se.SO(9)).lie().requires_grad
    turned = se.SO(10).lie.requires_grad_()
    (turned @ turned).sum().backward()
    with torch.inference_mode():
        pool = se.Moves(se.Pictures(), se.C(4))
    x = torch.zeros(4, 1, 5, 5, requires_grad=True)
    pool(x, torch.arange(4)).sum().backward()


@pytest.mark.parametrize("radius", [-3.0, 0.0, math.nan, "far"])
def test_a_covering_radius_is_a_path_length(radius):
    with pytest.raises(GroupError, match="covering radius"):
        se.group_from(lie=[torch.tensor([[0.0, -1.0], [1.0, 0.0]])], covering_radius=radius)


def test_generators_too_slow_to_be_told_from_rounding_are_refused():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    for lie, steps in (([1e-10 * turn], []), ([], [torch.linalg.matrix_exp(1e-10 * turn)])):
        with pytest.raises(GroupError, match="lost in rounding"):
            se.group_from(lie=lie, steps=steps)
    with pytest.raises(se.RepresentationError, match="lost in rounding"):
        se.representation(se.SO(2), lie=[1e-10 * turn])
    assert se.group_from(lie=[0 * turn, turn]).orthogonal


def test_generators_orthogonal_but_for_rounding_to_float32_are_refused():
    angle = torch.tensor(math.pi / 4, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    tilt = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    spun = se.SO(3).lie.sum(0)
    flow = tilt.float() @ spun.float() @ tilt.float().T
    for lie, steps in (([], [turn.float()]), ([flow], [])):
        with pytest.raises(GroupError, match="rounded to float32"):
            se.group_from(lie=lie, steps=steps)
    assert se.group_from(lie=[tilt @ spun @ tilt.T]).orthogonal and se.group_from(steps=[turn]).orthogonal


def test_steps_that_commute_in_the_group_must_do_so_in_a_representation():
    group = se.group_from(steps=[torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))])
    first, second = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    with pytest.raises(se.RepresentationError, match="s0 s1 = s1 s0"):
        se.representation(group, steps=[first, second])


def test_an_angle_bounds_every_turn_also_where_nothing_is_flipped():
    generator, angle = torch.Generator().manual_seed(0), se.degrees(30)
    for group in (se.O(2), se.SO(2) * se.SO(2), se.SO(2) * se.C(36)):
        drawn = [group.random(generator, angle).times for _ in range(300)]
        flows = torch.stack(drawn)[:, : len(group.lie)]
        assert float(flows.max()) <= angle + 1e-9
        assert float(flows.max()) > 0.9 * angle
    assert [str(g) for g in se.Moves(se.Points(), se.D(4), angle).elements] == ["e", "s1"]
    pairs = se.Moves(se.Points(), se.C(36) * se.C(36), angle).elements
    assert len(pairs) == 7 * 7
    assert max(float(g.times.max()) for g in pairs) == 3


def test_a_factor_whose_first_step_is_beyond_the_angle_stands_still():
    generator, angle = torch.Generator().manual_seed(0), se.degrees(30)
    for moving in (se.SO(2), se.SO(3), se.Lorentz("SO+")):
        drawn = torch.stack([(moving * se.C(4)).random(generator, angle).times for _ in range(100)])
        assert float(drawn[:, :-1].max()) > 0.4 and not bool(drawn[:, -1].any())
    pool = se.Moves(se.Points(), se.C(4) * se.C(12), angle).elements
    assert [str(g) for g in pool] == ["e", "s1", "s1^-1"]
    assert {str((se.C(4) * se.C(12)).random(generator, angle)) for _ in range(50)} == {"e", "s1", "s1^-1"}
    assert len(se.Moves(se.Points(), se.C(4) * se.C(12), se.degrees(math.inf)).elements) == 48


def test_products_of_groups_given_by_generators_have_elements():
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    own = se.group_from(lie=[quarter], steps=[torch.diag(torch.tensor([1.0, -1.0]))], name="own")
    both, generator = se.SO(3) * own * se.C(4), torch.Generator().manual_seed(0)
    g = both.element(0.0, 0.0, 5.0, 0.4, 1, 3)
    single = se.SO(3).element(0.0, 0.0, 5.0), own.element(0.4, 1), se.C(4).element(3)
    whole = torch.block_diag(*(part.matrix for part in single))
    assert torch.allclose(g.matrix, whole)
    assert g.length == pytest.approx(math.hypot(2 * math.pi - 5.0, 0.4, 1, 1))  # shortest where that is known
    assert torch.allclose((g @ g).matrix, whole @ whole) and torch.allclose(
        (g @ g.inverse).matrix, torch.eye(7).double()
    )
    for within in (None, 1.5, se.degrees(100)):
        drawn = [both.random(generator, within) for _ in range(30)]
        assert within is None or all(both.holds(g, within) for g in drawn)
    assert se.Moves(se.Points(), both, se.degrees(30), count=4)(torch.ones(4, 1, 7), torch.arange(4)).shape == (4, 1, 7)


def test_draws_of_a_mixed_group_take_every_step_that_fits():
    generator = torch.Generator().manual_seed(0)
    counts = {int((se.SO(2) * se.C(18)).random(generator, 5.0).times[1]) for _ in range(500)}
    assert counts == set(range(6))
    flips = {tuple(se.Lorentz("O").random(generator, 2.0).times[6:].tolist()) for _ in range(200)}
    assert flips == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}


def test_ranges_up_to_the_farthest_element_are_taken():
    assert se.SO(20).reach(8.0) == 8.0
    with pytest.raises(GroupError, match="degrees"):
        se.SO(20).reach(30.0)


def test_numbers_too_large_for_a_float_are_no_hindrance():
    assert (se.S(200) * se.SO(2)).order == math.inf
    with pytest.raises(GroupError, match="more than 10000 elements"):
        list(se.S(200).elements())
