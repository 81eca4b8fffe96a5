"""An executor on this host's devices: opens the checkpoint, places it, compiles, runs."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxserve import __version__
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.config import AttentionBackend, Config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.ipc.messages import ModelFacts
from jaxserve.models.config import DecoderConfig
from jaxserve.models.registry import decoder_config
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.backend import choose_backend
from jaxserve.runner.compilations import CompilationCounter
from jaxserve.runner.inputs import programs
from jaxserve.runner.limits import make_limits, make_numerics
from jaxserve.runner.memory import kv_cache_bytes
from jaxserve.runner.program_cache import ProgramCache, cache_directory
from jaxserve.runner.runner import PendingStep, Runner, make_pool
from jaxserve.runner.warmup import make_programs
from jaxserve.scheduler.plan import Buckets, StepPlan
from jaxserve.sharding.mesh import MODEL_AXIS, make_sharding
from jaxserve.weights.loader import load_params

_LOG = logging.getLogger(__name__)

Progress = Callable[[str, int, int, str], None]
"""Called with (phase, units done, units in all, detail)."""


class LocalExecutor:
    """One model on this process's devices."""

    def __init__(
        self, runner: Runner, facts: ModelFacts, buckets: Buckets, eos: frozenset[int], counter: CompilationCounter
    ) -> None:
        self._runner = runner
        self._counter = counter
        self.facts = facts
        self.buckets = buckets
        self.eos_token_ids = eos
        counter.phase = "serving"

    @classmethod
    def start(cls, config: Config, model_path: Path, progress: Progress) -> LocalExecutor:
        """Load and compile; returns when every program exists. Raises StartupError in one line."""
        clock = _PhaseClock()
        counter = CompilationCounter()
        device = _first_device(config.parallel.tensor_parallel_size)
        _check_attention_backend(config.compile.attention_backend, device.platform)
        checkpoint = open_checkpoint(model_path)
        decoder = _decoder_config(checkpoint)
        backend = choose_backend(config, device.platform)
        skeleton = make_skeleton(decoder, make_numerics(config, device.platform, backend))
        sharding = make_sharding(decoder, config.parallel.tensor_parallel_size)
        clock.mark("open")
        params = load_params(
            checkpoint, skeleton, sharding, lambda done, total, name: progress("load", done, total, name)
        )
        clock.mark("load")
        kv_shards = config.parallel.tensor_parallel_size if sharding.rules["kv_heads"] == MODEL_AXIS else 1
        kv_bytes = kv_cache_bytes(config.cache, device, kv_shards)
        limits = make_limits(config, decoder, skeleton.numerics, device.platform, kv_bytes)
        _LOG.info("limits: %s", limits.summary)
        executables = make_programs(
            skeleton,
            sharding,
            limits.pool_shape,
            limits.kv_dtype,
            programs(limits.buckets, limits.max_pages),
            ProgramCache(cache_directory(config.compile.compile_cache)),
            num_threads=min(os.cpu_count() or 1, 8),
            progress=lambda done, total, name: progress("compile", done, total, name),
        )
        clock.mark("compile")
        runner = Runner(params, lambda: make_pool(limits.pool_shape, limits.kv_dtype, sharding), executables)
        clock.mark("kv_cache")
        facts = ModelFacts(
            vocab_size=decoder.vocab_size,
            max_model_len=limits.max_model_len,
            num_kv_blocks=limits.num_blocks,
            block_size=limits.spec.block_size,
            max_num_seqs=limits.buckets.max_num_seqs,
            dtype=str(skeleton.dtype),
            platform=device.platform,
            num_devices=config.parallel.tensor_parallel_size,
            fingerprint=_fingerprint(checkpoint, skeleton, config),
            phase_seconds=clock.seconds,
        )
        return cls(runner, facts, limits.buckets, frozenset(decoder.eos_token_ids), counter)

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._runner.submit(plan)

    def compilations(self) -> dict[str, int]:
        return dict(self._counter.counts)

    def close(self) -> None:
        self._counter.close()


class _PhaseClock:
    """Seconds since the last mark, by phase."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 3)
        self._last = now


def _first_device(num_devices: int) -> jax.Device:
    """Where there is no accelerator, the CPU is made to look like as many devices as are asked for."""
    if num_devices > 1 and jax.config.jax_num_cpu_devices < num_devices:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", num_devices)
    try:
        return jax.devices()[0]
    except RuntimeError as error:
        raise ConfigError(f"no device can be used: {error}") from error


def _check_attention_backend(chosen: AttentionBackend, platform: str) -> None:
    """auto and reference are the same as long as there is one kernel."""
    if chosen == "pallas":
        raise ConfigError(
            f"--attention-backend pallas: no Pallas attention kernel for {platform} yet; use auto or reference"
        )


def _decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The config of `checkpoint`; a refusal names it."""
    try:
        return decoder_config(checkpoint.config, checkpoint.generation_config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _fingerprint(checkpoint: Checkpoint, skeleton: ModelSkeleton, config: Config) -> str:
    """8 hex digits over what decides the output: checkpoint, dtype, mesh, versions."""
    identity = (
        checkpoint.path.name,
        [(info.name, info.stored_dtype, info.num_stored_bytes) for info in checkpoint.tensors.values()],
        skeleton.config,
        skeleton.numerics,
        config.parallel.tensor_parallel_size,
        jax.__version__,
        __version__,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:8]
