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


def message(index: int, copy: int) -> AddRequest:
    """Return a request for 24 tokens; every second one is sampled with its own seed."""
    options: dict[str, Any] = {"temperature": (0.0, 0.8)[index % 2], "seed": index, "num_top_logprobs": 2}
    return request(f"{index}-{copy}", PROMPTS[index], max_tokens=24, **options)


def bits(result: Generated) -> object:
    return result.token_ids, [(token.logprob, token.top_token_ids, token.top_logprobs) for token in result.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_replies_have_the_same_bits_in_any_mix(quantization: str) -> None:
    """Mixes differ in neighbours, chunks, prefix hits, preemptions and overlap."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    engine = ModelEngine(DATA / MODEL_NAME, cpu_kernels="native", quantization=quantization, **sizes)  # type: ignore[arg-type]
    alone = []
    for index in range(len(PROMPTS)):
        engine.restart()
        alone.append(bits(engine.run([message(index, 0)])[f"{index}-0"]))
    rng, num_cached, num_preemptions = random.Random(1), 0, 0
    for _ in range(6):
        engine.restart(
            rng.choice([None, 12, 16]),
            enable_prefix_caching=rng.random() < 0.7,
            max_num_batched_tokens=rng.choice([None, 9, 16, 33]),
            overlap=rng.random() < 0.5,
        )
        for _ in range(2):
            mix = [message(rng.randrange(len(PROMPTS)), copy) for copy in range(rng.randrange(2, 9))]
            for name, result in engine.run(mix).items():
                assert bits(result) == alone[int(name.partition("-")[0])]
                num_cached += result.num_cached_tokens
        num_preemptions += engine.num_preemptions
    engine.close()
    assert min(num_cached, num_preemptions) > 0


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
