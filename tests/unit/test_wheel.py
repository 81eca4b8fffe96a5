"""What `pip install .` puts into an environment, tried from outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    expected |= {"jaxserve/py.typed", "jaxserve_kernels/py.typed", "jaxserve_kernels/example_op/tuning/device.json"}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)


@pytest.mark.slow
def test_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    script = "import jaxserve, jaxserve_kernels; print(jaxserve.__file__, jaxserve_kernels.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert all(Path(line).is_relative_to(site) for line in done.stdout.split())
    help_text = subprocess.run(
        [str(site / "bin" / "jaxserve"), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage: jaxserve COMMAND" in help_text.stdout
