"""Makes all fixtures of the Helm chart, those of `tests.tools.render_chart` too: `python -m tests.tools.chart_values`.

It renders the chart with each of its values changed, one at a time. The outcomes are a fixture, since few machines have Helm.
Tests compare it with `values.yaml`, so that no value of the chart is without an effect unless the chart refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.tools import render_chart
from tests.tools.render_chart import CHART, FIXTURES, KV_PEERS, ONE_POD, digest, merged, render

FIXTURE: Final = FIXTURES / "values.json"
FEATURES: Final[dict[str, Any]] = {
    "settings": {"public_metrics": True},
    "gateway": {"enabled": True},
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True},
}
CLIENTS: Final = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
BASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "deployment": ("gpu", {}),
    "deployment-tpu": ("tpu", {}),
    "one-pod": (
        "cpu",
        merged(ONE_POD, {"caches": {"accessMode": "ReadWriteMany"}, "networkPolicy": {"from": CLIENTS}}),
    ),
    "deployment-features": ("gpu", merged(FEATURES, KV_PEERS)),
    "several-hosts": ("multi-host-gpu", {}),
    "several-hosts-features": ("multi-host-gpu", FEATURES),
    "ray": ("ray", KV_PEERS),
}
"""The file of values and further values from which one value is changed: every kind of document that makes pods."""
OTHERS: Final[dict[str, Any]] = {
    "model": "another/model",
    "settings": {"max_num_batched_tokens": 1024},
    "env": {"HTTPS_PROXY": "http://proxy.example:3128"},
    "image.repository": "registry.example/jaxserve",
    "image.tag": "another",
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["registry"],
    "replicas": 3,
    "hosts": 4,
    "exclusiveTopology": "cloud.google.com/gke-nodepool",
    "sharedMemory": "16Gi",
    "secretName": "another",
    "resources.requests": {"cpu": "9"},
    "resources.limits": {"memory": "200Gi"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "caches.storageClassName": "shared",
    "caches.accessMode": "ReadWriteOnce",
    "caches.models": "200Gi",
    "caches.programs": "5Gi",
    "updateStrategy.maxUnavailable": 2,
    "updateStrategy.maxSurge": 2,
    "startup.timeout": 2400,
    "service.type": "LoadBalancer",
    "service.port": 80,
    "service.annotations": {"cloud.example/internal": "true"},
    "kvPeers.port": 7100,
    "podDisruptionBudget.maxUnavailable": 2,
    "gateway.name": "public",
    "gateway.picker.name": "chooser",
    "gateway.picker.port": 9100,
    "gateway.requestTimeout": "1h",
    "ray.version": "2.60.1",
    "ray.numCpus": 3,
    "ray.requestTimeout": 1800,
    "ray.headResources.requests": {"cpu": "3"},
    "ray.headResources.limits": {"memory": "9Gi"},
    "autoscaling.minReplicas": 2,
    "autoscaling.maxReplicas": 8,
    "autoscaling.targetQueueRatio": "200m",
    "autoscaling.scaleDownStabilizationSeconds": 300,
    "monitoring.interval": "30s",
    "monitoring.labels": {"release": "prometheus"},
    "networkPolicy.from": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
    "networkPolicy.monitoringNamespaceLabels": {"team": "operators"},
    "networkPolicy.egress": [{"ports": [{"port": 8080, "protocol": "TCP"}]}],
}
"""A value for each path that is no boolean, different from those of all bases. Booleans are negated."""
_REFUSAL: Final = re.compile(r"checks\.yaml:\d+:\d+\): (.*)")
Outcome = list[str] | str
"""The documents that change, or the message of the refusal."""


def main() -> None:
    """Write the documents that the chart makes, and the outcomes of all bases."""
    render_chart.main()
    found = {"chart": digest(), "outcomes": {base: outcomes(base) for base in BASES}}
    FIXTURE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def paths(values: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all values that the chart reads on their own: the schema lists all fields of objects above them."""
    for name, value in values.items():
        part = schema["properties"][name]
        if part.get("additionalProperties") is False:
            yield from paths(value, part, f"{prefix}{name}.")
        else:
            yield prefix + name


def all_paths() -> list[str]:
    """Return the paths of the chart's values."""
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    return list(paths(_yaml("values"), schema))


def value_of(base: str, path: str) -> Any:
    """Return the value of a base."""
    file, further = BASES[base]
    value: Any = merged(merged(_yaml("values"), _yaml(f"values-{file}")), further)
    for name in path.split("."):
        value = value[name]
    return value


def outcomes(base: str) -> dict[str, Outcome]:
    """Return what each changed value does to the documents of a base, by path. Raises an error of Helm that is no refusal."""
    file, further = BASES[base]
    before = _by_name(render(file, further))
    found: dict[str, Outcome] = {}
    for path in all_paths():
        other: Any = OTHERS[path] if path in OTHERS else not value_of(base, path)
        for name in reversed(path.split(".")):
            other = {name: other}
        try:
            after = _by_name(render(file, merged(further, other)))
        except Exception as error:
            if (refusal := _REFUSAL.search(str(error))) is None:
                raise
            found[path] = refusal[1]
        else:
            found[path] = sorted(name for name in before | after if before.get(name) != after.get(name))
    return found


def _by_name(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def _yaml(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / f"{name}.yaml").read_text("utf-8"))
    return found


if __name__ == "__main__":
    main()
