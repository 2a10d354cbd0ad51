"""Representations: homomorphisms, algebra, grids as pictures, bad input."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

import softequiv as se
from draws import ALL_GROUPS, leaves, spaces
from softequiv.errors import NotARepresentationError, RepresentationError, TooLargeError
from softequiv.reps import Hom, Sum, check_representation, direct_sum

seeds = st.integers(0, 2**31)


@st.composite
def exact_space(draw):
    group = draw(st.sampled_from(ALL_GROUPS))
    rep = draw(spaces(group))
    return rep if rep.exact else se.vector(group)


@given(exact_space(), seeds, seeds)
def test_rho_is_a_homomorphism(rep, a, b):
    g, h = (rep.group.random(torch.Generator().manual_seed(seed)) for seed in (a, b))
    product = rep.rho(g) @ rep.rho(h)
    assert torch.allclose(rep.rho(g @ h), product, atol=1e-8 * max(1.0, float(product.abs().max())))


@given(exact_space())
def test_brackets_and_relations_hold(rep):
    check_representation(rep)


@given(st.sampled_from([g for g in ALL_GROUPS if len(g.lie)]), st.data(), seeds)
def test_rho_is_the_exponential_of_drho(group, data, seed):
    rep = data.draw(spaces(group))
    coords = 0.3 * torch.randn(len(group.lie), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    g = group.element(*coords.tolist(), *[0] * len(group.steps))
    exponential = torch.linalg.matrix_exp(rep.drho(coords.tolist()))
    assert torch.allclose(rep.rho(g), exponential, atol=1e-9 * float(exponential.abs().max()))


@given(st.sampled_from(ALL_GROUPS), st.data(), seeds)
def test_orthogonal_means_orthogonal_and_dual_is_the_inverse_transpose(group, data, seed):
    rep = data.draw(spaces(group))
    matrix = rep.rho(group.random(torch.Generator().manual_seed(seed)))
    eye = torch.eye(rep.dim, dtype=torch.float64)
    if rep.orthogonal:
        assert torch.allclose(matrix @ matrix.T, eye, atol=1e-9)
        assert rep == rep.T or not rep.settled
    dual = rep.T.rho(group.random(torch.Generator().manual_seed(seed)))
    assert torch.allclose(dual.T @ matrix, eye, atol=1e-8 * max(1.0, float(matrix.abs().max()) ** 2))
    assert rep == rep.T.T


@pytest.mark.parametrize("group", ALL_GROUPS, ids=str)
def test_the_algebra_keeps_value_semantics(group):
    v, one = se.vector(group), se.scalar(group)
    assert v + v == 2 * v == v * 2 and hash(v + v) == hash(2 * v)
    assert (v + one).dim == v.dim + 1 and (v @ v).dim == v.dim**2 and v @ one == v
    assert isinstance(v + one, Sum) and (v >> one).shape == (1, v.dim) and isinstance(v >> one, Hom)
    assert (v + one) + v == v + (one + v) and (v @ v) @ v == v @ (v @ v)
    assert 2 * (v + one) == v + one + v + one
    assert se.tensor(group, 0) == one and se.tensor(group, 1) == v


@given(st.sampled_from(ALL_GROUPS), st.data(), seeds)
def test_a_weight_moves_as_rho_y_w_rho_x_inverse(group, data, seed):
    source, target = data.draw(spaces(group, 5)), data.draw(spaces(group, 5))
    g = group.random(torch.Generator().manual_seed(seed))
    w = torch.randn(target.dim, source.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    moved = target.rho(g) @ w @ torch.linalg.inv(source.rho(g))
    by_hom = ((source >> target).rho(g) @ w.flatten()).reshape(w.shape)
    assert torch.allclose(by_hom, moved, atol=1e-8 * max(1.0, float(moved.abs().max())))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 14])
def test_quarter_turns_flips_and_rolls_are_exact_permutations(n):
    x = torch.randn(n, n, dtype=torch.float64)

    def acted(group, element):
        return (se.grid(group, n, n).rho(element) @ x.flatten()).reshape(n, n)

    for k in range(4):
        assert torch.equal(acted(se.C(4), se.C(4).element(k)), x.rot90(k, (0, 1)))
        assert torch.equal(acted(se.D(4), se.D(4).element(k, 1)), x.flip(-1).rot90(k, (0, 1)))
    assert torch.equal(acted(se.Reflection(), se.Reflection().element(1)), x.flip(-1))
    assert torch.equal(acted(se.Shifts(n, n), se.Shifts(n, n).element(2, -1)), x.roll((2, -1), (0, 1)))
    turned = (se.grid(se.SO(2), n, n).rho(se.SO(2).element(math.pi / 2)) @ x.flatten()).reshape(n, n)
    if n % 4 != 2:
        assert torch.allclose(turned, x.rot90(1, (0, 1)), atol=1e-12)
    voxels = torch.randn(2, n, n, dtype=torch.float64)
    rolled = se.grid(se.C(4), 2, n, n).rho(se.C(4).element(1)) @ voxels.flatten()
    assert torch.equal(rolled.reshape(2, n, n), voxels.rot90(1, (1, 2)))


def blob(n: int) -> torch.Tensor:
    """A smooth picture off the centre that fades before the border."""
    axis = (torch.arange(n, dtype=torch.float64) - (n - 1) / 2) / n
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.exp(-((x - 0.08) ** 2 + (y + 0.05) ** 2 * 1.7) / 0.02)


@pytest.mark.parametrize(("action", "tolerance"), [("exact", 0.05), ("su2", 0.15), ("central", 0.15)])
@pytest.mark.parametrize("n", [16, 24, 32])
def test_a_unit_generator_turns_a_picture_by_one_radian_per_unit_of_time(n, action, tolerance):
    """Compared with a spline rotation: the best-fitting angle is the stated one."""
    x = blob(n)
    turned = (se.grid(se.SO(2), n, n, action=action).rho(se.SO(2).element(0.1)) @ x.flatten()).reshape(n, n)
    angles = torch.linspace(0.05, 0.15, 101)
    errors = [
        float((torch.from_numpy(ndimage.rotate(x.numpy(), math.degrees(t), reshape=False, order=3)) - turned).norm())
        for t in angles
    ]
    assert float(angles[int(torch.tensor(errors).argmin())]) == pytest.approx(0.1, rel=tolerance)


def test_scaling_dilates_a_picture_and_keeps_its_energy():
    n, t = 32, 0.15
    x = blob(n)
    dilated = (se.grid(se.Scaling(), n, n).rho(se.Scaling().element(t)) @ x.flatten()).reshape(n, n)
    middle, shrink = (n - 1) / 2, math.exp(-t)
    zoomed = ndimage.affine_transform(x.numpy(), [shrink, shrink], offset=middle * (1 - shrink), order=3)
    cut = torch.from_numpy(zoomed) * shrink
    assert float(dilated.norm()) == pytest.approx(float(x.norm()))
    cosine = float((dilated * cut).sum() / dilated.norm() / cut.norm())
    plain = float((x * cut).sum() / x.norm() / cut.norm())
    assert cosine > 0.999 > 0.99 > plain


@pytest.mark.parametrize("n", range(2, 17))
def test_reflections_are_exact_flips_that_reverse_every_rotation(n):
    rep = se.grid(se.O(2), n, n)
    flip, generator = rep.steps()[0], rep.lie()[0]
    assert torch.allclose(flip @ generator @ flip, -generator, atol=1e-11)
    x = torch.randn(n, n, dtype=torch.float64)
    assert torch.equal((flip @ x.flatten()).reshape(n, n), x.flip(-1))


def test_even_squares_admit_no_exact_o2_and_the_rest_is_counted_as_moving():
    """All reflections of O(2) are conjugate, but the flip has trace 0 and the transposition n: n/2 cannot take part."""
    for n in (4, 6, 8):
        rep = se.grid(se.O(2), n, n)
        quarter = rep.rho(se.O(2).element(math.pi / 2, 0)) - se.grid(se.C(4), n, n).steps()[0]
        lost = int((torch.linalg.svdvals(quarter) > 1e-9).sum())
        assert lost == n // 2
        level_zero = se.spectrum(rep).filter(se.softness(0).gamma(se.spectrum(rep)))
        x = level_zero(torch.randn(n, n, dtype=torch.float64))
        assert torch.allclose(x, x.rot90(1, (0, 1)), atol=1e-10) and torch.allclose(x, x.flip(-1), atol=1e-10)


def test_voxels_turn_about_each_axis_and_say_that_brackets_are_approximate():
    rep = se.grid(se.SO(3), 4, 4, 4)
    x = torch.randn(4, 4, 4, dtype=torch.float64)
    turn = (rep.rho(se.SO(3).element(0.0, 0.0, math.pi / 2)) @ x.flatten()).reshape(4, 4, 4)
    assert torch.allclose(turn, x.rot90(1, (1, 2)), atol=1e-10)
    assert not rep.exact
    with pytest.raises(NotARepresentationError, match="bracket"):
        check_representation(rep)
    lx, ly, lz = se.grid(se.SO(3), 8, 8, 8).lie()
    axis = torch.linspace(-1, 1, 8, dtype=torch.float64)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    picture = torch.exp(-((x - 0.2) ** 2 + 1.5 * (y + 0.3) ** 2 + 0.7 * z**2) / 0.4).flatten()
    bracket, turned = (lx @ ly - ly @ lx) @ picture, lz @ picture
    assert float((bracket - turned).norm()) < 0.5 * float(turned.norm()) < float((bracket + turned).norm())


def test_spin_one_is_the_vector_and_spins_have_the_casimir_l_l_plus_1():
    for l in (1, 2, 3, 4):
        generators = se.spin(se.SO(3), l).lie()
        casimir = -(generators @ generators).sum(0)
        assert torch.allclose(casimir, l * (l + 1) * torch.eye(2 * l + 1, dtype=torch.float64))
    assert se.spectrum(se.spin(se.SO(3), 1) >> se.vector(se.SO(3))).invariants == 1


@pytest.mark.parametrize("group", [se.O(2), se.O(3), se.D(4), se.Reflection(), se.S(4)], ids=str)
def test_a_determinant_is_that_of_each_elements_matrix(group):
    sign = se.determinant(group)
    check_representation(sign)
    for seed in range(5):
        g = group.random(torch.Generator().manual_seed(seed))
        assert float(sign.rho(g)) == pytest.approx(float(torch.linalg.det(g.matrix)))
    assert se.spectrum(sign).invariants == 0 and se.spectrum(sign >> sign).invariants == 1
    assert se.determinant(se.SO(3)) == se.scalar(se.SO(3))


def test_a_pseudovector_is_no_vector_and_the_cross_product_is_one():
    v = se.vector(se.O(3))
    pseudo = se.determinant(se.O(3)) @ v
    maps = [(v, v), (v, pseudo), (pseudo, pseudo), (v @ v, v), (v @ v, pseudo), (v @ pseudo, v)]
    assert [se.spectrum(a >> b).invariants for a, b in maps] == [1, 0, 1, 0, 1, 1]


def test_a_users_matrices_are_checked_against_the_group():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    flip = torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert se.representation(se.O(2), [3 * turn], [flip]).rho(se.O(2).element(math.pi, 0)).trace() == pytest.approx(-2)
    assert se.representation(se.SO(2), [turn]) == se.representation(se.SO(2), [turn.clone()])
    eye = torch.eye(2)
    cases = [
        (lambda: se.representation(se.SO(2), [0.5 * turn]), r"exp\(6.283 A0\) = 1"),
        (lambda: se.representation(se.SO(3), [turn, turn, turn]), r"bracket \[A0, A1\]"),
        (lambda: se.representation(se.O(2), [turn], [eye]), "conjugation of A0 by s0"),
        (lambda: se.representation(se.C(3), steps=[turn]), r"relation s0\^3 = 1"),
        (lambda: se.representation(se.D(4), steps=[turn, eye]), "relation s0"),
    ]
    for make, words in cases:
        with pytest.raises(NotARepresentationError, match=words):
            make()


def test_matrices_rounded_to_float32_are_refused_as_nothing_would_commute_with_them():
    """Their levels 0 lie at about 1e-7, so that every layer between them and another type would be zero."""
    spin, turn = se.spin(se.SO(3), 2), se.vector(se.C(8)).steps()
    with pytest.raises(NotARepresentationError, match="rounded to float32"):
        se.representation(se.SO(3), lie=spin.lie().float())
    with pytest.raises(se.RepresentationError, match="rounded to float32"):
        se.representation(se.C(8), steps=turn.float())
    mine = se.representation(se.SO(3), lie=spin.lie())
    assert se.spectrum(spin >> mine).invariants == 1
    assert se.spectrum(se.frequency(se.C(8), 1) >> se.representation(se.C(8), steps=turn)).invariants == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: se.grid(se.SO(2), 14, 16), "is not one: pad or crop"),
        (lambda: se.grid(se.C(4), 7), "is not one"),
        (lambda: se.grid(se.SO(3), 4, 4), "cubes"),
        (lambda: se.grid(se.S(4), 4, 4), "does not act on a grid"),
        (lambda: se.grid(se.Shifts(4, 4), 5, 5), "its own size"),
        (lambda: se.grid(se.SO(2), 0, 0), "at least 1"),
        (lambda: se.grid(se.SO(2), 4, 4, action="nearest"), "unknown action 'nearest'"),
        (lambda: se.grid(se.SO(2), 200, 200), "the largest square is"),
        (lambda: se.vector(se.SO(2)) + se.vector(se.SO(3)), "different groups"),
        (lambda: se.vector(se.SO(2)) >> se.vector(se.C(4)), "different groups"),
        (lambda: 0 * se.vector(se.SO(2)), "multiplicity"),
        (lambda: se.tensor(se.SO(3), -1), "at least 0"),
        (lambda: se.tensor(se.SO(3), 1.5), "whole numbers"),
        (lambda: se.vector(se.SO(3)).rho(se.SO(2).element(1.0)), "belongs to SO(2)"),
        (lambda: se.vector(se.SO(3)).drho([1.0]), "3 Lie generators"),
        (lambda: se.frequency(se.SO(3), 1), "has none"),
        (lambda: se.frequency(se.SO(2), -1), "at least 0"),
        (lambda: se.regular(se.SO(2)), "of a finite group, and SO(2) has no end of them; take C(8)"),
        (lambda: se.spin(se.SO(3), 0.5), "not one of SO(3)"),
        (lambda: se.spin(se.SO(2), 1), "has none"),
        (lambda: se.spin(se.O(3), 1), "for parity, determinant(group)"),
        (lambda: se.determinant(se.Scaling()), "changes volumes"),
        (lambda: se.spin(se.SO(3), math.nan), "spin nan"),
        (lambda: se.representation(se.SO(2)), "got matrices for 0"),
        (lambda: se.representation(se.SO(2), [torch.zeros(2, 3)]), "square"),
        (lambda: se.representation(se.SO(2), [torch.full((2, 2), math.nan)]), "not finite"),
        (lambda: se.representation(se.SO(2), [torch.eye(2, dtype=torch.complex64)]), "real"),
        (lambda: se.representation(se.SO(1)), "no generators"),
        (lambda: se.lift(se.vector(se.SO(2)), se.SO(3) * se.SO(2), 0), "not factor 0"),
        (lambda: se.outer(se.vector(se.SO(2) * se.SO(2)), se.vector(se.SO(3))), "simple factors"),
    ],
)
def test_bad_input_is_answered_by_a_sentence(make, words):
    with pytest.raises((RepresentationError, TooLargeError), match=re.escape(words)):
        make()


def test_every_leaf_of_every_group_has_a_name_and_a_shape():
    for group in ALL_GROUPS:
        for rep in leaves(group):
            assert rep.name and math.prod(rep.shape) == rep.dim == rep.rates().shape[-1]


def test_no_copy_of_a_space_is_refused():
    with pytest.raises(se.RepresentationError, match="at least 1; got \\[2, 0\\]"):
        direct_sum([(se.vector(se.SO(2)), 2), (se.scalar(se.SO(2)), 0)])
