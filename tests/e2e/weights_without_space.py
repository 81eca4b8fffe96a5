"""Gives weights to an engine, and a reply after each try, while its folder of temporary files is full and after that.

Prints a line for each step. /dev/shm is smaller than the weights. argv: a folder for the chat template.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxserve import LLM
from jaxserve.errors import UnavailableError
from tests.e2e.test_llm import GREEDY, fake_llm

ARRAYS = {"a": np.zeros((1 << 19,), np.float32)}
"""2 MiB."""


def update(llm: LLM) -> None:
    try:
        print("version", llm.update_weights(arrays=ARRAYS))
    except UnavailableError as error:
        print(error)
    print("tokens", len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids))


def main() -> None:
    filler = Path(tempfile.gettempdir()) / "filler"
    with fake_llm(Path(sys.argv[1])) as llm:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError as error:
                print(error.strerror)
        update(llm)
        filler.unlink()
        update(llm)
    print("left", sorted(path.name for path in filler.parent.iterdir()))


if __name__ == "__main__":
    main()
