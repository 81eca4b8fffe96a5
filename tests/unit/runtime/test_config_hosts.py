"""The settings of an engine over several hosts, from flags or from a LeaderWorkerSet, and what Ray is asked for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from jaxserve.config import Config, HostsConfig, ModelConfig, ParallelConfig, ServerConfig
from jaxserve.config.hosts import coordinator_address
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import load_config
from jaxserve.runtime.ray_hosts import SLICE_LABEL, coordinator_on, reservation

TWO: dict[str, Any] = {"num_hosts": 2, "host_rank": 1, "coordinator": "10.0.0.1:7600"}
POD = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "model-0.model.default"}


def config(num_devices: int = 4, **hosts: Any) -> Config:
    parallel = ParallelConfig(tensor_parallel_size=num_devices)
    return Config(model=ModelConfig(model="m"), parallel=parallel, hosts=HostsConfig(**hosts))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_hosts": 1, "coordinator": None}, "--host-rank 1: needs --num-hosts of 2 or more"),
        ({"num_hosts": 1, "host_rank": 0}, "--coordinator 10.0.0.1:7600: needs --num-hosts of 2 or more"),
        (
            {"num_hosts": 1, "host_rank": None, "coordinator": None, "placement": "ray"},
            "--placement ray: needs --num-hosts",
        ),
        ({"host_rank": None}, "--num-hosts 2: needs --host-rank as well"),
        ({"coordinator": None}, "--num-hosts 2: needs --coordinator as well"),
        ({"host_rank": 2}, "--host-rank 2: at most 1 with --num-hosts 2"),
        ({"num_hosts": 3}, "--num-hosts 3: hosts have equally many devices, and 4 "),
        ({"coordinator": "10.0.0.1"}, "--coordinator '10.0.0.1': expected HOST:PORT"),
        ({"placement_group": "ab"}, "--placement-group: needs --placement ray"),
        (
            {"host_rank": None, "coordinator": None, "placement": "ray", "placement_group": "no id"},
            "--placement-group 'no id': expected the hexadecimal id",
        ),
        ({"coordinator": "10.0.0.1:70000"}, "--coordinator '10.0.0.1:70000': expected HOST:PORT"),
    ],
)
def test_settings_that_describe_no_host_get_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**(TWO | changes))
    assert str(caught.value).startswith(line)


def test_replicas_do_not_span_hosts() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, replicas=2)
    with pytest.raises(ConfigError, match="--replicas 2: engines over several hosts"):
        Config(model=ModelConfig(model="m"), parallel=parallel, hosts=HostsConfig(**TWO))


def test_an_address_written_as_in_a_url_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="--host ::1"):
        ServerConfig(host="[::1]")


@pytest.mark.parametrize(("text", "address"), [("node:7", ("node", 7)), ("[fe80::1]:7", ("fe80::1", 7))])
def test_the_coordinator_may_be_a_name_or_an_address(text: str, address: tuple[str, int]) -> None:
    assert coordinator_address(HostsConfig(coordinator=text)) == address


def test_a_pod_of_a_leader_worker_set_needs_no_flags() -> None:
    flags = {"model": "m", "tensor_parallel_size": "8"}
    found = load_config(flags=flags, environ=POD).hosts
    assert (found.num_hosts, found.host_rank, found.coordinator) == (4, 3, "model-0.model.default:7600")
    other = load_config(flags=flags | {"coordinator": "10.0.0.9:1"}, environ=POD).hosts
    assert other.coordinator == "10.0.0.9:1"


@pytest.mark.parametrize("given", [{"LWS_GROUP_SIZE": "1"}, POD | {"JAXSERVE_NUM_HOSTS": "1"}])
def test_a_pod_of_a_group_of_one_and_settings_of_the_user_are_left_alone(given: dict[str, str]) -> None:
    assert load_config(flags={"model": "m"}, environ=given).hosts == HostsConfig()


def test_a_group_without_a_leader_is_an_error() -> None:
    with pytest.raises(ConfigError, match="LWS_GROUP_SIZE without LWS_LEADER_ADDRESS"):
        load_config(flags={"model": "m"}, environ={"LWS_GROUP_SIZE": "2"})


def node(**resources: float) -> dict[str, Any]:
    return {
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 8.0, **resources},
        "Labels": {SLICE_LABEL: "slice-7"},
    }


def test_ray_reserves_equally_many_accelerators_on_every_host_and_host_0_on_this_node() -> None:
    found = reservation(2, 16, node(GPU=8.0))
    assert found.bundles == [{"CPU": 1.0, "GPU": 8.0, "node:10.0.0.1": 0.001}, {"CPU": 1.0, "GPU": 8.0}]
    assert found.labels == [{}, {}]
    assert found.devices(1) == {"GPU": 8.0}


def test_ray_takes_tpu_hosts_of_one_slice() -> None:
    found = reservation(4, 16, node(TPU=4.0))
    assert [bundle["TPU"] for bundle in found.bundles] == [4.0] * 4
    assert list(found.labels) == [{SLICE_LABEL: "slice-7"}] * 4


def test_a_node_with_too_few_devices_is_named() -> None:
    with pytest.raises(ConfigError, match="this node has 4 GPUs, an engine host needs 8"):
        reservation(2, 16, node(GPU=4.0))


@pytest.mark.parametrize(("node_address", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_host_0_coordinates_on_a_free_port_of_its_node(node_address: str, shown: str) -> None:
    address = coordinator_on(node_address)
    assert address.startswith(f"{shown}:")
    host, port = coordinator_address(HostsConfig(**TWO | {"coordinator": address}))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    assert host == node_address
    socket.create_server((host, port), family=family).close()
