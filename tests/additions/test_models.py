"""A family of models is one file: its checkpoints are served, from safetensors under its tensor names and from GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.additions.overlay import Overlay, unnamed
from tests.e2e.http_server import await_ready, launched
from tests.e2e.real_server import COLD_START_TIMEOUT_S, FEW_PROGRAMS
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint
from tests.programs import shared_programs
from tests.unit.checkpoint.checkpoint_files import write_gguf

pytestmark = pytest.mark.slow

DENSE = '''"""Plain: a decoder as Llama, with other names for its attention."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Read config.json."""
    keys = Keys({**DEFAULTS, **hf})
    return build(keys, layers=full_layers(keys))


FAMILY = Family(
    ("PlainForCausalLM",),
    decoder_config,
    renames={"attn": "self_attn"},
    gguf=GGUFArchitecture("plain", tensor_names={"plain_out": "self_attn.o_proj"}),
)
'''
MIXTURE = '''"""A mixture with shared experts and a sigmoid router, after its first dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, dense_first, read_experts, with_sigmoid_router
from jaxserve.models.families._keys import Keys


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Read config.json."""
    keys = Keys(hf)
    experts = read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    shared = experts.intermediate_size * keys.integer("n_shared_experts", 8)
    experts = replace(with_sigmoid_router(keys, experts), shared_intermediate_size=shared)
    config = build(
        keys,
        layers=dense_first(keys, full_layers(keys), experts),
        qkv_bias=keys.flag("attention_bias"),
        computed=(*COUNT_KEYS, "n_shared_experts", "partial_rotary_factor"),
    )
    return replace(config, qk_norm="heads" if keys.flag("use_qk_norm") else "none")


FAMILY = Family(("MixtureForCausalLM",), decoder_config, renames={"moe": "mlp"})
'''
GGUF_NAMES = """
import sys
from pathlib import Path
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.models.registry import open_model
found = open_model(Path(sys.argv[1]))
print(found.config["architectures"], *sorted(found.tensors))
"""


def as_family(golden: GoldenCheckpoint, folder: Path, architecture: str, names: dict[str, str]) -> Path:
    """Write a golden checkpoint as one of another architecture, with other tensor names."""
    shutil.copytree(golden.path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    tensors = load_file(folder / "model.safetensors")
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_served(overlay: Overlay, path: Path, golden: GoldenCheckpoint, *flags: str) -> None:
    """Serve a checkpoint and compare 32 greedy tokens with transformers'."""
    command = [*overlay.python, "-m", "jaxserve.cli.main", "serve", str(path), "--served-model-name", "new"]
    command += [*FEW_PROGRAMS, "--port", "0", "--compile-cache", str(shared_programs()), "--cpu-kernels", "xla", *flags]
    with launched(command, overlay.root, overlay.python_path) as server:
        await_ready(server, COLD_START_TIMEOUT_S)
        body = {"model": "new", "prompt": golden.prompt_ids.tolist(), "max_tokens": 32, "temperature": 0}
        status, _, reply = server.request("POST", "/v1/completions", body | {"logprobs": 0, "ignore_eos": True})
    assert status == 200, reply
    tokenizer = load_tokenizer(golden.path)
    expected = [tokenizer.token_text(int(token)) for token in golden.output_ids[:32]]
    assert json.loads(reply)["choices"][0]["logprobs"]["tokens"] == expected


def test_a_dense_family_is_one_file(overlay: Overlay, tmp_path: Path) -> None:
    overlay.add("jaxserve/models/families/plain.py", DENSE)
    assert unnamed(overlay, "a model family, dense or with experts") == set()
    golden = golden_checkpoint("llama3_tiny")
    path = as_family(golden, tmp_path / "plain", "PlainForCausalLM", {".self_attn.": ".attn."})
    check_served(overlay, path, golden)


def test_the_file_of_a_family_names_its_gguf_tensors(overlay: Overlay, tmp_path: Path) -> None:
    overlay.add("jaxserve/models/families/plain.py", DENSE)
    keys = {
        "plain.block_count": 1,
        "plain.context_length": 64,
        "plain.embedding_length": 8,
        "plain.feed_forward_length": 16,
        "plain.attention.head_count": 2,
        "plain.attention.head_count_kv": 2,
        "plain.attention.layer_norm_rms_epsilon": 1e-5,
        "plain.rope.freq_base": 10_000.0,
        "plain.rope.dimension_count": 4,
        "tokenizer.ggml.eos_token_id": 2,
    }
    names = {"token_embd.weight": (32, 8), "output_norm.weight": (8,), "blk.0.plain_out.weight": (8, 8)}
    tensors = {name: ("F32", np.ones(shape, np.float32)) for name, shape in names.items()}
    file = write_gguf(tmp_path / "plain.gguf", "plain", keys, tensors)
    printed = overlay.run("-c", GGUF_NAMES, str(file))
    assert "PlainForCausalLM" in printed
    assert "model.layers.0.self_attn.o_proj.weight" in printed


def test_a_mixture_with_shared_experts_and_a_sigmoid_router_is_one_file(overlay: Overlay, tmp_path: Path) -> None:
    overlay.add("jaxserve/models/families/mixture.py", MIXTURE)
    assert unnamed(overlay, "a model family, dense or with experts") == set()
    golden = golden_checkpoint("glm4_moe_tiny")
    path = as_family(golden, tmp_path / "mixture", "MixtureForCausalLM", {".mlp.": ".moe."})
    check_served(overlay, path, golden)
