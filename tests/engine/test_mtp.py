"""A multi-token-prediction layer changes no token: real (tiny) models with the layer of their own checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.config import TierConfig
from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_overlap import shown
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.certain_predictor import RING, Source, certain_predictor
from tests.models.goldens import MTPGolden, mtp_golden

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("speculates"),
]  # real models; the fast tests show the same on the fake one
NUM_DRAFTS = 3


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("glm4_moe", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v32", marks=pytest.mark.exhaustive),
        "qwen3_next",
        pytest.param("mimo", marks=pytest.mark.exhaustive),
        pytest.param("mimo_v2_flash", marks=pytest.mark.exhaustive),
        pytest.param("ernie4_5_moe", marks=pytest.mark.exhaustive),
        "step3p5",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("hy_v3", "hy_v4", "glm5_next", "bailing_hybrid", "minimax_m3")
        ),
    ],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[MTPGolden, ModelEngine]]:
    """Grouped-query attention with native kernels, latent attention by XLA, a gated delta net before attention, and layers that read the
    residual stream."""
    golden = mtp_golden(request.param)
    kernels = "xla" if request.param == "deepseek_v3" else "native"
    engine = ModelEngine(golden.path, num_speculative_tokens=NUM_DRAFTS, speculative_method="mtp", cpu_kernels=kernels)
    yield golden, engine
    engine.close()


def test_tokens_and_log_probabilities_are_those_without_drafts(served: tuple[MTPGolden, ModelEngine]) -> None:
    golden, engine = served
    # Prompts as short as these have no snapshots.
    has_states = golden.path.name in ("qwen3_next", "glm5_next", "bailing_hybrid")
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=0 if has_states else 32)
    assert engine.executor.compilations()["serving"] == 0


def asked(golden: MTPGolden, name: str = "golden") -> AddRequest:
    return request(name, golden.prompt_ids, max_tokens=len(golden.output_ids))


def drafted(engine: ModelEngine, golden: MTPGolden, others: list[AddRequest]) -> list[list[int]]:
    """Return the drafts after the outputs of `golden` that are on the device when its request, beside others, has ended."""
    state = engine.executor._runner._state
    drafts = state.arrays.drafts
    assert drafts is not None
    empty = jax.device_put(np.zeros(drafts.shape, np.int32), drafts.sharding)
    state.arrays = state.arrays._replace(drafts=empty)
    found = engine.run([asked(golden), *others])
    assert found["golden"].token_ids == golden.output_ids.tolist()
    assert state.arrays.drafts is not None
    rows = np.asarray(state.arrays.drafts)
    position = len(golden.prompt_ids) + len(golden.output_ids) - 1
    return [row[1:].tolist() for row in rows if row[0] == position]


def test_drafts_are_the_tokens_that_transformers_predicts(served: tuple[MTPGolden, ModelEngine]) -> None:
    """For a prompt in one chunk or several, found in the prefix cache, computed again after a preemption, and beside others: the
    layer has seen every token before."""
    golden, engine = served
    other = [request("other", range(60, 63), max_tokens=4)]
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for others in ([], [], other):  # the second and third time, the prompt is found in the prefix cache
            assert golden.draft_ids.tolist() in drafted(engine, golden, others), (options, others)
    engine.restart(num_blocks=7, num_speculative_tokens=NUM_DRAFTS)
    grows = [request("grows", range(70, 90), max_tokens=40)]
    assert golden.draft_ids.tolist() in drafted(engine, golden, grows)


def test_a_preempted_request_gets_the_drafts_of_one_that_was_not(served: tuple[MTPGolden, ModelEngine]) -> None:
    _, engine = served
    items = [request(str(i), range(3 + 50 * i, 30 + 50 * i), max_tokens=40) for i in range(2)]
    counts = []
    for num_blocks in (None, 8):
        engine.restart(num_blocks, num_speculative_tokens=NUM_DRAFTS, overlap=False)
        found = engine.run(items)
        counts.append((shown(found), engine.num_preemptions > 0))
    (whole, was_preempted), (again, is_preempted) = counts
    assert whole == again
    assert (was_preempted, is_preempted) == (False, True)


@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)])
def test_pages_from_host_memory_bring_the_keys_of_the_layer(name: str) -> None:
    golden = mtp_golden(name)
    tiers = TierConfig(kv_offload_memory=4 << 20, kv_fetch="always")
    engine = ModelEngine(golden.path, num_speculative_tokens=NUM_DRAFTS, speculative_method="mtp", tiers=tiers)
    engine.restart(num_blocks=7, num_speculative_tokens=NUM_DRAFTS)
    assert engine.tiers is not None
    engine.run([asked(golden)])
    engine.tiers.saver.settle()
    engine.kv.reset_prefix_cache()
    engine.run([request("takes all pages", range(70, 140), max_tokens=20)])
    engine.kv.reset_prefix_cache()
    assert golden.draft_ids.tolist() in drafted(engine, golden, [])
    engine.kv.reset_prefix_cache()
    assert engine.run([asked(golden)])["golden"].num_cached_tokens == 32, "two pages are fetched"
    engine.tiers.close()
    engine.close()


@pytest.mark.parametrize("source", ["token", "hidden"])
def test_a_layer_that_must_be_right_has_every_draft_accepted(
    source: Source, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From the embedding of the newest token, and from the hidden state of the one before it, which tells if both are paired
    rightly and if the layer's own output follows."""
    path = certain_predictor(tmp_path_factory.mktemp("certain") / source, source)
    engine = ModelEngine(path, num_speculative_tokens=NUM_DRAFTS, speculative_method="mtp")
    prompts = [list(np.resize(np.roll(RING, -i), 37)) for i in range(2)]
    for options in ({}, {"overlap": False}, {"max_num_batched_tokens": 7}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for _ in range(2):  # the second time, the prompt is found in the prefix cache
            found = engine.run([request(str(i), prompt, max_tokens=41) for i, prompt in enumerate(prompts)])
            for i, result in enumerate(found.values()):
                assert result.token_ids == list(np.resize(np.roll(RING, -i - 37), 41))
        assert engine.num_accepted_tokens == engine.num_draft_tokens > 100
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    engine.run([request("a", prompts[0], max_tokens=42)])
    # A prompt in three chunks, a step without a draft, then four tokens a step.
    assert engine.num_steps == 3 + 1 + 10
    engine.close()


def test_sleep_and_new_weights_keep_the_layer(served: tuple[MTPGolden, ModelEngine]) -> None:
    golden, engine = served
    weights = engine.executor.weights
    assert weights is not None
    for keeps_copy in (True, False):
        weights.discard(keeps_copy=keeps_copy)
        weights.restore()()
        weights.load(str(golden.path))()
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        assert golden.draft_ids.tolist() in drafted(engine, golden, [])
