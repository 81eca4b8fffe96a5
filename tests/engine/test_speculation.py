"""A draft model changes no token: real (tiny) models, with a draft model that is the model itself, and with a random one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jaxserve.ipc.messages import Abort, AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.engine.model_engine import request as _asked
from tests.engine.test_overlap import shown
from tests.models.dflash_drafter import write_dflash
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("speculates"),
]  # real models; the fast tests show the same on the fake one
NUM_DRAFTS = 3


def made(name: str, draft: str, **options: Any) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    golden, path = golden_checkpoint(name), golden_checkpoint(draft).path
    engine = ModelEngine(golden.path, draft_model=path, num_speculative_tokens=NUM_DRAFTS, **options)
    yield golden, engine
    engine.close()


@pytest.fixture(scope="module")
def itself() -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """The model drafts for itself: every draft is right."""
    yield from made("mistral_sliding_tiny", "mistral_sliding_tiny")


@pytest.fixture(scope="module")
def itself_with_all_options() -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    yield from made("mistral_sliding_tiny", "mistral_sliding_tiny", has_all_options=True)


@pytest.fixture(scope="module")
def windows() -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """A model with pages of a window and native kernels, and a draft model that knows nothing of it."""
    yield from made("gemma2_tiny", "smollm2_tiny", cpu_kernels="native", has_all_options=True)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """A random DFlash drafter."""
    golden = golden_checkpoint("qwen3_tiny")
    drafter = write_dflash(tmp_path_factory.mktemp("dflash") / "drafter", golden.path)
    engine = ModelEngine(
        golden.path, draft_model=drafter, num_speculative_tokens=NUM_DRAFTS, cpu_kernels="native", has_all_options=True
    )
    yield golden, engine
    engine.close()


def mix(*, has_all_options: bool) -> list[AddRequest]:
    """Greedy and seeded, ends by EOS, stop ids and length, chunked prompts, a shared prefix, what gets no drafts."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 300, 40)
    options: list[dict[str, object]] = [
        {"max_tokens": 30},
        {"temperature": 1.0, "seed": 11, "max_tokens": 33, "num_top_logprobs": 0},
        {"temperature": 1.3, "seed": 12, "max_tokens": 40, "top_k": 30, "ignore_eos": False},
        {"temperature": 0.8, "seed": 13, "max_tokens": 2},
        {"max_tokens": 25, "presence_penalty": 1.0},
        {"max_tokens": 12, "num_top_logprobs": 3},
    ]
    if not has_all_options:
        options = [{name: value for name, value in each.items() if name not in OTHER_OPTIONS} for each in options]
    items = [request(str(i), rng.integers(3, 300, rng.integers(1, 60)), **each) for i, each in enumerate(options)]
    return items + [request(f"shared {i}", [*shared, i + 3], max_tokens=20) for i in range(2)]


OTHER_OPTIONS = ("top_k", "presence_penalty")
"""Options of the mix that only the real sampler knows."""
MISTAKE = 5
"""Every so many tokens of a prediction, one is wrong."""


def predicting(item: AddRequest, tokens: list[int]) -> AddRequest:
    """Return the request with a prediction that is mostly right, from which prompt lookup drafts."""
    guess = [token ^ 1 if place % MISTAKE == 0 else token for place, token in enumerate(tokens, 1)]
    return structs.replace(item, prediction_token_ids=guess)


def check_drafts_change_nothing(
    engine: ModelEngine, num_drafts: int, *, num_cached: int = 32, predicts: bool = False
) -> None:
    """Compare tokens and log-probabilities with those of single steps: alone, and together with preemption, chunks, prefix
    hits and steps in flight. num_cached: tokens of a shared prompt that must be reused. predicts: requests have predictions."""
    items, plain = mix(has_all_options=engine.has_all_options), {}
    for item in items:
        engine.restart(overlap=False, max_burst_ms=0.0)
        plain |= engine.run([item])
    if predicts:
        items = [predicting(item, plain[item.request_id].token_ids) for item in items]
    for options in ({}, {"overlap": False, "max_num_batched_tokens": 7}, {"num_blocks": 20}):
        # Several decode steps in one call may take the place of drafts from the text, as many as fit by the time that one takes.
        burst_ms = 0.0 if predicts else 50.0
        engine.restart(num_speculative_tokens=num_drafts, max_burst_ms=burst_ms, **options)  # type: ignore[arg-type]
        found = {name: each for i in range(0, len(items), 2) for name, each in engine.run(items[i : i + 2]).items()}
        assert shown(found) == shown(plain), options
        assert engine.num_draft_tokens > 20
        for name, result in plain.items():
            for one, other in zip(result.logprobs, found[name].logprobs, strict=True):
                assert one.top_token_ids == other.top_token_ids
                assert [one.logprob, *one.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-4)
        together = engine.run(items)
        assert shown(together) == shown(plain), options
        assert together["shared 1"].num_cached_tokens >= num_cached
        assert engine.kv.usage == 0.0


@pytest.mark.parametrize("which", [pytest.param("itself_with_all_options", marks=pytest.mark.exhaustive), "windows"])
def test_tokens_and_log_probabilities_are_those_without_a_draft_model(
    which: str, request: pytest.FixtureRequest
) -> None:
    golden, engine = request.getfixturevalue(which)
    check_drafts_change_nothing(engine, NUM_DRAFTS)
    wanted = engine.run([_request(golden)])["golden"].token_ids
    assert wanted == golden.output_ids.tolist()
    assert engine.executor.compilations()["serving"] == 0


def _request(golden: GoldenCheckpoint) -> AddRequest:
    return request("golden", golden.prompt_ids, max_tokens=len(golden.output_ids))


def test_a_model_that_drafts_for_itself_is_always_right(itself: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    """Greedy and sampled: both models choose the same token from the same seed, whatever was in its pages before."""
    _, engine = itself
    prompts = [list(range(3 + i, 40 + i)) for i in range(2)]
    for overlap in (False, True):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, overlap=overlap)
        for _ in range(2):  # the second time, the prompt is found in the prefix cache
            items = [request("a", prompts[0], max_tokens=41), request("b", prompts[1], max_tokens=41, temperature=1.0)]
            engine.run(items)
        assert engine.num_accepted_tokens == engine.num_draft_tokens > 100
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    engine.run([request("a", prompts[0], max_tokens=42)])
    # A prompt in three chunks, a step without a draft, then four tokens a step.
    assert engine.num_steps == 3 + 1 + 10


@pytest.mark.parametrize(
    "which",
    [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("itself_with_all_options", "blocks")), "windows"],
)
def test_sampled_replies_have_the_distribution_of_the_model(which: str, request: pytest.FixtureRequest) -> None:
    """Chi-square of 400 replies of five tokens, of the 32 that two choices a token allow, against products of the model's
    probabilities. The last three tokens have drafts: all right, or all wrong. Seeds are fixed."""
    golden, engine = request.getfixturevalue(which)
    prompt, num_samples, temperature = golden.prompt_ids.tolist()[:9], 400, 0.25
    engine.restart(overlap=False, max_burst_ms=0.0)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(5):
        probes = [_asked(str(i), [*prompt, *path], max_tokens=1, num_top_logprobs=2) for i, path in enumerate(expected)]
        found = engine.run(probes)
        longer = {}
        for i, (path, share) in enumerate(expected.items()):
            best = found[str(i)].logprobs[0]
            weights = np.exp(np.array(best.top_logprobs) / temperature)
            for token, weight in zip(best.top_token_ids, weights / weights.sum(), strict=True):
                longer[*path, token] = share * float(weight)
        expected = longer
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    options = {"temperature": temperature, "top_k": 2, "max_tokens": 5}
    replies: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, num_samples, 2):
        pair = engine.run([_asked(str(i), prompt, seed=seed + i, **options) for i in range(2)])
        replies.update(tuple(reply.token_ids) for reply in pair.values())
    assert set(replies) <= set(expected)
    assert engine.num_draft_tokens >= num_samples
    if which != "blocks":
        assert engine.num_accepted_tokens == (0 if which == "windows" else engine.num_draft_tokens)

    def chi_square(shares: Mapping[tuple[int, ...], float]) -> float:
        """Return the statistic over the common replies, and over all rare ones together."""
        common = [path for path in expected if num_samples * expected[path] >= 8]
        seen = [replies[path] for path in common] + [num_samples - sum(replies[path] for path in common)]
        wanted = [num_samples * shares[path] for path in common]
        cells = zip(seen, [*wanted, num_samples - sum(wanted)], strict=True)
        return sum((one - other) ** 2 / max(other, 1) for one, other in cells)

    # With 31 degrees of freedom 0.1 % of the distribution are above 61.1; fewer cells have fewer.
    assert chi_square(expected) < 61.1
    assert chi_square(dict.fromkeys(expected, 1 / len(expected))) > 61.1, (
        "the test tells the distribution from an even one"
    )


def test_an_abort_leaves_the_others_alone(itself: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    _, engine = itself
    items = [request(str(i), np.arange(5 + i, 20 + i), max_tokens=30, temperature=1.0, seed=i) for i in range(2)]
    engine.restart(overlap=False, max_burst_ms=0.0)
    expected = shown(engine.run(items))
    engine.restart(num_speculative_tokens=NUM_DRAFTS)
    assert [engine.core.handle(item) for item in items] == [[], []]
    tokens: dict[str, list[int]] = {item.request_id: [] for item in items}
    while engine.core.has_work:
        if len(tokens["1"]) >= 3:
            engine.core.handle(Abort([items[1].request_id]))
        step = engine.core.step()
        for output in [] if step is None else step.outputs:
            tokens[output.request_id] += output.token_ids
    assert tokens["0"] == expected["0"][0]
    assert tokens["1"] == expected["1"][0][: len(tokens["1"])]
    assert engine.kv.usage == 0.0


def test_sleep_and_new_weights_keep_the_draft_model(itself: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    golden, engine = itself
    weights = engine.executor.weights
    assert weights is not None
    for keeps_copy in (True, False):
        weights.discard(keeps_copy=keeps_copy)()
        weights.restore()()
        weights.load(str(golden.path))()
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        assert engine.run([_request(golden)])["golden"].token_ids == golden.output_ids.tolist()
        assert engine.num_accepted_tokens == engine.num_draft_tokens > 0
