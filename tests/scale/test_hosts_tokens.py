"""Tokens of several worker processes joined by gloo: those of transformers, for every family."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.registry import decoder_of, open_model
from tests.e2e.hosts import golden_tokens, greedy_tokens, running_hosts
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint, golden_checkpoints, mtp_golden
from tests.programs import shared_programs

pytestmark = [pytest.mark.slow, pytest.mark.scale]

NUM_TOKENS = 48


@pytest.fixture(scope="session")
def programs() -> Path:
    return shared_programs()


SPLIT_OVER_TWO_HOSTS = {
    "deepseek_v3_tiny": ("--tensor-parallel-size", "4", "--data-parallel-size", "2"),  # latent vectors on data ranks
    "falcon_h1_tiny": ("--tensor-parallel-size", "8"),  # attention and recurrent states side by side
    "gemma2_tiny": ("--tensor-parallel-size", "4", "--data-parallel-size", "2"),  # sliding windows, capped scores
    "gemma3_tiny": ("--tensor-parallel-size", "8"),  # pages of sliding windows of their own
    "gemma4_tiny": ("--tensor-parallel-size", "8"),  # layers that read the pages of others, and other head dims
    "glm4_moe_tiny": ("--tensor-parallel-size", "8", "--expert-parallel-size", "2"),  # dense layers before mixtures
    "gpt_oss_tiny": ("--tensor-parallel-size", "8", "--expert-parallel-size", "4"),  # biases of experts, sinks
    "olmo2_tiny": ("--tensor-parallel-size", "8"),  # norms over all heads
    "phi3_tiny": ("--tensor-parallel-size", "8"),  # fused projections in its checkpoint
    "qwen2_moe_tiny": ("--tensor-parallel-size", "8", "--expert-parallel-size", "2"),  # a shared expert
    "qwen2_tiny": ("--tensor-parallel-size", "2", "--data-parallel-size", "4"),  # biases
    "qwen3_next_tiny": (
        "--tensor-parallel-size",
        "8",
        "--expert-parallel-size",
        "2",
    ),  # recurrent layers between others
}
"""Flags of eight devices, four on each host, for one of each way in which layers are split, and of each kind of cache."""


def flags_of(golden: GoldenCheckpoint) -> tuple[str, ...]:
    """Return the flags of the most devices, at most eight, that compute a checkpoint: heads first, then data ranks.

    Empty if the heads cannot be divided, nor the cache among data ranks.
    """
    decoder = decoder_of(open_model(golden.path))
    tensor = math.gcd(decoder.num_heads, 8)
    has_one_pool = len(decoder.cache.groups) == 1
    data = 8 // tensor if has_one_pool and decoder.vocab_size % 8 == 0 else 1
    sizes = ("--tensor-parallel-size", str(tensor), "--data-parallel-size", str(data), "--max-model-len", "128")
    return sizes if tensor * data > 1 else ()


@pytest.mark.parametrize("model", [golden.name for golden in golden_checkpoints()])
def test_every_family_gives_the_same_tokens_on_two_hosts(model: str, programs: Path) -> None:
    golden = golden_checkpoint(model)
    flags = SPLIT_OVER_TWO_HOSTS.get(model) or flags_of(golden)
    if not flags:
        pytest.skip("its heads and cache cannot be divided")
    num_tokens = min(NUM_TOKENS, len(golden.output_ids))
    with running_hosts(golden, 2, 8, *flags, programs=programs) as replica:
        assert greedy_tokens(replica.server, golden, num_tokens) == golden_tokens(golden, num_tokens)
        assert replica.stop() == [0, 0]


@pytest.mark.parametrize("model", ["llama3_tiny", "qwen3_moe_tiny"])
@pytest.mark.parametrize(("num_hosts", "num_devices"), [(2, 8), (4, 4)])
def test_tokens_equal_those_of_one_process(model: str, num_hosts: int, num_devices: int, programs: Path) -> None:
    golden = golden_checkpoint(model)
    with running_hosts(golden, num_hosts, num_devices, programs=programs) as replica:
        assert greedy_tokens(replica.server, golden, NUM_TOKENS) == golden_tokens(golden, NUM_TOKENS)
        assert replica.stop() == [0] * num_hosts
        assert "Traceback" not in replica.server.output


def test_a_draft_model_changes_no_token_on_two_hosts(programs: Path) -> None:
    """The model drafts for itself."""
    golden = golden_checkpoint("mistral_sliding_tiny")
    flags = ("--speculative-model", str(golden.path), "--num-speculative-tokens", "3")
    with running_hosts(golden, 2, 2, *flags, programs=programs) as replica:
        assert greedy_tokens(replica.server, golden, NUM_TOKENS) == golden_tokens(golden, NUM_TOKENS)
        assert replica.server.metric("spec_decode_num_draft_tokens_total") > 0
        assert replica.stop() == [0, 0]


def test_an_mtp_layer_changes_no_token_on_two_hosts(tmp_path: Path, programs: Path) -> None:
    """The model has recurrent states, whose heads the hosts share."""
    golden = golden_checkpoint("qwen3_next_tiny")
    path = shutil.copytree(mtp_golden("qwen3_next").path, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden.path / name, path)
    engine = ModelEngine(path)
    alone = engine.run([request("alone", golden.prompt_ids, max_tokens=NUM_TOKENS)])["alone"].token_ids
    engine.close()
    known = replace(golden, path=path, output_ids=np.asarray(alone, np.int32))
    flags = ("--speculative-method", "mtp", "--num-speculative-tokens", "3")
    with running_hosts(known, 2, 2, *flags, programs=programs) as replica:
        assert greedy_tokens(replica.server, known, NUM_TOKENS) == golden_tokens(known, NUM_TOKENS)
        assert replica.server.metric("spec_decode_num_draft_tokens_total") > 0
        assert replica.stop() == [0, 0]
