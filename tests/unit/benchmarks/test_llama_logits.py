"""The protocol between the quality benchmark and the program that computes llama.cpp's logits."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.peers.llama_logits import LlamaLogits
from benchmarks.peers.peer import PeerUnavailableError

ECHO = """
import sys, numpy as np
while len(piece := sys.stdin.buffer.read(4 * 3)) == 12:
    tokens = np.frombuffer(piece, "<i4")
    sys.stdout.buffer.write(np.where(np.arange(5) == tokens[:, None], 0.5, -1).astype("<f4").tobytes())
    sys.stdout.buffer.flush()
"""


def test_each_piece_gets_the_logits_after_its_tokens() -> None:
    logits = LlamaLogits([sys.executable, "-c", ECHO])
    for piece in ([4, 0, 2], [1, 1, 3]):
        found = logits(np.array(piece), 5)
        assert found.shape == (3, 5)
        assert found.argmax(1).tolist() == piece
        assert sorted(set(found.ravel().tolist())) == [-1, 0.5]
    logits.close()


def test_a_program_that_ends_is_an_error_with_its_code() -> None:
    logits = LlamaLogits([sys.executable, "-c", "import sys; sys.stdin.buffer.read(12); sys.exit(3)"])
    with pytest.raises(PeerUnavailableError, match=r"llama\.cpp ended with code 3"):
        logits(np.arange(3), 5)
    logits.close()
