"""Layers that keep a state of fixed size per request in place of keys and values, as data.

They are tagged structs: a layer has one of seven kinds, and configs travel between processes as JSON. Embeddings of several tokens in a
row, which come to one of them, have a state, too.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from jaxserve.model_config.activation import Activation
from jaxserve.model_config.cache import CacheGroup, LayerCache, StateArray


class GatedDeltaConfig(msgspec.Struct, frozen=True, tag="gated_delta"):
    """A gated delta net (arXiv 2412.06464): a short convolution, then linear attention by the gated delta rule."""

    module: ClassVar[str] = "linear_attn"
    """Name of the mixer in a layer, as in checkpoints."""
    num_key_heads: int  # K
    num_value_heads: int  # N
    key_dim: int  # H
    value_dim: int  # V
    num_taps: int
    """Tokens that a convolution sees, its own included."""
    inputs: Literal["by_head", "by_part", "apart"]
    """Matrices of the checkpoint. by_head: one for queries, keys, values and gates, by key head (Qwen3-Next). by_part: one
    for queries, then keys, then values, and one for gates (Qwen3.5). apart: one for each (OLMo Hybrid)."""
    rate_scale: float = 1.0
    """Factor on the rate of the delta rule, which is a sigmoid: with 2, eigenvalues of a token's transition may be negative."""
    norm_eps: float | None = None
    """Epsilon of the norm of each value head; None: that of the other norms."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate of each value head's output."""

    @property
    def part_channels(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        if self.inputs == "apart":
            return tuple(f"{name}_proj" for name in ("q", "k", "v", "g", "b", "a", "o"))
        inputs = ("qkvz", "ba") if self.inputs == "by_head" else ("qkv", "z", "b", "a")
        return (*(f"in_proj_{name}" for name in inputs), "out_proj")

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return sum(self.part_channels)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window, and the state N, H, V."""
        state = (self.num_value_heads, self.key_dim, self.value_dim)
        return _arrays(self, state, "delta_heads")


class KimiDeltaConfig(msgspec.Struct, frozen=True, tag="kimi_delta"):
    """Kimi delta attention (arXiv 2510.26692): a gated delta net with a decay for each channel of a key."""

    module: ClassVar[str] = "linear_attn"
    """Name of the mixer in a layer; checkpoints call it `self_attn`."""
    num_heads: int  # N
    head_dim: int  # H
    num_taps: int
    """Tokens that a convolution sees, its own included."""
    is_low_rank: bool = True
    """True if decays and gates come from two matrices each, with `head_dim` numbers between them; False: from one (Ling 3)."""
    decay_bound: float | None = None
    """Logarithm of the strongest decay, of which each channel has a share by a sigmoid; None: decays are not bounded (Kimi Linear)."""

    @property
    def width(self) -> int:
        """Width of the heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_key_heads(self) -> int:
        """Heads that devices share."""
        return self.num_heads

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        rates = ("f_a", "f_b", "g_a", "g_b") if self.is_low_rank else ("f", "g")
        return tuple(f"{name}_proj" for name in ("q", "k", "v", *rates, "b", "o"))

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 3 * self.width

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window, and the state N, H, H."""
        return _arrays(self, (self.num_heads, self.head_dim, self.head_dim), "delta_heads")


class MambaConfig(msgspec.Struct, frozen=True, tag="mamba"):
    """A Mamba mixer, the first version (arXiv 2312.00752): a selective scan with a state for each channel."""

    module: ClassVar[str] = "mamba"
    """Name of the mixer in a layer, as in checkpoints."""
    num_channels: int  # C
    state_dim: int  # N
    step_rank: int
    """Width of the projection between a token and its steps."""
    num_taps: int
    """Tokens that a convolution sees, its own included."""
    has_bias: bool
    """True if the projections of inputs and outputs have biases."""
    has_conv_bias: bool
    norm: Literal["plain", "weightless", "none"] = "none"
    """RMSNorm of B, of C and of what steps are projected from (Jamba), or without weights (Falcon Mamba)."""
    norm_eps: float | None = None
    """Epsilon of these norms; None: that of the other norms."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        return "in_proj", "x_proj", "dt_proj", "out_proj"

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window, and the state N, C."""
        return _arrays(self, (self.state_dim, self.num_channels))


class Mamba2Config(msgspec.Struct, frozen=True, tag="mamba2"):
    """A Mamba-2 mixer (arXiv 2405.21060)."""

    module: ClassVar[str] = "mamba"
    """Name of the mixer in a layer, as in checkpoints."""
    num_heads: int  # N
    head_dim: int
    num_groups: int
    """Groups of heads with common B and C."""
    state_dim: int
    num_taps: int
    """Tokens that a convolution sees, its own included."""
    has_bias: bool
    """True if the projections have biases."""
    has_conv_bias: bool
    norm: Literal["gate_first", "norm_first", "none"]
    """RMSNorm over each group of the gated output, or of the output before its gate; none: only a gate."""
    min_step: float = 0.0
    max_step: float | None = None
    """Bounds of dt; None: there is no upper one."""
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on the projections z, x, B, C and dt (Falcon-H1)."""
    out_scale: float = 1.0
    """Factor on the mixer's output."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        return "in_proj", "out_proj"

    @property
    def width(self) -> int:
        """Width of the heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.width + 2 * self.num_groups * self.state_dim

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window, and the state by head, state dim and head dim."""
        return _arrays(self, (self.num_heads, self.state_dim, self.head_dim))


class LightningConfig(msgspec.Struct, frozen=True, tag="lightning"):
    """Lightning attention (arXiv 2501.08313): linear attention without a convolution, whose decays are constants of heads."""

    module: ClassVar[str] = "linear_attn"
    """Name of the mixer in a layer; checkpoints call it `self_attn`."""
    num_heads: int  # N
    head_dim: int  # H
    decay_scale: float
    """Factor on all decays, which differs by layer. That of head i, counted from 1, is exp(-decay_scale * 2^(-8 i / N))."""
    activation: Activation = "silu"
    """Activation of queries, keys and values."""
    norm_eps: float = 1e-6
    """Epsilon of the norm over all heads."""

    @property
    def width(self) -> int:
        """Width of the heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_key_heads(self) -> int:
        """Heads that devices share."""
        return self.num_heads

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change: not of queries, keys and values, whose rows are by head."""
        return "output_gate", "out_proj"

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The state N, H, H."""
        shape = (self.num_heads, self.head_dim, self.head_dim)
        return (StateArray("state", shape, axes=("delta_heads", None, None)),)


class ShortConvConfig(msgspec.Struct, frozen=True, tag="short_conv"):
    """A gated short convolution (LFM2, arXiv 2511.23404), whose only state is its window."""

    module: ClassVar[str] = "conv"
    """Name of the mixer in a layer, as in checkpoints."""
    num_channels: int
    num_taps: int
    """Tokens that the convolution sees, its own included."""
    has_bias: bool

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        return "in_proj", "o_proj"

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The convolution's window."""
        return _arrays(self)


class ConvolvedQKVConfig(msgspec.Struct, frozen=True, tag="convolved_qkv"):
    """Convolved queries, keys and values of the attention of the same layer (compressed convolutional attention, arXiv 2510.04476),
    whose only state is a window."""

    module: ClassVar[str] = "self_attn.convolved_qkv"
    """Name of the mixer in a layer; checkpoints call it `self_attn.qkv_proj`."""
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    num_depthwise_taps: int
    """Tokens that the convolution of each channel sees, its own included."""
    num_grouped_taps: int
    """Tokens that the convolution of each head's channels, which follows, sees of its results."""

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the mixer's matmuls, which adapters may change."""
        return "q_proj", "k_proj", "v_proj_current", "v_proj_delayed"

    @property
    def num_taps(self) -> int:
        """Tokens that both convolutions see together, the token itself included."""
        return self.num_depthwise_taps + self.num_grouped_taps - 1

    @property
    def part_channels(self) -> tuple[int, int]:
        """Channels of queries and keys together, and of the half of the values that comes a token late."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim, self.num_kv_heads * self.head_dim // 2

    @property
    def num_channels(self) -> int:
        """Channels of the window."""
        return sum(self.part_channels)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """The window."""
        return _arrays(self)


class NgramConfig(msgspec.Struct, frozen=True):
    """Embeddings of the last tokens that a layer adds to every residual stream before its blocks (Qwen4-Exp).

    Each of several heads has a part of one table. A hash of the last 2, 3, ... tokens says which of its rows a head looks up. Tokens
    before an end token, or before the text, count as that end token.
    """

    multipliers: tuple[int, ...]
    """Odd factors below 2^63 on a token and on each of those before it, the latest first; their number is that of the tokens."""
    sizes: tuple[int, ...]
    """Rows of each head, of which the first half hash two tokens if there are two lengths, and so on."""
    num_rows: int
    """Rows of the table, those of all heads and padding."""
    dim: int
    """Numbers that the heads give together."""
    end_token: int
    num_channels: int
    """Width of all residual streams together."""
    num_taps: int
    """Inputs that the convolution of a channel sees; between two of them are `num_tokens` tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence that is hashed."""
        return len(self.multipliers)

    @property
    def heads_per_length(self) -> int:
        """Heads for sequences of one length."""
        return len(self.sizes) // (self.num_tokens - 1)

    @property
    def window(self) -> int:
        """Inputs before a token that the convolution may see."""
        return (self.num_taps - 1) * self.num_tokens

    def layer_cache(self, state: CacheGroup | None) -> LayerCache:
        """Return the storage of a layer without attention. state: that of its recurrent mixer.

        The last tokens have a column for each distance, all alike, and are stored plus 1: a text begins with zeros.
        """
        kept = self.num_tokens - 1
        tokens = StateArray("tokens", (kept, kept))
        inputs = StateArray("inputs", (self.window, self.num_channels), "activations")
        last_tokens, last_inputs = (CacheGroup("state", arrays=(array,)) for array in (tokens, inputs))
        return LayerCache(None, state, last_tokens=last_tokens, last_inputs=last_inputs)


RecurrentConfig = (
    GatedDeltaConfig
    | KimiDeltaConfig
    | MambaConfig
    | Mamba2Config
    | LightningConfig
    | ShortConvConfig
    | ConvolvedQKVConfig
)


def _arrays(
    mixer: GatedDeltaConfig | KimiDeltaConfig | MambaConfig | Mamba2Config | ShortConvConfig | ConvolvedQKVConfig,
    state: tuple[int, ...] | None = None,
    axis: str | None = None,
) -> tuple[StateArray, ...]:
    """Return a request's arrays. A window holds activations as they were; sums over a whole text need float32.

    axis: logical axis of the channels and of the state's heads; None: devices do not split them.
    """
    by_channel, by_head = ((), ()) if axis is None else ((None, axis), (axis, None, None))
    window = StateArray("window", (mixer.num_taps - 1, mixer.num_channels), "activations", by_channel)
    return (window,) if state is None else (window, StateArray("state", state, axes=by_head))
