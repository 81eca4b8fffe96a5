"""Tensors of encoders under BERT's names, which those of the module `Encoder` are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.renamed import our_name, renamed
from jaxserve.quant.tensor import Tensor

_PREFIXES: Final = ("bert", "roberta", "mpnet", "distilbert", "nomic_bert", "gte", "new")
_LANGUAGE_MODEL: Final = ("cls.", "lm_head.", "vocab_")
"""Starts of the names of tensors of a head for tokens, which is not read."""
_JOINED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("query", "key", "value"),
    "up_gate_proj": ("up_proj", "gate_proj"),
}
"""Modules whose rows are those of several, one after the other."""


def with_encoder_names(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """Return an encoder's checkpoint without the prefix of one that was saved with a head, with BERT's names of components that `renames`
    lists as `Family.renames` does, and with a tensor for each matrix."""

    def ours(name: str) -> str | None:
        prefix, _, rest = name.partition(".")
        name = rest if prefix in _PREFIXES else name
        return None if name.startswith(_LANGUAGE_MODEL) else our_name(renames, name)

    return _with_parts(renamed(checkpoint, ours))


def _with_parts(checkpoint: Checkpoint) -> Checkpoint:
    tensors, readers = dict(checkpoint.tensors), {}
    for name, info in checkpoint.tensors.items():
        module, parameter = name.split(".")[-2:] if "." in name else ("", name)
        parts = _JOINED.get(module, ())
        if not parts or info.shape[0] % len(parts):
            continue
        del tensors[name]
        count = info.shape[0] // len(parts)
        for index, part in enumerate(parts):
            own = f"{name.removesuffix(f'{module}.{parameter}')}{part}.{parameter}"
            size = info.num_stored_bytes // len(parts)
            tensors[own] = replace(info, name=own, shape=(count, *info.shape[1:]), num_stored_bytes=size)
            readers[own] = partial(_rows, name, slice(index * count, (index + 1) * count))
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _rows(name: str, rows: slice, inner: Checkpoint) -> Tensor:
    return inner.read(name)[rows]
