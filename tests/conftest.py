"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Time is measured by loadgen, not by tests: a busy machine must not fail an example that is right.
settings.register_profile("modeswitch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("modeswitch")
