"""The logits that llama.cpp computes for given tokens, by its own library as `llama_server.py` builds it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.peer import PeerUnavailableError
from benchmarks.peers.weights import weights_of

SOURCE = Path(__file__).with_suffix(".cpp")


class LlamaLogits:
    """A process that has a model loaded; it ends with `close`."""

    def __init__(self, command: Sequence[str]) -> None:
        """command: reads token ids (int32) and writes logits (float32), as `llama_logits.cpp` does."""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
        """Return the logits after each token of a text, float32 (T, V). Raises PeerUnavailableError if the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(tokens.astype("<i4").tobytes())
        self._process.stdin.flush()
        num_bytes = 4 * len(tokens) * vocab_size
        found = self._process.stdout.read(num_bytes)
        if len(found) < num_bytes:
            raise PeerUnavailableError(f"llama.cpp ended with code {self._process.wait()}")
        return np.frombuffer(found, "<f4").reshape(len(tokens), vocab_size)

    def close(self) -> None:
        self._process.communicate()


def llama_logits(source: Path, format_name: str, folder: Path, num_tokens: int) -> tuple[LlamaLogits, Path]:
    """Load the copy of a model in a format, for texts of `num_tokens` tokens, and return its file too. Raises PeerUnavailableError.

    folder: where peers are installed, or will be.
    """
    peer, weights = LlamaServer(folder / LlamaServer.name), weights_of(source, folder)
    peer.install()
    peer.prepare(weights, format_name)
    program, file = peer.compile(SOURCE), weights.gguf(format_name)
    threads = str(len(os.sched_getaffinity(0)))
    return LlamaLogits([str(program), str(file), str(num_tokens), threads]), file
