"""From the fields of a packed plan to what the layers get: positions, places in the cache, adapters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Paging, Ragged, ragged_layout
from jaxtyping import Array, Bool, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, GroupStep, StateSlots, pages_shape
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.models.skeleton import DecoderSkeleton
from jaxserve.runner.inputs import Program


def step_context(skeleton: DecoderSkeleton, field: dict[str, Any], cache: Cache, program: Program) -> StepContext:
    """Return what the layers get of a step: positions, pages and state slots by cache group, adapters. Traced.

    field: the fields of the packed plan by name.
    """
    page_size = pages_shape(cache)[3]
    positions, count = field["positions"], program.num_tables
    tables = [field["block_tables"]] if count == 1 else jnp.split(field["block_tables"], count, axis=1)
    # Padding tokens write to slot 0 of the null page.
    pages = [each[field["rows"], positions // page_size] * field["is_real"] for each in tables]
    ragged, causal_ragged = _ragged(skeleton, field, program)
    turned = field["rope_positions"].reshape(3, -1) if "rope_positions" in field else positions
    turns = rotation(skeleton.config, turned), sliding_rotation(skeleton.config, positions)
    scales = query_scales(skeleton.config, positions)
    places = positions % page_size
    rows = field["kv_lengths"], field["query_starts"]
    ends = field.get("key_ends")
    paging = [Paging(own, *rows, written, places, ragged, ends) for own, written in zip(tables, pages, strict=True)]
    layout = skeleton.config.cache
    groups: list[GroupStep] = [paging[group.table] for group in layout.paged]
    groups += [StateSlots(field["state_reads"], field["state_writes"]) for _ in layout.states]
    adapters = _own_ranks(skeleton.adapters, field["adapters"][field["rows"]])
    return StepContext(*turns, tuple(groups), adapters, scales, causal_ragged=causal_ragged, positions=positions)


def _ragged(skeleton: DecoderSkeleton, field: dict[str, Any], program: Program) -> tuple[Ragged | None, Ragged | None]:
    """Return how kernels take the rows, and how those of causal layers do if tokens in other layers see later ones."""
    if program.kind != "mixed":
        return None, None
    backend = skeleton.policy.attention_backend
    rows = partial(ragged_layout, field["query_starts"], field["num_decode_rows"], num_tokens=program.num_tokens)
    if "key_ends" not in field:
        return rows(backend=backend), None
    return rows(backend="reference"), rows(backend=backend)


def _own_ranks(config: AdaptersConfig | None, adapters: Int[Array, "T"]) -> Bool[Array, "T A"] | None:
    """Mark the ranks that belong to each token's adapter."""
    return None if config is None else adapters[:, None] == 1 + jnp.arange(config.num_ranks) // config.rank
