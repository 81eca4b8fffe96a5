"""A dense model that needs one cache group keeps its programs while other kinds of caches are added: their HLO does not grow."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.backend import Backend

from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape

CONFIG: Final = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerConfig(),) * 2,
    max_position=1024,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)
SHAPES: Final = pool_shapes((2, 200, 2, 16, 16), "float32")
PROGRAMS: Final = {
    "decode": Program("decode", 1, 1, 64, num_slots=8),
    "several decode steps": Program("decode", 8, 8, 64, num_slots=8, max_steps=4),
    "mixed": Program("mixed", 64, 8, 64, num_slots=8),
}
NUM_INSTRUCTIONS: Final[dict[str, dict[Backend, tuple[int, ...]]]] = {
    "0.10.2": {"reference": (2347, 2692, 3426), "native": (1865, 2195, 2336)},
    "0.11.2": {"reference": (2350, 2701, 3449), "native": (1868, 2204, 2359)},
    "0.12.0.1": {"reference": (2350, 2701, 3399), "native": (1868, 2204, 2326)},
}
"""HLO instructions of each program before XLA's optimisations, which processors affect, by version of jax and kernels.

A change that is meant to alter the programs of all models writes the numbers that the failing test shows; any other must not.
"""


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("decode", marks=pytest.mark.exhaustive),  # the step that the next one repeats
        "several decode steps",
        "mixed",
    ],
)
def test_programs_of_a_dense_model_keep_their_size(name: str, backend: Backend) -> None:
    if jax.__version__ not in NUM_INSTRUCTIONS:
        pytest.skip(f"no numbers for jax {jax.__version__}")
    skeleton = make_skeleton(CONFIG, replace(plain(jnp.dtype("float32")), backend=backend))
    assert [group.kind for group in CONFIG.cache.groups] == ["full"]
    hlo = lower(skeleton, make_sharding(CONFIG, MeshShape()), PROGRAMS[name], SHAPES).as_text("hlo")
    found = len(re.findall(r"^\s+(?:ROOT )?\S+ = ", hlo, re.MULTILINE))
    assert found == NUM_INSTRUCTIONS[jax.__version__][backend][list(PROGRAMS).index(name)]
