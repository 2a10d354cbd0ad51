"""Gains: the dial, the paper's rules, and the nearest weight for a target."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import softequiv as se
from draws import COMPACT, FINITE, distance, level_gains, weight, weight_reps
from softequiv.errors import GainError, GroupError, RepresentationError
from softequiv.gains.cone import least_distortion_gain, nearest

seeds = st.integers(0, 2**31)
WITHIN = 1.2


@given(weight_reps(), seeds)
def test_softness_one_is_the_identity_bit_for_bit(rep, seed):
    w = weight(rep, seed)
    assert se.softness(1)(w, rep) is w


@given(weight_reps(), st.floats(0, 1), st.floats(0, 1))
def test_softness_is_monotone_and_keeps_the_stated_count(rep, a, b):
    spectrum = se.spectrum(rep)
    low, high = (se.softness(s).gamma(spectrum) for s in sorted((a, b)))
    assert bool((low <= high + 1e-12).all())
    kept = se.softness(a).kept(spectrum)
    invariants, total = spectrum.invariants, rep.dim
    assert kept.total == total
    assert kept.directions == pytest.approx(invariants + a * (total - invariants))
    whole = spectrum.levels < kept.cutoff - 1e-9
    gamma = se.softness(a).gamma(spectrum)
    assert bool((gamma[whole] == 1).all()) and int(((gamma > 0) & (gamma < 1)).sum()) <= 1


@given(weight_reps(), st.floats(0, 0.999), seeds)
def test_softness_is_continuous(rep, s, seed):
    """Moving the dial by epsilon moves the weight by no more than epsilon N / smallest level count."""
    w, step = weight(rep, seed), 1e-6
    spectrum = se.spectrum(rep)
    change = se.softness(s + step)(w, rep) - se.softness(s)(w, rep)
    assert float(change.norm()) <= 2 * step * rep.dim / int(spectrum.counts.min()) * float(w.norm()) + 1e-12


@given(weight_reps(), st.floats(0, 5), st.floats(0.2, 3), seeds)
def test_smooth_equals_hard_below_the_cutoff_and_decays_above(rep, b, s, seed):
    spectrum = se.spectrum(rep)
    hard, smooth = se.hard(b).gamma(spectrum), se.smooth(b, s).gamma(spectrum)
    assert bool((smooth[hard == 1] == 1).all())
    rest = hard == 0
    assert torch.allclose(smooth[rest], torch.exp(-((spectrum.levels[rest] / s) ** 2)))


def test_a_cutoff_that_falls_on_a_level_does_not_split_it():
    """The paper keeps sigma < b; a level equal to b up to rounding is dropped whole, whatever LAPACK's last digit."""
    rep = se.grid(se.C(4), 7, 7)
    spectrum = se.spectrum(rep)
    for level in spectrum.levels[1:]:
        for nudge in (-1e-13, 0.0, 1e-13):
            gamma = se.hard(float(level) + nudge).gamma(spectrum)
            assert torch.equal(gamma, (spectrum.levels < level - 1e-6).double())


# -- the paper's Schur rule --------------------------------------------------------------------------------------------


def rank(gain, rep) -> int:
    basis = torch.eye(rep.dim, dtype=torch.float64).reshape(-1, *rep.shape)
    return int(torch.linalg.matrix_rank(gain.on(rep)(basis).flatten(1)))


def test_the_schur_rule_keeps_a_strict_subset_of_the_exact_rule():
    so2 = se.SO(2)
    space = (
        2 * se.scalar(so2) + se.frequency(so2, 1) + se.frequency(so2, 2) + se.frequency(so2, 3) + se.frequency(so2, 5)
    )
    rep = space >> space
    cutoffs = (0.5, 1.5, 2.5, 4.5, 6.5)
    assert [rank(se.schur(b), rep) for b in cutoffs] == [12, 20, 30, 56, 82]
    assert [rank(se.hard(b), rep) for b in cutoffs] == [12, 28, 46, 72, 90]
    for b in cutoffs:
        w = weight(rep, 0)
        kept = se.schur(b)(w, rep)
        assert distance(se.hard(b)(kept, rep), kept) < 1e-9


def plain_schur(theta, x_blocks, y_blocks, b, s=None):
    """The rule as the paper states it, on weights in the Schur basis: blocks are frequencies (0 for a 1 x 1 block)."""
    out = theta.clone()
    row = 0
    for nu in y_blocks:
        height = 2 if nu else 1
        column = 0
        for omega in x_blocks:
            width = 2 if omega else 1
            block = theta[row : row + height, column : column + width]
            if omega + nu > b:
                factor = 0.0 if s is None else math.exp(-(omega + nu) / s**2)
                symmetric = torch.zeros_like(block)
                if omega == nu and omega:
                    (p, q), (r, t) = block
                    symmetric = torch.tensor(
                        [[(p + t) / 2, (q - r) / 2], [(r - q) / 2, (p + t) / 2]], dtype=theta.dtype
                    )
                elif omega == nu:
                    symmetric = block
                out[row : row + height, column : column + width] = symmetric + factor * (block - symmetric)
            column += width
        row += height
    return out


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.floats(0, 9),
    st.one_of(st.none(), st.floats(0.5, 3)),
    seeds,
)
def test_the_schur_rule_equals_the_paper_block_by_block(xs, ys, b, s, seed):
    assume(all(abs(x + y - b) > 1e-6 for x in xs for y in ys))
    spaces = []
    for frequencies in (xs, ys):
        parts = [se.frequency(se.SO(2), m) for m in frequencies]
        spaces.append(sum(parts[1:], parts[0]))
    rep = spaces[0] >> spaces[1]
    theta = weight(rep, seed)
    assert torch.allclose(se.schur(b, s)(theta, rep), plain_schur(theta, xs, ys, b, s), atol=1e-10)


@pytest.mark.parametrize("unit", [1.0, 1e9])
def test_the_schur_rule_is_the_same_in_every_unit_of_the_generator(unit):
    """Speeds 0, 1 and 3, turned out of the axes: a cut-off at their largest sum keeps all, whatever rounding says."""
    plane = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    speeds = torch.block_diag(torch.zeros(1, 1), plane, 3 * plane)
    for _ in range(8):
        axes, w = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0], torch.randn(5, 5, dtype=torch.float64)
        group = se.group_from(lie=[unit * axes @ speeds @ axes.T], name="three speeds")
        rep = se.vector(group) >> se.vector(group)
        torch.testing.assert_close(se.schur(6 * unit)(w, rep), w)
        assert float((se.schur(4 * unit)(w, rep) - w).norm()) > 0.01


def test_the_schur_rule_composes_generators_and_says_where_that_is_approximate():
    v = se.vector(se.SO(3))
    rep = v >> v
    assert se.schur(0.5).approximate(rep) and not se.schur(0.5).approximate(se.vector(se.SO(2)) >> se.vector(se.SO(2)))
    torus = se.SO(2) * se.SO(2)
    flat = se.vector(torus) >> se.vector(torus)
    assert distance(se.schur(0.5)(weight(flat, 0), flat), se.softness(0)(weight(flat, 0), flat)) < 1e-9
    # three commuting parts in turn do not leave the equivariant part alone
    tensor = se.tensor(se.SO(3), 2) >> se.tensor(se.SO(3), 2)
    t = se.schur(0.5)(weight(tensor, 0), tensor)
    assert distance(se.schur(0.5)(t, tensor), t) > 1e-3


# -- least distortion --------------------------------------------------------------------------------------------------


def level_error(spectrum: se.Spectrum, w: torch.Tensor) -> float:
    """sqrt(sum e c^2 / sum e), the quantity that the target speaks of."""
    energies = spectrum.energies(w)
    return float(((energies * spectrum.chord(WITHIN) ** 2).sum() / energies.sum().clamp(min=1e-300)).sqrt())


@given(weight_reps(COMPACT + FINITE), st.floats(0.02, 1.5), seeds)
def test_least_distortion_meets_its_target(rep, eta, seed):
    assume(rep.group.order > 1)
    w = weight(rep, seed, lead=(3,))
    spectrum = se.spectrum(rep)
    out = se.least_distortion(eta, WITHIN)(w, rep)
    chord = spectrum.chord(WITHIN)
    if level_error(spectrum, w) <= eta:
        assert torch.equal(out, w) or distance(out, w) < 1e-12
    elif float(chord.min()) < eta:
        assert level_error(spectrum, out) == pytest.approx(eta, abs=1e-6)
    else:
        assert float(out.norm()) == 0
    assert spectrum.error(out, WITHIN) <= eta + 1e-6


@given(weight_reps(COMPACT + FINITE), level_gains(), seeds)
def test_no_other_gain_is_nearer_at_its_own_certificate(rep, gain, seed):
    assume(rep.group.order > 1)
    w = weight(rep, seed)
    spectrum = se.spectrum(rep)
    other = gain(w, rep)
    eta = level_error(spectrum, other)
    assume(1e-3 < eta < 1.9)
    ours = se.least_distortion(eta, WITHIN)(w, rep)
    assert float((ours - w).norm()) <= float((other - w).norm()) * (1 + 1e-7) + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_no_admissible_weight_found_by_gradient_search_is_nearer(seed):
    rep = se.grid(se.SO(2), 5, 5) >> se.vector(se.SO(2))
    spectrum, theta = se.spectrum(rep), weight(rep, seed)
    eta = (0.1, 0.3, 0.6)[seed % 3]
    excess = (spectrum.chord(WITHIN) / eta) ** 2 - 1  # per level; admissible means sum e * excess <= 0
    target = spectrum.analyse(theta)
    per_coordinate = excess[spectrum.level_of]

    def admissible(v: torch.Tensor) -> torch.Tensor:
        """Shrink what lies above the target until the constraint holds."""
        above = per_coordinate > 0
        surplus = (v[above] ** 2 * per_coordinate[above]).sum()
        room = -(v[~above] ** 2 * per_coordinate[~above]).sum()
        return torch.where(above, v * torch.sqrt(room / surplus).clamp(max=1.0), v)

    ours = float((se.least_distortion(eta, WITHIN)(theta, rep) - theta).norm())
    best = math.inf
    for start in range(5):
        noise = torch.randn(rep.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + start))
        v = (target + start * noise).requires_grad_()
        search = torch.optim.LBFGS([v], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def closure(search=search, v=v):
            search.zero_grad()
            loss = (admissible(v) - target).square().sum()
            loss.backward()
            return loss

        search.step(closure)
        best = min(best, float((admissible(v.detach()) - target).norm()))
    assert ours <= best + 1e-9
    assert best == pytest.approx(ours, rel=1e-3)  # the search is a real one: it gets there


def test_the_cone_is_differentiable_twice_and_its_derivatives_are_right():
    rep = se.grid(se.SO(2), 3, 3)
    for seed in range(3):
        w = weight(rep, seed).requires_grad_()
        torch.autograd.gradcheck(lambda x: se.least_distortion(0.4, WITHIN)(x, rep), w)
        torch.autograd.gradgradcheck(lambda x: se.least_distortion(0.4, WITHIN)(x, rep), w)
    inside = se.softness(0)(weight(rep, 3), rep).requires_grad_()
    (gradient,) = torch.autograd.grad(se.least_distortion(0.4, WITHIN)(inside, rep).sum(), inside)
    assert torch.allclose(gradient, torch.ones_like(gradient))


@given(weight_reps(COMPACT + FINITE), st.floats(1e-6, 1.9), st.sampled_from([1.0, 1e-150, 1e150]), seeds)
def test_gradients_are_those_of_the_recorded_steps(rep, eta, size, seed):
    assume(rep.group.order > 1)
    project, w = se.least_distortion(eta, WITHIN).on(rep), size * weight(rep, seed)
    v = weight(rep, seed + 1)
    recorded = torch.func.grad(lambda x: (project(x) * v).sum())(w)
    (found,) = torch.autograd.grad((project(w.requires_grad_()) * v).sum(), w)
    assert float((found - recorded).norm()) <= 1e-8 * float(recorded.norm())


def test_second_derivatives_are_of_the_weight_that_was_used():
    rep = se.grid(se.SO(2), 3, 3)
    w = weight(rep, 0).requires_grad_()
    loss = se.least_distortion(0.4, WITHIN)(w, rep).square().sum()
    (expected,) = torch.autograd.grad(loss, w, retain_graph=True)
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(torch.autograd.grad(loss, w, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="changed in place"):
        torch.autograd.grad(loss, w, create_graph=True)


@given(weight_reps(COMPACT + FINITE), st.floats(0.05, 1.0), seeds)
def test_the_cone_projection_is_idempotent_and_homogeneous(rep, eta, seed):
    assume(rep.group.order > 1)
    project = se.least_distortion(eta, WITHIN).on(rep)
    w = weight(rep, seed)
    once = project(w)
    assert float((project(once) - once).norm()) < 1e-6 * max(1e-9, float(w.norm()))
    assert float((project(3 * w) - 3 * once).norm()) < 1e-6 * float(w.norm())


def test_cones_of_several_weights_are_projected_on_together_as_each_alone():
    pairs = [
        (se.least_distortion(eta, WITHIN).on(rep), weight(rep, seed, lead=(2,)).requires_grad_())
        for seed, (rep, eta) in enumerate(
            [(se.grid(se.SO(2), 3, 3), 0.3), (se.grid(se.SO(2), 7, 7), 0.1), (se.grid(se.O(2), 5, 5), 1.9)]
        )
    ]
    assert len({len(cone.of.levels) for cone, _ in pairs}) > 1
    for (cone, w), together in zip(pairs, nearest(pairs), strict=True):
        alone = cone(w)
        assert distance(together.detach(), alone.detach()) < 1e-12
        gradients = [torch.autograd.grad(found.square().sum(), w, retain_graph=True)[0] for found in (together, alone)]
        assert distance(*gradients) < 1e-10


@given(st.lists(st.tuples(st.floats(-12, 0), st.floats(-3, 3)), min_size=2, max_size=8))
@example([(0, 0), (-3, 1), (-4, -1)])
def test_the_solver_finds_the_root_over_many_orders_of_magnitude(levels):
    energies, ratio = (10 ** torch.tensor(column, dtype=torch.float64) for column in zip(*levels, strict=True))
    gamma = least_distortion_gain(energies, ratio)
    terms = energies * (ratio - 1) * gamma.square()
    if float((energies * (ratio - 1)).sum()) <= 0:
        assert gamma.tolist() == [1] * len(gamma)
    elif float(ratio.min()) < 1 - 1e-9:
        # a level that just meets the target counts as inside by 1e-12
        assert abs(float(terms.sum())) < 1e-9 * float(terms.abs().sum()) + 2e-12 * float((energies * gamma**2).sum())
        clear = (ratio - 1).abs() > 1e-9
        assert bool((gamma > 0).all()) and bool(((gamma < 1) == (ratio > 1))[clear].all())


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_boundary_of_the_cone_is_as_thin_for_large_energies_as_for_small_ones(size):
    below, outside = (size * torch.tensor([1, 1 + more], dtype=torch.float64) for more in (1e-13, 1e-7))
    ratio = torch.tensor([0.5, 1.5], dtype=torch.float64)
    assert least_distortion_gain(below, ratio).tolist() == [1, 1]
    assert float(least_distortion_gain(outside, ratio)[1]) == pytest.approx(1 - 2.5e-8, abs=1e-12)


def test_weights_at_the_edges_of_floating_point_stay_finite():
    rep = se.grid(se.SO(2), 5, 5)
    for scale in (0.0, 1e-30, 1e-20, 1e15, 1e30):
        w = (scale * weight(rep, 0)).float().requires_grad_()
        out = se.least_distortion(0.1, se.degrees(30))(w, rep)
        out.sum().backward()
        assert bool(out.isfinite().all()) and bool(w.grad.isfinite().all())
        assert se.spectrum(rep).error(out, se.degrees(30)) <= 0.1 + 1e-5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: se.hard(-0.1), "at least 0"),
        (lambda: se.hard(math.nan), "at least 0"),
        (lambda: se.smooth(-1.0, 1.0), "at least 0"),
        (lambda: se.smooth(1.0, 0.0), "positive"),
        (lambda: se.schur(-1.0), "at least 0"),
        (lambda: se.schur(1.0, -2.0), "positive"),
        (lambda: se.softness(-0.01), "from 0"),
        (lambda: se.softness(1.01), "from 0"),
        (lambda: se.softness(math.nan), "from 0"),
        (lambda: se.least_distortion(0.0, 1.0), "between 0 and 2"),
        (lambda: se.least_distortion(2.0, 1.0), "between 0 and 2"),
        (lambda: se.least_distortion(0.1, 0.0), "empty"),
        (lambda: se.least_distortion(0.1, se.degrees(5)).on(se.grid(se.C(18), 5, 5)), "no element of C18"),
        (lambda: se.schur(1.0).on(se.grid(se.SO(2), 4, 4, action="bilinear")), "normal"),
    ],
)
def test_bad_input_is_answered_by_a_sentence(make, words):
    with pytest.raises((GainError, GroupError, RepresentationError), match=words):
        make()


@pytest.mark.parametrize("group", [se.C(8), se.SO(2), se.D(4)], ids=str)
def test_a_softness_on_the_edge_of_a_level_is_a_constraint(group):
    """Rounding would leave 1e-16 of the next level, and project mode would admit all of it."""
    for size in (7, 14, 28):
        of = se.spectrum(se.grid(group, size, size))
        moving = of.counts[1:].cumsum(0)
        for kept in moving[:-1].tolist():
            gamma = se.softness(kept / int(moving[-1])).gamma(of)
            assert set(gamma.tolist()) <= {0.0, 1.0}
