"""Plans against numbers worked out by hand, and against compilers that want more than was estimated."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    Config,
    ImagesConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.errors import ConfigError
from jaxserve.models.registry import open_model
from jaxserve.runner.slots import slots_bytes
from jaxserve.tools.planning.collectives import Collective
from jaxserve.tools.planning.compiler import Answers, CompileJob, ProgramMemory
from jaxserve.tools.planning.devices import ACCELERATORS, Device, Rates, find_device
from jaxserve.tools.planning.fit import model_sizes
from jaxserve.tools.planning.machine import Machine
from jaxserve.tools.planning.plan import FORMAT_VERSION, Exchanges, Plan, to_json
from jaxserve.tools.planning.planner import Planner, plan_model, read_model
from jaxserve.tools.planning.roofline import decode_bound
from tests.models.goldens import DATA
from tests.unit.tools.planning.configs import (
    CODESTRAL_MAMBA,
    GEMMA_3,
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_30B_A3B,
    QWEN3_30B_A3B_FP8,
    SMOLLM2,
    write_config,
)

A100 = ACCELERATORS["a100"]
H200 = ACCELERATORS["h200"]
RATES = Rates(
    bytes_per_s=30e9, bfloat16_flops=2e11, float32_flops=2e11, int8_ops=2e11, fp8_flops=2e11, source="made up"
)
GIB = 1 << 30


def config_for(path: Path, **sections: Any) -> Config:
    model = sections.pop("model", {})
    return Config(model=ModelConfig(model=str(path), **model), compile=CompileConfig(cpu_kernels="xla"), **sections)


def plan_of(folder: Path, shapes: dict[str, Any], device: Device, **sections: Any) -> Plan:
    path = write_config(folder, shapes)
    rates = RATES if device.platform == "cpu" else device.rates
    return Planner(read_model(path), device, rates).plan(config_for(path, **sections), None)


def test_llama_8b_on_one_h200_by_hand(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_8B, H200)
    assert plan.fits
    assert plan.model.num_parameters == 8_030_261_248
    assert plan.weights_bytes == 2 * 8_030_261_248
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072
    # 0.95 of 151,397,597,184; 0.9 of that less weights, slots and 1 GiB: 112,164,535,991, in whole 64ths of 2^36
    assert plan.device.limit_bytes == 143_827_717_324
    assert plan.cache is not None
    assert plan.cache.bytes_per_block == 2_097_152
    assert plan.cache.num_blocks == 104 * GIB // 2_097_152 == 53_248
    assert plan.cache.num_tokens == 53_247 * 16
    assert [(row.length, row.num_requests, row.limited_by) for row in plan.concurrency] == [
        (1024, 256, "max_num_seqs"),
        (4096, 53_247 // 256, "kv"),
        (32768, 53_247 // 2048, "kv"),
        (131072, 53_247 // 8192, "kv"),
    ]
    assert plan.memory is not None
    assert plan.memory.workspace_is == "estimated"
    assert plan.memory.free_bytes == 143_827_717_324 - 16_060_522_496 - 104 * GIB - plan.memory.workspace_bytes


def test_images_take_the_encoders_weights_its_activations_and_embeddings_that_are_kept() -> None:
    path = DATA / "vision" / "qwen3_vl_tiny"
    plans = {}
    for limit in ("image=4", "image=0"):
        config = config_for(path, images=ImagesConfig(limit_mm_per_prompt=limit, image_cache_memory=2 << 20))
        plans[limit] = Planner(read_model(path, config.images), H200, H200.rates).plan(config, None)
    images, texts = plans["image=4"], plans["image=0"]
    tensors = open_model(path).tensors
    tower = sum(prod(info.shape) for name, info in tensors.items() if name.startswith("vision."))
    assert images.model.num_parameters - texts.model.num_parameters == tower > 0
    assert images.weights_bytes - texts.weights_bytes == 2 * tower
    assert images.memory is not None and texts.memory is not None
    width = 48 * (1 + 2)  # an embedding, and features of two deepstack layers
    between_parts = 16_384 * 4 * 24 * 2  # inputs of a layer, queries, keys and values
    assert images.memory.image_bytes == ((2 << 20) // (width * 2) + 1) * width * 2 + between_parts
    assert texts.memory.image_bytes == 0
    # 16,384 patches: 2 inputs and 4 x 24 of a layer in bfloat16, 192 pixels, 24 x 4 + 144 of the connector for 4 patches
    activations = 16_384 * ((2 * 24 + 4 * 24) * 2 + 192 * 4) + 2 * 4 * 2 * 128 * 16_384 + 4096 * (96 + 144) * 2
    assert images.memory.workspace_bytes == activations + slots_bytes(256, 352)
    assert [(row.step_s, row.limited_by) for row in images.decode] == [
        (row.step_s, row.limited_by) for row in texts.decode
    ]
    drafts = SchedulerConfig(num_speculative_tokens=2, speculative_model=str(DATA / "qwen3_tiny"))
    config = config_for(path, images=ImagesConfig(image_cache_memory=2 << 20), scheduler=drafts)
    drafted = Planner(read_model(path), H200, H200.rates).plan(config, None)
    assert drafted.memory is not None and drafted.memory.draft_bytes > 0
    assert drafted.memory.image_bytes == images.memory.image_bytes
    ranks = config_for(path, parallel=ParallelConfig(data_parallel_size=2))
    with pytest.raises(ConfigError, match="image=0"):
        Planner(read_model(path), H200, H200.rates).plan(ranks, None)


@pytest.mark.parametrize(
    "name",
    [
        "gemma4_tiny",
        "gemma4_moe_odd_tiny",
        "deepseek_v3_tiny",
        "glm_moe_dsa_tiny",
        "qwen3_next_tiny",
        "vision/smolvlm_tiny",
    ],
)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_parameters_of_layers_that_differ_are_those_of_the_checkpoint(name: str, num_devices: int) -> None:
    path = DATA / name
    tensors = open_model(path).tensors.values()
    config = config_for(path, parallel=ParallelConfig(tensor_parallel_size=num_devices))
    found = model_sizes(config, read_model(path).decoder, H200).num_parameters
    assert found == sum(prod(tensor.shape) for tensor in tensors)


def test_places_of_adapters_take_memory_for_every_expert(tmp_path: Path) -> None:
    path = write_config(tmp_path, QWEN3_30B_A3B)
    config = config_for(path)
    reserved = dataclasses.replace(config, model=dataclasses.replace(config.model, max_loras=2, max_lora_rank=24))
    plans = [Planner(read_model(path), H200, H200.rates).plan(each, None) for each in (config, reserved)]
    expert = 3 * (2048 + 768)
    attention = (2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048)
    expected = 2 * 32 * 48 * (128 * expert + attention) * 2  # ranks are multiples of 16, numbers of two bytes
    assert plans[1].weights_bytes - plans[0].weights_bytes == expected
    assert plans[1].model.num_parameters == plans[0].model.num_parameters
    assert f"{expected / GIB:.2f} GiB of the weights are those of 2 LoRA adapters of rank up to 32" in plans[1].notes


def test_adapters_take_memory_for_the_modules_that_they_change() -> None:
    path = DATA / "qwen3_moe_tiny"
    config = config_for(path)
    adapter = DATA / "adapters" / "qwen3_moe_tiny" / "experts"
    adapted = dataclasses.replace(config, model=dataclasses.replace(config.model, lora_modules=f"mine={adapter}"))
    plain, sizes = (model_sizes(each, read_model(path).decoder, H200) for each in (config, adapted))
    of_queries, of_experts = 3 * (64 + 128), 2 * 6 * 3 * (64 + 32)  # layer 1 has no experts
    assert sizes.adapters_bytes == sizes.weights_bytes - plain.weights_bytes == 16 * (of_queries + of_experts) * 2


def test_experts_take_memory_all_and_time_as_tokens_take_them(tmp_path: Path) -> None:
    path = write_config(tmp_path, QWEN3_30B_A3B)
    sizes = model_sizes(config_for(path), read_model(path).decoder, H200)
    assert sizes.num_parameters == 30_532_122_624
    assert sizes.weights_bytes == 2 * 30_532_122_624
    expert = 48 * 3 * 768 * 2048
    attention, router, head = 48 * 2048 * 128 * (2 * 32 + 2 * 4), 48 * 128 * 2048, 151_936 * 2048
    assert sizes.num_matmul_weights == 8 * expert + attention + router + head
    others = 2 * (attention + router + head)
    assert sizes.step_bytes(1) == pytest.approx(2 * 8 * expert + others)
    taken = 128 * (1 - (120 / 128) ** 32)  # of 128, by 32 tokens
    assert sizes.step_bytes(32) == pytest.approx(2 * taken * expert + others)
    assert sizes.step_bytes(4096) == pytest.approx(sizes.read_bytes)
    bound = decode_bound(sizes, H200.rates, 2, 1, 1024, fits=True)
    kv_bytes = 48 * 2 * 4 * 128 * 2 * 1024
    assert bound.step_s == pytest.approx((sizes.step_bytes(1) + kv_bytes) / H200.rates.bytes_per_s)


def test_an_indexer_bounds_what_queries_attend_to_and_its_keys_are_read_whole() -> None:
    """Four layers with vectors of 20 + 8 numbers, two of which have keys of 20; 8 tokens are chosen."""
    path = DATA / "glm_moe_dsa_tiny"
    sizes = model_sizes(config_for(path), read_model(path).decoder, H200)
    assert (sizes.attended_tokens(100), sizes.scored_numbers(100)) == (4 * 8, 2 * 20 * 100)
    assert (sizes.attended_tokens(8), sizes.scored_numbers(8)) == (4 * 8, 0), "all tokens are attended to"
    assert sizes.attended_pairs(100) == 4 * 8 * (100 - 4)
    assert sizes.scoring_work(100) == 2 * 20 * 12 * 100**2 / 2
    bound = decode_bound(sizes, H200.rates, 2, 1, 100, fits=True)
    num_bytes = sizes.step_bytes(1) + 2 * (4 * 28 * 8 + 2 * 20 * 100)
    assert bound.step_s == pytest.approx(num_bytes / H200.rates.bytes_per_s)
    plan = Planner(read_model(path), H200, H200.rates).plan(config_for(path), None)
    assert plan.kv_bytes_per_token == 2 * (4 * 28 + 2 * 20)


def test_tokens_of_a_pool_share_a_score_and_keep_a_key_and_gates_each() -> None:
    decoder = read_model(DATA / "glm5_next_tiny").decoder
    sizes = model_sizes(config_for(DATA / "glm5_next_tiny"), decoder, H200)
    [indexer] = {decoder.latent.indexer} if decoder.latent else set()
    assert indexer is not None and indexer.pool_size == 4
    count = sum(layer.has_kv and layer.index_source is None for layer in decoder.layers)
    assert sizes.scored_numbers(100) == count * 2 * indexer.head_dim * 100
    assert sizes.scoring_work(100) == count * indexer.num_heads * indexer.head_dim * 100**2 / 2 / 4


def test_layers_without_an_indexer_attend_to_all_beside_those_whose_blocks_are_chosen() -> None:
    """Two of three layers have keys of 12 numbers, and attend to 3 blocks of 4 tokens."""
    path = DATA / "minimax_m3_tiny"
    sizes = model_sizes(config_for(path), read_model(path).decoder, H200)
    assert (sizes.attended_tokens(100), sizes.scored_numbers(100)) == (100 + 2 * 12, 2 * 12 * 100)
    assert sizes.attended_pairs(100) == 100 * 50 + 2 * 12 * (100 - 6)
    assert sizes.scoring_work(100) == 2 * 12 * 2 * 100**2 / 2
    plan = Planner(read_model(path), H200, H200.rates).plan(config_for(path), None)
    assert plan.kv_bytes_per_token == 2 * (3 * 2 * 2 * 16 + 2 * 12)


def test_a_decode_step_reads_and_writes_the_state_of_each_row(tmp_path: Path) -> None:
    """Codestral Mamba: 64 layers, each with 128 states of 128 x 64 in float32 and 3 inputs of a convolution of 10,240 channels."""
    path = write_config(tmp_path, CODESTRAL_MAMBA)
    state = 64 * (128 * 128 * 64 * 4 + 3 * 10_240 * 2)
    for ranks in (1, 2):
        config = config_for(path, parallel=ParallelConfig(data_parallel_size=ranks))
        sizes = model_sizes(config, read_model(path).decoder, H200)
        assert sizes.state_bytes == state / ranks
    sizes = model_sizes(config_for(path), read_model(path).decoder, H200)
    bound = decode_bound(sizes, H200.rates, 2, 128, 4096, fits=True)
    assert bound.step_s == pytest.approx((sizes.read_bytes + 2 * 128 * state) / H200.rates.bytes_per_s)
    assert bound.limited_by == "kv"


@pytest.mark.parametrize(
    ("batch", "context", "step_ms", "tokens_per_s", "bound"),
    [
        (1, 1024, 3.155, 317, "weights"),
        (8, 1024, 3.351, 2388, "weights"),
        (32, 1024, 4.022, 7957, "weights"),
        (128, 1024, 6.706, 19087, "kv"),
        (32, 4096, 6.706, 4772, "kv"),
    ],
)
def test_decode_bound_of_llama_8b_on_h200(
    tmp_path: Path, batch: int, context: int, step_ms: float, tokens_per_s: float, bound: str
) -> None:
    """7.505e9 matrix parameters and 131,072 KV bytes a token over 4.8 TB/s."""
    rows = {(row.num_requests, row.context): row for row in plan_of(tmp_path, LLAMA_8B, H200).decode}
    row = rows[batch, context]
    assert row.step_s * 1e3 == pytest.approx(step_ms, rel=1e-3)
    assert row.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-3)
    assert (row.limited_by, row.fits) == (bound, True)
    assert not rows[256, 4096].fits
    assert rows[256, 1024].limited_by == "kv"


def test_prefill_bound_of_llama_8b_on_h200(tmp_path: Path) -> None:
    """2 x 6.979e9 T for the layers, 2 x 32 x 4096 x T^2 for attention, at 989 TFLOP/s; one head row a chunk."""
    prompts = {prompt.num_tokens: prompt for prompt in plan_of(tmp_path, LLAMA_8B, H200).prefill}
    for tokens, chunks in ((1024, 1), (4096, 2)):
        flops = 2 * 6_979_321_856 * tokens + 2 * 32 * 4096 * tokens**2 + 2 * 525_336_576 * chunks
        assert prompts[tokens].seconds == pytest.approx(flops / 989e12, rel=1e-6)
        assert prompts[tokens].limited_by == "arithmetic"


def test_smollm2_on_a_cpu_by_hand(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, SMOLLM2, find_device("cpu", 4_000_000_000))
    assert plan.fits
    assert (plan.model.num_parameters, plan.weights_stored_as) == (134_515_008, "float32")
    assert plan.weights_bytes == 4 * 134_515_008
    assert plan.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    # a quarter of what the weights leave: 865,484,992, in whole halves of 2^29
    assert plan.cache is not None
    assert plan.cache.num_blocks == 12 * (64 << 20) // (16 * 46_080) == 1092
    assert plan.step is not None
    assert (plan.step.max_num_seqs, plan.step.max_num_batched_tokens, plan.step.max_model_len) == (32, 128, 8192)
    assert [(row.length, row.num_requests) for row in plan.concurrency] == [(1024, 17), (4096, 4), (8192, 2)]
    alone = next(row for row in plan.decode if (row.num_requests, row.context) == (1, 1024))
    matrices = 134_515_008 - 61 * 576  # all but the norms; the tied embedding is the head
    assert alone.step_s == pytest.approx((4 * matrices + 46_080 * 1024) / 30e9)


def test_workspace_has_the_copies_of_states_and_the_operands_of_scans(tmp_path: Path) -> None:
    """Falcon Mamba 7B. A mixed step of 2,048 tokens and 32 rows, without logits: 352 MiB by this, 357 MiB by XLA for an H200."""
    shapes = {
        "architectures": ["FalconMambaForCausalLM"],
        "vocab_size": 65_024,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 64,
        "time_step_rank": 256,
        "tie_word_embeddings": False,
    }
    plan = plan_of(tmp_path, shapes, H200)
    assert plan.memory is not None
    state = 16 * 8192 * 4
    scanned = 2048 * (2 * 4096 * 2 + 4 * 8192 * 4)  # residual and norm; float32 operands and results
    states = 2 * 256 * state + 2 * 32 * state
    assert plan.memory.workspace_bytes == scanned + states + 3 * 256 * 65_024 * 4 + slots_bytes(256, 65_024)


def test_devices_share_weights_and_cache(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_70B, H200, parallel=ParallelConfig(tensor_parallel_size=2))
    vectors = (2 * 80 + 1) * 8192  # norms, whole on each
    assert plan.fits
    assert plan.weights_bytes == (70_553_706_496 - vectors) // 2 * 2 + vectors * 2
    assert plan.cache is not None and plan.memory is not None
    assert plan.cache.bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert plan.memory.kv_bytes == plan.cache.num_blocks * plan.cache.bytes_per_block // 2


@pytest.mark.parametrize(("devices", "mebibytes"), [(1, 575.75), (4, 167.9375)])
def test_workspace_is_estimated_from_the_largest_mixed_step(tmp_path: Path, devices: int, mebibytes: float) -> None:
    """2048 x (2 x 4096 + 3 x 14336) x 2 bytes of activations, 3 x 256 x 128256 x 4 of logits; both split.

    The slots come on top, whole on each device: a request's counts of 128256 tokens of 4 bytes, and 14376 words more.
    """
    plan = plan_of(tmp_path, LLAMA_8B, H200, parallel=ParallelConfig(tensor_parallel_size=devices))
    assert plan.memory is not None
    assert plan.memory.workspace_bytes == mebibytes * (1 << 20) + 257 * (128256 + 14376) * 4


def test_heads_that_do_not_divide_stay_whole(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, SMOLLM2, H200, parallel=ParallelConfig(tensor_parallel_size=2))
    assert plan.cache is not None and plan.memory is not None
    assert plan.memory.kv_bytes == plan.cache.num_blocks * plan.cache.bytes_per_block
    assert any("3 KV heads do not divide over 2 devices" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bits_halve_the_matrices_only(tmp_path: Path, kind: str) -> None:
    plan = plan_of(tmp_path, LLAMA_8B, H200, model={"quantization": kind})
    assert plan.model.num_parameters == 8_030_261_248, "scales are no parameters"
    assert (plan.weights_stored_as, plan.arithmetic) == (kind, kind)
    assert not any("fp8" in note for note in plan.notes)
    assert 0.5 <= plan.weights_bytes / (2 * 8_030_261_248) < 0.51


@pytest.mark.slow
def test_four_bits_quarter_the_layers_and_halve_the_tables(tmp_path: Path) -> None:
    chosen = {"quantization": "int4-weight-only"}
    plan = plan_of(tmp_path, LLAMA_8B, H200, model=chosen)
    tables, norms = 2 * 128_256 * 4096, 65 * 4096
    layers = 8_030_261_248 - tables - norms
    scales = layers // 128 * 2  # bfloat16, one for 128 inputs
    assert plan.model.num_parameters == 8_030_261_248, "scales are no parameters"
    assert plan.weights_bytes == layers // 2 + scales + tables + 2 * 128_256 * 4 + norms * 2
    assert plan.arithmetic == "bfloat16"
    assert plan.device.rates is not None
    read = plan.weights_bytes - 128_256 * (4096 + 2 * 4) - norms * 2 + 1024 * plan.kv_bytes_per_token
    assert (plan.decode[0].num_requests, plan.decode[0].context) == (1, 1024)
    assert plan.decode[0].step_s == pytest.approx(read / plan.device.rates.bytes_per_s, rel=1e-6)
    assert not any("4-bit" in note for note in plan.notes)
    shared = plan_of(tmp_path, LLAMA_8B, H200, model=chosen, parallel=ParallelConfig(tensor_parallel_size=8))
    assert shared.weights_bytes == (plan.weights_bytes - norms * 2) // 8 + norms * 2
    (note,) = (
        note
        for note in plan_of(tmp_path, LLAMA_8B, find_device("cpu", 64 * GIB), model=chosen).notes
        if "4-bit" in note
    )
    assert "int8-weight-only" in note


def test_experts_of_gpt_oss_take_their_blocks_and_scales(tmp_path: Path) -> None:
    experts = 24 * 32 * 3 * 2880 * 2880
    for num_devices, block in ((1, 32), (2, 32), (4, 16), (8, 8)):
        shared = ParallelConfig(tensor_parallel_size=num_devices)
        plan = plan_of(tmp_path / str(num_devices), GPT_OSS_20B, H200, parallel=shared)
        wide = plan_of(tmp_path / str(num_devices), GPT_OSS_20B, H200, parallel=shared, model={"quantization": "none"})
        assert plan.model.num_parameters == wide.model.num_parameters == 20_914_757_184
        assert (plan.weights_stored_as, plan.arithmetic) == ("mxfp4-weight-only", "bfloat16")
        gate_up, down = experts * 2 // 3, experts // 3
        kept = experts // 2 + gate_up // 32 + down // block  # inputs of down are split, those of gate and up are not
        assert wide.weights_bytes - plan.weights_bytes == (2 * experts - kept) // num_devices
    assert plan_of(tmp_path / "1", GPT_OSS_20B, H200).weights_bytes < 14e9


@pytest.mark.parametrize(("num_devices", "group"), [(1, 128), (2, 128), (4, 64)])
def test_fp8_in_blocks_takes_a_byte_and_a_scale_of_each_group(tmp_path: Path, num_devices: int, group: int) -> None:
    """Tables and routers stay bfloat16. Experts have 768 inputs of the down projection; a quarter of them is 1.5 blocks."""
    shared = ParallelConfig(tensor_parallel_size=num_devices)
    plan = plan_of(tmp_path, QWEN3_30B_A3B_FP8, H200, parallel=shared)
    wide = plan_of(tmp_path, QWEN3_30B_A3B_FP8, H200, parallel=shared, model={"quantization": "none"})
    assert plan.model.num_parameters == wide.model.num_parameters
    assert (plan.weights_stored_as, plan.arithmetic) == ("fp8-block-weight-only", "bfloat16")
    down = 48 * 128 * 2048 * 768
    others = 48 * (128 * 2 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512)
    kept = (down + others) + down // group * 4 + others // 128 * 4
    assert wide.weights_bytes - plan.weights_bytes == (2 * (down + others) - kept) // num_devices


def test_experts_in_mxfp4_need_a_model_with_experts(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--quantization mxfp4-weight-only: quantises experts, and this model has none"
    ):
        plan_of(tmp_path, SMOLLM2, H200, model={"quantization": "mxfp4-weight-only"})


@pytest.mark.parametrize("kind", ["fp8", "fp8-weight-only"])
def test_fp8_where_there_is_no_arithmetic_for_it_is_said_to_save_memory_alone(tmp_path: Path, kind: str) -> None:
    plan = plan_of(tmp_path, LLAMA_8B, A100, model={"quantization": kind})
    assert any("fp8 weights save memory here but no time" in note for note in plan.notes)
    assert plan.device.rates is not None
    assert plan.device.rates.of("fp8") == plan.device.rates.of("bfloat16")


def test_context_is_shortened_with_a_note(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_8B, H200, cache=CacheConfig(kv_cache_memory=2 * GIB))
    assert plan.fits
    assert plan.step is not None and plan.step.max_model_len == (1024 - 1) * 16
    assert any("context shortened from 131,072 to the 16,368 tokens" in note for note in plan.notes)


def key_paths(value: Any, path: str = "") -> set[str]:
    """Every key of a JSON value, list entries under one name."""
    if isinstance(value, dict):
        return set().union(*({f"{path}{key}"} | key_paths(inner, f"{path}{key}.") for key, inner in value.items()))
    return set().union(*(key_paths(inner, path) for inner in value)) if isinstance(value, list) else set()


def test_json_keeps_its_names(tmp_path: Path) -> None:
    """Programs read this: a name may be added here, never changed or dropped without a new format_version."""
    plan = plan_of(tmp_path, LLAMA_8B, H200)
    collectives = (Collective("", "all-reduce", 1, 2, 3),)
    with_program = dataclasses.replace(
        plan,
        programs=(ProgramMemory("decode/1", 1, 2, 3, 4, 5, 6, collectives),),
        exchanges=(Exchanges("decode/1", collectives, 1.0),),
    )
    written = json.loads(to_json(with_program))
    bare = json.loads(to_json(plan_of(tmp_path, LLAMA_70B, H200)))
    expected = (Path(__file__).parent / "plan_keys.txt").read_text(encoding="utf-8").split()
    assert sorted(key_paths(written) | key_paths(bare)) == expected
    assert written["format_version"] == FORMAT_VERSION == 1
    assert (written["fits"], written["reason"], bare["fits"], bare["memory"]) == (True, None, False, None)


_FIXED_BYTES = 1 << 30


class CopyingCompiler:
    """One that copies the KV pool `copies` times, and refuses what has no room, like that of TPUs."""

    def __init__(self, limit_bytes: int, weights_bytes: int, copies: float, *, refuses: bool) -> None:
        self._limit, self._weights, self._copies, self._refuses = limit_bytes, weights_bytes, copies, refuses
        self.num_jobs = 0

    def __call__(self, job: CompileJob) -> Answers:
        self.num_jobs += 1
        pool = 2 * sum(prod(array.shape) for group in job.shapes for array in group.arrays)
        temp = int(self._copies * pool) + _FIXED_BYTES
        if self._refuses and self._weights + pool + temp > self._limit:
            return {program.name: "Ran out of memory" for program in job.programs}
        peak = self._weights + pool + temp
        return {
            program.name: ProgramMemory(program.name, self._weights + pool, pool, pool, temp, 0, peak)
            for program in job.programs
        }


def test_a_context_that_the_model_would_stretch_is_planned_when_asked_for(tmp_path: Path) -> None:
    factors = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    phi = SMOLLM2 | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": factors}
    given, asked = (plan_of(tmp_path, phi, H200, model=model) for model in ({}, {"max_model_len": 8192}))
    assert given.step is not None
    assert asked.step is not None
    assert (given.step.max_model_len, asked.step.max_model_len) == (4096, 8192)
    assert any("--max-model-len asks for up to 8,192" in note for note in given.notes)
    assert not any("--max-model-len" in note for note in asked.notes)


@pytest.mark.parametrize(("shapes", "refuses"), [(SMOLLM2, False), (SMOLLM2, True), (GEMMA_3, False)])
def test_a_pool_that_is_copied_does_not_fit_and_a_smaller_one_is_found(
    tmp_path: Path, shapes: dict[str, Any], refuses: bool
) -> None:
    v5e = ACCELERATORS["v5e"]
    path = write_config(tmp_path, shapes)
    model = read_model(path)
    planner, weights = Planner(model, v5e, v5e.rates), model_sizes(config_for(path), model.decoder, v5e).weights_bytes
    compiler = CopyingCompiler(v5e.limit_bytes, weights, 3.0, refuses=refuses)
    plan = planner.plan(config_for(path), compiler)
    assert not plan.fits
    assert plan.reason is not None
    assert ("does not compile: Ran out of memory" if refuses else "needs ") in plan.reason
    (advice,) = plan.advice
    flag, size = advice.change.split()
    assert (flag, size[-3:]) == ("--kv-cache-memory", "MiB")
    num_bytes = int(size[:-3]) << 20
    changed = config_for(path, cache=CacheConfig(kv_cache_memory=num_bytes))
    again = planner.plan(changed, compiler)
    assert again.fits and again.step is not None
    assert again.step.max_model_len == advice.max_model_len
    assert num_bytes > 0.84 * (v5e.limit_bytes - weights - _FIXED_BYTES) / 4, "close to the largest there is room for"
    assert compiler.num_jobs <= 7, "one for the plan, five to find it, one for this test"


def test_what_compiles_in_bounds_fits_as_compiled(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_8B)
    planner = Planner(read_model(path), H200, H200.rates)
    compiler = CopyingCompiler(H200.limit_bytes, 2 * 8_030_261_248, 0.0, refuses=True)
    plan = planner.plan(config_for(path), compiler)
    assert plan.fits
    assert plan.memory is not None
    assert (plan.memory.workspace_is, plan.memory.workspace_bytes) == ("compiled", _FIXED_BYTES)
    assert [program.name for program in plan.programs] == ["mixed/2048", "decode/256"], "the largest of each kind"
    every = Planner(read_model(path), H200, H200.rates, all_programs=True).plan(config_for(path), compiler)
    assert every.step is not None
    assert len(every.programs) == len(every.step.decode_rows) + len(every.step.mixed_tokens)


def test_replicas_on_a_cpu_fit_its_memory_together(tmp_path: Path) -> None:
    """The weights take 0.5 GiB in each."""
    path = write_config(tmp_path, SMOLLM2)
    machine, parallel = Machine(find_device("cpu", 8 * GIB)), ParallelConfig(replicas=8)
    plan = plan_model(config_for(path, parallel=parallel), machine, None, compiles=False)
    assert plan.fits and plan.memory is not None
    assert 8 * (plan.memory.limit_bytes - plan.memory.free_bytes) <= 8 * GIB
    assert any("one of 8 replicas" in note for note in plan.notes)
    large = config_for(path, parallel=parallel, cache=CacheConfig(kv_cache_memory=GIB))
    assert not plan_model(large, machine, None, compiles=False).fits
