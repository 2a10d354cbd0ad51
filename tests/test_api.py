"""The public names, guarded: a new one is added here and to the documentation on purpose."""

from importlib import metadata

import pytest

import softequiv as se
from softequiv.certify.certificate import versions
from softequiv.cli import doctor

GROUPS = "SO O C D S SU2 Lorentz Reflection Scaling Shifts group_from parse_group Group Element"
RANGES = "Angle degrees radians parse_range"
REPS = "Rep scalar vector tensor determinant regular frequency spin grid representation lift outer"
SPECTRA = "Spectrum Filter spectrum dense"
GAINS = "hard smooth schur softness least_distortion"
MODELS = (
    "Plan plan soften set_softness set_error bake save load open_model save_model stored_tensors load_tensors hold "
    "project soft_weights filtered_together"
)
ACTIONS = "Acts Moves Pictures Points Still Tokens Vectors"
GUARANTEES = (
    "certify Certificate certify_network NetworkCertificate StatisticalCertificate "
    "certify_smoothed Smoothed SmoothedCertificate"
)
HOLDING = "HeldByMeasurement HeldCallback Mixture OrbitMean"
MEASURES = "measure Measurement attribute Attribution"
ERRORS = (
    "SoftEquivError GroupError RepresentationError NotARepresentationError GainError WeightError TooLargeError "
    "PerformanceWarning"
)


def test_the_public_names_are_these():
    rooms = [GROUPS, RANGES, REPS, SPECTRA, GAINS, MODELS, ACTIONS, GUARANTEES, HOLDING, MEASURES, ERRORS]
    expected = " ".join(rooms).split()
    assert sorted(se.__all__) == sorted(expected)


def test_every_public_name_is_documented():
    for name in se.__all__:
        assert (getattr(se, name).__doc__ or "").strip(), name


def test_the_version_is_known_from_a_source_tree_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert versions()["softequiv"] == doctor.versions()["softequiv"] == se.__version__ != ""
