"""The manifests of docker/kubernetes are valid and fit the server: probes, time-outs, volumes, settings and devices."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxserve.config import ServerConfig
from jaxserve.http.app import collect_routes
from jaxserve.runtime.settings import BY_NAME, SETTINGS
from tests.unit.docker.kubernetes_schemas import SCHEMAS
from tests.unit.docker.manifests import FILES, ROOT, Pod, documents, pods, templates

KUBERNETES_VERSIONS = ("1.27", "1.37")
"""The oldest that the chart accepts, and the newest whose schemas are installed."""
DEFAULT = ServerConfig()
PODS = pods()
OWN_PODS = [pod for pod in PODS if "RayService" not in pod.place]
"""Pods whose first process is `jaxserve serve`."""


def validate(document: dict[str, Any]) -> None:
    """Raise an error for a document that its API would refuse. Unknown fields are errors."""
    schema = SCHEMAS.get((document["apiVersion"], document["kind"]))
    if schema is None:
        validate_of_kubernetes(document)
        return
    jsonschema.validate(document, schema)
    for template in templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        validate_of_kubernetes(pod)


def validate_of_kubernetes(document: dict[str, Any]) -> None:
    """Raise an error for a document that one of the versions of Kubernetes would refuse."""
    for version in KUBERNETES_VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_oldest_version_is_that_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "docker" / "helm" / "jaxserve" / "Chart.yaml").read_text("utf-8"))
    assert chart["kubeVersion"] == f">={KUBERNETES_VERSIONS[0]}.0-0"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_document_is_valid(file: Path) -> None:
    for document in documents(file):
        validate(document)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_typing_error_in_a_document_would_be_seen(file: Path) -> None:
    for document in documents(file):
        body = "spec" if "spec" in document else "data"
        broken = copy.deepcopy(document)
        broken[f"{body}s"] = broken.pop(body)
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            validate(broken)
        for template in templates(broken := copy.deepcopy(document)):
            (container, *_) = template["spec"]["containers"]
            container["volumeMount"] = container.pop("volumeMounts", [])
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                validate(broken)


@pytest.mark.parametrize("pod", [pod for pod in OWN_PODS if pod.serves_http], ids=lambda pod: pod.place)
def test_probes_ask_what_they_mean_and_leave_self_repair_its_time(pod: Pod) -> None:
    """The liveness probe asks /live, which does not turn 503 while the server mends itself."""
    container = pod.container
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
    assert set(paths.values()) <= {route.path for route in collect_routes() if route.is_public}, "probes send no key"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200, "a large model loads and compiles that long"
    readiness = container["readinessProbe"]
    assert readiness["periodSeconds"] * readiness.get("failureThreshold", 3) < DEFAULT.stall_timeout
    assert {port["containerPort"] for port in container["ports"]} == {DEFAULT.port}


@pytest.mark.parametrize("pod", OWN_PODS, ids=lambda pod: pod.place)
def test_a_pod_has_the_settings_the_folders_and_the_user_of_the_image(pod: Pod) -> None:
    assert pod.spec["enableServiceLinks"] is False, "they would set JAXSERVE_PORT"
    names = {entry["name"] for entry in pod.container["env"]}
    assert names - {"HF_TOKEN"} <= {setting.variable for setting in SETTINGS}
    assert {"HF_TOKEN", "JAXSERVE_API_KEY"} <= names
    secrets = [entry["valueFrom"]["secretKeyRef"] for entry in pod.container["env"] if "valueFrom" in entry]
    assert {secret["name"] for secret in secrets} == {"jaxserve"}
    image = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    security = pod.spec["securityContext"]
    target = pod.container["image"].partition(":")[2]
    stage = image.partition(f"AS {target}\n")[2].partition("\nFROM ")[0]
    user = 10001 if security["runAsUser"] == 0 else security["runAsUser"]
    assert f"USER {user}:{security['fsGroup']}" in stage
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    mounted = {mount["mountPath"] for mount in pod.container["volumeMounts"]} - {"/dev/shm"}
    assert mounted == {"/tmp", *json.loads(image.split("VOLUME ")[1].splitlines()[0])}


@pytest.mark.parametrize("pod", OWN_PODS, ids=lambda pod: pod.place)
def test_only_pods_with_tpus_are_root_to_lock_the_memory_of_chips(pod: Pod) -> None:
    """VFIO counts memory that devices read against RLIMIT_MEMLOCK, which only CAP_SYS_RESOURCE may raise."""
    capabilities = pod.container["securityContext"]["capabilities"]
    assert capabilities["drop"] == ["ALL"]
    if pod.limit("google.com/tpu"):
        assert pod.spec["securityContext"]["runAsUser"] == 0
        assert capabilities["add"] == ["SYS_RESOURCE"]
        assert pod.container["command"] == ["sh", "-c", "ulimit -l 68719476736; exec jaxserve serve"]
    else:
        assert pod.spec["securityContext"]["runAsNonRoot"]
        assert "add" not in capabilities
        assert "command" not in pod.container


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_claims_that_pods_mount_exist_and_can_be_mounted_by_the_old_and_the_new_pod(file: Path) -> None:
    found = documents(file)
    claims = {doc["metadata"]["name"]: doc for doc in found if doc["kind"] == "PersistentVolumeClaim"}
    wanted = {
        volume["persistentVolumeClaim"]["claimName"]
        for doc in found
        for template in templates(doc)
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert wanted == set(claims)
    assert all(doc["spec"]["accessModes"] == ["ReadWriteMany"] for doc in claims.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_services_and_pools_select_pods_that_answer_http(file: Path) -> None:
    for doc in documents(file):
        if doc["kind"] not in ("Service", "InferencePool"):
            continue
        selector = doc["spec"]["selector"]
        wanted = dict(selector.get("matchLabels", selector))
        wanted.pop("leaderworkerset.sigs.k8s.io/worker-index", None)  # set by the controller, 0 for leaders
        own = (
            pods() if doc["kind"] == "InferencePool" else [pod for pod in PODS if pod.place.startswith(f"{file.stem}-")]
        )
        chosen = [pod for pod in own if wanted.items() <= pod.template["metadata"]["labels"].items()]
        assert chosen
        leaders_only = "leaderworkerset.sigs.k8s.io/worker-index" in selector
        assert leaders_only or all(pod.serves_http for pod in chosen)


def test_no_service_takes_the_name_under_which_hosts_find_their_leader() -> None:
    """LeaderWorkerSet's controller makes a headless Service of the set's name, and none where that name is taken."""
    names: dict[str, set[str]] = {"LeaderWorkerSet": set(), "Service": set()}
    for document in (document for file in FILES for document in documents(file)):
        names.setdefault(document["kind"], set()).add(document["metadata"]["name"])
    assert names["LeaderWorkerSet"] and names["Service"]
    assert not names["LeaderWorkerSet"] & names["Service"]


def test_the_ray_service_starts_the_application_on_workers_that_have_its_devices() -> None:
    (file,) = (file for file in FILES if file.stem == "rayservice")
    (service,) = (doc for doc in documents(file) if doc["kind"] == "RayService")
    config, cluster = yaml.safe_load(service["spec"]["serveConfigV2"]), service["spec"]["rayClusterConfig"]
    (application,) = config["applications"]
    assert application["import_path"] == "jaxserve.ray:app"
    ports = [port["containerPort"] for port in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]]
    assert config["http_options"]["port"] in ports
    (group,) = cluster["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    replicas, arguments = group["minReplicas"], application["args"]
    assert int(resources["limits"]["nvidia.com/gpu"]) * replicas >= arguments["num_gpus"] * arguments["replicas"]
    assert int(resources["requests"]["cpu"]) * replicas >= arguments["num_cpus"] * arguments["replicas"]


def test_workers_on_ray_are_ready_when_their_proxy_answers() -> None:
    """KubeRay's default probe of a RayService's workers runs wget, which the image does not have."""
    (probe,) = (pod.container["readinessProbe"] for pod in PODS if pod.container["name"] == "ray-worker")
    (file,) = (file for file in FILES if file.stem == "rayservice")
    (service,) = (doc for doc in documents(file) if doc["kind"] == "RayService")
    port = yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]["port"]
    assert probe["httpGet"] == {"path": "/-/healthz", "port": port}
    assert probe["failureThreshold"] == 1, "no requests to a worker without a replica"


def test_a_rolling_update_keeps_the_old_replica_until_the_new_one_is_ready() -> None:
    updates = [
        json.dumps(doc["spec"].get("strategy") or doc["spec"].get("rolloutStrategy"))
        for file in FILES
        for doc in documents(file)
        if doc["kind"] in ("Deployment", "LeaderWorkerSet")
    ]
    assert len(updates) == 5
    assert all('"maxUnavailable": 0, "maxSurge": 1' in update for update in updates)


@pytest.mark.parametrize("pod", OWN_PODS, ids=lambda pod: pod.place)
def test_devices_of_all_hosts_are_those_of_the_settings(pod: Pod) -> None:
    target = pod.container["image"].partition(":")[2]
    num_devices = {"cpu": 1, "cuda": pod.limit("nvidia.com/gpu"), "tpu": pod.limit("google.com/tpu")}[target]
    (file,) = (file for file in FILES if pod.place.startswith(f"{file.stem}-"))
    groups = [
        doc["spec"]["leaderWorkerTemplate"]["size"] for doc in documents(file) if doc["kind"] == "LeaderWorkerSet"
    ]
    given = {entry["name"]: entry.get("value") for entry in pod.container["env"]}
    tensor, data = (
        int(given.get(BY_NAME[name].variable) or 1) for name in ("tensor_parallel_size", "data_parallel_size")
    )
    assert tensor * data == num_devices * (groups or [1])[0]
    requests = pod.container["resources"]["requests"]
    assert (
        re.fullmatch(r"\d+Gi", requests["memory"])
        and requests["memory"] == pod.container["resources"]["limits"]["memory"]
    )
