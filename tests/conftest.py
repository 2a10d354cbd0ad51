"""Tests draw the same examples and numbers on every run and in any order; the machine's speed is not their subject."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "softequiv", deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # of `make fuzz`: other examples in every round
    "fuzz", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.register_profile(  # of `make coverage`: lines are reached by few examples
    "coverage", settings.get_profile("softequiv"), max_examples=10
)
settings.load_profile("softequiv")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
