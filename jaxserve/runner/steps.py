"""The step functions, and the only `jax.jit` of the server.

One function serves both program families: forward over the flat token axis, then sampling of each
row's last token, in one program. The KV pool is donated and comes back in the same buffers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxtyping import Array, Int

from jaxserve.layers.attention import KVPool, StepContext
from jaxserve.layers.rope import rotation
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.inputs import INPUT_FIELDS, Program, pack_result, packed_size, split
from jaxserve.sampling.sampler import sample, unpack_options
from jaxserve.sharding.mesh import Sharding


def lower(
    skeleton: ModelSkeleton,
    sharding: Sharding,
    program: Program,
    pool_shape: tuple[int, ...],
    kv_dtype: jnp.dtype | None = None,
) -> jax.stages.Lowered:
    """Trace one program for abstract arguments; nothing is allocated on a device. kv_dtype: None is the model's."""

    def step(params: tuple[Array, ...], k: Array, v: Array, packed: Int[Array, "I"]) -> tuple[Array, Array, Array]:
        pool, result = run_step(skeleton, params, KVPool(k, v), packed, program)
        return pool.k, pool.v, result

    pool_sharding, whole = sharding.kv_pool, sharding.replicated
    jitted = jax.jit(step, donate_argnames=("k", "v"), out_shardings=(pool_sharding, pool_sharding, whole))
    pool = jax.ShapeDtypeStruct(pool_shape, kv_dtype or skeleton.dtype, sharding=pool_sharding)
    inputs = jax.ShapeDtypeStruct((packed_size(program, INPUT_FIELDS),), jnp.int32, sharding=whole)
    return jitted.lower(abstract_params(skeleton, sharding), pool, pool, inputs)


def abstract_params(skeleton: ModelSkeleton, sharding: Sharding) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The parameters' shapes and places."""
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.place(leaf.axes)) for leaf in skeleton.leaves
    )


def run_step(
    skeleton: ModelSkeleton, params: tuple[Array, ...], pool: KVPool, packed: Int[Array, "I"], program: Program
) -> tuple[KVPool, Int[Array, "O"]]:
    """One step: write KV, attend, sample. DONATES the pool; returns it with the packed result."""
    field = split(packed, program, INPUT_FIELDS)
    model = skeleton.build(params)
    hidden, pool = model.hidden(field["tokens"], pool, _context(skeleton, field, pool, program))
    last = jnp.maximum(field["query_starts"][1:] - 1, 0)  # (B,) each row's newest token
    rows = hidden if program.kind == "decode" else hidden[last]
    with jax.named_scope("sample"):
        sampled = sample(
            model.logits(rows), unpack_options(field["sampling"]), field["kv_lengths"], field["num_top_logprobs"]
        )
    return pool, pack_result(sampled)


def _context(skeleton: ModelSkeleton, field: dict[str, Any], pool: KVPool, program: Program) -> StepContext:
    page_size = pool.k.shape[3]
    positions = field["positions"]
    # Padding tokens write to slot 0 of the null page.
    pages = field["block_tables"][field["rows"], positions // page_size] * field["is_real"]
    ragged = None
    if program.kind == "mixed":
        ragged = ragged_layout(field["query_starts"], field["num_decode_rows"], num_tokens=program.num_tokens)
    return StepContext(
        rotation=rotation(skeleton.config, positions),
        paging=Paging(
            block_tables=field["block_tables"],
            kv_lengths=field["kv_lengths"],
            query_starts=field["query_starts"],
            pages=pages,
            slots=positions % page_size,
            ragged=ragged,
        ),
    )
