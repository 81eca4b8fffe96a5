"""Renders the Helm chart into tests/fixtures/helm: `python -m tests.tools.render_chart`.

By `helm`, or by Helm's own library in the package `helm-python-sdk` (244 MB), which no lock has. Tests compare the fixtures with the
manifests of docker/kubernetes and with Kubernetes' schemas, notice when the chart has changed since, and render it again where
one of the two is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "docker" / "helm" / "jaxserve"
FIXTURES: Final = ROOT / "tests" / "fixtures" / "helm"
SETTINGS: Final = CHART / "files" / "settings.md"
RELEASE: Final = "jaxserve"
EVERYTHING: Final[dict[str, Any]] = {
    "settings": {"max_queued_tokens": 4194304, "memory_fraction": 0.85, "public_metrics": True},
    "env": {"HTTPS_PROXY": "http://proxy.example:3128", "NCCL_NVLS_ENABLE": 0},
    "service": {"type": "LoadBalancer", "annotations": {"cloud.example/internal": "true"}},
    "image": {"pullSecrets": ["registry"]},
    "runtimeClassName": "nvidia",
    "caches": {"storageClassName": "shared"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "from": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
        "allowHub": False,
        "egress": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 8080, "protocol": "TCP"}]}],
    },
}
GATEWAY: Final[dict[str, Any]] = {
    "settings": {"public_metrics": True, "shutdown_timeout": 300.5},
    "gateway": {
        "enabled": True,
        "name": "public",
        "picker": {"name": "chooser", "port": 9100},
        "requestTimeout": "1h",
    },
    "autoscaling": {"enabled": True},
    "monitoring": {"enabled": True},
}
RAY: Final[dict[str, Any]] = {
    "settings": {
        "max_queued_tokens": 2097152,
        "routing": "round-robin",
        "enable_prefix_caching": True,
        "max_replicas": 4,
        "drain_timeout_s": 1200,
    },
    "image": {"pullSecrets": ["registry"]},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "sharedMemory": "8Gi",
    "env": {"HF_HUB_OFFLINE": True},
}
ONE_POD: Final[dict[str, Any]] = {
    "caches": {"accessMode": "ReadWriteOnce"},
    "updateStrategy": {"maxUnavailable": 1, "maxSurge": 0},
}
KV_PEERS: Final[dict[str, Any]] = {"settings": {"kv_offload_memory": "64GiB"}, "kvPeers": {"enabled": True}}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "cpu": ("cpu", {}),
    "gpu": ("gpu", {}),
    "tpu": ("tpu", {}),
    "multi-host-gpu": ("multi-host-gpu", {}),
    "multi-host-tpu": ("multi-host-tpu", {}),
    "ray": ("ray", {}),
    "ray-settings": ("ray", RAY),
    "everything": ("gpu", EVERYTHING),
    "gateway": ("gpu", {"gateway": {"enabled": True}}),
    "one-pod": ("gpu", ONE_POD),
    "kv-peers": ("gpu", KV_PEERS),
    "ray-kv-peers": ("ray", KV_PEERS),
    "multi-host-gateway": ("multi-host-gpu", GATEWAY),
}
"""The file of values and further values, by the fixture's name."""


def main() -> None:
    """Write all fixtures."""
    FIXTURES.mkdir(exist_ok=True)
    for case in CASES:
        fixture = {"chart": digest(), "documents": render(*CASES[case])}
        (FIXTURES / f"{case}.json").write_text(json.dumps(fixture, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def can_render() -> bool:
    """Return whether Helm, or its library, is installed."""
    return shutil.which("helm") is not None or importlib.util.find_spec("helm_python") is not None


def digest() -> str:
    """Return a hash of all files of the chart, but that of the settings' names, which makes no document."""
    files = sorted(path for path in CHART.rglob("*") if path.is_file() and path != SETTINGS)
    hashed = hashlib.sha256()
    for path in files:
        hashed.update(f"{path.relative_to(CHART)}\n{path.read_text('utf-8')}\n".encode())
    return hashed.hexdigest()


def render(values: str, further: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the documents that the chart makes, by kind and name. Raises an error that Helm found."""
    file = CHART / f"values-{values}.yaml"
    texts = _by_command(file, further) if shutil.which("helm") else _by_library(file, further)
    documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
    return sorted(documents, key=lambda document: (document["kind"], document["metadata"]["name"]))


def _by_command(file: Path, further: dict[str, Any]) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as more:
        json.dump(further, more)
        more.flush()
        command = ["helm", "template", RELEASE, str(CHART), "--values", str(file), "--values", more.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return [done.stdout]


def _by_library(file: Path, further: dict[str, Any]) -> list[str]:
    import helm_python

    values = merged(yaml.safe_load(file.read_text("utf-8")), further)
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=RELEASE, namespace="default")
    return [text for path, text in rendered.items() if path.endswith(".yaml")]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return values with others over them, as Helm merges files of values."""
    result = dict(one)
    for key, value in other.items():
        result[key] = merged(result[key], value) if isinstance(result.get(key), dict) else value
    return result


if __name__ == "__main__":
    main()
