"""A second shape of every family, of odd sizes, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.renamed import without_speech
from jaxserve.models.registry import decoder_config, families
from tests.models.goldens import DATA, golden_names
from tests.models.odd_shapes import NUM_LOGITS, odd_model, odd_names
from tests.models.tiny_model import TinyModel

ONE_SHAPE = {"Qwen3VLMoeTextModel"}
"""Families that transformers has with a tower only. Their layers are those of Qwen3 with experts."""


def shape_of(config: dict[str, object]) -> tuple[object, ...]:
    """Return the sizes that kernels depend on most."""
    decoder = decoder_config(config)
    mixer = decoder.recurrent
    heads = (decoder.head_dim, decoder.num_heads, decoder.num_kv_heads)
    return *heads, decoder.hidden_size, decoder.latent, None if mixer is None else mixer.arrays


def test_every_family_has_two_shapes() -> None:
    """Shapes of checkpoints with towers count."""
    paths = [*(DATA / name for name in golden_names()), *DATA.glob("vision/*")]
    configs = [without_speech(json.loads((path / "config.json").read_text())) for path in paths]
    whole = {name: family.architectures[0] for family in families() for name in family.text_part_of}
    found: dict[str, set[tuple[object, ...]]] = {}
    for hf in [*configs, *(odd_model(name).config for name in odd_names())]:
        name = whole.get(hf["architectures"][0], hf["architectures"][0])
        text = {**hf.get("text_config", hf), "architectures": [name]}
        found.setdefault(name, set()).add(shape_of(text))
    assert {name for name, shapes in found.items() if len(shapes) < 2} == ONE_SHAPE


def test_odd_shapes_are_odd() -> None:
    decoders = [decoder_config(odd_model(name).config) for name in odd_names()]
    plain = [decoder for decoder in decoders if decoder.latent is None and decoder.compressed is None]
    assert {decoder.head_dim for decoder in plain} == {40, 72}
    kv_heads = [max(decoder.kv_shape(layer)[0] for layer in decoder.layers) for decoder in decoders]
    groups = {each.num_heads // own for each, own in zip(decoders, kv_heads, strict=True) if each.latent is None}
    assert groups == {1, 3, 5}
    assert all(decoder.vocab_size % 2 for decoder in decoders)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", odd_names())
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """With native kernels where they can be built."""
    golden = odd_model(name)
    golden.write(tmp_path)
    model = TinyModel(tmp_path, cpu_kernels="auto")
    logits = model.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits[-NUM_LOGITS:], golden.logits, atol=1e-4, rtol=0)
    assert model.greedy(logits[-1], len(golden.output_ids)) == golden.output_ids.tolist()
