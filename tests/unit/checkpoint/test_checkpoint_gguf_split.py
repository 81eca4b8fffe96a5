"""A GGUF model in several files is that of one file, and files that do not belong together are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.gguf.split import part_names
from jaxserve.checkpoint.open import checkpoint_files
from jaxserve.errors import CheckpointError
from jaxserve.executor.content_digest import content_digest, content_hash, weights_digest
from jaxserve.models.registry import open_model
from jaxserve.quant.stored_blocks import StoredBlocks
from tests.unit.checkpoint.checkpoint_files import decoder_metadata, decoder_weights, stored, write_decoder, write_gguf

NAMES = [f"a-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def write_blocks(path: Path, num_files: int, seed: int = 0) -> Path:
    """Write a tiny Llama whose projections of queries and keys, with reordered rows, and embeddings are in blocks."""
    tensors = {
        name: stored("Q8_0", value) if name.endswith(("embd.weight", "q.weight", "k.weight")) else ("F32", value)
        for name, value in decoder_weights(seed).items()
    }
    return write_gguf(path, "llama", decoder_metadata("llama"), tensors, num_files)


def test_a_split_model_is_that_of_one_file(tmp_path: Path) -> None:
    whole, split = open_model(write_blocks(tmp_path / "a.gguf", 1)), open_model(write_blocks(tmp_path / "a.gguf", 3))
    assert split.path == tmp_path / NAMES[0]
    assert (split.config, split.generation_config) == (whole.config, whole.generation_config)
    assert list(split.tensors) == list(whole.tensors)
    assert {info.file.name for info in split.tensors.values()} == set(NAMES)
    for name, info in whole.tensors.items():
        other = split.tensors[name]
        assert (other.shape, other.stored_dtype, other.num_stored_bytes) == (
            info.shape,
            info.stored_dtype,
            info.num_stored_bytes,
        )
        expected, found = whole.read(name), split.read(name)
        if isinstance(expected, StoredBlocks):
            assert isinstance(found, StoredBlocks)
            expected, found = expected.blocks, found.blocks
        np.testing.assert_array_equal(found, expected)


def test_a_first_file_may_have_metadata_only(tmp_path: Path) -> None:
    """`gguf-split --no-tensor-first-split` writes it so."""
    write_parts(tmp_path, [["a", "b"]], first=[])
    assert list(open_gguf(tmp_path / "m-00001-of-00002.gguf").tensors) == ["a", "b"]


def test_the_identity_of_a_split_model_is_that_of_all_its_files(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "a.gguf", 3)
    assert list(checkpoint_files(path)) == NAMES
    before = content_hash(path), content_digest(open_model(path), ""), weights_digest([open_model(path)])
    last = bytearray((tmp_path / NAMES[2]).read_bytes())
    last[-1] ^= 1
    (tmp_path / NAMES[2]).write_bytes(last)
    after = content_hash(path), content_digest(open_model(path), ""), weights_digest([open_model(path)])
    assert not set(before) & set(after)


def test_a_whole_model_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / NAMES[1], "llama")
    assert open_model(path).path == path
    assert checkpoint_files(path) == {path.name: path}


@pytest.mark.parametrize("name", ["a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00000.gguf", "a-1-of-3.gguf"])
def test_other_names_are_those_of_one_file(name: str) -> None:
    assert part_names(name) == [name]


def test_a_name_in_a_folder_has_parts_there() -> None:
    assert part_names(f"Q4/{NAMES[2]}") == [f"Q4/{name}" for name in NAMES]


def write_parts(folder: Path, others: list[list[str]], first: list[str], **changes: int) -> Path:
    """Write a file with the tensors of `first`, and others. changes: to the metadata of the last, `__` standing for a dot."""
    parts = [first, *others]
    total = sum(map(len, parts))
    for number, names in enumerate(parts):
        own = {"split.no": number, "split.count": len(parts), "split.tensors.count": total}
        if number == len(parts) - 1:
            own |= {key.replace("__", "."): value for key, value in changes.items()}
        path = folder / f"m-{number + 1:05}-of-{len(parts):05}.gguf"
        write_gguf(path, "llama", own, {name: ("F32", np.zeros(4, np.float32)) for name in names})
    return folder / f"m-00001-of-{len(parts):05}.gguf"


def of_parts(others: list[list[str]], **changes: int) -> Callable[[Path], Path]:
    return lambda folder: write_parts(folder, others, ["a"], **changes)


def without(*numbers: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_parts(folder, [["b"], ["c"], ["d"]], ["a"])
        for number in numbers:
            (folder / f"m-0000{number}-of-00004.gguf").unlink()
        return path

    return write


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "one missing": (
        without(3),
        "m-00001-of-00004.gguf: expected all 4 files of the model in its folder, m-00003-of-00004.gguf is missing",
    ),
    "two missing": (without(2, 4), "m-00002-of-00004.gguf is missing; so is m-00004-of-00004.gguf"),
    "not the first": (
        lambda folder: write_parts(folder, [["b"]], ["a"]).with_name("m-00002-of-00002.gguf"),
        "m-00002-of-00002.gguf: is not the first file of a split model; give {folder}/m-00001-of-00002.gguf",
    ),
    "renamed": (
        lambda folder: write_parts(folder, [["b"]], ["a"]).rename(folder / "m.gguf"),
        "m.gguf: key 'split.count': expected the name of the first of 2 files, NAME-00001-of-00002.gguf, found 'm.gguf'",
    ),
    "other count in the name": (
        lambda folder: write_parts(folder, [["b"]], ["a"]).rename(folder / "m-00001-of-00003.gguf"),
        "key 'split.count': expected the name of the first of 2 files, NAME-00001-of-00002.gguf, found",
    ),
    "files in another order": (
        of_parts([["b"]], split__no=0),
        "m-00002-of-00002.gguf: key 'split.no': expected 1, as of file 2 of m-00001-of-00002.gguf, found 0",
    ),
    "a file of another count": (
        of_parts([["b"]], split__count=3),
        "m-00002-of-00002.gguf: key 'split.count': expected 2, as of file 2 of m-00001-of-00002.gguf, found 3",
    ),
    "a file of a larger model": (
        of_parts([["b"]], split__tensors__count=3),
        "m-00002-of-00002.gguf: key 'split.tensors.count': expected 2, as of file 2 of m-00001-of-00002.gguf, found 3",
    ),
    "a tensor twice": (
        of_parts([["b", "a"]]),
        "m-00002-of-00002.gguf: tensor 'a': expected in one file, found in m-00001-of-00002.gguf, too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_whole_model_are_refused(case: str, tmp_path: Path) -> None:
    write, expected = REFUSED[case]
    path = write(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert expected.format(folder=tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    whole = {"split.no": 0, "split.count": 2, "split.tensors.count": 3}
    for number, name in enumerate("ab"):
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        write_gguf(path, "llama", whole | {"split.no": number}, {name: ("F32", np.zeros(4, np.float32))})
    first = tmp_path / "m-00001-of-00002.gguf"
    with pytest.raises(CheckpointError) as caught:
        open_gguf(first)
    assert str(caught.value) == f"{first}: key 'split.tensors.count': expected 3 tensors in the 2 files, found 2"


@pytest.mark.parametrize("count", [1.5, "three", 70_000, [3]])
def test_a_count_is_checked_before_files_are_looked_for(count: object, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / NAMES[0], "llama", {"split.count": count}, {})
    with pytest.raises(CheckpointError, match=r"key 'split\.count': expected"):
        open_gguf(path)
