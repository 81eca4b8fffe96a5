"""Files with one tensor: what is read, and that nothing else is, least of all executed."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest

from jaxserve.frontend.prompt_embeds.formats import TensorError, read_tensor
from tests.unit.frontend.prompt_embeds.tensor_files import BF16, VALUES, npy, pickled, safetensors, torch_file


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("npy", npy(VALUES)),
        ("safetensors", safetensors(__metadata__={"format": "pt"})),
        ("torch", torch_file(pickled())),
        ("torch-view", torch_file(pickled(offset=4), bytes(16) + VALUES.tobytes())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_float32_is_read_as_it_is(name: str, data: bytes) -> None:
    found = read_tensor(data)
    assert found.dtype == np.float32 and np.array_equal(found, VALUES)


def test_types_of_16_bits_are_widened() -> None:
    half = VALUES.astype(np.float16)
    for data in (
        npy(half),
        safetensors("F16", data=half.tobytes()),
        torch_file(pickled("HalfStorage"), half.tobytes()),
    ):
        assert np.array_equal(read_tensor(data), half.astype(np.float32))
    exact = (BF16.astype(np.uint32) << 16).view(np.float32)
    for data in (safetensors("BF16", data=BF16.tobytes()), torch_file(pickled("BFloat16Storage"), BF16.tobytes())):
        assert np.array_equal(read_tensor(data), exact)
    assert read_tensor(torch_file(pickled(shape=(1, 3, 4), strides=(12, 4, 1)))).shape == (1, 3, 4)


# torch.save(torch.arange(12.).reshape(3, 4)) of torch 2.13, deflated.
REAL = (
    "UEsDBBQAAAAIAJOVeV10V1Q2XAIAACkGAAAJAAAAdGVuc29yLnB0pVS/b9NAFD7HiRMMSloQVFSigi1IkDp2fjggGmohLx5IU4GiLpZrX4NVN+"
    "7Zl/BDQoqEqMTOBBJi4l9gZWNEMDMgMcHChMTIXUxd+1qMgKe8nJK873vfvXzPPYPPA1AqgUMxB04CK7DvuBO47FjYqu1ue7pWBhupmOZs7JOq"
    "mjnGrheKZgA3x67nmBiOQj8wJ7KIQLU6KBLGkFRaQ4i4CCLqnm/h9ehLEeUGHKmRED/gyWnvjlHeOIFRYc0ABm/k95Bg5A1uDxWf2LbvedDGrj"
    "8KxZuBAwPo3HBtLKLSxT46hpHYR8drPaNYer59+swzwkaz99ubLoAL8U1rW36wY2FzAoOQ8OvaOebCTNRpm9ffPj6i4rnMNougfdDm1yxMy3OH"
    "ox04wrqmZHc6OloNKqB7F33JkRa5TAHzoBsL2LyPoU9Hp2tX/6Xvfnguxh6kGh5f+3xWIF2ETA1lsJJy1bKka1f+Q0DEOu2St+vkRXJK8iXJNy"
    "Q/kQSrxMskz5OUVqnSew+3ViTqtUylFXAqVhq7ocJKVUTK+P7F8Naf578E5AMDzC4fwsAlDnhgUS+brqNrtb+cRb3ZltV6p9Os19Vmo9VQJLkl"
    "KY1GR1FbsiIrTbWjttWWQlWuf3/6qkp0VGcqOSo21pnclLlDytnnAItOLsBCCvk1gWZ2iyVJmngxRbLGgYzNYXmSRpxP8XxI8MQLwMKT7iin4L"
    "dzgPEui036oJIeIQ9YN7Hg5N+zlML2E+CjjdMzBOHSvs34yzGyyJzvuOj8wUcnwc1+eluIPkdPsIIQYYqz+qj2J1BLAQIUAxQAAAAIAJOVeV10"
    "V1Q2XAIAACkGAAAJAAAAAAAAAAAAAACAAQAAAAB0ZW5zb3IucHRQSwUGAAAAAAEAAQA3AAAAgwIAAAAA"
)


def test_a_file_of_torch_itself_is_read() -> None:
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(REAL))) as packed:
        data = packed.read("tensor.pt")
    assert np.array_equal(read_tensor(data), np.arange(12, dtype=np.float32).reshape(3, 4))


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was executed",))


WRONG = {
    "text": (b"hello, this is no tensor", "no file of a supported format"),
    "pickle": (pickle.dumps(VALUES), "no file of a supported format"),
    "npy-object": (npy(np.array([Bomb()], dtype=object)), "float32, float16 or bfloat16"),
    "npy-double": (npy(VALUES.astype(np.float64)), "float64"),
    "npy-short": (npy(VALUES)[:-1], "does not fit"),
    "npy-large": (npy(VALUES).replace(b"(3, 4)", b"(9999999999, 9999999999)"), "header is damaged|does not fit"),
    "npy-fortran": (npy(np.asfortranarray(VALUES)), "Fortran"),
    "safetensors-two": (safetensors(other={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), "2 tensors"),
    "safetensors-type": (safetensors("F64"), "F64"),
    "safetensors-shape": (safetensors(shape=(3, 5)), "does not fit"),
    "safetensors-wide": (safetensors(shape=(0, 10**30), data=b""), "header is damaged|does not fit"),
    "safetensors-axes": (safetensors(shape=(3, 4, *[1] * 70)), "does not fit"),
    "safetensors-negative": (safetensors(shape=(-3, -4)), "does not fit"),
    "safetensors-short": (safetensors()[:-4], "truncated"),
    "safetensors-header": ((1 << 60).to_bytes(8, "little") + b"{" + bytes(64), "header is damaged"),
    "safetensors-text": ((8).to_bytes(8, "little") + b'{"\xff":{}}' + bytes(64), "header is damaged"),
    "safetensors-deep": ((40_000).to_bytes(8, "little") + b'{"a":' + b"[" * 39_995, "header is damaged"),
    "torch-code": (torch_file(pickle.dumps(Bomb())), "something else than one plain tensor"),
    "torch-global": (torch_file(pickled().replace(b"ccollections\nOrderedDict", b"cos\nsystem")), "something else"),
    "torch-extra": (torch_file(pickled()[:-1] + pickle.dumps(Bomb(), 2)), "something else|damaged"),
    "torch-parameter": (torch_file(pickled().replace(b"tensor_v2", b"parameter")), "something else"),
    "torch-device": (torch_file(pickled().replace(b"cpu", b"gpu")), "something else"),
    "torch-int": (torch_file(pickled("LongStorage")), "LongStorage"),
    "torch-strides": (torch_file(pickled(strides=(1, 3))), "contiguous"),
    "torch-outside": (torch_file(pickled(offset=8)), "outside of its storage"),
    "torch-empty": (torch_file(b""), "damaged|something else"),
    "torch-big-endian": (torch_file(pickled(), byteorder=b"big"), "little-endian"),
    "torch-long": (torch_file(pickled() + bytes(5000)), "more than a tensor"),
    "torch-short": (torch_file(pickled())[:-30], "zip archive is damaged"),
    "torch-no-data": (torch_file(pickled()).replace(b"data/0", b"data/1"), "not one that torch.save writes|damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused_and_nothing_in_them_runs(name: str) -> None:
    data, reason = WRONG[name]
    with pytest.raises(TensorError, match=reason):
        read_tensor(data)


def test_a_compressed_archive_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled())
        archive.writestr("archive/data/0", bytes(1 << 20))
    with pytest.raises(TensorError, match=r"not one that torch\.save writes"):
        read_tensor(file.getvalue())
