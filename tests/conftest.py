"""Tests draw the same examples and numbers on every run and in any order; the machine's speed is not their subject."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "softequiv", deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("softequiv")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
