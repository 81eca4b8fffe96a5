"""Snapshots of recurrent states leave the device and come back after the pages before them, with the fake model as the oracle.

The fake model raises if a row reads a state that is not that of its text, or a page that is not its own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.fake.pages import FakePages
from jaxserve.kv.prefix import MissingPrefix
from jaxserve.kv.tiers.fetch_plan import FetchPlan, plan_fetch, snapshot_pages
from jaxserve.kv.tiers.host import HostStore
from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout, snapshot_name
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.tools.bench.startup import free_port
from jaxserve.types import BlockHash
from tests.engine.rig import Rig, add, expected, prompt

ALWAYS = TierConfig(kv_offload_memory=1 << 20, kv_fetch="always")
PAGE_BYTES = 32
"""Four tokens of int64."""
SNAPSHOT_BYTES = 16
"""A number of tokens and a sum; a row of host memory holds one."""
RANKS = {"num_ranks": 2, "num_blocks": 66, "num_state_slots": 24}


def hybrid(**options: Any) -> Rig:
    """Return a rig with pages of 4 tokens and snapshots at multiples of 8."""
    return Rig(**{"num_state_slots": 12, "tiers": ALWAYS, **options})


def evict(rig: Rig) -> None:
    """Make the device forget every prefix and snapshot, as if other requests had taken their places."""
    assert rig.tiers is not None
    rig.tiers.settle()
    rig.kv.reset_prefix_cache()
    assert all(len(states.snapshots) == 0 for states in rig.kv.groups.states)


def num_cached(rig: Rig, name: str, tokens: list[int], **options: Any) -> int:
    """Run a request, check its tokens, and return how many of its prompt came from the cache."""
    message = add(name, tokens, max_tokens=4, **options)
    assert rig.run(message)[name] == expected(message)
    return rig.ends[message.request_id].num_cached_tokens


@pytest.mark.parametrize("options", [{}, RANKS], ids=["one rank", "two ranks"])
def test_evicted_snapshot_comes_back_with_the_pages_before_it(options: dict[str, int]) -> None:
    rig = hybrid(**options)
    assert num_cached(rig, "first", prompt(40)) == 0
    evict(rig)
    assert num_cached(rig, "again", prompt(40)) == 32, "a chunk of the first request ended there"
    stats = rig.scheduler.take_stats()
    assert stats.kv_tier_fetched_pages == {"host": 8}
    assert stats.kv_tier_snapshots["host/fetched"] == 1
    assert stats.kv_tier_bytes["host/out"] == 8 * PAGE_BYTES + SNAPSHOT_BYTES


def test_snapshot_alone_comes_back_where_the_device_has_the_pages() -> None:
    rig = hybrid()
    num_cached(rig, "first", prompt(40))
    assert rig.tiers is not None
    rig.tiers.settle()
    rig.kv.groups.forget()
    rig.scheduler.take_stats()
    assert num_cached(rig, "again", prompt(40)) == 32
    stats = rig.scheduler.take_stats()
    assert (stats.kv_tier_fetched_pages, stats.kv_tier_snapshots) == ({}, {"host/fetched": 1})


def test_pages_that_no_snapshot_follows_are_not_fetched() -> None:
    rig = hybrid(max_num_batched_tokens=32)
    num_cached(rig, "first", prompt(30))  # one chunk, which is no snapshot's place
    evict(rig)
    assert num_cached(rig, "again", prompt(30)) == 0
    assert rig.scheduler.take_stats().kv_tier_fetched_pages == {}


def test_prefix_that_only_a_tier_has_gets_a_snapshot_from_the_second_request() -> None:
    rig = hybrid(max_num_batched_tokens=64, max_model_len=128)
    stem = prompt(40)
    found = []
    for number in range(3):
        found.append(num_cached(rig, f"r{number}", [*stem, *prompt(9, 60 + number)]))
        evict(rig)
    assert found == [0, 0, 40]


def test_other_salt_finds_no_snapshot() -> None:
    rig = hybrid()
    num_cached(rig, "first", prompt(40), salt="a")
    evict(rig)
    assert num_cached(rig, "other", prompt(40), salt="b") == 0
    evict(rig)
    assert num_cached(rig, "same", prompt(40), salt="a") == 32


def test_end_of_a_request_looks_for_snapshots_only_where_there_can_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 24 pages, which has 12 places of snapshots, is found on the device."""
    rig = hybrid()
    num_cached(rig, "first", prompt(96))
    assert rig.tiers is not None
    saver = rig.tiers._snapshot_saver
    assert saver is not None
    rig.tiers.settle()
    calls = dict.fromkeys(("_find", "is_coming"), 0)

    def count(name: str) -> None:
        method = getattr(saver, name)

        def counted(block_hash: BlockHash) -> object:
            calls[name] += 1
            return method(block_hash)

        monkeypatch.setattr(saver, name, counted)

    for name in calls:
        count(name)
    assert num_cached(rig, "again", prompt(96)) > 0
    rig.tiers.settle()
    assert 0 < calls["_find"] <= 12
    assert calls["is_coming"] == 0, "the stores have the snapshots that the device has"


def test_reset_clears_the_snapshots_of_the_tiers() -> None:
    rig = hybrid()
    num_cached(rig, "first", prompt(40))
    evict(rig)
    rig.scheduler.reset_prefix_cache()
    assert num_cached(rig, "cold", prompt(40)) == 0


def test_snapshots_survive_a_failed_step_in_the_tier() -> None:
    rig = hybrid(fail_at_steps=frozenset({8}))
    assert num_cached(rig, "first", prompt(40)) == 0
    assert rig.tiers is not None
    rig.tiers.settle()
    rig.send(add("lost", prompt(30, 50), max_tokens=9))
    while rig.core.has_work:
        step = rig.core.step()
        rig.collect(step.outputs if step is not None else [])
    assert all(len(states.snapshots) == 0 for states in rig.kv.groups.states)
    assert num_cached(rig, "again", prompt(40)) == 32


def test_preempted_request_returns_at_a_snapshot_from_host_memory() -> None:
    """Two requests outgrow a pool that holds one of them; the second gives way, and its snapshots are evicted before it returns."""
    rig = hybrid(num_blocks=18, max_num_seqs=2)
    assert rig.tiers is not None
    requests = [add(name, prompt(24, first), max_tokens=24) for name, first in (("a", 3), ("b", 60))]
    rig.send(*requests)
    while not rig.scheduler.stats.num_preemptions:
        rig.step()
        rig.tiers.settle()
    rig.kv.reset_prefix_cache()
    rig.finish()
    assert [rig.tokens[request.request_id] for request in requests] == [expected(request) for request in requests]
    assert rig.scheduler.take_stats().kv_tier_snapshots["host/fetched"]


@pytest.mark.parametrize("options", [{"num_blocks": 24}, {"num_ranks": 2, "num_blocks": 44}], ids=["one", "two ranks"])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_get_the_tokens_of_an_engine_without_tiers(seed: int, options: dict[str, int]) -> None:
    """Pools, slots and host memory are all too small, with aborts, resets and steps in flight."""
    rng = random.Random(seed)
    rig = hybrid(
        tiers=TierConfig(kv_offload_memory=40 * PAGE_BYTES, kv_fetch="always"),
        num_state_slots=7 * options.get("num_ranks", 1),
        max_num_seqs=4,
        depth=seed % 2,
        max_decode_steps=1 + seed // 2,
        max_model_len=80,
        **options,
    )
    assert rig.tiers is not None
    messages = {}
    for number in range(80):
        shared = prompt(rng.choice([8, 16, 24, 40, 48]), first=rng.choice([3, 40, 77]))
        own = [rng.randrange(3, 100) for _ in range(rng.randrange(1, 12))]
        message = add(f"r{number}", shared + own, max_tokens=rng.randrange(1, 9), salt=rng.choice([None, None, "x"]))
        messages[message.request_id] = message
        rig.send(message)
        for _ in range(rng.randrange(6)):
            rig.step()
        if rng.random() < 0.1 and message.request_id not in rig.ends:
            rig.collect(rig.scheduler.abort([message.request_id]))
        if rng.random() < 0.05:
            rig.scheduler.reset_prefix_cache()
        if rng.random() < 0.7:
            rig.tiers.settle()
    rig.finish()
    for request_id, message in messages.items():
        assert rig.tokens[request_id] == expected(message)[: len(rig.tokens[request_id])]
        assert rig.ends[request_id].finish_reason in ("length", "abort")
    for number, first in enumerate((5, 50, 5)):
        assert num_cached(rig, f"last{number}", prompt(60, first)) % 8 == 0
        rig.tiers.settle()
        rig.kv.reset_prefix_cache()
    snapshots = rig.scheduler.take_stats().kv_tier_snapshots
    assert all(snapshots[f"host/{event}"] for event in ("stored", "fetched", "evicted"))


def test_decode_engine_begins_at_a_snapshot_of_a_prefill_engine() -> None:
    address = f"127.0.0.1:{free_port()}"
    prefill = hybrid(tiers=TierConfig(kv_offload_memory=1 << 20, kv_listen=address))
    decode = hybrid(tiers=TierConfig(kv_peers=address, kv_fetch="always", kv_fetch_timeout=60.0))
    assert prefill.tiers is not None
    assert decode.tiers is not None
    num_cached(prefill, "prompt", prompt(40))
    assert num_cached(decode, "reply", prompt(40)) == 32
    assert num_cached(decode, "other", prompt(40, 50)) == 0
    stats = decode.scheduler.take_stats()
    assert (stats.kv_tier_fetched_pages, stats.kv_tier_snapshots) == ({"peer": 8}, {"peer/fetched": 1})
    prefill.tiers.close()
    decode.tiers.close()


def test_engine_finds_its_snapshot_on_disk_after_a_restart(tmp_path: Path) -> None:
    config = TierConfig(kv_offload_dir=str(tmp_path / "kv"), kv_fetch="always")
    for cached in (0, 32):
        rig = hybrid(tiers=config)
        assert rig.tiers is not None
        assert num_cached(rig, "r", prompt(40)) == cached
        rig.tiers.settle()
        rig.tiers.close()


LAYOUT = PageLayout(
    "model",
    "int8",
    (CacheBlock("full 0", "k", 5), CacheBlock("full 0", "v", 3)),
    snapshot=PageLayout("model", "states", (CacheBlock("state 1", "0", 9), CacheBlock("state 1", "1", 10))),
)
NAMES = [BlockHash(bytes([i]) * 32) for i in range(6)]
STATES = [snapshot_name(name) for name in NAMES]


def content(name: BlockHash) -> Page:
    size = LAYOUT.of(name).num_bytes
    return LAYOUT.of(name).views(np.random.default_rng([*name]).integers(0, 256, size, np.uint8))


def test_snapshots_and_pages_share_the_budget_of_host_memory() -> None:
    """A snapshot takes three rows of eight bytes; what was not used for longest makes place."""
    stats = TierStats()
    store = HostStore(LAYOUT, 5 * 8 + 3, stats)
    for name in (NAMES[0], STATES[0], NAMES[1]):
        store.put(name, content(name))
    target = [LAYOUT.of(name).new_page() for name in (NAMES[0], STATES[0])]
    assert store.get([NAMES[0], STATES[0]], target) == 2
    assert store.touch([NAMES[0], STATES[0]]) == []
    store.put(NAMES[2], content(NAMES[2]))  # takes the row of page 1
    for name, found in zip((NAMES[0], STATES[0]), target, strict=True):
        assert [block.tobytes() for block in found] == [block.tobytes() for block in content(name)]
    assert [store.num_leading([name]) for name in NAMES[:3]] == [1, 0, 1]
    store.put(STATES[1], content(STATES[1]))  # takes the rows of page 0 and of the snapshot before
    assert store.find_first([STATES[0], NAMES[0], NAMES[2], STATES[1]]) == 2
    assert store.get([STATES[1]], [target[1]]) == 1
    assert [block.tobytes() for block in target[1]] == [block.tobytes() for block in content(STATES[1])]
    counts = stats.take()
    assert (counts.evicted_pages, counts.snapshots) == ({"host": 2}, {"host/stored": 2, "host/evicted": 1})


def test_a_snapshot_takes_few_rows_where_pages_are_tiny() -> None:
    """Models without attention have pages of some bytes; a page then takes the row of a part of a snapshot."""
    states = CacheBlock("state 1", "0", 5000)
    layout = PageLayout("model", "int8", (CacheBlock("full 0", "k", 2),), snapshot=PageLayout("model", "s", (states,)))
    assert (layout.row_bytes, snapshot_pages(layout)) == (5, 1000)
    store = HostStore(layout, 1002 * layout.row_bytes, TierStats())
    page, taken = (layout.of(name).new_page() for name in (NAMES[0], STATES[0]))
    page[0][:], taken[0][:] = (7, 8), np.arange(5000) % 251
    for name, own in ((NAMES[0], page), (STATES[0], taken)):
        store.put(name, own)
        found = layout.of(name).new_page()
        assert store.get([name], [found]) == 1
        assert found[0].tobytes() == own[0].tobytes()
    assert store.num_leading([NAMES[0]]) == 1


def test_memory_below_a_page_and_a_snapshot_is_refused() -> None:
    with pytest.raises(ConfigError, match="one KV page takes 8 bytes, and a snapshot of recurrent states 19"):
        HostStore(LAYOUT, 26, TierStats())


def test_plan_ends_at_the_longest_snapshot_that_pages_reach() -> None:
    store = HostStore(LAYOUT, 1 << 10, TierStats())
    missing = MissingPrefix(NAMES, 1, ends=(6, 4, 2))
    assert plan_fetch([store], missing) is None
    for name in NAMES[1:5]:
        store.put(name, content(name))
    assert (plan_fetch([store], missing), missing.num_found) == (None, 5)
    for index in (1, 5):
        store.put(STATES[index], content(STATES[index]))
    assert plan_fetch([store], missing) == FetchPlan(2, ("host",), "host"), "page 6 is missing for the longest"
    store.put(STATES[3], content(STATES[3]))
    plan = plan_fetch([store], missing)
    assert plan == FetchPlan(4, ("host",) * 3, "host")
    assert len(plan.costs(LAYOUT)) == 3 + 3, "a snapshot has the bytes of three pages"
    kept = MissingPrefix(NAMES, 1, ends=(6, 4, 2), kept_ends=frozenset({4}))
    assert plan_fetch([store], kept) == FetchPlan(4, ("host",) * 3), "its snapshot is on the device"


def test_fake_device_refuses_a_page_of_another_rank() -> None:
    pages = FakePages(np.zeros((8, 4), np.int64), num_ranks=2)
    copies = pages.read([1])  # type: ignore[list-item]
    with pytest.raises(Exception, match="5 is written with a page for rank 0"):
        pages.write([5], pages.stage(copies.pages(), 0))  # type: ignore[list-item]
