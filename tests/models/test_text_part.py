"""Multimodal checkpoints and fused matrices are read like plain checkpoints with the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint import cosmos
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import MULTIMODAL, text_config, text_name
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.checkpoint.vision_names import vision_name
from jaxserve.errors import CheckpointError
from jaxserve.layers.policy import plain as plain_policy
from jaxserve.models.registry import decoder_of, families, open_model, read_decoder
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.tensor import as_floats
from jaxserve.weights.loader import check_tensors
from tests.models.goldens import DATA, golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

SEEING = {
    "vision_tower.patch.weight": (4, 4),
    "multi_modal_projector.norm.weight": (4,),
    "visual.norm.weight": (4,),
    "audio_tower.norm.weight": (4,),
    "embed_vision.norm.weight": (4,),
    "mm_projector.pre_norm.weight": (4,),
    "vision_adapter.fc1.weight": (4, 4),
    "vit_large_projector.weight": (4, 4),
}
TIED = "tie_word_embeddings"
PREDICTING = "mtp.fc.weight"
"""A tensor of multi-token prediction."""
NAMES = {
    "old": ("language_model.", ""),
    "new": ("model.language_model.", "model."),
}


def seeing_checkpoint(folder: Path, source: str, architecture: str, naming: str) -> Checkpoint:
    """The tiny checkpoint as the text part of another, whose config has it in a table; and that tiny one itself."""
    plain = open_model(golden_checkpoint(source).path)
    prefix, seeing = NAMES[naming]
    tensors = {seeing + name: np.zeros(shape, np.float32) for name, shape in SEEING.items()}
    tensors[PREDICTING] = np.zeros((4, 4), np.float32)
    for file in map(open_safetensors, golden_checkpoint(source).path.glob("*.safetensors")):
        for name in file.tensors:
            bare = name if naming == "old" else name.removeprefix("model.")
            tensors[name if naming == "new" and name.startswith("lm_head") else prefix + bare] = file.read(name)
    write_safetensors(folder / "model.safetensors", tensors)
    text = {key: value for key, value in plain.config.items() if key not in ("architectures", "eos_token_id")}
    end = plain.config.get("eos_token_id", 2)
    whole = {"architectures": [architecture], "eos_token_id": end, "vision_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    shutil.copy(golden_checkpoint(source).path / "generation_config.json", folder)
    return plain


@pytest.mark.parametrize("naming", NAMES)
@pytest.mark.parametrize(
    ("source", "architecture"),
    [
        ("gemma3_tiny", "Gemma3ForConditionalGeneration"),
        ("gemma3n_tiny", "Gemma3nForConditionalGeneration"),
        ("gemma4_tiny", "Gemma4ForConditionalGeneration"),
        ("gemma4_moe_odd_tiny", "Gemma4ForConditionalGeneration"),
        ("gemma4_unified_tiny", "Gemma4UnifiedForConditionalGeneration"),
        ("llama4_tiny", "Llama4ForConditionalGeneration"),
        ("exaone4_tiny", "Exaone4_5_ForConditionalGeneration"),
        ("step3p5_tiny", "Step3p7ForConditionalGeneration"),
        ("minimax_m3_tiny", "MiniMaxM3SparseForConditionalGeneration"),
        ("glm5_next_tiny", "Glm5NextForConditionalGeneration"),
        ("muse_glimmer_tiny", "MuseGlimmerForConditionalGeneration"),
        ("cohere2_tiny", "Cohere2VisionForConditionalGeneration"),
        ("cohere2_tiny", "AyaVisionForConditionalGeneration"),
        ("cohere_tiny", "AyaVisionForConditionalGeneration"),
        ("cohere2_moe_tiny", "Cohere2VisionForConditionalGeneration"),
        ("mistral_sliding_tiny", "Mistral3ForConditionalGeneration"),
        ("mistral_sliding_tiny", "LlavaForConditionalGeneration"),
        ("llama3_tiny", "LlavaForConditionalGeneration"),
        ("qwen2_tiny", "LlavaForConditionalGeneration"),
        ("lfm2_tiny", "Lfm2VlForConditionalGeneration"),
        ("lfm3_tiny", "Lfm3VlForConditionalGeneration"),
        ("lfm2_moe_tiny", "Lfm2VlForConditionalGeneration"),
        ("qwen3_tiny", "InternVLForConditionalGeneration"),
        ("qwen3_moe_tiny", "InternVLForConditionalGeneration"),
        ("ministral3_tiny", "Mistral3ForConditionalGeneration"),
        ("qwen3_tiny", "Qwen3VLForConditionalGeneration"),
        ("qwen3_5_tiny", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe_tiny", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen4_exp_tiny", "Qwen4ExpForConditionalGeneration"),
        ("deepseek_v3_tiny", "KimiK25ForConditionalGeneration"),
    ],
)
def test_the_text_part_equals_the_text_model(tmp_path: Path, source: str, architecture: str, naming: str) -> None:
    plain = seeing_checkpoint(tmp_path, source, architecture, naming)
    found = open_model(tmp_path)
    assert decoder_of(found) == decoder_of(plain)
    assert {name for name in found.tensors if not name.startswith("vision.")} == plain.tensors.keys()
    check_tensors(found, make_skeleton(decoder_of(found), plain_policy(jnp.dtype("float32"))))
    assert all(np.array_equal(as_floats(found.read(name)), as_floats(plain.read(name))) for name in plain.tensors)
    (tmp_path / "model.safetensors").unlink()
    assert read_decoder(tmp_path) == (decoder_of(plain), None)


def test_mistral_large_4_is_read_as_published_with_a_tower_and_a_drafter_beside_it(tmp_path: Path) -> None:
    folder = golden_checkpoint("mistral_large4_tiny").path
    plain, stored = open_model(folder), open_safetensors(folder / "model.safetensors")
    others = ("vision_encoder.ln_pre", "patch_merger.merging_layer", "pre_mm_projector_norm")
    others += ("vision_language_adapter.w_in", "mtp_dspark.layers.0.norm")
    tensors = {f"{name}.weight": np.zeros(4, np.float32) for name in others}
    write_safetensors(tmp_path / "model.safetensors", tensors | {name: stored.read(name) for name in stored.tensors})
    text = {key: value for key, value in plain.config.items() if key not in ("architectures", "eos_token_id")}
    whole = {"architectures": ["MistralLarge4ForConditionalGeneration"], "eos_token_id": 2, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vision_config": {"hidden_size": 4}}))
    found = open_model(tmp_path)
    assert decoder_of(found) == decoder_of(plain)
    assert {name for name in found.tensors if not name.startswith("vision.")} == plain.tensors.keys()


def test_keys_of_the_text_part_may_be_beside_those_of_the_vision_part(tmp_path: Path) -> None:
    plain = seeing_checkpoint(tmp_path, "qwen2_tiny", "Qwen2_5_VLForConditionalGeneration", "new")
    whole = json.loads((tmp_path / "config.json").read_text())
    sections = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps({**whole.pop("text_config"), **whole, "rope_scaling": sections}))
    assert decoder_of(open_model(tmp_path)) == decoder_of(plain)


@pytest.mark.parametrize(
    ("whole", "text", "is_tied"),
    [
        ({TIED: True}, {TIED: False}, True),
        ({TIED: False}, {TIED: True}, True),
        ({TIED: True}, {}, True),
        ({}, {TIED: True}, True),
        ({TIED: False}, {TIED: False}, False),
        ({TIED: False}, {}, False),
        ({}, {TIED: False}, False),
        ({}, {}, None),
    ],
)
def test_the_head_is_tied_if_the_whole_config_or_the_text_part_says_so(
    whole: dict[str, bool], text: dict[str, bool], is_tied: bool | None
) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], **whole, "text_config": text}
    assert text_config(config, families()).get(TIED) is is_tied


@pytest.mark.parametrize(("source", "architecture", "is_tied"), [
    ("qwen3_tiny", "Qwen3VLForConditionalGeneration", False),
    ("gemma3_tiny", "Gemma3ForConditionalGeneration", True),
])  # fmt: skip
@pytest.mark.parametrize("says_whole", [True, False])
def test_without_weights_a_contradiction_about_a_tied_head_is_decided_by_the_family(
    tmp_path: Path, source: str, architecture: str, is_tied: bool, says_whole: bool
) -> None:
    seeing_checkpoint(tmp_path, source, architecture, "new")
    (tmp_path / "model.safetensors").unlink()
    whole = json.loads((tmp_path / "config.json").read_text())

    def read(whole_tied: bool, text_tied: bool) -> bool:
        config = {**whole, TIED: whole_tied, "text_config": {**whole["text_config"], TIED: text_tied}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_decoder(tmp_path)[0].tied_embeddings

    assert read(says_whole, not says_whole) is is_tied
    assert read(says_whole, says_whole) is says_whole


def test_a_text_part_of_another_model_type_is_rejected(tmp_path: Path) -> None:
    seeing_checkpoint(tmp_path, "mistral_sliding_tiny", "Mistral3ForConditionalGeneration", "old")
    whole = json.loads((tmp_path / "config.json").read_text())
    whole["text_config"]["model_type"] = "mistral9"
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="'Mistral3ForConditionalGeneration' is not supported"):
        decoder_of(open_model(tmp_path))


def test_a_text_part_of_another_kind_is_rejected(tmp_path: Path) -> None:
    seeing_checkpoint(tmp_path, "gemma3_tiny", "LlavaForConditionalGeneration", "old")
    with pytest.raises(CheckpointError, match="'LlavaForConditionalGeneration' is not supported"):
        decoder_of(open_model(tmp_path))


def test_published_gemma_3_configs_omit_default_sizes(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, _ = read_decoder(tmp_path)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.max_position, config.eos_token_ids) == (131_072, (1, 106))
    assert sum(layer.sliding_window is None for layer in config.layers) == 5


@pytest.mark.parametrize(("source", "prefix"), [("gpt2_tiny", "transformer."), ("llama2_tiny", "model.")])
def test_a_decoder_saved_without_its_head_may_have_names_without_a_prefix(
    tmp_path: Path, source: str, prefix: str
) -> None:
    folder = golden_checkpoint(source).path
    (file,) = map(open_safetensors, folder.glob("*.safetensors"))
    bare = {name.removeprefix(prefix): file.read(name) for name in file.tensors}
    assert bare.keys() != file.tensors.keys()
    write_safetensors(tmp_path / "model.safetensors", bare)
    shutil.copy(folder / "config.json", tmp_path)
    found, expected = open_model(tmp_path), open_model(folder)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)


@pytest.mark.parametrize(("source", "name"), [("gpt2_tiny", "GPT2Model"), ("qwen3_tiny", "Qwen3Model")])
def test_a_decoder_saved_without_its_head_may_have_the_name_of_the_class_without_it(
    tmp_path: Path, source: str, name: str
) -> None:
    folder = golden_checkpoint(source).path
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    assert decoder_of(open_model(tmp_path / "model")) == decoder_of(open_model(folder))


def test_modules_of_ernie_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    source = golden_checkpoint("ernie4_5_moe_tiny").path
    (file,) = map(open_safetensors, source.glob("*.safetensors"))
    modules = ("mtp_block.0.input_layernorm", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    predicting = {f"model.{name}.weight": np.zeros(4, np.float32) for name in modules}
    write_safetensors(tmp_path / "model.safetensors", {name: file.read(name) for name in file.tensors} | predicting)
    shutil.copy(source / "config.json", tmp_path)
    found = open_model(tmp_path)
    assert found.tensors.keys() == open_model(source).tensors.keys()
    check_tensors(found, make_skeleton(decoder_of(found), plain_policy(jnp.dtype("float32"))))


def test_fused_matrices_are_read_as_their_parts() -> None:
    folder = golden_checkpoint("phi3_tiny").path
    found, config = open_model(folder), decoder_of(open_model(folder))
    sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for name, heads in sizes.items():
        tensor = f"model.layers.0.self_attn.{name}_proj.weight"
        assert found.tensors[tensor].shape == found.read(tensor).shape == (heads * config.head_dim, config.hidden_size)
    gate, up = (found.read(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert gate.shape == up.shape == (config.intermediate_size, config.hidden_size)
    assert not np.array_equal(gate, up)
    assert not any("qkv_proj" in name or "gate_up_proj" in name for name in found.tensors)
    total = sum(info.num_stored_bytes for info in found.tensors.values())
    assert total == sum(found.read(name).nbytes for name in found.tensors)


def test_fused_matrices_of_another_size_are_named(tmp_path: Path) -> None:
    folder = golden_checkpoint("phi3_tiny").path
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    found = open_model(tmp_path / "model")
    assert "model.layers.0.self_attn.qkv_proj.weight" in found.tensors


def test_stacked_experts_may_be_inputs_by_outputs_as_published_or_as_transformers_saves_them(tmp_path: Path) -> None:
    source = DATA / "vision" / "qwen3_vl_moe_odd_tiny"
    (file,) = map(open_safetensors, source.glob("*.safetensors"))
    stored = {name: file.read(name) for name in file.tensors}
    turned = {name: each.swapaxes(1, 2) if ".experts." in name else each for name, each in stored.items()}
    assert sum(each.shape != stored[name].shape for name, each in turned.items()) == 4
    write_safetensors(
        tmp_path / "model.safetensors", {name: np.ascontiguousarray(each) for name, each in turned.items()}
    )
    shutil.copy(source / "config.json", tmp_path)
    found, expected = open_model(tmp_path), open_model(source)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)


def test_a_tower_may_have_the_names_of_published_checkpoints_or_those_that_transformers_saves_now(
    tmp_path: Path,
) -> None:
    source = DATA / "vision" / "gemma3_vision_tiny"
    (file,) = map(open_safetensors, source.glob("*.safetensors"))
    tower = "vision_tower."
    names = {name: name.replace(tower, f"{tower}vision_model.") for name in file.tensors}
    assert any(old != new for old, new in names.items())
    write_safetensors(tmp_path / "model.safetensors", {new: file.read(old) for old, new in names.items()})
    shutil.copy(source / "config.json", tmp_path)
    found, expected = open_model(tmp_path), open_model(source)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)


def test_an_omni_model_is_its_part_that_makes_texts() -> None:
    name = "Qwen3OmniMoeForConditionalGeneration"
    thinker = {
        "architectures": ["Other"],
        TIED: False,
        "text_config": {"hidden_size": 4},
        "vision_config": {"depth": 2},
    }
    whole = {"architectures": [name], TIED: True, "quantization_config": {"bits": 4}, "thinker_config": thinker}
    found = text_config(whole, families())
    assert found["architectures"] == ["Qwen3OmniMoeThinkerTextModel"] and found.get(TIED) is False
    assert found["quantization_config"] == {"bits": 4} and found["hidden_size"] == 4
    assert found[MULTIMODAL]["vision_config"] == {"depth": 2}


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ("layers.3.self_attn.to_q.weight", "model.language_model.layers.3.self_attn.q_proj.weight"),
        ("layers.3.self_attn.norm_k.weight", "model.language_model.layers.3.self_attn.k_norm.weight"),
        ("norm.weight", "model.language_model.norm.weight"),
        ("blocks.0.norm1.bias", "model.visual.blocks.0.norm1.bias"),
        ("model.visual.merger.norm.weight", "model.visual.merger.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.encoder.layers.0.mlp.up_proj.bias", "model.visual.encoder.layers.0.mlp.fc1.bias"),
        ("layers.0.mlp.up_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"),
        ("layers.3.self_attn.add_q_proj.weight", None),
        ("layers.3.mlp_moe_gen.up_proj.weight", None),
        ("time_embedder.linear_1.weight", None),
        ("action_modality_embed", None),
        ("model.language_model.time_embedder.linear_1.weight", None),
        ("layers.0.self_attn.k_norm_und_for_gen.weight", None),
    ],
)
def test_names_of_cosmos_3_are_those_of_transformers_without_its_generator(
    published: str, expected: str | None
) -> None:
    assert cosmos.reader_name(published) == expected


def test_names_of_hyperclovax_are_read_as_published() -> None:
    prefix = "model.language_model."
    assert text_name(f"{prefix}model.layers.0.post_norm1.weight") == "model.layers.0.post_norm1.weight"
    assert text_name(f"{prefix}lm_head.weight") == text_name("lm_head.weight") == "lm_head.weight"
    assert vision_name("model.vision_projector.bias") == vision_name("model.projector.bias")


def test_a_null_of_the_text_part_leaves_the_value_of_the_whole_config() -> None:
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {}}
    for text, expected in ({"eos_token_id": None}, [1, 106]), ({"eos_token_id": 1}, 1):
        assert text_config({**whole, "text_config": text}, families())["eos_token_id"] == expected
