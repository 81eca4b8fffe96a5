"""jaxserve itself, from the source tree this benchmark belongs to."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.peer import HOST, MAX_MODEL_LEN, MAX_NUM_SEQS, MODEL_NAME, Launch
from benchmarks.peers.weights import Weights

ROOT = Path(__file__).parents[2]


class Jaxserve:
    """`jaxserve serve` of the Python that runs the benchmark."""

    name = "jaxserve"
    formats = ("f32",)

    def __init__(self, extra_words: Sequence[str] = ()) -> None:
        self._extra_words = tuple(extra_words)

    def install(self) -> None:
        """Nothing: it runs here already."""

    def prepare(self, weights: Weights, format_name: str) -> None:
        """Nothing: it reads the source."""

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        """Words given by the user come last and win over ours."""
        del format_name, cpus
        command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(weights.source), "--warmup", "all"]
        command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
        command += ["--kv-cache-memory", "2GiB", *self._extra_words]
        return Launch(command=tuple(command), environment={"JAX_PLATFORMS": "cpu"}, ready_path="/ready")

    def versions(self) -> Mapping[str, str]:
        packages = ("jax", "jaxlib", "numpy")
        return {name: importlib.metadata.version(name) for name in packages} | {
            "python": ".".join(map(str, sys.version_info[:3])),
            "commit": source_commit(),
        }


def source_commit() -> str:
    """Return the commit of the source tree, with "+changes" if files differ from it; "unknown" without git or a repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return "unknown"
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or "unknown"
