"""An engine that embeds with a real model, for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jaxserve.config import CompileConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.executor.local import LocalExecutor
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.runner.buckets import embed_buckets
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.embedding import EmbedScheduler
from jaxserve.scheduler.plan import Buckets
from jaxserve.types import RequestId
from tests.programs import shared_programs


def text(name: str, token_ids: Any, text_pair_start: int | None = None) -> AddRequest:
    """A request of an engine that embeds."""
    ids = [int(token) for token in token_ids]
    return AddRequest(RequestId(name), ids, EngineSamplingParams(), text_pair_start=text_pair_start)


def _largest_bucket(*arguments: Any) -> Buckets:
    table = embed_buckets(*arguments)
    return dataclasses.replace(table, mixed=table.mixed[-1:])


class EmbeddingEngine:
    """Scheduler and executor in this process. It compiles the largest bucket alone, unless it has_all_buckets."""

    def __init__(
        self,
        path: Path,
        *,
        cpu_kernels: Any = "xla",
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        has_all_buckets: bool = False,
        **model: Any,
    ) -> None:
        self.config = Config(
            model=ModelConfig(model=str(path), task="embed", **model),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            parallel=ParallelConfig(tensor_parallel_size=tensor_parallel_size),
            compile=CompileConfig(compile_cache=str(shared_programs()), cpu_kernels=cpu_kernels),
        )
        table = embed_buckets if has_all_buckets else _largest_bucket
        with mock.patch("jaxserve.executor.embedding.embed_buckets", table):
            self.executor = LocalExecutor.start(self.config, path, lambda *_: None)
        self.model_info = self.executor.model_info
        self.scheduler = EmbedScheduler(
            self.config.scheduler, self.executor.buckets, self.model_info.max_model_len, self.model_info.vocab_size
        )
        self.core = EngineCore(self.scheduler, self.executor)
        self.programs: dict[str, int] = {}

    def outputs(self, requests: list[AddRequest]) -> dict[str, RequestOutput]:
        """Run all texts together, to the end."""
        found = {str(output.request_id): output for item in requests for output in self.core.handle(item)}
        while self.core.has_work:
            step = self.core.step()
            if step is not None and step.stats is not None:
                found |= {str(output.request_id): output for output in step.outputs}
                self.programs |= step.stats.bucket_steps
        return found

    def vectors(self, texts: list[Any], text_pair_starts: list[int | None] | None = None) -> list[np.ndarray]:
        """Return the vector of each text, in order."""
        starts = text_pair_starts or [None] * len(texts)
        found = self.outputs([text(str(i), ids, starts[i]) for i, ids in enumerate(texts)])
        vectors = []
        for i in range(len(texts)):
            vector = found[str(i)].vector
            assert vector is not None, found[str(i)]
            vectors.append(np.frombuffer(vector, "<f4"))
        return vectors

    def close(self) -> None:
        self.executor.close()
