"""Tests run on the CPU, and keep compiled programs where JAXHYBRID_TEST_CACHE says.

Compiling takes most of the time, so LLVM's optimizer is off, fusions come from XLA's older and quicker
emitter where it has one, and a program is one LLVM module. JAXHYBRID_TEST_OPTIMIZED=1 compiles as users do.
"""

import os
from importlib import metadata

os.environ["JAX_PLATFORMS"] = "cpu"
if not os.environ.get("JAXHYBRID_TEST_OPTIMIZED"):
    quick_to_compile = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if metadata.version("jaxlib") < "0.12":  # where XLA knows no older emitter, it ends the process
        quick_to_compile.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *quick_to_compile))
if cache := os.environ.get("JAXHYBRID_TEST_CACHE"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import io
import sys
from itertools import count
from pathlib import Path

import jax
import pytest
import tiny
from hypothesis import HealthCheck, settings

import jaxhybrid as jh

# compiling takes seconds and is no fault of an example
settings.register_profile(
    "jaxhybrid",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("jaxhybrid")

_tests, _maps = count(), Path("/proc/self/maps")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All tests of a file in one process, which compiles once what they share."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Every compiled program takes memory maps, of which Linux gives a process 65,530."""
    yield
    if next(_tests) % 10 == 0 and _maps.exists() and len(_maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random hybrid model on disk."""
    return tiny.write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return jh.load(folder)


@pytest.fixture
def run_command(capsys, monkeypatch, tmp_path):
    """Runs a command's module in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))

    def run(command, *arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = command.main([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return run
