"""The multi-token-prediction layer computes what transformers computes with the same weights, and the checkpoints that have one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxserve.config import CompileConfig, Config, CpuKernels, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.layers.cache import Cache
from jaxserve.models.registry import decoder_of, open_model, read_mtp_layer
from jaxserve.models.skeleton import make_predictor_skeleton, make_skeleton
from jaxserve.quant.tensor import as_floats
from jaxserve.runner.backend import Chip, chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA, MTP_NAMES, golden_checkpoint, mtp_golden
from tests.models.one_row import PAGE_SIZE, new_cache, step_context
from tests.unit.checkpoint.fp8_files import LAYOUTS, write_fp8

NUM_PAGES = 4
LIKE_OTHERS = (
    "glm4",
    "glm4_moe_lite",
    "qwen3_5",
    "mimo_v2_flash",
    "hy_v3",
    "hy_v4",
    "glm5_next",
    "bailing_hybrid",
    "minimax_m3",
)
"""Have layers of decoders that other tests cover, and inputs of the layers of others."""
DENSE = ("glm4", "qwen3_5", "mimo", "mimo_v2_flash", "ernie4_5_moe", "step3p5")


class TinyPredictor:
    """A checkpoint's decoder and its MTP layer with one row of pages each."""

    def __init__(self, path: Path, cpu_kernels: CpuKernels) -> None:
        config = Config(
            model=ModelConfig(model=str(path), dtype="float32"), compile=CompileConfig(cpu_kernels=cpu_kernels)
        )
        checkpoint, (layer, layer_checkpoint) = open_model(path), read_mtp_layer(path)
        assert layer_checkpoint is not None
        assert layer.mtp is not None
        decoder = decoder_of(checkpoint).with_context(NUM_PAGES * PAGE_SIZE)
        decoder = replace(decoder, tapped_layers=layer.mtp.tapped_layers(decoder.num_layers))
        layer, chip = layer.with_context(NUM_PAGES * PAGE_SIZE), chip_of(jax.devices()[0])
        skeletons = (
            make_skeleton(decoder, make_policy(config, decoder, chip)),
            make_predictor_skeleton(layer, make_policy(config, layer, chip)),
        )
        sharding = make_sharding(decoder, MeshShape())
        parts = zip((checkpoint, layer_checkpoint), skeletons, strict=True)
        params = [load_params(each, skeleton, sharding, lambda *_: None) for each, skeleton in parts]
        caches = [new_cache(each, NUM_PAGES, jnp.dtype("float32"), jnp.dtype("float32")) for each in (decoder, layer)]
        model, predictor = (s.build(p) for s, p in zip(skeletons, params, strict=True))

        def predict(following: Array, hidden: Array, cache: Cache, first: Array) -> tuple[Array, Array, Cache]:
            step = step_context(layer, NUM_PAGES, first, len(following))
            made, cache = predictor(model.embed(following), hidden, cache, step)
            return predictor.logits(model, made, jnp.int32(len(made))), made, cache

        def hidden_of(tokens: Array) -> Array:
            step = step_context(decoder, NUM_PAGES, jnp.int32(0), len(tokens))
            computed = model.forward(tokens, caches[0], step)
            start: Array = predictor.start(computed.hidden, computed.tapped, step.tokens)
            return start

        self._mesh, self._empty = sharding.mesh.abstract_mesh, caches[1]
        self._predict, self._hidden_of = jax.jit(predict), jax.jit(hidden_of)
        self.restart()

    def restart(self) -> None:
        """Begin another text with an empty cache of the layer."""
        self._cache = self._empty

    def hidden(self, tokens: np.ndarray) -> Array:
        """Return the decoder's hidden states (T, D) that the layer begins with."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._hidden_of(jnp.asarray(tokens, jnp.int32))

    def predict(self, following: np.ndarray, hidden: Array, first: int) -> tuple[np.ndarray, Array]:
        """Return logits and outputs for tokens from position `first` on, given those that follow them."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            arguments = jnp.asarray(following, jnp.int32), hidden, self._cache, jnp.int32(first)
            logits, made, self._cache = self._predict(*arguments)
        return np.asarray(logits), made


@pytest.mark.slow
@pytest.mark.parametrize("cpu_kernels", [pytest.param("xla", marks=pytest.mark.exhaustive), "native"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if name in LIKE_OTHERS else []) for name in MTP_NAMES]
)
def test_logits_are_those_of_torch(name: str, cpu_kernels: CpuKernels) -> None:
    """In one chunk, in several, and for further tokens of its own output."""
    golden = mtp_golden(name)
    layer = TinyPredictor(golden.path, cpu_kernels)
    known = np.concatenate([golden.prompt_ids, golden.output_ids])
    hidden = layer.hidden(known[:-1])
    for size in (41, 17):
        layer.restart()
        parts = []
        for first in range(0, len(hidden), size):
            logits, made = layer.predict(known[first + 1 : first + 1 + size], hidden[first : first + size], first)
            parts.append(logits)
        found = np.concatenate(parts)
        np.testing.assert_allclose(found[-len(golden.logits) :], golden.logits, atol=1e-4)
        np.testing.assert_allclose(found[-1], golden.draft_logits[0], atol=1e-4)
        for ahead in (1, 2):
            logits, made = layer.predict(golden.draft_ids[ahead - 1 : ahead], made[-1:], len(hidden) + ahead - 1)
            np.testing.assert_allclose(logits[0], golden.draft_logits[ahead], atol=1e-4)
        assert int(logits[0].argmax()) == golden.draft_ids[-1]


@pytest.mark.parametrize("name", MTP_NAMES)
def test_the_layer_is_a_decoder_of_one_attention_layer_without_embedding(name: str) -> None:
    layer, checkpoint = read_mtp_layer(mtp_golden(name).path)
    assert checkpoint is not None
    assert layer.num_layers == 1
    assert layer.recurrent is None
    assert (layer.experts is None) == (name in DENSE)
    names = set(checkpoint.tensors)
    own = {f"model.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "norm")}
    assert own < names
    assert layer.mtp is not None
    heads = {"lm_head.weight"} if layer.mtp.has_own_head else set()
    assert all(each in own | heads or each.startswith("model.layers.0.") for each in names)
    config = json.loads((mtp_golden(name).path / "config.json").read_text(encoding="utf-8"))
    assert decoder_of(open_model(mtp_golden(name).path)).num_layers == config["num_hidden_layers"]


@pytest.mark.parametrize("layout", ["fp8 blocks", "channels"])
def test_a_layer_stored_in_fp8_is_read_with_its_scales(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "fp8"
    folder.mkdir()
    # Without their number, the layer's tensors are written like all others.
    plain = changed(tmp_path, mtp_golden("deepseek_v3").path, num_nextn_predict_layers=0)
    dequantised = write_fp8(folder, plain, LAYOUTS[layout])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    layer, checkpoint = read_mtp_layer(folder)
    assert checkpoint is not None
    for ours, theirs in (
        ("eh_proj", "eh_proj"),
        ("layers.0.mlp.experts.3.up_proj", "mlp.experts.3.up_proj"),
        ("layers.0.self_attn.q_a_proj", "self_attn.q_a_proj"),
        ("norm", "shared_head.norm"),
    ):
        found = as_floats(checkpoint.read(f"model.{ours}.weight"))
        np.testing.assert_array_equal(found, dequantised[f"model.layers.2.{theirs}.weight"], err_msg=ours)
    settings = Config(model=ModelConfig(model=str(folder)))
    skeleton = make_predictor_skeleton(layer, make_policy(settings, layer, Chip("cpu")))
    assert skeleton.policy.quant.name == ("fp8-block-weight-only" if layout == "fp8 blocks" else "fp8")
    params = load_params(checkpoint, skeleton, make_sharding(layer, MeshShape()), lambda *_: None)
    assert [each.shape for each in params] == [each.shape for each in skeleton.arrays]


def test_a_config_without_weights_tells_the_same_layer(tmp_path: Path) -> None:
    path = mtp_golden("glm4_moe").path
    shutil.copy(path / "config.json", tmp_path)
    assert read_mtp_layer(tmp_path) == (read_mtp_layer(path)[0], None)


@pytest.mark.parametrize(
    "keys", [{}, {"indexer_types": None, "index_topk_pattern": "FSSF"}, {"indexer_types": None, "index_topk_freq": 4}]
)
def test_the_layer_has_an_indexer_whichever_layers_of_the_model_have_one(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = json.loads((golden_checkpoint("glm_moe_dsa_tiny").path / "config.json").read_text(encoding="utf-8"))
    kinds = {"layer_types": ["deepseek_sparse_attention"] * 4, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | kinds | keys), encoding="utf-8")
    (layer,) = read_mtp_layer(tmp_path)[0].layers
    assert layer.index_source is None and layer.experts is not None


def changed(tmp_path: Path, source: Path, **keys: Any) -> Path:
    """Return a copy of a checkpoint with other keys in its config."""
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    return folder


def test_checkpoints_without_a_layer_that_is_served_are_refused_in_one_line(tmp_path: Path) -> None:
    cases = {
        golden_checkpoint("glm4_moe_tiny").path: "no multi-token-prediction layer in this checkpoint: .* is 0",
        golden_checkpoint("qwen3_5_tiny").path: r"expected at mtp\.\* \(mtp_num_hidden_layers\); found none",
        golden_checkpoint(
            "minimax_m2_tiny"
        ).path: "layers of MiniMaxM2ForCausalLM models are not served; those of .*DeepseekV3ForCausalLM",
        changed(
            tmp_path / "minimax", golden_checkpoint("minimax_m2_tiny").path, num_mtp_modules=3
        ): "MiniMaxM2ForCausalLM model declares .*num_mtp_modules.*but its published checkpoints do not have them; .* EAGLE-3 head",
        changed(
            tmp_path / "own", mtp_golden("qwen3_5").path, mtp_use_dedicated_embeddings=True
        ): "with embeddings of their own .* are not served",
        golden_checkpoint("smollm2_tiny").path: "layers of LlamaForCausalLM models are not served",
        DATA / "smollm2": "are read from Hugging Face directories only",
        changed(tmp_path, golden_checkpoint("glm4_moe_tiny").path, num_nextn_predict_layers=1): "found none",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message) as error:
            read_mtp_layer(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)
