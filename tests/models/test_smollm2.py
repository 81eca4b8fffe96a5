"""SmolLM2-135M-Instruct, the default model, against transformers on the same dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.engine.model_engine import ModelEngine, request, smollm2_engine
from tests.models.goldens import SmolLM2Golden, smollm2_goldens
from tests.unit.checkpoint.checkpoint_files import smollm2_file

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

TIE = 1e-4
"""Gap between the two best reference logits below which either token is right."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ModelEngine]:
    engine = smollm2_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_file())


def agrees(golden: SmolLM2Golden, token_ids: list[int]) -> bool:
    """Equal up to the first step at which the reference itself was undecided."""
    for found, expected, gap in zip(token_ids, golden.output_ids, golden.gaps, strict=True):
        if found != expected:
            return gap < TIE
    return True


def test_greedy_text_equals_transformers_on_twenty_prompts(engine: ModelEngine, tokenizer: Tokenizer) -> None:
    goldens = smollm2_goldens()
    assert len(goldens) == 20
    results = engine.run([request(golden.name, golden.prompt_ids, max_tokens=64) for golden in goldens])
    different = [golden.name for golden in goldens if not agrees(golden, results[golden.name].token_ids)]
    assert not different
    assert tokenizer.decode(results[goldens[0].name].token_ids, skip_special_tokens=False) == goldens[0].output_text
    assert engine.executor.compilations()["serving"] == 0


def test_prompts_are_tokenised_as_by_the_reference(tokenizer: Tokenizer) -> None:
    for golden in smollm2_goldens():
        if golden.text is None:
            ids = tokenizer.encode_chat([dict(message) for message in golden.messages])
        else:
            ids = tokenizer.encode(golden.text)
        assert tuple(ids) == golden.prompt_ids, golden.name


def test_blocks_of_the_file_give_the_tokens_of_its_dequantised_weights() -> None:
    """llama.cpp's Q4_1 blocks, dequantised in the matmuls."""
    kept = ModelEngine(
        smollm2_file(), quantization="gguf-weight-only", cpu_kernels="auto", max_num_seqs=1, max_num_batched_tokens=16
    )
    loaded_bytes = max(total for phase, _, total, _ in kept.progress if phase == "load")
    assert loaded_bytes < smollm2_file().stat().st_size  # a sixth of float32
    goldens = [golden for golden in smollm2_goldens() if len(golden.prompt_ids) < 48][:3]
    results = kept.run([request(golden.name, golden.prompt_ids, max_tokens=64) for golden in goldens])
    kept.close()
    assert [golden.name for golden in goldens if not agrees(golden, results[golden.name].token_ids)] == []


def test_fp8_weights_keep_the_likelihood_of_texts(engine: ModelEngine) -> None:
    """Compare likelihoods: sampled tokens depend on the last bits of a processor's sums, likelihoods do not."""
    texts = {golden.name: [*golden.prompt_ids, *golden.output_ids] for golden in smollm2_goldens()[:4]}
    coarse = ModelEngine(
        smollm2_file(), quantization="fp8", cpu_kernels="auto", max_num_seqs=1, max_num_batched_tokens=16
    )
    expected, found = mean_logprobs(engine, texts), mean_logprobs(coarse, texts)
    coarse.close()
    assert max(abs(found - expected)) < 0.25
    assert abs(found.mean() - expected.mean()) < 0.15


def mean_logprobs(engine: ModelEngine, texts: dict[str, list[int]]) -> np.ndarray:
    """Return the mean log-probability of each text's tokens."""
    results = engine.run([request(name, ids, max_tokens=1, num_prompt_logprobs=0) for name, ids in texts.items()])
    return np.array([np.mean([token.logprob for token in results[name].prompt_logprobs]) for name in texts])
