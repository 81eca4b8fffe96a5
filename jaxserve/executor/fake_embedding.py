"""An executor whose vectors can be computed by hand, for tests that need an engine but no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.config import Config
from jaxserve.executor.fake import powers_of_two
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.ipc.messages import EmbeddingInfo, ModelInfo
from jaxserve.runner.buckets import resolve_embed_limits
from jaxserve.scheduler.embed_plan import EmbedPlan, EmbedResult
from jaxserve.scheduler.plan import Buckets


def fake_vector(token_ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """How many of the tokens leave each remainder when divided by `size`."""
    return np.bincount(np.asarray(token_ids) % size, minlength=size).astype(np.float32)


@dataclass(frozen=True, slots=True)
class FakeVectors:
    """A step that is computed when its result is asked for."""

    plan: EmbedPlan
    size: int
    is_failing: bool

    def is_done(self) -> bool:
        return True

    def result(self) -> EmbedResult:
        if self.is_failing:
            raise RuntimeError("this step fails as told")
        texts = np.split(self.plan.token_ids, np.cumsum(self.plan.num_text_tokens)[:-1])
        return EmbedResult(np.stack([fake_vector(text, self.size) for text in texts]), 0.0)


class FakeEmbeddingExecutor:
    """An executor of texts without a device."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, config: Config, options: FakeOptions) -> None:
        limits = resolve_embed_limits("cpu", config.scheduler, config.model.max_model_len)
        self._options = options
        self._num_steps = 0
        self.buckets = Buckets((), powers_of_two(limits.max_num_batched_tokens), limits.max_num_seqs)
        longest = min(options.max_model_len, limits.max_num_batched_tokens)
        self.model_info = ModelInfo(
            vocab_size=options.vocab_size,
            max_model_len=min(config.model.max_model_len or longest, longest),
            num_kv_blocks=0,
            block_size=config.cache.block_size,
            max_num_seqs=limits.max_num_seqs,
            kv_dtype="int64",
            platform="fake",
            num_devices=1,
            fingerprint="0000fa4e",
            embedding=EmbeddingInfo(options.embedding_size, "mean", normalizes=True),
        )

    def submit(self, plan: EmbedPlan) -> FakeVectors:
        if plan.bucket not in self.buckets.mixed or plan.num_tokens > plan.bucket:
            raise ValueError(f"there is no program for {plan.num_tokens} tokens in embed/{plan.bucket}")
        is_failing = self._num_steps in self._options.fail_at_steps
        self._num_steps += 1
        return FakeVectors(plan, self._options.embedding_size, is_failing)

    def compilations(self) -> dict[str, int]:
        """As if every program had been compiled at the start."""
        return {"warmup": len(self.buckets.mixed), "serving": 0}

    def close(self) -> None:
        """There is nothing to release."""
