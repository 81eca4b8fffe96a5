"""Tests of what each engine of one model is given of its own."""

from __future__ import annotations

import pytest

from jaxserve.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RecorderConfig,
    ServerConfig,
    TierConfig,
)
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import ModelInfo
from jaxserve.runtime.engine_supervisor import with_cache_of
from jaxserve.runtime.replicas import spec_of


@pytest.mark.parametrize(
    ("listen", "ports"),
    [("10.0.0.1:7001", ["10.0.0.1:7001", "10.0.0.1:7003"]), ("[::1]:7001", ["[::1]:7001", "[::1]:7003"])],
)
def test_each_engine_listens_for_peers_on_a_port_of_its_own(listen: str, ports: list[str]) -> None:
    config = Config(model=ModelConfig(model="model"), tiers=TierConfig(kv_listen=listen, kv_offload_memory=1))
    spec = EngineSpec(config=config, model_path="model", address="ipc:///tmp/engine")
    specs = [spec_of(spec, replica) for replica in (0, 2)]
    assert [each.config.tiers.kv_listen for each in specs] == ports
    assert len({each.address for each in specs}) == 2 and all(each.publishes_pages for each in specs)


def test_replicas_with_the_same_peers_do_not_ask_themselves() -> None:
    tiers = TierConfig(kv_listen="10.0.0.1:7001", kv_peers="10.0.0.1:7001, 10.0.0.1:7002", kv_offload_memory=1)
    assert tiers.for_replica(0).peers == ["10.0.0.1:7002"]
    assert tiers.for_replica(1).peers == ["10.0.0.1:7001"]


def model_info(platform: str) -> ModelInfo:
    sizes = {
        "vocab_size": 8,
        "max_model_len": 8,
        "num_kv_blocks": 2,
        "block_size": 8,
        "max_num_seqs": 1,
        "num_devices": 1,
    }
    return ModelInfo(**sizes, kv_dtype="float32", platform=platform, fingerprint="0", kv_cache_bytes=1 << 20)


@pytest.mark.parametrize(
    ("platform", "replicas", "given", "expected"),
    [
        ("cpu", 2, None, 1 << 20),
        ("cpu", 2, 1 << 30, 1 << 30),
        ("cpu", 1, None, None),
        ("gpu", 2, None, None),
    ],
)
def test_replicas_on_cpus_have_the_cache_size_that_the_first_has_measured(
    platform: str, replicas: int, given: int | None, expected: int | None
) -> None:
    config = Config(
        model=ModelConfig(model="model"),
        cache=CacheConfig(kv_cache_memory=given),
        parallel=ParallelConfig(replicas=replicas),
    )
    spec = EngineSpec(config=config, model_path="model", address="ipc:///tmp/engine")
    assert with_cache_of(spec, None) == spec
    assert with_cache_of(spec, model_info(platform)).config.cache.kv_cache_memory == expected


def test_each_engine_writes_profiles_and_flight_records_to_a_folder_of_its_own() -> None:
    """Profiles of one second have one name, and of flight records the last of a folder stay."""
    server, recorder = ServerConfig(profile_dir="/p"), RecorderConfig(flight_recorder_dir="/f")
    spec = EngineSpec(
        config=Config(model=ModelConfig(model="model"), server=server, recorder=recorder),
        model_path="model",
        address="ipc:///tmp/engine",
    )
    configs = [spec_of(spec, replica).config for replica in (0, 2)]
    assert [each.server.profile_dir for each in configs] == ["/p/replica-0", "/p/replica-2"]
    assert [each.recorder.flight_recorder_dir for each in configs] == ["/f/replica-0", "/f/replica-2"]
    without = EngineSpec(config=Config(model=ModelConfig(model="model")), model_path="model", address="ipc:///tmp/e")
    config = spec_of(without, 1).config
    assert config.server.profile_dir is None
    assert config.recorder.flight_recorder_dir == "~/.cache/jaxserve/flight/replica-1"
