"""A model's checkpoint with LoRA adapters: their matrices are tensors of the modules that they change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from jaxserve.checkpoint.peft import Adapter
from jaxserve.checkpoint.peft_modules import Addition, Factor
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import TensorInfo

DOWN: Final = ".lora_A.weight"
UP: Final = ".lora_B.weight"
_EXPERTS: Final = ".experts."


def with_adapters(
    checkpoint: Checkpoint, adapters: Sequence[Adapter | None], rank: int, modules: Iterable[str] = ()
) -> Checkpoint:
    """Add the matrices of `adapters`, each padded to `rank`; raise CheckpointError if their shapes differ.

    None is a place without an adapter: its matrices are zeros. modules: those that get matrices in any case, by the names of
    `AdaptersConfig.modules`; those that the checkpoint does not have are left out.
    """
    tensors = dict(checkpoint.tensors)
    for adapter in filter(None, adapters):
        for module, addition in adapter.additions.items():
            for info in _infos(adapter, module, addition, rank * len(adapters)):
                known = tensors.setdefault(info.name, info)
                if known.shape != info.shape:
                    raise CheckpointError(
                        f"adapter {shown(adapter.name)}: {module}: shape {info.shape}, where another has {known.shape}"
                    )
    for module in itertools.chain.from_iterable(_stored(module, checkpoint.tensors) for module in modules):
        for info in _empty_infos(checkpoint.tensors[f"{module}.weight"], module, rank * len(adapters)):
            tensors.setdefault(info.name, info)
    added = tensors.keys() - checkpoint.tensors.keys()
    readers = {name: partial(_read_matrix, tensors[name], adapters, rank) for name in added}
    return CheckpointView(checkpoint, tensors, readers)


def _read_matrix(info: TensorInfo, adapters: Sequence[Adapter | None], rank: int, inner: Checkpoint) -> np.ndarray:
    """Return matrix A or B of a module. Each adapter has `rank` rows of A and columns of B, in the order of adapters.

    Unused rows and columns are zeros. Raises CheckpointError for a number that is not finite: its product with the zeros of
    other requests would not be zero.
    """
    module, matrix = info.name.removesuffix(DOWN).removesuffix(UP), np.zeros(info.shape, np.float32)
    for index, adapter in enumerate(adapters):
        addition = None if adapter is None else adapter.additions.get(module)
        if adapter is None or addition is None:
            continue
        ranks = slice(index * rank, index * rank + addition.rank)
        if info.name.endswith(DOWN):
            own = matrix[ranks] = addition.down.read(adapter.file)
        else:
            own = matrix[:, ranks] = addition.up.read(adapter.file).astype(np.float32) * addition.scale
        if not np.isfinite(own).all():
            raise CheckpointError(f"adapter {shown(adapter.name)}: {module}: expected finite numbers, found others")
    return matrix


def _stored(module: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the checkpoint's names of a module of the decoder, which may hold the matrices of all experts."""
    above, is_of_experts, own = module.rpartition(_EXPERTS)
    names = (f"{above}{_EXPERTS}{expert}.{own}" for expert in itertools.count()) if is_of_experts else iter((module,))
    return itertools.takewhile(lambda name: f"{name}.weight" in tensors, names)


def _infos(adapter: Adapter, module: str, addition: Addition, num_ranks: int) -> tuple[TensorInfo, TensorInfo]:
    def info(name: str, shape: tuple[int, int], stored: Factor) -> TensorInfo:
        tensor = adapter.file.tensors[stored.tensor]
        size = tensor.num_bytes * math.prod(stored.shape) // math.prod(tensor.shape)
        return TensorInfo(name, shape, tensor.dtype, size, adapter.file.path)

    down, up = addition.down, addition.up
    return info(module + DOWN, (num_ranks, down.shape[1]), down), info(module + UP, (up.shape[0], num_ranks), up)


def _empty_infos(weight: TensorInfo, module: str, num_ranks: int) -> tuple[TensorInfo, TensorInfo]:
    """Return the matrices of a module that no adapter changes; none of their bytes are stored."""
    rows, columns = weight.shape
    return (
        TensorInfo(module + DOWN, (num_ranks, columns), "F32", 0, weight.file),
        TensorInfo(module + UP, (rows, num_ranks), "F32", 0, weight.file),
    )
