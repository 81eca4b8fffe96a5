"""Described devices as `jax.Device`s for which programs can be compiled, and the packages with their compilers.

The compilers of CUDA and TPU run on any x86 machine that has their package; no device is used.
"""

from __future__ import annotations

from importlib import metadata

import jax
from jax.experimental import topologies

from jaxserve.errors import ConfigError
from jaxserve.tools.planning.devices import CudaChip, Device, Platform

COMPILERS: dict[Platform, tuple[str, ...]] = {
    "cpu": (),
    "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
}
"""Packages per platform of which any one has the compiler."""

MOST_TPUS = 64
"""Devices of the largest topology in `devices`."""

TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables that keep libtpu from querying the network for the machine's type, from writing logs, and from locking the
machine for one process (it only compiles). It reads them when it is loaded."""


def missing_compiler(device: Device, num_devices: int) -> str | None:
    """Return in a few words why programs for this device cannot be compiled here; None if they can."""
    packages = COMPILERS[device.platform]
    if packages and not any(_is_installed(package) for package in packages):
        return f"{packages[0]} is not installed"
    if device.platform == "tpu" and num_devices > MOST_TPUS:
        return f"no topology of {num_devices} devices is known here: at most {MOST_TPUS}"
    return None


def described_devices(device: Device, num_devices: int) -> list[jax.Device]:
    """Return `num_devices`, of as few hosts as have them. Call it in a process with JAX_PLATFORMS=cpu and TPU_ENVIRONMENT.

    A program over several hosts is compiled whole here, as each host compiles it. Raises ConfigError if they are too many.
    """
    if device.platform == "cpu":
        if num_devices > 1:
            jax.config.update("jax_num_cpu_devices", num_devices)
        return jax.devices("cpu")[:num_devices]
    if device.platform == "gpu":
        num_hosts = -(-num_devices // device.most_per_host)
        if num_devices % num_hosts:
            raise ConfigError(f"{num_devices} {device.title}: they do not divide over {num_hosts} hosts")
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=cuda_target_config(device),
            topology=f"1x{num_hosts}x{num_devices // num_hosts}",  # partitions, hosts, devices of each
        )
        return list(topology.devices[:num_devices])
    for name in device.topologies:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        if len(found) >= num_devices:
            return list(found[:num_devices])
    raise ConfigError(f"{num_devices} {device.title}: at most {MOST_TPUS} can be compiled for")


def cuda_target_config(device: Device) -> str:
    """Return the CUDA compiler's description of a GPU (xla.GpuTargetConfigProto)."""
    chip, rates = device.cuda, device.rates
    if chip is None or rates is None:
        raise ValueError(f"{device.name} is no CUDA device")
    major, minor = chip.capability
    fields = {
        "core_count": chip.num_cores,
        "fpus_per_core": chip.fpus_per_core,
        "clock_rate_ghz": chip.clock_ghz,
        "device_memory_size": device.memory_bytes,
        "memory_bandwidth": int(rates.bytes_per_s),
        "l2_cache_size": chip.l2_bytes,
        "shared_memory_per_core": chip.shared_bytes_per_core,
        "shared_memory_per_block_optin": chip.shared_bytes_per_block,
        "threads_per_core_limit": chip.threads_per_core,
        **_SAME_FOR_ALL,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return (
        "gpu_device_info {\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} {_features(chip)} }}\n"
        f'{lines}\n  device_vendor: "NVIDIA Corporation"\n  name: "{device.title}"\n'
        '  driver_version: "13.0.0"\n  runtime_version: "13.0.0"\n  compile_time_toolkit_version: "13.0.0"\n'
        '  dnn_version: "9.28.0"\n}\n'
        f'dnn_version_info {{ major: 9 minor: 28 }}\nplatform_name: "CUDA"\ndevice_description_str: "{device.title}"\n'
    )


# The table of compute capabilities in the CUDA programming guide: alike from 7.5 to 12.0.
_SAME_FOR_ALL = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "registers_per_block_limit": 65536,
    "registers_per_core_limit": 65536,
    "shared_memory_per_block": 49152,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "device_address_bits": 64,
}


def _features(chip: CudaChip) -> str:
    """Return the target architecture; from Hopper on with its specific instructions (wgmma, tcgen05)."""
    return "feature_extension: ACCELERATED_FEATURES" if chip.capability >= (9, 0) else ""


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
