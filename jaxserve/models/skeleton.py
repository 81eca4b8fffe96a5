"""A model as the running system sees it: a flat tuple of arrays, and how to put them back together.

flax ends here. `ModelSkeleton` is made without allocating anything; the loader fills its leaves by
name; the step functions rebuild the module while they are traced. Nothing of nnx crosses `jax.jit`:
a flat tuple of leaves costs a tenth of the dispatch time of module objects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.layers.fused import FusedLayout, FusedLinear
from jaxserve.layers.linear import Linear, Matrix
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.encoder import Encoder
from jaxserve.sharding.mesh import split_axes


def array_bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """What an array takes on a device: two numbers of 4 bits share a byte."""
    bits = 4 if dtype == jnp.int4 else 8 * dtype.itemsize
    return math.prod(shape) * bits // 8


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One parameter: what it is called, and what must be there."""

    name: str
    """The checkpoint's, if it has one."""
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    tensors: tuple[str, ...]
    """Of the checkpoint: what the parameter is made of."""
    layout: FusedLayout | None = None
    """Where each of the tensors lies, if they are several."""
    num_experts: int | None = None
    """Of which all have such tensors: one expert's come behind those of another, and so they do in the parameter."""

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of one expert, where there are some."""
        return self.shape if self.num_experts is None else self.shape[1:]

    @property
    def parts(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors and their shapes."""
        counts = (self.own_shape[:1] if self.layout is None else self.layout.counts) * (self.num_experts or 1)
        return {name: (count, *self.own_shape[1:]) for name, count in zip(self.tensors, counts, strict=True)}

    def join(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """The parameter out of its tensors, in their order; of all, rows come first."""
        if self.num_experts is None:
            return np.ascontiguousarray(self._joined(parts))
        whole, remaining = np.empty(self.shape, self.dtype), iter(parts)
        for own in whole:
            own[...] = self._joined(itertools.islice(remaining, len(self.tensors) // self.num_experts))
        return whole

    def _joined(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """What is of one expert, where there are some."""
        if self.name.endswith(("_scale", "_offset")) and len(self.own_shape) == 2:  # of groups: outputs come last here
            return self._by_rows(parts, self.own_shape[::-1]).T
        return self._by_rows(parts, self.own_shape)

    def _by_rows(self, parts: Iterable[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        if self.layout is not None:
            return self.layout.join(parts, shape, self.dtype)
        (whole,) = parts
        return whole

    @property
    def num_bytes(self) -> int:
        """Over all devices, each part counted once."""
        return array_bytes(self.shape, self.dtype)


@dataclass(frozen=True)
class ModelSkeleton:
    """Everything of a model but its numbers."""

    config: DecoderConfig
    policy: DtypePolicy
    leaves: tuple[LeafSpec, ...]
    graph: Any
    treedef: Any
    adapters: AdaptersConfig | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, before any quantisation."""
        return self.policy.weights

    def build(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these arrays, in the order of `self.leaves`. Called while tracing."""
        model: Decoder = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        return model


@dataclass(frozen=True)
class EncoderSkeleton:
    """The same of an encoder."""

    config: EncoderConfig
    policy: DtypePolicy
    leaves: tuple[LeafSpec, ...]
    graph: Any
    treedef: Any

    def build(self, leaves: tuple[jax.Array, ...]) -> Encoder:
        """The module over these arrays, in the order of `self.leaves`. Called while tracing."""
        model: Encoder = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
        return model


def make_skeleton(config: DecoderConfig, policy: DtypePolicy, adapters: AdaptersConfig | None = None) -> ModelSkeleton:
    """Declare the decoder of `config` with its parameters as `policy` asks, and room for `adapters`."""
    policy = replace(policy, split_axes=split_axes(config, policy.num_devices))
    declared = _declare(lambda: Decoder(config, policy), policy, adapters)
    return ModelSkeleton(config, policy, *declared, adapters=adapters)


def make_encoder_skeleton(config: EncoderConfig, policy: DtypePolicy) -> EncoderSkeleton:
    """Declare the encoder of `config` with its parameters as `policy` asks."""
    policy = replace(policy, split_axes=split_axes(config, policy.num_devices))
    return EncoderSkeleton(config, policy, *_declare(lambda: Encoder(config, policy), policy))


def _declare(
    make: Callable[[], nnx.Module], policy: DtypePolicy, adapters: AdaptersConfig | None = None
) -> tuple[tuple[LeafSpec, ...], Any, Any]:
    """Leaves, graph and tree of a module, without allocating anything."""
    plain = frozenset(policy.plain_matrices)

    def declare() -> nnx.Module:
        model = make()
        modules = dict(nnx.iter_modules(model))
        for path, module in modules.items():
            if not isinstance(module, Matrix):
                continue
            if not plain.isdisjoint(_stored_modules(path, modules)):
                module.keep_plain()
            if adapters is not None and isinstance(module, Linear):
                _adapt(path, modules, adapters)
        return model

    model = nnx.eval_shape(declare)
    modules = dict(nnx.iter_modules(model))
    graph, state = nnx.split(model)
    leaves = tuple(_leaf(path, variable, modules) for path, variable in nnx.to_flat_state(state))
    arrays, treedef = jax.tree.flatten(state)
    if [leaf.shape for leaf in arrays] != [leaf.shape for leaf in leaves]:
        raise RuntimeError("flax orders flat state and tree leaves differently: names would go to wrong arrays")
    return leaves, graph, treedef


_UNNAMED: Final = "adapters"
"""Where a product has what adapters add to it: in an adapter's file that stands beside the product's weight."""
_Path = tuple[Any, ...]
_Modules = Mapping[_Path, nnx.Module]


def _adapt(path: _Path, modules: _Modules, adapters: AdaptersConfig) -> None:
    """Give the product at `path` room for what adapters add to it, if any do."""
    module, fused = modules[path], _fused_linear(path, modules)
    for name in set(_own_names(path, modules)).intersection(adapters.modules):
        if fused is not None:
            fused.adapt(name.rpartition(".")[2], adapters.num_ranks)
        elif isinstance(module, Linear):
            module.adapt(adapters.num_ranks)


def _leaf(path: _Path, variable: Any, modules: _Modules) -> LeafSpec:
    module, fused = modules[path[:-1]], _fused_linear(path[:-1], modules)
    layout = None if fused is None else fused.layout
    (first, *_), parameter = _own_names(path[:-1], modules), path[-1]
    return LeafSpec(
        name=f"{first}.{parameter}" if layout is None else _dotted((*path[:-2], parameter)),
        shape=variable.shape,
        dtype=jnp.dtype(variable.dtype),
        axes=variable.get_metadata()["axes"],
        tensors=tuple(f"{name}.{parameter}" for name in _stored_modules(path[:-1], modules)),
        layout=layout,
        num_experts=module.num_experts if isinstance(module, Matrix) else None,
    )


def _stored_modules(path: _Path, modules: _Modules) -> tuple[str, ...]:
    """What a module is made of, as checkpoints call it."""
    module, names = modules[path], _own_names(path, modules)
    if not isinstance(module, Matrix) or module.num_experts is None:
        return names
    parts = [name.rpartition(".") for name in names]
    return tuple(f"{above}.{expert}.{name}" for expert in range(module.num_experts) for above, _, name in parts)


def _own_names(path: _Path, modules: _Modules) -> tuple[str, ...]:
    """A module's name, or those that a joined product has; what checkpoints do not know stands in none."""
    fused = _fused_linear(path, modules)
    stored = [
        part
        for i, part in enumerate(path)
        if part != _UNNAMED and not isinstance(modules.get(path[: i + 1]), FusedLinear)
    ]
    return (_dotted(stored),) if fused is None else tuple(_dotted((*stored[:-1], name)) for name in fused.names)


def _fused_linear(path: _Path, modules: _Modules) -> FusedLinear | None:
    """Whose joined product the module at `path` is."""
    holder = modules.get(path[:-1])
    return holder if isinstance(holder, FusedLinear) and holder.is_fused and path[-1] == "fused" else None


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))
