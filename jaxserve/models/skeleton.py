"""A model as the running system sees it: a flat tuple of arrays, and how to put them back together.

flax ends here. `ModelSkeleton` is made without allocating anything; the loader fills its leaves by
name; the step functions rebuild the module while they are traced. Nothing of nnx crosses `jax.jit`:
a flat tuple of leaves costs a tenth of the dispatch time of module objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.layers.experts import ExpertLinear
from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Matrix
from jaxserve.layers.param import FusedLayout, array_axes
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.assistant import Assistant
from jaxserve.models.decoder import Decoder
from jaxserve.models.dflash import DFlashDrafter
from jaxserve.models.eagle import EagleHead
from jaxserve.models.encoder import Encoder
from jaxserve.models.predictor import MultiTokenPredictor
from jaxserve.quant.array import ArraySpec, QuantArray
from jaxserve.quant.kv_scales import is_kv_scale
from jaxserve.quant.tensor import Tensor, as_floats
from jaxserve.sharding.rules import axis_rules

_ADAPTER: Final = ".lora_"
"""Part of the names of tensors that belong to adapters."""


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One parameter: its name, the arrays that store it, and the tensors it is loaded from."""

    name: str
    """Checkpoint name; that of the common path for a fused parameter."""
    shape: tuple[int, ...]
    """Shape of the parameter; arrays of a quantised one may have others."""
    declared: QuantArray[ArraySpec] | ArraySpec
    """The arrays of a matrix, or the one array of any other parameter."""
    tensors: tuple[str, ...]
    """Names of the checkpoint's tensors that the parameter is made of."""
    layout: FusedLayout | None = None
    """Place of each tensor if they are several, or of the matrices that one tensor has one after the other."""
    num_experts: int | None = None
    """Experts that all have such tensors: those of one follow those of another, as they do in the parameter."""

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays on a device."""
        return self.declared.arrays if isinstance(self.declared, QuantArray) else (self.declared,)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape for one expert; the whole shape if there are no experts."""
        return self.shape if self.num_experts is None else self.shape[1:]

    @property
    def parts(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors and their shapes."""
        layout = None if self._is_reordered else self.layout
        counts = (self.own_shape[:1] if layout is None else layout.counts) * (self.num_experts or 1)
        return {name: (count, *self.own_shape[1:]) for name, count in zip(self.tensors, counts, strict=True)}

    @property
    def sources(self) -> list[tuple[str, range]]:
        """The rows of tensors that `assemble` takes, in their order."""
        counts = self.own_shape[:1] if self.layout is None else self.layout.counts
        return self._sources(self.tensors, tuple(map(range, counts)))

    @property
    def _is_reordered(self) -> bool:
        """True if the layout's matrices are rows of one tensor."""
        return self.layout is not None and len(self.tensors) < len(self.layout.counts)

    @property
    def is_adapter(self) -> bool:
        """True for a parameter that holds adapters."""
        return _ADAPTER in self.tensors[0]

    @property
    def is_measured(self) -> bool:
        """True for scales of the KV cache that are measured with the loaded weights: no checkpoint has them."""
        return is_kv_scale(self.name) and len(self.shape) == 2

    @property
    def is_converted(self) -> bool:
        """True if conversions have the parameter."""
        return not self.is_adapter and not self.is_measured

    @property
    def num_bytes(self) -> int:
        """Bytes over all devices, each part counted once."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def is_by_row(self) -> bool:
        """True if some rows of the parameter can be assembled from the same rows of its tensors."""
        return self.declared.format.is_by_row if isinstance(self.declared, QuantArray) else bool(self.own_shape)

    def part(self, experts: range | None, rows: range) -> tuple[LeafSpec, list[tuple[str, range]]] | None:
        """Return the leaf of some rows, of some experts, and the rows of each tensor that it is assembled from.

        None if the rows are no whole groups of a fused layout.
        """
        layout = self.layout
        counts: tuple[range, ...] = (rows,)
        if layout is not None:
            size = sum(layout.counts) // layout.groups
            if rows.start % size or rows.stop % size:
                return None
            groups = range(rows.start // size, rows.stop // size)
            sizes = [count // layout.groups for count in layout.counts]
            counts = tuple(range(groups.start * each, groups.stop * each) for each in sizes)
            layout = FusedLayout(tuple(map(len, counts)), len(groups))
        own, names = range(1) if experts is None else experts, self.tensors
        num_parts = len(names) // (self.num_experts or 1)
        used = names[own.start * num_parts : own.stop * num_parts]
        leaf = replace(self, tensors=used, layout=layout, num_experts=None if experts is None else len(experts))
        return leaf, self._sources(used, counts)

    def _sources(self, tensors: tuple[str, ...], rows: tuple[range, ...]) -> list[tuple[str, range]]:
        """Return these tensors with the rows of each. rows: of each matrix of one expert."""
        if not self._is_reordered or self.layout is None:
            return list(zip(tensors, rows * (len(tensors) // len(rows)), strict=True))
        (name,), firsts = tensors, itertools.accumulate(self.layout.counts[:-1], initial=0)
        return [(name, range(first + own.start, first + own.stop)) for first, own in zip(firsts, rows, strict=True)]

    def assemble(self, tensors: Iterable[Tensor]) -> tuple[np.ndarray, ...]:
        """Return the arrays of the parameter, quantised as declared, from its `sources` in their order."""
        parts = map(self._converted, tensors)
        if self.num_experts is None:
            arrays = self._joined(parts)
        else:
            arrays, num_parts = (), len(self.tensors) // self.num_experts
            for expert in range(self.num_experts):
                own = self._joined(itertools.islice(parts, num_parts))
                arrays = arrays or tuple(np.empty((self.num_experts, *each.shape), each.dtype) for each in own)
                for whole, array in zip(arrays, own, strict=True):
                    whole[expert] = array
        if isinstance(self.declared, QuantArray):
            arrays = self.declared.format.to_device(self.declared.with_arrays(arrays)).arrays
        return tuple(map(np.ascontiguousarray, arrays))

    def _converted(self, tensor: Tensor) -> tuple[np.ndarray, ...]:
        if isinstance(self.declared, QuantArray):
            return self.declared.format.convert(tensor, self.declared).arrays
        return (as_floats(tensor).astype(self.declared.dtype, copy=False),)

    def _joined(self, parts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
        if self.layout is not None:
            return self.layout.join(parts)
        (whole,) = parts
        return whole


C = TypeVar("C", DecoderConfig, EncoderConfig)
M = TypeVar("M", bound=nnx.Module)


@dataclass(frozen=True)
class Skeleton(Generic[C, M]):
    """A model without its numbers."""

    config: C
    policy: DtypePolicy
    leaves: tuple[LeafSpec, ...]
    graph: Any
    treedef: Any
    adapters: AdaptersConfig | None = None

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The arrays of all leaves: what step programs are given."""
        return tuple(array for leaf in self.leaves for array in leaf.arrays)

    def build(self, arrays: tuple[jax.Array, ...]) -> M:
        """Return the module over these arrays, in the order of `self.arrays`. Called while tracing."""
        model: M = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, arrays))
        return model


class ModelSkeleton(Skeleton[DecoderConfig, Decoder]):
    """A decoder without its numbers."""


class EncoderSkeleton(Skeleton[EncoderConfig, Encoder]):
    """An encoder without its numbers."""


class PredictorSkeleton(Skeleton[DecoderConfig, MultiTokenPredictor]):
    """A multi-token-prediction layer without its numbers."""


class EagleSkeleton(Skeleton[DecoderConfig, EagleHead]):
    """An EAGLE-3 head without its numbers."""


class DFlashSkeleton(Skeleton[DecoderConfig, DFlashDrafter]):
    """A DFlash drafter without its numbers."""


class AssistantSkeleton(Skeleton[DecoderConfig, Assistant]):
    """A drafter of Gemma 4 without its numbers."""


DecoderSkeleton = ModelSkeleton | PredictorSkeleton | EagleSkeleton | DFlashSkeleton | AssistantSkeleton
AnySkeleton = DecoderSkeleton | EncoderSkeleton


def make_skeleton(config: DecoderConfig, policy: DtypePolicy, adapters: AdaptersConfig | None = None) -> ModelSkeleton:
    """Declare the decoder of `config` with its parameters as `policy` asks, and room for `adapters`."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    declared = _declare(lambda: Decoder(config, policy), policy, adapters)
    return ModelSkeleton(config, policy, *declared, adapters=adapters)


def make_encoder_skeleton(config: EncoderConfig, policy: DtypePolicy) -> EncoderSkeleton:
    """Declare the encoder of `config` with its parameters as `policy` asks."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    return EncoderSkeleton(config, policy, *_declare(lambda: Encoder(config, policy), policy))


def make_predictor_skeleton(config: DecoderConfig, policy: DtypePolicy) -> PredictorSkeleton:
    """Declare the multi-token-prediction layer of `config`, a decoder of one layer, with its parameters as `policy` asks."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    return PredictorSkeleton(config, policy, *_declare(lambda: MultiTokenPredictor(config, policy), policy))


def make_eagle_skeleton(config: DecoderConfig, policy: DtypePolicy) -> EagleSkeleton:
    """Declare the EAGLE-3 head of `config`, a decoder of one layer, with its parameters as `policy` asks."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    return EagleSkeleton(config, policy, *_declare(lambda: EagleHead(config, policy), policy))


def make_dflash_skeleton(config: DecoderConfig, policy: DtypePolicy) -> DFlashSkeleton:
    """Declare the DFlash drafter of `config`, a decoder with its layers, with its parameters as `policy` asks."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    return DFlashSkeleton(config, policy, *_declare(lambda: DFlashDrafter(config, policy), policy))


def make_assistant_skeleton(config: DecoderConfig, policy: DtypePolicy) -> AssistantSkeleton:
    """Declare the drafter of Gemma 4 of `config`, which has places in the model's cache, with its parameters as `policy` asks."""
    policy = replace(policy, rules=axis_rules(config, policy.mesh))
    return AssistantSkeleton(config, policy, *_declare(lambda: Assistant(config, policy), policy))


def _declare(
    make: Callable[[], nnx.Module], policy: DtypePolicy, adapters: AdaptersConfig | None = None
) -> tuple[tuple[LeafSpec, ...], Any, Any]:
    plain, kinds = frozenset(policy.quant.plain_matrices), dict(policy.quant.stored_kinds)

    def declare() -> nnx.Module:
        model = make()
        if not plain and not kinds and adapters is None:
            return model  # walking through its modules would take as long as making it
        _separate_kinds(dict(nnx.iter_modules(model)), kinds)
        modules = dict(nnx.iter_modules(model))
        for path, module in modules.items():
            if not isinstance(module, Matrix):
                continue
            stored = _stored_modules(path, modules)
            if not plain.isdisjoint(stored):
                module.keep_plain()
            if not kinds.keys().isdisjoint(stored):
                module.keep_blocks(_only_kind(kinds.get(name) for name in stored))
            if adapters is not None and isinstance(module, Linear | ExpertLinear):
                _adapt(path, modules, adapters)
        return model

    model = nnx.eval_shape(declare)
    modules = dict(nnx.iter_modules(model))
    graph, state = nnx.split(model)
    leaves = tuple(_leaf(path, variable, modules) for path, variable in nnx.to_flat_state(state))
    arrays, treedef = jax.tree.flatten(state)
    if [array.shape for array in arrays] != [array.shape for leaf in leaves for array in leaf.arrays]:
        raise RuntimeError("flax orders flat state and tree leaves differently: names would go to wrong arrays")
    return leaves, graph, treedef


def _separate_kinds(modules: _Modules, kinds: Mapping[str, str]) -> None:
    """Separate fused matmuls whose matrices are in blocks of different types: each stays in its own."""
    for path, module in modules.items():
        if isinstance(module, FusedLinear) and module.is_fused:
            stored = _stored_modules((*path, "fused"), modules)
            if not kinds.keys().isdisjoint(stored) and _only_kind(kinds.get(name) for name in stored) is None:
                module.separate()


def _only_kind(kinds: Iterable[str | None]) -> str | None:
    """Return the block type that all parts of a matrix have; None if they differ."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else None


_UNNAMED: Final = "adapters"
"""Attribute of a module that holds its adapters; checkpoints name their tensors beside the module's weight."""
_Path = tuple[Any, ...]
_Modules = Mapping[_Path, nnx.Module]


def _adapt(path: _Path, modules: _Modules, adapters: AdaptersConfig) -> None:
    """Declare the adapters of the matmul at `path`, if it has any."""
    module, fused = modules[path], _fused_linear(path, modules)
    for name in set(_own_names(path, modules)).intersection(adapters.modules):
        if fused is not None:
            fused.adapt(name.rpartition(".")[2], adapters.num_ranks)
        elif isinstance(module, Linear | ExpertLinear):
            module.adapt(adapters.num_ranks)


def _leaf(path: _Path, variable: Any, modules: _Modules) -> LeafSpec:
    module: Any = modules[path[:-1]]
    fused, layout = _fused_linear(path[:-1], modules), None
    if fused is not None:
        layout = fused.layout
    elif isinstance(module, Matrix | DepthwiseConv):
        layout = module.layout
    declared = _declared(variable)
    (first, *_), parameter = _own_names(path[:-1], modules), path[-1]
    return LeafSpec(
        name=f"{first}.{parameter}" if fused is None else _dotted((*path[:-2], parameter)),
        shape=declared.shape if isinstance(declared, ArraySpec) else module.spec.shape,
        declared=declared,
        tensors=tuple(f"{name}.{parameter}" for name in _stored_modules(path[:-1], modules)),
        layout=layout,
        num_experts=module.spec.num_experts if isinstance(module, Matrix) else None,
    )


def _declared(variable: nnx.Variable[Any]) -> QuantArray[ArraySpec] | ArraySpec:
    value = variable.get_value()
    arrays = value.arrays if isinstance(value, QuantArray) else (value,)
    specs = [
        ArraySpec(array.shape, jnp.dtype(array.dtype), axes)
        for array, axes in zip(arrays, array_axes(variable), strict=True)
    ]
    return value.with_arrays(specs) if isinstance(value, QuantArray) else specs[0]


def _stored_modules(path: _Path, modules: _Modules) -> tuple[str, ...]:
    """Return the checkpoint's names of the modules that a module consists of."""
    module, names = modules[path], _own_names(path, modules)
    if not isinstance(module, Matrix) or module.spec.num_experts is None:
        return names
    depth = 2 if _UNNAMED in path else 1  # components of a name after the expert's number
    parts = [name.rsplit(".", depth) for name in names]
    return tuple(_dotted((above, expert, *own)) for expert in range(module.spec.num_experts) for above, *own in parts)


def _own_names(path: _Path, modules: _Modules) -> tuple[str, ...]:
    """Return a module's name in checkpoints, or the names of the parts of a fused one."""
    fused = _fused_linear(path, modules)
    stored = [
        part
        for i, part in enumerate(path)
        if part != _UNNAMED and not isinstance(modules.get(path[: i + 1]), FusedLinear)
    ]
    return (_dotted(stored),) if fused is None else tuple(_dotted((*stored[:-1], name)) for name in fused.names)


def _fused_linear(path: _Path, modules: _Modules) -> FusedLinear | None:
    """Return the FusedLinear whose fused module is at `path`, if any."""
    holder = modules.get(path[:-1])
    return holder if isinstance(holder, FusedLinear) and holder.is_fused and path[-1] == "fused" else None


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
