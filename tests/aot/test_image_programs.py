"""The image encoder's program, compiled by the compilers of accelerators that are not there: memory, and bytes against the ideal.

`python -m tests.aot.test_image_programs h200|v6e` prints the row of docs/benchmarks/h200-static.md.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.gpu.static import Launch, launches
from jaxserve.config import ImagesConfig
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.vision import Normalization, VisionConfig
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.images.encoder import ImageShape, encoder_bytes, rows_shape
from jaxserve.runner.inputs import Program
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.targets import TPU_ENVIRONMENT
from jaxserve.types import ProgramKind
from tests.aot.devices import H200, V6E, Target
from tests.aot.test_embed_programs import require_compiler
from tests.aot.test_step_programs import SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

NUM_LAYERS = 2
TOWER = VisionConfig(  # SmolVLM-256M's, two of its twelve layers
    hidden_size=768,
    intermediate_size=3072,
    num_layers=NUM_LAYERS,
    num_heads=12,
    patch_size=16,
    norm_eps=1e-6,
    activation="gelu_tanh",
    positions="table",
    positions_per_side=32,
    connector="linear",
    connector_eps=1e-6,
    merge=4,
    output_size=SMALL.hidden_size,
    normalization=Normalization(1 / 255, (0.5,) * 3, (0.5,) * 3),
    image_token_id=3,
    has_final_norm=True,
    image_patches=1024,
)
MODEL = replace(SMALL, layers=SMALL.layers[:1], vision=TOWER)


@dataclass(frozen=True)
class Compiled:
    """A program of the encoder and what its compiler says of it."""

    step: Any
    program: Program
    shape: ImageShape


def compiled(target: Target, kind: ProgramKind = "encode") -> Compiled:
    """Compile the encoder's largest program on a GPU, of four tiles, and its smallest on a TPU, whose compiler takes a minute for
    the largest. kind: `encode`, or a program of an encoder that runs in parts."""
    shape = rows_shape(MODEL, ImagesConfig(), target.platform, 2, None if kind == "encode" else 1)
    assert shape is not None
    assert (shape.tiles is None) == (kind == "encode")
    size = shape.buckets[-1 if target.platform == "gpu" else 0]
    page_size = page_tokens(target.platform, None)
    pool = (1, 64, MODEL.num_kv_heads, page_size, MODEL.head_dim)
    program = Program(kind, size, size // shape.block, 16, 4, images=shape)
    sharding = make_sharding(MODEL, MeshShape(), target.devices(1))
    policy = replace(plain(jnp.dtype("bfloat16")), fused_for=1 if target.platform == "gpu" else 0)
    step = lower(make_skeleton(MODEL, policy), sharding, program, pool_shapes(pool, "bfloat16")).compile()
    return Compiled(step, program, shape)


def gpu_bytes(text: str, kept_bytes: int) -> tuple[int, int]:
    """Return the bytes that a GPU's program reads and writes outside the loops of attention, and in them. L2 is not modelled.

    kept_bytes: those of the embeddings that are kept, which are updated in place.
    """
    outside = sum(map(_moved, _work(text, kept_bytes)))
    trips = re.findall(r" while\(.*? body=%([\w.-]+),.*?\"known_trip_count\":{\"n\":\"(\d+)\"", text)
    return outside, sum(int(count) * sum(map(_moved, _work(text, kept_bytes, body))) for body, count in trips)


def _work(text: str, kept_bytes: int, computation: str | None = None) -> list[Launch]:
    return [each for each in launches(text, kept_bytes, computation) if not each.name.startswith("while")]


def _moved(launch: Launch) -> int:
    """Return the bytes that a launch reads and writes: of an array that it cuts or writes a part of, that part."""
    if "dynamic_update_slice" in launch.name:
        return 2 * (launch.read_bytes - launch.written_bytes)
    if launch.scope.endswith("slice"):
        return 2 * launch.written_bytes
    return launch.read_bytes + launch.written_bytes


def ideal_bytes(num_patches: int) -> int:
    """Bytes of the weights of the layers, and of each matmul's input and output once, in bfloat16."""
    d, f = TOWER.hidden_size, TOWER.intermediate_size
    weights = 4 * d * d + 2 * d * f
    activations = (d + 3 * d) + (3 * d + d) + (d + d) + (d + f) + (f + d)
    return 2 * NUM_LAYERS * (weights + num_patches * activations)


@pytest.mark.parametrize("target", [pytest.param(H200, id="h200"), pytest.param(V6E, id="v6e")])
def test_the_encoder_writes_its_rows_in_place_and_fits_the_estimate(target: Target) -> None:
    require_compiler(target)
    found = compiled(target)
    memory = found.step.memory_analysis()
    assert memory is not None
    num_patches, rows = found.program.num_tokens, found.shape
    assert num_patches == (4096 if target is H200 else 1024)
    assert memory.alias_size_in_bytes >= rows.num_bytes(2)  # the embeddings that are kept are not copied
    assert memory.temp_size_in_bytes < encoder_bytes(TOWER, num_patches, 2)
    assert memory.temp_size_in_bytes < 4 * TOWER.num_heads * num_patches**2  # of the scores of all pairs
    assert not any(word in found.step.as_text() for word in ("all-reduce", "all-gather"))
    if target is H200:  # in float32 the scores alone take four times the ideal, written and read; of all pairs 16 times
        assert sum(gpu_bytes(found.step.as_text(), rows.num_bytes(2))) < 9 * ideal_bytes(num_patches)


@pytest.mark.parametrize("kind", ["encode_heads", "encode_tile", "encode_layer", "encode_end"])
@pytest.mark.parametrize(
    "target", [pytest.param(H200, id="h200"), pytest.param(V6E, id="v6e", marks=pytest.mark.exhaustive)]
)
def test_a_part_of_the_encoder_keeps_activations_and_rows_in_place(target: Target, kind: ProgramKind) -> None:
    require_compiler(target)
    found = compiled(target, kind)
    memory = found.step.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= found.shape.num_bytes(2)
    assert memory.temp_size_in_bytes < encoder_bytes(TOWER, found.program.num_tokens, 2)


def main() -> None:
    """Print what the compiler says of the program."""
    os.environ.update(TPU_ENVIRONMENT)
    wanted = {"h200": H200, "v6e": V6E}[sys.argv[1]]
    assert wanted.has_compiler, f"{wanted.compiler} is not installed"
    one = compiled(wanted)
    memory, num_patches = one.step.memory_analysis(), one.program.num_tokens
    if wanted is H200:
        outside, inside = gpu_bytes(one.step.as_text(), one.shape.num_bytes(2))
        num_launches, accessed = len(launches(one.step.as_text(), one.shape.num_bytes(2))), outside + inside
        print(f"{num_launches} launches, of the bytes {inside / 1e6:.1f} MB in the loops of attention")
    else:
        accessed = one.step.cost_analysis()["bytes accessed"]
    print(
        f"{num_patches} patches, {NUM_LAYERS} layers: {accessed / 1e6:.1f} MB, ideal {ideal_bytes(num_patches) / 1e6:.1f} MB, "
        f"temporaries {memory.temp_size_in_bytes / 1e6:.1f} MB, estimate {encoder_bytes(TOWER, num_patches, 2) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
