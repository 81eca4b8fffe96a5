"""A tiny checkpoint on a mesh of simulated devices: two equal requests, each with pages of its own, computed by one program.

No engine and no sampler: what a mesh changes is the numbers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxtyping import Array

from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.checkpoint.peft import Adapter
from jaxserve.executor.adapters import adapters_config
from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import ArrayShape, Cache, StateSlots, assemble, group_shapes
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.collectives import Collective, compiled_collectives
from jaxserve.weights.loader import load_params
from tests.models.goldens import GoldenCheckpoint

PAGE_SIZE = 16
MAX_MODEL_LEN = 128
NUM_ROWS = 2


@dataclass(frozen=True)
class Adapted:
    """Adapters of a MeshModel."""

    adapters: tuple[Adapter, ...]
    numbers: tuple[int, int]
    """The adapter of each row, from 1; 0: none."""


class MeshModel:
    """Both rows get the same tokens; the second row's pages and state lie on the last data rank."""

    def __init__(
        self, golden: GoldenCheckpoint, shape: MeshShape, adapted: Adapted = Adapted((), (0, 0)), **policy: Any
    ) -> None:
        """policy: fields of `DtypePolicy` that differ from a plain one of float32."""
        checkpoint, self._numbers = open_model(golden.path), np.array(adapted.numbers)
        room = adapters_config(adapted.adapters)
        if room is not None:
            checkpoint = with_adapters(checkpoint, adapted.adapters, room.rank, room.modules)
        config = decoder_of(checkpoint).with_context(MAX_MODEL_LEN).for_devices(shape.tensor)
        wanted: DtypePolicy = replace(plain(jnp.dtype("float32")), mesh=shape, **policy)
        self.skeleton, self.sharding = make_skeleton(config, wanted, room), make_sharding(config, shape)
        self._params = load_params(checkpoint, self.skeleton, self.sharding, lambda *_: None)
        row_pages = -(-(len(golden.prompt_ids) + 8) // PAGE_SIZE)
        rank_pages = 1 + NUM_ROWS * row_pages
        firsts = 1, (shape.data - 1) * rank_pages + 1 + row_pages
        self._tables = np.array([np.arange(first, first + row_pages) for first in firsts], np.int32)
        rank_slots = 1 + NUM_ROWS
        self._zero_slots = np.array([0, (shape.data - 1) * rank_slots])
        self._cache: Cache = tuple(
            assemble(each.kind, [self._zeros(array) for array in each.arrays])
            for group in config.cache.groups
            for count in (shape.data * (rank_pages if group.has_pages else rank_slots),)
            for each in (group_shapes(group, count, PAGE_SIZE, "float32", "float32"),)
        )
        self._num_tokens = -(-NUM_ROWS * len(golden.prompt_ids) // 8) * 8
        self._length = 0

        def compute(params: tuple[Array, ...], cache: Cache, step: dict[str, Array]) -> tuple[Array, Cache]:
            positions, starts = step["positions"], step["query_starts"]
            ragged = ragged_layout(starts, step["num_decode_rows"], num_tokens=self._num_tokens)
            paging = Paging(step["tables"], step["kv_lengths"], starts, step["pages"], positions % PAGE_SIZE, ragged)
            slots = StateSlots(step["state_reads"], step["state_writes"])
            places = None if room is None else 1 + jnp.arange(room.num_ranks) // room.rank
            context = StepContext(
                rotation(config, positions),
                sliding_rotation(config, positions),
                tuple(paging if group.has_pages else slots for group in config.cache.groups),
                None if places is None else step["adapters"][:, None] == places,
                query_scales=query_scales(config, positions),
                positions=positions,
            )
            model = self.skeleton.build(params)
            hidden, cache = model.hidden(step["tokens"], cache, context)
            return model.logits(hidden, starts[-1]), cache

        kept = jax.tree.map(lambda array: array.sharding, self._cache)
        jitted = jax.jit(compute, donate_argnums=1, out_shardings=(self.sharding.replicated, kept))
        with jax.sharding.use_abstract_mesh(self.sharding.mesh.abstract_mesh):
            self.lowered = jitted.lower(self._params, self._cache, self._step(golden.prompt_ids))
        self._compute = self.lowered.compile()

    def _zeros(self, array: ArrayShape) -> Array:
        return jax.device_put(jnp.zeros(array.shape, array.dtype), self.sharding.place(array.axes))

    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives of the compiled program."""
        return compiled_collectives(self._compute.as_text())

    @property
    def num_tokens(self) -> int:
        """Tokens of the program, padding included."""
        return self._num_tokens

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (2, T, V) after each of these tokens, which follow those of earlier calls."""
        logits, self._cache = self._compute(self._params, self._cache, self._step(tokens))
        self._length += len(tokens)
        return np.asarray(logits)[: NUM_ROWS * len(tokens)].reshape(NUM_ROWS, len(tokens), -1)

    def greedy(self, logits: np.ndarray, count: int) -> list[list[int]]:
        """Return `count` greedy tokens of each row, the first from these logits; rows must agree."""
        chosen: list[Sequence[int]] = [logits[:, -1].argmax(-1).tolist()]
        while len(chosen) < count:
            chosen.append(self.logits(np.array(chosen[-1][:1]))[:, -1].argmax(-1).tolist())
        return np.array(chosen).T.tolist()

    def _step(self, tokens: np.ndarray) -> dict[str, Array]:
        count = len(tokens)
        positions = np.tile(np.arange(self._length, self._length + count), NUM_ROWS)
        rows = np.repeat(np.arange(NUM_ROWS), count)

        def padded(values: np.ndarray) -> Array:
            return jnp.asarray(np.pad(values, (0, self._num_tokens - len(values))), jnp.int32)

        step = {
            "tokens": padded(np.tile(tokens, NUM_ROWS)),
            "positions": padded(positions),
            "pages": padded(self._tables[rows, positions // PAGE_SIZE]),
            "tables": jnp.asarray(self._tables),
            "kv_lengths": jnp.full(NUM_ROWS, self._length + count, jnp.int32),
            "query_starts": jnp.arange(NUM_ROWS + 1, dtype=jnp.int32) * count,
            "num_decode_rows": jnp.int32(NUM_ROWS if count == 1 else 0),
            "adapters": padded(self._numbers[rows]),
            "state_reads": jnp.asarray(
                self._zero_slots + (np.arange(1, 1 + NUM_ROWS) if self._length else 0), jnp.int32
            ),
            "state_writes": jnp.asarray(self._zero_slots + np.arange(1, 1 + NUM_ROWS), jnp.int32),
        }
        return jax.device_put(step, self.sharding.replicated)
