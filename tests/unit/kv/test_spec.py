from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kv.spec import KVSpec

SPEC = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=4, block_size=16)


def test_page_holds_keys_and_values_of_all_layers() -> None:
    assert SPEC.bytes_per_block == 2 * 30 * 3 * 64 * 4 * 16


def test_pages_are_rounded_down() -> None:
    assert SPEC.num_blocks_for(10 * SPEC.bytes_per_block - 1) == 9


def test_memory_for_less_than_two_pages_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-memory of 100 bytes .* 737280 bytes"):
        SPEC.num_blocks_for(100)
