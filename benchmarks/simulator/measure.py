"""Measures a table of step times: the real engine on this machine, with its real scheduler, under a mixed load."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulator.step_times import EngineShape, ProgramTimes, StepTable, mixed_work
from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.process import build_core, build_executor
from jaxserve.executor.protocol import Executor, Pending
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.stats import EngineStats
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.types import RequestId

_CONCURRENCY = (1, 2, 3, 4, 8, 12, 16, 24, 32)
_PROMPT_TOKENS, _OUTPUT_TOKENS = (16, 900), (8, 24)
_NUM_REFITS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: its features are 1, tokens, keys and pairs."""

    program: str
    features: tuple[int, int, int, int]
    seconds: float


class _Watched:
    """A step under way, whose time is noted when it is read."""

    def __init__(self, pending: Pending[StepResult], plan: StepPlan, samples: list[Sample]) -> None:
        self._pending = pending
        self._plan = plan
        self._samples = samples

    def is_done(self) -> bool:
        return self._pending.is_done()

    def next_tokens(self) -> np.ndarray | None:
        return self._pending.next_tokens()

    def result(self) -> StepResult:
        result = self._pending.result()
        plan, num_steps = self._plan, result.num_steps
        work, num_rows = mixed_work(plan), len(plan.request_ids)
        num_keys = work.num_keys + num_rows * (num_steps - 1) // 2  # of the step in the middle of the call
        features = (1, work.num_tokens, num_keys, work.num_pairs)
        self._samples.append(Sample(f"{plan.kind}/{plan.bucket}", features, result.device_seconds / num_steps))
        return result


class WatchedExecutor:
    """An executor that notes the work and the device time of every step."""

    def __init__(self, executor: Executor[StepPlan, StepResult]) -> None:
        self._executor = executor
        self.model_info = executor.model_info
        self.eos_token_ids = executor.eos_token_ids
        self.buckets = executor.buckets
        self.weights = executor.weights
        self.pages = executor.pages
        self.snapshots = executor.snapshots
        self.samples: list[Sample] = []

    def submit(self, plan: StepPlan) -> _Watched:
        return _Watched(self._executor.submit(plan), plan, self.samples)

    def add_stats(self, stats: EngineStats) -> None:
        self._executor.add_stats(stats)

    def profile(self, is_on: bool) -> None:
        self._executor.profile(is_on)

    def close(self) -> None:
        self._executor.close()


def measure(config: Config, *, title: str, num_rounds: int = 2) -> StepTable:
    """Run the model of `config` on this machine and return the table of its steps. Raises StartupError."""
    spec = EngineSpec(config=config, model_path=str(resolve(config.model.model, config.model.revision)), address="")
    executor = WatchedExecutor(build_executor(spec, lambda *progress: None))
    try:
        core = build_core(spec, executor)
        for seed in range(num_rounds):
            for concurrency in _CONCURRENCY:
                _load(core, executor.model_info.vocab_size, concurrency, random.Random(f"{seed}/{concurrency}"))
    finally:
        executor.close()
    info, buckets = executor.model_info, executor.buckets
    return StepTable(
        title=title,
        source="measured",
        method=f"Least squares over {len(executor.samples)} steps of the real engine; after each of {_NUM_REFITS} fits "
        "the steps that took over 1.2 times as long as fitted were dropped, since other programs ran beside it.",
        engine=EngineShape(
            decode_buckets=buckets.decode,
            mixed_buckets=buckets.mixed,
            max_num_seqs=buckets.max_num_seqs,
            max_decode_steps=buckets.max_decode_steps,
            num_kv_blocks=info.num_kv_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        ),
        programs=fit_programs(executor.samples),
    )


def _load(core: EngineCore, vocab_size: int, concurrency: int, chance: random.Random) -> None:
    """Run twice as many requests as run together, without hits in the prefix cache."""
    num_left, num_running = 2 * concurrency, 0
    while num_left or num_running:
        while num_left and num_running < concurrency:
            prompt = [chance.randrange(vocab_size) for _ in range(chance.randint(*_PROMPT_TOKENS))]
            sampling = EngineSamplingParams(
                temperature=0.0, max_tokens=chance.randint(*_OUTPUT_TOKENS), ignore_eos=True
            )
            core.handle(AddRequest(RequestId(f"{concurrency}/{num_left}"), prompt, sampling))
            num_left, num_running = num_left - 1, num_running + 1
        step = core.step()
        outputs: Sequence[Any] = () if step is None else step.outputs
        num_running -= sum(output.finish_reason is not None for output in outputs)


def fit_programs(samples: Sequence[Sample]) -> dict[str, ProgramTimes]:
    """Return the coefficients of every program that was run."""
    by_program: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_program[sample.program].append(sample)
    return {name: _fit(by_program[name]) for name in sorted(by_program)}


def _fit(samples: Sequence[Sample]) -> ProgramTimes:
    features = np.array([sample.features for sample in samples], float)
    seconds = np.array([sample.seconds for sample in samples])
    for _ in range(_NUM_REFITS):
        weights = _non_negative(features, seconds)
        is_kept = seconds <= 1.2 * (features @ weights)
        if is_kept.sum() < len(weights):
            break
        features, seconds = features[is_kept], seconds[is_kept]
    fixed_s, *others = _non_negative(features, seconds)
    return ProgramTimes(max(float(fixed_s), 1e-6), *(float(each) for each in others))


def _non_negative(features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the least-squares weights, leaving out the feature with the most negative one until none is."""
    used = list(range(features.shape[1]))
    scale = np.maximum(features.max(axis=0), 1.0)
    while True:
        found = np.linalg.lstsq(features[:, used] / scale[used], seconds, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            weights = np.zeros(features.shape[1])
            weights[used] = np.maximum(found, 0.0) / scale[used]
            return weights
        del used[int(found.argmin())]


def default_config() -> Config:
    """Return the settings of the default model."""
    from jaxserve.config import ModelConfig
    from jaxserve.runtime.environment import default_model

    return Config(model=ModelConfig(model=str(Path(default_model()))))
