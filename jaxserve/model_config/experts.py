"""The mixture-of-experts block of a decoder layer, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate * sigmoid(slope * gate) * (up + offset), with the gate at most `limit` and up within ±`limit` (gpt-oss)."""

    limit: float
    slope: float
    offset: float = 1.0
    """0: SiLU of a bounded gate (GLM-5.3, Hy4)."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routed experts of one layer, of which each token uses the best few."""

    num_experts: int  # E
    num_per_token: int  # k
    """Experts per token (top-k)."""
    intermediate_size: int  # F
    """Width of one expert."""
    is_normalized: bool
    """True if the weights of a token's k experts are divided by their sum."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"] = "softmax"
    """Function from a router's logits to weights. sqrt_softplus: the root of log(1 + e^x) (DeepSeek-V4). sparse_mixer: each of two experts has the softmax of its logit among
    those close to it, see `margin` (Phi-3.5-MoE)."""
    logit_softcap: float | None = None
    """Soft cap on a router's logits, as `DecoderConfig.logit_softcap`; None: there is none (Laguna)."""
    margin: float = 0.0
    """Relative distance from the best logit within which sparse_mixer counts others."""
    has_correction_bias: bool = False
    """True if a bias is added to the scores that choose experts, though not to their weights (DeepSeek-V3)."""
    ranks_by_logits: bool = False
    """True if the bias is added to logits instead of to scores (Kolibri 1)."""
    is_hashed: bool = False
    """True: a table of the checkpoint has the experts of each token of the vocabulary; the router's scores are weights only (DeepSeek-V4)."""
    weight_scale: float = 1.0
    """Factor on all weights (`routed_scaling_factor`)."""
    router_width: int | None = None
    """Width of a router that is an MLP: see `layers.mlp_router` (ZAYA); None: it is one matmul."""
    has_router_state: bool = False
    """True if such a router adds what it has of the layer before."""
    num_groups: int = 1
    """Groups of consecutive experts; a token chooses groups first, then experts in them."""
    num_groups_per_token: int = 1
    group_score: Literal["best_two", "best"] = "best_two"
    """Rank of a group: the sum of its two best experts (DeepSeek-V3), or its best expert (DeepSeek-V2)."""
    shared_intermediate_size: int | None = None
    """Width of the shared expert, which every token uses with weight 1; None: there is none."""
    sum_scale: float = 1.0
    """Factor on the sum of the routed experts and the shared one (Cohere 2 with experts: 1/2)."""
    has_shared_gate: bool = False
    """True if the shared expert's output is multiplied by sigmoid of a score (Qwen2-MoE)."""
    has_dense: bool = False
    """True if the layer has a dense feed-forward block as well. Each reads a norm of its own of the layer's input, and their
    outputs, each normalised, are added (Gemma 4)."""
    router_norm_eps: float | None = None
    """Epsilon of a router that normalises its input and scales its dimensions, and multiplies each expert's weight with a
    number of its own (Gemma 4); None: it does not."""
    scales_inputs: bool = False
    """True: an expert's input is multiplied with its weight, and the outputs are added without (Llama 4)."""
    latent_size: int | None = None
    """Width of a projection of the input that the experts compute with, whose sum is projected back; None: D."""
    has_biases: bool = False
    """True if the router and every matmul of an expert have a bias."""
    limit: float | None = None
    """Bound of the activated gate of an expert, as `LayerConfig.mlp_limit`; None: there is none."""
    shared_limit: float | None = None
    """Bound of the activated gate of the shared expert; None: there is none."""
    clamp: ClampedGate | None = None
    """None: activation(gate) * up."""
