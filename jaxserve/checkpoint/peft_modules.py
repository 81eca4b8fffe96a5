"""The modules of a model that a LoRA adapter changes, and the two matrices that are added to each.

PEFT saves an adapter of one module as two matrices, `lora_A` [rank, in] and `lora_B` [out, rank]. An adapter of a parameter
that holds the matrices of all E experts (`target_parameters`) is two matrices as well: `lora_A` [E * rank, in], the ranks of
one expert after those of another, and `lora_B` [out, rank * E], in which the E columns of one rank are neighbours. PEFT
before 0.19.1 exchanged inputs and outputs of parameters `[E, out, in]`: there `lora_A` is [E * rank, out].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from jaxserve.checkpoint.family import StackedExperts
from jaxserve.checkpoint.qkv import Rows
from jaxserve.checkpoint.safetensors_file import SafetensorsFile

Parts = Mapping[str, Mapping[str, Rows]]
"""Modules that some implementations fuse, with the rows of each part."""

_OF_AN_EXPERT: Final = re.compile(r"(\.experts)\.\d+(\.\w+)")
_BY_INPUTS: Final = ("interleaved", "halves_by_inputs")
"""Layouts of families whose parameters are [E, in, out] in transformers, too."""
_FIRST_BY_OUTPUTS, _FIRST_FIXED = (0, 19, 0), (0, 19, 1)


@dataclass(frozen=True, slots=True)
class TargetExperts:
    """The experts of a model."""

    num_experts: int
    hidden_size: int
    """Inputs of an expert."""
    intermediate_size: int
    """Width of one expert."""
    layout: StackedExperts | None = None
    """See `Family.stacked_experts`."""
    has_gate: bool = True
    """False: experts have an `up_proj` and a `down_proj` only (Nemotron-H)."""

    @property
    def parameters(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of the parameters that hold the matrices of all experts."""
        d, f = self.hidden_size, self.intermediate_size
        first = {"gate_up_proj": (2 * f, d)} if self.has_gate else {"up_proj": (f, d)}
        return {**first, "down_proj": (d, f)}

    def rows(self, parameter: str) -> Mapping[str, slice]:
        """Return the projections in a parameter and the outputs of each."""
        if parameter != "gate_up_proj":
            return {parameter: slice(None)}
        if self.layout == "interleaved":
            return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        f = self.intermediate_size
        return {"gate_proj": slice(0, f), "up_proj": slice(f, 2 * f)}


@dataclass(frozen=True, slots=True)
class TargetModel:
    """Names and shapes of the model that adapters were made for."""

    parts: Parts = field(default_factory=dict)
    """Modules that the adapter may have fused, and their parts in the model; a name may have the block's before it."""
    rename: Callable[[str], str] = str
    """Return our name of a module of transformers."""
    experts: TargetExperts | None = None
    is_transposed: bool = False
    """True if some modules of the model in transformers have matrices of inputs by outputs (GPT-2). Adapters do not differ."""
    recurrent: frozenset[str] = frozenset()
    """Names of the matmuls of recurrent mixers."""

    def parts_of(self, module: str) -> Mapping[str, Rows] | None:
        """Return the rows of each part of one of our modules; None if the adapter has it as the model does."""
        names = module.split(".")
        return self.parts.get(".".join(names[-2:]), self.parts.get(names[-1]))


@dataclass(frozen=True, slots=True)
class Factor:
    """One of the two matrices of a module: a part of a tensor in the adapter's file."""

    tensor: str
    shape: tuple[int, int]
    """Shape of the matrix."""
    rows: Rows
    columns: slice
    is_transposed: bool

    def read(self, file: SafetensorsFile) -> np.ndarray:
        """Return the matrix as stored."""
        stored = file.read(self.tensor)[self.rows, self.columns]
        return stored.T if self.is_transposed else stored


def factor(
    file: SafetensorsFile,
    tensor: str,
    rows: Rows = slice(None),
    columns: slice = slice(None),
    *,
    is_transposed: bool = False,
) -> Factor:
    """Describe a part of a tensor of two dimensions, transposed or not."""
    num_rows, num_columns = file.tensors[tensor].shape
    height = len(range(num_rows)[rows]) if isinstance(rows, slice) else len(rows)
    width = len(range(num_columns)[columns])
    shape = (width, height) if is_transposed else (height, width)
    return Factor(tensor, shape, rows, columns, is_transposed)


@dataclass(frozen=True, slots=True)
class Addition:
    """Update of one module: scale * up @ down is added to its weight."""

    down: Factor
    """Matrix A, [rank, in]."""
    up: Factor
    """Matrix B, [out, rank]."""
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


def declared_module(module: str) -> str:
    """Return the name of the module that holds a module's weight in the decoder: one for all experts."""
    return _OF_AN_EXPERT.sub(r"\1\2", module)


def widths(experts: TargetExperts, parameter: str | None) -> Mapping[tuple[int, int], list[tuple[str, bool]]]:
    """Return parameters of experts by the widths of their `lora_A` and `lora_B`.

    Each comes with True if `lora_A` has the outputs' width; a square parameter has both, and the two parameters of experts
    without a gate have each other's widths. parameter: the only one to return.
    """
    found: dict[tuple[int, int], list[tuple[str, bool]]] = {}
    for name, (outputs, inputs) in experts.parameters.items():
        if parameter in (None, name):
            found.setdefault((inputs, outputs), []).append((name, False))
            found.setdefault((outputs, inputs), []).append((name, True))
    return found


def is_exchanged(version: str | None, layout: StackedExperts | None) -> bool | None:
    """Return True if this version of PEFT gave `lora_A` the width of the outputs; None if the version must be known.

    Parameters `[E, in, out]` had the right order before 0.19 and from 0.19.1 on.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    is_by_inputs = layout in _BY_INPUTS
    if match is None:
        return False if is_by_inputs else None
    number = tuple(map(int, match.groups()))
    if number >= _FIRST_FIXED:
        return False
    return not is_by_inputs or number >= _FIRST_BY_OUTPUTS


def each_expert(
    file: SafetensorsFile, sides: Mapping[str, str], experts: TargetExperts, parameter: str, *, exchanged: bool
) -> Iterator[tuple[int, str, Factor, Factor]]:
    """Yield expert, projection, and the matrices A and B of each, from the tensors of an adapter of all experts."""
    first, second, count = sides["A"], sides["B"], experts.num_experts
    rank = file.tensors[first].shape[0] // count
    for expert in range(count):
        ranks, columns = slice(expert * rank, (expert + 1) * rank), slice(expert, None, count)
        for projection, outputs in experts.rows(parameter).items():
            if exchanged:
                down = factor(file, second, columns=columns, is_transposed=True)
                up = factor(file, first, ranks, outputs, is_transposed=True)
            else:
                down, up = factor(file, first, ranks), factor(file, second, outputs, columns)
            yield expert, projection, down, up
