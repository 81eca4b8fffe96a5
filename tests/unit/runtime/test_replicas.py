"""Tests of what each engine of one model is given of its own."""

from __future__ import annotations

import pytest

from jaxserve.config import Config, ModelConfig, TierConfig
from jaxserve.ipc.engine_spec import EngineSpec
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
