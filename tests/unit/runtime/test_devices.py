"""Devices of a machine are divided among replicas, disjoint and in order."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.devices import ALL_DEVICES, ReplicaDevices, divide_devices

GPUS = ["null", "nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"]
CHIPS = ["vfio/vfio", *(f"vfio/{number}" for number in range(4))]


def divide(environ: dict[str, str], names: list[str], **parallel: Any) -> list[ReplicaDevices]:
    return divide_devices(ParallelConfig(**parallel), environ, lambda: names, lambda: range(8))


def test_gpus_are_divided_in_order() -> None:
    own = divide({}, GPUS, replicas=2, tensor_parallel_size=2)
    assert [devices.variables for devices in own] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,10"}]
    assert [devices.cores for devices in own] == [None, None]


def test_only_visible_gpus_are_divided() -> None:
    own = divide({"CUDA_VISIBLE_DEVICES": "5, 3"}, GPUS, replicas=2)
    assert [devices.variables["CUDA_VISIBLE_DEVICES"] for devices in own] == ["5", "3"]


def test_tpu_chips_are_divided_with_their_shape() -> None:
    first, second = divide({"JAX_PLATFORMS": "tpu,cpu"}, CHIPS, replicas=2, tensor_parallel_size=2)
    assert (first.variables["TPU_VISIBLE_CHIPS"], second.variables["TPU_VISIBLE_CHIPS"]) == ("0,1", "2,3")
    assert first.variables["TPU_CHIPS_PER_HOST_BOUNDS"] == "1,2,1"


def test_too_few_devices_are_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^--replicas 3 with --tensor-parallel-size 2 needs 6 GPUs, this machine has 4$"
    ):
        divide({}, GPUS, replicas=3, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="1, 2, 4 or 8 chips each"):
        divide({}, CHIPS, replicas=1 + 1, tensor_parallel_size=3)


def test_cores_are_divided_evenly_and_shared_if_there_are_too_few() -> None:
    own = divide({"JAX_PLATFORMS": "cpu"}, GPUS, replicas=3)
    assert [devices.cores for devices in own] == [{0, 1}, {2, 3}, {4, 5}]
    assert divide({}, [], replicas=9) == [ALL_DEVICES] * 9


def test_a_single_engine_has_everything() -> None:
    assert divide({}, GPUS) == [ALL_DEVICES]
