"""Which version is this? The one place that says so: the build reads it here, and results carry it."""

__version__ = "0.1.0"
