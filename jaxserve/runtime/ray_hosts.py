"""`--placement ray`: Ray chooses the hosts of one engine and runs their workers, one actor on a node of its own each.

This process is the driver and host 0, so its node must belong to the cluster. Ray reserves the devices of all hosts at
once, those of host 0 too, and starts an actor again whose node was lost. Nothing else of the engine knows Ray: an actor
runs the same supervisor as `jaxserve serve --host-rank`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from jaxserve.config import Config
from jaxserve.errors import ConfigError, StartupError
from jaxserve.log import configure_logging
from jaxserve.runtime.host_supervisor import run_workers

_log = logging.getLogger(__name__)

SLICE_LABEL: Final = "ray.io/tpu-slice-name"
"""Label of the nodes of one TPU slice, whose chips are connected with each other."""
_ACCELERATORS: Final = ("TPU", "GPU")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources of each host, by rank, and the labels that its node must have."""

    bundles: Sequence[Mapping[str, float]]
    labels: Sequence[Mapping[str, str]] = ()

    def devices(self, rank: int) -> dict[str, float]:
        """Return the accelerators of a host."""
        return {name: count for name, count in self.bundles[rank].items() if name in _ACCELERATORS}


def reservation(num_hosts: int, num_devices: int, node: Mapping[str, Any]) -> Reservation:
    """Return what to reserve for an engine with so many devices whose host 0 is `node`, as `ray.nodes()` describes it.

    TPU hosts must be of one slice. Raises ConfigError if the node has too few devices.
    """
    resources, labels = node["Resources"], node.get("Labels") or {}
    kind = next((name for name in _ACCELERATORS if resources.get(name)), None)
    each: dict[str, float] = {"CPU": 1.0}
    if kind is not None:
        each[kind] = num_devices / num_hosts
        if resources[kind] < each[kind]:
            raise ConfigError(
                f"--placement ray: this node has {resources[kind]:g} {kind}s, an engine host needs {each[kind]:g}"
            )
    own = {f"node:{node['NodeManagerAddress']}": 0.001}
    of_slice = {SLICE_LABEL: labels[SLICE_LABEL]} if kind == "TPU" and SLICE_LABEL in labels else {}
    return Reservation([each | own, *([each] * (num_hosts - 1))], [of_slice] * num_hosts)


@contextlib.contextmanager
def placed_hosts(config: Config) -> Iterator[Config]:
    """Run the other hosts' workers inside the block; yields the config of host 0. Raises StartupError.

    RAY_ADDRESS names the cluster; without it, the cluster that this node belongs to.
    """
    ray = _ray()
    configure_logging(config.server.log_level, config.server.log_format)
    try:
        ray.init(address="auto", namespace="jaxserve", log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError) as error:
        raise StartupError(f"--placement ray: {next(iter(str(error).splitlines()), 'no Ray cluster')}") from error
    hosts = config.hosts
    group, wanted, node = _given_group(config) if hosts.placement_group else _new_group(config)
    address = coordinator_on(node["NodeManagerAddress"])
    try:
        placed = [
            dataclasses.replace(config, hosts=dataclasses.replace(hosts, host_rank=rank, coordinator=address))
            for rank in range(hosts.num_hosts)
        ]
        actors = [_start_actor(group, wanted, each) for each in placed[1:]]
        _log.info("Ray runs the hosts 1 to %d", len(actors))
        yield placed[0]
        _stop(actors, config.hosts.host_timeout)
    finally:
        from ray.util import remove_placement_group

        if hosts.placement_group is None:
            remove_placement_group(group)
        ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--placement ray: Ray is not installed; run `pip install 'jaxserve[ray]'`") from error
    return ray


def _new_group(config: Config) -> tuple[Any, Reservation, Mapping[str, Any]]:
    """Return a placement group made for this engine, its resources, and the node of host 0, which is this one."""
    import ray

    node = _node(ray.get_runtime_context().get_node_id())
    wanted = reservation(config.hosts.num_hosts, config.parallel.num_devices, node)
    return _reserve(wanted, config.hosts.host_join_timeout), wanted, node


def reserve_hosts(config: Config) -> str:
    """Return the id of a placement group for `--placement-group` whose first bundle is on the node of this actor.

    It ends with the actor. Raises ConfigError and StartupError.
    """
    group, _, _ = _new_group(config)
    return str(group.id.hex())


def _given_group(config: Config) -> tuple[Any, Reservation, Mapping[str, Any]]:
    """Return the placement group of `--placement-group`, its resources, and the node of its first bundle.

    Raises ConfigError if it does not have a bundle for each host.
    """
    from ray.util.placement_group import PlacementGroup, PlacementGroupID, placement_group_table

    group = PlacementGroup(PlacementGroupID.from_hex(config.hosts.placement_group))
    bundles = group.bundle_specs
    if len(bundles) != config.hosts.num_hosts:
        raise ConfigError(f"--placement-group: {len(bundles)} bundles, and --num-hosts is {config.hosts.num_hosts}")
    return group, Reservation(bundles), _node(placement_group_table(group)["bundles_to_node_id"][0])


def _node(node_id: str) -> Mapping[str, Any]:
    import ray

    return next(each for each in ray.nodes() if each["NodeID"] == node_id)


def _reserve(wanted: Reservation, timeout_s: float) -> Any:
    """Return the placement group of all hosts. Raises StartupError if the cluster has no free nodes for it."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group(
        [dict(bundle) for bundle in wanted.bundles],
        strategy="STRICT_SPREAD",
        bundle_label_selector=[dict(labels) for labels in wanted.labels] if any(wanted.labels) else None,
    )
    if not group.wait(timeout_s):
        remove_placement_group(group)
        needs = " and ".join(f"{count:g} {name}" for name, count in wanted.bundles[-1].items())
        raise StartupError(
            f"--placement ray: {len(wanted.bundles)} nodes with {needs} each were not free within {timeout_s:g} s "
            "(--host-join-timeout)"
        )
    return group


class _Host:
    """Runs the workers of one host; a Ray actor. A second thread of it takes `stop`."""

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.json.decode(config, type=Config)
        self._signals: list[int] = []

    def run(self) -> int:
        """Run workers until the server stops; returns the exit code."""
        return run_workers(self._config, self._signals)

    def stop(self) -> None:
        """End the workers at once."""
        self._signals += [15, 15]


def _start_actor(group: Any, wanted: Reservation, config: Config) -> tuple[Any, Any]:
    """Return the actor of a host and the future of its exit code."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rank = config.hosts.rank
    devices = wanted.devices(rank)
    options = {
        "num_cpus": min(1.0, wanted.bundles[rank].get("CPU", 0.0)),
        "num_gpus": devices.get("GPU", 0),
        "resources": {name: count for name, count in devices.items() if name != "GPU"},
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 2,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
    server = dataclasses.replace(config.server, api_key=None, api_key_file=None)  # workers need no keys
    encoded = msgspec.json.encode(dataclasses.replace(config, server=server))
    actor = ray.remote(_Host).options(**options).remote(encoded)
    return actor, actor.run.remote()


def _stop(actors: Sequence[tuple[Any, Any]], timeout_s: float) -> None:
    """Wait for the ends of the workers, which host 0 has asked for; end those that did not hear it."""
    import ray

    _, running = ray.wait([end for _, end in actors], num_returns=len(actors), timeout=timeout_s)
    for actor, end in actors:
        if end in running:
            actor.stop.remote()
    ray.wait(running, num_returns=len(running), timeout=timeout_s) if running else None


def coordinator_on(address: str) -> str:
    """Return the value of `--coordinator` for host 0 on the node with this address: a port that no process listens on."""
    is_v6 = ":" in address
    with socket.create_server((address, 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET) as found:
        port = found.getsockname()[1]
    return f"[{address}]:{port}" if is_v6 else f"{address}:{port}"
