"""An engine whose KV cache has 8-bit integers: tokens do not depend on what else the cache does, and scales go with the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build
from scipy.special import log_softmax

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import CacheConfig, Config, KVCacheDtype, ModelConfig, SchedulerConfig, TierConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.convert import convert
from jaxserve.executor.preparation import prepare
from jaxserve.executor.served_weights import ServedWeights, _check_same
from jaxserve.models.registry import decoder_of, model_of, open_model
from jaxserve.weights.loader import load_params
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import encoder_golden, golden_checkpoint
from tests.models.kv_scale_files import PROMPT, cache_logits, random_scales, scheme, write_scales
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL, NUM_TOKENS = "llama3_tiny", 20
PROMPTS = [[5 + (3 + index) * place % 250 for place in range(20 + 9 * index)] for index in range(5)]


def checkpoint(folder: Path) -> Path:
    """Write a model with a scale for each KV head."""
    tensors = {
        f"model.layers.{layer}.self_attn.{half}_scale": each
        for layer, both in enumerate(random_scales(3, 2, 127))
        for half, each in zip("kv", both, strict=True)
    }
    return write_scales(folder, MODEL, scheme("int", strategy="attn_head"), tensors)


def config_of(path: Path, kv_cache_dtype: KVCacheDtype, **settings: object) -> Config:
    model, cache = ModelConfig(model=str(path), max_model_len=128), CacheConfig(kv_cache_dtype=kv_cache_dtype)
    return replace(Config(model=model, cache=replace(cache, kv_cache_memory=1 << 20)), **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("scales") / "model")


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    """Its scales are measured. Native kernels round a key alike in every step, whichever processor this is."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    tiers = TierConfig(kv_offload_memory=4 << 20, kv_fetch="always")
    engine = ModelEngine(golden_checkpoint(MODEL).path, kv_cache_dtype="int8", tiers=tiers, cpu_kernels="native")
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
def test_scales_are_measured_again_with_new_weights(
    engine: ModelEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder, and from a file with some tensors: between two steps, not while the file is read beside them. The old scales
    would clip values that are twenty times as large."""
    weights, plain = engine.executor.weights, golden_checkpoint(MODEL).path
    assert isinstance(weights, ServedWeights)
    measure, num_measured = weights._with_measured, 0

    def counted(params: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        nonlocal num_measured
        num_measured += 1
        return measure(params)

    monkeypatch.setattr(weights, "_with_measured", counted)
    loud = write_scales(tmp_path / "loud", MODEL, None, {}, {"v_proj": 20.0})
    file = open_safetensors(loud / "model.safetensors")
    values = write_safetensors(
        tmp_path / "values.safetensors",
        {name: np.asarray(file.read(name)) for name in file.tensors if "v_proj" in name},
    )
    wanted = {path: log_softmax(cache_logits(path, None)[-1]) for path in (loud, plain)}
    assert np.abs(wanted[loud] - wanted[plain]).max() > 1
    num_compilations = engine.executor.compilations()["serving"]  # for these
    for index, (load, path) in enumerate(
        (
            (lambda: weights.load(str(loud)), loud),
            (lambda: weights.load(str(plain)), plain),
            (lambda: weights.load_tensors(str(values)), loud),
        )
    ):
        install = load()
        assert num_measured == index
        install()
        assert num_measured == index + 1
        engine.restart()
        asked = request("scores", [*PROMPT, 7], max_tokens=1, num_prompt_logprobs=4)
        found = engine.run([asked])["scores"].prompt_logprobs[-1]
        np.testing.assert_allclose(found.top_logprobs, wanted[path][list(found.top_token_ids)], atol=0.2, rtol=0)
    assert engine.executor.compilations()["serving"] == num_compilations


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


def test_new_weights_are_refused_only_if_the_cache_would_have_other_scales(path: Path) -> None:
    """The checkpoint at `path` has scales for int8, the other one has none. Programs are for one kind, or for a cache without."""
    checkpoints = [open_model(each) for each in (path, golden_checkpoint(MODEL).path)]
    for served, new in (checkpoints, checkpoints[::-1]):
        config = config_of(served.path, "int8")
        model = decoder_of(served)
        prepared = prepare(config, model)
        _check_same(config, prepared, served, model)
        with pytest.raises(CheckpointError, match="kind of scales of the KV cache is"):
            _check_same(config, prepared, new, model)
        config = config_of(served.path, "auto")
        _check_same(config, prepare(config, model), new, model)


def test_a_draft_model_has_a_cache_of_floats_beside_integers(path: Path) -> None:
    decoder = decoder_of(open_model(path))
    scheduler = SchedulerConfig(speculative_model=str(path), num_speculative_tokens=3)
    limits = prepare(config_of(path, "int8", scheduler=scheduler), decoder, draft=decoder).limits
    assert limits.shapes is not None
    assert [group.arrays[0].dtype for group in limits.shapes] == ["int8", "float32"]
    assert 4 * limits.cache.specs[0].bytes_per_block == limits.cache.specs[1].bytes_per_block


def test_what_cannot_have_a_cache_of_integers_is_refused(path: Path) -> None:
    other = golden_checkpoint("deepseek_v3_tiny").path
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: not with latent attention"):
        prepare(config_of(other, "int8"), decoder_of(open_model(other)))
    encoder = encoder_golden("bert_tiny").path
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: an engine that embeds keeps no KV cache"):
        prepare(config_of(encoder, "int8"), model_of(open_model(encoder)))
