"""A real engine in the test's own process: scheduler, pages, programs and a small model, without sockets."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    Config,
    CpuKernels,
    ImagesConfig,
    KVCacheDtype,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeMethod,
    TierConfig,
)
from jaxserve.engine.core import EngineCore
from jaxserve.engine.process import open_tiers, side_groups
from jaxserve.executor.local import LocalExecutor
from jaxserve.flight.record import shape_of
from jaxserve.flight.recorded_scheduler import RecordedScheduler
from jaxserve.flight.recorder import Recorder
from jaxserve.ipc.messages import AddRequest, RequestOutput, TokenLogprobs
from jaxserve.kv.manager import KVManager
from jaxserve.runner.buckets import make_buckets
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.constrained import Grammars
from jaxserve.scheduler.plan import Buckets
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import LogprobsMode, RequestId
from tests.engine.quick_sampler import needs_other_options, quick_programs
from tests.programs import shared_programs
from tests.smollm2 import LIMITS
from tests.unit.checkpoint.checkpoint_files import smollm2_file

MODEL_NAME = "mistral_sliding_tiny"
"""Grouped heads, and a window of 8 that every prompt outgrows."""
KV_CACHE_MEMORY = 64 << 20
"""Bytes."""
MAX_IMAGE_PATCHES = 640
"""Most patches of an image and of an encoder call. No picture of a golden has more, and each start runs the encoder's programs of
this size: those for the default of 4,096 take longer than all else of a start."""


@dataclass
class Generated:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    routed_experts: bytes = b""

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the terminal message"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.routed_experts += output.routed_experts or b""


def request(
    name: str, prompt: list[int] | np.ndarray, *, adapter: int = 0, returns_experts: bool = False, **sampling: object
) -> AddRequest:
    """Return a request of 24 greedy tokens, unless options say otherwise."""
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    params = EngineSamplingParams(**options)  # type: ignore[arg-type]
    tokens = [int(token) for token in prompt]
    return AddRequest(RequestId(name), tokens, params, adapter=adapter, returns_routed_experts=returns_experts)


def _largest_buckets(platform: str, max_num_seqs: int, max_num_batched_tokens: int, **options: Any) -> Buckets:
    """Return the table with one size of each kind."""
    table = make_buckets(platform, max_num_seqs, max_num_batched_tokens, **options)
    return dataclasses.replace(table, decode=table.decode[-1:], mixed=table.mixed[-1:])


class ModelEngine:
    """An EngineCore over a LocalExecutor; `restart` gives a fresh scheduler and cache over the same programs.

    It compiles the largest bucket of each kind: half as many programs as a server does, and encoders of images of MAX_IMAGE_PATCHES.
    has_all_buckets: those of a server, for tests in which rows and their number must not affect each other. has_all_options: requests
    may have all sampling options; else programs are compiled with a sampler that knows temperature, seed and raw log-probabilities
    (`quick_sampler.py`), in half of the time.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 128,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        dtype: str = "float32",
        num_blocks: int | None = None,
        kv_cache_memory: int = KV_CACHE_MEMORY,
        kv_cache_dtype: KVCacheDtype = "auto",
        cpu_kernels: CpuKernels = "xla",
        quantization: str = "none",
        lora_modules: str | None = None,
        max_loras: int | None = None,
        tiers: TierConfig | None = None,
        images: ImagesConfig | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        returns_experts: bool = False,
        draft_model: Path | None = None,
        num_speculative_tokens: int = 0,
        speculative_method: SpeculativeMethod = "auto",
        has_all_buckets: bool = False,
        has_all_options: bool = False,
        reports_tokens: bool = False,
    ) -> None:
        self.has_all_options = has_all_options
        model = ModelConfig(
            model=str(path),
            max_model_len=max_model_len,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,
            lora_modules=lora_modules,
            max_loras=max_loras,
            logprobs_mode=logprobs_mode,
            enable_return_routed_experts=returns_experts,
        )
        self.config = Config(
            model=model,
            cache=CacheConfig(kv_cache_memory=kv_cache_memory, kv_cache_dtype=kv_cache_dtype),
            tiers=tiers or TierConfig(),
            images=images or ImagesConfig(),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                speculative_model=None if draft_model is None else str(draft_model),
                num_speculative_tokens=num_speculative_tokens,
                speculative_method=speculative_method,
            ),
            parallel=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size,
                data_parallel_size=data_parallel_size,
                expert_parallel_size=expert_parallel_size,
            ),
            compile=CompileConfig(cpu_kernels=cpu_kernels),
        )
        self.progress: list[tuple[str, int, int, str]] = []
        table = make_buckets if has_all_buckets else _largest_buckets
        programs = contextlib.nullcontext(shared_programs()) if has_all_options else quick_programs()
        patches = mock.patch.dict("jaxserve.runner.images.encoder.MAX_PATCHES", cpu=MAX_IMAGE_PATCHES)
        with mock.patch("jaxserve.runner.limits.make_buckets", table), patches, programs as folder:
            self.config = dataclasses.replace(
                self.config, compile=dataclasses.replace(self.config.compile, compile_cache=str(folder))
            )
            self.executor = LocalExecutor.start(
                self.config, path, lambda *step: self.progress.append(step), reports_tokens=reports_tokens
            )
        self.restart(num_blocks)

    def restart(
        self,
        num_blocks: int | None = None,
        *,
        num_state_slots: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_batched_tokens: int | None = None,
        overlap: bool = True,
        max_burst_ms: float = 50.0,
        num_speculative_tokens: int = 0,
        grammars: Grammars | None = None,
        recorded_steps: int | None = None,
    ) -> None:
        """Make a new scheduler. `num_blocks`, `num_state_slots`: use only so many pages of the pool, and slots. `recorded_steps`: plans of a segment of
        the flight recorder."""
        model_info = self.executor.model_info
        has_programs = self.executor.buckets.num_drafts > 0
        assert has_programs or not (num_speculative_tokens and model_info.num_state_slots), (
            "models with recurrent states verify drafts in programs of their own: pass num_speculative_tokens at the start"
        )
        slots = num_state_slots or model_info.num_state_slots
        model_info = msgspec.structs.replace(model_info, num_state_slots=slots)
        cache = dataclasses.replace(self.config.cache, enable_prefix_caching=enable_prefix_caching)
        config = dataclasses.replace(self.config, cache=cache, tiers=TierConfig())  # tiers need prefix caching
        self.kv = KVManager(
            num_blocks or model_info.num_kv_blocks,
            model_info.block_size,
            model_info.max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            num_ranks=self.config.parallel.data_parallel_size,
            groups=side_groups(config, model_info, self.executor.buckets),
        )
        scheduler = dataclasses.replace(
            self.config.scheduler,
            overlap=overlap,
            max_burst_ms=max_burst_ms,
            num_speculative_tokens=num_speculative_tokens,
            **({} if num_speculative_tokens else {"speculative_model": None, "speculative_method": "auto"}),
        )
        if max_num_batched_tokens is not None:
            scheduler = dataclasses.replace(
                scheduler,
                max_num_seqs=min(model_info.max_num_seqs, max_num_batched_tokens),
                max_num_batched_tokens=max_num_batched_tokens,
            )
        self.tiers = open_tiers(self.config, self.kv, self.executor)
        buckets, eos_token_ids = self.executor.buckets, self.executor.eos_token_ids
        parts = scheduler, self.kv, buckets, model_info.max_model_len, eos_token_ids, model_info.vocab_size
        if recorded_steps is None:
            self.scheduler = Scheduler(
                *parts,
                grammars=grammars,
                tiers=self.tiers,
                images=model_info.images,
                prompt_embeds=model_info.prompt_embeds,
                routed_experts=model_info.routed_experts,
            )
        else:
            self.recorder = Recorder(recorded_steps, model_info.block_size, 1 + len(model_info.windows))
            self.scheduler = RecordedScheduler(self.recorder, *parts, grammars=grammars)
            config = dataclasses.replace(self.config, scheduler=scheduler)
            served = msgspec.structs.replace(model_info, num_kv_blocks=num_blocks or model_info.num_kv_blocks)
            self.shape = shape_of(config, served, buckets, eos_token_ids)
        self.core = EngineCore(self.scheduler, self.executor, depth=int(overlap), tiers=self.tiers)
        self.num_preemptions = self.num_steps = self.num_calls = 0
        self.most_outputs = 0
        """Most requests that one step had tokens of."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_fetched_pages = self.num_fetched_snapshots = 0

    def run(self, requests: list[AddRequest]) -> dict[str, Generated]:
        """Run all requests together, to the end."""
        results = {item.request_id: Generated() for item in requests}
        for item in requests:
            assert self.has_all_options or not needs_other_options(item.sampling), (
                "this engine has few sampling options"
            )
            for output in self.core.handle(item):
                results[output.request_id].add(output)
        while self.core.has_work:
            step = self.core.step()
            if step is None:
                continue
            self.most_outputs = max(self.most_outputs, len(step.outputs))
            for output in step.outputs:
                results[output.request_id].add(output)
            if step.stats is None:  # tokens of a call that goes on
                continue
            self.num_preemptions += step.stats.num_preemptions
            self.num_steps += step.stats.num_steps
            self.num_calls += step.stats.program_calls
            self.num_draft_tokens += step.stats.spec_decode_num_draft_tokens
            self.num_fetched_pages += step.stats.kv_tier_fetched_pages.get("host", 0)
            self.num_fetched_snapshots += step.stats.kv_tier_snapshots.get("host/fetched", 0)
            self.num_accepted_tokens += step.stats.spec_decode_num_accepted_tokens
        return {str(name): generated for name, generated in results.items()}

    def close(self) -> None:
        self.executor.close()


def smollm2_engine() -> ModelEngine:
    """Return the default model, with the kernels that users have."""
    return ModelEngine(
        smollm2_file(), quantization="auto", cpu_kernels="auto", has_all_buckets=True, has_all_options=True, **LIMITS
    )
