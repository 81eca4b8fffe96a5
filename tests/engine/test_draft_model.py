"""Draft models that are served, and those that are refused in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.engine.draft_tokenizer import with_draft_path
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.draft_model import open_draft_model, read_draft_config
from jaxserve.executor.preparation import prepare
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.registry import model_of, open_model, read_decoder
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import num_planned_drafts
from jaxserve.runner.speculation.model import check_draft_model, make_draft_model
from tests.models.eagle_head import write_head
from tests.models.goldens import encoder_golden, golden_checkpoint, mtp_golden

TARGET, DRAFT, HYBRID = (golden_checkpoint(name).path for name in ("mistral_sliding_tiny", "smollm2_tiny", "lfm2_tiny"))
MTP = mtp_golden("glm4_moe").path
ENCODER = encoder_golden("bert_tiny").path


def settings(draft: Path | str = DRAFT, num_tokens: int = 3, **sections: Any) -> Config:
    model = ModelConfig(model=str(TARGET), max_model_len=256, dtype="float32")
    scheduler = SchedulerConfig(speculative_model=str(draft), num_speculative_tokens=num_tokens)
    return Config(model=model, scheduler=scheduler, **{"compile": CompileConfig(cpu_kernels="xla"), **sections})


def test_plans_bring_the_drafts_of_prompt_lookup_for_a_model_with_recurrent_states() -> None:
    hybrid, _ = read_decoder(HYBRID)
    target, _ = read_decoder(TARGET)
    lookup = replace(settings(), scheduler=SchedulerConfig(num_speculative_tokens=3))
    assert num_planned_drafts(lookup, hybrid) == 3
    assert num_planned_drafts(lookup, target) == 0, "rows of decode steps"
    assert num_planned_drafts(settings(), hybrid) == 0, "a draft model drafts"


def test_prompt_lookup_needs_a_row_for_drafts_unless_they_are_chunks() -> None:
    scheduler = SchedulerConfig(num_speculative_tokens=3, max_num_seqs=1)
    config = replace(settings(cache=CacheConfig(kv_cache_memory=8 << 20)), scheduler=scheduler)
    with pytest.raises(ConfigError, match="--max-num-seqs must be at least 2"):
        prepare(config, read_decoder(TARGET)[0])
    assert prepare(config, read_decoder(HYBRID)[0]).limits.buckets.speculate == (1,)
    prepare(replace(config, scheduler=replace(scheduler, max_num_seqs=2)), read_decoder(TARGET)[0])


def test_a_draft_model_with_recurrent_states_is_refused_in_one_line() -> None:
    config = settings(HYBRID)
    draft = read_draft_config(config, TARGET)
    assert draft is not None
    with pytest.raises(ConfigError, match=r"--speculative-model .*: a draft model with recurrent states") as error:
        check_draft_model(config, read_decoder(TARGET)[0], draft)
    assert "\n" not in str(error.value)


def test_the_draft_models_keys_take_pages_of_the_same_number_within_the_same_memory() -> None:
    config = settings(cache=CacheConfig(kv_cache_memory=8 << 20))
    draft = read_draft_config(config, TARGET)
    prepared = prepare(config, read_decoder(TARGET)[0], draft=draft)
    alone = prepare(replace(config, scheduler=SchedulerConfig()), read_decoder(TARGET)[0])
    sizes = prepared.limits.cache
    assert len(sizes.specs) == len(alone.limits.cache.specs) + 1
    assert sizes.num_blocks[-1] == sizes.num_blocks[0] < alone.limits.num_blocks
    assert sizes.num_bytes <= 8 << 20
    assert {program.name for program in prepared.programs} - {program.name for program in alone.programs} == {
        f"speculate/{size}" for size in prepared.limits.buckets.decode if size <= 16
    }
    assert prepared.key_parts()["task"] != alone.key_parts()["task"]
    other = prepare(settings(num_tokens=2, cache=config.cache), read_decoder(TARGET)[0], draft=draft)
    assert other.key_parts()["task"] != prepared.key_parts()["task"]


def test_layers_of_a_draft_model_keep_the_keys_of_the_whole_text() -> None:
    windows = DecoderConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=(LayerConfig(sliding_window=8), LayerConfig()),
        max_position=512,
        norm_eps=1e-5,
        rope_theta=10000.0,
        splits_windows=True,
    )
    made = make_draft_model(settings(), read_decoder(TARGET)[0], windows, Chip("cpu", None))
    assert [group.kind for group in made.skeleton.config.cache.groups] == ["full"]


def mtp_settings(num_tokens: int = 1, **sections: Any) -> Config:
    scheduler = SchedulerConfig(speculative_method="mtp", num_speculative_tokens=num_tokens)
    return replace(settings(**sections), scheduler=scheduler)


def test_a_draft_model_is_divided_over_devices_as_the_model_is() -> None:
    """The model has 8 heads of queries and 4 of keys, the draft model 6 and 2."""
    model, draft = (read_decoder(path)[0] for path in (TARGET, DRAFT))
    chip = Chip("cpu", None)
    for count in (1, 2):
        config = settings(parallel=ParallelConfig(tensor_parallel_size=count))
        assert make_draft_model(config, model.for_devices(count), draft, chip).num_drafts == 3
    config = settings(parallel=ParallelConfig(tensor_parallel_size=4))
    with pytest.raises(ConfigError, match="not with --tensor-parallel-size 4: heads, kv_heads cannot be divided"):
        make_draft_model(config, model.for_devices(4), draft, chip)


@pytest.mark.parametrize("config", [settings(), mtp_settings()])
def test_an_encoder_refuses_what_drafts(config: Config) -> None:
    encoder = model_of(open_model(ENCODER))
    with pytest.raises(ConfigError, match=r"--speculative-m.*: an engine that embeds drafts no tokens"):
        open_draft_model(config, encoder, ENCODER)


def test_an_mtp_layer_has_a_cache_group_and_no_embedding_of_its_own() -> None:
    config = mtp_settings(cache=CacheConfig(kv_cache_memory=8 << 20))
    decoder = read_decoder(MTP)[0]
    prepared = prepare(config, decoder, draft=read_draft_config(config, MTP))
    alone = prepare(replace(config, scheduler=SchedulerConfig()), decoder)
    assert len(prepared.limits.cache.specs) == len(alone.limits.cache.specs) + 1
    assert prepared.limits.cache.specs[-1].num_layers == 1
    assert prepared.limits.num_blocks < alone.limits.num_blocks
    draft = prepared.task.draft_model
    assert draft is not None
    assert not {leaf.name for leaf in draft.skeleton.leaves} & {"model.embed_tokens.weight", "lm_head.weight"}
    assert "drafted by MTP layer" in prepared.key_parts()["task"]
    assert {program.kind for program in prepared.programs} == {"decode", "mixed", "speculate"}


def change_token(directory: Path, token: str, other: str) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary[token], vocabulary[other] = vocabulary[other], vocabulary[token]
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_draft_model_needs_the_same_tokenizer(tmp_path: Path) -> None:
    assert with_draft_path(settings(), TARGET).scheduler.speculative_model == str(DRAFT)
    plain = Config(model=ModelConfig(model=str(TARGET)))
    assert with_draft_path(plain, TARGET) is plain
    head = write_head(tmp_path / "head", TARGET)  # its tokens are numbers of the model's
    assert with_draft_path(settings(head), TARGET).scheduler.speculative_model == str(head)
    other = tmp_path / "other"
    shutil.copytree(DRAFT, other)
    change_token(other, "!", '"')
    with pytest.raises(ConfigError, match=r"token 3 is another one than in .*; a draft model needs the same tokenizer"):
        with_draft_path(settings(other), TARGET)
    for file in other.glob("tokenizer*"):  # an EAGLE head before EAGLE-3
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"no tokenizer\.json.*; without a tokenizer EAGLE-3 heads, DFlash drafters"
    ):
        with_draft_path(settings(other), TARGET)
