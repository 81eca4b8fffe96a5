"""Updates of the weights and sleep with KV tiers: no page of other weights is ever found, and pages of the same weights are."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.engine.control import EngineControl
from jaxserve.executor import content_digest, served_weights
from jaxserve.executor.content_digest import LoadedFiles, content_hash
from jaxserve.executor.local import LocalExecutor
from jaxserve.weights.loader import load_params
from tests.engine.model_engine import ModelEngine, request
from tests.engine.quick_sampler import quick_programs
from tests.engine.rig import Rig, add, expected, prompt
from tests.engine.test_weight_updates import MODEL, AtOnce, Operator, changed
from tests.unit.kv.test_tiers import evict

HOST = TierConfig(kv_offload_memory=1 << 20, kv_fetch="always")


def disk(folder: Path, memory: int = 0) -> TierConfig:
    return TierConfig(kv_offload_memory=memory, kv_offload_dir=str(folder / "kv"), kv_fetch="always")


@pytest.fixture(params=["host", "disk", "both"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> TierConfig:
    return {"host": HOST, "disk": disk(tmp_path), "both": disk(tmp_path, 1 << 20)}[request.param]


def settle(rig: Rig) -> None:
    """Let everything reach its tier, and the device forget it."""
    evict(rig)
    assert rig.tiers is not None
    for store in rig.tiers._stores:
        getattr(store, "settle", lambda: None)()


def num_cached(rig: Rig, name: str) -> int:
    """Run the prompt of all these tests; returns its cached tokens."""
    message = add(name, prompt(30), max_tokens=4)
    assert rig.run(message)[name] == expected(message)
    settle(rig)
    return rig.ends[name].num_cached_tokens


def test_pages_of_other_weights_are_never_found(tiers: TierConfig) -> None:
    rig = Rig(tiers=tiers)
    operator = Operator(rig)
    assert [num_cached(rig, "cold"), num_cached(rig, "warm")] == [0, 28]
    operator.finish("update_weights", model="b")
    assert [num_cached(rig, "b"), num_cached(rig, "b again")] == [0, 28]
    operator.finish("update_weights", model="c")
    assert num_cached(rig, "c") == 0
    operator.finish("update_weights", model="b")
    assert num_cached(rig, "b later") == (28 if tiers.are_shared else 0), "shared tiers keep pages of all weights"
    operator.finish("update_weights", model="start")
    assert num_cached(rig, "as at the start") == (28 if tiers.are_shared else 0)


def test_a_request_that_waits_for_pages_of_the_old_weights_computes_its_prompt(tiers: TierConfig) -> None:
    rig = Rig(tiers=tiers)
    operator = Operator(rig)
    num_cached(rig, "cold")
    message = add("waiting", prompt(30), max_tokens=4)
    rig.send(message)
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.take_stats().num_requests_waiting_by_reason["deferred"] == 1, "its pages are on their way"
    operator.finish("update_weights", model="b", mode="keep")
    rig.collect(operator.outputs)
    rig.finish()
    assert rig.tokens["waiting"] == expected(message)
    assert rig.ends["waiting"].num_cached_tokens == 0
    settle(rig)
    assert num_cached(rig, "after") == 28, "its pages are those of the new weights"


def test_running_requests_go_on_and_their_pages_are_those_of_the_new_weights(tiers: TierConfig) -> None:
    rig = Rig(tiers=tiers)
    operator = Operator(rig)
    message = add("running", prompt(30), max_tokens=12)
    rig.send(message)
    while not rig.tokens.get("running"):
        rig.step()
    operator.finish("update_weights", model="b", mode="keep")
    rig.collect(operator.outputs)
    rig.finish()
    assert rig.tokens["running"] == expected(message)
    settle(rig)
    assert num_cached(rig, "after") == 28
    operator.finish("update_weights", model="c")
    assert num_cached(rig, "c") == 0


@pytest.mark.parametrize("level", [1, 2])
def test_tiers_keep_their_pages_while_the_engine_sleeps_but_level_2_gives_host_memory_back(
    tiers: TierConfig, level: int
) -> None:
    rig = Rig(tiers=tiers)
    operator = Operator(rig)
    num_cached(rig, "cold")
    operator.finish("sleep", sleep_level=level)
    operator.finish("wake_up")
    assert num_cached(rig, "awake") == (0 if level == 2 and not tiers.kv_offload_dir else 28)
    assert num_cached(rig, "again") == 28, "the tiers take new pages"


def test_weights_whose_files_have_changed_in_sleep_find_no_page_of_those_before(tiers: TierConfig) -> None:
    rig = Rig(tiers=tiers)
    operator = Operator(rig)
    num_cached(rig, "cold")
    rig.executor.weights.has_changed_files = True
    operator.finish("sleep", sleep_level=2)
    operator.finish("wake_up")
    assert [num_cached(rig, "changed"), num_cached(rig, "again")] == [0, 28]
    operator.finish("update_weights", model="start")
    assert num_cached(rig, "as at the start") == (28 if tiers.are_shared else 0)


def test_tensors_are_other_weights_than_those_they_were_put_among(tmp_path: Path) -> None:
    rig = Rig(tiers=disk(tmp_path))
    operator = Operator(rig)
    file = MODEL / "model.safetensors"
    operator.finish("update_weights", tensors=str(file))
    assert num_cached(rig, "tensors") == 0
    operator.finish("update_weights", model="b")
    operator.finish("update_weights", tensors=str(file))
    assert num_cached(rig, "tensors among b") == 0


def test_weights_whose_files_change_while_they_are_read_are_known_as_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiers=disk(tmp_path))
    operator = Operator(rig)
    num_cached(rig, "cold")
    with monkeypatch.context() as patched:
        patched.setattr(rig.executor.weights, "new_hash", lambda: None)
        operator.finish("update_weights", model="b")
        assert [num_cached(rig, "changed"), num_cached(rig, "changed again")] == [0, 28]
        operator.finish("update_weights", model="b")
        assert num_cached(rig, "once more") == 0
    operator.finish("update_weights", model="b")
    assert num_cached(rig, "b") == 0
    operator.finish("update_weights", model="start")
    assert num_cached(rig, "as at the start") == 28


def folder_of(path: Path, content: bytes) -> Path:
    """Write a folder with files of a model's names."""
    path.mkdir()
    (path / "config.json").write_bytes(b"{}")
    (path / "model.safetensors").write_bytes(content)
    return path


def test_contents_of_files_and_folders_have_hashes_of_their_own(tmp_path: Path) -> None:
    zeros = bytes(1 << 20)
    folders = [
        folder_of(tmp_path / name, content) for name, content in (("a", zeros), ("b", zeros), ("c", zeros[1:] + b"1"))
    ]
    a, same, other = map(content_hash, folders)
    assert a == same != other
    assert content_hash(folders[0] / "model.safetensors") != content_hash(folders[2] / "model.safetensors")
    (folders[1] / "config.json").write_bytes(b"[]")
    assert content_hash(folders[1]) != a


def test_files_beside_the_weights_may_vanish_or_change(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", bytes(100))
    before = content_hash(folder)
    (folder / "optimizer.pt").write_bytes(bytes(10))
    (folder / "model.safetensors.tmp").symlink_to(folder / "nothing")
    loaded = LoadedFiles(folder)
    (folder / "optimizer.pt").unlink()
    assert loaded.hash() == before


def test_files_that_were_loaded_have_the_hash_of_their_content_unless_they_have_changed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", bytes(100))
    file = folder / "model.safetensors"
    first, second = LoadedFiles(folder), LoadedFiles(folder)
    before = content_hash(folder)
    assert first.hash() == before
    file.unlink()
    file.write_bytes(bytes(99) + b"1")
    assert (first.hash(), second.hash()) == (before, None)


def test_files_that_vanish_while_they_are_hashed_have_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, read = LoadedFiles(folder_of(tmp_path / "model", bytes(100))), content_digest._file_hash

    def vanished(file: Path) -> str:
        file.unlink()
        return read(file)

    monkeypatch.setattr(content_digest, "_file_hash", vanished)
    assert loaded.hash() is None


@pytest.mark.slow
def test_a_folder_that_changes_while_the_engine_starts_is_not_the_one_it_started_with(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)

    def rewrite(phase: str, *_: object) -> None:
        if phase == "load":
            os.utime(folder / "model.safetensors")

    config = Config(
        model=ModelConfig(model=str(folder), max_model_len=32),
        cache=CacheConfig(kv_cache_memory=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16),
        tiers=disk(tmp_path),
    )
    with quick_programs() as programs:
        config = dataclasses.replace(config, compile=CompileConfig(compile_cache=str(programs)))
        executor = LocalExecutor.start(config, folder, rewrite)
    assert executor.weights is not None
    assert executor.weights.start_hash() is None
    are_same = []
    for _ in range(2):
        executor.weights.discard(keeps_copy=False)()
        are_same.append(executor.weights.restore()())
    assert are_same == [False, True], "the second time from the files of the first"
    executor.close()


def test_an_engine_over_several_hosts_names_them_in_its_refusal() -> None:
    rig = Rig(tiers=HOST)
    operator = Operator(rig)
    operator.core.control = EngineControl(rig.scheduler, None, AtOnce())
    assert operator.refused("sleep", sleep_level=1).endswith("it has several hosts (--num-hosts).")


PROMPT = [5 + 3 * i % 200 for i in range(100)]


@pytest.fixture(scope="module", params=["llama2_tiny", "lfm2_tiny"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def new(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tmp_path_factory.mktemp("weights") / "new", -0.7, model)


@pytest.fixture(scope="module", params=[pytest.param("host", marks=pytest.mark.exhaustive), "both"])
def engine(
    model: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelEngine]:
    memory = 4 << 20
    folder = tmp_path_factory.mktemp("tiers")
    config = (
        disk(folder, memory) if request.param == "both" else TierConfig(kv_offload_memory=memory, kv_fetch="always")
    )
    engine = ModelEngine(MODEL.parent / model, tiers=config)
    yield engine
    assert engine.tiers is not None
    engine.tiers.close()
    engine.close()


@pytest.fixture(scope="module")
def fresh(new: Path) -> Iterator[ModelEngine]:
    engine = ModelEngine(new)
    yield engine
    engine.close()


def generate(engine: ModelEngine, name: str) -> tuple[list[int], int]:
    """Return tokens and number of cached tokens; afterwards only tiers have the pages."""
    result = engine.run([request(name, PROMPT)])[name]
    if engine.tiers is not None:
        engine.tiers.settle()
    engine.kv.reset_prefix_cache()
    return result.token_ids, result.num_cached_tokens


@pytest.mark.slow
def test_pages_of_weights_that_a_file_had_while_it_was_read_are_not_those_of_the_weights_it_has_later(
    engine: ModelEngine, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, later = (changed(tmp_path / name, factor, model) for name, factor in (("model", -0.7), ("later", 0.5)))
    operator = Operator(engine)

    def read_and_overwrite(*args: Any) -> Any:
        params = load_params(*args)
        shutil.copyfile(later / "model.safetensors", folder / "model.safetensors")
        return params

    with monkeypatch.context() as patched:
        patched.setattr(served_weights, "load_params", read_and_overwrite)
        operator.finish("update_weights", model=str(folder))
    old = generate(engine, "old")[0]
    operator.finish("update_weights", model=str(folder))
    tokens, num_cached_tokens = generate(engine, "new")
    assert num_cached_tokens == 0
    assert tokens != old
    operator.finish("update_weights", model=str(MODEL.parent / model))


@pytest.mark.slow
def test_tokens_after_an_update_are_those_of_a_fresh_engine_with_the_new_weights(
    engine: ModelEngine, fresh: ModelEngine, new: Path, model: str
) -> None:
    operator = Operator(engine)
    old = generate(engine, "old")[0]
    fetched, count = generate(engine, "old again")
    assert fetched == old and count >= 64
    operator.finish("update_weights", model=str(new))
    expected_tokens = generate(fresh, "fresh")[0]
    assert expected_tokens != old
    assert generate(engine, "new") == (expected_tokens, 0)
    assert generate(engine, "new again") == (expected_tokens, count)
    operator.finish("update_weights", model=str(MODEL.parent / model))
    assert generate(engine, "back")[0] == old
    for level in (1, 2):
        operator.finish("sleep", sleep_level=level)
        operator.finish("wake_up")
        awake, found = generate(engine, f"awake {level}")
        assert awake == old
        assert found == (0 if level == 2 and not engine.config.tiers.kv_offload_dir else count)
    assert engine.executor.compilations()["serving"] == 0
