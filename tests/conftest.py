"""Tests run on the CPU, and keep compiled programs where JAXHYBRID_TEST_CACHE says."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
if cache := os.environ.get("JAXHYBRID_TEST_CACHE"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

from hypothesis import HealthCheck, settings

# compiling takes seconds and is no fault of an example
settings.register_profile(
    "jaxhybrid",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("jaxhybrid")
