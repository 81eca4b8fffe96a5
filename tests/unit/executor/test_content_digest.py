"""Digests of weights and adapters: other content has another digest, and so has another order of the adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.executor.adapters import target_model
from jaxserve.executor.content_digest import content_digest, weights_digest
from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import DATA, adapter_goldens
from tests.unit.checkpoint.checkpoint_files import write_safetensors

CHECKPOINT = open_model(DATA / "llama3_tiny")
ADAPTERS = {name: golden.path for name, golden in adapter_goldens("llama3_tiny").items() if name != "base"}


def opened(*folders: Path) -> list[Adapter]:
    target = target_model(decoder_of(CHECKPOINT), CHECKPOINT.config)
    return [open_adapter("any", folder, target) for folder in folders]


def retrained(folder: Path, source: Path, tensor: int, row: int) -> Path:
    """Copy an adapter with another row of one of its tensors."""
    shutil.copytree(source, folder)
    file = open_safetensors(source / "adapter_model.safetensors")
    tensors = {name: np.array(file.read(name)) for name in file.tensors}
    tensors[sorted(tensors)[tensor]][row] *= 2
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


DIGESTS = (
    lambda adapters: content_digest(CHECKPOINT, "identity", adapters),
    lambda adapters: weights_digest([CHECKPOINT], adapters),
)


@pytest.mark.parametrize("digest", DIGESTS, ids=("content", "weights"))
def test_changed_adapters_and_another_order_have_other_digests(
    digest: Callable[[Sequence[Adapter]], str], tmp_path: Path
) -> None:
    first, second = ADAPTERS["first"], ADAPTERS["second"]
    scaled = tmp_path / "scaled"
    shutil.copytree(second, scaled)
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    same = [[first, second], [first, Path(shutil.copytree(second, tmp_path / "copy"))]]
    others = [
        [],
        [first],
        [second, first],
        [first, scaled],
        *([first, retrained(tmp_path / f"{tensor}", second, tensor, row)] for tensor, row in ((0, 0), (-1, -1))),
    ]
    digests = [digest(opened(*folders)) for folders in same + others]
    assert digests[0] == digests[1]
    assert len(set(digests[1:])) == 1 + len(others)
