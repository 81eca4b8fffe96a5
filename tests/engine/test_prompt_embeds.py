"""Embeddings in place of a prompt's tokens, in an engine: the tokens of the same prompt's ids, whatever else runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.config import ImagesConfig
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, load_embeds
from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA, adapter_goldens, golden_checkpoint, smollm2_goldens
from tests.smollm2 import LIMITS
from tests.unit.checkpoint.checkpoint_files import smollm2_file

pytestmark = [pytest.mark.slow]

ENABLED = ImagesConfig(enable_prompt_embeds=True)
WITH_PENALTIES = "qwen3_5_tiny"
"""The model whose engine has all sampling options."""


def rows_of(engine: ModelEngine, ids: list[int]) -> np.ndarray:
    """The model's own embeddings of tokens."""
    weights = engine.executor.weights
    assert weights is not None
    model = weights._prepared.skeleton.build(weights._runner.params)
    return np.array(model.model.embed_tokens(jnp.array(ids)), np.float32)  # type: ignore[union-attr]


def given(engine: ModelEngine, name: str, values: np.ndarray, *, adapter: int = 0, **sampling: Any) -> AddRequest:
    """A prompt of embeddings, as the API process sends it."""
    info = engine.executor.model_info
    assert info.prompt_embeds is not None
    loaded = load_embeds(EmbedsSource(values, "prompt_embeds"), info.prompt_embeds, info.max_model_len)
    plain = request(name, [0] * loaded.num_tokens, adapter=adapter, **sampling)
    return msgspec.structs.replace(plain, prompt_embeds=loaded.parts)


@pytest.fixture(
    scope="module",
    params=[pytest.param("llama3_tiny", marks=pytest.mark.exhaustive), WITH_PENALTIES, "vision/qwen3_vl_tiny"],
)
def engine(request: Any) -> Iterator[ModelEngine]:
    engine = ModelEngine(
        DATA / request.param, max_model_len=256, images=ENABLED, has_all_options=request.param == WITH_PENALTIES
    )
    yield engine
    engine.close()


IDS = [*range(20, 75)]


def test_own_rows_give_the_tokens_of_their_ids_alone_together_and_in_chunks(engine: ModelEngine) -> None:
    values = rows_of(engine, IDS)
    engine.restart()
    expected = engine.run([request("ids", IDS)])["ids"].token_ids
    other = engine.run([request("other", IDS[::-1])])["other"].token_ids
    before = engine.executor.compilations()["serving"]
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
        engine.restart(**options)  # type: ignore[arg-type]
        assert engine.run([given(engine, "alone", values)])["alone"].token_ids == expected, options
        engine.restart(**options)  # type: ignore[arg-type]
        together = [given(engine, "a", values), request("text", IDS[::-1]), given(engine, "b", values[::-1])]
        found = engine.run(together)
        assert {name: each.token_ids for name, each in found.items()} == {"a": expected, "text": other, "b": other}
    assert engine.executor.compilations()["serving"] == before


def test_the_same_embeddings_are_a_prefix_hit_and_a_changed_one_ends_it(engine: ModelEngine) -> None:
    values = rows_of(engine, IDS)
    engine.restart()
    cold = engine.run([given(engine, "a", values)])["a"]
    hit = engine.run([given(engine, "b", values)])["b"]
    assert cold.num_cached_tokens == 0 and hit.num_cached_tokens >= 16 and hit.token_ids == cold.token_ids
    values[0, 0] += 1
    assert engine.run([given(engine, "c", values)])["c"].num_cached_tokens == 0
    zeros = engine.run([request("ids", [0] * len(IDS))])["ids"]
    assert zeros.num_cached_tokens == 0  # the ids of embeddings have no meaning


def test_preempted_requests_write_their_embeddings_again(engine: ModelEngine) -> None:
    several = [rows_of(engine, IDS[shift:] + IDS[:shift]) for shift in range(4)]
    messages = [given(engine, str(i), values, max_tokens=100) for i, values in enumerate(several)]
    alone = []
    for message in messages:
        engine.restart()
        alone.append(engine.run([message])[message.request_id].token_ids)
    engine.restart(num_blocks=16, enable_prefix_caching=False)
    together = engine.run(messages)
    assert engine.num_preemptions > 0
    assert [together[each.request_id].token_ids for each in messages] == alone


@pytest.mark.parametrize("engine", [WITH_PENALTIES], indirect=True)
def test_penalties_see_generated_tokens_only(engine: ModelEngine) -> None:
    engine.restart()
    plain = engine.run([given(engine, "a", rows_of(engine, IDS), max_tokens=1)])["a"].token_ids
    ids = [plain[0], *IDS]
    seen = engine.run([request("ids", ids, repetition_penalty=50.0, max_tokens=1)])["ids"].token_ids
    unseen = engine.run([given(engine, "b", rows_of(engine, ids), repetition_penalty=50.0, max_tokens=1)])[
        "b"
    ].token_ids
    free = engine.run([request("c", ids, max_tokens=1)])["c"].token_ids
    assert unseen == free
    assert free[0] not in ids or seen != free


def test_what_does_not_fit_is_rejected_by_the_engine(engine: ModelEngine) -> None:
    engine.restart()
    message = given(engine, "a", rows_of(engine, IDS))
    short = msgspec.structs.replace(message, prompt_embeds=message.prompt_embeds[:-1])
    scored = msgspec.structs.replace(message, sampling=request("a", [1], num_prompt_logprobs=0).sampling)
    for wrong in (short, scored):
        (output,) = engine.core.handle(wrong)
        assert output.error is not None and output.error.param == "prompt_embeds"


@pytest.mark.parametrize("engine", [WITH_PENALTIES], indirect=True)
def test_tokens_equal_transformers(engine: ModelEngine) -> None:
    golden = golden_checkpoint(WITH_PENALTIES)
    engine.restart()
    values = rows_of(engine, golden.prompt_ids.tolist())
    found = engine.run([given(engine, "a", values, max_tokens=len(golden.output_ids))])["a"]
    assert found.token_ids == golden.output_ids.tolist()


def test_adapters_answer_embeddings_as_the_ids_and_share_no_pages() -> None:
    goldens = adapter_goldens("llama3_tiny")
    numbers = {"base": 0, "first": 1, "second": 2}
    modules = ",".join(f"{name}={goldens[name].path}" for name in ("first", "second"))
    engine = ModelEngine(DATA / "llama3_tiny", images=ENABLED, lora_modules=modules)
    values = {name: rows_of(engine, list(goldens[name].prompt_ids)) for name in numbers}
    prompt = values["base"]  # of all adapters
    ids = list(goldens["base"].prompt_ids)
    alone = {}
    for name, number in numbers.items():
        engine.restart()
        alone[name] = engine.run([request("ids", ids, adapter=number)])["ids"].token_ids
        found = engine.run([given(engine, "golden", values[name], adapter=number, max_tokens=32)])["golden"]
        assert found.token_ids == goldens[name].output_ids.tolist()
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    engine.restart(max_num_batched_tokens=7)
    for cached in (False, True):
        requests = [given(engine, name, prompt, adapter=number) for name, number in numbers.items()]
        together = engine.run(requests)
        assert {name: found.token_ids for name, found in together.items()} == alone
        assert {found.num_cached_tokens > 0 for found in together.values()} == {cached}
    engine.close()


@pytest.mark.optimized
def test_the_default_model_continues_its_own_rows_as_their_ids() -> None:
    limits = LIMITS | {"max_num_seqs": 1, "max_num_batched_tokens": 16}  # two programs
    engine = ModelEngine(smollm2_file(), quantization="auto", cpu_kernels="auto", images=ENABLED, **limits)
    prompts = [list(golden.prompt_ids) for golden in smollm2_goldens()[:3]]
    expected = engine.run([request(str(i), ids, max_tokens=16) for i, ids in enumerate(prompts)])
    found = engine.run([given(engine, str(i), rows_of(engine, ids), max_tokens=16) for i, ids in enumerate(prompts)])
    engine.close()
    assert {name: each.token_ids for name, each in found.items()} == {
        name: each.token_ids for name, each in expected.items()
    }
