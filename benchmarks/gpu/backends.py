"""Selects the kernels to measure: those that the server would use on this device, and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.paged_attention import unsupported
from jaxserve_kernels.paged_attention.cases import Case

from benchmarks.gpu.context import Context
from jaxserve.config import CompileConfig, Config, Dtype, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.backend import chip_of, shared_bytes
from jaxserve.runner.limits import make_policy

_OWN_OPS: Final[Mapping[Backend, frozenset[str]]] = {
    "bucketed": frozenset(
        {
            "block_sparse_attention",
            "compressed_attention",
            "latent_attention",
            "paged_attention",
            "sparse_attention",
        }
    ),
    "mosaic_gpu_mma": frozenset({"linear_attention", "paged_attention"}),
    "mosaic_gpu_tcgen05": frozenset({"paged_attention"}),
}
"""Ops that these backends compute in a way of their own."""


def server_policy(
    context: Context, decoder: DecoderConfig, *, dtype: Dtype = "auto", quantization: str = "none"
) -> DtypePolicy:
    """Return the dtypes and kernels that `jaxserve serve` would use for this model. Raises ConfigError."""
    config = Config(
        model=ModelConfig(model="random", dtype=dtype, quantization=quantization),
        compile=CompileConfig(attention_backend=context.attention_backend),
    )
    return make_policy(config, decoder, chip_of(jax.devices()[0]))


def op_backends(context: Context, decoder: DecoderConfig) -> tuple[Backend, ...]:
    """Return the backends to check: the reference first, then the others that run on this device, that of the model's attention last.

    Models that their own kernels refuse take XLA's buckets. Hopper GPUs have the instructions of the kernel for all other GPUs,
    which no model takes there: devices that have been at hand were Hoppers.
    """
    backend = server_policy(context, decoder).attention_backend
    if backend == "bucketed":
        return ("reference", backend)
    if not backend.startswith("mosaic_gpu"):
        return ("reference",)
    others: tuple[Backend, ...] = ("bucketed", "mosaic_gpu_mma")
    return ("reference", *(each for each in others if each != backend), backend)


def computes(backend: Backend, op: str) -> bool:
    """Return whether a backend computes an op in a way of its own; it takes the reference otherwise."""
    if backend == "mosaic_gpu":
        return (files(f"jaxserve_kernels.{op}") / "gpu").is_dir()
    return op in _OWN_OPS.get(backend, {op})


def has_kernel(backend: Backend, case: Any) -> bool:
    """Return whether a backend computes a case itself on this device. Only the kernel on `mma.sync` leaves out some, and `tcgen05`."""
    if backend not in ("mosaic_gpu_mma", "mosaic_gpu_tcgen05") or not isinstance(case, Case):
        return True
    pool_shape = (1, 1, case.num_kv_heads, case.page_size, case.dim)
    dtypes = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    most = shared_bytes(chip_of(jax.devices()[0]))
    return unsupported(backend, case.num_heads, pool_shape, *dtypes, most) is None


def why_no_kernels(decoder: DecoderConfig) -> str | None:
    """The server's reason for not taking Pallas kernels on this device, in a line; None where it can take them."""
    config = Config(model=ModelConfig(model="random"), compile=CompileConfig(attention_backend="pallas"))
    try:
        make_policy(config, decoder, chip_of(jax.devices()[0]))
    except ConfigError as error:
        return str(error)
    return None
