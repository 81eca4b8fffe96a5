"""Cuts pixels into the patches that a tower reads, in the order in which it reads them."""

from __future__ import annotations

from typing import Final

import numpy as np

_CLASS_PLACE: Final = np.array([[0, -1]], np.int32)


def cut_patches(pixels: np.ndarray, patch: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut (height, width, 3) pixels into patches, block by block; rows and columns beyond the last whole patch are left out.

    Return patches and positions as those of an `EncoderItem`.
    """
    height, width = pixels.shape[0] // patch, pixels.shape[1] // patch
    blocks = height // merge, merge, width // merge, merge
    cut = pixels[: height * patch, : width * patch].reshape(blocks[0], merge, patch, blocks[2], merge, patch, -1)
    patches = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(height * width, -1)
    rows, columns = np.indices((height, width), np.int32).reshape(2, *blocks).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return patches, np.stack([rows, columns], axis=1)


def as_read(
    patches: np.ndarray,
    positions: np.ndarray,
    block: int,
    *,
    window: int | None = None,
    inner_merge: int = 1,
    has_class_token: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return patches and positions in the order in which a tower reads them. block: patches of a block; see `ImageProcessorConfig` for others."""
    if inner_merge > 1:
        patches, positions = _by_inner_window(patches, positions, inner_merge, block)
    if window is not None:
        patches, positions = _by_window(patches, positions, window, block)
    return _with_class_token(patches, positions) if has_class_token else (patches, positions)


def _with_class_token(patches: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return patches and positions after the place of a class token."""
    return np.pad(patches, ((1, 0), (0, 0))), np.concatenate([_CLASS_PLACE, positions])


def _by_window(patches: np.ndarray, positions: np.ndarray, side: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return patches and positions with the blocks of each window side by side. side: patches of a window's side."""
    rows, columns = positions[::block].T // side
    order = np.lexsort((columns, rows))
    return tuple(each.reshape(len(order), block, -1)[order].reshape(each.shape) for each in (patches, positions))  # type: ignore[return-value]


def _by_inner_window(
    patches: np.ndarray, positions: np.ndarray, side: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return patches and positions with those of each window side by side within each block. side: patches of a window's side."""
    rows, columns = positions[:block].T // side
    order = np.lexsort((columns, rows))
    return tuple(each.reshape(-1, block, each.shape[1])[:, order].reshape(each.shape) for each in (patches, positions))  # type: ignore[return-value]
