"""The Helm chart makes replicas of several hosts, the routes of a Gateway, and a RayService."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.config import TierConfig
from jaxserve.config.hosts import host_and_port
from jaxserve.ray.settings import read_arguments
from tests.e2e.http_server import TOKENIZER
from tests.tools.chart_values import FEATURES
from tests.tools.render_chart import CASES, GATEWAY, KV_PEERS, ONE_POD, RAY, can_render, merged, render
from tests.unit.docker.test_helm import SCHEMA, fixture, values

Document = dict[str, Any]
GROUPS = ["multi-host-gpu", "multi-host-tpu", "multi-host-gateway"]
"""Cases with several hosts per replica."""


def group_of(case: str) -> Document:
    """Return the template of a case's groups of hosts."""
    found: Document = fixture(case)["LeaderWorkerSet", "jaxserve-hosts"]["spec"]["leaderWorkerTemplate"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_one_document_that_makes_pods(case: str) -> None:
    kinds = [kind for kind, _ in fixture(case) if kind in ("Deployment", "LeaderWorkerSet", "RayService")]
    if case in GROUPS:
        assert kinds == ["LeaderWorkerSet"]
    else:
        assert kinds == (["RayService"] if case.startswith("ray") else ["Deployment"])


@pytest.mark.parametrize("case", GROUPS)
def test_the_service_and_the_set_of_groups_have_different_names(case: str) -> None:
    """LeaderWorkerSet's controller makes a headless Service of the set's name, and none where that name is taken."""
    names = {name for kind, name in fixture(case) if kind in ("LeaderWorkerSet", "Service")}
    assert names == {"jaxserve", "jaxserve-hosts"}


@pytest.mark.parametrize("case", GROUPS)
def test_services_and_pools_select_leaders_and_the_budget_all_hosts(case: str) -> None:
    """A budget over all hosts lets one host go at a time, and the next one once its group serves again."""
    rendered, group = fixture(case), group_of(case)
    leader, worker = (group[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker"))
    index = "leaderworkerset.sigs.k8s.io/worker-index"  # the controller's label
    assert rendered["Service", "jaxserve"]["spec"]["selector"] == {"app": leader["app"], index: "0"}
    budget = rendered["PodDisruptionBudget", "jaxserve"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= leader.items() & worker.items()
    if case == "multi-host-gateway":
        pool = rendered["InferencePool", "jaxserve"]["spec"]["selector"]["matchLabels"]
        assert pool.items() <= leader.items()
        assert not pool.items() <= worker.items()


@pytest.mark.parametrize("case", GROUPS)
def test_hosts_of_a_group_may_connect_to_each_other_on_every_port(case: str) -> None:
    policy = fixture(case)["NetworkPolicy", "jaxserve"]["spec"]
    peers = [{"podSelector": {"matchLabels": {"app": "jaxserve"}}}]
    assert {"from": peers} in policy["ingress"]
    assert {"to": peers} in policy["egress"]
    alone = fixture("gpu")["NetworkPolicy", "jaxserve"]["spec"]
    assert {"from": peers} not in alone["ingress"]
    assert {"to": peers} not in alone["egress"]


@pytest.mark.parametrize("case", ["everything", "multi-host-gateway"])
def test_the_autoscaler_scales_the_document_that_makes_pods(case: str) -> None:
    rendered = fixture(case)
    target = rendered["HorizontalPodAutoscaler", "jaxserve"]["spec"]["scaleTargetRef"]
    scaled = rendered[target["kind"], target["name"]]
    assert scaled["apiVersion"] == target["apiVersion"]
    assert "replicas" not in scaled["spec"], "Helm would set back what the autoscaler has set"


def test_values_of_the_gateway_reach_its_documents() -> None:
    rendered, given = fixture("multi-host-gateway"), GATEWAY["gateway"]
    picker = rendered["InferencePool", "jaxserve"]["spec"]["endpointPickerRef"]
    assert picker["name"] == given["picker"]["name"]
    assert picker["port"]["number"] == given["picker"]["port"]
    route = rendered["HTTPRoute", "jaxserve"]["spec"]
    assert [parent["name"] for parent in route["parentRefs"]] == [given["name"]]
    assert route["rules"][0]["timeouts"]["request"] == given["requestTimeout"]
    assert "config.yaml" in rendered["ConfigMap", given["picker"]["name"]]["data"]


def test_the_route_leads_to_the_pool_on_the_port_of_the_pods() -> None:
    rendered = fixture("multi-host-gateway")
    (backend,) = rendered["HTTPRoute", "jaxserve"]["spec"]["rules"][0]["backendRefs"]
    pool = rendered[backend["kind"], backend["name"]]
    assert pool["apiVersion"].partition("/")[0] == backend["group"]
    (container,) = group_of("multi-host-gateway")["leaderTemplate"]["spec"]["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": port["containerPort"]} for port in container["ports"]]


@pytest.mark.parametrize("case", ["ray", "ray-settings"])
def test_the_application_on_ray_accepts_its_arguments(case: str) -> None:
    service = fixture(case)["RayService", "jaxserve"]["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    found = read_arguments(application["args"] | {"model": str(TOKENIZER)})
    assert found.ray.replicas == group["replicas"] == group["minReplicas"] <= group["maxReplicas"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert found.ray.num_gpus == int(resources["limits"]["nvidia.com/gpu"])
    assert found.ray.num_cpus < int(resources["requests"]["cpu"]), "Ray's own processes need some"
    if case == "ray-settings":
        assert RAY["settings"].items() <= application["args"].items()
        assert found.config.scheduler.max_queued_tokens == RAY["settings"]["max_queued_tokens"]


def test_workers_on_ray_follow_the_replicas_that_the_application_may_have() -> None:
    """KubeRay adds and removes workers only with its autoscaler, which asks the API of Kubernetes."""
    for case, is_scaled in (("ray", False), ("ray-settings", True)):
        spec = fixture(case)["RayService", "jaxserve"]["spec"]
        (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
        cluster = spec["rayClusterConfig"]
        (group,) = cluster["workerGroupSpecs"]
        found = read_arguments(application["args"] | {"model": str(TOKENIZER)}).ray
        assert group["minReplicas"] == (found.min_replicas or found.replicas)
        assert group["maxReplicas"] == (found.max_replicas or found.replicas)
        assert cluster.get("enableInTreeAutoscaling", False) is is_scaled
        assert cluster["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is is_scaled
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def test_workers_on_ray_get_what_pods_get() -> None:
    cluster = fixture("ray-settings")["RayService", "jaxserve"]["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    assert pod["tolerations"] == RAY["tolerations"]
    assert "tolerations" not in head, "the head needs no GPU"
    assert head["imagePullSecrets"] == pod["imagePullSecrets"] == [{"name": "registry"}]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted["shm"] == "/dev/shm"
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("case", ["kv-peers", "ray-kv-peers"])
def test_replicas_find_each_other_by_the_name_of_a_headless_service(case: str) -> None:
    rendered = fixture(case)
    service = rendered["Service", "jaxserve-kv"]["spec"]
    if case == "kv-peers":
        template = rendered["Deployment", "jaxserve"]["spec"]["template"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        assert {"name": "kv", "containerPort": 7001} in template["spec"]["containers"][0]["ports"]
    else:
        cluster = rendered["RayService", "jaxserve"]["spec"]["rayClusterConfig"]
        template = cluster["workerGroupSpecs"][0]["template"]
        assert service["selector"] == {**template["metadata"]["labels"], "ray.io/node-type": "worker"}
    assert service["clusterIP"] == "None", "its name resolves to the addresses of pods"
    assert service["ports"] == [{"name": "kv", "port": 7001}]
    (container,) = template["spec"]["containers"]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert list(variables).index("POD_IP") < list(variables).index("JAXSERVE_KV_LISTEN"), (
        "Kubernetes replaces earlier ones"
    )
    assert variables["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    token = variables["JAXSERVE_KV_PEER_TOKEN"]["valueFrom"]
    assert token == {"secretKeyRef": {"name": "jaxserve", "key": "kv-peer-token"}}
    listen, peers = (variables[f"JAXSERVE_KV_{name}"]["value"] for name in ("LISTEN", "PEERS"))
    for address in ("10.0.0.1", "fd00::1"):
        config = TierConfig(kv_offload_memory=1, kv_listen=listen.replace("$(POD_IP)", address), kv_peers=peers)
        assert host_and_port("--kv-listen", config.kv_listen or "") == (address, 7001)
        assert config.peers == ["jaxserve-kv:7001"]


def test_only_replicas_may_fetch_pages_from_each_other() -> None:
    policy, without = (fixture(case)["NetworkPolicy", "jaxserve"]["spec"] for case in ("kv-peers", "gpu"))
    peers, ports = [{"podSelector": {"matchLabels": {"app": "jaxserve"}}}], [{"port": 7001}]
    assert [rule for rule in policy["ingress"] if rule not in without["ingress"]] == [{"from": peers, "ports": ports}]
    assert [rule for rule in policy["egress"] if rule not in without["egress"]] == [{"to": peers, "ports": ports}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 0},
        {"hosts": "2"},
        {"sharedMemory": 8},
        {"gateway": {"requestTimeout": "600"}},
        {"gateway": {"picker": {"port": 0}}},
        {"gateway": {"pickerName": "picker"}},
        {"ray": {"maxWorkers": 4}},
        {"terminationGracePeriodSeconds": 60},
        {"settings": {"shutdown_timeout": "30"}},
        {"settings": {"drain_timeout_s": -1}},
        {"settings": {"max_replicas": "4"}},
        {"ray": {"workers": 2}},
        {"kvPeers": {"port": 80}},
        {"env": {"NCCL SOCKET": "eth0"}},
        {"env": {"PROXIES": ["a"]}},
        {"caches": {"accessMode": "ReadOnlyMany"}},
        {"service": {"annotations": {"a": 1}}},
    ],
    ids=str,
)
def test_the_schema_refuses_wrong_values(wrong: Document) -> None:
    given = values("values.yaml") | values("values-gpu.yaml")
    jsonschema.validate(given, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given | wrong, SCHEMA)


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
@pytest.mark.parametrize(
    ("file", "wrong", "message"),
    [
        ("gpu", {"autoscaling": {"enabled": True}}, "autoscaling.enabled needs monitoring.enabled"),
        ("gpu", {"exclusiveTopology": "cloud.google.com/gke-nodepool"}, "exclusiveTopology needs hosts of 2 or more"),
        ("gpu", {"ray": {"enabled": True}}, "ray.enabled needs networkPolicy.enabled: false"),
        ("multi-host-gpu", {"settings": {"num_hosts": 2}}, "settings.num_hosts: the LeaderWorkerSet sets it"),
        (
            "gpu",
            {"kvPeers": {"enabled": True}},
            "kvPeers.enabled needs settings.kv_offload_memory or settings.kv_offload_dir",
        ),
        ("gpu", {"kvPeers": {"port": 7100}}, "kvPeers.port needs kvPeers.enabled"),
        ("gpu", merged(KV_PEERS, {"kvPeers": {"port": 8000}}), "kvPeers.port: pods answer requests on 8000"),
        ("gpu", merged(KV_PEERS, {"settings": {"kv_peers": "10.0.0.1:7001"}}), "settings.kv_peers: the chart sets it"),
        (
            "ray",
            merged(KV_PEERS, {"settings": {"kv_listen": "10.0.0.1:7001"}}),
            "settings.kv_listen: the chart sets it",
        ),
        ("multi-host-gpu", KV_PEERS, "kvPeers.enabled needs hosts: 1"),
        ("gpu", merged(KV_PEERS, {"settings": {"replicas": 2}}), "kvPeers.enabled needs settings.replicas: 1"),
        ("gpu", {"caches": {"accessMode": "ReadWriteOnce"}}, "caches.accessMode: a claim that is ReadWriteOnce"),
        ("gpu", merged(ONE_POD, {"replicas": 2}), "it needs replicas: 1"),
        ("gpu", {"updateStrategy": {"maxSurge": 0}}, "updateStrategy.maxSurge and updateStrategy.maxUnavailable"),
        ("gpu", merged(FEATURES, {"autoscaling": {"minReplicas": 5}}), "autoscaling.maxReplicas: expected at least"),
        ("gpu", {"service": {"type": "NodePort"}}, "service.type: NodePort is for clients outside the namespace"),
        ("gpu", {"env": {"JAXSERVE_MAX_NUM_SEQS": 8}}, "env.JAXSERVE_MAX_NUM_SEQS: put settings.max_num_seqs"),
        ("ray", {"env": {"HF_TOKEN": "hf_x"}}, "env.HF_TOKEN: the chart sets it"),
        ("ray", {"hosts": 2}, "ray.enabled needs hosts: 1"),
        ("ray", {"monitoring": {"enabled": True}}, "ray.enabled needs monitoring.enabled: false"),
        ("ray", {"gateway": {"enabled": True}}, "ray.enabled needs gateway.enabled: false"),
        ("ray", {"settings": {"num_gpus": 2}}, "settings.num_gpus: a RayService has it from other values"),
        ("ray", {"settings": {"num_hosts": 2}}, "settings.num_hosts"),
        ("ray", {"replicas": 0}, "ray.enabled needs replicas of 1 or more"),
        ("ray", {"replicas": 5, "settings": {"max_replicas": 4}}, "settings.max_replicas: expected at least replicas"),
        ("ray", {"settings": {"min_replicas": 5, "max_replicas": 4}}, "settings.max_replicas: expected at least"),
        ("ray", {"settings": {"min_replicas": 1}}, "settings.min_replicas needs settings.max_replicas"),
        ("ray", {"settings": {"target_queued_tokens": 9}}, "settings.target_queued_tokens needs settings.max_replicas"),
        ("ray", {"resources": {"limits": {"google.com/tpu": "4"}}}, "not for google.com/tpu"),
    ],
    ids=str,
)
def test_the_chart_refuses_values_that_do_not_go_together(file: str, wrong: Document, message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        render(file, wrong)
