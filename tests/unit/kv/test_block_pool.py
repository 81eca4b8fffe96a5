"""Pages are conserved, never allocated twice, and evicted oldest first."""

from __future__ import annotations

import random

import pytest

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.page_changes import PageChanges
from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


def cached(pool: BlockPool, count: int) -> list[BlockId]:
    """Return `count` held pages that are cached under the hashes b"0", b"1" ..."""
    blocks = pool.allocate(count)
    for i, block in enumerate(blocks):
        pool.cache(block, BlockHash(b"%d" % i))
    return blocks


def test_null_block_is_never_allocated() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert NULL_BLOCK == 0
    assert pool.num_free == 0


def test_exhausted_pool_allocates_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_pool_of_only_the_null_block_is_rejected() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_double_release_raises() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often than it was taken"):
        pool.release(blocks)


def test_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, 1)
    pool.share(blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.references(blocks[0])) == (1, 1)
    pool.release(blocks)
    assert (pool.num_free, pool.references(blocks[0])) == (2, 0)


def test_released_cached_block_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(3)
    first = cached(pool, 1)
    pool.release(first)
    assert pool.find(BlockHash(b"0")) == first[0]
    pool.allocate(1)  # the blank one is used first
    assert pool.find(BlockHash(b"0")) == first[0]
    assert pool.allocate(1) == first
    assert pool.find(BlockHash(b"0")) is None


def test_least_recently_released_block_is_evicted_first_and_a_sequence_from_its_end() -> None:
    pool = BlockPool(5)
    one, two, three, four = cached(pool, 4)
    pool.release([one, two])
    pool.release([three, four])
    assert pool.allocate(4) == [two, one, four, three]


def test_shared_block_is_not_evicted() -> None:
    pool = BlockPool(4)
    one, two, three = cached(pool, 3)
    pool.release([three])
    pool.release([two])
    pool.release([one])
    pool.share([two])
    assert pool.allocate(2) == [three, one]
    assert pool.references(two) == 1


def test_equal_content_is_cached_once() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, BlockHash(b"x"))
    pool.cache(second, BlockHash(b"x"))
    assert pool.find(BlockHash(b"x")) == first
    pool.release([second])
    assert second in pool.blank_blocks()


def test_free_or_cached_page_cannot_be_cached() -> None:
    pool = BlockPool(4)
    (block,) = cached(pool, 1)
    with pytest.raises(RuntimeError, match="cannot be cached"):
        pool.cache(block, BlockHash(b"y"))
    with pytest.raises(RuntimeError, match="cannot be cached"):
        pool.cache(BlockId(3), BlockHash(b"y"))


def test_reset_keeps_held_pages() -> None:
    pool = BlockPool(4)
    held, released = cached(pool, 2)
    pool.release([released])
    pool.forget_evictable()
    assert pool.find(BlockHash(b"0")) == held
    assert pool.find(BlockHash(b"1")) is None
    assert sorted(pool.blank_blocks()) == sorted({1, 2, 3} - {held})


def test_recorded_changes_add_up_to_the_cached_pages() -> None:
    """Random traffic: after every report, the sum of all reports is what the pool would find."""
    chance, changes = random.Random(7), PageChanges()
    pool = BlockPool(9, changes)
    names = [BlockHash(b"%d" % i) for i in range(12)]
    held: list[BlockId] = []
    known: set[BlockHash] = set()
    for _ in range(400):
        if pool.num_free and chance.random() < 0.5:
            (block,) = pool.allocate(1)
            pool.cache(block, chance.choice(names))
            held.append(block)
        elif held:
            pool.release([held.pop(chance.randrange(len(held)))])
        if chance.random() < 0.02:
            pool.forget_evictable()
        if chance.random() < 0.3:
            added, removed = changes.take()
            known = (known | set(added)) - set(removed)
            cached = {name for name in names if pool.find(name) is not None}
            assert known == cached == set(changes.held())
    changes.take()
    assert changes.take() == ([], []), "each change is reported once"


def test_evictions_count_pages_that_were_given_up_for_others() -> None:
    pool = BlockPool(5)
    pool.release(cached(pool, 3))
    pool.allocate(1)
    assert pool.num_evictions == 0, "a blank page was left"
    pool.allocate(2)
    assert pool.num_evictions == 2
    pool.forget_evictable()
    assert pool.num_evictions == 2, "a reset gives them up for nobody"
