"""The sampler against a numpy specification: exact support, exact distribution, independence of the batch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import cuts, sampler, scaling
from jaxserve.sampling.params import COLUMNS, EngineSamplingParams, device_row
from jaxserve.sampling.topk import MAX_SORTED, top_k
from jaxserve.types import NO_LOGPROBS
from tests.unit.sampling.rows import Row, choose

VOCAB = 1000


def _logits(rows: int, *, spread: float = 3.0, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def _run(
    logits: np.ndarray, params: list[EngineSamplingParams], positions: np.ndarray, top: int = 0, **how: bool
) -> sampler.Sampled:
    return choose([Row(*row) for row in zip(logits, params, strict=True)], positions, top, **how)


def kept(logits: np.ndarray, params: EngineSamplingParams) -> np.ndarray:
    """The specification: sort, cut by top_k, renormalise, cut by top_p, then min_p."""
    scaled = logits.astype(np.float64) / params.temperature
    keep = np.ones(len(logits), bool)
    if 0 < params.top_k < len(logits):
        keep &= scaled >= np.sort(scaled)[-params.top_k]
    probabilities = np.where(keep, np.exp(scaled - scaled.max()), 0)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        keep &= probabilities >= probabilities[order[(before < params.top_p).sum() - 1]]
    if params.min_p > 0:
        keep &= np.exp(scaled - scaled.max()) >= params.min_p
    return keep


@jax.jit
def _is_kept(logits: jax.Array, columns: jax.Array) -> jax.Array:
    options = {
        name: sampler.RowOptions(columns, {}, jnp.zeros(len(columns), jnp.int32)).value(name) for name in COLUMNS
    }
    scaled = scaling.temperature(logits, options["temperature"])
    found = cuts.candidates(scaled)
    for cut in (cuts.top_k, cuts.top_p, cuts.min_p):
        found = found._replace(kept=jnp.maximum(found.kept, cut(found, options[cut.__name__])))
    return scaled >= found.kept[:, None]


def _threshold(logits: np.ndarray, params: EngineSamplingParams) -> np.ndarray:
    return np.asarray(_is_kept(jnp.asarray(logits[None]), jnp.asarray(device_row(params)[None]))[0])


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        EngineSamplingParams(top_k=1),
        EngineSamplingParams(top_k=5),
        EngineSamplingParams(top_k=64),
        EngineSamplingParams(top_k=65),
        EngineSamplingParams(top_k=700),
        EngineSamplingParams(top_k=VOCAB),
        EngineSamplingParams(top_p=0.01),
        EngineSamplingParams(top_p=0.5),
        EngineSamplingParams(top_p=0.95),
        EngineSamplingParams(top_p=0.9999),
        EngineSamplingParams(top_k=40, top_p=0.7),
        EngineSamplingParams(top_k=300, top_p=0.9),
        EngineSamplingParams(min_p=0.1),
        EngineSamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.02),
        EngineSamplingParams(temperature=2.0, top_p=0.8),
    ],
    ids=repr,
)
def test_restrictions_keep_exactly_the_specified_tokens(params: EngineSamplingParams, spread: float) -> None:
    logits = _logits(1, spread=spread)[0]
    np.testing.assert_array_equal(_threshold(logits, params), kept(logits, params))


@pytest.mark.parametrize("bits", [1, 2])
def test_searches_of_thresholds_are_exact_at_any_number_of_bits_a_pass(bits: int) -> None:
    keys = np.random.default_rng(0).integers(-(2**31), 2**31, (5, 900)).astype(np.int32)
    keys[0, :2], keys[1] = (-(2**31), 2**31 - 1), 7
    count = np.array([1, 3, 450, 899, 900])
    found = cuts.smallest_key(jnp.asarray(keys), lambda kept: kept.sum(-1) >= count, bits=bits)
    np.testing.assert_array_equal(found, [np.sort(row)[-n] for row, n in zip(keys, count, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        EngineSamplingParams(),
        EngineSamplingParams(temperature=0.7),
        EngineSamplingParams(top_k=8),
        EngineSamplingParams(top_p=0.6),
        EngineSamplingParams(min_p=0.2),
        EngineSamplingParams(temperature=1.5, top_k=100, top_p=0.9),
    ],
    ids=repr,
)
def test_draws_follow_the_restricted_distribution(params: EngineSamplingParams) -> None:
    vocab, draws = 300, 8_000
    logits = _logits(1, spread=2.0, vocab=vocab)[0]
    scaled = logits.astype(np.float64) / params.temperature
    expected = np.where(kept(logits, params), np.exp(scaled - scaled.max()), 0)
    expected /= expected.sum()
    counts = np.zeros(vocab)
    rows = 1000
    for start in range(0, draws, rows):
        tokens = choose([Row(logits, params)] * rows, np.arange(start, start + rows)).token_ids
        counts += np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[expected == 0].sum() == 0, "a token outside the restriction was drawn"
    # Pearson's chi-squared over cells of at least 5 expected draws; 5 standard deviations above its mean.
    cells = expected * draws >= 5
    statistic = ((counts - expected * draws)[cells] ** 2 / (expected * draws)[cells]).sum()
    freedom = cells.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * max(freedom, 1))


def test_greedy_takes_the_first_maximum() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [7, 3]] = 5.0
    tokens = _run(logits, [EngineSamplingParams(temperature=0.0)] * 2, np.zeros(2)).token_ids
    assert tokens.tolist() == [3, 0]


def test_lowest_temperatures_take_the_most_likely_token() -> None:
    logits = _logits(3)
    params = [EngineSamplingParams(temperature=temperature, seed=5) for temperature in (1e-45, 1e-30, 1e-7)]
    assert _run(logits, params, np.zeros(3)).token_ids.tolist() == logits.argmax(-1).tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = _logits(16, spread=1.0)
    params = [
        EngineSamplingParams(temperature=t, top_k=k, top_p=p, seed=s)
        for s, (t, k, p) in enumerate([(1.0, 0, 1.0), (0.0, 0, 1.0), (0.8, 5, 1.0), (1.3, 200, 0.9)] * 4)
    ]
    positions = np.arange(100, 116)
    together = np.asarray(_run(logits, params, positions).token_ids)
    alone = [
        int(_run(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], fill=False).token_ids[0])
        for i in range(len(params))
    ]
    assert together.tolist() == alone


def test_tokens_do_not_depend_on_whether_logprobs_are_wanted() -> None:
    logits, params = _logits(4), [EngineSamplingParams(temperature=t, seed=5) for t in (0, 0.5, 1, 2)]
    wanted, unwanted = (_run(logits, params, np.arange(4), top) for top in (0, NO_LOGPROBS))
    np.testing.assert_array_equal(unwanted.token_ids, wanted.token_ids)


def test_seed_and_position_change_the_draw() -> None:
    logits = np.zeros((64, VOCAB), np.float32)
    by_seed = _run(logits, [EngineSamplingParams(seed=s) for s in range(64)], np.zeros(64)).token_ids
    by_position = _run(logits, [EngineSamplingParams(seed=1)] * 64, np.arange(64)).token_ids
    assert len(set(by_seed.tolist())) > 55
    assert len(set(by_position.tolist())) > 55


def test_logprobs_are_of_the_unscaled_distribution() -> None:
    logits = _logits(4)
    out = _run(logits, [EngineSamplingParams(temperature=1.7, seed=i, top_k=3) for i in range(4)], np.arange(4), top=5)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(out.logprobs, expected[np.arange(4), out.token_ids], atol=1e-5)
    order = np.argsort(-logits, -1, kind="stable")[:, :20]
    np.testing.assert_array_equal(out.top_token_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 7, 4096, 4097, 5000, 300_000])
@pytest.mark.parametrize("k", [1, 20, 64])
def test_top_k_equals_a_stable_sort(vocab: int, k: int) -> None:
    x = np.random.default_rng(vocab).integers(-3, 3, (5, vocab)).astype(np.float32)  # many ties
    values, indices = top_k(jnp.asarray(x), k)
    order = np.argsort(-x, -1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("vocab", [4097, 128256, 262208])
def test_no_long_row_is_sorted(vocab: int) -> None:
    """XLA may sort a long row on GPUs outside of CUDA graphs; then the host waits for it in every step."""
    shape = jax.ShapeDtypeStruct((2, vocab), jnp.float32)
    text = jax.jit(lambda x: top_k(x, cuts.NUM_CANDIDATES)).lower(shape).as_text()
    sizes = [
        int(size)
        for size in re.findall(r"(?:top_k.*|^ *\}\) : \()tensor<2x(\d+)x\w+>(?: ->|\) ->)", text, re.MULTILINE)
    ]
    assert len(sizes) >= 3, "of chunks, of their places, and of what is in them"
    assert max(sizes) <= MAX_SORTED


@pytest.mark.parametrize("num_rows", [1, 8, 16, 64])
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_rows: int) -> None:
    """Log-probabilities of given tokens, and the logits that top-p keeps: 16 rows of this vocabulary, and 64 rows of candidates, are
    arrays that XLA:CPU adds up in another order than smaller ones."""
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((64, 300)) * 3, jnp.float32)
    token_ids = jnp.asarray(random.integers(0, 300, 64))

    @jax.jit
    def compute(logits: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        scored = sampler.score(logits, token_ids, jnp.int32(0))
        return scored.logprobs, cuts.top_p(cuts.candidates(logits), jnp.full(len(logits), 0.9))

    whole = compute(logits, token_ids)
    for start in range(0, 64, num_rows):
        own = slice(start, start + num_rows)
        for part, among_all in zip(compute(logits[own], token_ids[own]), whole, strict=True):
            np.testing.assert_array_equal(part, among_all[own])
