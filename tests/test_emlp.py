"""Equivariant multilayer perceptrons: known dimensions, strictness, the bilinear layer, and how its ends meet."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

import softequiv as se
from draws import as_trained
from softequiv.baselines.emlp import EMLP, EMLPRPP, MLP, highest_rank, shares, uniform
from softequiv.baselines.rpp import set_mix
from softequiv.errors import SoftEquivError
from softequiv.nn import Bilinear, SoftLinear, gated
from softequiv.testing import assert_equivariant, equivariance_error

GROUPS = [se.O(5), se.SO(3), se.Lorentz("SO+"), se.S(4)]
RANGE = {se.Lorentz("SO+"): 1.0}  # boosts grow without bound, and rounding with them


def bell(points: int, classes: int) -> int:
    """Partitions of so many points into at most so many classes."""
    table = [[0] * (classes + 1) for _ in range(points + 1)]
    table[0][0] = 1
    for n, k in itertools.product(range(1, points + 1), range(1, classes + 1)):
        table[n][k] = k * table[n - 1][k] + table[n - 1][k - 1]
    return sum(table[points])


def matchings(points: int) -> int:
    return 0 if points % 2 else math.prod(range(1, points, 2))


def turns(points: int) -> int:
    """The mean of the character (1 + 2 cos t)^n over SO(3), whose angles have density (1 - cos t) / pi on [0, pi]."""
    t = (torch.arange(2000, dtype=torch.float64) + 0.5) * math.pi / 2000
    return round(float(((1 + 2 * t.cos()) ** points * (1 - t.cos())).mean()))


def fixed_points(points: int, n: int) -> int:
    """Burnside: the mean of the number of fixed points to the n, over all permutations."""
    orders = list(itertools.permutations(range(n)))
    return round(sum(sum(i == j for i, j in enumerate(order)) ** points for order in orders) / len(orders))


def catalan_squared(points: int) -> int:
    """SO(1,3) is SU(2) x SU(2) over the complex numbers, and its vector a spinor of each."""
    return 0 if points % 2 else (math.comb(points, points // 2) // (points // 2 + 1)) ** 2


TABLES = {  # invariants of T_0 to T_6: linear maps T_p -> T_q have the dimension at p + q
    se.O(5): [1, 0, 1, 0, 3, 0, 15],
    se.SO(3): [1, 0, 1, 1, 3, 6, 15],
    se.Lorentz("SO+"): [1, 0, 1, 0, 4, 0, 25],
    se.S(4): [1, 1, 2, 5, 15, 51, 187],
}


def test_the_tables_follow_from_characters():
    assert TABLES[se.O(5)] == [matchings(n) for n in range(7)]
    assert TABLES[se.SO(3)] == [turns(n) for n in range(7)]
    assert TABLES[se.Lorentz("SO+")] == [catalan_squared(n) for n in range(7)]
    assert TABLES[se.S(4)] == [bell(n, 4) for n in range(7)] == [fixed_points(n, 4) for n in range(7)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_strict_maps_have_the_known_dimensions(group):
    for p, q in itertools.product(range(4), range(4)):
        if se.tensor(group, p + q).dim <= 4096:
            assert se.spectrum(se.tensor(group, p) >> se.tensor(group, q)).invariants == TABLES[group][p + q]
    if not group.orthogonal:  # the metric makes lower indices of upper ones
        for p, q, r, s in [(1, 1, 1, 1), (2, 0, 1, 1), (2, 1, 1, 0), (2, 1, 2, 1)]:
            found = se.spectrum(se.tensor(group, p, q) >> se.tensor(group, r, s)).invariants
            assert found == TABLES[group][p + q + r + s]


@pytest.mark.parametrize(
    ("group", "channels", "name"),
    [
        (se.O(5), 384, "134[1]+25[V]+5[V@V]"),
        (se.SO(3), 384, "102[1]+34[V]+11[V@V]+3[V@V@V]"),
        (se.Lorentz("SO+"), 60, "24[1]+3[V]+2[(V)*]+[V@(V)*]"),
        (se.S(4), 5, "5[1]"),
    ],
    ids=str,
)
def test_channels_are_shared_out_over_the_ranks(group, channels, name):
    assert str(uniform(group, channels)) == name and uniform(group, channels).dim == channels


@pytest.mark.parametrize("channels", [1, 7, 60, 384, 500])
def test_every_channel_is_used_and_the_highest_rank_fits(channels):
    for group in GROUPS:
        d = se.vector(group).dim
        top = highest_rank(channels, d)
        assert uniform(group, channels).dim == channels
        assert (top + 1) * d**top <= channels < (top + 2) * d ** (top + 1)
    assert [sum(shares(count, 3)) for count in range(12)] == list(range(12)) and shares(8, 3) == [1, 3, 3, 1]


def types(group: se.Rep) -> tuple[se.Rep, se.Rep]:
    return 2 * se.vector(group) + se.scalar(group), 6 * se.scalar(group) + se.vector(group)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_network_is_strictly_equivariant(group, dtype, tolerance):
    torch.manual_seed(0)
    source, target = types(group)
    net = EMLP(source, target, channels=100, layers=2).to(dtype)
    assert_equivariant(net, group, source, target, tolerance=tolerance, within=RANGE.get(group))


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_wide_networks_in_float32_err_by_rounding_of_usual_answers_and_features(scale):
    """Relative to an answer whose terms cancel the error may be larger; that is no matter of the weights' scale."""
    torch.manual_seed(0)
    group = se.S(5)
    space = se.vector(group)
    net = EMLP(space, space, channels=384, layers=3)
    with torch.no_grad():
        for block in net.body[:-1]:
            block.linear.parametrizations.weight.original.mul_(scale)
        x, g = torch.randn(64, 5), group.random(torch.Generator().manual_seed(1))
        rho = space.rho(g).float()
        hidden, moved = x, x @ rho.mT
        for block in net.body[:-1]:
            hidden, moved = block(hidden), block(moved)
            still = block.gate.rep.rho(g).float()
            assert float(((moved - hidden @ still.mT).norm(dim=1) / hidden.norm(dim=1)).max()) < 1e-5
        answers = net(x)
        errors = (net(x @ rho.mT) - answers @ rho.mT).norm(dim=1)
        assert float(errors.max() / answers.norm(dim=1).square().mean().sqrt()) < 1e-4  # their terms cancel


def test_answers_may_be_tensors():
    group = se.SO(3)
    source, target = 2 * se.vector(group), se.tensor(group, 2)
    for make in (EMLP, MLP):
        assert make(source, target, channels=30, layers=1)(torch.randn(5, 6)).shape == (5, 3, 3)
    assert_equivariant(EMLP(source, target, channels=30, layers=1).double(), group, source, target, tolerance=1e-10)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_bilinear_layer_is_equivariant_and_bilinear(group):
    torch.manual_seed(0)
    fields = gated(uniform(group, 100))
    layer = Bilinear(fields, fields).double()
    assert_equivariant(layer, group, fields, fields, tolerance=1e-10, within=RANGE.get(group))
    x = torch.randn(3, fields.dim, dtype=torch.float64)
    assert torch.allclose(layer(-2 * x), 4 * layer(x), atol=1e-12)
    assert float(layer(x).detach().norm()) > 0.01 * float(x.norm())


def test_the_bilinear_layer_is_its_formula():
    """Two scalars, two vectors, one matrix under O(2): every block by hand."""
    group, d = se.O(2), 2
    fields = 2 * se.scalar(group) + 2 * se.vector(group) + se.tensor(group, 2)
    layer = Bilinear(fields, fields).double()
    x = torch.randn(fields.dim, dtype=torch.float64)
    scalars, vectors, matrix = x[:2], x[2:6].reshape(2, d), x[6:].reshape(d, d)
    weights = {
        (after, before): weight for (after, before, _, _), weight in zip(layer.products, layer.weights, strict=True)
    }
    zero, one, two = (0, 0), (1, 0), (2, 0)
    assert set(weights) == {(zero, one), (zero, two), (one, zero), (one, one), (two, zero)}
    expected_scalars = torch.einsum("mcn,cj,nj->m", weights[zero, one], vectors, vectors)
    expected_scalars += weights[zero, two][:, 0, 0] * (matrix * matrix).sum()
    expected_vectors = torch.einsum("mcn,ci,n->mi", weights[one, zero], vectors, scalars)
    expected_vectors += torch.einsum("mn,ij,nj->mi", weights[one, one][:, 0], matrix, vectors)
    expected_matrix = torch.einsum("n,n,ij->ij", weights[two, zero][0, 0], scalars, matrix)
    expected = torch.cat([expected_scalars, expected_vectors.flatten(), expected_matrix.flatten()])
    assert torch.allclose(layer(x), 0.1 * expected, atol=1e-12)


@pytest.mark.parametrize("group", [se.O(5), se.S(4)], ids=str)
def test_pathways_without_the_free_path_are_strict(group):
    source, target = types(group)
    net = EMLPRPP(source, target, channels=60, layers=2, mix=0.0).double()
    assert_equivariant(net, group, source, target, tolerance=1e-10)
    set_mix(net, 0.5)
    assert equivariance_error(net, group, source, target) > 0.01


def test_one_body_is_strict_soft_or_free():
    group = se.O(5)
    source, target = types(group)

    def error(**linear) -> float:
        torch.manual_seed(0)
        return equivariance_error(as_trained(EMLP(source, target, 60, 2, **linear)), group, source, target)

    strict, soft, free = (
        error(),
        error(linear=partial(SoftLinear, gain=se.softness(0.3))),
        error(linear=lambda X, Y: nn.Linear(X.dim, Y.dim)),
    )
    assert strict < 1e-4 < 0.01 < min(soft, free)


def test_parameters_are_those_of_the_maps_and_the_products():
    """Strict maps store whole matrices, of which the known dimensions are free."""
    group = se.O(5)
    hidden = uniform(group, 60)
    assert str(hidden) == "30[1]+6[V]"
    inner = gated(hidden)
    net = EMLP(se.vector(group), se.scalar(group), channels=60, layers=2)
    linear = [60 + 6, 60 + 6], [5, 60]
    matrices = sum(a * b + a for a, b in zip(*linear, strict=True)) + 60 + 1
    products = 2 * (36 * 5 * 6 + 6 * 5 * 36)
    assert sum(parameter.numel() for parameter in net.parameters()) == matrices + products
    assert se.spectrum(hidden >> inner).invariants == 30 * 36 + 6 * 6


@pytest.mark.parametrize(
    "make",
    [EMLP, EMLPRPP, partial(EMLP, linear=partial(SoftLinear, gain=se.softness(0.2)))],
    ids=["strict", "rpp", "soft"],
)
def test_it_learns_an_invariant_of_five_dimensions(make):
    """sin|x1| - |x2|^3 / 2 + cos of the angle, far better than its mean."""
    torch.manual_seed(0)
    group = se.O(5)

    def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 10)
        a, b = x[:, :5], x[:, 5:]
        lengths = a.norm(dim=1), b.norm(dim=1)
        return x, (lengths[0].sin() - lengths[1] ** 3 / 2 + (a * b).sum(1) / (lengths[0] * lengths[1]))[:, None] / 5

    (x, y), (test, answer) = data(500), data(500)
    net = make(2 * se.vector(group), se.scalar(group), channels=60, layers=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        error = float(nn.functional.mse_loss(net(test), answer) / answer.var())
    assert error < (0.1 if make is EMLP else 0.3)


@pytest.mark.parametrize("make", [EMLP, EMLPRPP, MLP])
def test_batches_of_any_shape_are_answered_alike(make):
    group = se.SO(3)
    net = make(2 * se.vector(group), se.vector(group), channels=20, layers=1).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert net(x[:0]).shape == (0, 3, 3) and net(x[0, :0]).shape == (0, 3)
    assert torch.allclose(net(x[1, 2]), net(x)[1, 2])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: uniform(se.O(5), 0), "at least one channel"),
        (lambda: uniform(se.O(5), 10.5), "a whole number; got 10.5"),
        (lambda: MLP(se.vector(se.O(5)), se.scalar(se.O(5)), 0), "at least one channel"),
        (lambda: EMLP(se.vector(se.O(5)), se.scalar(se.O(5)), layers=0), "at least one hidden layer"),
        (lambda: EMLP(se.vector(se.O(5)), se.scalar(se.O(5)), 8, layers=1.5), "at least one hidden layer; got"),
        (lambda: MLP(se.vector(se.O(5)), se.scalar(se.O(5)), layers=0), "at least one hidden layer"),
        (lambda: Bilinear(*[se.spin(se.SO(3), 2)] * 2), "is none"),
        (lambda: MLP(se.vector(se.O(5)), se.scalar(se.O(5)), 8, 1)(torch.zeros(3, 4)), "trailing shape"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(SoftEquivError, match=words):
        call()
