"""Arrays of this process as a file in shared memory, from which the engine process takes them."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from jaxserve.checkpoint.safetensors_file import ArrayLike, write_safetensors
from jaxserve.errors import CheckpointError, UnavailableError, invalid

SHARED_MEMORY: Final = Path("/dev/shm")
"""The file system in memory of Linux."""
_HEADER_BYTES: Final = 1 << 20


@contextlib.contextmanager
def arrays_file(arrays: Mapping[str, ArrayLike], shared_memory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Yield a safetensors file of the arrays, in a folder that only this user can open; it is gone after the block.

    It is in shared memory, or on disk if that has no space. Raises InvalidRequestError for what are no arrays, and
    UnavailableError if the file cannot be written.
    """
    if not arrays or not all(isinstance(name, str) and hasattr(array, "dtype") for name, array in arrays.items()):
        raise invalid("arrays", "must be arrays by the names of the model's tensors")
    try:
        num_bytes = sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays.values())
    except TypeError as error:
        raise invalid("arrays", f"must be arrays of numpy or JAX: {error}") from None
    has_space = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > num_bytes + _HEADER_BYTES
    with contextlib.ExitStack() as stack:
        try:
            parent = shared_memory if has_space else None
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-", dir=parent))
            path = Path(folder) / "tensors.safetensors"
            write_safetensors(path, arrays)
        except CheckpointError as error:
            raise invalid("arrays", str(error)) from None
        except OSError as error:
            raise UnavailableError(f"The arrays cannot be given to the engine: {error.strerror or error}.") from error
        yield path
