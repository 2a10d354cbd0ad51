"""Do certificates of whole networks hold in 1,000 fresh draws, and say something? On trained readers of digits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from digits import SHOWN, roomy_digits

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def programs() -> Any:
    sys.path.insert(0, BENCHMARKS)
    try:
        import certificates
    finally:
        sys.path.remove(BENCHMARKS)
    return certificates


def parts() -> Any:
    x, y = roomy_digits()
    return (x[:SHOWN], y[:SHOWN]), (x[SHOWN:], y[SHOWN:])


def test_of_a_thousand_statistical_certificates_no_more_fail_than_they_say(programs: Any) -> None:
    found = programs.statistical(*parts(), epochs=8, samples=300, angles=11, confidence=0.95)
    assert found["accuracy"] > 0.85
    assert found["missed"] <= 50  # one in twenty; the bounds are together, so that there are fewer
    for name, truth in found["truth"].items():
        assert truth < found["bound, mean"][name] < 2 * truth
    assert 0.02 < found["truth"]["flip rate"] < found["bound, mean"]["flip rate"] < 0.5


def test_no_class_certified_by_votes_is_lost(programs: Any) -> None:
    train, test = parts()
    every = tuple(torch.cat(pair)[-1000:] for pair in zip(train, test, strict=True))
    found = programs.smoothed(train, every, 0.005, epochs=12, votes=300)
    assert found["certified"] > 0.2 and found["certified and right"] > 0.15
    assert found["fewer votes than certified"] == 0 and found["class changed"] == 0
    assert found["residual, largest measured / certified"] <= 1


def test_no_mixture_moves_beyond_its_share(programs: Any) -> None:
    train, test = parts()
    every = tuple(torch.cat(pair)[-1000:] for pair in zip(train, test, strict=True))
    strict, some, free = programs.mixed(train, every, (0.0, 0.2, 1.0), epochs=5)
    for row in (strict, some, free):
        assert row["trials"] == 1000 and row["beyond the bound"] == row["certain class changed"] == 0
    assert strict["largest"] < 1e-5 and 0.1 < some["largest"] < 0.2 + 1e-5 < free["largest"]
    assert strict["accuracy"] == pytest.approx(strict["accuracy, turned"]) and some["class certain"] > 0.2
