"""The paper's construction against a transcription of its formulas, by dense singular value decompositions."""

import copy
import math

import pytest
import torch
from torch import nn

import softequiv as se
from softequiv.baselines.paper import paper_gain, paper_linear, paper_soften
from softequiv.errors import GainError
from softequiv.gains import Gain
from softequiv.nn import SoftConv2d
from softequiv.reps.grids import kernels
from softequiv.reps.pixels import bilinear_rotation
from softequiv.testing import assert_equivariant

TIE = 1e-9


def cut(sigma: torch.Tensor, softness: float, cutoff: str, decay: float) -> torch.Tensor:
    """gamma of ascending singular values: b is the first value beyond the count, the lowest level always stays."""
    count = math.floor(softness * len(sigma) + 1e-9)
    if count == len(sigma):
        return torch.ones_like(sigma)
    b = max(float(sigma[count]), float(sigma[0]) + 2 * TIE)
    rest = torch.zeros_like(sigma) if cutoff == "hard" else torch.exp(-(sigma**2) / decay**2)
    return torch.where(sigma < b - TIE, 1.0, rest)


def b_inv(moves: list[torch.Tensor], softness: float, cutoff: str, decay: float = 1.0) -> torch.Tensor:
    """sum gamma_i u_i u_i^T with the left singular vectors of [rho(s_1) - I | rho(s_2) - I | ...]."""
    eye = torch.eye(len(moves[0]), dtype=torch.float64)
    left, sigma, _ = torch.linalg.svd(torch.cat([move - eye for move in moves], 1), full_matrices=False)
    left, sigma = left.flip(1), sigma.flip(0)
    return (left * cut(sigma, softness, cutoff, decay)) @ left.T


def b_eq(before: torch.Tensor, after: torch.Tensor, softness: float, cutoff: str, decay: float = 1.0) -> torch.Tensor:
    """The same on column-stacked weights with the right singular vectors of L; before, after: d rho or rho - I."""
    d, e = len(before), len(after)
    eye = {n: torch.eye(n, dtype=torch.float64) for n in (d, e)}
    operator = torch.kron(before.T.contiguous(), eye[e]) - torch.kron(eye[d], after)
    _, sigma, right = torch.linalg.svd(operator)
    right, sigma = right.flip(0), sigma.flip(0)
    return (right.T * cut(sigma, softness, cutoff, decay)) @ right


def flip(n: int) -> torch.Tensor:
    return torch.eye(n * n, dtype=torch.float64).reshape(n, n, n * n).flip(1).reshape(n * n, n * n)


@pytest.mark.parametrize("cutoff", ["hard", "smooth"])
@pytest.mark.parametrize("softness", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("group", [se.C(4), se.C(18), se.D(18)], ids=str)
@pytest.mark.parametrize("n", [3, 4, 5])
def test_kernels_are_projected_by_left_singular_vectors(n, group, softness, cutoff):
    layer = nn.Conv2d(2, 3, n).double()
    theta = layer.weight.detach().clone()
    paper_soften(layer, group, softness=softness, cutoff=cutoff, decay=0.7)
    moves = [bilinear_rotation(n, 2 * math.pi / group.n)] + [flip(n)] * isinstance(group, se.D)
    expected = theta.flatten(-2) @ b_inv(moves, softness, cutoff, 0.7)
    assert torch.allclose(layer.weight.flatten(-2), expected, atol=1e-10)


def test_left_and_right_singular_vectors_differ_so_the_dual_matters():
    rotation = bilinear_rotation(5, math.radians(20))
    left, right = b_inv([rotation], 0.5, "hard"), b_inv([rotation.T], 0.5, "hard")
    assert float((left - right).norm()) > 0.1 * float(left.norm())


@pytest.mark.parametrize("cutoff", ["hard", "smooth"])
@pytest.mark.parametrize("softness", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 4)])
def test_maps_between_pictures_are_projected_by_right_singular_vectors(sizes, softness, cutoff):
    """The stacked Kronecker operator, from which no inverse of the resampling is asked."""
    first, second = (bilinear_rotation(n, math.radians(20)) for n in sizes)
    rep = se.grid(se.C(18), sizes[0], sizes[0], action="bilinear") >> se.grid(
        se.C(18), sizes[1], sizes[1], action="bilinear"
    )
    theta = torch.randn(rep.shape, dtype=torch.float64)
    operator = b_eq(first - torch.eye(len(first)), second - torch.eye(len(second)), softness, cutoff)
    expected = (operator @ theta.T.flatten()).reshape(theta.T.shape).T
    assert torch.allclose(paper_gain(rep, softness, cutoff)(theta, rep), expected, atol=1e-9)


def test_positions_are_maps_from_a_number():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 4, 2, stride=2)
            self.pos_embed = nn.Parameter(torch.randn(1, 26, 4, dtype=torch.float64))

    table = Table()
    theta = table.pos_embed.detach().clone()
    paper_soften(table, softness=0.5)
    move = bilinear_rotation(5, math.radians(20)) - torch.eye(25)
    operator = b_eq(torch.zeros(1, 1, dtype=torch.float64), move, 0.5, "hard")
    expected = torch.einsum("ab,nbc->nac", operator, theta[:, 1:])
    assert torch.allclose(table.pos_embed[:, 1:], expected, atol=1e-10)
    assert torch.equal(table.pos_embed[:, :1], theta[:, :1])


def test_typed_kernels_under_resampling_need_no_inverse():
    """A kernel of 16 x 16 pixels, whose bilinear rotation is singular; the oracle is the operator w rho - rho' w."""
    group = se.C(18)
    source, target = se.scalar(group), se.frequency(group, 1)
    conv = SoftConv2d(source, target, 16, se.softness(0.3), action="bilinear").double()
    rho, turn = bilinear_rotation(16, math.radians(20)), target.steps()[0]
    operator = torch.kron(turn, torch.eye(256)) - torch.kron(torch.eye(2), rho.T.contiguous())
    levels = torch.linalg.svdvals(operator).flip(0)
    own = se.spectrum(conv.parametrizations.weight[0].soft.rep)
    assert torch.allclose(own.levels[own.level_of].sort().values, levels, atol=1e-10)


def vectors(copies: int) -> se.Rep:
    return copies * se.vector(se.SO(2)) + 2 * se.scalar(se.SO(2))


@pytest.mark.parametrize("cutoff", ["hard", "smooth"])
@pytest.mark.parametrize("softness", [0.0, 0.35, 0.7, 1.0])
def test_linear_layers_of_vectors(softness, cutoff):
    source, target = vectors(2), vectors(1)
    layer = paper_linear(source, target, softness=softness, cutoff=cutoff).double()
    theta = layer.parametrizations.weight.original.detach()
    operator = b_eq(source.drho([1.0]), target.drho([1.0]), softness, cutoff)
    expected = (operator @ theta.T.flatten()).reshape(theta.T.shape).T
    assert torch.allclose(layer.weight, expected, atol=1e-10)
    if softness == 0 and cutoff == "hard":
        assert_equivariant(layer, se.SO(2), source, target)


def by_schur_blocks(theta: torch.Tensor, rates: list[int], b: float, s: float | None) -> torch.Tensor:
    """Block by block as written, for generators that are in Schur form already: planes that turn at `rates`, or 0."""

    def blocks() -> list[tuple[int, int, int]]:
        out, place = [], 0
        for rate in rates:
            size = 2 if rate else 1
            out.append((place, size, rate))
            place += size
        return out

    weight = theta.clone()
    for row, high, first in blocks():
        for column, wide, second in blocks():
            if first + second <= b + TIE:
                continue
            part = theta[row : row + high, column : column + wide]
            sym = torch.zeros_like(part)
            if first == second and high == 1:
                sym = part
            elif first == second:
                a, c = (part[0, 0] + part[1, 1]) / 2, (part[0, 1] - part[1, 0]) / 2
                sym = torch.stack([torch.stack([a, c]), torch.stack([-c, a])])
            gamma = 0.0 if s is None else math.exp(-(first + second) / s**2)
            weight[row : row + high, column : column + wide] = sym + gamma * (part - sym)
    return weight


@pytest.mark.parametrize("s", [None, 0.8])
@pytest.mark.parametrize("softness", [0.0, 0.3, 0.5, 0.7, 0.95, 1.0])
def test_the_schur_rule_block_by_block(softness, s):
    group, rates = se.SO(2), [0, 0, 1, 2, 3, 5]
    space = 2 * se.scalar(group)
    for rate in rates[2:]:
        space = space + se.frequency(group, rate)
    rep = space >> space
    theta = torch.randn(rep.shape, dtype=torch.float64)
    gain = paper_gain(rep, softness, "hard" if s is None else "smooth", decay=s or 1.0, rule="schur")
    assert torch.allclose(gain(theta, rep), by_schur_blocks(theta, rates, gain.b, s), atol=1e-10)
    kept = {b: se.schur(b) for b in (gain.b, gain.b + 1)}
    ranks = [torch.linalg.matrix_rank(_operator(own, rep)) for own in kept.values()]
    least = torch.linalg.matrix_rank(_operator(se.schur(0.0), rep))
    assert ranks[0] <= max(softness * rep.dim, least)
    assert softness == 1 or ranks[1] > softness * rep.dim


def _operator(gain: Gain, rep: se.Rep) -> torch.Tensor:
    return gain(torch.eye(rep.dim, dtype=torch.float64).reshape(-1, *rep.shape), rep).flatten(1)


@pytest.mark.parametrize("group", [se.C(4), se.C(18)], ids=str)
def test_a_level_that_the_count_would_cut_falls_out_whole(group):
    rep = kernels(group, 5, 5, action="bilinear")
    counts = se.spectrum(rep).counts.cumsum(0).tolist()
    assert max(se.spectrum(rep).counts) > 1
    for softness in torch.linspace(0, 1, 41).tolist():
        kept = paper_gain(rep, softness).kept(se.spectrum(rep)).directions
        assert kept in counts and (kept <= softness * 25 + 1e-9 or kept == counts[0])


def test_forward_passes_change_nothing_and_the_projection_is_one():
    layer = paper_soften(nn.Conv2d(2, 3, 5), softness=0.6)
    stored = copy.deepcopy(layer.state_dict())
    first = layer(torch.ones(1, 2, 7, 7))
    assert torch.equal(first, layer(torch.ones(1, 2, 7, 7)))
    assert all(torch.equal(value, stored[name]) for name, value in layer.state_dict().items())
    again = paper_soften(nn.Conv2d(2, 3, 5), softness=0.6)
    again.weight = layer.weight.detach()
    assert torch.allclose(again.weight, layer.weight, atol=1e-6)


def test_the_configuration_bakes_saves_and_states_what_it_promises(tmp_path):
    layer = paper_soften(nn.Conv2d(2, 3, 8), softness=0.9, cutoff="smooth")
    se.save(layer, tmp_path)
    assert torch.equal(se.load(nn.Conv2d(2, 3, 8), tmp_path).weight, layer.weight)
    assert torch.equal(se.bake(layer, copy=True).weight, layer.weight)
    assert "(8x8 bilinear)*" in str(se.certify(layer, se.degrees(20), images=torch.rand(4, 2, 32, 32)))
    singular = paper_soften(nn.Conv2d(1, 1, 16), softness=0.5)
    assert se.certify(singular, se.degrees(20)).weights[0].error == math.inf


def test_softness_one_survives_a_checkpoint(tmp_path):
    layer = paper_soften(nn.Conv2d(2, 3, 5), softness=1.0)
    se.save(layer, tmp_path)
    assert torch.equal(se.load(nn.Conv2d(2, 3, 5), tmp_path).weight, layer.weight)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: paper_soften(nn.Conv2d(1, 1, 3), softness=1.1), "softness runs from 0"),
        (lambda: paper_soften(nn.Conv2d(1, 1, 3), cutoff="soft"), "choose one of hard, smooth"),
        (lambda: paper_linear(vectors(1), vectors(1), rule="qr"), "choose one of svd, schur"),
        (lambda: paper_linear(vectors(1), vectors(1), cutoff="smooth", decay=0.0), "positive number"),
        (lambda: paper_linear(*[se.vector(se.SO(3))] * 2, rule="schur"), "needs one generator"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(GainError, match=words):
        call()
