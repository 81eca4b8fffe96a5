"""Parameters in an Orbax checkpoint: written once as devices hold them, and restored straight into the devices' shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jaxserve.checkpoint.converted import ARRAYS, ConvertedCheckpoint
from jaxserve.errors import CheckpointError
from jaxserve.models.skeleton import EncoderSkeleton, LeafSpec, ModelSkeleton
from jaxserve.sharding.mesh import Sharding

ADAPTER = ".lora_"
"""Part of the names of tensors that belong to adapters."""


def is_adapter(leaf: LeafSpec) -> bool:
    """Return True for a parameter that holds adapters: those are not converted."""
    return ADAPTER in leaf.tensors[0]


def layout_facts(skeleton: ModelSkeleton | EncoderSkeleton) -> dict[str, str]:
    """Return everything that the arrays of the parameters depend on beside the weights, by name."""
    policy, config = skeleton.policy, skeleton.config
    leaves = [leaf for leaf in skeleton.leaves if not is_adapter(leaf)]
    order = [getattr(config, name, None) for name in ("head_dim", "rotary_dim", "rotary_pairs", "kv_copies")]
    return {
        "dtype": str(policy.weights),
        "quantization": policy.quant.name,
        "platform": policy.quant.platform,
        "devices": f"{policy.mesh}, fused for {policy.fused_for}",
        "parameters": hashlib.sha256(repr((leaves, policy.quant, order)).encode()).hexdigest()[:16],
    }


def save_arrays(folder: Path, skeleton: ModelSkeleton, params: Sequence[jax.Array]) -> None:
    """Write the parameters, in the order of the skeleton's arrays, as an Orbax checkpoint in `folder`."""
    from orbax.checkpoint import StandardCheckpointer  # here: seconds that no other command need spend

    arrays = iter(params)
    tree = {leaf.name: [next(arrays) for _ in leaf.arrays] for leaf in skeleton.leaves}
    with StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / ARRAYS).resolve(), tree)


def restore_arrays(
    checkpoint: ConvertedCheckpoint, skeleton: ModelSkeleton | EncoderSkeleton, sharding: Sharding
) -> Mapping[str, list[jax.Array]]:
    """Return the arrays of each parameter that was converted, on the devices. Each device reads its shards.

    Raises CheckpointError in one line if the conversion is for other settings or cannot be read.
    """
    from orbax.checkpoint import StandardCheckpointer

    wanted, found = layout_facts(skeleton), checkpoint.manifest.layout
    others = [f"{name} {found.get(name)}, needed: {fact}" for name, fact in wanted.items() if found.get(name) != fact]
    if others:
        raise CheckpointError(
            f"{checkpoint.path}: converted for other settings ({'; '.join(others)}); convert the model again with those of the server"
        )
    tree = {
        leaf.name: [
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding.place(spec.axes)) for spec in leaf.arrays
        ]
        for leaf in skeleton.leaves
        if not is_adapter(leaf)
    }
    try:
        with StandardCheckpointer() as checkpointer:
            restored: dict[str, list[jax.Array]] = checkpointer.restore((checkpoint.path / ARRAYS).resolve(), tree)
    except Exception as error:  # Orbax and its storage raise errors of many kinds for damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{checkpoint.path / ARRAYS}: cannot be read: {reason[:200]}") from error
    jax.block_until_ready(restored)
    return restored
