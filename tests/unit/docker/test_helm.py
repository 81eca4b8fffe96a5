"""The Helm chart makes the documents of docker/kubernetes, and valid further ones; its rendered fixtures are those of the chart."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve import __version__
from jaxserve.runtime.settings import BY_NAME
from tests.tools.render_chart import CASES, CHART, EVERYTHING, FIXTURES, RAY, can_render, digest, render
from tests.unit.docker.alert_rules import RULES
from tests.unit.docker.manifests import FOLDER, documents, templates
from tests.unit.docker.test_dashboard import SERIES
from tests.unit.docker.test_kubernetes import validate

Document = dict[str, Any]
FILES = ["cpu", "gpu", "tpu", "multi-host-gpu", "multi-host-tpu", "ray"]
"""The chart's files of values, and of manifests, by what is in their names."""
SCHEMA: Document = json.loads((CHART / "values.schema.json").read_text("utf-8"))


def fixture(case: str) -> dict[tuple[str, str], Document]:
    """Return the rendered documents by kind and name."""
    found = json.loads((FIXTURES / f"{case}.json").read_text("utf-8"))["documents"]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def values(name: str) -> Document:
    """Return one of the chart's files of values."""
    found: Document = yaml.safe_load((CHART / name).read_text("utf-8"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_fixtures_are_of_the_chart_as_it_is(case: str) -> None:
    rendered = json.loads((FIXTURES / f"{case}.json").read_text("utf-8"))
    assert rendered["chart"] == digest(), "run `python -m tests.tools.chart_values`"


@pytest.mark.skipif(
    not can_render(), reason="no helm, and no package helm-python-sdk: fixtures are compared by their hash"
)
@pytest.mark.parametrize("case", CASES)
def test_helm_renders_the_fixtures(case: str) -> None:
    assert render(*CASES[case]) == list(fixture(case).values())


@pytest.mark.parametrize("case", CASES)
def test_every_document_is_valid(case: str) -> None:
    for document in fixture(case).values():
        validate(document)


@pytest.mark.parametrize("case", FILES)
def test_the_chart_makes_the_manifests_of_the_same_name(case: str) -> None:
    """Only labels of documents and the order of variables differ."""
    rendered = fixture(case)
    manifests = documents(FOLDER / f"{'rayservice' if case == 'ray' else case}.yaml")
    for document in manifests:
        made = rendered[document["kind"], document["metadata"]["name"]]
        assert comparable(made) == comparable(document)
    further = {kind for kind, _ in rendered} - {document["kind"] for document in manifests}
    assert further == (set() if case == "ray" else {"PodDisruptionBudget", "NetworkPolicy"})


def test_the_chart_makes_the_manifest_of_a_gateway() -> None:
    """Its pool selects the pods of the release only, since a namespace may have several releases."""
    rendered, replicas = fixture("gateway"), fixture("gpu")
    manifests = documents(FOLDER / "gateway.yaml")
    for document in manifests:
        made = comparable(rendered[document["kind"], document["metadata"]["name"]])
        if document["kind"] == "InferencePool":
            assert made["spec"]["selector"]["matchLabels"].pop("app") == "jaxserve"
        assert made == comparable(document)
    further = {key: made for key, made in rendered.items() if key[0] not in {doc["kind"] for doc in manifests}}
    assert further == replicas


def comparable(document: Document) -> Document:
    """Return a document without the metadata of a release, with variables by name and texts of YAML as values."""
    found = copy.deepcopy(document)
    annotations = {
        name: value
        for name, value in document["metadata"].get("annotations", {}).items()
        if name != "helm.sh/resource-policy"
    }
    found["metadata"] = {"name": document["metadata"]["name"], "annotations": annotations}
    for template in templates(found):
        for container in template["spec"]["containers"]:
            container["env"] = sorted(container.get("env", []), key=lambda entry: str(entry["name"]))
    if document["kind"] == "RayService":
        found["spec"]["serveConfigV2"] = yaml.safe_load(document["spec"]["serveConfigV2"])
    if document["kind"] == "ConfigMap":
        found["data"] = {name: yaml.safe_load(text) for name, text in document["data"].items()}
    return found


@pytest.mark.parametrize("file", FILES)
def test_values_fit_their_schema_and_settings_exist(file: str) -> None:
    given, default = values(f"values-{file}.yaml"), values("values.yaml")
    merged = {key: default[key] | given[key] if key in given and key in default and isinstance(default[key], dict) else given.get(key, default[key]) for key in default}  # fmt: skip
    jsonschema.validate(merged, SCHEMA)
    assert set(given) <= set(default)
    assert set(given.get("settings", {})) <= set(BY_NAME)
    assert set(EVERYTHING["settings"]) <= set(BY_NAME)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged | {"replica": 2}, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(default, SCHEMA)  # no model


def test_settings_become_variables_that_the_server_reads() -> None:
    (container,) = fixture("everything")["Deployment", "jaxserve"]["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert given["JAXSERVE_MAX_QUEUED_TOKENS"] == "4194304"
    assert given["JAXSERVE_MEMORY_FRACTION"] == "0.85"
    assert given["JAXSERVE_PUBLIC_METRICS"] == "true"


def test_pods_get_the_runtime_and_the_credentials_of_the_registry() -> None:
    pod = fixture("everything")["Deployment", "jaxserve"]["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == EVERYTHING["runtimeClassName"]
    assert [secret["name"] for secret in pod["imagePullSecrets"]] == EVERYTHING["image"]["pullSecrets"]
    pod = fixture("gpu")["Deployment", "jaxserve"]["spec"]["template"]["spec"]
    assert not {"runtimeClassName", "imagePullSecrets"} & set(pod)


def test_the_autoscaler_reads_a_ratio_that_a_rule_records() -> None:
    rendered = fixture("everything")
    scaler = rendered["HorizontalPodAutoscaler", "jaxserve"]["spec"]
    (metric,) = scaler["metrics"]
    groups = rendered["PrometheusRule", "jaxserve"]["spec"]["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    (recorded,) = [rule for group in groups for rule in group["rules"] if "record" in rule]
    assert alerts == list(RULES)
    assert metric["pods"]["metric"]["name"] == recorded["record"]
    for name in ("num_requests_running", "num_requests_waiting", "request_capacity"):
        assert f"jaxserve:{name}" in SERIES
        assert f"jaxserve:{name}" in recorded["expr"]
    assert scaler["scaleTargetRef"]["name"] == "jaxserve"
    assert "replicas" not in rendered["Deployment", "jaxserve"]["spec"], (
        "Helm would set back what the autoscaler has set"
    )


def test_everything_selects_the_pods_of_the_release() -> None:
    rendered = fixture("everything")
    labels = rendered["Deployment", "jaxserve"]["spec"]["template"]["metadata"]["labels"]
    service = rendered["Service", "jaxserve"]
    selectors = [
        rendered["PodDisruptionBudget", "jaxserve"]["spec"]["selector"]["matchLabels"],
        rendered["NetworkPolicy", "jaxserve"]["spec"]["podSelector"]["matchLabels"],
        service["spec"]["selector"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    monitor = rendered["ServiceMonitor", "jaxserve"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    (relabeling,) = monitor["spec"]["endpoints"][0]["relabelings"]
    assert relabeling == {"targetLabel": "job", "replacement": "jaxserve"}, "the job of the alerts"


@pytest.mark.parametrize("case", ["everything", "multi-host-gateway"])
def test_prometheus_sends_no_key_that_the_secret_may_not_have(case: str) -> None:
    """The Prometheus operator ignores `optional`, and rejects a monitor whose key is not in the secret."""
    (endpoint,) = fixture(case)["ServiceMonitor", "jaxserve"]["spec"]["endpoints"]
    assert "authorization" not in endpoint


@pytest.mark.skipif(not can_render(), reason="no helm, and no package helm-python-sdk")
def test_prometheus_sends_the_key_of_the_secret_if_asked_to() -> None:
    rendered = render("gpu", {"secretName": "keys", "monitoring": {"enabled": True, "sendKey": True}})
    (monitor,) = (document for document in rendered if document["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "keys", "key": "api-key"}}
    validate(monitor)


def test_pods_that_are_not_ready_do_not_block_a_drain() -> None:
    budget = fixture("gpu")["PodDisruptionBudget", "jaxserve"]["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_network_policy_lets_in_who_is_named_and_prometheus() -> None:
    policy = fixture("everything")["NetworkPolicy", "jaxserve"]["spec"]
    ((rule,), egress) = policy["ingress"], policy["egress"]
    assert rule["from"][0] == EVERYTHING["networkPolicy"]["from"][0]
    assert rule["from"][1] == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert [port["port"] for entry in egress for port in entry["ports"]] == [53, 53, 8080]
    assert egress[-1:] == EVERYTHING["networkPolicy"]["egress"]
    policy = fixture("gpu")["NetworkPolicy", "jaxserve"]["spec"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {}}]
    assert [port["port"] for entry in policy["egress"] for port in entry["ports"]] == [53, 53, 443]


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = values("Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__


def test_alerts_are_one_file() -> None:
    assert Path(CHART / "files" / "alerts.yml").resolve() == Path(CHART.parents[1] / "monitoring" / "alerts.yml")


def test_variables_of_other_programs_reach_the_containers_that_serve() -> None:
    pods = {
        "everything": fixture("everything")["Deployment", "jaxserve"]["spec"]["template"]["spec"],
        "ray-settings": next(iter(fixture("ray-settings")["RayService", "jaxserve"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]))["template"]["spec"],
    }  # fmt: skip
    for case, given in (("everything", EVERYTHING), ("ray-settings", RAY)):
        (container,) = pods[case]["containers"]
        found = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert {name: json.dumps(value).strip('"') for name, value in given["env"].items()}.items() <= found.items()


def test_a_load_balancer_reaches_pods_past_the_network_policy() -> None:
    rendered = fixture("everything")
    service = rendered["Service", "jaxserve"]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == EVERYTHING["service"]["annotations"]
    assert (
        rendered["NetworkPolicy", "jaxserve"]["spec"]["ingress"][0]["from"][0] == EVERYTHING["networkPolicy"]["from"][0]
    )


def test_a_volume_for_one_pod_is_free_before_the_next_pod_mounts_it() -> None:
    rendered = fixture("one-pod")
    claims = [document for (kind, _), document in rendered.items() if kind == "PersistentVolumeClaim"]
    assert [claim["spec"]["accessModes"] for claim in claims] == [["ReadWriteOnce"]] * 2
    deployment = rendered["Deployment", "jaxserve"]["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
