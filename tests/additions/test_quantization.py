"""A quantisation format is one file: offered, made from float weights, read from checkpoints, planned for, served."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.additions.overlay import Overlay, unnamed
from tests.additions.test_models import check_served
from tests.models.goldens import golden_checkpoint

pytestmark = pytest.mark.slow

INT16 = '''"""int16 weights, upcast in the matmul; checkpoints with `quant_method` steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from jaxserve.quant.tensor import TensorInfo
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.array import QuantArray
from jaxserve.quant.checkpoint import CheckpointForm, CheckpointForms, Read, ReadMatrix
from jaxserve.quant.format import Host
from jaxserve.quant.formats._rows import RowFormat


class Int16WeightOnly(RowFormat):
    """int16 values with one scale per output."""

    name = "int16-weight-only"
    bits: ClassVar[int] = 16
    dtype = np.dtype(np.int16)
    largest = 32767

    def rounded(self, scaled: np.ndarray) -> np.ndarray:
        return np.rint(scaled)

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Any, dtype: Any = "float32"
    ) -> list[Any]:
        import jax.numpy as jnp

        def matmul(weight: QuantArray[Any]) -> Any:
            matmul = jnp.einsum("ti,oi->to", x.astype(jnp.float32), weight.values.astype(jnp.float32))
            return (matmul * weight.scales).astype(dtype)

        return [matmul(weight) for weight in weights]


FORMAT = Int16WeightOnly()


def take_matrices(tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    """Take int16 values `NAME` and `NAME_step`, one for each output."""
    names = [name.removesuffix("_step") for name in tensors if name.endswith("_step")]
    for name in names:
        del tensors[name + "_step"]
        tensors[name] = replace(tensors[name], is_quantized=True)
    return {name: partial(read_matrix, name) for name in names}


def read_matrix(name: str, read: Read) -> Host:
    """Read values and scales."""
    return QuantArray(FORMAT, read(name), read(name + "_step"))


def read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    """Claim `quant_method` steps."""
    return CheckpointForm(take_matrices, CheckpointQuantization(FORMAT.name)) if found.get("quant_method") == "steps" else None


CHECKPOINTS = CheckpointForms(("steps",), read_config)
'''


@pytest.fixture
def extended(overlay: Overlay) -> Overlay:
    """The program with int16-weight-only."""
    overlay.add("jaxserve/quant/formats/int16_weight_only.py", INT16)
    assert unnamed(overlay, "a quantisation format") == set()
    return overlay


def write_steps(source: Path, folder: Path) -> Path:
    """Write a checkpoint with the matrices of its layers in int16."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and ".layers." in name]:
        wide = tensors[name].astype(np.float32)
        steps = np.abs(wide).max(axis=1) / np.float32(32767)
        tensors |= {name: np.rint(wide / steps[:, None]).astype(np.int16), f"{name}_step": steps}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "steps"}}))
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_quantisation_format_is_one_file(extended: Overlay) -> None:
    golden = golden_checkpoint("llama3_tiny")
    assert "int16-weight-only" in extended.run("-m", "jaxserve.cli.main", "serve", "--help")
    flags = ("--quantization", "int16-weight-only", "--device", "h200", "--no-compile")
    assert "int16-weight-only, " in extended.run("-m", "jaxserve.cli.main", "plan", str(golden.path), *flags)
    check_served(extended, golden.path, golden, *flags[:2])


def test_checkpoints_of_a_format_are_read_by_its_file(extended: Overlay, tmp_path: Path) -> None:
    golden = golden_checkpoint("llama3_tiny")
    path = write_steps(golden.path, tmp_path / "steps")
    plan = extended.run("-m", "jaxserve.cli.main", "plan", str(path), "--device", "h200", "--no-compile")
    assert "int16-weight-only, " in plan
    check_served(extended, path, golden)
