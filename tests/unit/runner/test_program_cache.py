"""The compile cache: hits, misses, damage, and directories that cannot be trusted."""

from __future__ import annotations

import errno
import os
import pickle
import pwd
import zlib
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.registry import read_decoder
from jaxserve.runner import program_cache
from jaxserve.runner.compiler_options import compiler_options
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import InAll, ProgramCache, cache_directory
from jaxserve.runner.program_key import program_key
from jaxserve.runner.warmup import compile_all
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.models.goldens import golden_checkpoint

DEVICES = jax.devices()[:1]


def _compiled() -> jax.stages.Compiled:
    return jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


def test_a_stored_program_comes_back_and_runs(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "programs")
    assert cache.load("key", DEVICES) is None
    cache.store("key", _compiled())
    loaded = ProgramCache(tmp_path / "programs").load("key", DEVICES)
    assert loaded is not None
    assert loaded(jnp.arange(4.0)).tolist() == [1, 3, 5, 7]
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700


def test_a_damaged_entry_is_a_miss_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ProgramCache(tmp_path)
    cache.store("key", _compiled())
    entry = tmp_path / "key.program"
    entry.write_bytes(entry.read_bytes()[:100])
    assert cache.load("key", DEVICES) is None
    assert "compiling it again" in caplog.text


def test_an_entry_changed_on_the_disk_is_a_miss_before_the_runtime_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ProgramCache(tmp_path)
    cache.store("key", _compiled())
    entry = tmp_path / "key.program"
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    monkeypatch.setattr(pickle, "loads", lambda content: pytest.fail("unpickled"))
    assert cache.load("key", DEVICES) is None
    assert "it is damaged" in caplog.text


def test_an_entry_the_runtime_cannot_read_is_a_miss_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version may have written it, under a key that happens to be the same."""
    content = pickle.dumps((b"foreign", None, None))
    (tmp_path / "key.program").write_bytes(zlib.crc32(content).to_bytes(4, "big") + content)
    tmp_path.chmod(0o700)
    assert ProgramCache(tmp_path).load("key", DEVICES) is None
    assert "compiling it again" in caplog.text


def test_a_read_only_directory_gives_what_it_has_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ProgramCache(tmp_path).store("key", _compiled())
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    cache = ProgramCache(tmp_path)
    loaded = cache.load("key", DEVICES)
    assert loaded is not None
    assert loaded(jnp.arange(2.0, dtype=jnp.float32).repeat(2)).tolist() == [1, 1, 3, 3]
    cache.store("another", _compiled())
    assert [file.stem for file in tmp_path.iterdir()] == ["key"]
    assert "read-only" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="the directory has to belong to root")
def test_a_directory_of_root_is_trusted_by_any_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Container images have such a directory."""
    tmp_path.chmod(0o755)
    ProgramCache(tmp_path).store("key", _compiled())
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    assert ProgramCache(tmp_path).load("key", DEVICES) is not None


def test_a_directory_that_may_not_be_read_is_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert ProgramCache(tmp_path).load("key", DEVICES) is None
    assert [record.message for record in caplog.records] == [
        f"compile cache {tmp_path} is off: no permission to read it"
    ]


def test_a_directory_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    cache = ProgramCache(tmp_path)
    cache.store("key", _compiled())
    assert not list(tmp_path.iterdir())
    assert "must belong to this user, or to root" in caplog.text


def mount_with_fs_group(volume: Path, group: int) -> None:
    """Do to everything on a volume what kubelet does at a mount with `fsGroup` (volume ownership, read-write)."""
    for path in (volume, *volume.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))


def test_a_volume_that_kubelet_made_writable_for_roots_group_keeps_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program_cache, "_TRUSTED_GROUP", os.getgid())  # 0 in the image
    folder = tmp_path / "private"
    ProgramCache(folder).store("key", _compiled())
    mount_with_fs_group(tmp_path, os.getgid())
    assert folder.stat().st_mode & 0o7777 == 0o2770
    assert ProgramCache(folder).load("key", DEVICES) is not None
    assert folder.stat().st_mode & 0o777 == 0o700, "it is private again"
    assert caplog.records == []


def test_a_volume_that_another_group_may_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(program_cache, "_TRUSTED_GROUP", os.getgid() + 1)
    folder = tmp_path / "private"
    ProgramCache(folder).store("key", _compiled())
    mount_with_fs_group(tmp_path, os.getgid())
    assert ProgramCache(folder).load("key", DEVICES) is None
    assert "fsGroup: 0" in caplog.text


def test_a_directory_that_cannot_be_made_turns_the_cache_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = ProgramCache(tmp_path / "file" / "programs")
    cache.store("key", _compiled())
    assert cache.load("key", DEVICES) is None
    assert "is off" in caplog.text


def test_entries_used_longest_ago_go_when_the_cache_is_full(tmp_path: Path) -> None:
    compiled = _compiled()
    cache = ProgramCache(tmp_path)
    for age, key in enumerate(["newest", "middle", "oldest"]):
        cache.store(key, compiled)
        os.utime(tmp_path / f"{key}.program", (1000 - age, 1000 - age))
    size = (tmp_path / "newest.program").stat().st_size
    assert cache.load("oldest", DEVICES) is not None, "used now, so no longer the oldest"
    ProgramCache(tmp_path, max_bytes=3 * size + size // 2).store("another", compiled)
    assert {file.stem for file in tmp_path.iterdir()} == {"oldest", "newest", "another"}


def test_only_programs_are_removed(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(100))
    ProgramCache(tmp_path, max_bytes=1).store("key", _compiled())
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_a_program_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    monkeypatch.setattr(os, "replace", fail)
    cache = ProgramCache(tmp_path)
    for key in ("key", "another"):
        cache.store(key, _compiled())
    assert not list(tmp_path.iterdir())
    assert caplog.messages == [
        f"compile cache {tmp_path} does not keep programs, so every start compiles them: No space left on device"
    ]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, ".cache/jaxserve/programs"), ("~/mine", "mine"), ("/elsewhere", "/elsewhere")],
)
def test_the_directory_is_in_the_users_home_unless_given(
    setting: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(setting) == tmp_path / expected
    assert cache_directory("off") is None


def test_a_user_without_a_home_has_no_cache_but_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container may run under a user id that no account belongs to."""

    def unknown(user_id: int) -> None:
        raise KeyError(user_id)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_directory(None) is None
    assert "compile cache is off" in caplog.text


def test_no_directory_is_an_empty_cache() -> None:
    cache = ProgramCache(None)
    cache.store("key", _compiled())
    assert cache.load("key", DEVICES) is None


def test_choices_of_the_autotuner_are_kept_beside_the_programs_of_gpus(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path / "cache")
    without = compiler_options("gpu", ProgramCache(None))
    assert compiler_options("cpu", cache) is None and without is not None
    options = compiler_options("gpu", cache)
    assert options == {**without, "xla_gpu_per_fusion_autotune_cache_dir": str(tmp_path / "cache" / "autotune")}
    assert not cache.has_tuned
    (tmp_path / "cache" / "autotune" / "choice.textproto").touch()
    assert cache.has_tuned and not ProgramCache(None).has_tuned


def test_hosts_compile_together_what_one_of_them_cannot_load(tmp_path: Path) -> None:
    """The compilers of several hosts wait for each other."""
    sharding = make_sharding(read_decoder(golden_checkpoint("llama3_tiny").path)[0], MeshShape(1))
    wanted = [Program("decode", count, count, 1, 1) for count in (1, 2)]
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32))

    def sources(host: str, in_all: InAll) -> dict[str, str]:
        cache = ProgramCache(tmp_path / host, in_all=in_all)
        made = compile_all(
            lambda program: lowered, "key", sharding, wanted, cache, num_threads=1, progress=lambda *_: None
        )
        return {program.name: result.source for program, result in made.items()}

    for host in ("one", "other"):
        sources(host, lambda topic, names: names)
    (tmp_path / "one" / f"{program_key({}, 'key', wanted[0])}.program").write_bytes(b"damaged")
    loaded: list[Collection[str]] = []

    def all_of_one(topic: str, names: Collection[str]) -> Collection[str]:
        loaded.append(names)
        return names

    expected = {"decode/1": "compiled", "decode/2": "cache"}
    assert sources("one", all_of_one) == expected
    assert sources("other", lambda topic, names: [name for name in names if name in loaded[0]]) == expected
