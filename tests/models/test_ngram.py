"""Embeddings of several tokens in a row (Qwen4-Exp): hashes of 64 bits on devices of 32, the published config, and how a table is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.layers.policy import plain
from jaxserve.layers.recurrent_mixers.ngram import ngram_rows
from jaxserve.model_config.recurrent import NgramConfig
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.tensor import as_floats
from jaxserve.weights.reader import TensorReader
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors
from tests.unit.checkpoint.fp8_files import E4M3, LAYOUTS

TABLE = "model.layers.0.ple.ple_embedding."
OUR_TABLE = "model.layers.0.ngram.table.weight"
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "linear_num_value_heads": 48,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "ple_embed_dim": 2560,
    "ple_layer_ids": [2],
    "split_ngram_parts": 128,
    "eos_token_id": 248_044,
    "output_gate_type": "sigmoid",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(48)],
}
"""The text part of the published config."""


def ngrams(**keys: Any) -> list[NgramConfig]:
    return [layer.ngram for layer in decoder_config(PUBLISHED | keys).layers if layer.ngram is not None]


def before(tokens: list[int], count: int) -> np.ndarray:
    """Return the tokens before each one plus 1, the latest first, 0 before the first."""
    padded = [0] * count + [token + 1 for token in tokens]
    return np.array([padded[place : place + count][::-1] for place in range(len(tokens))], np.int32)


def expected_rows(ngram: NgramConfig, tokens: list[int]) -> list[list[int]]:
    """Return the rows by Python's integers, from the whole text."""
    rows, starts = [], np.cumsum((0, *ngram.sizes)).tolist()
    for place in range(len(tokens)):
        own, found = [tokens[place]], list[int]()
        for distance in range(1, ngram.num_tokens):
            is_ended = ngram.end_token in tokens[max(place - distance, 0) : place] or place < distance
            own.append(ngram.end_token if is_ended else tokens[place - distance])
        for head, size in enumerate(ngram.sizes):
            value, length = 0, 2 + head // ngram.heads_per_length
            for token, factor in zip(own[:length], ngram.multipliers, strict=False):
                value ^= token * factor
            found.append(starts[head] + value % size)
        rows.append(found)
    return rows


@pytest.mark.parametrize(
    "keys",
    [
        {"ple_layer_ids": [2, 5]},
        {"ngram_size": 5, "heads_per_ngram": 3, "ple_embed_dim": 24, "seed": 7},
        pytest.param(
            {"ngram_size": 2, "ngram_vocab_size_base": 100_000_000, "vocab_size": 250_000}, marks=pytest.mark.exhaustive
        ),
        {"vocab_size": 320, "eos_token_id": [9, 2], "ngram_vocab_size_base": 2},
    ],
    ids=str,
)
def test_hashes_are_those_of_integers_without_bounds(keys: dict[str, Any]) -> None:
    """Factors have up to 54 bits, products 63; the text has end tokens next to each other, and the largest token."""
    for ngram in ngrams(**keys):
        last, end = keys.get("vocab_size", 248_320) - 1, ngram.end_token
        tokens = np.random.default_rng(0).integers(0, last, 40).tolist()
        tokens[7], tokens[20:22], tokens[30], tokens[32] = end, [end, end], last, end
        found = jax.jit(lambda ids, earlier, ngram=ngram: ngram_rows(ngram, ids, earlier))(
            jnp.array(tokens), jnp.asarray(before(tokens, ngram.num_tokens - 1))
        )
        assert found.tolist() == expected_rows(ngram, tokens)
        assert max(max(row) for row in found.tolist()) < ngram.num_rows


def test_the_published_config_has_one_table_and_states_for_its_layer() -> None:
    config = decoder_config(PUBLISHED)
    (ngram,) = ngrams()
    assert [index for index, layer in enumerate(config.layers) if layer.ngram is not None] == [1]
    assert (len(ngram.sizes), ngram.sizes[0], ngram.num_rows, ngram.end_token) == (16, 20_000_003, 320_001_536, 248_044)
    kinds = [(group.kind, group.num_layers, group.head_dim) for group in config.cache.groups]
    assert kinds == [("full", 12, 256), ("index", 12, 128), ("state", 36, 0), ("state", 1, 0), ("state", 1, 0)]
    assert [array.shape for group in config.cache.states[1:] for array in group.arrays] in (
        [(2, 2), (9, 10_240)],
        [(9, 10_240), (2, 2)],
    )
    assert config.layers[3].blocks is not None and config.layers[3].blocks.num_chosen == 2051


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"indexer_budget": 2050}, "indexer_budget is 2050; supported: a multiple of indexer_compress_ratio (4)"),
        ({"indexer_n_heads": None}, "indexer_n_heads is null; supported: an integer"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2; supported: 1"),
        ({"indexer_head_dim": 32}, "indexer_head_dim is 32; supported: an integer from 64"),
        # Without a factor whole heads rotate, which keys of indexers are too short for.
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            "indexer_head_dim is 128; supported: an integer from 256",
        ),
        ({"ple_layer_ids": [4]}, "ple_layer_ids is [4]; supported: numbers of linear_attention layers"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim is 2561; supported: a multiple of the 16 heads"),
        ({"eos_token_id": None}, "eos_token_id is null; supported: a token"),
        ({"ngram_size": 1}, "ngram_size is 1; supported: an integer from 2"),
        ({"hc_count": 1}, "hc_count is 1; supported: an integer from 2"),
        ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; supported: silu or sigmoid"),
    ],
)
def test_a_value_that_is_not_computed_is_refused_by_its_name(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        decoder_config(PUBLISHED | keys)
    assert expected in str(refused.value)


def changed_checkpoint(folder: Path, **changes: np.ndarray | None) -> Path:
    """Return a copy of the tiny checkpoint with other tensors of its first table; None: without one."""
    source = golden_checkpoint("qwen4_exp_tiny").path
    file = open_safetensors(source / "model.safetensors")
    tensors = {name: file.read(name) for name in file.tensors}
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[TABLE + name]
        else:
            tensors[TABLE + name] = tensor
    write_safetensors(folder / "model.safetensors", tensors)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, folder)
    return folder


def shards() -> list[np.ndarray]:
    """Return the rows of the first table, as they are stored."""
    file = open_safetensors(golden_checkpoint("qwen4_exp_tiny").path / "model.safetensors")
    return [file.read(f"{TABLE}ngram_embedding.shard_{index}.weight") for index in range(3)]


def test_a_table_in_shards_is_read_by_rows() -> None:
    checkpoint = open_model(golden_checkpoint("qwen4_exp_tiny").path)
    table, whole = checkpoint.read(OUR_TABLE), np.concatenate(shards())
    assert not isinstance(table, np.ndarray)
    assert checkpoint.tensors[OUR_TABLE].shape == whole.shape == (272, 6)
    for first, last in ((0, 91), (90, 92), (91, 182), (5, 272), (271, 272)):
        np.testing.assert_array_equal(table[first:last].dequantize(), whole[first:last])


def test_shards_in_fp8_become_a_table_of_floats(tmp_path: Path) -> None:
    """Each shard has a scale of its own."""
    changes, whole = dict[str, np.ndarray](), []
    for index, shard in enumerate(shards()):
        name, scale = f"ngram_embedding.shard_{index}.weight", np.array(1 / (4 + index), np.float32)
        changes |= {name: (shard.astype(np.float32) / scale).astype(E4M3), f"{name}_scale": scale}
        whole.append(changes[name].astype(np.float32) * scale)
    folder = changed_checkpoint(tmp_path, **changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": LAYOUTS["fp8"].config}))
    table = open_model(folder).read(OUR_TABLE)
    np.testing.assert_array_equal(as_floats(table), np.concatenate(whole))


@pytest.mark.parametrize("quantization", ["int8", "int4-weight-only"])
def test_a_table_in_shards_is_quantised_as_it_is_loaded(quantization: str) -> None:
    """Formats of 4 bits store tables in 8."""
    checkpoint = open_model(golden_checkpoint("qwen4_exp_tiny").path)
    skeleton = make_skeleton(decoder_of(checkpoint), plain(jnp.dtype("float32"), quantization))
    leaf = next(leaf for leaf in skeleton.leaves if leaf.name == OUR_TABLE)
    reader = TensorReader(checkpoint, skeleton.config)
    values, scales = reader.part(leaf, [tuple(map(range, array.shape)) for array in leaf.arrays])
    wide = np.concatenate(shards()).astype(np.float32)
    np.testing.assert_allclose(values * scales[..., None], wide, atol=np.abs(wide).max() / 127)


def test_a_table_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shards numbered from 0"):
        open_model(changed_checkpoint(tmp_path, **{"ngram_embedding.shard_1.weight": None}))


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_hashes_other_than_those_of_the_config_are_refused(tmp_path: Path, name: str) -> None:
    file = open_safetensors(golden_checkpoint("qwen4_exp_tiny").path / "model.safetensors")
    stored = np.array(file.read(TABLE + name))
    stored[-1] += 2
    with pytest.raises(CheckpointError, match=f"{name}': the numbers that follow from the config expected"):
        open_model(changed_checkpoint(tmp_path, **{name: stored}))


def test_an_end_token_of_the_text_part_is_that_of_n_grams(tmp_path: Path) -> None:
    """`generation_config.json` has the end tokens of replies."""
    decoder = decoder_of(open_model(changed_checkpoint(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [252, 2]
    assert decoder.layers[0].ngram is not None and decoder.layers[0].ngram.end_token == 252
