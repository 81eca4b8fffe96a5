"""The installed package works outside the checkout, after `pip install .`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.documented_commands import shown_in
from tests.e2e.http_server import await_ready, launched
from tests.e2e.real_server import COLD_START_TIMEOUT_S, FEW_PROGRAMS, model

ROOT = Path(__file__).parents[2]
PACKAGES = {"jaxserve": ROOT / "jaxserve", "jaxserve_kernels": ROOT / "kernels" / "jaxserve_kernels"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxserve", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    tuning = source / "kernels" / "jaxserve_kernels" / "example_op" / "tuning"
    tuning.mkdir(parents=True)
    (tuning.parent / "__init__.py").touch()
    (tuning / "device.json").write_text("{}")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module_of_both_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"{name}/{path.relative_to(root)}" for name, root in PACKAGES.items() for path in root.rglob("*.py")}
    expected |= {f"jaxserve/{path.relative_to(ROOT / 'jaxserve')}" for path in (ROOT / "jaxserve/http/ui").iterdir()}
    expected |= {"jaxserve/py.typed", "jaxserve_kernels/py.typed", "jaxserve_kernels/example_op/tuning/device.json"}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel installed; what it depends on is borrowed, nothing is downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    paths = {kind: Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    site = folder / paths["purelib"].relative_to(sys.prefix)
    # Their own .pth files are not read that way, so the checkout does not come along.
    (site / "borrowed.pth").write_text("\n".join(str(path) for path in paths.values()))
    install = ["--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*PIP, *install, "--force-reinstall", str(wheel)], check=True)
    return folder


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of the environment, from `folder`."""
    program = str(environment / "bin" / command[0])
    variables = {**os.environ, "PYTHONPATH": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([program, *command[1:]], cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.slow
def test_installed_wheel_runs_from_another_folder(environment: Path, tmp_path: Path) -> None:
    script = "import jaxserve, jaxserve_kernels; print(jaxserve.__file__, jaxserve_kernels.__file__, sep='\\n')"
    done = run(environment, tmp_path, "python", "-c", script)
    assert [Path(line).is_relative_to(environment) for line in done.stdout.split()] == [True, True]
    assert run(environment, tmp_path, "jaxserve", "version").stdout.startswith("jaxserve 0.")


@pytest.mark.slow
def test_installed_wheel_says_in_one_line_why_it_cannot_start(environment: Path, tmp_path: Path) -> None:
    done = run(environment, tmp_path, "jaxserve", "serve", "./nothing.gguf", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("jaxserve: error: model './nothing.gguf': ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_installed_wheel_serves_a_model_from_another_folder(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model().path)
    words = ["serve", "./model", "--port", "0", "--compile-cache", "./programs", *FEW_PROGRAMS]
    with launched([str(environment / "bin" / "jaxserve"), *words], tmp_path, python_path="") as server:
        await_ready(server, COLD_START_TIMEOUT_S)
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
        status, _, reply = server.request("POST", "/v1/completions", body)
        assert (status, json.loads(reply)["usage"]["completion_tokens"]) == (200, 5)
        assert len(list((tmp_path / "programs").iterdir())) == 6
        assert server.stop() == 0


@pytest.mark.slow
def test_extras_that_the_handbook_installs_exist_and_have_what_tests_use() -> None:
    """Without an index: what an extra needs is in this environment, where tests/e2e/test_tracing.py uses it."""
    (words,) = (
        shlex.split(line) for line in shown_in(ROOT / "docs" / "operating.md") if line.startswith("pip install")
    )
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--report", "-"]
    done = subprocess.run([*PIP, *words[1:], *options], cwd=ROOT, capture_output=True, text=True, check=True)
    (installed,) = json.loads(done.stdout)["install"]
    assert installed["requested_extras"] == ["otel"]
    assert set(installed["requested_extras"]) <= set(installed["metadata"]["provides_extra"]), "pip only warns"
