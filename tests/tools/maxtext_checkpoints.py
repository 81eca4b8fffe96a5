"""Writes the weights of a Hugging Face directory as the trainer MaxText saves them, array by array as its converter does.

    python -m tests.tools.maxtext_checkpoints HF_DIRECTORY RUN [--unscanned] [--dtype bfloat16]

The rules are those of MaxText's `checkpoint_conversion/utils/param_mapping.py` (HF to MaxText) and of the Orbax options in its
`common/checkpointing.py`. Nothing of the reader in `jaxserve.checkpoint.maxtext` is used.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors

PRE_NORMS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
GEMMA_NORMS = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_BLOCK = 6


class _Writer:
    """Computes MaxText's arrays of one model."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        file = open_safetensors(directory / "model.safetensors")
        self._tensors = {name: np.asarray(file.read(name), np.float32) for name in file.tensors}
        self._dtype = np.dtype(dtype)
        self._kind: str = self.config["model_type"]
        self._num_heads: int = self.config["num_attention_heads"]
        self._head_dim: int = self.config.get("head_dim") or self.config["hidden_size"] // self._num_heads
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        self._is_llama31 = rope.get("rope_type") == "llama3"

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """Return the arrays of a Hugging Face layer by MaxText's path in a layer."""
        prefix = f"model.layers.{index}."
        width: int = self.config["hidden_size"]
        found: dict[str, np.ndarray] = {}
        for mine, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            kernel = self._tensors[f"{prefix}self_attn.{theirs}.weight"].T.reshape(width, -1, self._head_dim)
            if self._is_llama31 and mine != "value":
                half = self._head_dim // 2
                kernel = np.stack([kernel[..., :half], kernel[..., half:]], axis=-1).reshape(kernel.shape)
            if mine == "query" and self._kind in ("llama", "mistral"):
                kernel = kernel * np.float32(1 / np.sqrt(self._head_dim))
            if mine == "query" and self._kind == "gemma2":
                # convert_gemma2_chkpt.py; the newer script has head_dim, which is equal but for the 27B model.
                kernel = kernel * np.float32(self.config["query_pre_attn_scalar"] ** -0.5)
            found[f"self_attention.{mine}.kernel"] = kernel
            bias = self._tensors.get(f"{prefix}self_attn.{theirs}.bias")
            if bias is not None:
                found[f"self_attention.{mine}.bias"] = bias.reshape(-1, self._head_dim)
        out = self._tensors[f"{prefix}self_attn.o_proj.weight"]
        found["self_attention.out.kernel"] = out.T.reshape(self._num_heads, self._head_dim, width)
        for mine, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            scale = self._tensors.get(f"{prefix}self_attn.{theirs}.weight")
            if scale is not None:
                found[f"self_attention.{mine}.scale"] = self._norm(scale)
        for mine, theirs in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
            found[f"mlp.{mine}.kernel"] = self._tensors[f"{prefix}mlp.{theirs}.weight"].T
        norms = GEMMA_NORMS if self._kind.startswith("gemma") else PRE_NORMS
        for mine, theirs in norms.items():
            found[f"{mine}.scale"] = self._norm(self._tensors[f"{prefix}{theirs}.weight"])
        return found

    def top(self, vocab_padding: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays outside layers; MaxText pads Gemma's vocabulary with zeros."""
        embedding = self._tensors["model.embed_tokens.weight"]
        if self._kind == "gemma2":
            embedding = embedding * np.float32(self.config["hidden_size"] ** 0.5)
        elif self._kind.startswith("gemma3"):
            embedding = embedding * np.asarray(self.config["hidden_size"] ** 0.5).astype("bfloat16").astype(np.float32)
        yield "token_embedder.embedding", np.pad(embedding, ((0, vocab_padding), (0, 0)))
        yield "decoder.decoder_norm.scale", self._norm(self._tensors["model.norm.weight"])
        if not self.config["tie_word_embeddings"]:
            head = self._tensors.get("lm_head.weight", self._tensors["model.embed_tokens.weight"])
            yield "decoder.logits_dense.kernel", head.T

    def tree(self, is_scanned: bool, vocab_padding: int) -> dict[str, Any]:
        arrays = dict(self.top(vocab_padding))
        layers = [self.layer(index) for index in range(self.config["num_hidden_layers"])]
        for name, array in self._stacked(layers) if is_scanned else self._alone(layers):
            arrays[f"decoder.{name}"] = array
        return nested({name: array.astype(self._dtype) for name, array in arrays.items()})

    def _alone(self, layers: list[dict[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        for index, layer in enumerate(layers):
            for path, array in layer.items():
                if self._kind == "gemma2":
                    yield f"layers_{index // 2}.{_suffixed(path, index)}", array
                else:
                    yield f"layers_{index}.{path}", array

    def _stacked(self, layers: list[dict[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield stacked arrays: MaxText's `param_scan_axis` is 1."""
        if self._kind == "gemma2":
            for start in (0, 1):
                for path in layers[0]:
                    yield f"layers.{_suffixed(path, start)}", np.stack([layer[path] for layer in layers[start::2]], 1)
        elif self._kind.startswith("gemma3"):
            count = len(layers) // GEMMA3_BLOCK * GEMMA3_BLOCK
            for start in range(GEMMA3_BLOCK if count else 0):
                for path in layers[0]:
                    stack = [layer[path] for layer in layers[start:count:GEMMA3_BLOCK]]
                    yield f"layers.layers_{start}.{path}", np.stack(stack, 1)
            for index, layer in enumerate(layers[count:]):
                for path, array in layer.items():
                    yield f"layers_remainder.layers_{index}.{path}", array
        else:
            for path in layers[0]:
                yield f"layers.{path}", np.stack([layer[path] for layer in layers], 1)

    def _norm(self, scale: np.ndarray) -> np.ndarray:
        return scale + 1.0 if self._kind.startswith("gemma") else scale


def _suffixed(path: str, index: int) -> str:
    first, _, rest = path.partition(".")
    return f"{first}_{'global' if index % 2 else 'local'}.{rest}"


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of dictionaries from names with dots."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *above, last = name.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def save_run(
    run: Path, step: int, params: Mapping[str, Any], *, uses_ocdbt: bool = True, uses_zarr3: bool = True
) -> None:
    """Save `params` as MaxText's trainer saves a step, with a small optimizer state that must be left out."""
    import jax
    import orbax.checkpoint as ocp

    state = {"params": {"params": params}, "step": np.int32(step), "opt_state": {"count": np.int32(step)}}
    options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=uses_ocdbt, use_zarr3=uses_zarr3)
    size = 2 << 30
    with ocp.CheckpointManager(
        run, item_names=("items",), item_handlers={"items": handler}, options=options
    ) as manager:
        arguments = ocp.args.PyTreeSave(
            item=state,
            save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=size), state),
            ocdbt_target_data_file_size=size,
        )
        manager.save(step, args=ocp.args.Composite(items=arguments), custom_metadata={"scan_layers": True})


def write_maxtext(
    directory: Path,
    run: Path,
    *,
    step: int = 0,
    is_scanned: bool = True,
    dtype: str = "float32",
    vocab_padding: int = 0,
    **options: bool,
) -> None:
    """Write the model in `directory` as step `step` of the run, whose folder gets copies of its config and tokenizer."""
    import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy

    run.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, run / file.name)
    save_run(run.resolve(), step, _Writer(directory, dtype).tree(is_scanned, vocab_padding), **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--unscanned", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    write_maxtext(given.directory, given.run, is_scanned=not given.unscanned, dtype=given.dtype)
