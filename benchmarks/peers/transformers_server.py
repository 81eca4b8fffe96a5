"""`transformers serve`: the server inside Hugging Face's library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.environment import VirtualEnvironment, install_once
from benchmarks.peers.peer import HOST, Launch
from benchmarks.peers.weights import Weights, write_directory

VERSION = "5.23.0"
TORCH_VERSION = "2.13.0"
CACHE_SHARE = 0.1
"""Fraction of the machine's memory for the KV cache; by default the server takes nearly all that is free."""


class TransformersServer:
    """With continuous batching, or one request at a time."""

    name = "transformers"
    formats = ("f32", "f32-unbatched")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = VirtualEnvironment(folder / "venv")

    def install(self) -> None:
        """About 1.3 GB with the CPU build of torch, which pip takes where it is configured to find it."""
        install_once(
            self._folder / "installed.json",
            {"transformers": VERSION, "torch": TORCH_VERSION},
            lambda: self._environment.install(f"torch=={TORCH_VERSION}", f"transformers[serving]=={VERSION}"),
        )

    def prepare(self, weights: Weights, format_name: str) -> None:
        del format_name
        write_directory(weights)

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        """It knows no `ignore_eos`: an end token that no model has does the same."""
        command = [str(self._environment.program("transformers")), "serve", str(weights.directory)]
        command += ["--host", HOST, "--port", str(port), "--dtype", "float32", "--device", "cpu"]
        if format_name == "f32":
            command += ["--continuous-batching", "--cb-max-memory-percent", str(CACHE_SHARE)]
        return Launch(
            command=tuple(command),
            environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(cpus))},
            model=str(weights.directory),
            extra_body={
                "ignore_eos": None,
                "stream_options": None,
                "generation_config": '{"eos_token_id": -1}',
            },
        )

    def versions(self) -> Mapping[str, str]:
        return self._environment.versions("transformers", "torch", "numpy", "tokenizers")
