"""Chooses an engine's kernels by device, model, types and settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxserve_kernels import latent_attention, native
from jaxserve_kernels.backend import NATIVE, XLA, Backend
from jaxserve_kernels.linear_attention.gpu import BACKENDS as STATE_KERNELS
from jaxserve_kernels.linear_attention.gpu import unsupported as no_state_kernel
from jaxserve_kernels.paged_attention import unsupported
from jaxserve_kernels.segments import CHUNK

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig, head_counts, indexer_of
from jaxserve.model_config.recurrent import KimiDeltaConfig, MambaConfig
from jaxserve.runner.buckets import page_tokens, resolve_limits

_LOG = logging.getLogger(__name__)
_BUILD = "python -m jaxserve_kernels.native.build"
_HOPPER, _FIRST_MMA, _TCGEN05 = (9, 0), (8, 0), 10
"""Compute capabilities, the last one of any minor number."""
_SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
"""Shared memory of one block by compute capability, from the CUDA programming guide; 99 on others."""
_VECTOR_SEQS = 4
"""Up to this many rows, AVX2 or AVX-512 multiply floats faster than AMX."""


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a device that decide which kernels it can run."""

    platform: str
    capability: tuple[int, int] | None = None
    """Only for CUDA devices."""


def chip_of(device: jax.Device) -> Chip:
    capability = str(getattr(device, "compute_capability", ""))
    major, _, minor = capability.partition(".")
    is_cuda = major.isdigit() and minor.isdigit()
    return Chip(device.platform, (int(major), int(minor)) if is_cuda else None)


def choose_backend(
    config: Config, decoder: DecoderConfig, chip: Chip, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> Backend:
    """Return the backend of attention that `--attention-backend` and `--cpu-kernels` ask for, or the fastest one. Raises ConfigError.

    Registers the native kernels if they are chosen.
    """
    if chip.platform == "cpu":
        backend = _for_cpu(config)
        has_blocks = any(layer.blocks is not None for layer in decoder.layers)
        return "reference" if has_blocks else backend  # native kernels keep pages in an order of their own
    _refuse_cpu_kernels(config, chip)
    wanted = config.compile.attention_backend
    if wanted == "reference":
        return "reference"
    pallas = pallas_backend(chip)
    reason = why_not_pallas(config, decoder, chip, dtype, kv_dtype)
    if reason is None and pallas is not None:
        is_lookup = config.scheduler.num_speculative_tokens > 0 and not config.scheduler.has_drafter
        has_rows_of_drafts = is_lookup and not decoder.cache.states
        if chip.platform == "tpu" and has_rows_of_drafts:
            raise ConfigError(
                "--num-speculative-tokens: not with the attention kernel of TPUs, where two rows must not write one "
                "page; use --attention-backend reference"
            )
        return _for_segments(pallas, config, decoder, chip, (dtype, kv_dtype))
    if wanted == "pallas":
        raise ConfigError(f"--attention-backend pallas: {reason}; use auto or reference")
    _LOG.info("attention is computed by XLA, not by a Pallas kernel: %s", reason)
    return "bucketed" if chip.platform == "gpu" else "reference"


def _for_segments(
    pallas: Backend, config: Config, decoder: DecoderConfig, chip: Chip, dtypes: tuple[jnp.dtype, jnp.dtype]
) -> Backend:
    """Return the backend whose kernel for prompts uses all of the tensor cores, if there is one; else `pallas`."""
    if chip.capability is None or chip.capability[0] != _TCGEN05:
        return pallas
    reason = _rejection("mosaic_gpu_tcgen05", config, decoder, chip, dtypes)
    if reason is None:
        return "mosaic_gpu_tcgen05"
    _LOG.info("attention of prompts takes mma.sync: %s", reason)
    return pallas


def matmul_backend(config: Config, decoder: DecoderConfig, chip: Chip, attention: Backend) -> Backend:
    """Return the backend of matmuls and recurrent states in an engine with this backend of attention.

    Their kernels do not need those for attention: experts of models with latent attention have them as well.
    """
    if chip.platform == "cpu":
        return _for_cpu(config, level=logging.DEBUG)  # the choice for attention is in the log
    pallas = pallas_backend(chip)
    if attention == "mosaic_gpu_tcgen05" and pallas is not None:
        return pallas  # of other ops there are the kernels that all GPUs have
    if attention not in XLA or config.compile.attention_backend == "reference" or pallas is None:
        return attention
    has_kernels = pallas != "mosaic_gpu_mma" or bool(decoder.cache.states)  # it has none for matmuls
    return pallas if has_kernels else attention


def why_no_state_kernel(decoder: DecoderConfig, backend: Backend) -> str | None:
    """Return in a few words why recurrent states have no kernel; None if they have one, or where no device has one."""
    if backend not in STATE_KERNELS or decoder.recurrent is None:
        return None
    if isinstance(decoder.recurrent, KimiDeltaConfig | MambaConfig):
        return "decays that differ by channel"
    states = [array for array in decoder.recurrent.arrays if array.name == "state"]
    return next(filter(None, (no_state_kernel(*array.shape[1:]) for array in states)), None)


def state_copies(decoder: DecoderConfig, backend: Backend) -> tuple[int, int]:
    """Return the states of a recurrent layer that a step has in memory beside their pool: those of each row, and those of the tokens of a
    chunk of a selective scan. Zeros if a kernel updates states in their pool."""
    if decoder.recurrent is None:
        return 0, 0
    if isinstance(decoder.recurrent, MambaConfig):
        return 2, 2 * CHUNK
    is_in_place = backend in NATIVE or (backend in STATE_KERNELS and why_no_state_kernel(decoder, backend) is None)
    return (0, 0) if is_in_place else (2, 0)


def attention_notes(
    config: Config, decoder: DecoderConfig, chip: Chip, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> tuple[str, ...]:
    """Return how a GPU would compute attention, one line for each thing that a user may want to know before buying one."""
    if chip.platform != "gpu":
        return ()
    notes = []
    if chip.capability is not None and chip.capability < _FIRST_MMA and dtype == jnp.bfloat16:
        notes.append(f"compute capability {_dotted(chip)} has no bfloat16 arithmetic: use --dtype float16")
    if not decoder.cache.has_attention:
        return tuple(notes)
    backend = choose_backend(config, decoder, chip, dtype, kv_dtype)
    if decoder.latent is not None and backend == "mosaic_gpu":
        notes.append(
            "attention: our kernel for Hopper; every step is one CUDA graph, but for prompts of many tokens a step"
        )
    elif any(indexer_of(decoder, layer) is not None for layer in decoder.layers):
        notes.append("sparse attention by XLA, in loops whose length the host reads: it has no kernel yet")
    elif decoder.compressed is not None:
        notes.append(
            "attention to compressed blocks by XLA, in loops whose length the host reads: it has no kernel yet"
        )
    elif decoder.latent is not None:
        pass
    elif backend == "mosaic_gpu":
        notes.append("attention: our kernels for Hopper; every step is one CUDA graph")
    elif backend == "mosaic_gpu_mma":
        notes.append(
            "attention: our kernel on mma.sync, which reads each key and value of a decode step once; every step is one "
            "CUDA graph"
        )
    elif backend == "mosaic_gpu_tcgen05":
        notes.append(
            "attention: our kernels, on tcgen05 for prompts and on mma.sync for decode steps, which read each key and value "
            "once; every step is one CUDA graph"
        )
    elif backend == "bucketed":
        reason = why_not_pallas(config, decoder, chip, dtype, kv_dtype)
        notes.append(
            f"attention by XLA ({reason}): decode steps read contexts up to the next power of two, about 1.7 times the "
            "bytes of these keys and values, in one CUDA graph unless context and rows are many; prompts in loops"
        )
    else:
        notes.append("attention by XLA, in loops whose length the host reads")
    return tuple(notes)


def _dotted(chip: Chip) -> str:
    return ".".join(map(str, chip.capability or ())) or "unknown"


def choose_encoder_backend(config: Config, chip: Chip) -> Backend:
    """Return the backend of an encoder's matmuls; its attention is the same everywhere. Raises ConfigError."""
    if chip.platform == "cpu":
        return _for_cpu(config)
    _refuse_cpu_kernels(config, chip)
    if config.compile.attention_backend == "pallas":
        raise ConfigError("--attention-backend pallas: no kernel for encoders; use auto or reference")
    return "reference"


def why_not_pallas(
    config: Config, decoder: DecoderConfig, chip: Chip, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> str | None:
    """Return in a few words why no Pallas kernel serves this; None if one does."""
    pallas = pallas_backend(chip)
    if pallas is None and chip.platform == "gpu":
        return f"compute capability {_dotted(chip)}: only from 8.0 (Ampere) on"
    if pallas is None:
        return f"no kernel for {chip.platform} yet"
    if chip.platform == "tpu" and any(layer.kv_source is not None for layer in decoder.layers):
        return "no kernel for layers that read other layers' keys and values yet"
    if any(layer.is_chunked for layer in decoder.layers):
        return "no kernel for attention in chunks yet, which contexts longer than a chunk need"
    return _rejection(pallas, config, decoder, chip, (dtype, kv_dtype))


def _rejection(
    backend: Backend, config: Config, decoder: DecoderConfig, chip: Chip, dtypes: tuple[jnp.dtype, jnp.dtype]
) -> str | None:
    """Return in a few words why a backend does not serve a model's shapes and types; None if it does."""
    if any(indexer_of(decoder, layer) is not None for layer in decoder.layers):
        return "no kernel for sparse attention yet"
    if decoder.compressed is not None:
        return "no kernel for attention to compressed blocks yet"
    if decoder.latent is not None and decoder.sinks != "none":
        return "no kernel for latent attention with sinks yet"
    page_size = page_tokens(chip.platform, config.cache.block_size)
    for group in decoder.cache.paged if decoder.cache.has_attention else ():
        pool_shape = (group.num_layers, 1, group.num_kv_heads, page_size, group.head_dim)
        if group.kind == "latent" and decoder.latent is not None:
            reason = latent_attention.unsupported(backend, pool_shape, decoder.latent.rank, *dtypes)
        else:
            shared = shared_bytes(chip)
            reasons = (unsupported(backend, count, pool_shape, *dtypes, shared) for count in head_counts(decoder))
            reason = next(filter(None, reasons), None)
        if reason is not None:
            return reason
    return None


def pallas_backend(chip: Chip) -> Backend | None:
    """Return the backend of the Pallas kernels that run on a chip."""
    if chip.platform == "tpu":
        return "mosaic_tpu"
    if chip.platform != "gpu" or chip.capability is None or chip.capability < _FIRST_MMA:
        return None
    return "mosaic_gpu" if chip.capability == _HOPPER else "mosaic_gpu_mma"


def shared_bytes(chip: Chip) -> int | None:
    """Return the shared memory that one block of a GPU may have."""
    return None if chip.capability is None else _SHARED_KB.get(chip.capability, 99) << 10


def _refuse_cpu_kernels(config: Config, chip: Chip) -> None:
    if config.compile.needs_cpu_kernels:
        raise ConfigError(f"--cpu-kernels {config.compile.cpu_kernels}: only on CPUs, not on {chip.platform}")


def _for_cpu(config: Config, *, level: int = logging.INFO) -> Backend:
    """The native kernels are for one device: XLA cannot partition them. level: of the line in the log."""
    wanted, attention = config.compile.cpu_kernels, config.compile.attention_backend
    if attention == "pallas":
        raise ConfigError("--attention-backend pallas: no kernel for CPUs; use auto or reference")
    if wanted == "xla" or config.parallel.num_devices > 1 or attention == "reference":
        return "reference"
    library = native.register()
    if library is not None:
        backend = _native(config)
        unit = "AMX" if backend == "native_matrix" else "the vector unit"
        _LOG.log(level, "native CPU kernels: %s, float matmuls on %s", library.name, unit)
        return backend
    if config.compile.needs_cpu_kernels:
        raise ConfigError(f"--cpu-kernels {wanted}: not built for this host: run `{_BUILD}`")
    _LOG.log(level, "native CPU kernels are not built for this host, XLA's are used; to build them: %s", _BUILD)
    return "reference"


def _native(config: Config) -> Backend:
    """Choose one unit for all steps: the two add in different orders, and a row must not depend on its neighbours."""
    wanted, has_amx = config.compile.cpu_kernels, native.has_amx()
    if wanted == "matrix" and not has_amx:
        raise ConfigError("--cpu-kernels matrix: this processor has no AMX, or its kernels lack it")
    num_seqs = resolve_limits("cpu", config.scheduler).max_num_seqs
    is_matrix = wanted == "matrix" or (wanted != "vector" and num_seqs > _VECTOR_SEQS)
    return "native_matrix" if has_amx and is_matrix else "native"
