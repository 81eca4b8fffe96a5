"""Vectors from the whole engine: equal to transformers, in any batch, and without compiling while serving."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.precompile import precompile
from jaxserve.executor.preparation import resolve_task
from jaxserve.ipc.messages import Abort, EmbeddingInfo
from jaxserve.models.registry import model_of, open_model
from tests.engine.embedding_engine import EmbeddingEngine, text
from tests.models.goldens import DATA, decoder_vectors, encoder_golden, golden_checkpoint, minilm_golden, pair_golden
from tests.unit.checkpoint.checkpoint_files import minilm_directory, smollm2_file

BERT = encoder_golden("bert_tiny")
MEANS = [hidden.mean(0) for hidden in BERT.hidden]


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddingEngine]:
    engine = EmbeddingEngine(BERT.path, has_all_buckets=True)
    yield engine
    engine.close()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_vectors_are_the_average_of_transformers_hidden_states(engine: EmbeddingEngine) -> None:
    assert engine.model_info.embedding == EmbeddingInfo(32, "mean", normalizes=True)
    assert engine.model_info.max_model_len == 48, "what the checkpoint was trained for, not its 64 positions"
    for found, expected in zip(engine.vectors(BERT.token_ids), MEANS, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_text_has_the_same_vector_alone_and_in_any_batch(engine: EmbeddingEngine) -> None:
    rng = np.random.default_rng(3)
    alone = [engine.vectors([ids])[0] for ids in BERT.token_ids]
    for _ in range(4):
        others = [rng.integers(0, engine.model_info.vocab_size, rng.integers(1, 40)) for _ in range(12)]
        texts: list[Any] = [*BERT.token_ids, *others]
        order = rng.permutation(len(texts))
        found = engine.vectors([texts[i] for i in order])
        for place, i in enumerate(order):
            if i < len(alone):
                np.testing.assert_allclose(found[place], alone[i], atol=1e-5)


def test_texts_share_steps_of_every_size_and_nothing_is_compiled(engine: EmbeddingEngine) -> None:
    for length in (1, 16, 17, 33, 48):
        engine.vectors([np.arange(length) % 50])
    engine.vectors([[5, 6]] * 20)
    assert set(engine.programs) == {"embed/16", "embed/32", "embed/64"}
    assert engine.executor.compilations()["serving"] == 0


def test_a_text_that_is_too_long_or_has_foreign_tokens_is_rejected(engine: EmbeddingEngine) -> None:
    found = engine.outputs(
        [text("long", [5] * 49), text("foreign", [engine.model_info.vocab_size]), text("fine", [5] * 48)]
    )
    errors = {name: output.error for name, output in found.items()}
    assert errors["long"] is not None
    assert errors["long"].error_class == "ContextLengthError"
    assert "48 tokens, the input has 49" in errors["long"].message
    assert errors["foreign"] is not None
    assert errors["foreign"].error_class == "InvalidRequestError"
    assert errors["fine"] is None


def test_an_aborted_text_in_flight_brings_no_vector(engine: EmbeddingEngine) -> None:
    assert engine.core.handle(text("gone", [5, 6, 7])) == []
    assert engine.core.handle(text("stays", [5, 6, 7])) == []
    assert engine.core.step() is None, "dispatched, not read"
    (aborted,) = engine.core.handle(Abort([text("gone", [1]).request_id]))
    assert aborted.finish_reason == "abort"
    found = engine.outputs([])
    assert list(found) == ["stays"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        pytest.param("qwen3_tiny", "last", marks=pytest.mark.exhaustive),
        ("llama3_tiny", "mean"),
        ("smollm3_sliding_tiny", "last"),
    ],
)
def test_decoders_embed_as_transformers_does(name: str, pooling: Any) -> None:
    golden = decoder_vectors(name)
    engine = EmbeddingEngine(DATA / name, pooling=pooling, max_num_batched_tokens=96)
    for found, expected in zip(engine.vectors(golden.token_ids), golden.vectors[pooling], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3_tiny",
        "nemotron_h_tiny",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                "glm_moe_dsa_tiny",
                "mistral4_odd_tiny",
                "qwen3_next_tiny",
                "lfm2_odd_tiny",
                "gemma4_moe_odd_tiny",
            )
        ),
    ],
)
def test_vectors_of_all_caches_are_what_transformers_multiplies_with_the_head(name: str) -> None:
    """Latent vectors, gated delta nets, Mamba-2, short convolutions, and keys of two shapes; other texts share the steps."""
    golden = golden_checkpoint(name)
    tensors = load_file(golden.path / "model.safetensors")
    head = np.asarray(tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight")), np.float32)
    engine = EmbeddingEngine(golden.path, max_num_batched_tokens=96, max_num_seqs=4)
    for _ in range(2):  # the second time, pages and states are those of other texts
        vectors = engine.vectors([[7, 8, 9], golden.prompt_ids, [5], golden.prompt_ids, golden.prompt_ids[:-1]])
        for vector, position in ((vectors[1], -1), (vectors[3], -1), (vectors[4], -2)):
            np.testing.assert_allclose(head @ vector, golden.logits[position], atol=2e-4)
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


@pytest.mark.slow
def test_a_decoder_embeds_with_its_last_token_and_needs_no_head() -> None:
    golden = decoder_vectors("llama3_tiny")
    engine = EmbeddingEngine(DATA / "llama3_tiny", max_num_batched_tokens=16)
    assert engine.model_info.embedding == EmbeddingInfo(64, "last", normalizes=True)
    for found, expected in zip(engine.vectors(golden.token_ids[:2]), golden.vectors["last"][:2], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    engine.close()


@pytest.mark.slow
def test_a_decoder_that_was_saved_without_its_head_has_other_names(tmp_path: Path) -> None:
    """The checkpoint has the format of sentence-transformers, with the pooling in a file."""
    golden = decoder_vectors("llama3_tiny")
    path = DATA / "llama3_tiny"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(path / "config.json")
    shutil.copy(BERT.path / "modules.json", tmp_path)
    shutil.copytree(BERT.path / "1_Pooling", tmp_path / "1_Pooling")
    # Of this size the program is that of `test_decoders_embed_as_transformers_does`.
    engine = EmbeddingEngine(tmp_path, max_num_batched_tokens=96)
    assert engine.model_info.embedding == EmbeddingInfo(64, "mean", normalizes=True)
    for found, expected in zip(engine.vectors(golden.token_ids[:2]), golden.vectors["mean"][:2], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)
    engine.close()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_minilm_equals_its_reference(kernels: str) -> None:
    golden = minilm_golden()
    engine = EmbeddingEngine(minilm_directory(), cpu_kernels=kernels, max_num_batched_tokens=256, max_num_seqs=16)
    assert engine.model_info.max_model_len == 256
    assert engine.model_info.embedding == EmbeddingInfo(384, "mean", normalizes=True)
    found = engine.vectors(golden.token_ids)
    assert min(cosine(a, b) for a, b in zip(found, golden.vectors["mean"], strict=True)) >= 0.99999
    assert engine.executor.compilations()["serving"] == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        *({"quantization": name} for name in ("int8", "int8-weight-only", "fp8", "fp8-weight-only")),
        {"dtype": "bfloat16"},
    ],
)
def test_minilm_stays_close_to_its_reference_in_fewer_bits(settings: Any) -> None:
    golden = minilm_golden()
    engine = EmbeddingEngine(minilm_directory(), max_num_batched_tokens=64, max_num_seqs=16, **settings)
    texts = [ids for ids in golden.token_ids if len(ids) <= 64]
    found = engine.vectors(texts)
    assert min(cosine(a, b) for a, b in zip(found, golden.vectors["mean"], strict=False)) >= 0.98
    engine.close()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(("pooling", "kernels", "num_tokens"), [("mean", "auto", 128), ("last", "xla", 16)])
def test_smollm2_embeds_as_transformers_does(pooling: Any, kernels: str, num_tokens: int) -> None:
    golden = decoder_vectors("smollm2")
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": num_tokens}  # the smaller: of the server in tests/e2e, too
    engine = EmbeddingEngine(smollm2_file(), pooling=pooling, cpu_kernels=kernels, **limits)
    texts = [ids for ids in golden.token_ids if len(ids) <= num_tokens]
    assert len(texts) >= 3
    found = engine.vectors(texts)
    assert min(cosine(a, b) for a, b in zip(found, golden.vectors[pooling], strict=False)) >= 0.9999
    engine.close()


@pytest.mark.slow
def test_the_first_tokens_vector_is_taken_where_the_checkpoint_says_so() -> None:
    golden = encoder_golden("roberta_tiny")
    engine = EmbeddingEngine(golden.path, tensor_parallel_size=2)
    assert engine.model_info.embedding == EmbeddingInfo(32, "cls", normalizes=False)
    for found, hidden in zip(engine.vectors(golden.token_ids), golden.hidden, strict=True):
        np.testing.assert_allclose(found, hidden[0], atol=2e-5)
    engine.close()


def test_a_cross_encoder_scores_pairs_and_marks_the_second_text() -> None:
    golden = pair_golden("bert_cross_tiny")
    engine = EmbeddingEngine(golden.path, max_num_seqs=4, max_num_batched_tokens=16)
    assert engine.model_info.embedding == EmbeddingInfo(1, "cls", normalizes=True, labels=("LABEL_0",))
    pairs = [ids for ids in golden.token_ids if len(ids) <= 16]
    found = np.concatenate(engine.vectors(pairs, golden.text_pair_starts[: len(pairs)]))
    np.testing.assert_allclose(found, golden.scores[: len(pairs)], atol=1e-5)
    as_one_text = np.concatenate(engine.vectors(pairs))
    assert np.abs(as_one_text - found).max() > 0.01, "token types count"
    engine.close()


@pytest.mark.slow
def test_a_cross_encoder_of_roberta_scores_by_a_sigmoid() -> None:
    golden = pair_golden("roberta_cross_tiny")
    assert golden.text_pair_starts == [None] * 4
    engine = EmbeddingEngine(golden.path)
    found = np.concatenate(engine.vectors(golden.token_ids))  # all lengths
    np.testing.assert_allclose(found, golden.scores, atol=4e-5)
    assert engine.model_info.embedding == EmbeddingInfo(
        1, "cls", normalizes=True, labels=("LABEL_0",), activation="sigmoid"
    )
    engine.close()


def test_a_cross_encoder_has_no_other_pooling() -> None:
    with pytest.raises(ConfigError, match="--pooling mean: this model scores with cls"):
        EmbeddingEngine(pair_golden("bert_cross_tiny").path, pooling="mean")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_model_len": 65}, "--max-model-len 65 is more than the 64 tokens the model was made for"),
        ({"max_model_len": 60, "max_num_batched_tokens": 32}, "60 is more than --max-num-batched-tokens 32"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_is_loaded(settings: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EmbeddingEngine(BERT.path, **settings)


def test_the_task_follows_from_the_model() -> None:
    def resolved(path: Path, **settings: Any) -> str:
        return resolve_task(ModelConfig(model="any", **settings), model_of(open_model(path)))

    assert resolved(BERT.path) == "embed"
    assert resolved(DATA / "llama3_tiny") == "generate"
    assert resolved(DATA / "llama3_tiny", task="embed", pooling="mean") == "embed"
    with pytest.raises(ConfigError, match="--task generate: this model is an encoder"):
        resolved(BERT.path, task="generate")
    with pytest.raises(ConfigError, match="--pooling mean: needs --task embed"):
        resolved(DATA / "llama3_tiny", pooling="mean")


def test_nothing_is_compiled_ahead_for_an_engine_that_embeds(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(model="any", task="embed"))
    with pytest.raises(ConfigError, match="--task embed: `compile` and `convert` support the task generate only"):
        precompile(config, DATA / "llama3_tiny", tmp_path, {}, lambda *_: None)


def test_an_encoder_without_modules_json_embeds_one_text_at_a_time(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(BERT.path / name)
    engine = EmbeddingEngine(tmp_path, max_num_batched_tokens=16, max_num_seqs=1)
    for found, expected in zip(engine.vectors(BERT.token_ids[:3]), MEANS[:3], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert engine.model_info.embedding == EmbeddingInfo(32, "mean", normalizes=True)
    assert engine.model_info.max_model_len == 16, "no longer than a step"
    engine.close()
