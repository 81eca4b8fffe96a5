"""Seeds are reproducible, distinct and in range."""

from __future__ import annotations

from jaxserve.frontend.sampling import SeedStream, child_seed


def test_first_child_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [child_seed(42, index) for index in range(128)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [child_seed(42, index) for index in range(128)]


def test_children_of_neighbouring_seeds_do_not_meet() -> None:
    assert len({child_seed(seed, index) for seed in range(50) for index in range(50)}) == 2500


def test_stream_depends_on_the_servers_seed_and_the_order_alone() -> None:
    first, again, other = SeedStream(1), SeedStream(1), SeedStream(2)
    drawn = [first.draw() for _ in range(100)]
    assert drawn == [again.draw() for _ in range(100)]
    assert drawn != [other.draw() for _ in range(100)]
    assert len(set(drawn)) == 100


def test_api_processes_share_the_seeds_of_one_stream() -> None:
    together = SeedStream(1)
    apart = [SeedStream(1, start, 3) for start in range(3)]
    assert [together.draw() for _ in range(30)] == [apart[k % 3].draw() for k in range(30)]
