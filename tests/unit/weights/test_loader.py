"""The loader checks names and shapes, and needs no more memory than the model and one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_config, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import write_safetensors

CONFIG = json.loads((DATA / "llama2_tiny" / "config.json").read_text())


def _tensors(dtype: np.dtype | type = np.float32) -> dict[str, np.ndarray]:
    skeleton = make_skeleton(decoder_config(CONFIG), plain(jnp.dtype("float32")))
    return {leaf.name: np.ones(leaf.shape, dtype) for leaf in skeleton.leaves}


def _load(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, object] | None = None) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = open_model(folder)
    decoder = decoder_config(checkpoint.config)
    names: list[str] = []
    load_params(
        checkpoint,
        make_skeleton(decoder, plain(jnp.dtype("float32"))),
        make_sharding(decoder, MeshShape()),
        lambda done, total, name: names.append(name),
    )
    return names


def test_every_tensor_is_reported(tmp_path: Path) -> None:
    assert sorted(_load(tmp_path, _tensors(ml_dtypes.bfloat16))) == sorted(_tensors())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = _tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' expected .* not found"):
        _load(tmp_path, tensors)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = _tensors()
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': shape \(64,\) expected .* found \(63,\)"):
        _load(tmp_path, tensors)


def test_an_unused_tensor_is_rejected(tmp_path: Path) -> None:
    tensors = _tensors() | {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias' is not expected"):
        _load(tmp_path, tensors)


def test_derived_buffers_and_a_tied_head_are_ignored(tmp_path: Path) -> None:
    tensors = _tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    _load(tmp_path, tensors, {**CONFIG, "tie_word_embeddings": True})


def test_parameters_stay_when_their_file_is_overwritten(tmp_path: Path) -> None:
    """Also where tensors begin at multiples of 64 bytes: for a CPU, jax keeps the memory of such an array."""
    values = np.random.default_rng(0)
    tensors = {name: values.normal(size=array.shape).astype(np.float32) for name, array in _tensors().items()}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = write_safetensors(tmp_path / "model.safetensors", tensors)
    stored = file.read_bytes()
    num_header_bytes = int.from_bytes(stored[:8], "little")
    header, data = stored[8 : 8 + num_header_bytes], stored[8 + num_header_bytes :]
    header += b" " * (-(8 + num_header_bytes) % 64)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    checkpoint = open_model(tmp_path)
    config = decoder_config(checkpoint.config)
    skeleton = make_skeleton(config, plain(jnp.dtype("float32")))
    params = load_params(checkpoint, skeleton, make_sharding(config, MeshShape()), lambda *_: None)
    before = [np.array(param) for param in params]
    with file.open("r+b") as opened:
        opened.seek(8 + len(header))
        opened.write(b"\xff" * len(data))
    for param, expected in zip(params, before, strict=True):
        np.testing.assert_array_equal(np.asarray(param), expected)


_MEASURE = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxserve.models.registry import open_model
from jaxserve.models.registry import decoder_config
from jaxserve.layers.policy import plain
from jaxserve.models.skeleton import make_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
jax.config.update("jax_platforms", "cpu")
checkpoint = open_model(Path(sys.argv[1]))
config = decoder_config(checkpoint.config)
skeleton, sharding = make_skeleton(config, plain(jnp.dtype("float32"))), make_sharding(config, MeshShape())
jnp.zeros(1).block_until_ready()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
print(peak() - before, sum(p.nbytes for p in params), max(p.nbytes for p in params))
"""


@pytest.mark.slow
def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    leaves = make_skeleton(decoder_config(config), plain(jnp.dtype("float32"))).leaves
    write_safetensors(
        tmp_path / "model.safetensors", {leaf.name: np.zeros(leaf.shape, ml_dtypes.bfloat16) for leaf in leaves}
    )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    peak, resident, largest = map(int, done.stdout.split())
    assert resident > 400 << 20, "large enough to measure"
    assert peak <= 1.3 * resident + largest
