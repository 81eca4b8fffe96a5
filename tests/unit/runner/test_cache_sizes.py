"""Pages of windows and slots of states: what a budget buys, what a request holds, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.config import (
    Config,
    HostsConfig,
    ModelConfig,
    ParallelConfig,
    TierConfig,
)
from jaxserve.errors import DoesNotFitError
from jaxserve.kv.spec import KVSpec
from jaxserve.kv.windows import WindowPages
from jaxserve.model_config.cache import CacheGroup, CachePlace, LayerCache, LayerPlaces, StateArray, cache_layout
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ShortConvConfig
from jaxserve.runner.backend import Chip
from jaxserve.runner.cache_sizes import context_bytes, divide_cache, request_pages, with_cache_groups
from jaxserve.runner.limits import kv_context_bytes, kv_specs, make_limits, make_policy

GEMMA = DecoderConfig(
    vocab_size=262_208,
    hidden_size=5376,
    intermediate_size=21_504,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    layers=tuple(LayerConfig(sliding_window=None if index % 6 == 5 else 1024) for index in range(62)),
    max_position=131_072,
    norm_eps=1e-6,
    rope_theta=1e6,
)
"""Gemma 3 27B."""
CONFIG = Config(model=ModelConfig(model="any", max_model_len=32_768, dtype="bfloat16"))
GROWING = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=4, block_size=16)
SLIDING = replace(GROWING, num_layers=5, window=100)


def test_a_request_of_32k_tokens_needs_a_fifth_of_the_memory_in_gemma_3() -> None:
    split, whole = (kv_specs(CONFIG, model, "gpu") for model in (with_cache_groups(CONFIG, GEMMA), GEMMA))
    assert [(spec.num_layers, spec.window) for spec in split] == [(10, None), (52, 1024)]
    assert [(spec.num_layers, spec.window) for spec in whole] == [(62, None)]
    before, after = (
        sum(spec.bytes_per_block * request_pages(spec, 32_768) for spec in specs) for specs in (whole, split)
    )
    assert round(1 - after / before, 3) == 0.812
    budget = divide_cache(60 << 30, split, 0, longest=32_768, max_num_seqs=256, max_chunk=2048)
    assert budget.num_requests(32_768) == 10
    assert (60 << 30) // whole[0].bytes_per_block // 2048 == 3


@pytest.mark.parametrize("slot_bytes", [0, 10_000])
@pytest.mark.parametrize("longest", [90, 101, 1000, 20_000])
def test_what_is_divided_fits_and_holds_the_longest_window(longest: int, slot_bytes: int) -> None:
    for num_bytes in range(400_000, 30_000_000, 1_111_111):
        sizes = divide_cache(num_bytes, (GROWING, SLIDING), slot_bytes, longest=longest, max_num_seqs=8, max_chunk=40)
        assert sizes.num_bytes <= num_bytes
        assert sizes.num_blocks[0] <= 8 * -(-longest // 16) + 1
        assert sizes.num_state_slots >= 4 * bool(slot_bytes)
        WindowPages(sizes.num_blocks[1], 16, 100, 40)  # raises if it holds no request
    with pytest.raises(DoesNotFitError, match="is too small"):
        divide_cache(50_000, (GROWING, SLIDING), slot_bytes, longest=longest, max_num_seqs=8, max_chunk=40)


@pytest.mark.parametrize("slot_bytes", [0, 10_000])
@pytest.mark.parametrize("longest", [90, 101, 1000, 20_000])
@pytest.mark.parametrize("specs", [(GROWING,), (GROWING, SLIDING), (GROWING, SLIDING, GROWING)])
def test_the_bytes_of_a_whole_context_hold_it(specs: tuple[KVSpec, ...], longest: int, slot_bytes: int) -> None:
    needed = context_bytes(specs, slot_bytes, longest=longest, max_num_seqs=8, max_chunk=40)
    sizes = divide_cache(needed, specs, slot_bytes, longest=longest, max_num_seqs=8, max_chunk=40)
    assert sizes.num_blocks[0] - 1 >= -(-longest // 16)


def test_a_cache_for_the_whole_context_shortens_none() -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, max_model_len=None))
    for model in (GEMMA, LATENT, TWO_SHAPES, HYBRID):
        decoder = with_cache_groups(config, model)
        policy = make_policy(config, decoder, Chip("cpu", None))
        needed = kv_context_bytes(config, decoder, policy, "cpu")
        assert make_limits(config, decoder, policy, "cpu", needed).max_model_len == model.max_position
        assert make_limits(config, decoder, policy, "cpu", needed // 2).max_model_len < model.max_position


def test_windows_that_no_context_outgrows_are_not_split() -> None:
    short = replace(CONFIG, model=replace(CONFIG.model, max_model_len=1024))
    assert not with_cache_groups(short, GEMMA).splits_windows
    every = replace(GEMMA, layers=(LayerConfig(sliding_window=8),) * 2, splits_windows=True)
    assert [group.kind for group in every.cache.groups] == ["full"], "no other layer keeps all pages"


def test_layers_that_share_and_layers_with_two_kinds_have_their_places() -> None:
    full, state = CacheGroup("full", head_dim=8), CacheGroup("state", arrays=(StateArray("conv", (4, 3)),))
    sliding = CacheGroup("sliding", head_dim=8, window=16)
    layout = cache_layout(
        [LayerCache(sliding, state), LayerCache(full), LayerCache(None, state), LayerCache(full, source=1)]
    )
    assert [(group.kind, group.layers, group.table) for group in layout.groups] == [
        ("full", (1,), 0),
        ("sliding", (0,), 1),
        ("state", (0, 2), 0),
    ]
    assert layout.num_tables == 2
    assert layout.places == (
        LayerPlaces(CachePlace(1, 0), CachePlace(2, 0)),
        LayerPlaces(CachePlace(0, 0)),
        LayerPlaces(None, CachePlace(2, 1)),
        LayerPlaces(CachePlace(0, 0, is_owner=False)),
    )


def test_a_model_without_attention_has_pages_of_one_number_a_token() -> None:
    state = CacheGroup("state", arrays=(StateArray("conv", (4, 3)),))
    layout = cache_layout([LayerCache(None, state)] * 2)
    assert [(group.kind, group.layers, group.num_layers) for group in layout.groups] == [
        ("full", (), 1),
        ("state", (0, 1), 2),
    ]
    assert layout.places == (LayerPlaces(None, CachePlace(1, 0)), LayerPlaces(None, CachePlace(1, 1)))


LATENT = replace(GEMMA, layers=(LayerConfig(latent_dim=576),) * 2)
TWO_SHAPES = replace(GEMMA, layers=(LayerConfig(), LayerConfig(head_dim=32)))
HYBRID = replace(GEMMA, layers=(LayerConfig(recurrent=ShortConvConfig(4, 3, has_bias=False)), LayerConfig()))
TIERS = {"tiers": TierConfig(kv_offload_memory=1 << 20)}
RANKS = {"parallel": ParallelConfig(data_parallel_size=2)}
HOSTS = {
    "hosts": HostsConfig(num_hosts=2, host_rank=0, coordinator="a:1"),
    "parallel": ParallelConfig(tensor_parallel_size=2),
}


def test_data_ranks_have_equal_shares_of_pages_and_state_slots() -> None:
    budget = 256 << 20
    found = {}
    for num_ranks in (1, 4):
        model = replace(CONFIG.model, max_model_len=4096)
        config = replace(CONFIG, model=model, parallel=ParallelConfig(data_parallel_size=num_ranks))
        policy = make_policy(config, HYBRID, Chip("cpu", None))
        found[num_ranks] = make_limits(config, HYBRID, policy, "cpu", budget * num_ranks)
    one, four = found[1].cache, found[4].cache
    assert four.num_blocks == tuple(4 * count for count in one.num_blocks)
    assert four.num_state_slots == 4 * one.num_state_slots > 4
    assert four.num_bytes == 4 * one.num_bytes
    assert found[4].num_usable_blocks == 4 * found[1].num_usable_blocks
    assert found[4].max_model_len == found[1].max_model_len, "a request has the pages of one rank"
    assert four.num_requests(4096) == 4 * one.num_requests(4096) > 0


def test_windows_keep_all_pages_on_data_ranks_and_with_tiers() -> None:
    assert with_cache_groups(replace(CONFIG, **HOSTS), GEMMA).splits_windows
    for settings in (RANKS, TIERS):
        assert not with_cache_groups(replace(CONFIG, **settings), GEMMA).splits_windows
