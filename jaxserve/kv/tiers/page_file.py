"""One page or snapshot in a file: magic, checksum, blocks. A file is written under another name and renamed, so none is half there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from jaxserve.kv.tiers.page import CHECKSUM_BYTES, Page, PageLayout, checksum
from jaxserve.types import BlockHash

_MAGIC: Final = b"jaxserve-kv-page"
HEADER_BYTES: Final = len(_MAGIC) + CHECKSUM_BYTES
_SUFFIX: Final = ".page"
_ORDER: Final = "order"
"""File with the hex digits of an engine's pages, one per line, the least recently used first."""


def file_bytes(layout: PageLayout, name: BlockHash) -> int:
    """Return the bytes of the file of this name."""
    return HEADER_BYTES + layout.of(name).num_bytes


def page_path(folder: Path, name: BlockHash) -> Path:
    """Return the place of a page in the folder of an engine."""
    digits = name.hex()
    return folder / digits[:2] / f"{digits}{_SUFFIX}"


def find_pages(folder: Path, layout: PageLayout) -> list[BlockHash]:
    """Return the pages in the folder of an engine, least recently used first; delete what is no whole page.

    Those that were stored since `write_order` come last, in the order of their times.
    """
    places = {digits: place for place, digits in enumerate(_read_order(folder))}
    found: list[tuple[int, int, BlockHash]] = []
    for path in folder.glob("??/*"):
        try:
            name, status = BlockHash(bytes.fromhex(path.name.removesuffix(_SUFFIX))), path.lstat()
            is_page = stat.S_ISREG(status.st_mode) and status.st_size == file_bytes(layout, name)
        except (OSError, ValueError):
            is_page = False
        if is_page and path == page_path(folder, name):
            found.append((places.get(name.hex(), len(places)), status.st_mtime_ns, name))
        else:
            path.unlink(missing_ok=True)
    return [name for _, _, name in sorted(found)]


def write_order(folder: Path, names: Iterable[BlockHash]) -> None:
    """Store the order in which the pages of an engine were used, least recently used first. Raises OSError."""
    unfinished = folder / f"{_ORDER}.part"
    try:
        unfinished.write_text("".join(f"{name.hex()}\n" for name in names))
        unfinished.rename(folder / _ORDER)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _read_order(folder: Path) -> list[str]:
    try:
        return (folder / _ORDER).read_text(errors="replace").split()
    except OSError:
        return []


def read_page(path: Path, page: Page) -> bool:
    """Read a file into `page`. Returns False if it is damaged. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        header = file.read(HEADER_BYTES)
        sizes = [file.readinto(memoryview(block)) for block in page]  # type: ignore[arg-type]
    return sizes == [block.nbytes for block in page] and header == _MAGIC + checksum(page)


def write_page(path: Path, page: Page) -> None:
    """Write a page under another name and rename it. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb", buffering=0) as file:
            file.write(_MAGIC + checksum(page))
            for block in page:
                _write_all(file.fileno(), np.ascontiguousarray(block).data)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
