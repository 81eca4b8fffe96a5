"""Each device's part of packed matrices: cut from the stored tensors, of which no more is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import LeafSpec, make_skeleton
from jaxserve.quant.array import QuantArray, Ranges
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.parts import parts_by_device, slices
from jaxserve.weights.reader import TensorReader
from tests.models.goldens import golden_checkpoint
from tests.models.mxfp4_files import write_mxfp4
from tests.models.nvfp4_files import quantization, write_nvfp4
from tests.models.test_gguf_expert_blocks import write_mixed
from tests.unit.checkpoint.int4_files import LAYOUTS, write_int4

TENSOR, EXPERT = MeshShape(2), MeshShape(2, expert=2)
CPU, GPU, TPU = Chip("cpu"), Chip("gpu", (9, 0)), Chip("tpu")


def gguf(folder: Path) -> Path:
    return write_mixed(folder / "a.gguf")


def nvfp4(folder: Path) -> Path:
    write_nvfp4(folder, golden_checkpoint("qwen3_moe_tiny").path, quantization())
    return folder


def mxfp4(folder: Path) -> Path:
    write_mxfp4(folder / "a")
    return folder / "a"


def int4(layout: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_int4(folder, golden_checkpoint("llama3_tiny").path, LAYOUTS[layout])
        return folder

    return write


class Parts:
    """The matrices of a checkpoint in a format that is not one of rows, and what each of two devices holds of them."""

    def __init__(self, path: Path, shape: MeshShape, chip: Chip, chosen: Any = "auto") -> None:
        self.checkpoint = open_model(path)
        decoder = decoder_of(self.checkpoint).for_devices(shape.tensor)
        config = Config(model=ModelConfig(model=str(path), quantization=chosen))
        policy = replace(make_policy(config, decoder, chip), mesh=shape, fused_for=2 if chip.platform == "gpu" else 0)
        skeleton = make_skeleton(decoder, policy)
        self.config, self._sharding = skeleton.config, make_sharding(decoder, shape)
        self.leaves = [leaf for leaf in skeleton.leaves if isinstance(leaf.declared, QuantArray) and not leaf.is_by_row]

    def held(self, leaf: LeafSpec) -> list[list[Ranges]]:
        """Return the parts of all arrays of a leaf, by device."""
        of_arrays = [parts_by_device(self._sharding.place(spec.axes), spec.shape) for spec in leaf.arrays]
        return [[parts[device] for parts in of_arrays] for device in jax.devices()[:2]]

    def read(self, leaf: LeafSpec, held: list[Ranges]) -> tuple[tuple[np.ndarray, ...] | None, int]:
        """Return one device's arrays, and the stored bytes that were read for them."""
        counts = list[int]()
        return TensorReader(self.checkpoint, self.config, counts.append).part(leaf, held), sum(counts)

    def whole(self, leaf: LeafSpec) -> tuple[np.ndarray, ...]:
        reader = TensorReader(self.checkpoint, self.config)
        return leaf.assemble(reader.read(name, rows) for name, rows in leaf.sources)


CASES = [
    (gguf, TENSOR, CPU, "gguf-weight-only"),
    (gguf, EXPERT, CPU, "gguf-weight-only"),
    (gguf, TENSOR, GPU, "gguf-weight-only"),
    (gguf, TENSOR, TPU, "gguf-weight-only"),
    (gguf, EXPERT, TPU, "gguf-weight-only"),
    (nvfp4, TENSOR, CPU, "auto"),
    (nvfp4, EXPERT, GPU, "auto"),
    (mxfp4, EXPERT, GPU, "auto"),
    *((int4(name), TENSOR, CPU, "auto") for name in ("packed", "packed zeros", "gptq", "awq")),
    (int4("gptq zeros"), TENSOR, GPU, "auto"),
]


@pytest.mark.parametrize(("write", "shape", "chip", "chosen"), CASES)
def test_a_device_reads_the_bytes_of_its_part(
    tmp_path: Path, write: Callable[[Path], Path], shape: MeshShape, chip: Chip, chosen: Any
) -> None:
    parts, num_split = Parts(write(tmp_path), shape, chip, chosen), 0
    assert parts.leaves
    for leaf in parts.leaves:
        whole, stored = parts.whole(leaf), sum(parts.checkpoint.tensors[name].num_stored_bytes for name in leaf.tensors)
        for held in parts.held(leaf):
            arrays, num_read = parts.read(leaf, held)
            assert arrays is not None, leaf.name
            for array, own, ranges in zip(arrays, whole, held, strict=True):
                np.testing.assert_array_equal(array, own[slices(ranges)], err_msg=leaf.name)
            share = math.prod(map(len, held[0])) / math.prod(leaf.arrays[0].shape)
            num_split += share < 1
            assert abs(num_read - share * stored) <= len(leaf.tensors), leaf.name
    assert num_split > len(parts.leaves) // 2


@pytest.mark.parametrize(("write", "shape"), [(nvfp4, MeshShape(4)), (mxfp4, TENSOR)])
def test_a_matrix_is_read_whole_if_devices_split_its_blocks(
    tmp_path: Path, write: Callable[[Path], Path], shape: MeshShape
) -> None:
    """Devices have 8 or 16 inputs each of blocks that are twice as large, so blocks are cut after they are read."""
    parts = Parts(write(tmp_path), shape, CPU)
    (leaf,) = (leaf for leaf in parts.leaves if leaf.name.endswith("layers.0.mlp.experts.down_proj.weight"))
    arrays, num_read = parts.read(leaf, parts.held(leaf)[0])
    assert (arrays, num_read) == (None, 0)


def test_floats_are_not_cut_in_formats_that_round_a_matrix_as_a_whole(tmp_path: Path) -> None:
    parts = Parts(golden_checkpoint("qwen3_moe_tiny").path, TENSOR, CPU, "nvfp4-weight-only")
    arrays, num_read = parts.read(parts.leaves[0], parts.held(parts.leaves[0])[0])
    assert (arrays, num_read) == (None, 0)
