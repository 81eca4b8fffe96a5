"""Models by shape, as `config.json` would give them, and which of their layers stand for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.registry import decoder_config
from jaxserve.quant.names import NO_QUANTIZATION


@dataclass(frozen=True)
class Model:
    """A model and its layers that differ."""

    title: str
    config: dict[str, Any]
    layers: tuple[int, ...]
    """One layer of each kind."""
    quantization: str = "none"
    blocks: tuple[dict[str, str], ...] = ()
    """Block types of the matrices of each of these layers, by their names in a layer, for a GGUF file."""

    def decoder(self, num_devices: int) -> DecoderConfig:
        """Return the decoder with the layers that differ, for devices that split its heads."""
        whole = decoder_config(self.config)
        layers = tuple(self._taken(whole.layers[index]) for index in self.layers)
        stored = CheckpointQuantization(NO_QUANTIZATION, stored_kinds=self._stored_kinds) if self.blocks else None
        return replace(whole, layers=layers, stored=stored).for_devices(num_devices)

    def _taken(self, layer: LayerConfig) -> LayerConfig:
        """Return a layer whose choices come from the place that their layer has among those that are taken."""
        source = layer.index_source
        return layer if source is None else replace(layer, index_source=self.layers.index(source))

    @property
    def _stored_kinds(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (f"model.layers.{index}.{name}", kind)
            for index, kinds in enumerate(self.blocks)
            for name, kind in kinds.items()
        )


QWEN3_6_35B = Model(
    "Qwen3.6-35B-A3B",
    {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    layers=(0, 3),
)
FALCON_MAMBA_7B = Model(
    "Falcon-Mamba-7B",
    {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "vocab_size": 65_024,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 64,
        "time_step_rank": 256,
        "tie_word_embeddings": False,
    },
    layers=(0, 1),
)
"""Two layers: a pool that is copied between them would be seen."""
GEMMA_4_26B = Model(
    "Gemma-4-26B-A4B",
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "final_logit_softcapping": 30.0,
    },
    layers=(0, 5),
)
DEEPSEEK_V3 = Model(
    "DeepSeek-V3",
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
    },
    layers=(3,),
    quantization="fp8",
)
DEEPSEEK_V3_BLOCKS = replace(DEEPSEEK_V3, title="DeepSeek-V3, fp8 in blocks", quantization="fp8-block-weight-only")
QWEN3_8B_BLOCKS = Model(
    "Qwen3-8B, fp8 in blocks",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    layers=(0,),
    quantization="fp8-block-weight-only",
)
_Q4_K = {
    **{f"self_attn.{name}_proj": "Q4_K" for name in "qkvo"},
    **{f"mlp.{name}_proj": "Q4_K" for name in ("gate", "up", "down")},
}
QWEN3_8B_GGUF = replace(
    QWEN3_8B_BLOCKS,
    title="Qwen3-8B, GGUF Q4_K_M",
    layers=(0, 4),
    quantization="gguf-weight-only",
    blocks=(_Q4_K | {"self_attn.v_proj": "Q6_K", "mlp.down_proj": "Q6_K"}, _Q4_K),
)
QWEN3_8B_NVFP4 = replace(QWEN3_8B_BLOCKS, title="Qwen3-8B, NVFP4", quantization="nvfp4-weight-only")
QWEN3_30B_NVFP4 = Model(
    "Qwen3-30B-A3B, NVFP4",
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
    layers=(0,),
    quantization="nvfp4-weight-only",
)
MODELS = {
    "qwen3.6-35b": QWEN3_6_35B,
    "gemma-4-26b": GEMMA_4_26B,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-blocks": DEEPSEEK_V3_BLOCKS,
    "qwen3-8b-blocks": QWEN3_8B_BLOCKS,
    "qwen3-8b-gguf": QWEN3_8B_GGUF,
    "qwen3-8b-nvfp4": QWEN3_8B_NVFP4,
    "qwen3-30b-nvfp4": QWEN3_30B_NVFP4,
}
