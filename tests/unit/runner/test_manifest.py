"""The manifest of a shipped cache, and what it says where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.runner.program_cache import (
    FILE_NAME,
    FORMAT,
    Manifest,
    ManifestEntry,
    differences,
    explain_misses,
    read_manifest,
    write_manifest,
)

KEY_PARTS = {"jax": "0.10.2", "processor": "flags : fpu sse2 avx2 avx512f " + " ".join(f"f{i}" for i in range(30))}
MANIFEST = Manifest(FORMAT, "model", KEY_PARTS, {"dtype": "float32"}, [ManifestEntry("decode/1", "k.program", 10, 1.5)])


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 2}', b"[]"])
def test_a_damaged_or_foreign_manifest_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert read_manifest(tmp_path) is None
    explain_misses(tmp_path, KEY_PARTS, 3)


def test_one_warning_names_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_manifest(tmp_path, MANIFEST)
    here = {"jax": "0.11.0", "processor": KEY_PARTS["processor"].replace("avx512f ", "") + " sve"}
    explain_misses(tmp_path, here, 11)
    (record,) = caplog.records
    assert "11 programs had to be compiled" in record.message
    assert "jax: 0.10.2 there, 0.11.0 here" in record.message
    assert "processor: only there avx512f, only here sve" in record.message


def test_missing_entries_of_the_same_setup_are_called_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_manifest(tmp_path, MANIFEST)
    explain_misses(tmp_path, KEY_PARTS, 1)
    assert "entries are missing or damaged" in caplog.text


def test_nothing_is_said_when_all_was_found_or_nothing_was_shipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    explain_misses(tmp_path, KEY_PARTS, 4)
    write_manifest(tmp_path, MANIFEST)
    explain_misses(tmp_path, {}, 0)
    assert not caplog.records


def test_a_part_that_only_one_side_knows_is_a_difference() -> None:
    assert differences({"a": "1"}, {"b": "2"}) == ["a: 1 there, none here", "b: none there, 2 here"]
