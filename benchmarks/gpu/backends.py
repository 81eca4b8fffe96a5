"""Selects the kernels to measure: those that the server would use on this device, and the reference."""

from __future__ import annotations

from typing import Any

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
    """Return the backends of attention: the reference, and the Pallas kernels if the server would use them, that of the model last."""
    backend = server_policy(context, decoder).attention_backend
    if backend == "mosaic_gpu_tcgen05":  # other models take the second one
        return ("reference", "mosaic_gpu_mma", backend)
    return ("reference", backend) if backend.startswith("mosaic") else ("reference",)


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
