"""--deterministic: a reply has the bits that it has alone, in any mix of requests and any division into steps."""

from __future__ import annotations

import random
from typing import Any

import jax.numpy as jnp
import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.config import CompileConfig, Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import AddRequest
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.model_config.decoder import AdaptersConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.determinism import check_deterministic
from tests.engine.model_engine import MODEL_NAME, Generated, ModelEngine, request
from tests.models.goldens import DATA

_LENGTHS = (1, 5, 17, 33, 60, 80)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    made = [[rng.randrange(3, 300) for _ in range(rng.choice(_LENGTHS))] for _ in range(6)]
    return [*made, made[3][:20] + made[1], made[4] + made[4][:9]]


PROMPTS = prompts()


NUM_TOKENS = 20
NUM_MIXES = 32  # of each format


def message(index: int, copy: int) -> AddRequest:
    """Return a request for a few tokens; every second one is sampled with its own seed."""
    options: dict[str, Any] = {"temperature": (0.0, 0.8)[index % 2], "seed": index, "num_top_logprobs": 2}
    return request(f"{index}-{copy}", PROMPTS[index], max_tokens=NUM_TOKENS, **options)


def replay(index: int, copy: int, token_ids: list[int]) -> AddRequest:
    """Return a request that scores the prompt and the tokens that it got."""
    options = {"num_prompt_logprobs": 2, "max_tokens": 1}
    return request(f"{index}-{copy}-replay", PROMPTS[index] + token_ids, **options)


def bits(index: int, result: Generated, *, is_replay: bool = False) -> object:
    """Return the generated tokens' log-probabilities, or those that a replay found for the same tokens."""
    scored = result.prompt_logprobs[len(PROMPTS[index]) - 1 :] if is_replay else result.logprobs
    assert len(scored) == NUM_TOKENS
    return [(token.logprob, token.top_token_ids, token.top_logprobs) for token in scored]


def start(quantization: str) -> ModelEngine:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    return ModelEngine(DATA / MODEL_NAME, cpu_kernels="native", quantization=quantization, **sizes)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_replies_and_replays_have_the_same_bits_in_any_mix(quantization: str) -> None:
    """Mixes differ in neighbours, chunks, prefix hits, preemptions and overlap; half of them run in another engine."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    engine = start(quantization)
    tokens, alone = [], []
    for index in range(len(PROMPTS)):
        engine.restart()
        result = engine.run([message(index, 0)])[f"{index}-0"]
        tokens.append(result.token_ids)
        alone.append(bits(index, result))
    rng, num_cached, num_preemptions, num_replays = random.Random(1), 0, 0, 0
    for number in range(NUM_MIXES):
        if number == NUM_MIXES // 2:
            engine.close()
            engine = start(quantization)
        if number % 2 == 0:  # every second mix finds pages of the one before
            engine.restart(
                rng.choice([None, 10, 12]),
                enable_prefix_caching=rng.random() < 0.7,
                max_num_batched_tokens=rng.choice([None, 9, 16, 33]),
                overlap=rng.random() < 0.5,
            )
        mix = []
        for copy in range(rng.randrange(2, 9)):
            index = rng.randrange(len(PROMPTS))
            mix.append(replay(index, copy, tokens[index]) if rng.random() < 0.3 else message(index, copy))
        before = engine.num_preemptions
        for name, result in engine.run(mix).items():
            index, is_replay = int(name.partition("-")[0]), name.endswith("replay")
            assert is_replay or result.token_ids == tokens[index]
            assert bits(index, result, is_replay=is_replay) == alone[index]
            num_cached += result.num_cached_tokens
            num_replays += is_replay
        num_preemptions += engine.num_preemptions - before
    engine.close()
    assert min(num_cached, num_preemptions, num_replays) > 0


def test_what_may_round_a_row_by_its_neighbours_is_refused() -> None:
    model = decoder_of(open_model(DATA / MODEL_NAME))
    config = Config(model=ModelConfig(model="any"), compile=CompileConfig(deterministic=True))
    native = DtypePolicy(jnp.dtype("float32"), jnp.dtype("float32"), backend="native")
    check_deterministic(config, model, native)
    check_deterministic(Config(model=ModelConfig(model="any")), model, plain(jnp.dtype("float32")))
    refused: list[tuple[DtypePolicy, AdaptersConfig | None, str]] = [
        (plain(jnp.dtype("float32")), None, "only with the native kernels"),
        (DtypePolicy(native.weights, native.activations, plain(native.weights, "fp8").quant, "native"), None, "fp8"),
        (native, AdaptersConfig(1, 16, ()), "adapters"),
    ]
    for policy, adapters, text in refused:
        with pytest.raises(ConfigError, match=text):
            check_deterministic(config, model, policy, adapters)
