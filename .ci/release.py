"""Builds a release into dist/ and checks it as a user would install it: `make release`.

    dist/jaxserve-VERSION.tar.gz                          sources
    dist/jaxserve-VERSION-py3-none-any.whl                for every machine; CPUs compute with XLA's kernels
    dist/jaxserve-VERSION-py3-none-manylinux_*_x86_64.whl the same with native kernels, one library a processor generation
    dist/jaxserve-VERSION-py3-none-manylinux_*_aarch64.whl likewise for ARM64
    dist/jaxserve-VERSION.cdx.json                        bill of materials (CycloneDX): the pinned packages, with hashes

Kernels for another machine than this one take a cross compiler (aarch64-linux-gnu-g++). The check installs the wheel of this one with its pinned dependencies where no compiler can be found, and lets the default model answer.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
CROSS_COMPILERS: Final = {machine: f"{machine}-linux-gnu-g++" for machine in ("x86_64", "aarch64")}
GLIBC: Final = re.compile(rb"GLIBC_2\.(\d+)")
OLDEST_JAX: Final = re.compile(r'^ *"jax>=([0-9.]+)"', re.M)
HEADING: Final = re.compile(r"^## (\S+)", re.M)
QUESTION: Final = """
from jaxserve import LLM, SamplingParams
with LLM(max_model_len=512, max_num_seqs=1) as llm:
    [result] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    print(result.outputs[0].text)
"""


def main() -> None:
    """Build, describe and check. Raises SystemExit with a reason if anything does not hold."""
    version = the_one_version()
    check_jax()
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = committed_files(Path(folder))
        step("sources and the wheel for every machine")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, source)
        wheel = DIST / f"jaxserve-{version}-py3-none-any.whl"
        step(f"native kernels for {platform.machine()}, up to two minutes")
        native = wheel_with_kernels(wheel, Path(folder), platform.machine())
        for machine, compiler in CROSS_COMPILERS.items():
            if machine != platform.machine() and shutil.which(compiler):
                step(f"native kernels for {machine}, up to two minutes")
                wheel_with_kernels(wheel, Path(folder), machine)
            elif machine != platform.machine():
                step(f"NO WHEEL FOR {machine}: it takes {compiler}")
        step("bill of materials")
        bill = ["--output-reproducible", "--output-file", DIST / f"jaxserve-{version}.cdx.json"]
        run(
            "cyclonedx-py",
            "requirements",
            "--pyproject",
            source / "pyproject.toml",
            *bill,
            source / "requirements/cpu.lock",
        )
        run("twine", "check", "--strict", *DIST.glob("jaxserve-*[lz]"))
        step("a new environment, without a compiler")
        check_installed(native, version, Path(folder))
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:7.2f} MB  {file.relative_to(ROOT)}")


def the_one_version() -> str:
    """The version of the package, which has an entry at the top of the changelog. Raises SystemExit otherwise."""
    tree = ast.parse((ROOT / "jaxserve/__init__.py").read_text("utf-8"))
    assigned = (
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    version = str(ast.literal_eval(next(assigned).value))
    entry = HEADING.search((ROOT / "CHANGELOG.md").read_text("utf-8"))
    if entry is None or entry[1] != version:
        raise SystemExit(
            f"release: CHANGELOG.md begins with {entry and entry[1]}, but jaxserve/__init__.py has {version}"
        )
    return version


def check_jax() -> None:
    """Raise SystemExit unless the installed jax is the oldest supported one: newer versions accept handlers compiled against it."""
    found = importlib.metadata.version("jax")
    oldest = OLDEST_JAX.search((ROOT / "pyproject.toml").read_text("utf-8"))
    if oldest is None or oldest[1] != found:
        raise SystemExit(
            f"release: native kernels are compiled against jax {oldest and oldest[1]}, the oldest supported one, and this is "
            f"{found}: rm -r .venv-release; make PYTHON=python3.11 VENV=.venv-oldest release"
        )


def committed_files(folder: Path) -> Path:
    """A copy of the last commit: nothing that only this checkout has comes along."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    return source


def wheel_with_kernels(wheel: Path, folder: Path, machine: str) -> Path:
    """Write `wheel` with the compiled kernels of every processor generation of a machine beside it; returns the new file."""
    folder = folder / machine
    folder.mkdir()
    run("wheel", "unpack", "--dest", folder, wheel)
    (tree,) = folder.glob("jaxserve-*")
    command = [sys.executable, "-m", "jaxserve_kernels.native.build", "--portable", "--machine", machine]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    libraries = [file.read_bytes() for file in tree.rglob("_built/*.so")]
    packed = folder / "packed"
    packed.mkdir()
    run("wheel", "pack", "--dest-dir", packed, tree)
    run("wheel", "tags", "--remove", "--platform-tag", platform_tag(libraries, machine), packed / wheel.name)
    (native,) = packed.iterdir()
    return Path(shutil.move(native, DIST))


def platform_tag(libraries: Iterable[bytes], machine: str) -> str:
    """The wheel's platform: the newest symbol of the C library that any of the shared libraries asks for (PEP 600)."""
    minor = max(int(version) for library in libraries for version in GLIBC.findall(library))
    return f"manylinux_2_{minor}_{machine}"


def check_installed(wheel: Path, version: str, folder: Path) -> None:
    """Install the wheel and the default model in a new environment, and let it answer. Raises SystemExit."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    locked = [word for name in ("cpu", "model") for word in ("-r", ROOT / f"requirements/{name}.lock")]
    run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:", *locked)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    here = {"PATH": str(environment / "bin"), "HOME": str(folder), "JAX_PLATFORMS": "cpu"}

    def answer(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=here, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"release: {' '.join(command)} failed:\n{done.stderr}")
        return done.stdout

    jaxserve = str(environment / "bin" / "jaxserve")
    if f"jaxserve {version} " not in answer(jaxserve, "version"):
        raise SystemExit(f"release: the installed package does not have version {version}")
    probe = "from jaxserve_kernels import native; print(native.has('jaxserve_matmul'))"
    if answer(str(python), "-c", probe).strip() != "True":
        raise SystemExit("release: the wheel's native kernels were not found on this processor")
    text = answer(str(python), "-c", QUESTION)
    if "Paris" not in text:
        raise SystemExit(f"release: the default model answered {text!r}")


def step(name: str) -> None:
    """Say what begins."""
    print(f"== {name}", flush=True)


def run(*command: str | Path) -> None:
    """Run a program of this environment; its output shows if it fails."""
    words = [str(word) for word in command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"release: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
