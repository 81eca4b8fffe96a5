"""Files with one tensor, as clients send them."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np

VALUES = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
BF16 = (VALUES.view(np.uint32) >> 16).astype("<u2")


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype.hasobject)
    return file.getvalue()


def safetensors(dtype: str = "F32", shape: Any = (3, 4), data: bytes = VALUES.tobytes(), **more: Any) -> bytes:
    header = {"embeds": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, len(data)]}, **more}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def pickled(storage: str = "FloatStorage", offset: int = 0, shape: Any = (3, 4), strides: Any = (4, 1)) -> bytes:
    """The opcodes of torch.save of version 2 for one tensor."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def numbers(values: Any) -> bytes:
        return b"".join(b"K" + bytes([value]) for value in values) + {2: b"\x86", 3: b"\x87"}[len(values)]

    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00(("
        + text("storage")
        + b"q\x01ctorch\n"
        + storage.encode()
        + b"\nq\x02"
        + text("0")
        + b"q\x03"
        + text("cpu")
        + b"q\x04K\x0ctq\x05QK"
        + bytes([offset])
        + numbers(shape)
        + b"q\x06"
        + numbers(strides)
        + b"q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )


def torch_file(pickle_bytes: bytes, data: bytes = VALUES.tobytes(), **entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickle_bytes, "byteorder": b"little", "data/0": data, **entries}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()
