"""A GGUF model in several files, as llama.cpp's gguf-split writes it: all metadata is in the first, tensors are in any of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.gguf.header import GGUFHeader, read_header
from jaxserve.errors import CheckpointError, shown

_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_MAX_FILES: Final = 65_535
"""gguf-split stores numbers of files in 16 bits."""
_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


def part_names(name: str) -> list[str]:
    """Return the names of all files of a split model, in order, by the name of any of them (`NAME-00001-of-00005.gguf`); [name] if it
    is no such name."""
    found = _NAME.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return [name]
    return [f"{found['stem']}-{number:05}-of-{found['count']}.gguf" for number in range(1, int(found["count"]) + 1)]


def gguf_files(path: Path) -> list[Path]:
    """Return the file of a GGUF model, or all files of a split model by its first. Raises CheckpointError as `read_headers` does."""
    return [path] if len(part_names(path.name)) == 1 else list(read_headers(path))


def read_headers(path: Path) -> dict[Path, GGUFHeader]:
    """Read the header of a GGUF file, and those of all other files of its model if it is the first of several, in their order.

    Raises CheckpointError in one line for a file that is not the first, a missing one, files of different models, and a tensor that is
    missing or in two files.
    """
    first = read_header(path)
    count = first.metadata.get(_COUNT, 0)
    if count in (0, 1):
        return {path: first}
    headers = {path: first} | {file: read_header(file) for file in _files(path, count)[1:]}
    total = first.metadata.get(_NUM_TENSORS)
    places = dict[str, Path]()
    for number, (file, header) in enumerate(headers.items()):
        for key, expected in ((_NUMBER, number), (_COUNT, count), (_NUM_TENSORS, total)):
            if (found := header.metadata.get(key)) != expected:
                raise CheckpointError(
                    f"{file}: key '{key}': expected {expected!r:.20}, as of file {number + 1} of {path.name}, found {found!r:.20}"
                )
        for name in header.tensors:
            if (other := places.setdefault(name, file)) != file:
                raise CheckpointError(f"{file}: tensor {shown(name)}: expected in one file, found in {other.name}, too")
    if len(places) != total:
        raise CheckpointError(
            f"{path}: key '{_NUM_TENSORS}': expected {total!r:.20} tensors in the {count} files, found {len(places)}"
        )
    return headers


def _files(path: Path, count: Any) -> list[Path]:
    """Return all files of a split model by its first. count: `split.count` of the metadata."""
    if type(count) is not int or not 0 < count <= _MAX_FILES:
        raise CheckpointError(f"{path}: key '{_COUNT}': expected at most {_MAX_FILES} files, found {count!r:.20}")
    files = [path.with_name(name) for name in part_names(path.name)]
    if len(files) != count:
        raise CheckpointError(
            f"{path}: key '{_COUNT}': expected the name of the first of {count} files, NAME-00001-of-{count:05}.gguf, found "
            f"{shown(path.name)}"
        )
    if path != files[0]:
        raise CheckpointError(f"{path}: is not the first file of a split model; give {files[0]}")
    if missing := [file.name for file in files if not file.is_file()]:
        others = "; so is " + " and ".join(missing[1:]) if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: expected all {count} files of the model in its folder, {missing[0]} is missing{others}"
        )
    return files
