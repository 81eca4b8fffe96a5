"""Tensor, expert and data parallelism on eight simulated devices, against transformers' outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.models.registry import decoder_of, open_model
from jaxserve.sharding.rules import MeshShape
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint, golden_names
from tests.models.mesh_model import MeshModel

NUM_OUTPUTS = 4
FAMILIES = (
    "deepseek_v3_tiny",  # latent vectors
    "deepseek_v4_tiny",  # blocks of tokens, groups of heads, residual streams
    "falcon_h1_tiny",  # attention and Mamba-2 side by side
    "gemma2_tiny",  # sliding windows, capped scores
    "gemma4_tiny",  # keys of two shapes
    "falcon_mamba_odd_tiny",  # no attention
    "glm_moe_dsa_tiny",  # keys of indexers, and layers that share what they choose
    "glm5_next_tiny",  # keys of pools of tokens, and mixed residual streams
    "gpt_bigcode_tiny",  # one KV head, embeddings of positions
    "gpt_oss_tiny",  # a mixture with biases, sinks, windows
    "kimi_linear_tiny",  # decays by channel, beside latent vectors
    "lfm2_tiny",  # short convolutions
    "minimax_tiny",  # states without windows
    "minimax_m3_tiny",  # blocks that an indexer chooses for each KV head
    "olmo_hybrid_tiny",  # gated delta nets with a matrix for each of q, k and v, beside copied KV heads
    "qwen2_moe_tiny",  # a shared expert
    "qwen3_next_tiny",  # gated delta nets, whose heads are divided
    "stablelm_parallel_tiny",  # dense, with norms of each head, which are copied with KV heads
)
"""One of each way in which layers are split, for `make test`; `make scale-check` splits all."""


def check(golden: GoldenCheckpoint, model: MeshModel) -> None:
    """Compare logits of the prompt and greedy tokens of both rows with transformers'."""
    logits = model.logits(golden.prompt_ids)
    for row in logits:
        np.testing.assert_allclose(row[-8:], golden.logits, atol=1e-4, rtol=0)
    assert model.greedy(logits, NUM_OUTPUTS) == [golden.output_ids[:NUM_OUTPUTS].tolist()] * 2


SHAPES = {
    "llama4_tiny": MeshShape(4, data=2),  # experts whose inputs are scaled are not distributed
    "llama4_odd_tiny": MeshShape(1, data=8),
    "gemma4_moe_odd_tiny": MeshShape(1, expert=2, data=2),
    "deepseek_v4_tiny": MeshShape(2, expert=2),  # data ranks are refused
}
"""Shapes of checkpoints that do not take the largest one."""


def largest_shape(golden: GoldenCheckpoint) -> MeshShape:
    """Return the shape of eight devices with most axes: heads over four (or less), two data ranks, experts over all."""
    if golden.name in SHAPES:
        return SHAPES[golden.name]
    decoder = decoder_of(open_model(golden.path))
    tensor = 4 if decoder.num_heads % 4 == 0 else 1
    if decoder.experts is None:
        return MeshShape(tensor, data=8 // tensor)
    return MeshShape(tensor, expert=max(n for n in (1, 2, 4, 8) if decoder.experts.num_experts % n == 0), data=2)


def cases() -> list[Any]:
    """Return all checkpoints; those that are not of FAMILIES are for `make scale-check`."""
    return [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.scale) for name in golden_names()]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases())
def test_eight_devices_generate_the_tokens_of_one(name: str) -> None:
    golden = golden_checkpoint(name)
    check(golden, MeshModel(golden, largest_shape(golden)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("qwen3_next_tiny", MeshShape(2, data=2)), ("falcon_h1_tiny", MeshShape(1, data=4))], ids=str
)
def test_no_state_leaves_its_device(name: str, shape: MeshShape) -> None:
    """Devices exchange vectors of tokens alone: no array is as large as the states of the rows, or as the pool."""
    model = MeshModel(golden_checkpoint(name), shape)
    (group,) = model.skeleton.config.cache.states
    states = sum(np.prod(array.shape) for array in group.arrays)
    of_token = 4 * model.num_tokens
    assert 4 * 2 * states % of_token, "the test would not notice the states of two rows"
    found = model.collectives()
    assert found
    assert [each for each in found if each.array_bytes % of_token] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "exchange", "fused_for"),
    [
        ("mistral_sliding_tiny", MeshShape(8), "auto", 8),  # 4 KV heads
        pytest.param("qwen2_tiny", MeshShape(2, data=4), "auto", 8, marks=pytest.mark.exhaustive),
        pytest.param("olmoe_tiny", MeshShape(4, expert=4), "all-reduce", 0, marks=pytest.mark.exhaustive),
        ("olmoe_tiny", MeshShape(8, expert=8), "all-to-all", 8),
        ("gpt_oss_tiny", MeshShape(4, expert=2), "all-to-all", 4),
        ("mixtral_tiny", MeshShape(4, expert=4, data=2), "all-to-all", 0),
        ("llama4_tiny", MeshShape(2, data=2), "auto", 4),  # scaled inputs of experts whose width is split
        pytest.param("cohere_tiny", MeshShape(4), "auto", 4, marks=pytest.mark.exhaustive),  # norms of each head
        ("qwen3_next_tiny", MeshShape(2, data=2), "auto", 4),  # states divided by head and by rank
        pytest.param("lfm2_tiny", MeshShape(1, data=2), "auto", 0, marks=pytest.mark.exhaustive),
        ("gemma3n_tiny", MeshShape(2, data=2), "auto", 4),  # a threshold over a width that is split
    ],
    ids=str,
)
def test_axes_are_combined_in_any_way(name: str, shape: MeshShape, exchange: str, fused_for: int) -> None:
    golden = golden_checkpoint(name)
    check(golden, MeshModel(golden, shape, exchange=exchange, fused_for=fused_for))
