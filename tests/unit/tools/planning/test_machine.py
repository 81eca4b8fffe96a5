"""Machines by name, the parallel sizes proposed for them, and collectives counted by hand and in compiled text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.parallel import LLAMA_70B, QWEN3_235B
from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.planning.collectives import Collective, Links, compiled_collectives, step_collectives
from jaxserve.tools.planning.devices import ACCELERATORS
from jaxserve.tools.planning.fit import model_sizes
from jaxserve.tools.planning.machine import find_machine, with_sizes

H200 = ACCELERATORS["h200"]


def sizes_on(name: str, num_hosts: int, decoder: Any, quantization: str = "none") -> tuple[int, int, int]:
    config = Config(model=ModelConfig(model="any", quantization=quantization))
    found = with_sizes(config, decoder, find_machine(name, num_hosts)).parallel
    return found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel_size


@pytest.mark.parametrize(
    ("name", "num_hosts", "expected"),
    [
        ("h200", 1, (None, 1)),
        ("h200x8", 1, (8, 1)),
        ("h200x8", 2, (16, 2)),
        ("v5e-16", 1, (16, 4)),
        ("v5p-8", 2, (8, 2)),
    ],
)
def test_a_machine_is_named_by_its_devices_and_hosts(
    name: str, num_hosts: int, expected: tuple[int | None, int]
) -> None:
    machine = find_machine(name, num_hosts)
    assert (machine.num_devices, machine.num_hosts) == expected


@pytest.mark.parametrize(
    ("name", "num_hosts", "message"),
    [
        ("h20", 1, "--device h20: one of cpu, a100"),
        ("h200x9", 1, "a host has at most 8 NVIDIA H200"),
        ("h200x0", 1, "--device h200x0: one of cpu, a100"),
        ("v5e-0", 1, "--device v5e-0: one of cpu, a100"),
        ("v5e-" + "9" * 9, 1, "--device v5e-999999999: one of cpu, a100"),
        ("h200-16", 1, "slices are of TPUs"),
        ("h200", 2, "--hosts 2: give the devices of a host, as --device h200xN"),
        ("v5e-16", 2, "--hosts 2: a slice of 16 Cloud TPU v5e has 4"),
    ],
)
def test_a_machine_that_does_not_exist_is_refused_in_one_line(name: str, num_hosts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_machine(name, num_hosts)


def test_each_replica_has_devices_of_its_own() -> None:
    machine = find_machine("h200x8")
    assert machine.of_one_replica(ParallelConfig()) == machine
    assert machine.of_one_replica(ParallelConfig(replicas=8)).num_devices == 1
    assert machine.of_one_replica(ParallelConfig(replicas=2, tensor_parallel_size=2)).num_devices == 4
    with pytest.raises(ConfigError, match="--replicas 8: engines of 2 devices need 16, --device h200 has 8"):
        machine.of_one_replica(ParallelConfig(replicas=8, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"--hosts 2: replicas .* are engines of one machine"):
        find_machine("h200x8", 2).of_one_replica(ParallelConfig(replicas=2))


def test_sizes_are_proposed_so_that_the_cache_holds_most_tokens() -> None:
    assert sizes_on("h200x8", 1, LLAMA_70B) == (8, 1, 1), "8 KV heads"
    assert sizes_on("h200x8", 2, LLAMA_70B) == (8, 2, 1), "copies of KV heads would halve the cache"
    assert sizes_on("h200x8", 2, QWEN3_235B) == (4, 4, 16), "4 KV heads"


def test_sizes_of_the_settings_are_kept_and_too_many_refused() -> None:
    config = Config(model=ModelConfig(model="any"), parallel=ParallelConfig(tensor_parallel_size=4))
    assert with_sizes(config, LLAMA_70B, find_machine("h200x8")) == config
    wide = replace(config, parallel=ParallelConfig(tensor_parallel_size=16))
    with pytest.raises(ConfigError, match="need 16 devices, h200 has 8"):
        with_sizes(wide, LLAMA_70B, find_machine("h200x8"))


def test_collectives_of_a_mixture_by_hand() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, data_parallel_size=4, expert_parallel_size=16)
    config = Config(model=ModelConfig(model="any"), parallel=parallel)
    sizes = model_sizes(config, QWEN3_235B, H200)
    residual = 256 * 4096 * 2
    expected = [
        Collective("embedding", "all-reduce", 1, 16, residual),
        Collective("rows of data ranks", "all-reduce", 94, 4, 256 * 64 // 4 * 128 * 2),
        Collective("attention output", "all-reduce", 94, 4, residual),
        Collective("experts", "all-reduce", 94, 16, residual),
        Collective("logits, columns for rows", "all-to-all", 1, 16, 256 * 151936 * 4 // 16),
    ]
    assert list(step_collectives(sizes, 256, 256)) == expected
    assert expected[3].sent_bytes == 94 * 2 * residual * 15 / 16
    over_hosts = step_collectives(sizes, 256, 256, num_hosts=2)
    assert [each.num_hosts for each in over_hosts] == [2, 2, 1, 2, 2], "the four devices of a data rank are on one host"
    links = Links.of(H200)
    within = 94 * 2 * residual * 15 / 16 / 450e9
    assert links.seconds(expected[3:4]) == pytest.approx(within)
    between = 94 * 2 * residual / 8 / 2 / 50e9  # each of eight devices exchanges an eighth with the other host
    assert links.seconds(over_hosts[3:4]) == pytest.approx(max(within, between))
    rows = 94 * 2 * over_hosts[1].array_bytes / 2 / 2  # two ranks on each host
    assert over_hosts[1].sent_between_hosts() == rows


def test_rows_that_are_sent_to_their_experts_by_hand() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=8, data_parallel_size=1, expert_parallel_size=4, expert_exchange="all-to-all"
    )
    config = Config(model=ModelConfig(model="any"), parallel=parallel)
    sizes = model_sizes(config, QWEN3_235B, H200)
    share = 256 * 4096 * 2 // 4
    found = {each.name: each for each in step_collectives(sizes, 256, 256)}
    assert found["rows to experts and back"] == Collective(
        "rows to experts and back", "ragged-all-to-all", 188, 4, share * 8
    )
    assert found["parts of experts"] == Collective("parts of experts", "all-reduce", 94, 2, share)
    assert found["tokens after experts"].kind == "all-gather"


TEXT = """\
  %a = bf16[128,512]{1,0} all-reduce(%x), channel_id=5, replica_groups=mesh['data'=2,'tensor'=8] {'data','tensor'}, to_apply=%add
  %b = (f32[8,16]{1,0}, bf16[8]{0}) all-reduce-start(%x, %y), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %c = f32[64]{0} all-gather(%x), replica_groups=[2,8]<=[16], dimensions={0}
  %d = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[4,4]<=[16], dimensions={0}
  %g = ((bf16[256,512]{1,0:T(8,128)(2,1)}, s64[32]{0}, /*index=5*/s64[32]{0}), bf16[32,512]{1,0:S(7)}, u32[]{:S(2)}) ragged-all-to-all-start(%loop), replica_groups={{0,1}}
  %e = bf16[16]{0} all-gather-done(%d)
  %f = bf16[128,512]{1,0} all-reduce(%z), channel_id=6, replica_groups=mesh['data'=2,'tensor'=8] {'data','tensor'}, to_apply=%add
  %h = ((bf16[64,512]{1,0}), bf16[64,512]{1,0}) all-reduce-start(%z), replica_groups=mesh['tensor'=16] {'tensor'}, to_apply=%add
"""


def test_collectives_are_found_in_compiled_text() -> None:
    assert set(compiled_collectives(TEXT)) == {
        Collective("", "all-reduce", 2, 16, 128 * 512 * 2),
        Collective("", "all-reduce", 1, 4, 8 * 16 * 4 + 16),
        Collective("", "all-reduce", 1, 16, 64 * 512 * 2),
        Collective("", "all-gather", 1, 8, 256),
        Collective("", "all-gather", 1, 4, 32),
        Collective("", "ragged-all-to-all", 1, 2, 32 * 512 * 2),
    }
