"""Products of few rows on a CPU, by a kernel in C++ that the user's own compiler builds (products.cc).

XLA's CPU compiler reads a weight of float32 for one row nearly at the speed of memory, but for several rows,
or of bfloat16 or small integers, at a half to a sixth of it. Without a C++ compiler XLA's products are used,
and `JAXHYBRID_CPU_KERNEL=off` says not to build or use the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.kernels.platform import Function, by_platform
from jaxhybrid.user_cache import user_cache

_TARGET = "jaxhybrid_products_of_few_rows"
_SOURCE = Path(__file__).with_name("products.cc")
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-shared", "-w")
_MOST_ROWS = 8
"""More are left to XLA, whose products of matrices are then as fast."""
_SMALLEST = 1 << 14
"""Weights of fewer bytes are too small for a call to pay."""
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8)
_BLOCK = 32
"""What the kernel handles at a time along `in`."""


def fits(rows: Array, weight: Array) -> bool:
    """Whether the kernel can and should multiply rows [..., R, in] with weights [..., out, in] (for int4
    packed: [..., out, in / 2]) here. False on other platforms and where the kernel cannot be built."""
    return (
        1 <= rows.shape[-2] <= _MOST_ROWS
        and rows.shape[-1] % _BLOCK == 0
        and weight.dtype in _DTYPES
        and weight.size * weight.dtype.itemsize >= _SMALLEST
        and jax.default_backend() == "cpu"
        and registered()
    )


def multiply(plain: Function, rows: Array, weight: Array) -> Array:
    """plain(rows, weight), float32 [..., R, out] of two arrays as `fits` takes them, or by the kernel."""

    def kernel(rows: Array, weight: Array) -> Array:  # custom_jvp would hand `plain` the scales as well
        return product(rows, weight)

    return by_platform(plain, {"cpu": kernel} if fits(rows, weight) else {}, rows, weight)


def product(rows: Array, weight: Array, scales: Array | None = None) -> Array:
    """rows [..., R, in] times weight [..., out, in], leading axes alike: [..., R, out].

    float32 from rows of any float dtype with a weight of float32 or bfloat16, or with int8 or packed int4 and
    scales float32 [..., out, in / 32]; int32, exact, where both are int8.
    """
    exact = rows.dtype == jnp.int8
    y = jax.ShapeDtypeStruct((*rows.shape[:-1], weight.shape[-2]), jnp.int32 if exact else jnp.float32)
    call = jax.ffi.ffi_call(_TARGET, y, vmap_method="expand_dims")
    rows = rows if exact else rows.astype(jnp.float32)
    return call(rows, weight, *([] if scales is None else [scales]))


@functools.cache
def registered() -> bool:
    """Whether XLA knows the kernel, which is built if need be (some seconds, once a user)."""
    if os.environ.get("JAXHYBRID_CPU_KERNEL", "on") == "off":
        return False
    library = _built()
    if library is None:
        return False
    handler = ctypes.CDLL(str(library)).ProductsOfFewRows
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["c++", "g++", "clang++"])), None)


def _built() -> Path | None:
    """The library for this processor, jaxlib and source: found in the user's cache, or compiled and put
    there as a whole; None where neither can be."""
    folder = user_cache("kernels")
    if folder is None:
        return None
    facts = (_SOURCE.read_text(), metadata.version("jaxlib"), platform.machine(), _processor(), *_FLAGS)
    library = folder / f"products-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = _compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "products.so"
        include = f"-I{jax.ffi.include_dir()}"
        command = [compiler, *_FLAGS, "-march=native", include, str(_SOURCE), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            said = done.stderr if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
        if said or not made.exists():
            warnings.warn(
                f"the CPU kernel was not built, decoding is slower: {(said.splitlines() or [compiler])[0]} "
                "(another compiler can be named by CXX; JAXHYBRID_CPU_KERNEL=off does without)",
                stacklevel=2,
            )
            return None
        os.replace(made, library)
    return library


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()
