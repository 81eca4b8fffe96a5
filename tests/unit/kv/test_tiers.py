"""Pages leave the device and come back: stores, copies, fetches, and the rule, with the fake model as the oracle.

The fake model reads each request's whole past back from the pages, so a wrong, lost or mixed-up page gives a wrong token.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.fake.pages import FakeCopies, FakePages
from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import BlockTable
from jaxserve.kv.manager import KVManager
from jaxserve.kv.prefix import MissingPrefix
from jaxserve.kv.tiers.fetcher import PageFetcher
from jaxserve.kv.tiers.host import HostStore
from jaxserve.kv.tiers.page import Page, PageLayout
from jaxserve.kv.tiers.rule import FetchRule
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash, BlockId, RequestId
from tests.engine.rig import Rig, add, expected, prompt

ALWAYS = TierConfig(kv_offload_memory=1 << 20, kv_fetch="always")
PAGE_BYTES = 32
"""Four tokens of int64."""


def evict(rig: Rig) -> None:
    """Make the device forget every prefix, as if other requests had taken the pages."""
    assert rig.tiers is not None
    rig.tiers.saver.settle()
    rig.kv.reset_prefix_cache()


def test_evicted_prefix_comes_back_from_host_memory_with_the_same_tokens() -> None:
    rig = Rig(tiers=ALWAYS)
    first = add("first", prompt(30), max_tokens=4)
    rig.run(first)
    evict(rig)
    again = add("again", prompt(30), max_tokens=4)
    assert rig.run(again)["again"] == expected(again) == rig.tokens["first"]
    assert rig.ends["again"].num_cached_tokens == 28
    stats = rig.scheduler.take_stats()
    assert stats.kv_tier_fetched_pages == {"host": 7}
    assert stats.kv_tier_bytes["host/out"] == 7 * PAGE_BYTES
    assert len(stats.kv_fetch_seconds) == 1


def test_prefixes_that_return_together_are_divided_over_the_data_ranks() -> None:
    rig = Rig(tiers=ALWAYS, num_ranks=2, num_blocks=66)
    messages = [add(f"{first}", prompt(30, first), max_tokens=4) for first in (3, 50)]
    for first in (3, 50):
        rig.run(add(f"cold {first}", prompt(30, first), max_tokens=4))
    evict(rig)
    rig.run(*messages)
    assert all(rig.ends[message.request_id].num_cached_tokens == 28 for message in messages)
    chains = [rig.kv.new_table(None).chain for _ in messages]
    tokens = [np.array(message.prompt_token_ids, np.int32) for message in messages]
    found = [
        [rig.kv.pool.find(chain.hash(6, own), rank) is not None for rank in range(2)]
        for chain, own in zip(chains, tokens, strict=True)
    ]
    assert sorted(found) == [[False, True], [True, False]]


def test_a_prefix_that_requests_find_on_the_device_stays_in_the_tiers() -> None:
    """Host memory of 20 pages; each request computes 3 pages after a prefix of 8."""
    rig = Rig(tiers=TierConfig(kv_offload_memory=20 * PAGE_BYTES, kv_fetch="always"))
    for number in range(8):
        own = [number * 10 + i % 10 for i in range(3, 15)]
        rig.run(add(f"r{number}", prompt(32) + own, max_tokens=1))
    evict(rig)
    rig.run(add("again", [*prompt(32), 1], max_tokens=1))
    assert rig.ends["again"].num_cached_tokens == 32


def test_a_prefix_that_only_the_device_has_is_copied_again_when_it_is_used() -> None:
    rig = Rig(tiers=ALWAYS)
    assert rig.tiers is not None
    rig.run(add("first", prompt(30), max_tokens=1))
    rig.tiers.settle()
    rig.tiers._stores[0].clear()
    rig.run(add("hit", prompt(30), max_tokens=1))
    assert rig.ends["hit"].num_cached_tokens == 28
    evict(rig)
    rig.run(add("again", prompt(30), max_tokens=1))
    assert rig.ends["again"].num_cached_tokens == 28


def test_tiers_smaller_than_the_device_do_not_copy_what_it_keeps_again() -> None:
    """The device keeps three chats that grow by a page each turn, and host memory has 20 pages."""
    rig = Rig(tiers=TierConfig(kv_offload_memory=20 * PAGE_BYTES, kv_fetch="always"))
    assert rig.tiers is not None
    stored = []
    for turn in range(4):
        for first in (3, 40, 77):
            rig.run(add(f"{first} {turn}", prompt(32 + 4 * turn, first), max_tokens=1))
            rig.tiers.settle()
            stored.append(rig.tiers.stats.take().stored_pages["host"])
    assert stored == [8] * 3 + [1] * 9


def test_tiers_evict_the_end_of_a_prefix_before_its_start() -> None:
    """Two prefixes of 8 pages, and host memory of 12."""
    rig = Rig(tiers=TierConfig(kv_offload_memory=12 * PAGE_BYTES, kv_fetch="always"))
    for name, first in (("a", 3), ("b", 50)):
        rig.run(add(name, prompt(33, first), max_tokens=1))
    evict(rig)
    rig.run(add("again", prompt(33), max_tokens=1))
    assert rig.ends["again"].num_cached_tokens == 16


def test_other_salt_finds_nothing_in_the_tiers() -> None:
    rig = Rig(tiers=ALWAYS)
    rig.run(add("first", prompt(30), max_tokens=4, salt="a"))
    evict(rig)
    rig.run(add("other", prompt(30), max_tokens=4, salt="b"))
    assert rig.ends["other"].num_cached_tokens == 0
    evict(rig)
    rig.run(add("same", prompt(30), max_tokens=4, salt="a"))
    assert rig.ends["same"].num_cached_tokens == 28


def test_reset_prefix_cache_clears_the_tiers() -> None:
    rig = Rig(tiers=ALWAYS)
    rig.run(add("first", prompt(30), max_tokens=4))
    evict(rig)
    rig.scheduler.reset_prefix_cache()
    rig.run(add("cold", prompt(30), max_tokens=4))
    assert rig.ends["cold"].num_cached_tokens == 0


def test_copies_under_way_are_not_stored_after_a_reset() -> None:
    rig = Rig(tiers=ALWAYS)
    assert rig.tiers is not None
    gate = threading.Event()
    rig.tiers.saver._thread.submit(gate.wait)
    rig.run(add("first", prompt(30), max_tokens=4))
    rig.scheduler.reset_prefix_cache()
    gate.set()
    rig.tiers.saver.settle()
    assert rig.tiers.stats.take().stored_pages == {}


def test_request_that_waits_for_pages_does_not_hold_up_the_next_one() -> None:
    rig = Rig(tiers=ALWAYS)
    assert rig.tiers is not None
    rig.run(add("first", prompt(30), max_tokens=4))
    evict(rig)
    gate = threading.Event()
    for _ in range(4):  # all threads of the fetcher
        rig.tiers.fetcher._threads.submit(gate.wait)
    rig.send(add("slow", prompt(30), max_tokens=4), add("other", prompt(9, first=50), max_tokens=4))
    while "other" not in rig.ends:
        rig.step()
    assert "slow" not in rig.tokens
    assert rig.scheduler.take_stats().num_requests_waiting_by_reason == {"capacity": 0, "deferred": 1}
    gate.set()
    rig.finish()
    assert rig.ends["slow"].num_cached_tokens == 28


def test_requests_with_one_prefix_share_its_fetch() -> None:
    rig = Rig(tiers=ALWAYS)
    rig.run(add("first", prompt(30), max_tokens=2))
    evict(rig)
    rig.scheduler.take_stats()
    twins = [add(f"twin {i}", prompt(30), max_tokens=3 + i) for i in range(3)]
    tokens = rig.run(*twins)
    assert all(tokens[twin.request_id] == expected(twin) for twin in twins)
    assert rig.scheduler.take_stats().kv_tier_fetched_pages == {"host": 7}


def test_requests_without_pages_in_the_tiers_are_looked_up_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long prompt is computed, with the whole budget of each step, six others wait."""
    rig = Rig(tiers=ALWAYS, max_num_batched_tokens=4)
    missing_prefix = KVManager.missing_prefix
    looked_up: list[int] = []

    def counted(kv: KVManager, table: BlockTable, *args: Any, **options: Any) -> MissingPrefix | None:
        looked_up[-1] += 1
        return missing_prefix(kv, table, *args, **options)

    monkeypatch.setattr(KVManager, "missing_prefix", counted)
    rig.send(*(add(f"{first}", prompt(100, first), max_tokens=2) for first in range(3, 10)))
    for _ in range(20):
        looked_up.append(0)
        rig.step()
    assert looked_up == [7] + [1] * 19


def test_aborted_request_leaves_its_fetch() -> None:
    rig = Rig(tiers=ALWAYS)
    assert rig.tiers is not None
    rig.run(add("first", prompt(30), max_tokens=2))
    evict(rig)
    gate = threading.Event()
    for _ in range(4):
        rig.tiers.fetcher._threads.submit(gate.wait)
    rig.send(add("gone", prompt(30), max_tokens=2))
    rig.step()
    rig.collect(rig.scheduler.abort([RequestId("gone")]))
    gate.set()
    rig.finish()
    assert rig.ends["gone"].finish_reason == "abort"
    assert not rig.scheduler.has_work


def test_preempted_request_comes_back_from_host_memory() -> None:
    """Two requests outgrow a pool that holds one of them; the second gives way and returns."""
    rig = Rig(tiers=ALWAYS, num_blocks=14, max_num_seqs=2)
    assert rig.tiers is not None
    requests = [add(name, prompt(16, first), max_tokens=24) for name, first in (("a", 3), ("b", 60))]
    rig.send(*requests)
    for _ in range(24):
        rig.step()
        rig.tiers.saver.settle()  # before pages of the preempted request are evicted
    rig.finish()
    tokens = rig.tokens
    assert [tokens[request.request_id] for request in requests] == [expected(request) for request in requests]
    stats = rig.scheduler.take_stats()
    assert stats.num_preemptions
    assert stats.kv_tier_fetched_pages.get("host", 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_get_the_tokens_of_an_engine_without_tiers(seed: int, num_ranks: int) -> None:
    """Shared prefixes in a pool and a host memory that are both too small, with aborts, resets and steps in flight."""
    rng = random.Random(seed)
    rig = Rig(
        tiers=TierConfig(kv_offload_memory=24 * PAGE_BYTES, kv_fetch="always"),
        num_blocks=20 * num_ranks,
        num_ranks=num_ranks,
        max_num_seqs=4,
        depth=seed % 2,
        max_decode_steps=1 + seed // 2,
        max_model_len=64,
    )
    assert rig.tiers is not None
    messages = {}
    for number in range(60):
        shared = prompt(rng.choice([8, 16, 24, 32]), first=rng.choice([3, 40, 77]))
        own = [rng.randrange(3, 100) for _ in range(rng.randrange(1, 6))]
        salt = rng.choice([None, None, "x"])
        message = add(f"r{number}", shared + own, max_tokens=rng.randrange(1, 9), salt=salt)
        messages[message.request_id] = message
        rig.send(message)
        for _ in range(rng.randrange(6)):
            rig.step()
        if rng.random() < 0.1 and message.request_id not in rig.ends:
            rig.collect(rig.scheduler.abort([message.request_id]))
        if rng.random() < 0.05:
            rig.scheduler.reset_prefix_cache()
        if rng.random() < 0.5:
            rig.tiers.saver.settle()  # else the copies' thread may come too late for every page
    rig.finish()
    for request_id, message in messages.items():
        assert rig.tokens[request_id] == expected(message)[: len(rig.tokens[request_id])]
        assert rig.ends[request_id].finish_reason in ("length", "abort")
    for number, first in enumerate((5, 50, 5)):  # before, the threads of copies may have come too late for every page
        last = add(f"last{number}", prompt(56, first=first), max_tokens=4)
        assert rig.run(last)[last.request_id] == expected(last)
        rig.tiers.saver.settle()
    stats = rig.scheduler.take_stats()
    assert stats.kv_tier_fetched_pages["host"]
    assert stats.kv_tier_evicted_pages["host"]


def test_pages_of_a_failed_step_are_not_saved() -> None:
    rig = Rig(tiers=ALWAYS, fail_at_steps=frozenset({2}))
    assert rig.tiers is not None
    rig.core.handle(add("lost", prompt(64), max_tokens=4))
    while rig.scheduler.has_work:
        rig.core.step()
    rig.tiers.saver.settle()
    assert rig.tiers.stats.take().failures == {}
    again = add("again", prompt(64), max_tokens=4)
    assert rig.run(again)["again"] == expected(again)


def test_failed_write_ends_the_step_and_the_next_request_is_right() -> None:
    rig = Rig(tiers=ALWAYS)
    rig.run(add("first", prompt(30), max_tokens=4))
    evict(rig)

    def fail(blocks: object, staged: object) -> None:
        rig.executor.lose_state()
        raise RuntimeError("the device is unhappy")

    write, rig.model.pages.write = rig.model.pages.write, fail  # type: ignore[method-assign]
    assert rig.core.handle(add("lost", prompt(30), max_tokens=4)) == []
    while rig.scheduler.has_work:
        step = rig.core.step()
        rig.collect(step.outputs if step is not None else [])
    assert rig.ends["lost"].finish_reason == "error"
    rig.model.pages.write = write  # type: ignore[method-assign]
    again = add("again", prompt(30), max_tokens=4)
    assert rig.run(again)["again"] == expected(again)
    assert rig.ends["again"].num_cached_tokens == 28, "host memory keeps its pages"


def test_routers_learn_when_the_last_copy_of_a_page_is_gone() -> None:
    rig = Rig(tiers=TierConfig(kv_offload_memory=8 * PAGE_BYTES, kv_fetch="always"), publishes_pages=True)
    assert rig.core.page_changes is not None
    assert rig.tiers is not None
    rig.run(add("first", prompt(32), max_tokens=1))
    first = rig.core.page_changes.held()
    assert len(first) == 8
    evict(rig)
    assert rig.core.page_changes.held() == first, "host memory has them"
    rig.run(add("other", prompt(12, first=50), max_tokens=1))
    rig.tiers.saver.settle()
    rig.tiers.save()
    assert rig.core.page_changes.held()[:5] == first[:5]
    rig.scheduler.reset_prefix_cache()
    assert rig.core.page_changes.held() == []


def test_routers_learn_of_pages_that_were_evicted_before_their_copy() -> None:
    rig = Rig(tiers=ALWAYS, publishes_pages=True, num_blocks=12)
    assert rig.core.page_changes is not None
    assert rig.tiers is not None
    save, rig.tiers.saver.save = rig.tiers.saver.save, lambda _: None  # type: ignore[assignment, method-assign]
    for first in (3, 40, 77):
        rig.run(add(f"{first}", prompt(30, first), max_tokens=1))
    rig.tiers.saver.save = save  # type: ignore[method-assign]
    rig.tiers.settle()
    rig.tiers.save()
    assert rig.tiers.stats.take().failures["evicted_early"]
    held = rig.core.page_changes.held()
    assert held
    assert all(rig.kv.pool.find(each) is not None or rig.tiers.holds(each) for each in held)


def test_host_memory_evicts_the_least_recently_used_page() -> None:
    pages = FakePages(np.arange(40, dtype=np.int64).reshape(10, 4))
    stats = TierStats()
    store = HostStore(pages.layout, 3 * PAGE_BYTES + 5, stats)
    content = pages.read([1, 2, 3, 4])  # type: ignore[list-item]
    names = [BlockHash(bytes([i])) for i in range(4)]
    for name, page in zip(names[:3], content.pages(), strict=False):
        store.put(name, page)
    target = [pages.layout.new_page() for _ in range(2)]
    assert store.get(names[:2], target) == 2
    assert store.touch([names[1], names[3], names[0]]) == [names[3]]
    store.put(names[3], content.pages()[3])  # takes the place of names[2]
    assert [store.num_leading([name]) for name in names] == [1, 1, 0, 1]
    assert store.get([names[3], names[2]], target) == 1
    assert target[0][0].view(np.int64).tolist() == [16, 17, 18, 19]
    assert stats.take().evicted_pages == {"host": 1}


class SlowPage(tuple[np.ndarray, ...]):
    """A page whose copy waits for `gate`."""

    def __init__(self, _: Page) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    def __getitem__(self, index: Any) -> Any:
        self.begun.set()
        assert self.gate.wait(10)
        return super().__getitem__(index)


def test_host_memory_answers_while_it_copies_and_keeps_what_is_read() -> None:
    layout, stats = FakePages(np.zeros((2, 4), np.int64)).layout, TierStats()
    store = HostStore(layout, 2 * PAGE_BYTES, stats)
    names = [BlockHash(bytes([i])) for i in range(5)]
    written, read = (SlowPage(layout.views(np.full(PAGE_BYTES, fill, np.uint8))) for fill in (7, 0))
    writing = threading.Thread(target=store.put, args=(names[0], written))
    writing.start()
    assert written.begun.wait(10)
    assert store.num_leading(names) == 0, "it is not there before its end"
    store.put(names[0], layout.new_page())
    written.gate.set()
    writing.join()
    reading = threading.Thread(target=store.get, args=([names[0]], [read]))
    reading.start()
    assert read.begun.wait(10)
    for name in names[1:]:
        store.put(name, layout.new_page())
    assert [store.num_leading([name]) for name in names] == [1, 0, 0, 0, 1]
    store.clear()
    store.put(names[1], layout.new_page())
    read.gate.set()
    reading.join()
    assert read[0].tolist() == [7] * PAGE_BYTES
    assert stats.take().evicted_pages == {"host": 3}
    for name in names[2:]:
        store.put(name, layout.new_page())
    assert [store.num_leading([name]) for name in names] == [0, 0, 0, 1, 1]


def test_pages_that_are_written_during_a_clear_are_not_stored() -> None:
    layout = FakePages(np.zeros((2, 4), np.int64)).layout
    store = HostStore(layout, 2 * PAGE_BYTES, TierStats())
    page = SlowPage(layout.new_page())
    writing = threading.Thread(target=store.put, args=(BlockHash(b"0"), page))
    writing.start()
    assert page.begun.wait(10)
    store.clear()
    page.gate.set()
    writing.join()
    assert store.num_leading([BlockHash(b"0")]) == 0


def test_host_memory_smaller_than_a_page_is_refused() -> None:
    layout = FakePages(np.zeros((2, 4), np.int64)).layout
    with pytest.raises(ConfigError, match="--kv-offload-memory of 31 bytes is too small: one KV page takes 32 bytes"):
        HostStore(layout, PAGE_BYTES - 1, TierStats())


@pytest.mark.parametrize("pool_is_full", [False, True])
def test_fetch_finds_each_of_its_pages_a_few_times(pool_is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of 200 pages comes in 50 batches, into a pool that is blank, or full of pages that may be evicted."""
    device, stats = FakePages(np.zeros((601, 4), np.int64)), TierStats()
    store, pool = HostStore(device.layout, 1 << 14, stats), BlockPool(601)
    names = [BlockHash(bytes([i]) * 32) for i in range(200)]
    for name in names:
        store.put(name, device.layout.new_page())
    if pool_is_full:
        others = pool.allocate(600)
        for number, block in enumerate(others):
            pool.cache(block, BlockHash(number.to_bytes(32)))
        pool.release(others)
    found: list[BlockHash] = []
    find = pool.find

    def counted(block_hash: BlockHash, rank: int | None = 0) -> BlockId | None:
        found.append(block_hash)
        return find(block_hash, rank)

    monkeypatch.setattr(pool, "find", counted)
    fetcher = PageFetcher(pool, device, [store], FetchRule(4, always=True), stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix(names, 0))
    while not fetcher.poll(0.01):
        pass
    assert stats.take().fetched_pages == {"host": 200}
    assert len(found) <= 200
    assert all(find(name) is not None for name in names)
    fetcher.close()


def test_end_of_a_fetched_prefix_is_evicted_before_its_start() -> None:
    """A prefix of 16 pages comes in 4 batches, into a pool that is full of pages that may be evicted."""
    device, stats = FakePages(np.zeros((33, 4), np.int64)), TierStats()
    store, pool = HostStore(device.layout, 1 << 12, stats), BlockPool(33)
    names, others = ([BlockHash(bytes([i]) * 32) for i in range(first, first + 32)] for first in (0, 100))
    for name in names[:16]:
        store.put(name, device.layout.new_page())
    blocks = pool.allocate(32)
    for block, name in zip(blocks, others, strict=True):
        pool.cache(block, name)
    pool.release(blocks)
    fetcher = PageFetcher(pool, device, [store], FetchRule(4, always=True), stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix(names[:16], 0))
    while not fetcher.poll(0.01):
        pass
    pool.allocate(20)
    assert [name for name in names[:16] if pool.find(name) is not None] == names[:12], "all others, and the last four"
    fetcher.close()


def test_fetch_ends_when_a_page_before_it_was_evicted() -> None:
    device, stats = FakePages(np.zeros((9, 4), np.int64)), TierStats()
    store, pool = HostStore(device.layout, 1 << 12, stats), BlockPool(9)
    names = [BlockHash(bytes([i]) * 32) for i in range(8)]
    for name in names:
        store.put(name, device.layout.new_page())
    stage, gates = device.stage, [threading.Event(), threading.Event()]
    gates[0].set()
    gate = iter(gates)

    def slow(pages: Sequence[Page], rank: int) -> FakeCopies:
        next(gate).wait()
        return stage(pages, rank)

    device.stage = slow  # type: ignore[method-assign]
    fetcher = PageFetcher(pool, device, [store], FetchRule(4, always=True), stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix(names, 0))
    while pool.find(names[0]) is None:
        fetcher.poll(0.01)
    pool.release(pool.allocate(8))
    gates[1].set()
    while not fetcher.poll(0.01):
        pass
    assert stats.take().fetched_pages == {"host": 4}
    fetcher.close()


class BrokenStore:
    """Claims to have every page and raises when one is read."""

    tier = "host"

    def num_leading(self, names: Sequence[BlockHash]) -> int:
        return len(names)

    def find_first(self, names: Sequence[BlockHash]) -> int | None:
        return 0

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        raise OSError("the memory is unhappy")

    max_pages = 1

    def touch(self, names: Collection[BlockHash]) -> list[BlockHash]:
        return []

    def put(self, name: BlockHash, page: Page) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


def test_fetch_that_raises_ends_and_is_counted() -> None:
    stats, rule = TierStats(), FetchRule(4)
    fetcher = PageFetcher(BlockPool(8), FakePages(np.zeros((8, 4), np.int64)), [BrokenStore()], rule, stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix([BlockHash(b"0")], 0))
    ended = []
    while not ended:
        ended = fetcher.poll(0.01)
    assert ended == ["r"]
    assert stats.take().failures == {"fetch": 1}
    assert not fetcher.begin(RequestId("r"), MissingPrefix([BlockHash(b"0")], 0)), "a request tries a page once"
    fetcher.close()


class SlowStore(BrokenStore):
    """Returns nothing until a test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        self.gate.wait()
        return 0


def test_fetch_without_progress_is_given_up_and_its_tier_counts_as_slow() -> None:
    """The requests after it compute their prompts, and do not wait as long each."""
    now, store, stats, rule = [0.0], SlowStore(), TierStats(), FetchRule(4)
    rule.observe_prefill(1000, 1.0)
    device = FakePages(np.zeros((8, 4), np.int64))
    fetcher = PageFetcher(BlockPool(8), device, [store], rule, stats, timeout_s=2.0, clock=lambda: now[0])
    assert fetcher.begin(RequestId("r"), MissingPrefix([BlockHash(b"0")], 0))
    assert fetcher.poll() == []
    now[0] = 2.5
    assert fetcher.poll() == ["r"]
    assert stats.take().failures == {"timeout": 1}
    is_begun = fetcher.begin(RequestId("next"), MissingPrefix([BlockHash(b"0")], 0))
    store.gate.set()
    fetcher.close()
    assert (is_begun, stats.take().num_skipped) == (False, 1)


class Slower(HostStore):
    """A store whose pages come when a test lets them."""

    tier = "disk"

    def __init__(self, layout: PageLayout, num_bytes: int, stats: TierStats) -> None:
        super().__init__(layout, num_bytes, stats)
        self.asked, self.gate = threading.Event(), threading.Event()

    def get(self, names: Sequence[BlockHash], pages: Sequence[Page]) -> int:
        self.asked.set()
        self.gate.wait()
        return super().get(names, pages)


def test_pages_of_a_fetch_that_is_given_up_get_into_no_store() -> None:
    device, stats, names = FakePages(np.zeros((8, 4), np.int64)), TierStats(), [BlockHash(b"0")]
    fast, slow = HostStore(device.layout, 1 << 10, stats), Slower(device.layout, 1 << 10, stats)
    slow.put(names[0], device.layout.new_page())
    fetcher = PageFetcher(BlockPool(8), device, [fast, slow], FetchRule(4), stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix(names, 0))
    assert slow.asked.wait(10)
    fetcher.give_up()
    fast.clear()
    slow.gate.set()
    fetcher.close()
    assert fast.num_leading(names) == 0


def test_batches_of_a_fetch_that_is_given_up_are_dropped_at_once() -> None:
    """Nothing polls while the device sleeps."""
    device, stats, names = FakePages(np.zeros((9, 4), np.int64)), TierStats(), [BlockHash(bytes([i])) for i in range(8)]
    store = HostStore(device.layout, 1 << 10, stats)
    for name in names:
        store.put(name, device.layout.new_page())
    stage, numbers, both = device.stage, itertools.count(1), threading.Event()

    def noted(pages: Sequence[Page], rank: int) -> FakeCopies:
        if next(numbers) == 2:
            both.set()
        return stage(pages, rank)

    device.stage = noted  # type: ignore[method-assign]
    fetcher = PageFetcher(BlockPool(9), device, [store], FetchRule(4), stats)
    assert fetcher.begin(RequestId("r"), MissingPrefix(names, 0))
    (fetch,) = fetcher._fetches
    assert both.wait(10)
    assert not fetch.batches.empty()
    fetcher.close()
    assert fetch.batches.empty()


def test_rule_compares_seconds_per_page_with_seconds_of_its_tokens() -> None:
    rule = FetchRule(block_size=16)
    assert rule.pays(["host"]), "not measured: counts as fast"
    rule.observe_prefill(1000, 1.0)  # 1 ms a token, 16 ms a page
    rule.observe_fetch(["host"] * 10, 0.150)
    rule.observe_fetch(["host"] * 5 + ["disk"] * 5, 0.170)
    assert rule.pays(["host"])
    assert not rule.pays(["host", "disk"])
    assert sum(rule.pays(["disk"]) for _ in range(32 * 3)) == 2, "tried again now and then"
    assert not rule.pays([])
    assert FetchRule(16, always=True).pays(["disk"])


def test_slow_tier_is_not_used_and_that_is_counted() -> None:
    rig = Rig(tiers=TierConfig(kv_offload_memory=1 << 20))
    assert rig.tiers is not None
    rig.run(add("first", prompt(30), max_tokens=4))
    evict(rig)
    rig.tiers.rule.observe_prefill(1000, 0.001)
    rig.tiers.rule.observe_fetch(["host"], 1.0)
    again = add("again", prompt(30), max_tokens=4)
    assert rig.run(again)["again"] == expected(again)
    stats = rig.scheduler.take_stats()
    assert (stats.kv_fetches_skipped, stats.kv_tier_fetched_pages) == (1, {})


def test_offloading_needs_the_prefix_cache() -> None:
    from jaxserve.config import CacheConfig, Config, ModelConfig

    with pytest.raises(ConfigError, match="--kv-offload-memory: needs --enable-prefix-caching"):
        Config(model=ModelConfig(model="m"), cache=CacheConfig(enable_prefix_caching=False), tiers=ALWAYS)
