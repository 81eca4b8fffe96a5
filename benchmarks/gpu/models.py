"""Part 2, whole models: the device's logits against the CPU's, and a request alone against the same in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import Paging, ragged_layout

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.random_weights import host_leaves
from benchmarks.gpu.rig import BLOCK_SIZE, Generation, Rig, generate, greedy
from benchmarks.gpu.shapes import FAMILIES, LLAMA_8B, TINY, decoder
from jaxserve.config import CompileConfig, Config, Dtype, ModelConfig
from jaxserve.executor.self_test.comparison import TOLERANCE, compare
from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, KVPool
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.inputs import programs
from jaxserve.scheduler.plan import Buckets

NUM_TOKENS, NUM_PROMPT = 72, 64
NUM_PAGES = -(-NUM_TOKENS // BLOCK_SIZE)
FLOAT32_TOLERANCE = 1e-3
"""Largest difference of two logits, in standard deviations of all: both sides compute in float32."""
BFLOAT16_TOLERANCE = 0.05
"""Mean difference, likewise: roundings of three layers."""
UNDECIDED = 0.3
"""In bfloat16 a batch is summed otherwise, and tokens may change places whose log-probabilities are nearer than this:
logits spread by 2, and their roundings add up to some percent of that."""
NUM_BEST = 5
"""Most likely tokens with known log-probabilities."""
NUM_THREADS = 8
"""Families and batches compile side by side."""
QUICK = ("llama", "gemma2, soft caps", "qwen3, experts")
PROMPT_LENGTHS = (37, 3, 90, 64, 17, 55, 120, 8)
NUM_OUTPUTS = 24


def run(context: Context) -> None:
    first_device(context)
    families = [item for item in FAMILIES.items() if item[0] in QUICK or not context.is_quick]
    dtypes: tuple[Dtype, ...] = ("float32",) if context.is_quick else ("float32", "bfloat16")
    context.recorder.expect(["self-test", *(name for name, _ in families), *(f"batches {dtype}" for dtype in dtypes)])
    context.recorder.attempt("self-test", partial(check_self_test, context))
    with ThreadPoolExecutor(1 if context.is_restarted else NUM_THREADS) as threads:
        futures = [
            threads.submit(context.recorder.attempt, name, work)
            for name, work in (
                *((f"batches {dtype}", partial(check_batches, context, dtype)) for dtype in dtypes),
                *((name, partial(check_family, context, name, config)) for name, config in families),
            )
        ]
    for future in futures:
        future.result()


def check_self_test(context: Context) -> None:
    """Run the kernel self-test of a server, with a model of this size."""
    config = Config(
        model=ModelConfig(model="random"), compile=CompileConfig(attention_backend=context.attention_backend)
    )
    started = time.monotonic()
    found = compare(config, decoder(LLAMA_8B), chip_of(first_device(context)), lambda: None)
    if found is None:
        context.recorder.note("The server would try no kernels on this device.")
        return
    name = f"self-test of the server's kernels, {time.monotonic() - started:.0f} s"
    context.recorder.check(name, passed=found.error is None, error=found.largest, tolerance=TOLERANCE)


def check_family(context: Context, name: str, config: dict[str, Any]) -> None:
    """Prompt in one mixed pass, then token by token; the CPU computes all of it in one pass."""
    shape = decoder(config)
    leaves = host_leaves(make_skeleton(shape, plain(jnp.dtype("float32"))), context.seed)
    tokens = np.random.default_rng(context.seed).integers(0, shape.vocab_size, NUM_TOKENS)
    host, device = jax.devices("cpu")[0], first_device(context)
    wide = make_skeleton(shape, plain(jnp.dtype("float32")))
    compute = jitted(wide)
    expected = logits_of(wide, compute, leaves, tokens, NUM_TOKENS, host)
    found = logits_of(wide, compute, leaves, tokens, NUM_PROMPT, device)
    spread = float(expected.std())
    error = float(np.abs(found - expected).max()) / spread
    context.recorder.check(
        f"{name}, float32, largest difference",
        passed=error <= FLOAT32_TOLERANCE,
        error=error,
        tolerance=FLOAT32_TOLERANCE,
    )
    if context.is_quick:
        return
    narrow = make_skeleton(shape, policy_of(context, shape, "bfloat16"))
    rounded = tuple(leaf.astype(jnp.bfloat16).astype(np.float32) for leaf in leaves)
    expected = logits_of(wide, compute, rounded, tokens, NUM_TOKENS, host)
    leaves = tuple(leaf.astype(jnp.bfloat16) for leaf in host_leaves(narrow, context.seed))
    found = logits_of(narrow, jitted(narrow), leaves, tokens, NUM_PROMPT, device)
    error = float(np.abs(found - expected).mean()) / spread
    context.recorder.check(
        f"{name}, bfloat16, mean difference",
        passed=error <= BFLOAT16_TOLERANCE,
        error=error,
        tolerance=BFLOAT16_TOLERANCE,
    )


Compute = Callable[..., tuple[jax.Array, Cache]]


def jitted(skeleton: ModelSkeleton) -> Compute:
    """`_pass` of one model, compiled once for each kind of pass on each device."""
    return jax.jit(partial(_pass, skeleton), static_argnames=("is_mixed",))


def logits_of(
    skeleton: ModelSkeleton,
    compute: Compute,
    leaves: tuple[np.ndarray, ...],
    tokens: np.ndarray,
    num_prompt: int,
    device: jax.Device,
) -> np.ndarray:
    """Return the logits of every position, float32 (T, V).

    The first `num_prompt` are from one mixed pass, the others from decode passes.
    """
    config = skeleton.config
    shape = (config.num_layers, NUM_PAGES + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    with jax.default_device(device):
        params = tuple(jax.device_put(leaf, device) for leaf in leaves)
        halves = (jnp.zeros(shape, skeleton.policy.weights) for _ in range(2))
        cache: Cache = (KVPool(*halves),)
        logits, cache = compute(params, cache, jnp.asarray(tokens[:num_prompt]), jnp.arange(num_prompt), is_mixed=True)
        rows = [np.asarray(logits)]
        for position in range(num_prompt, len(tokens)):
            logits, cache = compute(
                params,
                cache,
                jnp.asarray(tokens[position : position + 1]),
                jnp.arange(position, position + 1),
                is_mixed=False,
            )
            rows.append(np.asarray(logits))
    return np.concatenate(rows)


def _pass(
    skeleton: ModelSkeleton,
    params: tuple[jax.Array, ...],
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    is_mixed: bool,
) -> tuple[jax.Array, Cache]:
    """One request's tokens at `positions`, and every one's logits. Traced."""
    count = tokens.shape[0]
    starts = jnp.asarray([0, count])
    ragged = ragged_layout(starts, jnp.int32(0), num_tokens=count, backend=skeleton.policy.attention_backend)
    model = skeleton.build(params)
    step = StepContext(
        rotation=rotation(skeleton.config, positions),
        sliding_rotation=sliding_rotation(skeleton.config, positions),
        query_scales=query_scales(skeleton.config, positions),
        groups=(
            Paging(
                block_tables=jnp.arange(1, NUM_PAGES + 1)[None],
                kv_lengths=positions[-1:] + 1,
                query_starts=starts,
                pages=positions // BLOCK_SIZE + 1,
                slots=positions % BLOCK_SIZE,
                ragged=ragged if is_mixed else None,
            ),
        ),
    )
    hidden, cache = model.hidden(tokens, cache, step)
    return model.logits(hidden, jnp.int32(count)), cache


def policy_of(context: Context, shape: DecoderConfig, dtype: Dtype) -> DtypePolicy:
    """One type for all, the kernels that the server would take for it, and its joined matmuls."""
    server = server_policy(context, shape, dtype=dtype)
    return replace(
        plain(jnp.dtype(dtype)), backend=server.backend, attention=server.attention, fused_for=server.fused_for
    )


def check_batches(context: Context, dtype: Dtype) -> None:
    """Eight requests one after the other and all together, through scheduler and runner, steps overlapping."""
    shape = decoder(TINY)
    rig = Rig(shape, policy_of(context, shape, dtype), num_blocks=129, max_model_len=256)
    wanted = programs(Buckets(decode=(1, 8), mixed=(64,), max_num_seqs=8), rig.max_pages)
    made, _ = rig.compile(wanted, context.recorder.left_s)
    if len(made) < len(wanted):
        raise TimeoutError(f"{len(made)} of {len(wanted)} programs compiled in time")
    params = rig.place(host_leaves(rig.skeleton, context.seed))
    runner = rig.runner(params, made)
    random = np.random.default_rng(context.seed)
    requests = [
        greedy(f"request-{index}", random.integers(0, shape.vocab_size, length), NUM_OUTPUTS, num_top_logprobs=NUM_BEST)
        for index, length in enumerate(PROMPT_LENGTHS)
    ]
    together = generate(rig.core(runner, made), requests)
    for request in requests:
        alone = generate(rig.core(runner, made), [request])
        name = str(request.request_id)
        equal, gap = first_difference(alone, together, name)
        is_excused = dtype == "bfloat16" and gap is not None and gap < UNDECIDED
        context.recorder.check(
            f"{name} alone and in a batch, {dtype}",
            passed=equal == NUM_OUTPUTS or is_excused,
            equal_tokens=equal,
            tokens=NUM_OUTPUTS,
            gap_at_difference=gap,
        )


def first_difference(alone: Generation, together: Generation, name: str) -> tuple[int, float | None]:
    """Return the number of leading tokens that agree, and how much less likely the other token is at the first difference.

    The second value is None if the other token is not among the most likely ones.
    """
    pairs = zip(alone.token_ids[name], together.token_ids[name], strict=True)
    for index, (one, other) in enumerate(pairs):
        if one != other:
            best = alone.logprobs[name][index]
            likely = dict(zip(best.top_token_ids, best.top_logprobs, strict=True))
            return index, likely[one] - likely[other] if other in likely else None
    return len(alone.token_ids[name]), None
