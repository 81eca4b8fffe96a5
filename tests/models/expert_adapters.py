"""Random adapters of tiny checkpoints with experts, in the layouts in which PEFT saves them, and the merged checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.executor.adapters import target_model
from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

RANK, ALPHA = 4, 6
SCALE = ALPHA / RANK
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of projections in checkpoints of Mixtral."""

Deltas = Mapping[str, np.ndarray]
"""Arrays that an adapter adds to tensors of the checkpoint, by their stored names."""


@dataclass(frozen=True)
class RandomAdapter:
    """An adapter's tensors under PEFT's names without their prefix, and what they amount to."""

    tensors: Mapping[str, np.ndarray]
    deltas: Deltas
    config: Mapping[str, Any]

    def save(self, folder: Path) -> Path:
        """Write the adapter as PEFT does."""
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **self.config}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        names = {f"base_model.model.{name}": array for name, array in self.tensors.items()}
        write_safetensors(folder / "adapter_model.safetensors", names)
        return folder


def stored_tensors(golden: GoldenCheckpoint) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint as it names them, in float32."""
    files = map(open_safetensors, sorted(golden.path.glob("*.safetensors")))
    return {name: np.asarray(file.read(name)).astype(np.float32) for file in files for name in file.tensors}


def opened(golden: GoldenCheckpoint, folder: Path) -> Adapter:
    """Open an adapter for the model of a checkpoint."""
    checkpoint = open_model(golden.path)
    return open_adapter(folder.name, folder, target_model(decoder_of(checkpoint), checkpoint.config))


def merged(golden: GoldenCheckpoint, adapter: RandomAdapter, folder: Path) -> GoldenCheckpoint:
    """Write the checkpoint in float32 with the adapter added to its weights."""
    deltas = adapter.deltas
    return rewritten(golden, folder, lambda name, array: array + deltas[name] if name in deltas else array)


def rounded(golden: GoldenCheckpoint, folder: Path) -> GoldenCheckpoint:
    """Write the checkpoint in float32 with matrices that int8 with a scale per output holds exactly."""

    def round_rows(name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim != 2:
            return array
        scales = np.abs(array).max(1, keepdims=True) / 127
        return np.round(array / scales).astype(np.float32) * scales

    return rewritten(golden, folder, round_rows)


def rewritten(
    golden: GoldenCheckpoint, folder: Path, change: Callable[[str, np.ndarray], np.ndarray]
) -> GoldenCheckpoint:
    """Write the checkpoint in float32 with changed tensors."""
    shutil.copytree(golden.path, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: change(name, array) for name, array in stored_tensors(golden).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return replace(golden, path=folder)


def of_modules(name: str, seed: int, is_changed: Callable[[str], bool], rank: int = RANK) -> RandomAdapter:
    """Return an adapter of some of a checkpoint's modules: two matrices for each."""
    random, tensors, deltas = np.random.default_rng(seed), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for weight, array in stored_tensors(golden_checkpoint(name)).items():
        module = weight.removesuffix(".weight")
        if array.ndim == 2 and is_changed(module):
            down, up = _pair(random, rank, array.shape[1], array.shape[0])
            tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            deltas[weight] = ALPHA / rank * (up @ down)
    return RandomAdapter(tensors, deltas, {"target_modules": ["any"]})


def of_parameters(name: str, seed: int, version: str | None, *, exchanged: bool = False) -> RandomAdapter:
    """Return an adapter of the parameters `gate_up_proj` and `down_proj` of all experts (`target_parameters`).

    exchanged: `lora_A` has the width of the outputs.
    """
    golden = golden_checkpoint(name)
    decoder = decoder_of(open_model(golden.path))
    assert decoder.experts is not None
    count, d, f = decoder.experts.num_experts, decoder.hidden_size, decoder.experts.intermediate_size
    stored = stored_tensors(golden)
    random, tensors, deltas = np.random.default_rng(seed), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for module in sorted({tensor.split(".experts.")[0] + ".experts" for tensor in stored if ".experts." in tensor}):
        for key, outputs, inputs in ((f"{module}.base_layer", 2 * f, d), (module, d, f)):
            widths = (outputs, inputs) if exchanged else (inputs, outputs)
            first, second = _pair(random, RANK * count, *widths)
            tensors |= {f"{key}.lora_A.weight": first, f"{key}.lora_B.weight": second}
            ranks, by_rank = first.reshape(count, RANK, -1), second.reshape(len(second), RANK, count)
            matmuls = [SCALE * (by_rank[:, :, expert] @ ranks[expert]) for expert in range(count)]
            changes = [matmul.T if exchanged else matmul for matmul in matmuls]
            deltas |= _stored_deltas(stored, module, key == module, changes)
    config = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    return RandomAdapter(tensors, deltas, config | ({} if version is None else {"peft_version": version}))


def _stored_deltas(stored: Mapping[str, object], module: str, is_down: bool, changes: list[np.ndarray]) -> Deltas:
    whole = f"{module}.{'down_proj' if is_down else 'gate_up_proj'}"
    if whole in stored:  # [E, in, out]
        return {whole: np.stack([change.T for change in changes])}
    found: dict[str, np.ndarray] = {}
    for expert, change in enumerate(changes):
        parts = (
            {"down_proj": change} if is_down else dict(zip(("gate_proj", "up_proj"), np.split(change, 2), strict=True))
        )
        for part, delta in parts.items():
            names = (f"{module}.{expert}.{name}.weight" for name in (part, MIXTRAL[part]))
            found[next(name for name in names if name in stored)] = delta
    return found


def _pair(random: np.random.Generator, num_ranks: int, width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Return matrices whose product is about as large as a weight."""
    first = random.standard_normal((num_ranks, width), np.float32) / np.float32(width**0.5)
    second = random.standard_normal((height, num_ranks), np.float32) / np.float32(2 * RANK**0.5)
    return first, second
