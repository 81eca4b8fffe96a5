"""Tests of `make container-check` without buildah: its targets, what it waits for, and what docker/trim.sh removes."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.executor import device
from jaxserve.tools.planning.devices import ACCELERATORS
from tests.unit.docker.test_docker_files import ROOT, stages

KEPT = (
    "nvidia/cu13/lib/libcublasLt.so.13",
    "nvidia/cu13/lib/libcusolver.so.12",
    "nvidia/cu13/lib/libnvJitLink.so.13",
    "nvidia/cu13/bin/ptxas",
    "nvidia/cu13/bin/nvlink",
    "nvidia/cu13/nvvm/libdevice/libdevice.10.bc",
    "nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9",
    "nvidia/nccl/lib/libnccl.so.2",
    "nvidia/nvshmem/lib/libnvshmem_host.so.3",
    "jaxlib/include/xla/ffi/api/ffi.h",
    "jaxserve_kernels/native/csrc/kernels.cc",
)
REMOVED = (
    "nvidia/cu13/lib/libcusolverMg.so.12",
    "nvidia/cu13/lib/libcufftw.so.12",
    "nvidia/cu13/lib/libnvvm.so.4",
    "nvidia/cu13/lib/libcudart_static.a",
    "nvidia/cu13/bin/nvcc",
    "nvidia/cu13/bin/crt/link.stub",
    "nvidia/cu13/nvvm/bin/cicc",
    "nvidia/cu13/include/cuda.h",
    "nvidia/cu13/cccl/include/cub/cub.cuh",
    "nvidia/cudnn/include/cudnn.h",
    "nvidia/nccl/lib/libnccl_device.bc",
    "nvidia/nccl/lib/libnccl_device.ltoir",
    "nvidia/nvshmem/lib/libnvshmem_device_sm_90.bc",
    "numpy/tests/test_numpy.py",
)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return docker/check.py, as `python docker/check.py` imports it."""
    monkeypatch.syspath_prepend(ROOT / "docker")
    import check

    return check


def test_every_target_of_the_dockerfile_is_checked(check: ModuleType) -> None:
    images = {name for name, stage in stages().items() if stage.rstrip().endswith("USER 10001:0")}
    assert set(check.TARGETS) == images
    for name, target in check.TARGETS.items():
        ast.parse(target.libraries)
        assert (target.device is None) == (name == "cpu")
        assert target.device is None or ACCELERATORS[target.device].platform in (name, "gpu")


def test_the_refusals_are_those_of_the_server(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_has_library", lambda name: False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    for name in ("cuda", "tpu"):
        assert device._unusable(f"{name},cpu", "a reason of jax").startswith(check.TARGETS[name].refusal)


def test_permissions_are_changed_as_kubelet_does(check: ModuleType, tmp_path: Path) -> None:
    private = tmp_path / "programs" / "private"
    private.mkdir(parents=True, mode=0o700)
    (private / "program").write_bytes(b"")
    (private / "program").chmod(0o600)
    check.change_permissions(tmp_path, os.getgid())
    assert stat.S_IMODE(private.stat().st_mode) == 0o2770
    assert stat.S_IMODE((private / "program").stat().st_mode) == 0o660


def test_images_lose_compilers_and_headers_and_keep_what_jax_loads(tmp_path: Path) -> None:
    packages, tools = tmp_path / "site-packages", tmp_path / "bin"
    for name in KEPT + REMOVED:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    tools.mkdir()
    for name, script in {
        "pip": f'echo "$*" >>{tmp_path}/uninstalled',
        "strip": f'shift; echo "$*" >>{tmp_path}/stripped',
        "python": f'[ "$1" = -m ] || echo {packages}',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}
    subprocess.run(["sh", str(ROOT / "docker" / "trim.sh")], env=environment, check=True)
    assert [name for name in KEPT if not (packages / name).exists()] == []
    assert [name for name in REMOVED if (packages / name).exists()] == []
    uninstalled = (tmp_path / "uninstalled").read_text().split()
    assert {"scipy", "setuptools", "pip"} <= set(uninstalled)
    assert not (tmp_path / "stripped").exists(), "NVIDIA's libraries stay as they are"


def test_a_python_is_copied_without_its_tests_and_packages(check: ModuleType, tmp_path: Path) -> None:
    import bases

    prefix, target = tmp_path / "3.12.1", tmp_path / "python"
    library = "lib/python3.12"
    kept = {"bin/python3.12", "lib/libpython3.12.so.1.0", f"{library}/os.py", f"{library}/ensurepip/__init__.py"}
    left_out = {f"{library}/test/test_os.py", f"{library}/site-packages/pip/__init__.py", f"{library}/libpython3.12.a"}
    for name in kept | left_out | {f"{library}/__pycache__/os.cpython-312.pyc", "bin/pip", "include/Python.h"}:
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).touch()
    (prefix / "bin" / "python3").symlink_to("python3.12")
    bases.copy_python(prefix, target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert copied == kept | {"bin/python3"}
    assert (target / "bin" / "python3").is_symlink()
    assert (target / library / "site-packages").is_dir(), "Python warns where it is missing"
