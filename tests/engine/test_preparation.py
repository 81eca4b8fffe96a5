"""The preparation of an engine, before its weights are read."""

from __future__ import annotations

import pytest

from jaxserve.config import CompileConfig, Config, ModelConfig, ParallelConfig
from jaxserve.executor import preparation
from jaxserve.models.registry import read_decoder
from tests.models.goldens import golden_checkpoint


def test_devices_of_a_cpu_all_take_their_weights_from_its_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def kv_cache_bytes(
        config: object, device: object, kv_shards: int, weight_bytes: int, whole: int, num_replicas: int
    ) -> int:
        taken.append(weight_bytes)
        return 1 << 20

    monkeypatch.setattr(preparation, "kv_cache_bytes", kv_cache_bytes)
    path = golden_checkpoint("llama2_tiny").path
    decoder, _ = read_decoder(path)
    for size in (1, 2):
        parallel, compiling = ParallelConfig(tensor_parallel_size=size), CompileConfig(cpu_kernels="xla")
        preparation.prepare(Config(model=ModelConfig(model=str(path)), parallel=parallel, compile=compiling), decoder)
    assert taken[0] <= taken[1] < 2 * taken[0], "matrices are split, vectors are on both"


def test_the_longest_text_of_a_server_chooses_longropes_divisors() -> None:
    path = golden_checkpoint("phi3_longrope_tiny").path
    decoder, _ = read_decoder(path)
    found = {}
    for length in (None, 32, 33):
        config = Config(model=ModelConfig(model=str(path), max_model_len=length))
        prepared = preparation.prepare(config, decoder)
        found[length] = (prepared.skeleton.config.max_position, prepared.limits.max_model_len)
    assert found == {None: (32, 32), 32: (32, 32), 33: (512, 33)}
