"""Compiling for a TPU v5e or an H100 on a machine that has neither.

`compile_for` gives a real executable of the target: what XLA did can be read off it (aliasing, temporaries,
copies, fusions), it only cannot run. TPU needs the package libtpu, CUDA needs jax-cuda12-plugin,
jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, all of the same version as jax and no driver. The two go into
environments of their own; a process that only compiles should set JAX_PLATFORMS=cpu.

The way to a CUDA topology without a device uses names private to jax, and only here.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxhybrid.errors import UsageError

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Target:
    """One device to compile for. devices: all of its topology, for a mesh. options: of the compiler."""

    name: str
    platform: str
    devices: tuple[Any, ...]
    options: tuple[tuple[str, str], ...] = ()

    @property
    def sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.devices[0])


def missing(name: str) -> str | None:
    """What has to be installed before `target(name)` works, or None."""
    packages = {
        "v5e": {"libtpu": "libtpu"},
        "h100": {
            "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
            "jax_cuda12_plugin": "jax-cuda12-plugin",
            "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
        },
    }
    if name not in packages:
        raise UsageError(f"target {name!r}: unknown, choose one of {', '.join(packages)}")
    absent = [package for module, package in packages[name].items() if not _found(module)]
    return f"target {name}: pip install {' '.join(absent)}" if absent else None


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def target(name: str) -> Target:
    """The target "v5e" or "h100"; UsageError naming the packages it lacks."""
    if message := missing(name):
        raise UsageError(message)
    return _tpu(name) if name == "v5e" else _cuda(name)


def _tpu(name: str) -> Target:
    # libtpu otherwise asks the cloud what machine this is, and allows one process alone
    no_machine = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= no_machine | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:2x2")
    return Target(name, "tpu", tuple(topology.devices))


def _cuda(name: str) -> Target:
    from jax._src import xla_bridge
    from jaxlib import xla_client

    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert spec is not None and spec.submodule_search_locations is not None
    nvcc = Path(spec.submodule_search_locations[0])
    path = os.environ.get("PATH", "")
    if str(nvcc / "bin") not in path:
        os.environ["PATH"] = f"{nvcc / 'bin'}{os.pathsep}{path}"
    jax.devices("cpu")  # the plugins are found with the first backend
    try:
        if not xla_client.pjrt_plugin_initialized("cuda"):
            xla_client.initialize_pjrt_plugin("cuda")
        make: Any = xla_bridge._topology_factories["cuda"]
        topology = make("", target_config=_H100, topology="1x1x1")
        devices = tuple(topology._make_compile_only_devices())
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"target {name}: jax {jax.__version__} makes CUDA topologies otherwise") from error
    return Target(name, "cuda", devices, (("xla_gpu_cuda_data_dir", str(nvcc)),))


def shapes_on(where: Target, tree: Any) -> Any:
    """Arrays or `ShapeDtypeStruct`s to structs on the target's first device; given shardings stay."""

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        given = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given or where.sharding)

    return jax.tree.map(placed, tree)


def compile_for(
    where: Target,
    f: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
) -> jax.stages.Compiled:
    """The executable of f for arguments like `args` (pytrees of arrays or `ShapeDtypeStruct`s)."""
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    placed = [a if i in static else shapes_on(where, a) for i, a in enumerate(args)]
    jitted = jax.jit(f, donate_argnums=donate_argnums, static_argnums=static)
    lowered = jitted.trace(*placed).lower(lowering_platforms=(where.platform,))
    return lowered.compile(compiler_options=dict(where.options) or None)
