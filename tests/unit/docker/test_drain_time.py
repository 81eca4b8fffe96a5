"""No pod, container or unit is killed while its server drains within the server's own limit."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from jaxserve.config import ServerConfig
from jaxserve.http.listener import CLOSE_TIMEOUT_S
from jaxserve.ray import await_workers
from jaxserve.ray.settings import RaySettings
from jaxserve.runtime.api_process import ABORT_FLUSH_S
from jaxserve.runtime.api_workers import STOP_GRACE_S
from jaxserve.runtime.engine_process import ENGINE_STOP_TIMEOUT_S
from jaxserve.runtime.settings import BY_NAME
from tests.tools.render_chart import CASES, can_render, render
from tests.unit.docker.manifests import FILES, ROOT, Pod, documents, templates
from tests.unit.docker.test_helm import fixture

END_S = ABORT_FLUSH_S + STOP_GRACE_S + ENGINE_STOP_TIMEOUT_S + CLOSE_TIMEOUT_S
"""Seconds that the server may take after its drain: the last errors, its API processes, engine and connections."""
DEFAULT_S = ServerConfig().shutdown_timeout
RAY_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
Document = dict[str, Any]


def _documents() -> list[tuple[str, Document]]:
    made = [(f"chart-{case}", document) for case in CASES for document in fixture(case).values()]
    return made + [(file.stem, document) for file in FILES for document in documents(file)]


OF_SERVERS = [
    Pod(f"{place}-{number}", template)
    for place, document in _documents()
    if document["kind"] != "RayService"
    for number, template in enumerate(templates(document))
]
SETS = [(place, document) for place, document in _documents() if document["kind"] == "LeaderWorkerSet"]
ON_RAY = [(place, document) for place, document in _documents() if document["kind"] == "RayService"]


def drain_of(pod: Pod) -> float:
    """Return the seconds that running requests may take in a pod."""
    given = {entry["name"]: entry.get("value") for entry in pod.container["env"]}
    return float(given.get(BY_NAME["shutdown_timeout"].variable) or DEFAULT_S)


def wait_of(pod: Pod) -> int:
    """Return the seconds before SIGTERM."""
    sleep, seconds = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return int(seconds)


@pytest.mark.parametrize("pod", OF_SERVERS, ids=lambda pod: pod.place)
def test_a_pod_is_killed_only_after_its_requests_could_end(pod: Pod) -> None:
    assert pod.spec["terminationGracePeriodSeconds"] >= wait_of(pod) + drain_of(pod) + END_S


@pytest.mark.parametrize(("place", "document"), SETS, ids=[place for place, _ in SETS])
def test_a_worker_ends_later_than_its_leader(place: str, document: Document) -> None:
    """Pods of a group are deleted within seconds of each other, and a worker's process waits from SIGTERM on for the leader."""
    leader, worker = (Pod(place, template) for template in templates(document))
    assert leader.serves_http and not worker.serves_http
    assert drain_of(leader) == drain_of(worker)
    assert wait_of(worker) - wait_of(leader) >= ABORT_FLUSH_S + ENGINE_STOP_TIMEOUT_S


def test_the_chart_derives_the_time_of_a_pod_from_the_setting() -> None:
    group = fixture("multi-host-gateway")["LeaderWorkerSet", "jaxserve-hosts"]["spec"]["leaderWorkerTemplate"]
    pods = [Pod("", fixture("gpu")["Deployment", "jaxserve"]["spec"]["template"]), Pod("", group["leaderTemplate"])]
    assert [drain_of(pod) for pod in pods] == [DEFAULT_S, 300.5]
    margins = {pod.spec["terminationGracePeriodSeconds"] - math.ceil(drain_of(pod)) for pod in pods}
    assert len(margins) == 1, "the default of the chart is that of the server"


@pytest.mark.parametrize(("place", "document"), ON_RAY, ids=[place for place, _ in ON_RAY])
def test_pods_of_ray_end_after_their_replicas(place: str, document: Document) -> None:
    """Ray moves replicas off a node that gets SIGTERM; the cluster before an update stays until its requests have ended."""
    (application,) = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
    drain_s = float(application["args"].get("drain_timeout_s", RaySettings().drain_timeout_s))
    head, workers = (template["spec"] for template in templates(document))
    (at_head,), (at_worker,) = head["containers"], workers["containers"]
    of_head, of_worker = (
        int(entry["value"]) for each in (at_head, at_worker) for entry in each["env"] if entry["name"] == RAY_VARIABLE
    )
    *command, wait_s = at_head["lifecycle"]["preStop"]["exec"]["command"]
    assert (command, of_head) == (["python", "-m", await_workers.__name__], 0), "a head never becomes idle"
    assert int(wait_s) >= of_worker >= drain_s + END_S
    for pod in (head, workers):
        assert pod["terminationGracePeriodSeconds"] >= of_worker + 20, "Ray ends its own processes after that"
    assert document["spec"]["rayClusterDeletionDelaySeconds"] >= drain_s


def test_defaults_of_the_chart_on_ray_are_those_of_the_application() -> None:
    short, long = (fixture(case)["RayService", "jaxserve"]["spec"] for case in ("ray", "ray-settings"))
    (application,) = yaml.safe_load(long["serveConfigV2"])["applications"]
    difference = application["args"]["drain_timeout_s"] - RaySettings().drain_timeout_s
    assert long["rayClusterDeletionDelaySeconds"] - short["rayClusterDeletionDelaySeconds"] == difference


def test_ray_reads_the_variable() -> None:
    constants = pytest.importorskip("ray._private.ray_constants", reason="needs `jaxserve[ray]`")
    assert hasattr(constants, RAY_VARIABLE)


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
@pytest.mark.parametrize(("seconds", "expected"), [(0, 30), (0.5, 31), (7200, 7230)])
def test_helm_adds_the_times(seconds: float, expected: int) -> None:
    (deployment,) = (d for d in render("gpu", {"settings": {"shutdown_timeout": seconds}}) if d["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == expected


def test_containers_of_compose_and_units_of_systemd_have_the_time() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    (grace,) = {service["stop_grace_period"].rstrip("s") for service in compose["services"].values() if "stop_grace_period" in service}  # fmt: skip
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", (ROOT / "docs" / "operating.md").read_text("utf-8"), re.MULTILINE)
    assert min(int(grace), int(stop)) >= DEFAULT_S + END_S
