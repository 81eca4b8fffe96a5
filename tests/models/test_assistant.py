"""Drafters of Gemma 4 compute what transformers does, and those that are not served are refused in one line."""

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

from jaxserve.checkpoint.drafters.form import drafter_form
from jaxserve.config import Config, ModelConfig, ParallelConfig, SchedulerConfig
from jaxserve.engine.draft_tokenizer import with_draft_path
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.rope import rotation, sliding_rotation
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_of, open_model, read_decoder, read_draft, read_drafter
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.backend import Chip, chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.runner.speculation.model import check_draft_model, make_draft_model, with_drafter
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params
from tests.models.goldens import assistant_golden
from tests.models.one_row import new_cache, step_context

NAMES = ("gemma4_tiny", "gemma4_moe_odd_tiny", "gemma4_unified_tiny")
NUM_PAGES = 4


def settings(name: str = NAMES[0], drafter: Path | None = None, **sections: Any) -> Config:
    golden = assistant_golden(name)
    scheduler = SchedulerConfig(speculative_model=str(drafter or golden.path), num_speculative_tokens=3)
    return Config(model=ModelConfig(model=str(golden.target), dtype="float32"), scheduler=scheduler, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """For the first token after each text and for further ones of the drafter's own output; tokens of other clusters have none."""
    golden, config, chip = assistant_golden(name), settings(name), chip_of(jax.devices()[0])
    checkpoint, (draft, drafter_checkpoint) = open_model(golden.target), read_drafter(golden.path)
    decoder = with_drafter(config, decoder_of(checkpoint), draft)
    skeleton = make_skeleton(decoder, make_policy(config, decoder, chip))
    own, sharding = make_draft_model(config, decoder, draft, chip).skeleton, make_sharding(decoder, MeshShape())
    model = skeleton.build(load_params(checkpoint, skeleton, sharding, lambda *_: None))
    drafter: Any = own.build(load_params(drafter_checkpoint, own, sharding, lambda *_: None))
    cache = new_cache(decoder, NUM_PAGES, jnp.dtype("float32"), jnp.dtype("float32"))

    @jax.jit
    def run(known: jax.Array, drafted: jax.Array) -> jax.Array:
        """Return logits of tokens after `known` and after each of `drafted` but the last."""
        count = len(known) - 1
        hidden, filled = model.hidden(known[:-1], cache, step_context(decoder, NUM_PAGES, jnp.int32(0), count))
        step, position = step_context(decoder, NUM_PAGES, jnp.int32(count - 1), 1), jnp.array([count])
        turns = rotation(own.config, position), sliding_rotation(own.config, position)
        step = step._replace(rotation=turns[0], sliding_rotation=turns[1])
        state, found = hidden[-1:], []
        for token in (known[-1:], *drafted[:-1, None]):
            made, state, filled = drafter(model.embed(token), state, filled, step)
            found.append(drafter.logits(made, jnp.int32(1))[0])
        return jnp.stack(found)

    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        for index in (0, 4):
            known = np.concatenate([golden.prompt_ids, golden.output_ids[: 2 + index]])
            logits = np.asarray(run(jnp.asarray(known), jnp.asarray(golden.draft_ids[index])))
            expected = golden.draft_logits[index]
            is_seen = np.isfinite(logits)
            num_active = 320 if name == NAMES[2] else 320 // 4
            assert is_seen.sum(-1).tolist() == [num_active] * 3
            np.testing.assert_allclose(logits[is_seen], expected[is_seen], atol=1e-4)
            assert logits.argmax(-1).tolist() == golden.draft_ids[index].tolist()


def test_layers_read_the_last_layer_of_their_kind_with_keys() -> None:
    config, draft = settings(), read_draft(assistant_golden(NAMES[0]).path)
    decoder = with_drafter(
        config, replace(read_decoder(assistant_golden(NAMES[0]).target)[0], splits_windows=True), draft
    )
    made = make_draft_model(config, decoder, draft, Chip("cpu", None)).skeleton.config
    assert [layer.kv_source for layer in made.layers] == [2, 3], "the last two of six layers have no keys"
    assert [layer.sliding_window for layer in made.layers] == [9, None]
    assert [group.window for group in decoder.cache.groups] == [None, 9]
    assert made.cache.groups == ()
    assert [places.paged for places in made.cache.places] == [
        replace(decoder.cache.places[source].paged, is_owner=False)  # type: ignore[type-var]
        for source in (2, 3)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_is_known_by_its_class_and_needs_no_tokenizer(name: str) -> None:
    golden = assistant_golden(name)
    form = drafter_form(golden.path)
    assert form is not None and form.kind == "drafter of Gemma 4"
    assert drafter_form(golden.target) is None
    assert with_draft_path(settings(name), golden.target).scheduler.speculative_model == str(golden.path)
    draft = read_draft(golden.path)
    assert draft == read_drafter(golden.path)[0]
    assert draft.assistant is not None
    assert (draft.assistant.num_centroids is None) == (name == NAMES[2])


def changed(tmp_path: Path, keys: dict[str, Any]) -> Path:
    """Return a folder with only the config of a drafter, changed. keys: with `text.` before those of its layers."""
    path = tmp_path / "drafter"
    path.mkdir()
    config = json.loads((assistant_golden(NAMES[0]).path / "config.json").read_text(encoding="utf-8"))
    for key, value in keys.items():
        of_text = key.startswith("text.")
        (config["text_config"] if of_text else config)[key.removeprefix("text.")] = value
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"text_config": None}, "config has no text_config"),
        ({"text.hidden_size_per_layer_input": 8}, "with hidden_size_per_layer_input 8 are not served"),
        ({"text.enable_moe_block": True}, "with enable_moe_block True are not served"),
        ({"text.use_double_wide_mlp": True}, "with use_double_wide_mlp True are not served"),
        ({"text.num_kv_shared_layers": 1}, "num_kv_shared_layers is 1; expected all of its 2 layers"),
        ({"num_centroids": 7}, "7 centroids for 320 tokens, of which 4 are active; expected a divisor"),
        ({"centroid_intermediate_top_k": 17}, "of which 17 are active"),
        ({"backbone_hidden_size": "wide"}, "backbone_hidden_size is wide; expected a number"),
    ],
)
def test_drafters_that_are_not_served_are_refused_in_one_line(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = changed(tmp_path, keys)
    with pytest.raises(CheckpointError, match=message) as error:
        read_draft(path)
    shutil.copy(assistant_golden(NAMES[0]).path / "model.safetensors", path)
    for read in (read_draft, read_drafter):
        with pytest.raises(CheckpointError, match=message):
            read(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("count", [0, 2])
def test_a_drafter_may_say_that_its_layers_share_keys(tmp_path: Path, count: int) -> None:
    assert read_draft(changed(tmp_path, {"text.num_kv_shared_layers": count})) == read_draft(
        assistant_golden(NAMES[0]).path
    )


def other_models(decoder: DecoderConfig) -> list[DecoderConfig]:
    windows = tuple(replace(each, sliding_window=each.sliding_window and 16) for each in decoder.layers)
    return [
        replace(decoder, vocab_size=decoder.vocab_size + 1),
        replace(decoder, hidden_size=2 * decoder.hidden_size),
        replace(decoder, layers=decoder.layers[:1]),
        replace(decoder, layers=windows),
        replace(decoder, head_dim=2 * decoder.head_dim),
        replace(decoder, num_kv_heads=1),
        replace(decoder, sliding_rope_theta=1.0),
        read_decoder(assistant_golden(NAMES[2]).target)[0],
    ]


def test_a_drafter_of_another_model_is_refused() -> None:
    config, draft = settings(), read_draft(assistant_golden(NAMES[0]).path)
    decoder = read_decoder(assistant_golden(NAMES[0]).target)[0]
    check_draft_model(config, decoder, draft)
    for other in other_models(decoder):
        with pytest.raises(ConfigError, match="the drafter is for another model") as error:
            check_draft_model(config, other, draft)
        assert "\n" not in str(error.value)


def test_a_drafter_is_divided_over_devices_as_its_model_is() -> None:
    """The model has 4 heads of queries and 2 of keys, as the drafter; then the drafter has 3 and 1, and the model 4 and 1."""
    chip, golden = Chip("cpu", None), assistant_golden(NAMES[0])
    decoder, draft = read_decoder(golden.target)[0], read_draft(golden.path)
    single, other = (
        replace(each, num_kv_heads=1, layers=tuple(replace(layer, num_kv_heads=None) for layer in each.layers))
        for each in (decoder, replace(draft, num_heads=3))
    )
    for count in (1, 2):
        config = settings(parallel=ParallelConfig(tensor_parallel_size=count))
        assert make_draft_model(config, decoder.for_devices(count), draft, chip).num_drafts == 3
    with pytest.raises(ConfigError, match="not with --tensor-parallel-size 2: its 3 query heads cannot be divided"):
        make_draft_model(config, single.for_devices(2), other, chip)


def test_tpus_have_no_kernel_that_reads_the_keys_of_the_model_unless_its_own_layers_share_keys() -> None:
    golden = assistant_golden(NAMES[2])
    decoder, draft = read_decoder(golden.target)[0], read_draft(golden.path)
    with pytest.raises(ConfigError, match=r"not with the attention kernel of TPUs.*--attention-backend reference"):
        make_draft_model(settings(NAMES[2]), decoder, draft, Chip("tpu", None))
