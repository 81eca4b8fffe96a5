"""Buckets, packing and the size of the KV pool."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig, SchedulerConfig
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.kv.spec import KVSpec
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.runner import memory
from jaxserve.runner.buckets import StepLimits, make_buckets, pool_context, resolve_limits, table_pages
from jaxserve.runner.inputs import INPUT_FIELDS, Program, field_shapes, pack, packed_size, programs, split
from jaxserve.runner.limits import kv_specs
from jaxserve.runner.memory import DeviceMemory, fit_model_len, kv_bytes_left, num_kv_blocks
from jaxserve.sampling.params import COLUMNS, PADDING_ROW
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, StepPlan
from jaxserve.types import RequestId

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype_bytes=4, block_size=16)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (1, 16), (3, 3), (6, 100), (32, 256), (256, 2048)])
def test_buckets_end_at_the_limits(platform: str, seqs: int, tokens: int) -> None:
    buckets = make_buckets(platform, seqs, tokens)
    assert buckets.decode[-1] == seqs
    assert buckets.mixed[-1] == tokens
    assert list(buckets.decode) == sorted(set(buckets.decode))
    assert list(buckets.mixed) == sorted(set(buckets.mixed))
    assert {program.name for program in programs(buckets, 4)} == {
        *(f"decode/{size}" for size in buckets.decode),
        *(f"mixed/{size}" for size in buckets.mixed),
    }


@pytest.mark.parametrize(
    ("platform", "seqs", "tokens", "expected"),
    [
        ("cpu", None, None, (32, 128)),
        ("gpu", None, None, (256, 2048)),
        ("tpu", None, None, (256, 2048)),
        ("cpu", 300, None, (300, 300)),
        ("gpu", 300, None, (300, 2048)),
        ("cpu", None, 8, (8, 8)),
        ("gpu", None, 100, (100, 100)),
        ("gpu", None, 512, (256, 512)),
        ("gpu", 1, 1, (1, 1)),
    ],
)
def test_limits_that_were_not_given_follow_platform_and_the_one_that_was(
    platform: str, seqs: int | None, tokens: int | None, expected: tuple[int, int]
) -> None:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert resolve_limits(platform, config) == StepLimits(*expected)


def test_packing_fills_every_field_and_pads_with_neutral_values() -> None:
    program = Program("mixed", 16, 4, 3, num_slots=4)
    plan = StepPlan(
        kind="mixed",
        bucket=16,
        request_ids=(RequestId("a"), RequestId("b")),
        slots=np.array([2, 0], np.int32),
        num_scheduled_tokens=np.array([1, 3], np.int32),
        num_computed_tokens=np.array([20, 5], np.int32),
        token_ids=np.array([7, 8, 9, 10], np.int32),
        block_tables=np.array([[4, 5], [6, 0]], np.int32),
        is_sampling=np.array([True, True]),
        sampling=np.arange(2 * len(COLUMNS), dtype=np.int32).reshape(2, -1),
        length_limits=np.array([40, 50], np.int32),
        stop_token_ids=np.arange(2 * MAX_STOP_TOKENS, dtype=np.int32).reshape(2, -1),
        num_top_logprobs=3,
    )
    field = split(pack(plan, program), program, INPUT_FIELDS)
    assert field["num_decode_rows"] == 1
    assert field["num_top_logprobs"] == 3
    assert field["tokens"].tolist() == [7, 8, 9, 10] + [0] * 12
    assert field["positions"].tolist() == [20, 5, 6, 7] + [0] * 12
    assert field["rows"].tolist() == [0, 1, 1, 1] + [0] * 12
    assert field["is_real"].tolist() == [1] * 4 + [0] * 12
    assert field["query_starts"].tolist() == [0, 1, 4, 4, 4]
    assert field["kv_lengths"].tolist() == [21, 8, 0, 0]
    assert field["block_tables"].tolist() == [[4, 5, 0], [6, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert field["sampling"][2:].tolist() == [PADDING_ROW.tolist()] * 2
    assert field["slots"].tolist() == [2, 0, 4, 4]
    assert field["is_sampling"].tolist() == [1, 1, 0, 0]
    assert field["length_limits"].tolist() == [40, 50, 0, 0]
    assert field["stop_token_ids"][:2].tolist() == plan.stop_token_ids.tolist()
    assert field["num_steps"] == 1
    assert sum(part.size for part in field.values()) == packed_size(program, INPUT_FIELDS)


def test_inputs_of_a_model_with_one_cache_group_are_those_of_one_table() -> None:
    """Its programs are what they were before there were groups: no state slots, and one table per row."""
    one, two = Program("decode", 4, 4, 3, 4), Program("decode", 4, 4, 3, 4, num_tables=2, num_state_slots=9)
    fields, more = (field_shapes(program, INPUT_FIELDS) for program in (one, two))
    assert "state_reads" not in split(np.zeros(packed_size(one, INPUT_FIELDS), np.int32), one, INPUT_FIELDS)
    assert (fields["block_tables"], more["block_tables"], more["state_writes"]) == ((4, 3), (4, 6), (4,))
    assert packed_size(two, INPUT_FIELDS) - packed_size(one, INPUT_FIELDS) == 4 * 3 + 2 * 4


def test_the_pool_is_no_larger_than_full_requests_can_use() -> None:
    assert num_kv_blocks(1 << 40, SPEC, max_model_len=100, max_num_seqs=3) == 3 * 7 + 1
    assert num_kv_blocks(10 * SPEC.bytes_per_block, SPEC, max_model_len=1000, max_num_seqs=3) == 10


def test_context_is_what_was_asked_for_or_an_error() -> None:
    assert fit_model_len(100, 200, 50, SPEC) == 100
    assert fit_model_len(None, 200, 50, SPEC) == 200
    assert fit_model_len(None, 2000, 11, SPEC) == 160, "the model's own limit is shortened to what fits"
    with pytest.raises(ConfigError, match="--max-model-len 300 is more than the 200 tokens"):
        fit_model_len(300, 200, 50, SPEC)
    with pytest.raises(ConfigError, match="--max-model-len 200 does not fit the KV cache of 160 tokens"):
        fit_model_len(200, 200, 11, SPEC)


def test_cache_memory_is_taken_as_given() -> None:
    import jax

    from jaxserve.runner.memory import kv_cache_bytes

    config = CacheConfig(kv_cache_memory=12345)
    assert kv_cache_bytes(config, jax.devices()[0], 1) == 12345
    measured = kv_cache_bytes(dataclasses.replace(config, kv_cache_memory=None), jax.devices()[0], 1)
    assert 1 << 20 < measured <= 2 << 30


def test_a_cpu_gives_the_cache_more_than_its_cap_only_for_the_whole_context() -> None:
    def left(context_bytes: int) -> int:
        return kv_bytes_left(CacheConfig(), "cpu", DeviceMemory(64 << 30, 0), 1, context_bytes)

    assert left(1 << 30) == 2 << 30
    assert left(9 << 30) == 9 << 30
    assert left(99 << 30) == 16 << 30, "a quarter of the memory"


def test_a_cpu_whose_memory_the_weights_fill_is_refused_with_both_sizes() -> None:
    with pytest.raises(DoesNotFitError, match=r"take 3\.00 GiB, and 2\.00 GiB are free"):
        kv_bytes_left(CacheConfig(), "cpu", DeviceMemory(2 << 30, 3 << 30), 1)


@pytest.mark.parametrize(("free", "replicas", "left"), [(1000, 1, 200), (700, 1, 0), (2600, 2, 500)])
def test_memory_that_does_not_suffice_to_compile_is_in_the_log(
    free: int, replicas: int, left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: free << 20)
    memory.check_host_memory(250 << 20, 550 << 20, CacheConfig(), replicas)
    assert caplog.messages[0].startswith(f"{left} MiB are left beside weights and KV cache; compiling takes about 512")
    caplog.clear()
    monkeypatch.setattr(memory, "available_bytes", lambda: replicas * 1312 << 20)
    memory.check_host_memory(250 << 20, 550 << 20, CacheConfig(), replicas)
    assert not caplog.messages


def test_replicas_after_the_first_have_all_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They get the size of the first one's cache, and what runs already is not free."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1312 << 20)
    memory.check_host_memory(250 << 20, 550 << 20, CacheConfig(kv_cache_memory=250 << 20), 2)
    assert not caplog.messages


def test_replicas_on_a_cpu_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    free, weights = 64 << 30, 5 << 30
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    device = jax.devices("cpu")[0]
    sizes = [memory.kv_cache_bytes(CacheConfig(), device, 1, weights, 8 << 30, count) for count in (1, 8)]
    assert sizes[0] == 8 << 30
    assert sizes[1] > 0 and 8 * (weights + sizes[1]) <= free


@pytest.mark.parametrize(("platform", "limit", "noise"), [("cpu", 27 << 28, 0.1), ("tpu", 95 << 30, 0.002)])
def test_a_little_more_or_less_free_memory_changes_no_program(platform: str, limit: int, noise: float) -> None:
    """The next start would otherwise find nothing in the compile cache."""
    sizes = {
        kv_bytes_left(CacheConfig(), platform, DeviceMemory(int(limit * factor), 1 << 30), 1)
        for factor in (1 - noise, 1 - noise / 2, 1.0)
    }
    assert len(sizes) == 1
    assert sizes.pop() > 0


def test_weights_that_are_still_to_come_are_left_room_for() -> None:
    memory = DeviceMemory(64 << 30, 0)
    with_weights = DeviceMemory(64 << 30, 32 << 30)
    config = CacheConfig()
    freed = kv_bytes_left(config, "tpu", memory, 1) - kv_bytes_left(config, "tpu", with_weights, 1)
    assert freed == pytest.approx(32 << 30, rel=0.02)


def test_a_wider_ladder_has_fewer_rungs_and_ends_at_the_limits() -> None:
    buckets = make_buckets("cpu", 32, 256, growth=4)
    assert buckets.decode == (1, 4, 16, 32)
    assert buckets.mixed == (16, 64, 256)


@pytest.mark.parametrize(
    ("platform", "num_kv_heads", "num_devices", "expected"),
    [
        ("cpu", 8, 1, (8, 64, 16)),
        ("gpu", 8, 1, (8, 64, 16)),
        ("tpu", 8, 1, (4, 128, 64)),
        ("tpu", 8, 4, (4, 128, 64)),
        ("tpu", 8, 8, (8, 128, 64)),  # a device has one head, and pads it
        ("tpu", 3, 1, (3, 128, 64)),
    ],
)
def test_heads_of_64_share_the_rows_of_lanes_of_a_tpu(
    platform: str, num_kv_heads: int, num_devices: int, expected: tuple[int, int, int]
) -> None:
    decoder = DecoderConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        layers=(LayerConfig(),),
        max_position=64,
        norm_eps=1e-5,
        rope_theta=1e4,
    )
    parallel = ParallelConfig(tensor_parallel_size=num_devices)
    config = Config(model=ModelConfig(model="any", dtype="bfloat16"), parallel=parallel)
    spec = kv_specs(config, decoder, platform)[0]
    assert (spec.num_kv_heads, spec.head_dim, spec.block_size) == expected
    asked = dataclasses.replace(config, cache=CacheConfig(block_size=32))
    assert kv_specs(asked, decoder, platform)[0].block_size == 32


def test_programs_of_a_cpu_depend_on_the_context_in_coarse_steps_only() -> None:
    assert [table_pages("cpu", pages) for pages in (1, 128, 512, 513, 8192)] == [512, 512, 512, 2048, 8192]
    assert [table_pages(platform, 129) for platform in ("gpu", "tpu")] == [129, 129]
    assert [pool_context("cpu", length) for length in (16, 2048, 8192)] == [2048, 2048, 8192]
    assert pool_context("gpu", 16) == 16
