"""Keys of the image encoder of an mmproj file (llama.cpp), and sizes that only its tensors tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from jaxserve.checkpoint.gguf.architecture import GGUFKeys, decimal
from jaxserve.checkpoint.gguf.file import GGUFFile
from jaxserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TowerKeys:
    """Keys of an image encoder."""

    vision: GGUFKeys
    """Keys under `clip.vision`."""
    clip: GGUFKeys
    """Keys under `clip`."""

    @property
    def file(self) -> GGUFFile:
        return self.vision.file

    def activation(self, gelu: str) -> str:
        """Return the activation of feed-forward blocks. gelu: the one that llama.cpp calls gelu."""
        if self.clip.flag("use_gelu"):
            return gelu
        return "silu" if self.clip.flag("use_silu") else "quick_gelu"

    def is_swapped(self) -> bool:
        """Return True if the names of both matrices of feed-forward blocks are swapped, as converters of early 2025 wrote them."""
        up, down = (self.file.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
        width = self.vision.integer("embedding_length")
        return up is not None and down is not None and down.shape[-1] == width and up.shape[-1] != width

    def intermediate_size(self) -> int:
        """Return the width of feed-forward blocks, whose key is wrong in files of Qwen2-VL."""
        return self.outputs(f"v.blk.0.ffn_{'down' if self.is_swapped() else 'up'}.weight")

    def outputs(self, tensor: str) -> int:
        """Return the number of rows of a matrix. Raises CheckpointError if there is none."""
        return self.shape(tensor)[0]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor of two axes or more. Raises CheckpointError if there is none."""
        found = self.file.tensors.get(tensor)
        if found is None or len(found.shape) < 2:
            self.fail_tensor(tensor, "a matrix")
        return found.shape

    def fail_tensor(self, tensor: str, expected: str) -> NoReturn:
        """Raise CheckpointError for a tensor that is missing or has another shape."""
        found = self.file.tensors.get(tensor)
        what = "none" if found is None else f"shape {found.shape}"
        raise CheckpointError(f"{self.file.path}: tensor '{tensor}': expected {expected}, found {what}")

    def deepstack_layers(self) -> list[int]:
        """Return the layers whose outputs are added to the first layers of the text model."""
        flags = self.vision.get("is_deepstack_layers") or []
        if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
            self.vision.fail("is_deepstack_layers", "true or false for each layer", flags)
        return [layer for layer, flag in enumerate(flags) if flag]

    def values(self, key: str) -> list[float]:
        """Return one number for each colour."""
        found = self.vision.get(key)
        if not isinstance(found, list) or len(found) != 3 or not all(isinstance(value, float) for value in found):
            self.vision.fail(key, "three numbers", found)
        return [decimal(value) for value in found]
