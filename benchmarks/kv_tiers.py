"""Measure KV tiers against recomputing: `python benchmarks/kv_tiers.py MODEL`.

Starts one engine in this process and measures, in turns, the time to the first token of a request with a long prompt:
computed from nothing; with its prefix in the device's prefix cache; and with its prefix in host memory, or on disk, only.
Also prints the seconds per page and per token that the rule of `--kv-fetch auto` has found.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from jaxserve.config import CacheConfig, Config, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.process import build_executor, open_tiers
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.manager import KVManager
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId


class Engine:
    """An engine in this process."""

    def __init__(self, model: Path, tiers: TierConfig) -> None:
        config = Config(
            model=ModelConfig(model=str(model), max_model_len=2048),
            cache=CacheConfig(kv_cache_memory=256 << 20),
            scheduler=SchedulerConfig(max_num_seqs=4),
            tiers=tiers,
        )
        executor = build_executor(EngineSpec(config=config, model_path=str(model), address=""), lambda *_: None)
        info = executor.model_info
        self.kv = KVManager(info.num_kv_blocks, info.block_size, info.max_model_len)
        opened = open_tiers(config, self.kv, executor)
        assert opened is not None, "settings with a tier"
        self.tiers = opened
        scheduler = Scheduler(
            config.scheduler,
            self.kv,
            executor.buckets,
            info.max_model_len,
            executor.eos_token_ids,
            info.vocab_size,
            tiers=self.tiers,
        )
        self.core = EngineCore(scheduler, executor, tiers=self.tiers)

    def first_token_s(self, name: str, tokens: list[int]) -> tuple[float, int]:
        """Return the seconds from arrival to the only token, and the cached tokens."""
        params = EngineSamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        if self.core.handle(AddRequest(RequestId(name), tokens, params)):
            raise SystemExit(f"{name} was refused")
        while True:
            step = self.core.step()
            for output in step.outputs if step is not None else ():
                if output.finish_reason is not None:
                    return time.perf_counter() - started, output.num_cached_tokens

    def forget_device(self) -> None:
        """Evict everything from the device, once it is copied."""
        self.tiers.saver.settle()
        self.kv.reset_prefix_cache()


def measure(model: Path, settings: TierConfig, num_tokens: int, num_rounds: int, tier: str) -> None:
    engine = Engine(model, settings)
    seconds: dict[str, list[float]] = {"computed": [], "device": [], tier: []}
    for turn in range(num_rounds + 1):
        tokens = [5 + (7 * i + 1009 * turn) % 40000 for i in range(num_tokens)]
        for state, values in seconds.items():
            if state == tier:
                engine.forget_device()
            elapsed, num_cached = engine.first_token_s(f"{state} {turn}", tokens)
            expected = 0 if state == "computed" else (num_tokens - 1) // 16 * 16
            if num_cached != expected:
                raise SystemExit(f"{state}: {num_cached} tokens were cached, {expected} should be")
            if turn:  # the first is a warm-up
                values.append(elapsed)
    for state, values in seconds.items():
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{state:9} {middle * 1e3:8.1f} ms median, {least * 1e3:.1f} to {most * 1e3:.1f}, {len(values)} rounds")
    page_s, token_s = engine.tiers.rule.page_seconds(tier), engine.tiers.rule.token_seconds
    if page_s is not None and token_s is not None:
        print(f"the rule: {page_s * 1e3:.2f} ms per page, {token_s * 16e3:.2f} ms for its 16 tokens", flush=True)
    engine.tiers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    memory = TierConfig(kv_offload_memory=512 << 20, kv_fetch="always", kv_fetch_timeout=60.0)
    measure(arguments.model, memory, arguments.tokens, arguments.rounds, "host")
    with tempfile.TemporaryDirectory() as folder:
        disk = TierConfig(kv_offload_dir=folder, kv_offload_disk=2 << 30, kv_fetch="always", kv_fetch_timeout=60.0)
        measure(arguments.model, disk, arguments.tokens, arguments.rounds, "disk")


if __name__ == "__main__":
    main()
