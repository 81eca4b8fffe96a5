"""Tokens of several worker processes joined by gloo: those of transformers, for every family."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.models.registry import decoder_of, open_model
from tests.e2e.hosts import golden_tokens, greedy_tokens, running_hosts
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA, GoldenCheckpoint, golden_checkpoint, golden_names, mtp_golden
from tests.models.kv_scale_files import random_scales, scheme, write_scales
from tests.models.random_checkpoint import write_random
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
    """Return the flags of the most devices, at most eight, that divide the heads of a checkpoint, then its cache.

    Eight if nothing can be divided: every device computes whole attention, and shares of what has even sizes.
    """
    decoder = decoder_of(open_model(golden.path))
    tensor = math.gcd(decoder.num_heads, 8)
    has_one_pool = len(decoder.cache.groups) == 1
    data = 8 // tensor if has_one_pool and decoder.vocab_size % 8 == 0 else 1
    if tensor * data == 1:
        tensor = 8
    return ("--tensor-parallel-size", str(tensor), "--data-parallel-size", str(data), "--max-model-len", "128")


def _models() -> list[Any]:
    """Return every checkpoint; of one architecture, all but the last are `exhaustive`."""
    last = {_architecture(name): name for name in golden_names()}
    models = []
    for name in golden_names():
        is_further = name != last[_architecture(name)] and name not in SPLIT_OVER_TWO_HOSTS
        models.append(pytest.param(name, marks=[pytest.mark.exhaustive] if is_further else []))
    return models


def _architecture(name: str) -> str:
    config = json.loads((DATA / name / "config.json").read_bytes())
    return str(config["architectures"][0])


@pytest.mark.parametrize("model", _models())
def test_every_family_gives_the_same_tokens_on_two_hosts(model: str, programs: Path) -> None:
    golden = golden_checkpoint(model)
    flags = SPLIT_OVER_TWO_HOSTS.get(model) or flags_of(golden)
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


PRIMES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 97,
    "vocab_size": 331,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
"""Sizes that no number of devices divides."""
OF_PRIMES = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **PRIMES},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 31,
        "norm_topk_prob": True,
        **PRIMES,
    },
}


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kind", OF_PRIMES)
def test_sizes_that_devices_do_not_divide_give_the_tokens_of_one_process(
    kind: str, quantization: str, tmp_path: Path, programs: Path
) -> None:
    """Every device of both hosts holds and computes the whole of what does not divide, and the server says so."""
    golden = golden_checkpoint("qwen2_tiny")
    path = write_random(tmp_path, OF_PRIMES[kind])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(golden.path / name, path)
    engine = ModelEngine(path, quantization=quantization)
    alone = engine.run([request("alone", golden.prompt_ids, max_tokens=NUM_TOKENS)])["alone"].token_ids
    engine.close()
    known = replace(golden, path=path, output_ids=np.asarray(alone, np.int32))
    with running_hosts(known, 2, 8, "--quantization", quantization, programs=programs) as replica:
        assert greedy_tokens(replica.server, known, NUM_TOKENS) == golden_tokens(known, NUM_TOKENS)
        for axis, size in (("kv_heads", 1), ("ffn", 97), ("vocab", 331)):
            assert f"{axis} ({size}) does not divide over 8 devices: each holds all of it" in replica.server.output
        assert replica.stop() == [0, 0]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a scale for the keys and values of each layer and head."""
    scales = {
        f"model.layers.{layer}.self_attn.{half}_scale": each
        for layer, both in enumerate(random_scales(3, 2, 127))
        for half, each in zip("kv", both, strict=True)
    }
    quantization = scheme("int", strategy="attn_head")
    return write_scales(tmp_path_factory.mktemp("scales") / "model", "llama3_tiny", quantization, scales)


@pytest.mark.parametrize(
    "sizes", [(2, 1), (8, 1), (2, 4)], ids=["a KV head on each host", "copies of KV heads", "pages on ranks"]
)
@pytest.mark.parametrize("has_scales", [False, True], ids=["measured", "from the checkpoint"])
def test_an_int8_cache_gives_the_tokens_of_one_process(
    sizes: tuple[int, int], has_scales: bool, scaled: Path, programs: Path
) -> None:
    """All hosts have the same scales: each computes the measurement, as it computes a step, and gets the whole result."""
    golden = golden_checkpoint("llama3_tiny")
    path = scaled if has_scales else golden.path
    engine = ModelEngine(path, kv_cache_dtype="int8")
    alone = engine.run([request("alone", golden.prompt_ids, max_tokens=NUM_TOKENS)])["alone"].token_ids
    engine.close()
    assert alone != [int(token) for token in golden.output_ids[:NUM_TOKENS]], "rounding is seen in the tokens"
    known = replace(golden, path=path, output_ids=np.asarray(alone, np.int32))
    tensor, data = map(str, sizes)
    flags = ("--kv-cache-dtype", "int8", "--tensor-parallel-size", tensor, "--data-parallel-size", data)
    with running_hosts(known, 2, 2, *flags, programs=programs) as replica:
        assert greedy_tokens(replica.server, known, NUM_TOKENS) == golden_tokens(known, NUM_TOKENS)
        assert replica.stop() == [0, 0]


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
