"""Property tests draw the same examples on every run; the machine's speed is not their subject."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "softequiv", deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("softequiv")
