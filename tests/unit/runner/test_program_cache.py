"""The compile cache: hits, misses, damage, and directories that cannot be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.runner.program_cache import ProgramCache, program_key

DEVICES = jax.devices()[:1]
TREES = (jax.tree.structure(((0,), {})), jax.tree.structure(0))


def _compiled() -> jax.stages.Compiled:
    return jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


def test_a_stored_program_comes_back_and_runs(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    assert cache.load("key", *TREES, DEVICES) is None
    cache.store("key", _compiled())
    loaded = ProgramCache(tmp_path / "programs").load("key", *TREES, DEVICES)
    assert loaded is not None
    assert loaded(jnp.arange(4.0)).tolist() == [1, 3, 5, 7]
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700


def test_a_damaged_entry_is_a_miss_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ProgramCache(tmp_path)
    cache.store("key", _compiled())
    (tmp_path / "key").write_bytes((tmp_path / "key").read_bytes()[:100])
    assert cache.load("key", *TREES, DEVICES) is None
    assert "compiling it again" in caplog.text


def test_a_directory_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    cache = ProgramCache(tmp_path)
    cache.store("key", _compiled())
    assert not list(tmp_path.iterdir())
    assert "must belong to this user alone" in caplog.text


def test_a_directory_that_cannot_be_made_turns_the_cache_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = ProgramCache(tmp_path / "file" / "programs")
    cache.store("key", _compiled())
    assert cache.load("key", *TREES, DEVICES) is None
    assert "is off" in caplog.text


def test_no_directory_is_an_empty_cache() -> None:
    cache = ProgramCache(None)
    cache.store("key", _compiled())
    assert cache.load("key", *TREES, DEVICES) is None


def test_the_key_depends_on_parts_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    key = program_key("a", 1)
    assert key == program_key("a", 1)
    assert key != program_key("a", 2)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_hlo_as_text=false")
    assert key != program_key("a", 1)
