"""Commands of docker, kubectl, helm, systemctl and numactl that the pages show: their flags exist, and what they name is in the repository."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import yaml

from jaxserve.config import ServerConfig
from jaxserve.ray.settings import RaySettings
from jaxserve.runtime.settings import BY_NAME, SETTINGS
from tests.documented_commands import PAGES, ROOT, commands_of
from tests.unit.docker.manifests import FILES, documents, pods
from tests.unit.docker.test_dashboard import SERIES
from tests.unit.docker.test_docker_files import COMPOSE, DOCKERFILE, stages
from tests.unit.docker.test_drain_time import DEFAULT_S, END_S
from tests.unit.docker.test_helm import CHART, values

HANDBOOK = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
PROGRAMS: Final = ("docker", "kubectl", "helm", "systemctl", "numactl")
VOLUMES: Final = ("/cache/hf", "/cache/programs")


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand of a program, with the arguments that the pages use."""

    flags: tuple[str, ...] = ()
    """Flags with a value, which may be given several times."""
    switches: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Arguments without a flag."""

    def read(self, words: list[str]) -> dict[str, Any]:
        """Return the arguments by name. Raises ValueError."""
        parser = Parser(allow_abbrev=False, add_help=False)
        for name in self.names:
            parser.add_argument(name)
        for flag in self.flags:
            parser.add_argument(flag, action="append", default=[])
        for switch in self.switches:
            parser.add_argument(switch, action="store_true")
        return vars(parser.parse_args(words))


TABLE: Final = {
    "docker run": Subcommand(
        ("--publish", "--env", "--volume", "--gpus", "--network", "--user", "--ulimit", "--stop-timeout"),
        ("--privileged",),
        ("image",),
    ),
    "docker build": Subcommand(("--file", "--target", "--tag"), names=("context",)),
    "docker compose": Subcommand(("--file", "--profile"), names=("action",)),
    "docker push": Subcommand(names=("image",)),
    "kubectl create secret generic": Subcommand(("--from-literal",), names=("name",)),
    "kubectl apply": Subcommand(("--filename",)),
    "kubectl get pods": Subcommand(("--selector", "--output")),
    "kubectl describe pods": Subcommand(("--selector",)),
    "kubectl describe nodes": Subcommand(),
    "kubectl logs": Subcommand(switches=("--follow", "--previous"), names=("object",)),
    "kubectl exec": Subcommand(names=("object",)),
    "kubectl rollout status": Subcommand(("--timeout",), names=("object",)),
    "kubectl rollout restart": Subcommand(names=("object",)),
    "kubectl delete persistentvolumeclaims": Subcommand(names=("models", "programs")),
    "helm install": Subcommand(("--values", "--set"), names=("release", "chart")),
    "helm upgrade": Subcommand(("--values", "--set"), names=("release", "chart")),
    "helm rollback": Subcommand(names=("release",)),
    "helm uninstall": Subcommand(names=("release",)),
    "systemctl enable": Subcommand(switches=("--now",), names=("unit",)),
    "systemctl reload": Subcommand(names=("unit",)),
    "numactl": Subcommand(("--cpunodebind", "--membind")),
}


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the subcommand and its arguments: those before the program that it starts. Raises ValueError."""
    line = " ".join(words)
    name = next((name for name in TABLE if f"{line} ".startswith(f"{name} ")), None)
    if name is None:
        raise ValueError(f"no subcommand of the table: {line}")
    rest = words[len(name.split()) :]
    starts = {"numactl": "jaxserve", "kubectl exec": "--"}.get(name)
    return name, TABLE[name].read(rest[: rest.index(starts)] if starts else rest)


def names_only(words: list[str]) -> bool:
    """Return True for a mention of a subcommand that does nothing without arguments."""
    subcommand = TABLE.get(" ".join(words))
    return subcommand is not None and bool(subcommand.names)


SHOWN = [words for page in PAGES for words in commands_of(page, *PROGRAMS) if not names_only(words)]


def shown(name: str) -> list[dict[str, Any]]:
    """Return the arguments of all uses of a subcommand."""
    found = [arguments for each, arguments in map(parsed, SHOWN) if each == name]
    assert found, f"no page shows `{name}`"
    return found


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_command_has_flags_of_the_table(words: list[str]) -> None:
    parsed(words)


@pytest.mark.parametrize(
    "line", ["docker run --pubish 1:1 jaxserve:cpu", "kubectl apply -x", "docker run", "helm list"]
)
def test_a_wrong_flag_or_word_would_be_seen(line: str) -> None:
    with pytest.raises(ValueError, match=r"arguments|table"):
        parsed(line.split())


@pytest.mark.parametrize("name", TABLE)
def test_the_pages_need_each_row_of_the_table(name: str) -> None:
    assert shown(name)


@pytest.mark.parametrize("name", [name for name in TABLE if name != "docker compose"])  # a plugin of docker
def test_the_program_has_the_flags_of_the_table(name: str) -> None:
    program, *words = name.split()
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    done = subprocess.run([program, *words, "--help"], capture_output=True, text=True, check=False)
    flags = set(re.findall(r"--[a-z-]+", done.stdout + done.stderr))
    assert {*TABLE[name].flags, *TABLE[name].switches} <= flags


def test_containers_run_images_of_the_dockerfile_with_its_volumes_and_port() -> None:
    for command in shown("docker run"):
        name, _, target = command["image"].partition(":")
        assert name == "jaxserve" and target in stages()
        assert {entry.partition("=")[0] for entry in command["env"]} <= {setting.variable for setting in SETTINGS}
        assert {volume.partition(":")[2] for volume in command["volume"]} <= set(VOLUMES)
        assert all(published.endswith(f":{ServerConfig().port}") for published in command["publish"])
        assert bool(command["publish"]) != (command["network"] == ["host"]), "clients reach it"
        (stop_s,) = command["stop_timeout"]
        assert int(stop_s) >= DEFAULT_S + END_S, "Docker kills after 10 s otherwise, while requests run"
    assert f"VOLUME {list(VOLUMES)}".replace("'", '"') in DOCKERFILE


def test_images_are_built_from_files_and_stages_that_exist() -> None:
    for command in shown("docker build"):
        assert all((ROOT / file).is_file() for file in command["file"])
        (target,) = command["target"]
        assert target in stages()
        (tag,) = command["tag"]
        assert tag == f"jaxserve:{target}" or tag.startswith(f"REGISTRY/jaxserve:{target}-")
        assert command["context"] == "."
    assert {command["image"] for name in ("docker run", "docker push") for command in shown(name)} <= {
        tag for command in shown("docker build") for tag in command["tag"]
    }
    arguments = re.findall(r"--build-arg (\w+)=", HANDBOOK)
    assert arguments and all(f"\nARG {name}=" in DOCKERFILE for name in arguments)
    profiles = {name for service in yaml.safe_load(COMPOSE.read_text("utf-8"))["services"].values() for name in service["profiles"]}  # fmt: skip
    for command in shown("docker compose"):
        assert [ROOT / file for file in command["file"]] == [COMPOSE]
        assert set(command["profile"]) <= profiles


def test_the_image_with_compiled_programs_serves_the_model_that_they_are_of() -> None:
    page = (ROOT / "docs" / "startup.md").read_text(encoding="utf-8")
    (image,) = re.findall(r"^```dockerfile\n(.*?)^```$", page, re.M | re.S)
    ((model, folder),) = re.findall(r"^RUN jaxserve compile (\S+) .*--output (\S+)$", image, re.M)
    variables = dict(re.findall(r"(JAXSERVE_\w+)=(\S+)", image))
    assert (variables["JAXSERVE_MODEL"], variables["JAXSERVE_COMPILE_CACHE"]) == (model, folder)


def test_the_secret_is_the_one_that_pods_read() -> None:
    entries = [entry["valueFrom"]["secretKeyRef"] for pod in pods() for container in pod.spec["containers"] for entry in container.get("env", []) if "valueFrom" in entry]  # fmt: skip
    read = {(entry["name"], entry["key"]) for entry in entries}
    for command in shown("kubectl create secret generic"):
        assert {(command["name"], literal.partition("=")[0]) for literal in command["from_literal"]} == read
    assert {name for name, _ in read} == {values("values.yaml")["secretName"]}


def value_exists(path: str) -> bool:
    """Return True if the chart has this value, or the server or the application on Ray this setting."""
    head, _, setting = path.partition("settings.")
    if not head and setting:
        return setting in BY_NAME or hasattr(RaySettings(), setting)
    found: Any = values("values.yaml")
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


def test_the_chart_is_installed_from_files_and_with_values_that_exist() -> None:
    for command in [*shown("helm install"), *shown("helm upgrade")]:
        assert ROOT / command["chart"] == CHART
        assert all((ROOT / file).is_file() and (ROOT / file).parent == CHART for file in command["values"])
        given = dict(pair.split("=") for text in command["set"] for pair in text.split(","))
        assert all(map(value_exists, given))
        if command["release"] != "RELEASE" and "image.tag" in given:
            (target,) = (values(Path(file).name)["image"]["tag"] for file in command["values"])
            assert given["image.tag"].startswith(f"{target}-")


def test_values_of_the_chart_that_its_page_names_exist() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    rows = page.partition("| value | what it does |\n")[2].partition("\n\n")[0].splitlines()[1:]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    named |= set(
        re.findall(r"`((?:settings|ray|gateway|autoscaling|networkPolicy|monitoring|service|startup)\.[\w.]+)`", page)
    )
    named |= set(re.findall(r"--set ([\w.]+)=", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not value_exists(name)] == []
    assert not value_exists("ray.maxWorkers") and not value_exists("settings.max_workers")


def test_files_that_pages_and_comments_name_exist() -> None:
    found: dict[str, str] = {}
    for file in [*PAGES, *sorted((ROOT / "docker").rglob("*.yaml")), ROOT / "docker" / "Dockerfile"]:
        text = file.read_text(encoding="utf-8")
        texts = re.findall(r"^\s*#.*$", text, re.M) if file.suffix != ".md" else [" ".join(words) for words in commands_of(file, *PROGRAMS)]  # fmt: skip
        for path in re.findall(r"\b(?:docker|docs|configs)/[\w./-]*\w", "\n".join(texts)):
            found[path] = file.name
    assert len(found) > 10
    assert {path: file for path, file in found.items() if not (ROOT / path).exists()} == {}


def test_objects_of_kubernetes_that_the_handbook_names_are_in_the_manifests() -> None:
    names = {document["metadata"]["name"] for file in FILES for document in documents(file)}
    kinds = {document["kind"] for file in FILES for document in documents(file)}
    text = HANDBOOK.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(jaxserve-[a-z-]+)`", text))
    assert named and named <= names
    assert {kind for kind in ("Deployment", "Service", "InferencePool", "LeaderWorkerSet") if kind in text} <= kinds
    table = re.findall(r"\[([\w-]+\.yaml)\]\(", text)
    assert sorted(set(table)) == [file.name for file in FILES], "every manifest has a row"


def test_metrics_that_pages_name_exist() -> None:
    table = HANDBOOK.partition("\n| metric | tells |\n")[2].partition("\n\n")[0].splitlines()[1:]
    named = {f"jaxserve:{name}" for row in table for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert len(named) > 20
    for page in PAGES:
        named |= set(re.findall(r"jaxserve:[a-z_]+[a-z]", page.read_text(encoding="utf-8")))
    known = SERIES.keys() | {re.sub(r"_(total|bucket)$", "", name) for name in SERIES}
    images = {f"jaxserve:{stage}" for stage in stages()}
    assert sorted(named - known - images) == []
    assert "jaxserve:num_requests_waiting_long" not in known


UNIT = re.search(r"^```ini\n(\[Service\]\n.*?)^```$", HANDBOOK, re.M | re.S)


def test_the_unit_of_systemd_has_what_the_command_to_reload_it_needs() -> None:
    assert UNIT is not None
    keys = dict(line.split("=", 1) for line in UNIT[1].splitlines() if "=" in line)
    assert "\nsystemctl reload jaxserve\n" in HANDBOOK
    assert " upgrade --detach " in keys["ExecReload"], "the server reports the process that has taken over"
    assert (keys["Type"], keys["NotifyAccess"]) == ("notify", "all")
    assert keys["KillMode"] == "mixed", "SIGTERM to the first process only"
    assert keys["ExecStart"].replace(" serve ", " upgrade --detach ") == keys["ExecReload"], "the same options"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize(("change", "complaint"), [(("", ""), ""), (("TimeoutStopSec", "TimeoutStopSecs"), "TimeoutStopSecs"), (("on-failure", "on-failures"), "on-failures")])  # fmt: skip
def test_systemd_accepts_the_unit(change: tuple[str, str], complaint: str, tmp_path: Path) -> None:
    assert UNIT is not None
    unit = tmp_path / "jaxserve-of-a-test.service"
    unit.write_text(UNIT[1].replace("/opt/jaxserve/bin/jaxserve", sys.executable).replace(*change), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)  # fmt: skip
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert bool(said) == bool(complaint), done.stderr
    assert complaint in done.stderr
