"""DFlash drafters compute what their description says, and those that are not served are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.drafters.form import drafter_form
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder, read_draft, read_drafter
from jaxserve.runner.speculation.model import check_draft_model, with_drafter
from tests.models.dflash_drafter import (
    BLOCK_SIZE,
    MASK,
    TAPPED,
    VOCAB_SIZE,
    WINDOW,
    DFlashForm,
    NumpyDFlash,
    write_dflash,
)
from tests.models.dflash_pair import DFlashPair
from tests.models.goldens import golden_checkpoint

TARGET = golden_checkpoint("qwen3_tiny").path
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
CASES: dict[str, tuple[DFlashForm, dict[str, Any]]] = {
    "z-lab": ("z-lab", {}),
    "speculators, and a window": ("speculators", WINDOWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_drafter_in_numpy(tmp_path: Path, name: str) -> None:
    """After a text in two chunks, and over what a longer block has left."""
    form, options = CASES[name]
    path = write_dflash(tmp_path / "drafter", TARGET, form, **options)
    pair, drafter = DFlashPair(TARGET, path), NumpyDFlash(path)
    known = np.random.default_rng(1).integers(8, 300, 45)
    tapped = pair.run(known[:-1])
    for first, end in ((0, 23), (23, 40)):
        pair.store(tapped[first:end], first)
    for length in (41, 45):
        tokens = np.array([known[length - 1], *[MASK] * (BLOCK_SIZE - 1)])
        found, expected = pair.block(tokens, length - 1)[1:], pair.numpy_logits(drafter, known[:length], BLOCK_SIZE - 1)
        is_seen = np.isfinite(expected)
        assert is_seen.sum(-1).tolist() == [VOCAB_SIZE if form == "speculators" else 320] * (BLOCK_SIZE - 1)
        np.testing.assert_allclose(found[is_seen], expected[is_seen], atol=1e-4)
        assert not np.isfinite(found[~is_seen]).any()
        pair.store(tapped[length - 1 :], length - 1)


@pytest.mark.parametrize("form", ["z-lab", "speculators"])
def test_both_forms_describe_the_same_drafter(tmp_path: Path, form: DFlashForm) -> None:
    path = write_dflash(tmp_path / "drafter", TARGET, form)
    found = drafter_form(path)
    assert found is not None and found.kind == "DFlash drafter"
    draft, checkpoint = read_drafter(path)
    drafter = draft.dflash
    assert drafter is not None
    assert (draft.num_layers, draft.vocab_size) == (2, VOCAB_SIZE if form == "speculators" else 320)
    assert (drafter.layers, drafter.mask_token_id, drafter.block_size) == (TAPPED, MASK, BLOCK_SIZE)
    assert ("model.d2t" in checkpoint.tensors) == ("lm_head.weight" in checkpoint.tensors) == (form == "speculators")
    (path / "model.safetensors").unlink()
    assert read_draft(path) == draft


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "class DFlash2DraftModel are not served; DFlashDraftModel is"),
        ({"architectures": None}, "class None are not served"),
        ({"model_type": "llama"}, "layers of the type llama are not served; those of qwen3 are"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48; expected its own width, 64"),
        ({"block_size": 1}, "block_size is 1; expected a number from 2"),
        ({"quantization_config": {"bits": 4}}, r"with quantization_config \{'bits': 4\} are not served"),
        ({"dflash_config": {"mask_token_id": 7}}, "target_layer_ids is None; expected up to 16 numbers of layers"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 320}}, "mask_token_id is 320; expected a number"),
        ({"dflash_config": {"projector_type": "domino"}}, "with projector_type domino are not served"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "with output_multiplier 0.5 are not served"),
        ({"dflash_config": {"use_swa": True}}, "with use_swa True are not served"),
        ({"input_embedding_scale": "large"}, "input_embedding_scale is large; expected a number above 0"),
    ],
)
def test_drafters_that_are_not_served_are_refused_in_one_line(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = write_dflash(tmp_path / "drafter", TARGET)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | keys), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as error:
        read_drafter(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        read_draft(path)


def test_a_drafter_with_a_pickled_embedding_is_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "drafter", TARGET)
    (path / "mask_embedding.pt").touch()
    with pytest.raises(CheckpointError, match=r"with a mask_embedding\.pt are not served"):
        read_drafter(path)


def settings(path: Path, num_drafts: int = BLOCK_SIZE - 1) -> Config:
    scheduler = SchedulerConfig(speculative_model=str(path), num_speculative_tokens=num_drafts)
    return Config(model=ModelConfig(model=str(TARGET)), scheduler=scheduler)


def changed(draft: DecoderConfig, **fields: Any) -> DecoderConfig:
    assert draft.dflash is not None
    return replace(draft, dflash=replace(draft.dflash, **fields))


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "drafter", TARGET)
    config, decoder, draft = settings(path), read_decoder(TARGET)[0], read_draft(path)
    assert with_drafter(config, decoder, draft).tapped_layers == TAPPED
    check_draft_model(config, decoder, draft)
    for other in (
        replace(decoder, vocab_size=decoder.vocab_size + 1),
        replace(decoder, hidden_size=2 * decoder.hidden_size),
        replace(decoder, layers=decoder.layers[:2]),
    ):
        with pytest.raises(ConfigError, match="the DFlash drafter is for another model") as error:
            check_draft_model(config, other, draft)
        assert "\n" not in str(error.value)


def test_settings_that_a_drafter_does_not_work_with_are_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "drafter", TARGET, **WINDOWS)
    decoder, draft = read_decoder(TARGET)[0], read_draft(path)
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens 6: .* blocks of 6 tokens, .* at most 5 drafted"):
        check_draft_model(settings(path, BLOCK_SIZE), decoder, draft)
    with pytest.raises(ConfigError, match="whose layers with sliding windows are not causal"):
        check_draft_model(settings(path), decoder, changed(draft, causal_layers="none"))
    with pytest.raises(ConfigError, match="final_logit_softcapping 30, its model None"):
        check_draft_model(settings(path), decoder, changed(draft, logit_softcap=30.0))
