"""An executor that makes vectors, on this host's devices: opens the checkpoint, places it, compiles, runs."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import with_decoder_names, with_encoder_names
from jaxserve.config import Config
from jaxserve.executor.embed_preparation import EmbedPreparation, prepare_embedding
from jaxserve.executor.local import fingerprint
from jaxserve.executor.preparation import MAX_COMPILE_THREADS
from jaxserve.executor.protocol import Progress
from jaxserve.executor.trial import with_tried_kernels
from jaxserve.ipc.messages import EmbeddingInfo, ModelInfo
from jaxserve.ipc.report import PhaseClock, ProgramReport, StartupReport
from jaxserve.layers.attention import KVPool
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import model_of
from jaxserve.runner.cache_directory import cache_directory
from jaxserve.runner.compilations import CompilationCounter
from jaxserve.runner.embed_runner import EmbedRunner, PendingVectors
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.warmup import executables
from jaxserve.scheduler.embed_plan import EmbedBuckets, EmbedPlan
from jaxserve.types import RequestId
from jaxserve.weights.loader import check_tensors, load_params

_LOG = logging.getLogger(__name__)


class LocalEmbeddingExecutor:
    """One model that makes vectors on this process's devices."""

    task: Literal["embed"] = "embed"

    def __init__(
        self, runner: EmbedRunner, model_info: ModelInfo, buckets: EmbedBuckets, counter: CompilationCounter
    ) -> None:
        self._runner = runner
        self._counter = counter
        self.model_info = model_info
        self.buckets = buckets
        counter.phase = "serving"

    @classmethod
    def start(cls, config: Config, model_path: Path, progress: Progress) -> LocalEmbeddingExecutor:
        """Load and compile; returns when every program has run. Raises StartupError in one line."""
        clock = PhaseClock()
        counter = CompilationCounter()
        with clock.phase("open"):
            checkpoint = open_checkpoint(model_path)
            model = model_of(checkpoint)
            if isinstance(model, DecoderConfig):
                checkpoint = with_decoder_names(checkpoint)
                config = with_tried_kernels(config, model, clock, progress)
            else:
                checkpoint = with_encoder_names(checkpoint)
            prepared = prepare_embedding(config, model, model_path)
            check_tensors(checkpoint, prepared.skeleton)
        _LOG.info("limits: %s", prepared.summary)
        runner, programs = _load(prepared, checkpoint, config, clock, progress)
        with clock.phase("first_run"):
            for done, program in enumerate(prepared.programs, start=1):
                runner.submit(_rehearsal(program, prepared.max_model_len)).result()
                progress("first_run", done, len(prepared.programs), program.name)
        report = StartupReport(sorted(clock.spans, key=lambda span: span.start_s), programs)
        return cls(runner, _model_info(prepared, checkpoint, config, report), prepared.buckets, counter)

    def submit(self, plan: EmbedPlan) -> PendingVectors:
        return self._runner.submit(plan)

    def compilations(self) -> dict[str, int]:
        """Backend compilations so far by phase."""
        return dict(self._counter.counts)

    def close(self) -> None:
        """Release the devices."""
        self._counter.close()


def _load(
    prepared: EmbedPreparation, checkpoint: Checkpoint, config: Config, clock: PhaseClock, progress: Progress
) -> tuple[EmbedRunner, list[ProgramReport]]:
    """Weights and programs at the same time: compiling needs shapes alone."""
    cache = ProgramCache(cache_directory(config.compile.compile_cache))

    def new_pool() -> KVPool | None:
        shape = prepared.pool_shape
        if shape is None:
            return None
        return KVPool(*(jnp.zeros(shape, prepared.kv_dtype, device=prepared.sharding.kv_pool) for _ in range(2)))

    with ThreadPoolExecutor(1, thread_name_prefix="load") as background, clock.phase("load"):
        loading = background.submit(
            load_params, checkpoint, prepared.skeleton, prepared.sharding, partial(progress, "load")
        )
        with clock.phase("compile"):
            num_threads = min(len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS)
            made = prepared.make_programs(cache, num_threads, partial(progress, "compile"))
        params = loading.result()
    reports = [ProgramReport(program.name, result.source, result.seconds) for program, result in made.items()]
    return EmbedRunner(params, new_pool, prepared.page_size, executables(made)), reports


def _rehearsal(program: Program, max_model_len: int) -> EmbedPlan:
    """A step of made-up texts, one of them a single token: the first run of a program is slower than later ones."""
    counts = np.array([1, min(8, program.num_tokens - 1, max_model_len)], np.int32)
    counts = counts[counts > 0][: program.num_rows]
    names = tuple(RequestId(f"rehearsal-{row}") for row in range(len(counts)))
    return EmbedPlan(program.num_tokens, names, counts, np.zeros(counts.sum(), np.int32), counts)


def _model_info(prepared: EmbedPreparation, checkpoint: Checkpoint, config: Config, report: StartupReport) -> ModelInfo:
    model = prepared.skeleton.config
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_model_len=prepared.max_model_len,
        num_kv_blocks=0,
        block_size=prepared.page_size,
        max_num_seqs=prepared.buckets.max_num_seqs,
        kv_dtype=str(prepared.kv_dtype),
        platform=prepared.device.platform,
        num_devices=len(prepared.sharding.devices),
        fingerprint=fingerprint(checkpoint, prepared.skeleton, config),
        startup=report,
        embedding=EmbeddingInfo(
            size=1 if prepared.scores_pairs else model.hidden_size,
            pooling=prepared.pooling,
            normalizes=prepared.normalizes,
            scores_pairs=prepared.scores_pairs,
        ),
    )
