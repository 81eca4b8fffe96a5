"""Checkpoints stored in fp8: which weights are kept, which dequantised, and that both compute the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model, read_decoder
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from jaxserve.tools.planning.devices import ACCELERATORS
from jaxserve.tools.planning.fit import model_sizes
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors
from tests.unit.checkpoint.fp8_files import E4M3, LAYOUTS, WHOLE, write_fp8

SOURCE = golden_checkpoint("llama3_tiny").path
ROWS = [name for name, layout in LAYOUTS.items() if layout.scale_shape != "block"]
BLOCKS = [name for name, layout in LAYOUTS.items() if layout.scale_shape == "block"]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def loaded(folder: Path, quantization: str) -> tuple[str, dict[str, np.ndarray]]:
    """Return the chosen format and every parameter, on a CPU in float32."""
    decoder = decoder_of(open_model(folder))
    config = Config(model=ModelConfig(model=str(folder), quantization=quantization))
    policy = make_policy(config, decoder, Chip("cpu"))
    return policy.quant.name, load(folder, policy)


def is_matrix(name: str, params: dict[str, np.ndarray]) -> bool:
    return params[name].ndim == 2 and name not in WHOLE


@pytest.mark.parametrize("name", ROWS)
def test_scales_of_outputs_and_tensors_keep_the_stored_values(tmp_path: Path, name: str) -> None:
    dequantised = write_fp8(tmp_path, SOURCE, LAYOUTS[name])
    chosen, params = loaded(tmp_path, "auto")
    assert chosen == ("fp8-weight-only" if name == "weights alone" else "fp8")
    for tensor, expected in dequantised.items():
        found = params[tensor]
        if is_matrix(tensor, params):
            assert found.dtype == E4M3
            found = found.astype(np.float32) * params[f"{tensor}_scale"][:, None]
        np.testing.assert_array_equal(found, expected, err_msg=tensor)
    assert all(params[tensor].dtype == np.float32 for tensor in WHOLE if tensor in params), "plain matrices stay plain"


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_of_blocks_keep_the_stored_values(tmp_path: Path, name: str) -> None:
    """The last blocks of a matrix are smaller than the others, along its outputs and its inputs."""
    dequantised = write_fp8(tmp_path, SOURCE, LAYOUTS[name])
    chosen, params = loaded(tmp_path, "auto")
    assert chosen == "fp8-block-weight-only"
    for tensor, expected in dequantised.items():
        found = params[tensor]
        if is_matrix(tensor, params):
            assert found.dtype == E4M3
            scales = params[f"{tensor}_scale"]
            found = found.astype(np.float32) * scales.T.repeat(found.shape[1] // len(scales), axis=1)
        np.testing.assert_array_equal(found, expected, err_msg=tensor)


@pytest.mark.parametrize(("algorithm", "name"), [("FP8", "fp8"), ("FP8_PER_CHANNEL_PER_TOKEN", "channels")])
def test_the_model_optimizer_stores_the_same_values(tmp_path: Path, algorithm: str, name: str) -> None:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    found = []
    for folder, layout in (("a", LAYOUTS[name]), ("b", replace(LAYOUTS[name], config=config))):
        (tmp_path / folder).mkdir()
        write_fp8(tmp_path / folder, SOURCE, layout)
        found.append(loaded(tmp_path / folder, "auto"))
    (expected, params), (chosen, other) = found
    assert chosen == expected == "fp8"
    assert params.keys() == other.keys()
    for tensor, value in params.items():
        np.testing.assert_array_equal(other[tensor], value, err_msg=tensor)


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
@pytest.mark.parametrize("name", ["channels", "blocks"])
def test_nan_among_stored_values_is_rejected(tmp_path: Path, name: str, bits: int) -> None:
    """Kernels for few tokens would multiply with 480, those for many with NaN."""
    write_fp8(tmp_path, SOURCE, LAYOUTS[name])
    file, tensor = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    stored = open_safetensors(file).tensors[tensor]
    content = bytearray(file.read_bytes())
    content[stored.offset + stored.num_bytes // 2] = bits
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"'{tensor}': expected numbers, found NaN"):
        loaded(tmp_path, "auto")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8-weight-only"])
def test_a_chosen_format_is_made_from_stored_weights(tmp_path: Path, name: str, quantization: str) -> None:
    dequantised = write_fp8(tmp_path, SOURCE, LAYOUTS[name])
    chosen, params = loaded(tmp_path, quantization)
    assert chosen == quantization
    step = {"none": 0.0, "fp8": 1 / 16, "int8-weight-only": 1 / 2}[quantization]
    for tensor, expected in dequantised.items():
        found = params[tensor].astype(np.float32)
        if expected.ndim == 2 and quantization != "none":
            assert params[tensor].dtype.itemsize == 1, "embeddings and head as well"
            scales = params[f"{tensor}_scale"][:, None]
            size = np.abs(expected) if quantization == "fp8" else scales
            assert (np.abs(found * scales - expected) <= step * size * (1 + 1e-4) + 2**-10 * scales).all()
        else:
            np.testing.assert_array_equal(found, expected, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "channels", "weights alone"])
def test_a_model_computes_what_its_dequantised_weights_compute(tmp_path: Path, name: str) -> None:
    golden = golden_checkpoint("llama3_tiny")
    fp8, plain = tmp_path / "fp8", tmp_path / "plain"
    fp8.mkdir()
    plain.mkdir()
    write_safetensors(plain / "model.safetensors", write_fp8(fp8, SOURCE, LAYOUTS[name]))
    (plain / "config.json").write_text((SOURCE / "config.json").read_text())
    expected, stored = (log_softmax(TinyModel(folder).logits(golden.prompt_ids)[-1]) for folder in (plain, fp8))
    common = np.intersect1d(*(np.argsort(each)[-20:] for each in (expected, stored)))
    assert len(common) >= 15
    difference = np.abs(expected - stored)[common].max()
    assert difference < (0.75 if name == "channels" else 1e-4), "the activations of this one are rounded as well"


@pytest.mark.parametrize(("name", "chosen"), [("channels", "fp8"), ("blocks", "fp8-block-weight-only")])
def test_a_plan_from_the_config_alone_knows_the_sizes(tmp_path: Path, name: str, chosen: str) -> None:
    write_fp8(tmp_path, SOURCE, LAYOUTS[name])
    config = Config(model=ModelConfig(model=str(tmp_path)))
    found = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
    (tmp_path / "model.safetensors").unlink()
    alone = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
    assert (alone.stored_as, alone.weights_bytes) == (found.stored_as, found.weights_bytes)
    assert found.stored_as == chosen


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_notes_advise_users_of_devices_that_must_upcast(tmp_path: Path, quantization: str) -> None:
    write_fp8(tmp_path, SOURCE, LAYOUTS["blocks"])
    decoder = read_decoder(tmp_path)[0]
    config = Config(model=ModelConfig(model=str(tmp_path), quantization=quantization))
    for chip in (Chip("gpu", (9, 0)), Chip("tpu")):
        assert quantization_notes(config, decoder, chip) == []
    for chip in (Chip("gpu", (8, 0)), Chip("cpu")):
        (note,) = quantization_notes(config, decoder, chip)
        assert "save memory here but no time" in note


def _groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


FP8_GROUP = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *(({"quant_method": name}, f".quant_method is '{name}'; supported: fp8, gptq, awq, mxfp4, modelopt, bitnet, compressed-tensors")
          for name in ("bitsandbytes", "nvfp4", "fbgemm_fp8")),
        ("fp8", "quantization_config is 'fp8'; supported: a checkpoint in f32"),
        ({}, ".quant_method is None; supported: fp8"),
        ({"quant_method": "fp8", "activation_scheme": "token"}, ".activation_scheme is 'token'; supported: dynamic and"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, ".weight_block_size is [128, 0]; supported: two positive"),
        ({"quant_method": "fp8", "weight_block_size": 128}, ".weight_block_size is 128"),
        ({"quant_method": "compressed-tensors"}, ".config_groups is None; supported: a table of groups"),
        (_groups(num_bits=4, type="int"), ".config_groups.group_0.weights is {'num_bits': 4"),
        (_groups(num_bits=6, type="int"), "supported: 8-bit floats, 4-bit integers with `format` pack-quantized, 4-bit floats with `format` nvfp4-pack-quantized, 8-bit integers with `format` int-quantized, a checkpoint in f32"),
        (_groups(num_bits=8), ".config_groups.group_0.weights is"),
        (_groups(**FP8_GROUP, symmetric=False), ".config_groups.group_0.weights is"),
        (_groups(**FP8_GROUP, strategy="group"), ".weights.strategy is 'group'; supported: tensor, channel and block"),
        ({**_groups(**FP8_GROUP), "transform_config": {"R1": 1}}, ".transform_config is {'R1': 1}; supported: none"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": FP8_GROUP, "input_activations": {"num_bits": 8, "type": "int"}}},
            },
            ".config_groups.a.input_activations is",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": FP8_GROUP},
                    "b": {"weights": FP8_GROUP, "input_activations": FP8_GROUP},
                },
            },
            ".config_groups is ['a', 'b']; supported: groups that are quantised alike",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_are_rejected_in_one_line_with_an_alternative(found: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoder_config({**LLAMA, "quantization_config": found})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scale_that_is_missing_or_misshaped_is_named(tmp_path: Path) -> None:
    write_fp8(tmp_path, SOURCE, LAYOUTS["channels"])
    stored = open_safetensors(tmp_path / "model.safetensors")
    tensors = {name: np.array(stored.read(name)) for name in stored.tensors}
    name = "model.layers.1.mlp.up_proj.weight"
    for scale, expected in ((None, "expected its weight_scale, found none"), (np.ones(3, np.float32), "shape (3,)")):
        changed = {**tensors, f"{name}_scale": scale}
        write_safetensors(tmp_path / "model.safetensors", {key: at for key, at in changed.items() if at is not None})
        with pytest.raises(CheckpointError) as caught:
            open_model(tmp_path)
        assert name in str(caught.value) and expected in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match="no quantization_config that says what they are"):
        open_model(tmp_path)
