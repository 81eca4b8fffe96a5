"""The device that is measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.gpu.context import Context


class WrongDeviceError(Exception):
    """JAX runs on something else than was asked for."""


def first_device(context: Context) -> jax.Device:
    """Raises WrongDeviceError where JAX fell back to the CPU, as it silently does without its CUDA plugin."""
    device = jax.devices()[0]
    wanted = "cpu" if context.platform == "cpu" else "gpu"
    if device.platform != wanted:
        raise WrongDeviceError(f"--platform {context.platform} was asked for, but JAX's first device is {device}")
    return device


def is_well() -> bool:
    """Return True if this process can still compute on its device: after a CUDA error it cannot."""
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except Exception:
        return False
    return True
