"""kubectl and Helm run the commands of the handbook, of the manifests and of the chart's notes, before an API without nodes."""

from __future__ import annotations

import base64
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documented_commands import PAGES, ROOT, commands_of, words_of
from tests.tools.render_chart import CHART, merged
from tests.unit.docker.kubernetes_api import LOG, Cluster, running_cluster
from tests.unit.docker.manifests import FILES, documents

SHOWN = [words for page in PAGES for words in commands_of(page, "kubectl")]
ON_PODS = [words for words in SHOWN if words[1] not in ("create", "apply")]
NOTES = (CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8")
FILLED_IN = {
    ".Release.Namespace": "default",
    ".Release.Name": "jaxserve",
    "$timeout": "1500s",
    ".Values.service.port": "8000",
    'include "jaxserve.leaderWorkerSet" .': "jaxserve-hosts",
}
IN_NOTES = [words_of(line) for line in re.findall(r"kubectl .*", re.sub(r"{{ (.*?) }}", lambda found: FILLED_IN.get(found[1], ""), NOTES))]  # fmt: skip
pytestmark = pytest.mark.slow
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """Return a function that runs kubectl before a cluster that has the manifests and their secret."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine")
    folder = tmp_path_factory.mktemp("kubectl")
    (folder / "config").write_text(cluster.kubeconfig)
    environment = os.environ | {"KUBECONFIG": str(folder / "config"), "KUBECACHEDIR": str(folder / "cache")}

    def run(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        assert words[0] == "kubectl"
        return subprocess.run(
            words, env=environment, input=text, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )

    install(cluster)
    return run


def install(cluster: Cluster) -> None:
    """Make the cluster's documents those of three manifests, which have different kinds of pods."""
    cluster.documents = {key: document for key, document in cluster.documents.items() if key[0] == "nodes"}
    for name in ("multi-host-gpu", "rayservice", "gpu"):
        for document in documents(ROOT / "docker" / "kubernetes" / f"{name}.yaml"):
            cluster.keep(document)


def applied_by(text: str) -> list[str]:
    """Return the command that a manifest's comment shows."""
    comment = " ".join(re.findall(r"^# ?(.*)$", text, re.M))
    (command,) = re.findall(r"kubectl apply --filename \S+\.yaml", comment)
    return words_of(command)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_command_in_a_manifest_makes_its_documents(kubectl: Kubectl, cluster: Cluster, file: Path) -> None:
    nodes = cluster.documents["nodes", "node"]
    cluster.documents.clear()
    done = kubectl(*applied_by(file.read_text("utf-8")))
    assert done.returncode == 0, done.stderr
    wanted = sorted((document["kind"], document["metadata"]["name"]) for document in documents(file))
    made = sorted((document["kind"], name) for (kind, name), document in cluster.documents.items() if kind != "pods")
    assert made == wanted
    cluster.documents["nodes", "node"] = nodes
    install(cluster)


def test_a_field_that_does_not_exist_is_refused(kubectl: Kubectl) -> None:
    text = (ROOT / "docker" / "kubernetes" / "gpu.yaml").read_text("utf-8")
    done = kubectl("kubectl", "apply", "--filename", "-", text=text.replace("readinessProbe:", "readyProbe:"))
    assert done.returncode != 0 and "readyProbe" in done.stderr


def test_the_secret_has_the_keys_that_pods_read(kubectl: Kubectl, cluster: Cluster) -> None:
    shown = [words for words in SHOWN if words[1] == "create"]
    assert shown
    for words in shown:
        cluster.documents.pop(("secrets", "jaxserve"), None)
        done = kubectl(*(word.replace("...", "value") for word in words))
        assert done.returncode == 0, done.stderr
        secret = cluster.documents["secrets", "jaxserve"]["data"]
        assert {"api-key", "hf-token"} <= set(secret)
        assert set(secret.values()) == {base64.b64encode(b"value").decode()}


@pytest.mark.parametrize("words", ON_PODS, ids=" ".join)
def test_commands_of_the_pages_reach_the_pods(kubectl: Kubectl, cluster: Cluster, words: list[str]) -> None:
    done = kubectl(*words)
    assert done.returncode == 0, done.stderr
    if words[1:] == ["describe", "nodes"]:
        assert "nvidia.com/gpu:" in done.stdout.partition("Allocatable:")[2]
    if words[1] == "logs":
        assert done.stdout == LOG
    if words[1] == "exec":
        assert done.stdout.split() == words[words.index("--") + 1 :]
    if "--selector" in words:
        assert "jaxserve-0" in done.stdout
    if words[1] == "delete":
        assert not cluster.named("PersistentVolumeClaim")
        install(cluster)


def test_the_restart_of_a_rollout_replaces_the_pods(kubectl: Kubectl, cluster: Cluster) -> None:
    (words,) = (words for words in SHOWN if words[1:3] == ["rollout", "restart"])
    before = cluster.documents["deployments", "jaxserve"]["spec"]["template"]["metadata"]
    kubectl(*words)
    after = cluster.documents["deployments", "jaxserve"]["spec"]["template"]["metadata"]
    assert after["labels"] == before["labels"]
    assert "kubectl.kubernetes.io/restartedAt" in after["annotations"]


@pytest.mark.parametrize("words", IN_NOTES, ids=" ".join)
def test_commands_of_the_notes_find_what_the_chart_makes(kubectl: Kubectl, cluster: Cluster, words: list[str]) -> None:
    if "port-forward" not in words:
        done = kubectl(*words)
        assert done.returncode == 0, done.stderr
        return
    if any("serve-svc" in word for word in words):
        pytest.skip("KubeRay makes this Service")
    done = kubectl(*words)
    assert "no portforward here" in done.stderr, "the API has no nodes"
    method, path = cluster.requests[-1]
    assert (method, path) == ("POST", "/api/v1/namespaces/default/pods/jaxserve-0/portforward")


def test_commands_are_found() -> None:
    assert len(ON_PODS) >= 10
    assert len(IN_NOTES) == 5
    assert {words[1] if words[1][0] != "-" else words[3] for words in IN_NOTES} == {"wait", "rollout", "port-forward"}


@pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="no package helm-python-sdk: Helm's own library"
)
def test_helm_installs_upgrades_and_goes_back_and_keeps_the_claims() -> None:
    import helm_python

    page = ROOT / "docs" / "kubernetes.md"
    shown = commands_of(page, "helm")
    (install, *others), (upgrade,), (rollback,) = ([words for words in shown if words[1] == name] for name in ("install", "upgrade", "rollback"))  # fmt: skip
    with running_cluster() as cluster, helm_python.Config(kubeconfig_content=cluster.kubeconfig) as helm:

        def image() -> str:
            pod = cluster.documents["deployments", "jaxserve"]["spec"]["template"]["spec"]
            found: str = pod["containers"][0]["image"]
            return found

        helm.install(str(ROOT / install[3]), install[2], given(install))
        assert image() == "REGISTRY/jaxserve:cuda-1"
        helm.upgrade(str(ROOT / upgrade[3]), upgrade[2], given(upgrade))
        assert image() == "REGISTRY/jaxserve:cuda-2"
        helm.rollback(rollback[2])
        assert image() == "REGISTRY/jaxserve:cuda-1"
        helm.uninstall("jaxserve")
        claims = cluster.named("PersistentVolumeClaim")
        assert claims == ["jaxserve-models", "jaxserve-programs"]
        assert {kind for kind, _ in cluster.documents} == {"persistentvolumeclaims", "pods", "nodes"}
        helm.install(str(ROOT / install[3]), install[2], given(install))
        assert cluster.named("Deployment") == ["jaxserve"]
    assert others
    for words in others:
        with running_cluster() as cluster, helm_python.Config(kubeconfig_content=cluster.kubeconfig) as helm:
            helm.install(str(ROOT / words[3]), words[2], given(words))
            assert cluster.named("Deployment") == ["jaxserve"]


def given(words: list[str]) -> dict[str, Any]:
    """Return the values of a command of Helm."""
    result: dict[str, Any] = {}
    for flag, text in itertools.pairwise(words):
        if flag == "--values":
            result = merged(result, yaml.safe_load((ROOT / text).read_text("utf-8")))
        elif flag == "--set":
            for pair in shlex.split(text)[0].split(","):
                path, _, value = pair.partition("=")
                one: Any = yaml.safe_load(value)
                for name in reversed(path.split(".")):
                    one = {name: one}
                result = merged(result, one)
    return result
