"""The Dockerfile, the compose file and all YAML pass their linters. No engine is needed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
TOOLS = Path(sys.executable).parent
COMPOSE = ROOT / "docker" / "compose.yaml"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def run_tool(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    tool = TOOLS / words[0]
    assert tool.exists(), f"{tool} is missing: `make install` brings it"
    return subprocess.run(
        [str(tool), *words[1:]],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_dockerfile_passes_hadolint() -> None:
    done = run_tool("hadolint", "--no-color", "docker/Dockerfile")
    assert done.returncode == 0, done.stdout


def test_yaml_files_pass_yamllint() -> None:
    done = run_tool("yamllint", "--strict", "docker", "configs")
    assert done.returncode == 0, done.stdout


def test_new_digests_are_those_of_the_bytes_that_the_registry_has(tmp_path: Path) -> None:
    skopeo = tmp_path / "skopeo"
    skopeo.write_text('#!/bin/sh\n[ "$1 $2" = "inspect --raw" ] && printf "manifest of %s" "$3"\n')
    skopeo.chmod(0o755)
    file = tmp_path / "Dockerfile"
    shutil.copy(ROOT / "docker" / "Dockerfile", file)
    command = [str(ROOT / "docker" / "base_digests.sh"), str(file)]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first.count(" is now sha256:") == 2
    assert second.count("is up to date") == 2
    image = re.findall(r"^ARG BASE_IMAGE=(\S+)@", DOCKERFILE, flags=re.MULTILINE)[0]
    digest = hashlib.sha256(f"manifest of docker://docker.io/library/{image}".encode()).hexdigest()
    assert f"ARG BASE_IMAGE={image}@sha256:{digest}\n" in file.read_text("utf-8")


def test_monitoring_scrapes_the_server_of_either_profile_and_mounts_files_that_exist() -> None:
    document = yaml.safe_load(COMPOSE.read_text("utf-8"))
    services = document["services"]
    (job,) = yaml.safe_load((ROOT / "docker/monitoring/prometheus.yml").read_text("utf-8"))["scrape_configs"]
    ((host, port),) = [target.split(":") for target in job["static_configs"][0]["targets"]]
    for name in ("cpu", "gpu"):
        assert host in services[name]["networks"]["default"]["aliases"]
        assert services[name]["ports"] == [f"${{ADDRESS:-127.0.0.1}}:${{PORT:-8000}}:{port}"], (
            "without a key for this host"
        )
    (key,) = services["prometheus"]["configs"]
    assert job["authorization"]["credentials_file"] == key["target"]
    mounted = [
        volume.split(":")[0]
        for name in ("prometheus", "alertmanager", "grafana")
        for volume in services[name]["volumes"]
    ]
    files = [source for source in mounted if source.startswith(".")]
    assert len(files) == 6
    assert all((COMPOSE.parent / source).is_file() for source in files)
    assert all(
        port.startswith("127.0.0.1:")
        for name in ("prometheus", "alertmanager", "grafana")
        for port in services[name]["ports"]
    )


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_profile_is_valid_and_stops_gently(profile: str) -> None:
    done = run_tool("docker-compose", "-f", "docker/compose.yaml", "--profile", profile, "config", PORT="8123")
    assert done.returncode == 0, done.stderr
    assert 'published: "8123"' in done.stdout
    assert "host_ip: 127.0.0.1" in done.stdout
    assert "stop_grace_period: 1m0s" in done.stdout
    assert "target: /cache/programs" in done.stdout
    other = {"cpu": "gpu", "gpu": "cpu"}[profile]
    assert f"  {other}:" not in done.stdout


def test_a_typing_error_in_the_compose_file_would_be_seen(tmp_path: Path) -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    broken = tmp_path / "compose.yaml"
    broken.write_text(text.replace("stop_grace_period", "stop_grace_perid"), encoding="utf-8")
    assert run_tool("docker-compose", "-f", str(broken), "--profile", "cpu", "config", "-q").returncode != 0


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
def test_every_target_installs_its_hashed_lock_and_runs_unprivileged(target: str) -> None:
    assert (ROOT / "requirements" / f"{target}.lock").exists()
    install = f"--require-hashes --no-deps --no-compile --requirement requirements/{target}.lock && sh /trim.sh"
    assert install in stages()[f"build-{target}"]
    assert f"COPY --from=build-{target} /opt/venv /opt/venv\n" in stages()[target]
    assert stages()[target].rstrip().endswith("USER 10001:0")


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
def test_the_program_is_a_layer_after_its_dependencies(target: str) -> None:
    """A new version of it does not bring several GB of them again."""
    copies = re.findall(r"^COPY .*$", stages()[target], flags=re.MULTILINE)
    assert copies[-1].endswith(" /program/opt/venv /opt/venv")
    assert "jaxserve" not in stages()[f"build-{target}"]


@pytest.mark.parametrize(("target", "platforms"), [("cuda", "cuda,cpu"), ("tpu", "tpu,cpu")])
def test_images_for_accelerators_do_not_compute_on_the_cpu_unasked(target: str, platforms: str) -> None:
    assert f"JAX_PLATFORMS={platforms}\n" in stages()[target]
    assert "JAX_PLATFORMS" not in stages()["cpu"]


def test_the_cpu_image_has_kernels_for_many_processors_and_no_compiler() -> None:
    """It runs on other processors than it is built on."""
    assert "FROM ${COMPILER_IMAGE} AS builder\n" in DOCKERFILE
    assert "FROM ${BASE_IMAGE} AS runtime\n" in DOCKERFILE
    assert "python -m jaxserve_kernels.native.build --portable" in stages()["native"]
    assert "COPY --from=native /program/opt/venv /opt/venv\n" in stages()["cpu"]
    base, compiler = re.findall(r"^ARG \w+_IMAGE=python:([^@]+)@sha256:[0-9a-f]{64}$", DOCKERFILE, flags=re.MULTILINE)
    assert base.replace("slim-", "") == compiler, "the same Python and C library"


def test_every_image_that_is_not_built_here_has_a_digest() -> None:
    images = [service["image"] for service in yaml.safe_load(COMPOSE.read_text("utf-8"))["services"].values()]
    foreign = [image for image in images if not image.startswith("jaxserve:")]
    assert len(foreign) == 3
    assert all(re.fullmatch(r"[\w./-]+:v?[\d.]+@sha256:[0-9a-f]{64}", image) for image in foreign)
    assert not re.match(r"#\s*syntax\s*=", DOCKERFILE), "a syntax directive makes BuildKit fetch one more image"


def test_the_image_that_runs_has_a_health_check_and_cache_volumes() -> None:
    runtime = stages()["runtime"]
    assert 'CMD ["jaxserve", "health", "--live"]' in runtime, "what ends an unhealthy container must not end a start"
    assert "STOPSIGNAL SIGTERM" in runtime
    (timeout_s,) = re.findall(r"^HEALTHCHECK .*--timeout=(\d+)s ", runtime, flags=re.MULTILINE)
    assert int(timeout_s) >= 30, "a process starts for each check, slowly beside a compiler"
    services = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
    assert {services[name]["healthcheck"]["timeout"] for name in ("cpu", "gpu")} == {f"{timeout_s}s"}
    assert 'VOLUME ["/cache/hf", "/cache/programs"]' in runtime


def test_compiled_programs_go_to_a_folder_that_the_server_makes_for_itself() -> None:
    """The volume is group-writable, and the program cache refuses such a folder."""
    assert "JAXSERVE_COMPILE_CACHE=/cache/programs/private" in stages()["runtime"]
    assert "/cache/programs/private" not in stages()["runtime"].split("ENV ")[0]


def test_flight_records_go_to_a_volume() -> None:
    """Pods have a root file system that they cannot write, and with it a home that they cannot write."""
    folder = re.findall(r"JAXSERVE_FLIGHT_RECORDER_DIR=(\S+)", stages()["runtime"])
    volumes = json.loads(stages()["runtime"].split("VOLUME ")[1].splitlines()[0])
    assert len(folder) == 1
    assert any(folder[0].startswith(f"{volume}/") for volume in volumes)


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!").removesuffix("/*.lock") for line in lines if line.startswith("!")}
    copied = {
        word.split("/")[0]
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE)
        for word in line.split()
    }
    assert copied <= kept
