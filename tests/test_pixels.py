"""Does a square of pixels turn as it should? Group laws to rounding error, and the rate against a spline rotation."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from softequiv import SO
from softequiv._cache import cache
from softequiv.reps import Square, pixels

SMALL = [*range(1, 21), 37]
LARGE = [n for n in range(21, 65) if n != 37]


def exact_generator(n: int) -> Tensor:
    """The default action's, with integer frequencies."""
    return Square(SO(2), n).lie()[0]


GENERATORS = {
    "central": pixels.central_generator,
    "su2": pixels.su2_generator,
    "picture": pixels.picture_generator,
    "exact": exact_generator,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These matrices gain little from more threads, and threads that wait for a busy processor cost tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def basis_of(h: pixels.Harmonics) -> Tensor:
    return torch.cat([h.zero, h.cosine, h.sine], dim=1)


def turn(x: Tensor, n: int) -> Tensor:
    """A quarter turn of pictures in columns."""
    return x.reshape(n, n, -1).rot90(1, (0, 1)).reshape(n * n, -1)


def flip(x: Tensor, n: int) -> Tensor:
    """The left-right flip of pictures in columns."""
    return x.reshape(n, n, -1).flip(1).reshape(n * n, -1)


def flip_both(matrix: Tensor, n: int) -> Tensor:
    return flip(flip(matrix, n).T.contiguous(), n).T


def identity(n: int) -> Tensor:
    return torch.eye(n * n, dtype=torch.float64)


def counts(h: pixels.Harmonics) -> list[int]:
    """Directions per level."""
    return [h.zero.shape[1], *(2 * torch.bincount(h.frequency.long()))[1:].tolist()]


def projector(columns: Tensor) -> Tensor:
    return columns @ columns.T


def rotated(h: pixels.Harmonics, angle: float, x: Tensor) -> Tensor:
    """exp(angle A') x from the harmonics alone."""
    cos, sin = torch.cos(angle * h.frequency)[:, None], torch.sin(angle * h.frequency)[:, None]
    c, s = h.cosine.T @ x, h.sine.T @ x
    return h.zero @ (h.zero.T @ x) + h.cosine @ (cos * c - sin * s) + h.sine @ (sin * c + cos * s)


def without_leftover(h: pixels.Harmonics, x: Tensor) -> Tensor:
    if h.leftover is None:
        return x
    v = h.zero[:, [h.leftover]]
    return x - v @ (v.T @ x)


def check_structure(n: int) -> pixels.Harmonics:
    """What must hold at every size and is cheap to see."""
    h = pixels.harmonics(n)
    n0, n1 = h.zero.shape[1], len(h.frequency)
    assert n0 + 2 * n1 == n * n
    assert torch.equal(h.frequency, h.frequency.round()) and bool((h.frequency > 0).all())
    assert bool((h.frequency.diff() >= 0).all())
    assert (h.leftover is not None) == (n % 4 == 2)
    # Even n: n/2 F-odd pictures in excess, in couples; odd n: a true representation of O(2).
    assert int((~h.mirrored).sum()) == (0 if n % 2 else n // 4)
    assert set(h.zero_parity.tolist()) <= {1.0, -1.0}
    torch.testing.assert_close(flip(h.zero, n), h.zero * h.zero_parity, atol=1e-12, rtol=0)
    cosine_parity = torch.where(h.mirrored, 1.0, -1.0).double()
    torch.testing.assert_close(flip(h.cosine, n), h.cosine * cosine_parity, atol=1e-12, rtol=0)
    torch.testing.assert_close(flip(h.sine, n), -h.sine, atol=1e-12, rtol=0)
    return h


def check_quarter_turn(n: int, h: pixels.Harmonics) -> None:
    """P cosine = cos(m pi/2) cosine + sin(m pi/2) sine and so on, which is exp(pi/2 A') = P off the leftover."""
    cos, sin = torch.cos(math.pi / 2 * h.frequency).round(), torch.sin(math.pi / 2 * h.frequency).round()
    torch.testing.assert_close(turn(h.cosine, n), cos * h.cosine + sin * h.sine, atol=1e-12, rtol=0)
    torch.testing.assert_close(turn(h.sine, n), cos * h.sine - sin * h.cosine, atol=1e-12, rtol=0)
    expected = h.zero.clone()
    if h.leftover is not None:
        expected[:, h.leftover] *= -1
    torch.testing.assert_close(turn(h.zero, n), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("n", SMALL)
def test_harmonics_are_an_orthonormal_basis_and_turn_exactly(n: int) -> None:
    h = check_structure(n)
    check_quarter_turn(n, h)
    basis = basis_of(h)
    torch.testing.assert_close(basis.T @ basis, identity(n), atol=1e-12, rtol=0)


@pytest.mark.parametrize("n", LARGE)
def test_large_squares_turn_exactly(n: int) -> None:
    h = check_structure(n)
    check_quarter_turn(n, h)
    x = torch.randn(n * n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    basis = basis_of(h)
    torch.testing.assert_close(basis @ (basis.T @ x), x, atol=1e-11, rtol=0)
    torch.testing.assert_close(basis.T @ (basis @ x), x, atol=1e-11, rtol=0)


@pytest.mark.parametrize("n", SMALL)
def test_exact_generator_is_a_group_of_rotations(n: int) -> None:
    a, h = exact_generator(n), pixels.harmonics(n)
    assert torch.equal(a, -a.T)
    quarter = torch.matrix_exp(math.pi / 2 * a)
    permutation = identity(n)[pixels.quarter_turn(n)]
    torch.testing.assert_close(without_leftover(h, quarter), without_leftover(h, permutation), atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.matrix_power(quarter, 4), identity(n), atol=1e-10, rtol=0)
    if h.leftover is not None:
        v = h.zero[:, h.leftover]
        torch.testing.assert_close(quarter @ v, v, atol=1e-10, rtol=0)
        torch.testing.assert_close(permutation @ v, -v, atol=1e-10, rtol=0)


@pytest.mark.parametrize("n", SMALL)
def test_flip_reverses_the_rotation(n: int) -> None:
    """F A' F = -A', except, for even n, on the couples that no representation of O(2) can contain."""
    a, h = exact_generator(n), pixels.harmonics(n)
    couples = torch.cat([h.cosine[:, ~h.mirrored], h.sine[:, ~h.mirrored]], dim=1)
    on_couples = a @ projector(couples)
    expected = 2 * on_couples - a
    torch.testing.assert_close(flip_both(a, n), expected, atol=1e-11, rtol=0)
    assert (on_couples.norm() > 1) == (n % 2 == 0 and n > 2)


@pytest.mark.parametrize("n", [2, 4, 10, 16])
def test_no_representation_of_o2_restricts_to_an_even_square(n: int) -> None:
    """In O(2) all reflections are conjugate, so F and the transposition PF would have equal traces."""
    trace_flip = int(torch.trace(flip(identity(n), n)))
    trace_transposition = int(torch.trace(turn(flip(identity(n), n), n)))
    assert (trace_flip, trace_transposition) == (0, n)


@pytest.mark.parametrize("n", [3, 6, 8, 13])
def test_angles_add(n: int) -> None:
    h, a = pixels.harmonics(n), exact_generator(n)
    x = torch.randn(n * n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    together, apart = rotated(h, 1.7, x), rotated(h, 0.6, rotated(h, 1.1, x))
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=0)
    torch.testing.assert_close(together, torch.matrix_exp(1.7 * a) @ x, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("n", [1, 2, 3, 6, 8, 11])
def test_generators_are_skew_and_respect_the_square(name: str, n: int) -> None:
    a = GENERATORS[name](n)
    assert a.shape == (n * n, n * n) and a.dtype == torch.float64
    torch.testing.assert_close(a, -a.T, atol=0, rtol=0)
    p = pixels.quarter_turn(n)
    torch.testing.assert_close(a[p][:, p], a, atol=1e-10, rtol=0)
    if name != "exact":
        torch.testing.assert_close(flip_both(a, n), -a, atol=1e-10, rtol=0)


def test_picture_generator_solves_its_equation() -> None:
    covariance, change = pixels._covariances(7)
    a = pixels.picture_generator(7)
    torch.testing.assert_close(a @ covariance + covariance @ a, 2 * change, atol=1e-8, rtol=0)


def test_harmonics_round_the_picture_generator() -> None:
    """The pairs are invariant planes of the generator, and no frequency moves by more than 2."""
    a, h = pixels.picture_generator(9), pixels.harmonics(9)
    omega = (h.sine * (a @ h.cosine)).sum(0)
    assert float((omega - h.frequency).abs().max()) <= 2 + 1e-9
    residual = a @ h.cosine - h.sine * omega
    torch.testing.assert_close(residual, torch.zeros_like(residual), atol=1e-9, rtol=0)


def test_level_counts_at_16() -> None:
    assert counts(pixels.harmonics(16)) == [12, 30, 26, 24, 26, 20, 18, 18, 14, 14, 14, 10, 10, 6, 6, 4, 2, 2]


def test_level_counts_of_su2_at_16() -> None:
    """The counts first published for su(2), whose unit of time was 1.292 times that of the centre."""
    a = pixels.su2_generator(16) * 1.292 / (3 * math.pi / 8)
    h = pixels._rounded(16, lambda left, right: pixels._between(left, a, right))
    assert counts(h) == [18, 32, 34, 32, 28, 26, 24, 22, 18, 14, 6, 2]


def smooth_pictures(n: int, degrees: float) -> tuple[Tensor, Tensor]:
    """Smooth pictures in columns and their rate of change per radian, by a quintic spline with real surroundings."""
    rng, margin = np.random.default_rng(n), n + 4
    pictures, rates = [], []
    for _ in range(80):
        scene = ndimage.gaussian_filter(rng.standard_normal((n + 2 * margin, n + 2 * margin)), 2.5)
        forward, backward = (
            ndimage.rotate(scene, angle, reshape=False, order=5, mode="reflect") for angle in (degrees, -degrees)
        )
        rate = (forward - backward) / (2 * math.radians(degrees))
        pictures.append(scene[margin:-margin, margin:-margin].ravel())
        rates.append(rate[margin:-margin, margin:-margin].ravel())
    return torch.from_numpy(np.stack(pictures, axis=1)), torch.from_numpy(np.stack(rates, axis=1))


@pytest.mark.parametrize(("name", "tolerance"), [("su2", 0.06), ("picture", 0.08), ("exact", 0.13), ("central", 0.22)])
@pytest.mark.parametrize("n", [5, 8, 14, 16, 24])
def test_unit_generator_turns_one_radian_per_unit_of_time(name: str, tolerance: float, n: int) -> None:
    pictures, rates = smooth_pictures(n, degrees=2)
    moved = GENERATORS[name](n) @ pictures
    slope = float((moved * rates).sum() / moved.square().sum())
    assert abs(slope - 1) < tolerance


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_quarter_turn_and_bilinear_rotation_agree_with_rot90(n: int) -> None:
    x = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    expected = x.rot90(1, (-2, -1)).flatten()
    assert torch.equal(x.flatten()[pixels.quarter_turn(n)], expected)
    torch.testing.assert_close(pixels.bilinear_rotation(n, math.pi / 2) @ x.flatten(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("degrees", [-40, 1, 20])
def test_bilinear_rotation_is_that_of_scipy(degrees: float) -> None:
    """Where all four neighbours lie inside; scipy treats the border in its own way."""
    n = 9
    x = np.random.default_rng(0).standard_normal((n, n))
    expected = ndimage.rotate(np.pad(x, 4), degrees, reshape=False, order=1)[4:-4, 4:-4]
    ours = (pixels.bilinear_rotation(n, math.radians(degrees)) @ torch.from_numpy(x).flatten()).reshape(n, n)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-12)


def test_harmonics_are_reproducible() -> None:
    first = pixels.harmonics(12)
    cache.clear()
    second = pixels.harmonics(12)
    assert torch.equal(first.cosine, second.cosine) and torch.equal(first.zero, second.zero)
