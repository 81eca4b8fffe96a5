"""Pages in files: they survive a restart, and damaged or foreign ones are never returned."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.tiers import disk
from jaxserve.kv.tiers.disk import DiskStore
from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout
from jaxserve.kv.tiers.page_file import write_order
from jaxserve.kv.tiers.stats import TierStats
from jaxserve.types import BlockHash
from tests.e2e.http_server import until
from tests.engine.rig import Rig, add, expected, prompt

LAYOUT = PageLayout("model", "int8", (CacheBlock("attention", "k", 24), CacheBlock("attention", "v", 8)))
FILE_BYTES = 32 + LAYOUT.num_bytes
"""With magic and checksum."""
NAMES = [BlockHash(bytes([i]) * 32) for i in range(6)]

Open = Callable[..., DiskStore]


@pytest.fixture
def stats() -> TierStats:
    return TierStats()


@pytest.fixture
def opened(tmp_path: Path, stats: TierStats) -> Iterator[Open]:
    stores: list[DiskStore] = []

    def open_store(layout: PageLayout = LAYOUT, num_pages: int = 4) -> DiskStore:
        stores.append(DiskStore(layout, str(tmp_path / "kv"), num_pages * FILE_BYTES, stats))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def restart(store: DiskStore, opened: Open, **options: object) -> DiskStore:
    """Close a store and open its directory again, as the next server does."""
    store.close()
    store.close = lambda: None  # type: ignore[method-assign]
    return opened(**options)


def page(number: int) -> Page:
    return LAYOUT.views(np.arange(number, number + 32, dtype=np.uint8))


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        store.put(NAMES[number], page(number))
        store.settle()


def content(store: DiskStore, number: int) -> list[bytes] | None:
    target = LAYOUT.new_page()
    return [block.tobytes() for block in target] if store.get([NAMES[number]], [target]) else None


def test_pages_survive_a_restart_with_equal_bytes(opened: Open) -> None:
    store = opened()
    put(store, 1, 2)
    store = restart(store, opened)
    assert [store.num_leading([name]) for name in NAMES[:4]] == [0, 1, 1, 0]
    assert content(store, 2) == [block.tobytes() for block in page(2)]


def test_layouts_do_not_see_each_others_pages(opened: Open) -> None:
    """A fine-tuned model differs in its digest only."""
    store = opened()
    put(store, 1)
    other = opened(dataclasses.replace(LAYOUT, model="fine-tuned"))
    assert other.num_leading([NAMES[1]]) == 0
    assert store.num_leading([NAMES[1]]) == 1


def test_least_recently_used_file_is_deleted(opened: Open, stats: TierStats, tmp_path: Path) -> None:
    store = opened(num_pages=3)
    put(store, 0, 1, 2)
    assert store.touch([NAMES[4], NAMES[0]]) == [NAMES[4]]
    put(store, 3)
    assert [store.num_leading([name]) for name in NAMES[:4]] == [1, 0, 1, 1]
    assert len(list(tmp_path.glob("kv/*/??/*"))) == 3
    assert stats.take().evicted_pages == {"disk": 1}


def test_smaller_limit_deletes_the_oldest_files_of_an_engine_that_was_killed(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "write_order", lambda folder, names: None)
    store = opened()
    put(store, 0, 1, 2)
    for age, name in enumerate(reversed(NAMES[:3])):
        path = next(tmp_path.glob(f"kv/*/??/{name.hex()}.page"))
        os.utime(path, (1000 - age, 1000 - age))
    store = restart(store, opened, num_pages=2)
    assert [store.num_leading([name]) for name in NAMES[:3]] == [0, 1, 1]


def test_the_order_of_use_survives_a_restart(opened: Open) -> None:
    store = opened(num_pages=6)
    put(store, 0, 1, 2, 3)
    assert store.touch([NAMES[2], NAMES[0]]) == []
    store = restart(store, opened, num_pages=2)
    assert [store.num_leading([name]) for name in NAMES[:4]] == [1, 0, 1, 0]


@pytest.mark.parametrize("damage", ["one bit", "cut short", "other page"])
def test_damaged_file_counts_as_missing_and_is_deleted(
    damage: str, opened: Open, stats: TierStats, tmp_path: Path
) -> None:
    store = opened()
    put(store, 1)
    path = next(tmp_path.glob(f"kv/*/??/{NAMES[1].hex()}.page"))
    stored = path.read_bytes()
    changed = {
        "one bit": stored[:-1] + bytes([stored[-1] ^ 1]),
        "cut short": stored[:-1],
        "other page": b"x" * len(stored),
    }
    path.write_bytes(changed[damage])
    assert content(store, 1) is None
    assert not path.exists()
    assert store.num_leading([NAMES[1]]) == 0
    assert stats.take().failures == {"checksum": 1}
    put(store, 1)
    assert content(store, 1) is not None


def test_unfinished_and_foreign_files_are_deleted_at_the_start(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, 1)
    folder = next(tmp_path.glob("kv/*/??"))
    (folder / f"{NAMES[2].hex()}.part").write_bytes(b"half")
    (folder / f"{NAMES[3].hex()}.page").write_bytes(b"in the folder of another page")
    store = restart(store, opened)
    assert [path.name for path in folder.iterdir()] == [f"{NAMES[1].hex()}.page"]


def test_clear_deletes_stored_and_queued_pages(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, 1)
    store.put(NAMES[2], page(2))
    store.clear()
    store.settle()
    assert [store.num_leading([name]) for name in NAMES[1:3]] == [0, 0]
    assert list(tmp_path.glob("kv/*/??/*")) == []


def test_pages_that_wait_to_be_written_are_there(opened: Open) -> None:
    store = opened()
    may_write = threading.Event()
    store._queue.put(may_write.wait)  # type: ignore[arg-type]
    store.put(NAMES[1], page(1))
    assert store.num_leading(NAMES[1:]) == 1
    assert store.find_first(NAMES) == 1
    assert store.touch(NAMES[:2]) == NAMES[:1]
    assert content(store, 1) == [block.tobytes() for block in page(1)]
    store.clear()
    assert content(store, 1) is None
    store.put(NAMES[1], page(2))
    may_write.set()
    store.settle()
    assert content(store, 1) == [block.tobytes() for block in page(2)]


def test_clear_does_not_wait_until_files_are_deleted(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    put(store, 1, 2)
    may_delete, unlink = threading.Event(), Path.unlink

    def slow(path: Path, missing_ok: bool = False) -> None:
        assert may_delete.wait(30)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    store.clear()
    assert content(store, 1) is None, "it is forgotten"
    store.put(NAMES[2], page(2))
    assert len(list(tmp_path.glob("kv/*/??/*.page"))) == 2, "its file is still there"
    may_delete.set()
    store.settle()
    assert content(store, 2) == [block.tobytes() for block in page(2)]
    assert len(list(tmp_path.glob("kv/*/??/*"))) == 1


def test_a_cleared_store_has_its_whole_limit_again(opened: Open, stats: TierStats) -> None:
    store = opened(num_pages=2)
    put(store, 0, 1)
    store.clear()
    put(store, 2, 3)
    assert [store.num_leading([name]) for name in NAMES[:4]] == [0, 0, 1, 1]
    assert stats.take().evicted_pages == {}
    put(store, 4)
    assert stats.take().evicted_pages == {"disk": 1}


def test_full_disk_loses_a_page_and_nothing_else(opened: Open, stats: TierStats, tmp_path: Path) -> None:
    store = opened()
    folder = next(tmp_path.glob("kv/*"))
    (folder / NAMES[1].hex()[:2]).write_bytes(b"a file where a folder should be")
    put(store, 1, 2)
    assert [store.num_leading([name]) for name in NAMES[1:3]] == [0, 1]
    assert stats.take().failures == {"disk_write": 1}


def test_pages_that_the_disk_loses_are_noted(tmp_path: Path) -> None:
    stats = TierStats(keeps_lost=True)
    store = DiskStore(LAYOUT, str(tmp_path / "kv"), 4 * FILE_BYTES, stats)
    put(store, 1)
    next(tmp_path.glob("kv/*/??/*.page")).write_bytes(b"damaged")
    assert content(store, 1) is None
    assert stats.take_lost() == [NAMES[1]]
    store.close()


def test_each_engine_of_a_model_has_a_folder_of_its_own(opened: Open, tmp_path: Path) -> None:
    """The next engines find both folders."""
    first, second = opened(), opened()
    put(first, 1)
    put(second, 2, 3)
    assert [store.num_leading([NAMES[1]]) for store in (first, second)] == [1, 0]
    assert len(list(tmp_path.glob("kv/*"))) == 2
    second = restart(second, opened)
    first = restart(first, opened)
    assert [content(store, 1) is None for store in (first, second)] == [False, True]
    assert [content(store, 2) is None for store in (first, second)] == [True, False]


def test_engines_of_a_model_leave_each_others_folders(opened: Open, tmp_path: Path) -> None:
    """Together they have more than the limit of one, and the second folder is in use by none when the first starts."""
    stores = opened(num_pages=3), opened(num_pages=3)
    for store in stores:
        put(store, 1, 2)
    first = restart(stores[0], opened, num_pages=3)
    restart(
        stores[1], opened, layout=dataclasses.replace(LAYOUT, model="other"), num_pages=4
    )  # unlocks the second folder
    assert content(first, 1) is not None
    first = restart(first, opened, num_pages=3)
    assert len(list(tmp_path.glob("kv/*/??/*.page"))) == 4


def test_folders_that_no_engine_has_used_for_a_day_are_removed_while_one_runs(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four engines of a model ran, one of them a while ago, and two are started again."""
    stores = [opened() for _ in range(4)]
    for store in stores:
        put(store, 1)
    folders = sorted(tmp_path.glob("kv/*"), key=lambda folder: folder.suffix)
    for store in stores[1:]:
        restart(store, opened, layout=dataclasses.replace(LAYOUT, model="other"))
    monkeypatch.setattr(disk, "_LOOK_S", 0.02)
    restart(stores[0], opened)
    long_ago = time.time() - 25 * 3600
    os.utime(folders[3], (long_ago, long_ago))
    os.utime(folders[0], (long_ago, long_ago))
    opened()
    until(lambda: not folders[3].exists(), "the unused folder is still there")
    assert [folder.exists() for folder in folders] == [True, True, True, False]
    until(lambda: folders[0].stat().st_mtime > long_ago + 3600, "the folder in use looks like an unused one")


def test_a_folder_that_an_engine_takes_is_marked_as_used_at_once(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "kv" / f"jaxserve-kv-{LAYOUT.identity}"
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700)
    long_ago = time.time() - 25 * 3600
    os.utime(folder, (long_ago, long_ago))
    opened()
    assert folder.stat().st_mtime > long_ago + 3600


def test_folder_that_others_may_enter_is_refused(tmp_path: Path, stats: TierStats) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"--kv-offload-dir .* must be ours alone \(mode 0700\)"):
        DiskStore(LAYOUT, str(tmp_path), 1 << 20, stats)


def test_limit_below_a_page_is_refused(tmp_path: Path, stats: TierStats) -> None:
    with pytest.raises(ConfigError, match="--kv-offload-disk of 63 bytes is too small: one KV page takes 64 bytes"):
        DiskStore(LAYOUT, str(tmp_path), FILE_BYTES - 1, stats)


def test_unused_folders_of_other_models_make_place(opened: Open, tmp_path: Path) -> None:
    store = opened()
    put(store, 0, 1, 2)
    other = dataclasses.replace(LAYOUT, model="other")
    store = restart(store, opened, layout=other, num_pages=4)  # three pages of four: both fit
    assert len(list(tmp_path.glob("kv/*"))) == 2
    put(store, 0)
    assert len(list(tmp_path.glob("kv/*"))) == 2
    put(store, 1)
    assert len(list(tmp_path.glob("kv/*"))) == 1
    assert [content(store, number) is not None for number in (0, 1)] == [True, True]


def test_full_disk_removes_unused_folders_of_other_models_and_is_logged_once(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    put(store, 0)
    store = restart(store, opened, layout=dataclasses.replace(LAYOUT, model="other"))

    def fail(path: Path, page: Page) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_page", fail)
    put(store, 1, 2)
    assert len(list(tmp_path.glob("kv/*"))) == 1
    assert caplog.messages == ["KV pages cannot be stored: [Errno 28] No space left on device"]


def test_full_disk_does_not_stop_the_removal_of_unused_folders(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose order of use cannot be stored outlives one of another model, and a second one of its own model."""

    def fail(folder: Path, names: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write_order", fail)
    stores = [opened(num_pages=1), opened(), opened(dataclasses.replace(LAYOUT, model="other"))]
    for store in stores:
        put(store, 1)
    own, second, other = (store._folder for store in stores)
    monkeypatch.setattr(disk, "_LOOK_S", 0.02)
    restart(stores[0], opened, num_pages=1)
    for store in stores[1:]:
        restart(store, opened, layout=dataclasses.replace(LAYOUT, model="third"))
    long_ago = time.time() - 25 * 3600
    for folder in (second, own):
        os.utime(folder, (long_ago, long_ago))
    until(lambda: own.stat().st_mtime > long_ago + 3600, "the folder in use looks like an unused one", 30)
    until(lambda: not second.exists() and not other.exists(), "the unused folders are still there", 30)


def test_order_that_cannot_be_stored_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def fail(path: Path, text: str) -> int:
        write(path, text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        write_order(tmp_path, NAMES)
    assert list(tmp_path.iterdir()) == []


def test_engine_starts_beside_one_that_removes_files_and_folders(opened: Open, tmp_path: Path) -> None:
    """Links to nothing stand for files and folders that are gone after they were listed."""
    store = opened()
    put(store, 0, 1, 2)
    (next(tmp_path.glob("kv/*/??")) / "gone.page").symlink_to(tmp_path / "nothing")
    (tmp_path / "kv" / "jaxserve-kv-gone").symlink_to(tmp_path / "nothing")
    other = dataclasses.replace(LAYOUT, model="other")
    restart(store, opened, layout=other, num_pages=2)
    assert not list(tmp_path.glob("kv/*/??/*.page")), "the folder of the first model made place"


def test_engine_whose_folder_is_removed_as_it_starts_takes_another_one(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def removing_first(descriptor: int, operation: int) -> None:
        """Lock a folder that an engine of another model, which makes place, has just removed."""
        monkeypatch.setattr(fcntl, "flock", lock)
        (folder,) = tmp_path.glob("kv/*")
        folder.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removing_first)
    store = opened()
    put(store, 1)
    assert content(store, 1) is not None


def test_engine_finds_its_prefix_on_disk_after_a_restart(tmp_path: Path) -> None:
    config = TierConfig(kv_offload_dir=str(tmp_path / "kv"), kv_fetch="always")
    first = Rig(tiers=config)
    assert first.tiers is not None
    first.run(add("first", prompt(30), max_tokens=4))
    first.tiers.saver.settle()
    first.tiers.close()

    second = Rig(tiers=config)
    assert second.tiers is not None
    again = add("again", prompt(30), max_tokens=4)
    assert second.run(again)["again"] == expected(again)
    assert second.ends["again"].num_cached_tokens == 28
    assert second.scheduler.take_stats().kv_tier_fetched_pages == {"disk": 7}
    second.scheduler.reset_prefix_cache()
    second.run(add("cold", prompt(30), max_tokens=4))
    assert second.ends["cold"].num_cached_tokens == 0
    second.tiers.close()


def test_pages_from_disk_are_kept_in_host_memory(tmp_path: Path) -> None:
    config = TierConfig(kv_offload_dir=str(tmp_path / "kv"), kv_offload_memory=1 << 20, kv_fetch="always")
    for number, tier in enumerate(["", "disk", "host"]):
        if number < 2:  # a new server
            rig = Rig(tiers=config)
            assert rig.tiers is not None
        rig.scheduler.take_stats()
        rig.run(add(f"r{number}", prompt(30), max_tokens=4))
        assert rig.scheduler.take_stats().kv_tier_fetched_pages == ({tier: 7} if tier else {})
        rig.tiers.saver.settle()
        rig.kv.reset_prefix_cache()
        if not number:
            rig.tiers.close()
    rig.tiers.close()
