"""Settings that make no sense are refused with what to change."""

import pytest
from pydantic import ValidationError

from app.energy.settings import EnergySettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"devices": ["0"]},
        {"devices": ["GPU-1", "GPU-1"]},
        {"interval_ms": 1},
        {"watts_per_core": {"EPYC": 0}},
        {"retention_days": 0},
        {"source": "guess"},
        {"late_after_s": 0.05},
        {"misspelt": 1},
        {"flush_s": float("inf")},
    ],
)
def test_refused(wrong):
    with pytest.raises(ValidationError):
        EnergySettings.model_validate(wrong)


def test_defaults_need_nothing():
    assert EnergySettings().source == "auto"
