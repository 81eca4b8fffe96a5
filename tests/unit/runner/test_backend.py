"""The kernels are chosen by device, model, types and settings, with a reason for those that are left out."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.backend import Backend

from jaxserve.config import (
    CacheConfig,
    CompileConfig,
    Config,
    KVCacheDtype,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.errors import ConfigError
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.latent import LatentConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig, MambaConfig, ShortConvConfig
from jaxserve.runner.backend import Chip, attention_notes, choose_backend, matmul_backend, state_copies
from jaxserve.runner.limits import kv_specs, make_policy

CPU, TPU, HOPPER, AMPERE = Chip("cpu"), Chip("tpu"), Chip("gpu", (9, 0)), Chip("gpu", (8, 0))
TURING, ADA, BLACKWELL = Chip("gpu", (7, 5)), Chip("gpu", (8, 9)), Chip("gpu", (10, 0))
BFLOAT16 = jnp.dtype("bfloat16")
HAS_MOSAIC = jax.__version_info__ >= (0, 11, 2)
DECODER = DecoderConfig(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    layers=(LayerConfig(),) * 2,
    max_position=256,
    norm_eps=1e-5,
    rope_theta=1e4,
)


def _config(*, devices: int = 1, block_size: int = 16, num_speculative_tokens: int = 0, **compiling: Any) -> Config:
    return Config(
        model=ModelConfig(model="any"),
        cache=CacheConfig(block_size=block_size),
        parallel=ParallelConfig(tensor_parallel_size=devices),
        scheduler=SchedulerConfig(num_speculative_tokens=num_speculative_tokens),
        compile=CompileConfig(**compiling),
    )


def _choose(config: Config, chip: Chip, decoder: DecoderConfig = DECODER, dtype: jnp.dtype = BFLOAT16) -> str:
    return choose_backend(config, decoder, chip, dtype, dtype)


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
def test_a_hopper_takes_the_pallas_kernels() -> None:
    assert _choose(_config(), HOPPER) == "mosaic_gpu"
    assert _choose(_config(attention_backend="pallas"), HOPPER) == "mosaic_gpu"
    assert _choose(_config(attention_backend="reference"), HOPPER) == "reference"
    assert _choose(_config(devices=2), HOPPER) == "mosaic_gpu"
    assert _choose(_config(), HOPPER, LATENT) == "mosaic_gpu"


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize(("kv_dtype", "backend"), [("float8_e4m3fn", "mosaic_gpu"), ("int8", "bucketed")])
def test_a_hopper_takes_the_kernel_for_latent_vectors_in_8_bit_floats(kv_dtype: str, backend: str) -> None:
    assert choose_backend(_config(), LATENT, HOPPER, BFLOAT16, jnp.dtype(kv_dtype)) == backend


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (11, 0), (12, 0)], ids=str)
def test_other_gpus_take_the_kernel_on_mma(capability: tuple[int, int]) -> None:
    chip = Chip("gpu", capability)
    assert _choose(_config(), chip) == "mosaic_gpu_mma"
    assert _choose(_config(), chip, dtype=jnp.dtype("float16")) == "mosaic_gpu_mma"
    for dim in (64, 80, 96):
        assert _choose(_config(), chip, replace(DECODER, head_dim=dim)) == "mosaic_gpu_mma"
    wide = replace(DECODER, head_dim=256)
    expected = "mosaic_gpu_mma" if capability in ((8, 0), (11, 0)) else "bucketed"
    assert _choose(_config(), chip, wide) == expected, "its tiles do not fit 99 KB"


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)], ids=str)
def test_a_blackwell_of_data_centres_takes_tcgen05_for_prompts(capability: tuple[int, int]) -> None:
    chip = Chip("gpu", capability)
    for dim, dtype in itertools.product((64, 128), (BFLOAT16, jnp.dtype("float16"))):
        assert _choose(_config(), chip, replace(DECODER, head_dim=dim), dtype) == "mosaic_gpu_tcgen05"
    assert _choose(_config(attention_backend="pallas"), chip) == "mosaic_gpu_tcgen05"
    assert _choose(_config(attention_backend="reference"), chip) == "reference"
    (note,) = attention_notes(_config(), DECODER, chip, BFLOAT16, BFLOAT16)
    assert "on tcgen05 for prompts" in note


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize(
    ("dim", "kv_dtype", "reason"),
    [
        (96, "bfloat16", "head dimension 96: only 64, 128 on tcgen05"),
        (256, "bfloat16", "head dimension 256: only 64, 128 on tcgen05"),
        (128, "int8", "a KV cache of int8 with queries of bfloat16 on tcgen05"),
    ],
)
def test_what_tcgen05_does_not_serve_takes_mma_and_is_logged(
    dim: int, kv_dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = replace(DECODER, head_dim=dim)
    with caplog.at_level(logging.INFO):
        chosen = choose_backend(_config(), decoder, BLACKWELL, BFLOAT16, jnp.dtype(kv_dtype))
    assert chosen == "mosaic_gpu_mma"
    assert f"attention of prompts takes mma.sync: {reason}" in caplog.text


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)], ids=str)
def test_an_8_bit_cache_takes_the_kernel_on_mma(capability: tuple[int, int], kv_dtype: str) -> None:
    chip, kv = Chip("gpu", capability), jnp.dtype(kv_dtype)
    for decoder in (DECODER, replace(DECODER, head_dim=256)):  # tiles of heads of 256 bytes fit 99 KB
        assert choose_backend(_config(), decoder, chip, BFLOAT16, kv) == "mosaic_gpu_mma"
        (note,) = attention_notes(_config(), decoder, chip, BFLOAT16, kv)
        assert "our kernel on mma.sync" in note


@pytest.mark.skipif(HAS_MOSAIC, reason="this jax has Mosaic GPU kernels")
def test_an_old_jax_falls_back_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _choose(_config(), HOPPER) == "bucketed"
    assert "is older than 0.11.2" in caplog.text


def test_a_tpu_takes_its_pallas_kernels_on_any_number_of_devices() -> None:
    for devices in (1, 4):
        assert _choose(_config(devices=devices), TPU) == "mosaic_tpu"
    assert _choose(_config(attention_backend="reference"), TPU) == "reference"


LATENT = replace(
    DECODER,
    head_dim=64,
    layers=(LayerConfig(latent_dim=576),) * 2,
    latent=LatentConfig(rank=512, rope_dim=64, plain_dim=128, value_dim=128),
)
NARROW_LATENT = replace(
    LATENT,
    layers=(LayerConfig(latent_dim=192),) * 2,
    latent=LatentConfig(rank=128, rope_dim=64, plain_dim=128, value_dim=128),
)
REFUSALS = [
    (TPU, {}, DECODER, jnp.dtype("float16"), "queries of float16: only float32 and bfloat16"),
    (TPU, {"block_size": 8}, DECODER, BFLOAT16, "pages of 8 tokens: only multiples of 16"),
    (TURING, {}, DECODER, BFLOAT16, "compute capability 7.5: only from 8.0 (Ampere) on"),
    (AMPERE, {}, replace(DECODER, head_dim=72), BFLOAT16, "head dimension 72: only 64, 80, 96, 128, 256"),
    (ADA, {}, replace(DECODER, head_dim=256), BFLOAT16, "head dimension 256: tiles of 128 KB, a block has 99"),
    (AMPERE, {}, replace(DECODER, num_heads=64, num_kv_heads=1), BFLOAT16, "64 query heads per KV head: at most 32"),
    (Chip("gpu"), {}, DECODER, BFLOAT16, "compute capability unknown"),
    (HOPPER, {}, replace(DECODER, head_dim=72), BFLOAT16, "head dimension 72: only 64, 80, 96, 128, 256"),
    (HOPPER, {"block_size": 8}, DECODER, BFLOAT16, "pages of 8 tokens: only powers of two from 16"),
    (HOPPER, {}, replace(DECODER, num_heads=128, num_kv_heads=1), BFLOAT16, "128 query heads per KV head: at most 64"),
    (HOPPER, {}, DECODER, jnp.dtype("float32"), "queries of float32: only bfloat16 and float16"),
    (HOPPER, {}, LATENT, jnp.dtype("float32"), "queries of float32: only bfloat16 and float16"),
    (HOPPER, {"block_size": 8}, LATENT, BFLOAT16, "pages of 8 tokens: only powers of two from 16"),
    (
        HOPPER,
        {},
        NARROW_LATENT,
        BFLOAT16,
        "latent vectors of 192 numbers, 128 of them values: only 512 of 576, 256 of 320",
    ),
    (AMPERE, {}, LATENT, BFLOAT16, "no kernel for latent attention (MLA) on GPUs other than Hopper yet"),
    (TPU, {}, LATENT, BFLOAT16, "no kernel for latent attention (MLA) on TPUs yet"),
]


@pytest.mark.parametrize(("chip", "settings", "decoder", "dtype", "reason"), REFUSALS)
def test_what_no_kernel_serves_falls_back_with_one_line_or_is_refused_when_forced(
    chip: Chip,
    settings: dict[str, Any],
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not HAS_MOSAIC and chip in (HOPPER, AMPERE, ADA):
        pytest.skip("this jax has no Mosaic GPU kernels: that reason comes first")
    with caplog.at_level(logging.INFO):
        assert _choose(_config(**settings), chip, decoder, dtype) == ("reference" if chip == TPU else "bucketed")
    assert len(caplog.records) == 1
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="--attention-backend pallas: ") as refused:
        _choose(_config(attention_backend="pallas", **settings), chip, decoder, dtype)
    assert reason in str(refused.value)


WIDE = replace(DECODER, head_dim=512, num_heads=2, num_kv_heads=1)


def _hybrid(decoder: DecoderConfig, key_dim: int) -> DecoderConfig:
    """Return a decoder whose first layer is a gated delta net."""
    delta = GatedDeltaConfig(1, 2, key_dim=key_dim, value_dim=128, num_taps=4, inputs="by_part")
    return replace(decoder, layers=(LayerConfig(has_kv=False, recurrent=delta), LayerConfig()))


@pytest.mark.parametrize(
    ("backend", "deltas"),
    [
        ("native", (0, 0)),
        ("mosaic_gpu", (0, 0) if HAS_MOSAIC else (2, 0)),
        ("mosaic_tpu", (2, 0)),
        ("reference", (2, 0)),
    ],
)
def test_states_are_copied_where_no_kernel_updates_them_in_their_pool(
    backend: Backend, deltas: tuple[int, int]
) -> None:
    mamba = MambaConfig(num_channels=64, state_dim=16, step_rank=4, num_taps=4, has_bias=False, has_conv_bias=True)
    scans = replace(DECODER, layers=(LayerConfig(has_kv=False, recurrent=mamba), LayerConfig()))
    assert state_copies(_hybrid(DECODER, 128), backend) == deltas
    assert state_copies(scans, backend) == (2, 64)
    assert state_copies(DECODER, backend) == (0, 0)


@pytest.mark.parametrize(
    ("chip", "settings", "decoder", "matmuls", "attention"),
    [
        (HOPPER, {}, WIDE, "mosaic_gpu", "bucketed"),
        (HOPPER, {"attention_backend": "reference"}, WIDE, "reference", "reference"),
        (AMPERE, {}, WIDE, "bucketed", "bucketed"),
        (AMPERE, {}, _hybrid(WIDE, 128), "mosaic_gpu_mma", "bucketed"),
        pytest.param(
            *(BLACKWELL, {}, _hybrid(DECODER, 128), "mosaic_gpu_mma", "mosaic_gpu_tcgen05"),
            marks=pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels"),
        ),
        (TPU, {"block_size": 8}, DECODER, "mosaic_tpu", "reference"),
        (TPU, {}, DECODER, "mosaic_tpu", "mosaic_tpu"),
        (CPU, {"cpu_kernels": "xla"}, DECODER, "reference", "reference"),
    ],
)
def test_matmuls_keep_their_kernels_where_attention_has_none(
    chip: Chip, settings: dict[str, Any], decoder: DecoderConfig, matmuls: str, attention: str
) -> None:
    config = _config(**settings)
    assert matmul_backend(config, decoder, chip, choose_backend(config, decoder, chip, BFLOAT16, BFLOAT16)) == matmuls
    policy = make_policy(config, decoder, chip)
    assert (policy.backend, policy.attention_backend) == (matmuls, attention)


def test_states_that_the_kernel_does_not_take_are_left_to_xla_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_policy(_config(), _hybrid(DECODER, 128), TPU)
        make_policy(_config(attention_backend="reference"), _hybrid(DECODER, 512), HOPPER)
        if HAS_MOSAIC:
            make_policy(_config(), _hybrid(DECODER, 128), HOPPER)
    assert "recurrent states" not in caplog.text
    with caplog.at_level(logging.INFO):
        make_policy(_config(), _hybrid(DECODER, 512), HOPPER)
    reason = "keys of 512 numbers: only multiples of 8 up to 256" if HAS_MOSAIC else "is older than 0.11.2"
    (line,) = [each.getMessage() for each in caplog.records if "recurrent states" in each.getMessage()]
    assert line.startswith("recurrent states are computed by XLA, not by a Pallas kernel: ")
    assert line.endswith(reason)


REFUSED = [
    (CPU, {"attention_backend": "pallas"}, "--attention-backend pallas: no kernel for CPUs"),
    (CPU, {"cpu_kernels": "native", "attention_backend": "reference"}, "exclude each other"),
    (CPU, {"cpu_kernels": "native", "devices": 2}, "only on one CPU device, not on 2"),
    (HOPPER, {"cpu_kernels": "native"}, "--cpu-kernels native: only on CPUs, not on gpu"),
    (HOPPER, {"cpu_kernels": "vector"}, "--cpu-kernels vector: only on CPUs, not on gpu"),
    (TPU, {"num_speculative_tokens": 4}, "--num-speculative-tokens: not with the attention kernel of TPUs"),
]


@pytest.mark.parametrize(("chip", "settings", "message"), REFUSED)
def test_kernels_that_cannot_run_are_refused(chip: Chip, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _choose(_config(**settings), chip)


def test_a_tpu_verifies_drafts_as_chunks_of_a_model_with_recurrent_states() -> None:
    """No two rows write one page then."""
    mixer = ShortConvConfig(num_channels=512, num_taps=3, has_bias=False)
    hybrid = replace(DECODER, layers=(LayerConfig(recurrent=mixer, has_kv=False), LayerConfig()))
    assert _choose(_config(num_speculative_tokens=4), TPU, hybrid) == "mosaic_tpu"


@pytest.mark.parametrize(
    ("settings", "num_seqs", "has_unit", "expected"),
    [
        ({}, None, True, "native_matrix"),
        ({}, None, False, "native"),
        ({}, 4, True, "native"),
        ({}, 5, True, "native_matrix"),
        ({"cpu_kernels": "native"}, None, True, "native_matrix"),
        ({"cpu_kernels": "vector"}, None, True, "native"),
        ({"cpu_kernels": "matrix"}, 1, True, "native_matrix"),
    ],
)
def test_many_requests_take_the_matrix_unit_where_there_is_one(
    settings: dict[str, Any], num_seqs: int | None, has_unit: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "register", lambda: Path("kernels.so"))
    monkeypatch.setattr(native, "has_amx", lambda: has_unit)
    config = replace(_config(**settings), scheduler=SchedulerConfig(max_num_seqs=num_seqs))
    assert _choose(config, CPU) == expected


def test_a_matrix_unit_that_is_not_there_is_refused_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "register", lambda: Path("kernels.so"))
    monkeypatch.setattr(native, "has_amx", lambda: False)
    with pytest.raises(ConfigError, match="--cpu-kernels matrix: this processor has no AMX"):
        _choose(_config(cpu_kernels="matrix"), CPU)


def test_several_cpu_devices_take_the_reference() -> None:
    assert _choose(_config(devices=2), CPU) == "reference"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_an_8_bit_cache_takes_half_the_memory_of_bfloat16_and_a_quarter_of_float32(
    kv_cache_dtype: KVCacheDtype,
) -> None:
    small = replace(_config(), cache=CacheConfig(kv_cache_dtype=kv_cache_dtype))
    for platform, factor in (("gpu", 2), ("cpu", 4)):
        whole = kv_specs(_config(), DECODER, platform)[0].bytes_per_block
        assert factor * kv_specs(small, DECODER, platform)[0].bytes_per_block == whole


@pytest.mark.parametrize(
    ("library", "backend", "line"),
    [
        (
            Path("kernels-avx2-0123.so"),
            "native",
            "native CPU kernels: kernels-avx2-0123.so, float matmuls on the vector unit",
        ),
        (None, "reference", "native CPU kernels are not built for this host"),
    ],
)
def test_the_log_says_which_native_kernels_are_taken(
    library: Path | None, backend: str, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "register", lambda: library)
    monkeypatch.setattr(native, "has_amx", lambda: False)
    with caplog.at_level(logging.INFO):
        assert choose_backend(_config(), DECODER, CPU, BFLOAT16, BFLOAT16) == backend
        assert matmul_backend(_config(), DECODER, CPU, "reference") == backend
    assert caplog.text.count(line) == 1


NOTES = [
    (HOPPER, BFLOAT16, ["our kernels for Hopper"]),
    (ADA, BFLOAT16, ["our kernel on mma.sync, which reads each key and value of a decode step once"]),
    (TURING, BFLOAT16, ["no bfloat16 arithmetic: use --dtype float16", "XLA (compute capability 7.5: only from 8.0"]),
    (TURING, jnp.dtype("float16"), ["XLA (compute capability 7.5: only from 8.0"]),
    (TPU, BFLOAT16, []),
]


@pytest.mark.skipif(not HAS_MOSAIC, reason="this jax has no Mosaic GPU kernels")
def test_plans_say_which_steps_over_latent_vectors_have_a_kernel() -> None:
    (note,) = attention_notes(_config(), LATENT, HOPPER, BFLOAT16, BFLOAT16)
    assert "prompts of many tokens a step" in note
    assert attention_notes(_config(), LATENT, ADA, BFLOAT16, BFLOAT16) == ()


@pytest.mark.parametrize(("chip", "dtype", "wanted"), NOTES, ids=["hopper", "ada", "turing", "turing-float16", "tpu"])
def test_plans_say_how_a_gpu_computes_attention(chip: Chip, dtype: jnp.dtype, wanted: list[str]) -> None:
    if not HAS_MOSAIC and chip in (HOPPER, ADA):
        pytest.skip("this jax has no Mosaic GPU kernels")
    notes = attention_notes(_config(), DECODER, chip, dtype, dtype)
    assert len(notes) == len(wanted)
    assert all(text in note for text, note in zip(wanted, notes, strict=True))


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_gguf_file_that_is_dequantised_has_the_policy_of_floats(quantization: str) -> None:
    """So weights of a folder of floats can replace its own."""
    stored = CheckpointQuantization("none", stored_kinds=(("model.layers.0.mlp.down_proj", "Q4_1"),))
    config = Config(model=ModelConfig(model="any", quantization=quantization))
    assert make_policy(config, replace(DECODER, stored=stored), CPU) == make_policy(config, DECODER, CPU)
