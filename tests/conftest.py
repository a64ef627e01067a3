"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about toast.
settings.register_profile("toast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("toast")
