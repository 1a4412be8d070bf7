"""Shared by all tests: one torch thread, and reproducible property tests that never run against a clock."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile("paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")
