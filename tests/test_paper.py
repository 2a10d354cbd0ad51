"""The paper's worked examples, by every route."""

import pytest
import torch

import softequiv as se

SO2 = se.SO(2)
SPACE = se.vector(SO2) + se.scalar(SO2)  # generator A_z = [[0, -1, 0], [1, 0, 0], [0, 0, 0]]
THETA = torch.tensor([[2.0, 3.0, 1.0], [-1.0, 4.0, 2.0], [3.0, -1.0, 5.0]], dtype=torch.float64)
EXPECTED = torch.tensor([[3.0, 2.0, 1.0], [-2.0, 3.0, 2.0], [3.0, -1.0, 5.0]], dtype=torch.float64)


def by_kronecker_svd(theta: torch.Tensor, generator: torch.Tensor, b: float) -> torch.Tensor:
    """As written: L = A^T (x) I - I (x) A on column-stacked weights, its right singular vectors below b."""
    eye = torch.eye(len(generator), dtype=torch.float64)
    _, values, right = torch.linalg.svd(torch.kron(generator.T.contiguous(), eye) - torch.kron(eye, generator))
    kept = right[values < b]
    return (kept.T @ kept @ theta.T.flatten()).reshape(3, 3).T


@pytest.mark.parametrize(
    "route",
    [
        lambda: by_kronecker_svd(THETA, SPACE.drho([1.0]), 1.5),
        lambda: se.dense(SPACE >> SPACE).filter(se.hard(1.5).gamma(se.dense(SPACE >> SPACE)))(THETA),
        lambda: se.hard(1.5)(THETA, SPACE >> SPACE),
        lambda: se.schur(1.5)(THETA, SPACE >> SPACE),
    ],
    ids=["kronecker svd", "dense", "exact", "schur"],
)
def test_the_worked_example(route):
    assert torch.allclose(route(), EXPECTED, atol=1e-12)


def test_the_worked_example_has_the_stated_singular_values():
    spectrum = se.spectrum(SPACE >> SPACE)
    assert spectrum.levels.tolist() == pytest.approx([0, 1, 2]) and spectrum.counts.tolist() == [3, 4, 2]
    rotation = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(SPACE.drho([1.0]), rotation)


def normal_block(a: float, b: float) -> torch.Tensor:
    return torch.tensor([[a, b], [-b, a]], dtype=torch.float64)


@pytest.mark.parametrize(("target", "free"), [("4 to 3", 2), ("4 to 4", 4)])
def test_the_schur_examples_have_two_and_four_free_parameters(target, free):
    """Normal generators with eigenvalues a +- ib and c +- id; the 3-dimensional target shares one pair only."""
    line = se.group_from(lie=[torch.ones(1, 1)], name="one flow")
    first, second = normal_block(0.3, 1.0), normal_block(-0.2, 2.0)
    source = se.representation(line, [torch.block_diag(first, second)])
    blocks = [second, torch.tensor([[0.7]], dtype=torch.float64)] if target == "4 to 3" else [first, second]
    rep = source >> se.representation(line, [torch.block_diag(*blocks)])
    assert se.spectrum(rep).invariants == free == se.dense(rep).invariants
    w = torch.randn(rep.shape, dtype=torch.float64)
    assert torch.allclose(se.schur(0.0)(w, rep), se.softness(0)(w, rep), atol=1e-12)


def test_shift_invariance_is_a_low_pass_filter():
    """Remark 1: under circular shifts the hard filter is the ideal low-pass of the Fourier transform."""
    n = 32
    rep = se.grid(se.Shifts(n), n)
    x = torch.randn(n, dtype=torch.float64)
    b = float(se.spectrum(rep).levels[5]) + 1e-6
    spectrum = torch.fft.rfft(x)
    spectrum[6:] = 0
    assert torch.allclose(se.hard(b)(x, rep), torch.fft.irfft(spectrum, n), atol=1e-12)
