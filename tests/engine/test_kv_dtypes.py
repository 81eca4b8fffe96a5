"""An engine whose KV cache has 8-bit integers with a checkpoint's scales: tokens do not depend on what else the cache does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.config import CacheConfig, CompileConfig, Config, KVCacheDtype, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.convert import convert
from jaxserve.executor.preparation import prepare
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.weights.loader import load_params
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import golden_checkpoint
from tests.models.kv_scale_files import PROMPT, cache_logits, random_scales, scheme, write_scales

MODEL, NUM_TOKENS = "llama3_tiny", 20
PROMPTS = [[5 + (3 + index) * place % 250 for place in range(20 + 9 * index)] for index in range(5)]


def checkpoint(folder: Path, seed: int, factor: float = 1.0) -> Path:
    """Write a model with a scale for each KV head."""
    tensors = {
        f"model.layers.{layer}.self_attn.{half}_scale": each
        for layer, both in enumerate(random_scales(3, 2, 127, seed))
        for half, each in zip("kv", both, strict=True)
    }
    return write_scales(folder, MODEL, scheme("int", strategy="attn_head"), tensors, factor)


def config_of(path: Path, kv_cache_dtype: KVCacheDtype, **settings: object) -> Config:
    model, cache = ModelConfig(model=str(path), max_model_len=128), CacheConfig(kv_cache_dtype=kv_cache_dtype)
    return replace(Config(model=model, cache=replace(cache, kv_cache_memory=1 << 20)), **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("scales") / "model", 1)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[ModelEngine]:
    tiers = TierConfig(kv_offload_memory=4 << 20, kv_fetch="always")
    engine = ModelEngine(path, kv_cache_dtype="int8", tiers=tiers)
    yield engine
    engine.close()


@pytest.mark.slow
def test_tokens_are_those_of_each_request_alone(engine: ModelEngine) -> None:
    """In chunks, with prefix hits, preemptions, drafts from the text, and pages that come back from host memory."""
    assert engine.executor.model_info.kv_dtype == "int8"
    alone = []
    for prompt in PROMPTS:
        engine.restart(enable_prefix_caching=False)
        alone.append(engine.run([request("alone", prompt, max_tokens=NUM_TOKENS)])["alone"].token_ids)
    num_preemptions, num_cached = 0, 0
    for num_drafts in (0, 3):
        engine.restart(8, max_num_batched_tokens=9, num_speculative_tokens=num_drafts)
        for _ in range(2):
            found = engine.run([request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(PROMPTS)])
            assert [found[str(i)].token_ids for i in range(len(PROMPTS))] == alone
            num_cached += sum(each.num_cached_tokens for each in found.values())
        num_preemptions += engine.num_preemptions
        assert engine.tiers is not None
        engine.tiers.close()
    assert min(num_preemptions, num_cached) > 0


@pytest.mark.slow
def test_new_weights_bring_their_scales(engine: ModelEngine, tmp_path: Path) -> None:
    """Scores of a prompt are those that a rounded cache gives."""
    other = checkpoint(tmp_path / "other", 2, factor=1.2)
    assert engine.executor.weights is not None
    engine.restart()
    engine.executor.weights.load(str(other))()
    asked = request("new", [*PROMPT, 7], max_tokens=1, num_prompt_logprobs=4)
    found = engine.run([asked])["new"].prompt_logprobs[-1]
    assert engine.executor.compilations()["serving"] == 0
    wanted = log_softmax(cache_logits(other, "int8")[-1])
    np.testing.assert_allclose(found.top_logprobs, wanted[list(found.top_token_ids)], atol=0.01, rtol=0)


@pytest.mark.slow
def test_a_conversion_keeps_the_scales_for_the_cache_that_it_is_for(path: Path, tmp_path: Path) -> None:
    config = config_of(path, "int8")
    convert(config, path, tmp_path / "out", lambda done, total, name: None)

    def load(config: Config, path: Path) -> list[bytes]:
        opened = open_model(path)
        prepared = prepare(config, decoder_of(opened))
        params = load_params(opened, prepared.skeleton, prepared.sharding, lambda done, total, name: None)
        return [np.asarray(each).tobytes() for each in params]

    assert load(config, tmp_path / "out") == load(config, path)
    with pytest.raises(CheckpointError, match="converted for other settings"):
        load(config_of(path, "auto"), tmp_path / "out")


def test_a_draft_model_has_a_cache_of_floats_beside_integers(path: Path) -> None:
    decoder = decoder_of(open_model(path))
    scheduler = SchedulerConfig(speculative_model=str(path), num_speculative_tokens=3)
    limits = prepare(config_of(path, "int8", scheduler=scheduler), decoder, draft=decoder).limits
    assert limits.shapes is not None
    assert [group.arrays[0].dtype for group in limits.shapes] == ["int8", "float32"]
    assert 4 * limits.cache.specs[0].bytes_per_block == limits.cache.specs[1].bytes_per_block


def test_integers_without_scales_for_them_are_refused(path: Path) -> None:
    for name, text in (
        (MODEL, "needs a checkpoint with scales for it .* this one has none"),
        ("deepseek_v3_tiny", "not with latent attention"),
    ):
        other = golden_checkpoint(name).path
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype int8: {text}"):
            prepare(config_of(other, "int8"), decoder_of(open_model(other)))
    config = config_of(path, "int8", compile=CompileConfig(deterministic=True))
    with pytest.raises(ConfigError, match="--deterministic: not with --kv-cache-dtype int8"):
        prepare(config, decoder_of(open_model(path)))
