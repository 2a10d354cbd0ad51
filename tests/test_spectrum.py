"""Spectra: every fast route equals the dense oracle, level 0 has the right dimension, and nothing large is kept."""

import functools
import math
import operator
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import softequiv as se
from draws import ALL_GROUPS, COMPACT, FINITE, distance, level_gains, spaces, weight, weight_reps
from softequiv._cache import Cache, cache, nbytes
from softequiv._linalg import Frozen
from softequiv.errors import PerformanceWarning, TooLargeError, WeightError
from softequiv.reps import Matrices
from softequiv.reps.grids import kernels
from softequiv.spectrum import routes
from softequiv.spectrum.decompose import DecompositionError, irreducible_pieces, joint_eigenbasis
from softequiv.spectrum.oscillator import oscillator
from softequiv.spectrum.routes import characters, small_blocks
from softequiv.spectrum.transforms import Pairs

seeds = st.integers(0, 2**31)


def check_equal(fast: se.Spectrum, oracle: se.Spectrum, gain: se.gains.LevelGain, w: torch.Tensor) -> None:
    assert len(fast.levels) == len(oracle.levels)
    assert torch.allclose(fast.levels, oracle.levels, atol=1e-9)
    assert torch.equal(fast.counts, oracle.counts)
    assert distance(fast.filter(gain.gamma(fast))(w), oracle.filter(gain.gamma(oracle))(w)) < 1e-9
    assert torch.allclose(fast.energies(w), oracle.energies(w), atol=1e-9 * float(w.square().sum()))


@given(weight_reps(), level_gains(), seeds)
def test_the_chosen_route_equals_the_dense_svd(rep, gain, seed):
    check_equal(se.spectrum(rep), se.dense(rep), gain, weight(rep, seed, lead=(2,)))


SO3_TYPES = [se.spin(se.SO(3), l) for l in range(5)]


@pytest.mark.parametrize(
    "space",
    [
        2 * se.tensor(se.O(3), 2),
        2 * se.spin(se.SO(3), 4) + se.vector(se.SO(3)),
        functools.reduce(operator.add, SO3_TYPES) + SO3_TYPES[0],
        functools.reduce(operator.add, [2 * SO3_TYPES[0], *SO3_TYPES[1:]]),
    ],
    ids=str,
)
def test_copies_of_middling_spaces_and_many_types_have_one_matrix_a_pair(space):
    rep = space >> space
    copied = any(copies > 1 for _, copies in space.terms)
    assert isinstance(se.spectrum(rep).transforms[-1], Pairs) == copied
    check_equal(se.spectrum(rep), se.dense(rep), se.hard(1.7), weight(rep, 0))


def test_maps_between_sets_of_many_points_are_found_without_a_matrix_for_each_exchange():
    """The 276 exchanges of 24 points would be matrices of 618 MB; those of 60 are refused before any is made."""
    points = se.vector(se.S(24))
    levels = se.spectrum(points >> points)
    assert levels.invariants == 2 and levels.counts.sum() == 24**2
    equivariant = torch.eye(24, dtype=torch.float64) + 3
    assert torch.allclose(se.softness(0)(equivariant, points >> points), equivariant)
    many = se.vector(se.S(60))
    with pytest.raises(TooLargeError, match=r"1770 generators of S60 as matrices of 3600 x 3600 .* would take 171 GB"):
        se.spectrum(many >> many)


@pytest.mark.parametrize(
    "rep",
    [
        se.vector(se.S(6)) >> se.vector(se.S(6)),
        se.tensor(se.SO(3), 2) >> se.spin(se.SO(3), 2),
        se.vector(se.O(3)) @ se.vector(se.O(3)) >> se.determinant(se.O(3)) @ se.vector(se.O(3)),
        se.grid(se.O(2), 4, 4) >> se.grid(se.O(2), 3, 3),
        se.tensor(se.Lorentz(), 2) >> se.vector(se.Lorentz()),
        se.tensor(se.SO(2) * se.Scaling(), 1, 2),
    ],
    ids=str,
)
def test_levels_summed_over_generators_equal_the_dense_svd(rep, monkeypatch):
    monkeypatch.setattr(routes, "SMALL_STACK", 0)
    check_equal(small_blocks(rep), se.dense(rep), se.hard(1.7), weight(rep, 0))


@pytest.mark.parametrize("action", ["exact", "su2", "central", "bilinear"])
@pytest.mark.parametrize(("n", "m"), [(3, 3), (4, 5), (6, 3), (5, 1)])
def test_maps_between_grids_equal_the_dense_svd(n, m, action):
    for group in (se.SO(2), se.C(18), se.C(4), se.O(2), se.D(4)):
        rep = se.grid(group, n, n, action=action) >> se.grid(group, m, m, action=action)
        for gain in (se.softness(0), se.softness(0.4), se.hard(1.5), se.smooth(0.5, 1.0)):
            check_equal(se.spectrum(rep), se.dense(rep), gain, weight(rep, 0))


@given(weight_reps([group for group in ALL_GROUPS if group.abelian and group.orthogonal]), level_gains(), seeds)
def test_two_routes_with_different_solvers_agree(rep, gain, seed):
    check_equal(characters(rep), small_blocks(rep), gain, weight(rep, seed))


@given(weight_reps(COMPACT + FINITE), st.floats(0, 5), seeds, seeds)
def test_hard_filters_are_orthogonal_projections_nested_in_the_cutoff(rep, b, first, second):
    inner, outer = se.hard(b).on(rep), se.hard(b + 0.7).on(rep)
    v, w = weight(rep, first), weight(rep, second)
    assert distance(inner(inner(v)), inner(v)) < 1e-9 or float(inner(v).norm()) < 1e-9
    assert float((inner(v) * w).sum()) == pytest.approx(float((v * inner(w)).sum()), abs=1e-8)
    assert float((outer(inner(v)) - inner(v)).norm()) < 1e-9 * float(v.norm())
    assert float(inner(v).norm()) <= float(outer(v).norm()) + 1e-9


@given(weight_reps(), seeds, seeds)
def test_level_zero_commutes_with_the_group(rep, seed, element):
    """softness 0 gives W with rho_W(g) W = W for every g, also where the group is not compact."""
    g = rep.group.random(torch.Generator().manual_seed(element))
    w = se.softness(0)(weight(rep, seed), rep).flatten()
    moved = rep.rho(g) @ w
    scale = max(1.0, float(rep.rho(g).abs().max()))
    if rep.exact or len(rep.group.lie) + len(rep.group.steps) == 1:
        assert float((moved - w).norm()) < 1e-8 * scale * max(1.0, float(w.norm()))


@given(st.sampled_from([g for g in ALL_GROUPS if g.orthogonal and g.order > 1]), st.data(), seeds)
def test_reordering_the_coordinates_reorders_the_result_and_nothing_else(group, data, seed):
    source, target = data.draw(spaces(group, 6)), data.draw(spaces(group, 6))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(rep.dim, generator=generator) for rep in (source, target)]
    shuffled = [
        Matrices(group, Frozen(rep.lie()[:, p][:, :, p]), Frozen(rep.steps()[:, p][:, :, p]))
        for rep, p in zip((source, target), orders, strict=True)
    ]
    w = weight(source >> target, seed)
    for gain in (se.softness(0), se.softness(0.37), se.hard(1.0)):
        plain = gain(w, source >> target)
        other = gain(w[orders[1]][:, orders[0]], shuffled[0] >> shuffled[1])
        assert float((other - plain[orders[1]][:, orders[0]]).norm()) < 1e-8 * float(w.norm())


@given(weight_reps(), level_gains(), seeds)
def test_single_precision_follows_double_precision(rep, gain, seed):
    w = weight(rep, seed)
    exact, rounded = gain(w, rep), gain(w.float(), rep)
    assert rounded.dtype == torch.float32
    assert float((rounded.double() - exact).norm()) < 3e-6 * float(w.norm())
    assert gain(w.half(), rep).dtype == torch.float16


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_the_oscillator_route_for_large_squares_equals_the_dense_svd(n):
    rep = se.grid(se.SO(2), n, n, action="su2")
    for gain in (se.softness(0), se.softness(0.4), se.hard(1.5), se.smooth(0.5, 1.0)):
        check_equal(oscillator(rep), se.dense(rep), gain, weight(rep, 0, lead=(2,)))


def test_a_square_beyond_dense_reach_is_filtered_exactly():
    rep = se.grid(se.SO(2), 160, 160, action="su2")
    w = se.softness(0)(weight(rep, 0), rep)
    assert se.spectrum(rep).error(w, 1.0) < 1e-7 and float(w.norm()) > 1
    assert nbytes(se.spectrum(rep)) < 60 * 160**3 < 160**4
    assert torch.allclose(w, se.softness(0)(w.rot90(1, (0, 1)), rep).rot90(-1, (0, 1)), atol=1e-9)


def fixed_by(rep: se.Rep) -> torch.Tensor:
    """The projector onto what rho_W fixes, from the action alone: an oracle that shares nothing with rates."""
    moved = torch.cat([rep.lie(), rep.steps() - torch.eye(rep.dim, dtype=torch.float64)]).flatten(0, 1)
    values, vectors = torch.linalg.eigh(moved.T @ moved)
    null = vectors[:, values < 1e-9]
    return null @ null.T


J = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
S3, C4 = se.vector(se.S(3)), se.vector(se.C(4))
TORUS = se.SO(2) * se.SO(2)


@pytest.mark.parametrize(
    "rep",
    [
        2 * se.outer(se.frequency(se.SO(2), 2), se.frequency(se.SO(2), 1)),  # speeds that cancel in some combination
        se.representation(TORUS, lie=[2 * J, -J]),
        se.vector(se.group_from(lie=[J, -J / 2])),
        2 * se.grid(se.Shifts(4, 12), 4, 12),
        se.regular(se.C(4) * se.C(6)),
        (S3 >> S3) >> S3,  # maps of maps
        S3 >> (S3 >> S3),
        ((C4 >> C4) + (C4 >> se.scalar(se.C(4)))) @ C4,
        (se.vector(se.D(4)) >> se.vector(se.D(4))) @ se.vector(se.D(4)),
        se.vector(se.group_from(steps=[torch.diag(torch.tensor([2.0, 3.0]))]))
        >> se.vector(se.group_from(steps=[torch.diag(torch.tensor([2.0, 3.0]))])),
        se.tensor(se.group_from(steps=[torch.tensor([[1.0, 1.0], [0.0, 1.0]])]), 1, 1),
    ],
    ids=str,
)
def test_level_zero_is_what_the_action_fixes(rep):
    w = weight(rep, 5)
    kept = se.softness(0)(w, rep).flatten()
    assert float((kept - fixed_by(rep) @ w.flatten()).norm()) < 1e-8 * float(w.norm())


@pytest.mark.parametrize("group", [se.SO(2), se.O(2)], ids=str)
@pytest.mark.parametrize("n", [2, 4, 6])
def test_maps_between_grids_that_admit_no_exact_action_keep_the_identity(group, n):
    """Pictures that stand aside count as moving, but a map from them to themselves does not."""
    space = se.grid(group, n, n)
    identity = torch.eye(space.dim, dtype=torch.float64)
    assert torch.allclose(se.softness(0)(identity, space >> space), identity, atol=1e-10)
    check_equal(se.spectrum(space >> space), se.dense(space >> space), se.hard(1.5), weight(space >> space, 0))
    lifted = se.lift(space, group * se.SO(2), 0)
    assert se.spectrum(lifted).invariants == se.spectrum(space).invariants


def test_keyword_arguments_are_part_of_what_is_remembered():
    assert se.spectrum(rep=se.vector(se.SO(2))).rep != se.spectrum(rep=se.vector(se.SO(3))).rep


# -- the dimension of level 0 ------------------------------------------------------------------------------------------


@given(st.sampled_from(FINITE), st.data())
def test_invariants_of_finite_groups_are_counted_by_characters(group, data):
    source, target = data.draw(spaces(group)), data.draw(spaces(group))
    if not (source.exact and target.exact):
        return
    total = sum(float(source.rho(g).trace() * target.rho(g).trace()) for g in group.elements())
    assert se.spectrum(source >> target).invariants == round(total / group.order)


def test_invariants_of_so3_are_counted_by_clebsch_gordan_through_e3nn():
    o3 = pytest.importorskip("e3nn.o3", reason="e3nn is the independent oracle for SO(3)")
    tensors = {0: o3.Irreps("0e"), 1: o3.Irreps("1e")}
    for p in (2, 3, 4):
        tensors[p] = o3.FullTensorProduct(tensors[p - 1], o3.Irreps("1e")).irreps_out
    for p, q in [(0, 2), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4)]:
        expected = sum(tensors[p].count(ir) * tensors[q].count(ir) for _, ir in tensors[p].simplify())
        assert se.spectrum(se.tensor(se.SO(3), p) >> se.tensor(se.SO(3), q)).invariants == expected
    spins = se.spin(se.SO(3), 1) + 2 * se.spin(se.SO(3), 2) >> se.spin(se.SO(3), 2) + 3 * se.spin(se.SO(3), 1)
    assert se.spectrum(spins).invariants == 1 * 3 + 2 * 1


@pytest.mark.parametrize(
    ("group", "source", "target", "dimension"),
    [
        (se.O(5), 1, 1, 1),  # perfect matchings of p + q points: 1, 3, 15
        (se.O(5), 2, 2, 3),
        (se.O(5), 2, 1, 0),
        (se.O(5), 3, 3, 15),
        (se.SO(5), 2, 3, 1),  # the Levi-Civita tensor has five legs
        (se.O(5), 2, 3, 0),
        (se.S(4), 1, 1, 2),  # Bell numbers: partitions of p + q points into at most n classes
        (se.S(4), 2, 1, 5),
        (se.S(4), 2, 2, 15),
        (se.Lorentz("O"), 2, 2, 3),
        (se.Lorentz("SO+"), 2, 2, 4),
        (se.Lorentz("SO"), 1, 1, 1),
    ],
    ids=str,
)
def test_invariants_of_tensors_have_the_known_counts(group, source, target, dimension):
    assert se.spectrum(se.tensor(group, source) >> se.tensor(group, target)).invariants == dimension


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12])
def test_invariant_pictures_under_quarter_turns_are_counted_by_orbits(n):
    """Burnside: (n^2 + 2 fix(P) + fix(P^2)) / 4, and the flips for D4."""
    fixed = n % 2
    assert se.spectrum(se.grid(se.C(4), n, n)).invariants == (n**2 + 3 * fixed) // 4
    flips = 2 * n * fixed + 2 * n
    assert se.spectrum(se.grid(se.D(4), n, n)).invariants == (n**2 + 3 * fixed + flips) // 8


def test_so2_levels_of_a_grid_are_whole_numbers_and_rotations_keep_level_zero():
    levels = se.spectrum(se.grid(se.SO(2), 16, 16)).levels
    assert torch.allclose(levels, levels.round(), atol=1e-9) and len(levels) > 8
    table = se.spectrum(se.grid(se.SO(2), 8, 8) >> se.grid(se.SO(2), 7, 7))
    assert torch.allclose(table.levels, table.levels.round(), atol=1e-9)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 13))
def test_steps_beyond_half_a_turn_bring_a_level_no_farther(n):
    """Character k turns by 2 pi k / n a step; the level of a half turn is 2, or by rounding a little more."""
    spectrum = se.spectrum(se.scalar(se.C(n)) >> se.regular(se.C(n)))
    angles = [min(n // 2 * 2 * math.pi * k / n, math.pi) for k in range(n // 2 + 1)]
    assert spectrum.chord(math.inf).tolist() == pytest.approx([2 * math.sin(angle / 2) for angle in angles], abs=1e-7)


@pytest.mark.parametrize("group", [se.C(3) * se.Reflection(), se.Shifts(4, 3), se.S(3)], ids=str)
def test_no_element_changes_a_weight_by_more_than_twice_its_length(group):
    """Levels may exceed 2 where there are several steps."""
    spectrum = se.spectrum(se.regular(group))
    assert float(spectrum.levels.max()) > 2 == float(spectrum.chord(math.inf).max())


def test_a_filter_keeps_the_cheaper_side_and_no_square_of_the_weight_space():
    rep = se.grid(se.SO(2), 9, 9)
    for s, side in ((0.0, "kept"), (0.2, "kept"), (0.8, "dropped"), (0.95, "dropped")):
        kept = se.softness(s).on(rep)
        assert kept.side == side
        assert kept.transforms[0].basis.shape[1] <= (rep.dim + int(se.spectrum(rep).counts.max())) / 2
    assert se.softness(0.5).on(se.grid(se.SO(2), 7, 7)).side == "operator"
    assert se.softness(1).on(rep).transforms == ()
    big = se.grid(se.SO(2), 24, 24) >> se.grid(se.SO(2), 24, 24)
    assert nbytes(se.spectrum(big)) < 400 * big.dim < big.dim**2


def test_a_filter_is_its_own_gradient_inside_function_transforms_too():
    rep = se.grid(se.SO(2), 3, 3) >> se.grid(se.SO(2), 3, 3)
    apply = se.hard(1.5).on(rep)
    w, slope = (torch.randn(9, 9, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(torch.func.grad(lambda w: (apply(w) * slope).sum())(w), apply(slope))


def test_matrices_without_common_pieces_are_noticed():
    """Those that do not commute have no joint eigenbasis; a shear leaves no complement of its axis alone."""
    with pytest.raises(DecompositionError, match="no joint eigenbasis"):
        joint_eigenbasis(torch.randn(2, 4, 4, dtype=torch.float64))
    with pytest.raises(DecompositionError, match="do not add up"):
        irreducible_pieces(torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], dtype=torch.float64))


def test_multiplicities_cost_nothing():
    features = 64 * se.vector(se.SO(3)) + 64 * se.scalar(se.SO(3))
    wide = se.spectrum(features >> features)
    assert wide.invariants == 2 * 64 * 64
    bases = [basis for row in wide.transforms[-1].bases for basis in row if basis is not None]
    assert max(len(basis) for basis in bases) <= 9


def test_spectra_are_cached_by_value_bounded_and_shared_between_threads():
    first = se.spectrum(se.grid(se.C(12), 5, 5))
    assert se.spectrum(se.grid(se.C(12), 5, 5)) is first
    results: list[se.Spectrum] = []
    rep = se.grid(se.C(20), 6, 6)
    threads = [threading.Thread(target=lambda: results.append(se.spectrum(rep))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(result) for result in results}) == 1
    small = Cache(capacity=1000)
    for i in range(50):
        small.get(i, lambda i=i: torch.full((10,), float(i), dtype=torch.float64))
    assert small.used <= 1000 and len(small) == 12
    small.clear()
    assert len(small) == small.used == 0
    assert cache.used <= cache.capacity


def test_nothing_is_computed_on_import():
    code = "import softequiv, softequiv._cache as c; raise SystemExit(len(c.cache))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_dense_route_warns_and_then_refuses():
    slow = se.grid(se.SO(2), 7, 7, action="bilinear") >> se.grid(se.SO(2), 6, 6, action="bilinear")
    with pytest.warns(PerformanceWarning, match="1764 dimensions"):
        se.spectrum(slow)
    huge = se.grid(se.SO(2), 9, 9, action="bilinear") >> se.grid(se.SO(2), 9, 9, action="bilinear")
    with pytest.raises(TooLargeError, match="the dense route ends at"):
        se.spectrum(huge)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(3, 2), "trailing axes"),
        (torch.zeros(3), "trailing axes"),
        (torch.zeros(2, 2, dtype=torch.int8), "floating-point"),
        (torch.full((2, 2), math.nan), "not finite"),
    ],
)
def test_bad_weights_are_answered_by_a_sentence(bad, words):
    rep = se.vector(se.SO(2)) >> se.vector(se.SO(2))
    for gain in (se.hard(1.0), se.softness(0.5), se.least_distortion(0.1, 0.5)):
        with pytest.raises(WeightError, match=words):
            gain(bad, rep)


QUARTER = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
SCALED_TURN = se.group_from(lie=[torch.eye(2)], steps=[QUARTER], name="scale and quarter turn")


@pytest.mark.parametrize("group", [SCALED_TURN, se.Scaling() * se.C(8), se.Scaling() * se.Shifts(5)], ids=str)
def test_level_zero_commutes_with_steps_beside_a_flow_that_stretches(group):
    V = se.vector(group)
    step = group.element(*[0.0] * len(group.lie), *[1] * len(group.steps))
    for rep in (V >> V, 2 * V >> V, (V >> V) >> V, V.T >> (V >> V)):
        w = se.softness(0)(weight(rep, 0), rep).flatten()
        assert float((rep.rho(step) @ w - w).norm()) < 1e-9 * max(1.0, float(w.norm()))
        assert se.spectrum(rep).invariants == se.dense(rep).invariants


def test_maps_between_maps_keep_all_invariants():
    group = se.Lorentz("O")
    V = se.vector(group)
    rep = ((V >> se.scalar(group)) + V) >> 2 * V
    assert se.spectrum(rep).invariants == se.dense(rep).invariants == 4


@pytest.mark.parametrize(
    "rep",
    [
        se.vector(se.group_from(steps=[torch.tensor([[2.0, 1.0], [0.0, 1.0]])])).T,
        kernels(se.C(8), 2, 2, action="bilinear"),  # which has no inverse
        kernels(se.C(18), 3, 3, action="bilinear"),
    ],
    ids=str,
)
def test_copies_have_the_levels_of_one(rep):
    assert torch.allclose(se.spectrum(3 * rep).levels, se.spectrum(rep).levels)
    assert torch.allclose(se.spectrum(3 * rep).levels, se.dense(3 * rep).levels)


def test_one_fast_turn_does_not_hide_a_boost():
    still, boost = torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    group = se.group_from(lie=[torch.block_diag(3e8 * QUARTER, still), torch.block_diag(still, boost)])
    V = se.vector(group)
    w = torch.zeros(4, 4, dtype=torch.float64)
    w[2, 2] = 1
    g = V.rho(group.element(0.0, 3.0))
    change = float((w @ g - g @ w).norm() / w.norm())
    assert not group.orthogonal
    assert change <= se.spectrum(V >> V).error(w, 3.0)


def test_flows_one_after_another_are_bounded_too():
    first, second = torch.diag(torch.tensor([1.0, 0.0])), torch.full((2, 2), 0.5)
    group = se.group_from(lie=[first, second])
    V = se.vector(group)
    g = group.element(60.0, 0.0) @ group.element(0.0, 60.0)
    rho, w = V.rho(g), weight(V >> V, 0)
    assert float(torch.linalg.matrix_norm(rho, 2)) <= se.spectrum(V >> V).kappa(g.length)
    assert float((w @ rho - rho @ w).norm() / w.norm()) <= se.spectrum(V >> V).error(w, g.length)
