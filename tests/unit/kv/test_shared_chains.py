"""Adapters that are loaded while serving share no page with those of another engine that have the same number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig, TierConfig
from jaxserve.engine.process import build_core, build_executor
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.types import BlockHash

TOKENS = np.arange(16, dtype=np.int32)


def page_hash(tiers: TierConfig, adapter: int, salt: str | None = None) -> list[BlockHash]:
    """Return the hash of a prompt's first page in two engines with these settings, one after the other, twice each."""
    model = ModelConfig(model="m", lora_modules="a=/a,b=/b", max_loras=3)
    spec = EngineSpec(config=Config(model=model, tiers=tiers), model_path="/nowhere", address="", executor="fake")
    found = []
    for _ in range(2):
        core: Any = build_core(spec, build_executor(spec, lambda *progress: None))
        found += [core._scheduler._kv.new_table(salt, adapter).chain.hash(0, TOKENS) for _ in range(2)]
        core.tiers.close()
    return found


@pytest.mark.parametrize("salt", [None, "salt"])
def test_only_adapters_of_the_start_have_the_hashes_of_the_engine_before(tmp_path: Path, salt: str | None) -> None:
    disk = TierConfig(kv_offload_dir=str(tmp_path / "kv"))
    hashes = [page_hash(disk, adapter, salt) for adapter in (0, 1, 2, 3)]
    for first, same, other, _ in hashes[:3]:
        assert first == same == other
    first, same, other, last = hashes[3]
    assert first == same != other == last
    assert len({each[0] for each in hashes}) == 4
    memory = TierConfig(kv_offload_memory=1 << 20)
    assert len(set(page_hash(memory, 3, salt))) == 1, "routers compute it from the number"
