"""Prefix look-up, publishing and page accounting, one request at a time."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from jaxserve.kv.block_table import BlockTable, HashChain
from jaxserve.kv.groups import SideGroups
from jaxserve.kv.manager import KVManager


def tokens(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def manager(num_blocks: int = 9, *, enable_prefix_caching: bool = True) -> KVManager:
    return KVManager(num_blocks, 4, 64, enable_prefix_caching=enable_prefix_caching)


def computed(kv: KVManager, values: np.ndarray, salt: str | None = None) -> BlockTable:
    """Return a table whose tokens were all computed and published."""
    table = kv.new_table(salt)
    assert kv.start(table, values) is not None
    kv.publish(table, values, len(values))
    return table


def cached(kv: KVManager, values: np.ndarray, salt: str | None = None) -> int:
    return len(kv.find_prefix(kv.new_table(salt), values)) * kv.block_size


def test_only_full_computed_pages_are_found() -> None:
    kv, values = manager(), tokens(11)
    table = kv.new_table(None)
    kv.start(table, values)
    assert cached(kv, values) == 0
    kv.publish(table, values, 3)
    assert cached(kv, values) == 0
    kv.publish(table, values, 7)
    assert cached(kv, values) == 4
    kv.publish(table, values, 11)
    assert cached(kv, values) == 8


def test_prefix_ends_at_the_first_different_page() -> None:
    kv, values = manager(), tokens(13)
    computed(kv, values)
    other = values.copy()
    other[5] = 99
    assert cached(kv, other) == 4
    assert cached(kv, tokens(13, first=1)) == 0


def test_equal_page_after_a_different_prefix_is_not_shared() -> None:
    kv = manager()
    computed(kv, np.array([1, 1, 1, 1, 7, 7, 7, 7, 0], np.int32))
    computed(kv, np.array([2, 2, 2, 2, 8, 8, 8, 8, 0], np.int32))
    assert cached(kv, np.array([1, 1, 1, 1, 8, 8, 8, 8, 0], np.int32)) == 4


def test_different_salts_share_nothing() -> None:
    kv, values = manager(), tokens(9)
    computed(kv, values, "alice")
    assert [cached(kv, values, salt) for salt in ("alice", "bob", "", None)] == [8, 0, 0, 0]


def test_fully_cached_prompt_recomputes_its_last_page_into_an_own_page() -> None:
    kv, values = manager(), tokens(8)
    first = computed(kv, values)
    second = kv.new_table(None)
    assert kv.start(second, values) == 4
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert kv.pool.references(second.blocks[1]) == 1


def test_lookup_changes_nothing() -> None:
    kv, values = manager(), tokens(9)
    kv.free(computed(kv, values))
    before = (kv.pool.num_free, kv.usage, kv.pool.blank_blocks())
    assert cached(kv, values) == 8
    assert (kv.pool.num_free, kv.usage, kv.pool.blank_blocks()) == before


def test_start_that_does_not_fit_takes_nothing() -> None:
    kv = manager(num_blocks=5)
    computed(kv, tokens(5))
    table = kv.new_table(None)
    assert kv.start(table, tokens(13, first=50)) is None
    assert (table.num_blocks, kv.pool.num_free) == (0, 2)
    assert kv.start(table, tokens(8, first=50), num_spare_blocks=1) is None
    assert kv.start(table, tokens(8, first=50)) == 0


def test_evictable_prefix_pages_count_once_as_free() -> None:
    """Two cached free pages and one blank: a request of four pages that starts with the two does not fit."""
    kv, values = manager(num_blocks=4), tokens(16)
    kv.free(computed(kv, values[:8]))
    assert kv.start(kv.new_table(None), values) is None
    assert kv.start(kv.new_table(None), values[:12]) == 8


def test_taking_a_prefix_does_not_evict_it() -> None:
    kv, values = manager(num_blocks=5), tokens(16)
    kv.free(computed(kv, values))
    table = kv.new_table(None)
    assert kv.start(table, values) == 12
    assert len(set(table.blocks)) == 4


def test_extend_takes_pages_only_when_needed_and_all_or_none() -> None:
    kv = manager(num_blocks=4)
    table = kv.new_table(None)
    kv.start(table, tokens(4))
    assert kv.extend(table, 4)
    assert table.num_blocks == 1
    assert kv.extend(table, 5)
    assert table.num_blocks == 2
    assert not kv.extend(table, 17)
    assert table.num_blocks == 2


def test_freed_table_is_null_and_its_published_pages_are_found_again() -> None:
    kv, values = manager(), tokens(9)
    table = computed(kv, values)
    assert kv.usage == pytest.approx(3 / 8)
    kv.free(table)
    assert kv.usage == 0.0
    assert not table.row.any()
    assert cached(kv, values) == 8


def test_reset_forgets_pages_that_no_request_holds() -> None:
    kv = manager()
    computed(kv, tokens(9))
    kv.free(computed(kv, tokens(9, first=50)))
    kv.reset_prefix_cache()
    assert cached(kv, tokens(9)) == 8
    assert cached(kv, tokens(9, first=50)) == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = manager(enable_prefix_caching=False)
    computed(kv, tokens(9))
    assert cached(kv, tokens(9)) == 0


def test_same_prompts_computed_side_by_side_keep_their_own_pages() -> None:
    """A prompt of one page cannot be shared, since the last page is always computed anew; so no request waits."""
    kv, values = manager(), tokens(4)
    tables = [kv.new_table(None), kv.new_table(None)]
    for table in tables:
        assert kv.start(table, values) == 0
    for table in tables:
        kv.publish(table, values, 4)
    assert tables[0].blocks != tables[1].blocks
    for table in tables:
        kv.free(table)
    assert kv.pool.num_free == 8


def test_equal_prefix_waits_until_it_is_published_or_freed() -> None:
    kv, values = manager(), tokens(9)
    first, second, third = (kv.new_table(None) for _ in range(3))
    assert kv.start(first, values) == 0
    assert kv.start(second, values) is None
    assert kv.start(kv.new_table("salt"), values) == 0
    kv.free(first)
    assert kv.start(second, values) == 0
    kv.publish(second, values, 7)
    assert kv.start(third, values) is None
    kv.publish(second, values, 8)
    assert kv.start(third, values) == 8


def test_table_that_may_not_share_computes_everything_and_never_waits() -> None:
    kv, values = manager(20), tokens(9)
    first, scored = kv.new_table(None), kv.new_table(None)
    assert kv.start(first, values) == 0
    assert kv.start(scored, values, may_share=False) == 0
    kv.free(scored)
    assert kv.start(kv.new_table(None), values) is None, "the first one still computes it"
    kv.publish(first, values, 9)
    assert kv.start(scored, values, may_share=False) == 0
    kv.publish(scored, values, 9)
    assert not {*first.blocks} & {*scored.blocks}


def test_prompt_that_did_not_fit_is_not_looked_up_page_by_page_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, values = manager(13), tokens(33)
    computed(kv, values[:17])
    other = computed(kv, tokens(25, first=100))
    waiting, looked_up = kv.new_table(None), []
    find = kv.pool.find
    monkeypatch.setattr(
        kv.pool, "find", lambda block_hash, rank=0: looked_up.append(block_hash) or find(block_hash, rank)
    )
    assert kv.start(waiting, values) is None
    assert len(looked_up) == 5, "four cached pages and one that is not"
    looked_up.clear()
    assert kv.start(waiting, values) is None
    assert len(looked_up) == 1
    kv.free(other)
    assert kv.start(waiting, values) == 16


def test_prompt_that_did_not_fit_starts_when_another_request_has_computed_more_of_it() -> None:
    kv, values = manager(9), tokens(25)
    first, waiting = kv.new_table(None), kv.new_table(None)
    assert kv.start(first, values[:13]) == 0
    kv.publish(first, values, 9)
    assert kv.start(waiting, values) is None
    kv.publish(first, values, 13)
    assert kv.start(waiting, values) == 12


@pytest.mark.parametrize("seed", range(8))
def test_remembered_failure_equals_that_of_a_new_look_up(seed: int) -> None:
    """Random prompts with common prefixes; some compute all of their pages, so that cached and held pages differ."""
    random = np.random.default_rng(seed)
    kv = KVManager(14, 2, 32)
    starts = [random.integers(0, 2, 24).astype(np.int32) for _ in range(2)]
    running: list[tuple[BlockTable, np.ndarray, int]] = []
    waiting: list[tuple[BlockTable, np.ndarray, bool]] = []
    num_failures = 0
    for _ in range(400):
        if len(waiting) < 3:
            prompt = starts[random.integers(2)][: random.integers(3, 25)]
            waiting.append((kv.new_table(None), prompt, bool(random.random() < 0.6)))
        which, spare = int(random.integers(len(waiting))), int(random.integers(3))
        table, prompt, may_share = waiting[which]
        fresh_kv, fresh_table = copy.deepcopy((kv, table))
        fresh_table.failure = None
        answer = kv.start(table, prompt, num_spare_blocks=spare, may_share=may_share)
        assert answer == fresh_kv.start(fresh_table, prompt, num_spare_blocks=spare, may_share=may_share)
        if answer is None:
            num_failures += table.failure is not None
        else:
            del waiting[which]
            running.append((table, prompt, answer))
        if running:
            which = int(random.integers(len(running)))
            table, prompt, num_computed = running[which]
            num_computed = min(num_computed + int(random.integers(1, 6)), len(prompt))
            kv.publish(table, prompt, num_computed)
            running[which] = (table, prompt, num_computed)
            if num_computed == len(prompt) and random.random() < 0.5:
                kv.free(table)
                del running[which]
        if random.random() < 0.01:
            kv.reset_prefix_cache()
    assert num_failures > 20


def test_hash_of_a_page_that_is_not_full_is_rejected() -> None:
    with pytest.raises(ValueError, match="not full"):
        HashChain(4, None).hash(1, tokens(7))


def test_a_request_has_pages_of_one_rank_only_the_one_with_most_cached_pages_then_with_most_free() -> None:
    kv, values = KVManager(10, 4, 64, num_ranks=2), tokens(9)
    first, second = computed(kv, values), kv.new_table(None)
    assert kv.start(second, tokens(5, first=50)) == 0
    assert (first.blocks, second.blocks) == ([1, 2, 3], [6, 7]), "page 5 is the null page of the second rank"
    third = kv.new_table(None)
    assert kv.start(third, tokens(10)) == 8, "shares the first one's pages, and takes the last page of its rank"
    assert third.blocks == [1, 2, 4]
    assert kv.num_usable_tokens == 16
    assert not kv.extend(third, 13), "the other rank's free pages are no use"
    assert not kv.extend_all([(second, 12), (first, 13)])
    assert kv.extend_all([(second, 12), (first, 12)])
    for table in (first, second, third):
        kv.free(table)
    assert kv.usage == 0


def test_a_full_rank_sends_a_prompt_to_another_though_that_has_none_of_its_pages() -> None:
    kv, values = KVManager(10, 4, 64, num_ranks=2), tokens(9)
    computed(kv, values)
    longer = np.concatenate((values, tokens(4, first=20)))
    table = kv.new_table(None)
    assert kv.start(table, longer) == 0
    assert table.rank == 1
    kv.publish(table, longer, len(longer))
    assert kv.start(kv.new_table(None), tokens(17)) is None


def test_state_slots_and_snapshots_are_of_the_rank_of_the_pages() -> None:
    """A rank without a free slot sends a request to the other one."""
    groups = SideGroups.of_sizes((), 6, 4, 16, keeps_snapshots=True, num_ranks=2, unit_tokens=4)
    kv, values = KVManager(40, 4, 64, num_ranks=2, groups=groups), tokens(13)
    first, second = kv.new_table(None), kv.new_table(None)
    assert kv.start(first, values) == 0
    assert groups.states[0].assign(first, 8, is_chunk=True) == (0, 1), "zeros, and the first slot"
    kv.publish(first, values, 8)
    assert groups.states[0].assign(first, 12, is_chunk=True) == (1, 2), "slot 1 stays a snapshot of 8 tokens"
    kv.publish(first, values, 12)
    kv.free(first)

    assert kv.start(second, values) == 8, "starts at the snapshot"
    assert second.rank == 0
    assert groups.states[0].assign(second, 12, is_chunk=True) == (1, 2)
    kv.publish(second, values, 12)
    assert not groups.has_state(kv.new_table(None), values, 2, rank=0)
    third = kv.new_table(None)
    assert kv.start(third, values) == 0, "though rank 0 has its pages"
    assert third.rank == 1
    assert groups.states[1].assign(third, 8, is_chunk=True) == (3, 4), "zeros and a slot of the other rank"
    for table in (second, third):
        kv.free(table)
    assert [states.num_free for states in groups.states] == [2, 2]
