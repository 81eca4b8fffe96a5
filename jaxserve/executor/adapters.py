"""The adapters of `--lora-modules` and `--max-loras`: their files, and their shapes in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from jaxserve.checkpoint.gguf.factors import check_not_multiplied
from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.peft_modules import TargetExperts, TargetModel, declared_module
from jaxserve.checkpoint.qkv import Rows
from jaxserve.checkpoint.renamed import our_name
from jaxserve.checkpoint.source import resolve_adapter
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ConvolvedQKVConfig
from jaxserve.models.registry import family_of

_LANES: Final = 16
"""Width of vector registers and of tensor cores: the smallest rank that is reserved."""
_TILE: Final = 32
"""Ranks that a tile of AMX adds up together. Larger ranks fill whole tiles, or an adapter's sums would have another order in
every second place (decision 0086)."""


def open_adapters(
    config: Config, decoder: DecoderConfig, hf: Mapping[str, Any], *, in_memory: bool = False
) -> tuple[Adapter, ...]:
    """Open the adapters of `--lora-modules`, in their order: requests name them by number, from 1.

    hf: the model's `config.json`. in_memory: see `open_adapter`. Raises StartupError in one line.
    """
    if config.model.num_adapter_places:
        check_not_multiplied(hf, "--lora-modules, --max-loras")
    if not config.model.adapters:
        return ()
    target = target_model(decoder, hf)
    return tuple(
        open_adapter(name, resolve_adapter(source), target, in_memory=in_memory)
        for name, source in config.model.adapters.items()
    )


def target_model(decoder: DecoderConfig, hf: Mapping[str, Any]) -> TargetModel:
    """Return the names and shapes that adapters of the model have. hf: its `config.json`."""
    family, experts = family_of(hf), decoder.experts
    renames = {**family.renames, **family.config_renames(hf)}
    kv_rows = decoder.num_stored_kv_heads * decoder.head_dim

    def rename(module: str) -> str:
        return our_name(renames, f"{module}.weight").removesuffix(".weight")

    stacked = None
    if experts is not None:
        width = experts.latent_size or decoder.hidden_size
        has_gate = decoder.mlp_has_gate
        stacked = TargetExperts(
            experts.num_experts, width, experts.intermediate_size, family.stacked_experts, has_gate=has_gate
        )
    queries, num_kv_heads = decoder.num_heads * decoder.head_dim, decoder.num_stored_kv_heads
    parts: dict[str, Mapping[str, Rows]] = {
        "qkv_proj": family.qkv_rows.parts(queries, kv_rows, num_kv_heads),
        "gate_up_proj": _gate_up(decoder.intermediate_size),
    }
    if experts is not None and experts.shared_intermediate_size is not None:
        parts["shared_experts.gate_up_proj"] = _gate_up(experts.shared_intermediate_size)
    recurrent = frozenset() if decoder.recurrent is None else frozenset(decoder.recurrent.projections)
    return TargetModel(parts, rename, stacked, is_transposed=bool(family.transposed), recurrent=recurrent)


def _gate_up(width: int) -> dict[str, Rows]:
    return {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}


def adapters_config(
    adapters: Sequence[Adapter], settings: ModelConfig | None = None, decoder: DecoderConfig | None = None
) -> AdaptersConfig | None:
    """Return the shapes of the adapters in the model; None without any. Raises ConfigError.

    settings, decoder: those of a model in which --max-loras may reserve more places, for adapters of any module.
    """
    largest = max((adapter.rank for adapter in adapters), default=1)
    modules = {declared_module(module) for adapter in adapters for module in adapter.additions}
    count = len(adapters)
    if settings is not None and settings.max_loras is not None and decoder is not None:
        count, reserved = settings.num_adapter_places, settings.max_lora_rank
        if reserved is not None and largest > reserved:
            raise ConfigError(f"--max-lora-rank {reserved}: --lora-modules has an adapter of rank {largest}")
        largest, modules = reserved or largest, modules | adaptable_modules(decoder)
    if not count:
        return None
    return AdaptersConfig(count, padded_rank(largest), tuple(sorted(modules)))


def padded_rank(rank: int) -> int:
    """Return the rank that is reserved for each adapter if the largest has `rank`."""
    return _LANES if rank <= _LANES else -(-rank // _TILE) * _TILE


def adaptable_modules(decoder: DecoderConfig) -> set[str]:
    """Return the names of all modules that an adapter may change; one stands for a projection of all experts of a layer."""
    modules = set()
    for index, layer in enumerate(decoder.layers):
        modules |= {f"model.layers.{index}.{name}" for name in _mixer_matmuls(decoder, layer)}
        projections = ("gate_proj", "up_proj", "down_proj") if decoder.mlp_has_gate else ("up_proj", "down_proj")
        modules |= {f"model.layers.{index}.{block}.{name}" for block in _feed_forward(layer) for name in projections}
    return modules


def _mixer_matmuls(decoder: DecoderConfig, layer: LayerConfig) -> list[str]:
    """Return the names of the matmuls of a layer's attention and of its recurrent mixer."""
    found = []
    if layer.has_kv:
        is_convolved = isinstance(layer.recurrent, ConvolvedQKVConfig)  # its projections are those of the mixer
        names = ["o_proj"] if is_convolved else ["q_proj", "o_proj"]
        if layer.kv_source is None and not is_convolved:
            names += ["k_proj", "v_proj"] if layer.has_value_projection else ["k_proj"]
        if decoder.output_gate in ("apart", "heads"):
            names.append("gate_proj")
        if layer.blocks is not None and not layer.blocks.is_pooled:
            names += ["indexer.q_proj", "indexer.k_proj"]
        found += [f"self_attn.{name}" for name in names]
    if layer.recurrent is not None:
        found += [f"{layer.recurrent.module}.{name}" for name in layer.recurrent.projections]
    return found


def _feed_forward(layer: LayerConfig) -> list[str]:
    """Return the names of a layer's feed-forward blocks and experts in the decoder."""
    if not layer.has_mlp:
        return []
    experts = layer.experts
    if experts is None:
        return ["mlp"]
    block = "mlp.sparse" if experts.has_dense else "mlp"
    blocks = [f"{block}.experts"]
    if experts.shared_intermediate_size is not None:
        blocks.append(f"{block}.shared_experts")
    return [*blocks, "mlp.dense"] if experts.has_dense else blocks
