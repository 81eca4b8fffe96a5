"""Arguments of the application on Ray Serve."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.errors import ConfigError
from jaxserve.ray.settings import read_arguments
from tests.e2e.http_server import ROOT, TOKENIZER

SLICE: dict[str, Any] = {"num_hosts": 4, "tensor_parallel_size": 16, "tpu_slice": "v5e-16"}


def test_text_and_typed_values_mean_the_same() -> None:
    text = {"model": str(TOKENIZER), "replicas": "4", "num_cpus": "0.5", "max_num_seqs": "8", "max_replicas": "6"}
    typed = {"model": str(TOKENIZER), "replicas": 4, "num_cpus": 0.5, "max_num_seqs": 8, "max_replicas": 6}
    first, second = read_arguments(text), read_arguments(typed)
    assert (first.ray, first.config) == (second.ray, second.config)
    assert (first.ray.replicas, first.ray.num_cpus, first.config.scheduler.max_num_seqs) == (4, 0.5, 8)
    assert first.config.server.behind_proxy, "the ingress passes requests of all hosts on"
    assert first.config.cache.publish_pages and first.config.parallel.replicas == 1


def test_what_a_replica_does_in_the_background_has_the_time_of_its_requests() -> None:
    """Ray Serve waits for requests, not for responses in the background: the server does when it is stopped."""
    found = read_arguments({"model": str(TOKENIZER), "drain_timeout_s": "90"})
    assert found.config.server.shutdown_timeout == found.ray.drain_timeout_s == 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica": 4}, "unknown argument `replica`; did you mean `replicas`?"),
        ({"replicas": "many"}, "replicas 'many': expected an integer"),
        ({"replicas": 0}, "replicas 0: expected at least 1"),
        ({"routing": "random"}, "routing 'random': expected one of"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas 2: expected at least min_replicas, 3"),
        ({"replicas": 3, "min_replicas": 1, "max_replicas": 2}, "max_replicas 2: expected at least replicas, 3"),
        ({"min_replicas": 2}, "min_replicas 2: needs max_replicas"),
        ({"target_queued_tokens": 100}, "target_queued_tokens 100: needs max_replicas"),
        ({"drain_timeout_s": -1}, "drain_timeout_s -1: expected at least 0"),
        ({"shutdown_timeout": 60}, "shutdown_timeout: replicas on Ray Serve do not have this setting"),
        ({"upgrade_timeout": 60}, "upgrade_timeout: replicas on Ray Serve do not have this setting"),
        ({"port": 80}, "port: replicas on Ray Serve do not have this setting"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"num_hosts": 2, "tensor_parallel_size": 2, "host_rank": 0}, "host_rank: replicas on Ray Serve do not have"),
        ({"num_hosts": "two"}, "'two': expected an integer"),
        ({"num_hosts": 2}, "--num-hosts 2: hosts have equally many devices"),
        ({"tpu_slice": "v5e-16"}, "tpu_slice v5e-16: needs num_hosts of 2 or more"),
        ({"tpu_slice": "16 chips"}, "tpu_slice '16 chips': expected a type and its number, such as v5e-16"),
        (SLICE | {"resources": {"TPU": 4}}, "resources.TPU: tpu_slice reserves all chips of the slice"),
        (SLICE | {"num_gpus": 1}, "num_gpus: tpu_slice reserves all chips of the slice"),
    ],
)
def test_wrong_argument_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_arguments({"model": str(TOKENIZER), **arguments})
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_arguments_of_the_serve_config_file_are_valid() -> None:
    content = yaml.safe_load(Path(ROOT, "configs", "ray-serve.yaml").read_text())
    (application,) = content["applications"]
    assert application["import_path"] == "jaxserve.ray:app"
    assert read_arguments(application["args"] | {"model": str(TOKENIZER)}).ray.replicas == 4


def test_a_replica_over_hosts_reserves_equal_bundles_on_different_nodes() -> None:
    hosts = {"num_hosts": "2", "tensor_parallel_size": 16, "num_gpus": 8, "resources": {"rack": 0.5}}
    found = read_arguments({"model": str(TOKENIZER), **hosts})
    assert (found.config.hosts.placement, found.server["placement"]) == ("ray", "ray"), "nothing to start by hand"
    assert found.host_reservation == {
        "placement_group_bundles": [{"CPU": 1.0, "GPU": 8.0, "rack": 0.5}] * 2,
        "placement_group_strategy": "STRICT_SPREAD",
    }


def test_a_replica_on_one_host_reserves_no_group() -> None:
    found = read_arguments({"model": str(TOKENIZER)})
    assert found.host_reservation == {} and "placement" not in found.server


def test_a_replica_on_a_tpu_slice_is_placed_on_its_first_host_and_reserves_the_others() -> None:
    found = read_arguments({"model": str(TOKENIZER), **SLICE, "resources": {"rack": 0.5}})
    assert found.actor_options["resources"] == {"rack": 0.5, "TPU-v5litepod-16-head": 1.0}
    assert found.host_reservation == {} and found.server["placement"] == "ray"


def test_replicas_on_one_node_have_sockets_of_their_own() -> None:
    settings = read_arguments({"model": "tiny", "admin_socket": "/run/jaxserve.sock"})
    assert settings.for_replica("a1", {}, ExitStack())["admin_socket"] == "/run/jaxserve.sock.a1"
    own = {"response_id_suffix": "b2", "admin_socket": "/run/jaxserve.sock.b2"}
    assert settings.for_replica("b2", {}, ExitStack()) == {**settings.server, **own}
    without = read_arguments({"model": "tiny"})
    assert without.for_replica("a1", {}, ExitStack()) == {**without.server, "response_id_suffix": "a1"}


def test_the_socket_that_a_variable_of_the_node_names_is_one_for_each_replica_too() -> None:
    settings, environ = read_arguments({"model": "tiny"}), {"JAXSERVE_ADMIN_SOCKET": "/run/node.sock"}
    assert settings.for_replica("a1", environ, ExitStack())["admin_socket"] == "/run/node.sock.a1"
    given = read_arguments({"model": "tiny", "admin_socket": "/run/jaxserve.sock"})
    assert given.for_replica("a1", environ, ExitStack())["admin_socket"] == "/run/jaxserve.sock.a1"


def listens_on(address: str, claims: ExitStack) -> str:
    settings = read_arguments({"model": "tiny", "kv_listen": address, "kv_offload_memory": "1GiB"})
    listen: str = settings.for_replica("a1", {}, claims)["kv_listen"]
    return listen


@pytest.fixture
def first_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return an address that is free, and whose locks are only those of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as first:
        return f"127.0.0.1:{first.getsockname()[1]}"


def test_replicas_on_one_node_listen_for_peers_on_ports_of_their_own(first_address: str) -> None:
    host, _, port = first_address.rpartition(":")
    with socket.create_server((host, int(port))), ExitStack() as claims:
        chosen = listens_on(first_address, claims)
        assert int(port) < int(chosen.removeprefix("127.0.0.1:")) < int(port) + 256
    of_node = read_arguments({"model": "tiny"})
    with ExitStack() as claims:
        assert listens_on(first_address, claims) == first_address
    for given in (first_address, "nothing"):
        with ExitStack() as claims:
            assert of_node.for_replica("a1", {"JAXSERVE_KV_LISTEN": given}, claims)["kv_listen"] == given


def test_replicas_that_start_together_claim_different_ports_before_their_servers_listen(first_address: str) -> None:
    with ExitStack() as first, ExitStack() as second:
        taken = listens_on(first_address, first)
        assert taken == first_address
        assert listens_on(first_address, second) != taken
        first.close()
        with ExitStack() as third:
            assert listens_on(first_address, third) == taken, "the claim ends with its replica"


def test_addresses_of_one_machine_have_claims_of_their_own(first_address: str) -> None:
    other_address = first_address.replace("127.0.0.1", "127.0.0.2")
    with ExitStack() as claims:
        assert [listens_on(each, claims) for each in (first_address, other_address)] == [first_address, other_address]


def test_what_is_no_lock_file_of_a_port_only_makes_replicas_choose_another_port(
    first_address: str, tmp_path: Path
) -> None:
    port = int(first_address.rpartition(":")[2])
    (tmp_path / f"jaxserve-kv-127.0.0.1-{port}.lock").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / f"jaxserve-kv-127.0.0.1-{port + 1}.lock")
    with ExitStack() as claims:
        assert listens_on(first_address, claims) != first_address
    assert not (tmp_path / "elsewhere").exists()
