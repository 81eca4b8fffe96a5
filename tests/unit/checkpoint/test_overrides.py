"""`--hf-overrides` gives every reader of a model's folder the same config as an edited config.json would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.checkpoint.sentence.folders import modules_directory
from jaxserve.checkpoint.source import original_config, overridden, resolve_model
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.content_digest import content_digest, content_hash
from jaxserve.executor.local import fingerprint
from jaxserve.layers.policy import plain
from jaxserve.models.nearest import unread_overrides
from jaxserve.models.registry import decoder_of, open_model, unread_keys
from jaxserve.models.skeleton import make_skeleton
from jaxserve.tokenizer.hf_vocab import read_hf_eos_token_ids
from jaxserve.tools.doctor import _model
from jaxserve.tools.planning.planner import read_model
from tests.models.goldens import DATA

MODEL = DATA / "qwen2_tiny"
YARN: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "max_position_embeddings": 2048,
}


def settings(tmp_path: Path, overrides: dict[str, Any], model: Path = MODEL) -> ModelConfig:
    return ModelConfig(
        model=str(model), hf_overrides=json.dumps(overrides), hf_overrides_dir=str(tmp_path / "overrides")
    )


def edited(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Copy the model with keys of config.json replaced."""
    folder = tmp_path / "edited" / MODEL.name
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def refusal(settings: ModelConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unread(tmp_path: Path, overrides: dict[str, Any], model: Path = MODEL) -> tuple[str, ...]:
    path = resolve_model(settings(tmp_path, overrides, model))
    return unread_keys(open_model(path), overrides, original_config(path))


def test_a_model_with_overrides_equals_one_with_an_edited_config(tmp_path: Path) -> None:
    path, same = resolve_model(settings(tmp_path, YARN)), edited(tmp_path, YARN)
    found, expected = open_model(path), open_model(same)
    assert found.config == expected.config
    decoder = decoder_of(found)
    assert decoder == decoder_of(expected) != decoder_of(open_model(MODEL))
    assert read_model(path).decoder.max_position == 2048
    assert (found.read("model.norm.weight") == expected.read("model.norm.weight")).all()
    assert {file.name for file in path.iterdir()} == {file.name for file in MODEL.iterdir()}


def test_pages_programs_and_weights_have_another_identity(tmp_path: Path) -> None:
    def identities(path: Path) -> tuple[str, str, str]:
        checkpoint = open_model(path)
        skeleton = make_skeleton(decoder_of(checkpoint), plain(jnp.dtype("float32")))
        identity = fingerprint(checkpoint, skeleton, Config(model=ModelConfig(model="m")))
        return identity, content_digest(checkpoint, "identity"), content_hash(path)

    plain_ones = identities(MODEL)
    others = identities(resolve_model(settings(tmp_path, YARN)))
    assert all(found != own for found, own in zip(others, plain_ones, strict=True))
    assert others[0] == identities(edited(tmp_path, YARN))[0], "of equal configs"


def test_tables_are_merged_and_other_values_and_null_replace(tmp_path: Path) -> None:
    source = edited(tmp_path, {"text_config": {"a": {"b": 1, "c": 2}, "d": [1, 2]}, "sliding_window": 8})
    changes = {"text_config": {"a": {"c": None}, "d": [3], "e": {"f": 1}}, "sliding_window": None}
    config = json.loads((resolve_model(settings(tmp_path, changes, source)) / "config.json").read_text())
    assert config["text_config"] == {"a": {"b": 1, "c": None}, "d": [3], "e": {"f": 1}}
    assert config["sliding_window"] is None and config["hidden_size"] == 64


def test_end_tokens_of_the_tokenizer_are_overridden_too(tmp_path: Path) -> None:
    path = resolve_model(settings(tmp_path, {"eos_token_id": [5, 6]}))
    assert {5, 6} <= set(read_hf_eos_token_ids(path))


def test_a_folder_is_made_once_and_again_when_the_model_changes(tmp_path: Path) -> None:
    source = edited(tmp_path, {})
    first = resolve_model(settings(tmp_path, YARN, source))
    assert resolve_model(settings(tmp_path, YARN, source)) == first
    (source / "added.json").write_text("{}")
    second = resolve_model(settings(tmp_path, YARN, source))
    assert second != first and (second / "added.json").read_text() == "{}"
    assert len([*(tmp_path / "overrides").iterdir()]) == 2, "nothing partial is left"
    assert overridden(source, ModelConfig(model="m")) is source


def test_modules_around_a_model_are_found_from_its_folder_with_overrides(tmp_path: Path) -> None:
    source = edited(tmp_path, {})
    inner = source.rename(source.with_name("0_Transformer"))
    modules = [{"type": "sentence_transformers.models.Transformer", "path": inner.name}]
    (inner.parent / "modules.json").write_text(json.dumps(modules))
    (inner.parent / "1_Pooling").mkdir()
    path = resolve_model(settings(tmp_path, YARN, inner.parent))
    around = modules_directory(path)
    assert around is not None and (around / "1_Pooling").is_dir() and path.name == inner.name


def test_a_name_that_nothing_reads_is_found(tmp_path: Path) -> None:
    assert unread(tmp_path, YARN) == ()
    assert unread(tmp_path, {"max_positions": 1, "dtype": "float32", "hidden_act": "silu"}) == ("max_positions",)
    misspelt = {"rope_type": "yarn", "factor": 4.0, "original_max_position": 512}
    assert unread(tmp_path, {"rope_scaling": misspelt}) == ("rope_scaling.original_max_position",)
    assert unread(tmp_path, {"text_config": {"hidden_size": 1}}) == ("text_config.hidden_size",), "it has no parts"


def test_names_of_a_text_part_are_distinguished_from_those_of_other_parts() -> None:
    hf = {"size": 1, "other": 2}
    overrides = {"text_config": {"size": 1, "other": 2}, "size": 3, "vision_config": {"any": 1}}
    found = unread_overrides(overrides, {"text_config": {}}, hf, lambda keys: keys["size"])
    assert found == ("text_config.other", "size")


def test_what_cannot_be_overridden_is_one_line(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert "the metadata of a GGUF file decides" in refusal(settings(tmp_path, YARN, gguf))
    assert "has no config.json" in refusal(settings(tmp_path, YARN, tmp_path))
    assert "use --classifier-from-token" in refusal(settings(tmp_path, {"classifier_from_token": ["no", "yes"]}))
    newer = edited(tmp_path, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert "rope_scaling: config.json has rope_parameters" in refusal(settings(tmp_path, YARN, newer))
    (tmp_path / "overrides").write_text("a file")
    assert f"--hf-overrides-dir {tmp_path / 'overrides'}: cannot be written" in refusal(settings(tmp_path, YARN))


def test_doctor_reads_the_model_with_overrides(tmp_path: Path) -> None:
    def verdict(overrides: dict[str, Any]) -> str:
        return _model(Config(model=settings(tmp_path, overrides))).verdict

    assert verdict(YARN) == "ok"
    assert verdict({"quantization_config": {"quant_method": "?"}}) == "wrong"
