"""EAGLE-3 heads compute what their description says, and those that are not served are refused in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.drafters.form import drafter_form
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.registry import read_decoder, read_draft, read_drafter
from jaxserve.runner.speculation.model import check_draft_model, with_tapped_layers
from tests.models.eagle_head import TAPPED, VOCAB_SIZE, HeadForm, NumpyHead, write_head
from tests.models.eagle_pair import EaglePair
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

TARGET = golden_checkpoint("qwen3_tiny").path
CASES: dict[str, tuple[HeadForm, dict[str, Any]]] = {
    "original": ("original", {}),
    "speculators": ("speculators", {"norm_before_residual": True}),
    "normalised": ("speculators", {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    "each layer normalised": ("original", {"fc_norm": True}),
    "Qwen3 layer": ("speculators", {"layer": {"model_type": "qwen3"}}),
    "width of its own": ("original", {"hidden_size": 56}),
    "trained embedding": ("speculators", {"embed_requires_grad": True}),
}


def head_of(tmp_path: Path, form: HeadForm = "original", **options: Any) -> Path:
    if "hidden_size" in options:
        width = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        options |= {"target_hidden_size": width}
    return write_head(tmp_path / "head", TARGET, form, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_head_in_numpy(tmp_path: Path, name: str) -> None:
    """For a text in two chunks, and for further tokens of the head's own output."""
    form, options = CASES[name]
    path = head_of(tmp_path, form, **options)
    pair, head = EaglePair(TARGET, path), NumpyHead(path)
    tokens = np.random.default_rng(1).integers(3, 300, 40)
    tapped = pair.run(tokens[:-1])[1]
    following = tokens[1:]
    has_own = name in ("width of its own", "trained embedding")
    embeddings = head.tensors["embed_tokens.weight"][following] if has_own else pair.embed(following)
    hidden = head.start(tapped)
    made = head(embeddings, hidden)
    found = []
    start = pair.start(tapped)
    for first, end in ((0, 23), (23, 39)):
        logits, own = pair.predict(following[first:end], start[first:end], first)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found), head.logits(made), atol=2e-4)
    assert np.isfinite(found[0]).sum(-1).tolist() == [VOCAB_SIZE] * 23
    for place in (39, 40):
        token = np.array([int(head.logits(made[-1:])[0].argmax())])
        hidden = np.concatenate([hidden, made[-1:]])
        embeddings = np.concatenate(
            [embeddings, head.tensors["embed_tokens.weight"][token] if has_own else pair.embed(token)]
        )
        made = head(embeddings, hidden)
        logits, own = pair.predict(token, own[-1:], place)
        np.testing.assert_allclose(logits, head.logits(made[-1:]), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_tiny", "gemma3_tiny", "mistral_sliding_tiny"])
def test_tapped_layers_begin_with_what_a_model_of_the_layers_before_ends_with(tmp_path: Path, name: str) -> None:
    """Its final norm is that of the whole model."""
    target = golden_checkpoint(name).path
    tokens = np.random.default_rng(2).integers(3, 300, 20)
    path = write_head(tmp_path / "head", target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    short = tmp_path / "short"
    shutil.copytree(target, short)
    lists = {key: value[:2] for key, value in config.items() if key == "layer_types"}
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2} | lists), encoding="utf-8")
    keep_layers(short, 2)
    before = EaglePair(short, write_head(tmp_path / "other", short), layers=(0, 2))
    whole = EaglePair(target, path, layers=(0, 2))
    np.testing.assert_allclose(whole.run(tokens)[2], before.run(tokens)[0], atol=1e-5)
    last = EaglePair(target, path, layers=(whole.decoder.num_layers,))
    hidden, _, normed = last.run(tokens)
    np.testing.assert_allclose(normed, hidden, atol=1e-6)


def keep_layers(folder: Path, count: int) -> None:
    """Leave the first layers in a checkpoint."""
    stored = open_safetensors(folder / "model.safetensors")
    tensors = {
        name: np.array(stored.read(name))
        for name in stored.tensors
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < count
    }
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.mark.parametrize("form", ["original", "speculators"])
def test_both_forms_describe_the_same_head(tmp_path: Path, form: HeadForm) -> None:
    path = write_head(tmp_path / "head", TARGET, form)
    head, checkpoint = read_drafter(path)
    assert head.eagle is not None
    assert (head.num_layers, head.vocab_size, head.eagle.layers) == (1, VOCAB_SIZE, TAPPED)
    assert "model.embed_tokens.weight" not in checkpoint.tensors
    assert {"model.d2t", "model.fc.weight", "lm_head.weight", "model.layers.0.hidden_norm.weight"} < set(
        checkpoint.tensors
    )
    (path / "model.safetensors").unlink()
    assert read_draft(path) == head


def test_heads_without_layers_of_their_own_tap_the_usual_three(tmp_path: Path) -> None:
    path = head_of(tmp_path, eagle_config=None)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"eagle_config": None}), encoding="utf-8")
    head = read_draft(path).eagle
    assert head is not None
    assert head.tapped_layers(32) == (2, 16, 29)


def test_a_head_in_the_class_of_its_layer_is_known_by_its_vocabulary(tmp_path: Path) -> None:
    path = head_of(tmp_path, architectures=["LlamaForCausalLM"])
    form = drafter_form(path)
    assert form is not None and form.kind == "EAGLE-3 head"
    assert drafter_form(TARGET) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": {"num_hidden_layers": 2}}, "heads of 2 layers are not served"),
        ({"layer": {"model_type": "gpt_oss"}}, "layers of the type gpt_oss are not served; those of llama, qwen3 are"),
        ({"layer": {"model_type": ["llama"]}}, r"layers of the type \['llama'\] are not served"),
        ({"use_aux_hidden_state": False}, "heads with use_aux_hidden_state False are not served"),
        ({"parallel_drafting": True}, "heads with parallel_drafting True are not served"),
        (
            {"speculators_model_type": "dspark"},
            "speculators of the type dspark are not served; those of the types eagle3 and dflash are",
        ),
        ({"fc_norm": True, "norm_before_fc": True}, "both norm_before_fc and fc_norm"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size is many; expected a number"),
    ],
)
def test_heads_that_are_not_served_are_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = head_of(tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= options.pop("layer", {}) | options
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for read in (read_drafter, read_draft):
        with pytest.raises(CheckpointError, match=message) as error:
            read(path)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        read_draft(path)


def test_a_head_in_a_pickle_file_is_refused_when_its_weights_are_needed(tmp_path: Path) -> None:
    path = head_of(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert read_draft(path).eagle is not None
    with pytest.raises(CheckpointError, match="has only pickle weights; convert to safetensors"):
        read_drafter(path)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    path = head_of(tmp_path)
    scheduler = SchedulerConfig(speculative_model=str(path), num_speculative_tokens=3)
    config = Config(model=ModelConfig(model=str(TARGET)), scheduler=scheduler)
    decoder, head = read_decoder(TARGET)[0], read_draft(path)
    assert with_tapped_layers(config, decoder, head).tapped_layers == TAPPED
    for other in (
        replace(decoder, vocab_size=decoder.vocab_size + 1),
        replace(decoder, hidden_size=2 * decoder.hidden_size),
        replace(decoder, layers=decoder.layers[:2]),
    ):
        with pytest.raises(ConfigError, match="the EAGLE-3 head is for another model") as error:
            check_draft_model(config, other, head)
        assert "\n" not in str(error.value)
