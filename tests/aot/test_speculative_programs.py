"""Speculative steps with a draft model, compiled for accelerators that are not there: kernels, one CUDA graph, bytes.

Real widths, one layer of each model. The sampler is an argmax here: test_step_programs.py compiles the real one, which takes
a compiler most of the time, once for the model and once for each drafted token. `python -m tests.aot.test_speculative_programs
h200` (or `v6e`) compiles it with the real sampler and the vocabulary of Llama 3, and prints the rows of docs/benchmarks/h200-static.md.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.paged_attention import pool_heads

from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, decoder
from benchmarks.gpu.static import THUNKS, outside_graphs
from benchmarks.model_steps.traffic import Course, Launch, Partial, launches
from jaxserve.layers.cache import GroupShapes, group_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.assistant import AssistantConfig
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.predictor import EagleConfig, MTPConfig
from jaxserve.models.skeleton import (
    DecoderSkeleton,
    ModelSkeleton,
    make_assistant_skeleton,
    make_eagle_skeleton,
    make_predictor_skeleton,
    make_skeleton,
)
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.inputs import DraftModel, Program
from jaxserve.runner.speculation import rows
from jaxserve.runner.speculation.step import speculative_task
from jaxserve.runner.steps import generation_task, lower
from jaxserve.sampling.sampler import Sampled
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.targets import TPU_ENVIRONMENT
from jaxserve.types import MAX_TOP_LOGPROBS
from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H200, V6E, Target
from tests.aot.test_embed_programs import require_compiler
from tests.aot.test_parallel_programs import LATENT

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.newest]

NUM_ROWS, NUM_DRAFTS, NUM_PAGES = 32, 3, 1024
NUM_STATE_SLOTS = 65
SMALL_VOCAB = 4096
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 32,
}
"""The widths of Qwen3.5-4B, in which three of four layers are gated delta nets."""


def one_layer(config: dict[str, Any], vocab_size: int | None) -> DecoderConfig:
    """Return the first layer of a model; vocab_size: None for the model's own."""
    found = decoder(config)
    return replace(found, layers=found.layers[:1], vocab_size=vocab_size or found.vocab_size)


def choose_greedily(logits: jax.Array, *options: Any) -> Sampled:
    """Take the place of the sampler."""
    count = len(logits)
    none = jnp.zeros((count, MAX_TOP_LOGPROBS))
    return Sampled(logits.argmax(1).astype(jnp.int32), jnp.zeros(count), none.astype(jnp.int32), none)


@dataclass(frozen=True)
class Compiled:
    """A speculative step and what its compiler says of it."""

    text: str
    pools: tuple[GroupShapes, ...]
    skeletons: tuple[ModelSkeleton, DecoderSkeleton]
    outside_graphs: list[str]
    temp_bytes: int
    aliased_bytes: int

    @property
    def _arrays(self) -> list[Any]:
        return [array for group in self.pools for array in group.arrays]

    def copied_pools(self) -> list[str]:
        """Return the operations that copy a pool, all of which are in the program."""
        copies: list[str] = []
        for array in self._arrays:
            shape = re.escape(f"[{','.join(map(str, array.shape))}]")
            assert re.search(shape, self.text)
            copies += re.findall(rf"= \(?\w+{shape}\S* (?:copy|copy-start|transpose|convert|pad)\(", self.text)
        return copies

    def layer(self, *, of_draft_model: bool) -> list[Launch]:
        """Return the launches of the passes through one model's layer, those of a loop left out; pages count as nothing."""
        partial = Partial({array.shape[1:]: 0.0 for array in self._arrays})  # of one layer
        found = [each for each in launches(self.text, partial, Course()) if each.opcode != "while"]
        return [each for each in found if "layer_0" in each.scope and ("draft_model/" in each.scope) == of_draft_model]

    def ratio(self, *, of_draft_model: bool) -> float:
        """Return the bytes that these passes move over the weights that they must read."""
        leaves = self.skeletons[of_draft_model].leaves
        weights = sum(leaf.num_bytes for leaf in leaves if ".layers.0." in leaf.name)
        is_loop = " while(" in self.text  # on TPUs, of all passes but the first
        passes = NUM_DRAFTS if of_draft_model and not is_loop else 1
        return sum(each.moved_bytes for each in self.layer(of_draft_model=of_draft_model)) / (passes * weights)


def compiled(target: Target, vocab_size: int | None, *, has_mtp_layer: bool = False) -> Compiled:
    """Compile the step of a model of 8B and a draft model of 1B parameters as the server would, one layer of each.

    has_mtp_layer: a multi-token-prediction layer of the same widths drafts instead.
    """
    model = one_layer(LLAMA_8B, vocab_size)
    draft = model if has_mtp_layer else one_layer(LLAMA_1B, vocab_size)
    return compiled_step(target, model, draft, has_mtp_layer=has_mtp_layer)


def compiled_step(target: Target, model: DecoderConfig, draft: DecoderConfig, *, has_mtp_layer: bool) -> Compiled:
    """Compile the step of a model with a draft model, an EAGLE-3 head or a drafter of Gemma 4, or with `draft` as its multi-token-prediction layer."""
    is_gpu = target.platform == "gpu"
    backend: Any = "mosaic_gpu" if is_gpu else "mosaic_tpu"
    policy = replace(plain(jnp.dtype("bfloat16")), backend=backend, fused_for=1 if is_gpu else 0)
    page_size = page_tokens(target.platform, None)
    pools = (*_pools(model, page_size, target.platform), *_pools(draft, page_size, target.platform))
    draft = replace(draft, mtp=MTPConfig()) if has_mtp_layer else draft
    make: Any = make_predictor_skeleton if has_mtp_layer else make_skeleton
    if draft.eagle is not None or draft.assistant is not None:
        make = make_assistant_skeleton if draft.eagle is None else make_eagle_skeleton
    skeletons = make_skeleton(model, policy), make(draft, policy)
    task = speculative_task(generation_task(target.platform), DraftModel(skeletons[1], NUM_DRAFTS))
    num_slots = NUM_STATE_SLOTS if model.cache.states else 0
    shape = (NUM_ROWS, NUM_ROWS, 8192 // page_size, NUM_ROWS, 1 + NUM_DRAFTS)
    program = Program("speculate", *shape, num_state_slots=num_slots)
    devices = target.devices(1)
    with tempfile.TemporaryDirectory() as dumps:
        options = {"xla_dump_to": dumps, "xla_dump_hlo_as_text": True, "xla_gpu_autotune_level": 0}
        with jax.default_device(devices[0]) if is_gpu else nullcontext():
            lowered = lower(skeletons[0], make_sharding(model, MeshShape(), devices), program, pools, task)
        step = lowered.compile(options if is_gpu else None)
        thunks = [file.read_text(encoding="utf-8") for file in Path(dumps).glob(THUNKS)]
    text, memory = step.as_text(), step.memory_analysis()
    assert text is not None
    assert memory is not None
    outside = [kind for each in thunks for kind in outside_graphs(each)]
    return Compiled(text, pools, skeletons, outside, memory.temp_size_in_bytes, memory.alias_size_in_bytes)


def _pools(config: DecoderConfig, page_size: int, platform: str) -> list[GroupShapes]:
    pools = []
    for group in config.cache.groups:
        heads = pool_heads(group.num_kv_heads, group.head_dim, platform) if group.has_pages else None
        count = NUM_PAGES if group.has_pages else NUM_STATE_SLOTS
        pools.append(group_shapes(group, count, page_size, "bfloat16", "bfloat16", heads))
    return pools


def test_a_speculative_step_is_one_cuda_graph_of_kernels_that_reads_its_weights_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    found = compiled(H200, SMALL_VOCAB)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    kernels = re.findall(r'custom_call_target="mosaic_gpu\w*"', found.text)
    # the verified chunk: the kernel of prompts and the two for rows of one token; the draft model's two tokens; its other passes
    assert len(kernels) == 3 + 1 + 2 * (NUM_DRAFTS - 1)
    assert found.ratio(of_draft_model=False) < 1.4
    assert found.ratio(of_draft_model=True) < 1.6


def test_a_speculative_step_over_latent_vectors_is_one_cuda_graph_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multi-token-prediction layer drafts, as DeepSeek-V3's does."""
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    found = compiled_step(H200, LATENT, LATENT, has_mtp_layer=True)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    assert found.copied_pools() == []
    kernels = re.findall(r'custom_call_target="mosaic_gpu\w*"', found.text)
    assert len(kernels) == 2 * (
        1 + NUM_DRAFTS
    )  # attention and the join, in the verified chunk and in each pass that drafts
    assert found.copied_pools() == []


def test_a_step_with_an_mtp_layer_is_one_cuda_graph_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    found = compiled(H200, SMALL_VOCAB, has_mtp_layer=True)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    kernels = re.findall(r'custom_call_target="mosaic_gpu\w*"', found.text)
    # the verified chunk in the model and in the layer, by three kernels each; the layer's other passes
    assert len(kernels) == 3 + 3 + 2 * (NUM_DRAFTS - 1)
    assert found.copied_pools() == []


def test_a_step_with_an_eagle_head_is_one_cuda_graph_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where logits of the head's vocabulary are spread over that of the model."""
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    layers = (0, 0, 1)
    model = replace(one_layer(LLAMA_8B, SMALL_VOCAB), tapped_layers=layers)
    eagle = EagleConfig(SMALL_VOCAB, model.hidden_size, layers)
    head = replace(one_layer(LLAMA_8B, SMALL_VOCAB // 4), eagle=eagle)
    found = compiled_step(H200, model, head, has_mtp_layer=False)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    kernels = re.findall(r'custom_call_target="mosaic_gpu\w*"', found.text)
    # as with an MTP layer
    assert len(kernels) == 3 + 3 + 2 * (NUM_DRAFTS - 1)
    assert found.copied_pools() == []


def test_a_step_with_a_drafter_of_gemma_4_is_one_cuda_graph_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attends to the pool of the model, and logits are those of clusters of tokens."""
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    model = one_layer(LLAMA_8B, SMALL_VOCAB)
    (places,) = model.cache.places
    assert places.paged is not None
    own = AssistantConfig(model.hidden_size, 64, 2, (LayerPlaces(replace(places.paged, is_owner=False)),))
    layers = (replace(model.layers[0], kv_source=0),)
    narrow = {"hidden_size": 256, "intermediate_size": 1024, "tied_embeddings": True}
    found = compiled_step(H200, model, replace(model, layers=layers, assistant=own, **narrow), has_mtp_layer=False)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    kernels = re.findall(r'custom_call_target="mosaic_gpu\w*"', found.text)
    # the verified chunk by three kernels, then the drafter's passes, each over the keys of single rows
    assert len(kernels) == 3 + 2 * NUM_DRAFTS
    assert found.copied_pools() == []


def test_a_step_of_a_model_with_recurrent_states_is_one_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated delta net and attention, drafted for by the checkpoint's layer: states go back without a loop, in their own memory."""
    require_compiler(H200)
    monkeypatch.setattr(rows, "sample", choose_greedily)
    whole = replace(decoder(QWEN3_5), vocab_size=SMALL_VOCAB)
    model, layer = (replace(whole, layers=whole.layers[first:4]) for first in (2, 3))
    found = compiled_step(H200, model, layer, has_mtp_layer=True)
    assert found.outside_graphs == []
    assert kernels_given_parts(found.text) == []
    assert " while(" not in found.text
    # The chunk reads the states in their slots, then the tokens that stay are computed again and the states written.
    assert len(re.findall(r'custom_call_target="mosaic_gpu[^\n]*linear_attention', found.text)) == 2
    assert found.copied_pools() == []


def main() -> None:
    """Print what the compiler says of the step with the real sampler."""
    os.environ.update(TPU_ENVIRONMENT)
    wanted = {"h200": H200, "v6e": V6E}[sys.argv[1]]
    assert wanted.has_compiler, f"{wanted.compiler} is not installed"
    one = compiled(wanted, None)
    for of_draft_model in (False, True):
        moved = sum(each.moved_bytes for each in one.layer(of_draft_model=of_draft_model))
        print(
            f"{'draft model' if of_draft_model else 'model'}: {len(one.layer(of_draft_model=of_draft_model))} launches, "
            f"{moved / 1e6:.1f} MB, {one.ratio(of_draft_model=of_draft_model):.2f} of the weights of its passes"
        )
    print(f"outside of graphs: {one.outside_graphs}; temporaries {one.temp_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
