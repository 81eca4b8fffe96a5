"""The mesh axes of one engine, and the one table from logical axes to them.

    mesh axis   splits                                             an engine has it for
    data        KV pages, experts or their width, feed-forward     --data-parallel-size
    expert      heads, experts, feed-forward                       --expert-parallel-size
    tensor      heads, the width of each expert, feed-forward      --tensor-parallel-size

A layer's heads are split over `expert` and `tensor` together, its feed-forward block and the vocabulary over all axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from jax.sharding import PartitionSpec

from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig, KimiDeltaConfig, LightningConfig

DATA: Final = "data"
EXPERT: Final = "expert"
TENSOR: Final = "tensor"

Axes = tuple[str | None, ...]
"""The logical axis of each dimension; None: never split."""
MeshAxes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The parallel sizes of one engine, which has `tensor` x `data` devices."""

    tensor: int = 1
    """Devices that split the heads of a layer."""
    expert: int = 1
    """Groups of experts, over all devices; 1: every device holds a part of each expert."""
    data: int = 1
    """Groups of `tensor` devices, each of which attends with requests of its own."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.data

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each mesh axis, the slowest first; axes of one device only if there are no others."""
        expert = 1 if self.expert == 1 else self.expert // self.data
        sizes = {DATA: self.data, EXPERT: expert, TENSOR: self.tensor // expert}
        return {axis: size for axis, size in sizes.items() if size > 1} or {TENSOR: 1}


@dataclass(frozen=True, slots=True)
class AxisRules:
    """The table from logical axes to mesh axes. Hashable: it is part of every program's key."""

    sizes: tuple[tuple[str, int], ...] = ()
    """Mesh axes and their sizes."""
    table: tuple[tuple[str, MeshAxes], ...] = ()
    """Logical axes and the mesh axes they are split over; axes that are not split are absent."""

    def mesh_axes(self, axis: str | None) -> MeshAxes:
        """Return the mesh axes that split a logical axis; none if every device holds all of it."""
        return dict(self.table).get(axis, ()) if axis is not None else ()

    def count(self, axis: str | None) -> int:
        """Return the number of parts of a logical axis."""
        sizes = dict(self.sizes)
        return math.prod(sizes[name] for name in self.mesh_axes(axis))

    def spec(self, axes: Axes) -> PartitionSpec:
        """Return the partition of an array with these logical axes. Raises ValueError if two share a mesh axis."""
        parts = [self.mesh_axes(axis) for axis in axes]
        used = [name for names in parts for name in names]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {axes} would split two dimensions over the same mesh axis: {parts}")
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in parts))


def cache_shards(config: DecoderConfig, rules: AxisRules) -> int:
    """Return the number of devices that split the KV cache. Every device of a layer holds all vectors that are key and value in one."""
    has_vectors = config.latent is not None or config.compressed is not None
    return rules.count("pages") * (1 if has_vectors else rules.count("kv_heads"))


def common_kv_heads(config: DecoderConfig | EncoderConfig) -> int:
    """Return the greatest number of devices that can split the KV heads of all layers."""
    return config.common_kv_heads if isinstance(config, DecoderConfig) else config.num_kv_heads


def common_vocab(config: DecoderConfig | EncoderConfig) -> int:
    """Return the greatest number of devices that can split the rows of all tables of the vocabulary."""
    if not isinstance(config, DecoderConfig):
        return config.vocab_size
    of_ngrams = (layer.ngram.num_rows for layer in config.layers if layer.ngram is not None)
    return math.gcd(config.vocab_size, config.per_layer_vocab_size or 0, *of_ngrams)


def axis_rules(config: DecoderConfig | EncoderConfig, shape: MeshShape) -> AxisRules:
    """Split every logical axis that divides evenly over the devices; the others are replicated."""
    sizes = shape.sizes
    every = tuple(axis for axis, size in sizes.items() if size > 1)
    heads = tuple(axis for axis in every if axis != DATA)
    experts = tuple(axis for axis in every if axis != TENSOR) if shape.expert > 1 else ()

    def split(count: int, *candidates: MeshAxes) -> MeshAxes:
        return next((axes for axes in candidates if count % math.prod(sizes[axis] for axis in axes) == 0), ())

    table = {
        "vocab": split(common_vocab(config), every, heads),
        "ffn": split(config.intermediate_size, every, heads),
        "kv_heads": split(common_kv_heads(config), heads),
        "pages": tuple(axis for axis in every if axis == DATA),
    }
    table["heads"] = table["kv_heads"]  # attention needs no exchange
    if isinstance(config, DecoderConfig) and isinstance(
        config.recurrent, GatedDeltaConfig | KimiDeltaConfig | LightningConfig
    ):
        table["delta_heads"] = split(
            config.recurrent.num_key_heads, heads
        )  # with the value heads that each of them serves
    if isinstance(config, DecoderConfig) and config.experts is not None:
        table["experts"] = experts
        rest = tuple(axis for axis in every if axis not in experts)
        table["expert_ffn"] = split(config.experts.intermediate_size, rest, tuple(a for a in rest if a != DATA))
        if config.experts.shared_intermediate_size is not None:
            table["shared_ffn"] = split(config.experts.shared_intermediate_size, every, heads)
    return AxisRules(tuple(sizes.items()), tuple((axis, names) for axis, names in table.items() if names))
