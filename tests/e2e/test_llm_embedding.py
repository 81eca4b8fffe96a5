"""The Python API over an engine that embeds: a fake one, and MiniLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.config import Config, LimitsConfig, ModelConfig, SchedulerConfig, ServerConfig
from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.executor.fake.models import fake_vector
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER
from tests.engine.embedding_engine import EmbeddingEngine
from tests.models.goldens import minilm_golden, pair_golden
from tests.tools.embedding_texts import MINILM_TEXTS
from tests.unit.checkpoint.checkpoint_files import minilm_directory

SIZE = 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = Config(
        model=ModelConfig(model=str(TOKENIZER), task="embed", max_model_len=64),
        scheduler=SchedulerConfig(max_num_seqs=4),
        limits=LimitsConfig(max_inputs=2, max_input_tokens=10),
        server=ServerConfig(log_level="error"),
    )
    with LLM.from_config(config, executor="fake", fake=FakeOptions(embedding_size=SIZE)) as llm:
        yield llm


def unit(token_ids: list[int]) -> np.ndarray:
    vector = fake_vector(token_ids, SIZE)
    return vector / np.linalg.norm(vector)


def test_prompts_of_both_kinds_come_back_in_order_whatever_a_server_would_limit(llm: LLM) -> None:
    prompts = ["Hello world", [5, 6, 7], "another text"] * 30
    results = llm.embed(prompts)
    assert [result.prompt for result in results[:3]] == ["Hello world", None, "another text"]
    for prompt, result in zip(prompts, results, strict=True):
        ids = load_tokenizer(TOKENIZER).encode(prompt) if isinstance(prompt, str) else prompt
        assert result.prompt_token_ids == ids
        np.testing.assert_allclose(result.outputs.embedding, unit(ids), rtol=1e-6)
    assert llm.embed([]) == []


def test_options_are_those_of_the_endpoint(llm: LLM) -> None:
    [result] = llm.embed([3, 3, 4], normalize=False, dimensions=5)
    assert result.outputs.embedding == [0, 0, 0, 2, 1]
    [cut] = llm.embed(list(range(40)), truncate_prompt_tokens=2)
    assert cut.prompt_token_ids == [0, 1]


def test_scores_are_cosines(llm: LLM) -> None:
    texts = ["hello", "a b c", "world"]
    encoded = [unit(load_tokenizer(TOKENIZER).encode(text)) for text in texts]
    scores = [result.outputs.score for result in llm.score("hello", texts)]
    assert scores == pytest.approx([float(encoded[0] @ vector) for vector in encoded], abs=1e-6)
    [pair, _] = llm.score(texts[:2], texts[1:])
    assert pair.outputs.score == pytest.approx(float(encoded[0] @ encoded[1]), abs=1e-6)
    assert pair.prompt_token_ids == load_tokenizer(TOKENIZER).encode("hello") + load_tokenizer(TOKENIZER).encode(
        "a b c"
    )


def test_what_cannot_be_done_is_said_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="number 1 of 'prompts' has 65 tokens"):
        llm.embed([[1], [2] * 65])
    with pytest.raises(InvalidRequestError, match="vectors have 8, got 9"):
        llm.embed("a", dimensions=9)
    with pytest.raises(InvalidRequestError, match="as many texts as 'text_1' \\(2\\), got 1"):
        llm.score(["a", "b"], "c")
    with pytest.raises(InvalidRequestError, match="put it before the texts"):
        llm.score("a", "b", instruction="Find what answers.")
    with pytest.raises(InvalidRequestError, match="embeds texts"):
        llm.generate("a")
    texts: Any
    for texts, what in (
        (["a", None], r"text_2\[1\]': must be a text, got None"),
        (3, "text_2': must be a text or a list"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            llm.score("a", texts)


@pytest.mark.slow
@pytest.mark.optimized
def test_minilm_from_text_to_vector_equals_its_reference(programs: Path) -> None:
    golden = minilm_golden().vectors["mean"]
    with LLM(minilm_directory(), max_num_batched_tokens=256, max_num_seqs=16, compile_cache=str(programs)) as llm:
        found = np.array([result.outputs.embedding for result in llm.embed(list(MINILM_TEXTS))])
        assert (found * golden).sum(axis=1).min() >= 0.9999
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
        [fox, bread] = llm.score(MINILM_TEXTS[2], [MINILM_TEXTS[3], MINILM_TEXTS[5]])
        assert fox.outputs.score == pytest.approx(float(golden[2] @ golden[3]), abs=1e-3)
        assert bread.outputs.score == pytest.approx(float(golden[2] @ golden[5]), abs=1e-3)


@pytest.mark.slow
def test_a_cross_encoder_is_given_pairs_with_their_border(programs: Path) -> None:
    """Through tokenizer, messages and scheduler; `tests/engine` compares the model itself with transformers."""
    path = pair_golden("bert_cross_tiny").path
    documents = ["the lazy dog", "a list of tokens", "jumps"]
    pairs = list(load_tokenizer(path).encode_pairs([("the quick fox", document) for document in documents], None))
    engine = EmbeddingEngine(path, has_all_buckets=True)
    expected = np.concatenate(engine.vectors([ids for ids, _ in pairs], [start for _, start in pairs]))
    engine.close()
    with LLM(path, max_num_batched_tokens=64, max_num_seqs=8, compile_cache=str(programs), cpu_kernels="xla") as llm:
        results = llm.score("the quick fox", documents)
        assert [result.outputs.score for result in results] == pytest.approx(expected.tolist(), abs=1e-5)
        assert [result.prompt_token_ids for result in results] == [ids for ids, _ in pairs]
        with pytest.raises(InvalidRequestError, match="cross-encoder"):
            llm.embed("a text")
