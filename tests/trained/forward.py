"""Small language models in plain jax.numpy, over whole texts: what trains them, and what the engine is compared with.

Written from the papers alone, without pages, chunks or kernels: a gated delta net is its recurrence, token by token, and
a mixture computes every expert for every token. The logits of transformers 5.23 (torch 2.13, CPU) for both trained models
differ from these by at most 4e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Weights = Mapping[str, Array]
"""Matrices and vectors by the names that tensors have in a Hugging Face directory."""

_einsum = jnp.einsum


@dataclass(frozen=True)
class SmallModel:
    """A model of one of two families: Qwen3.5's dense hybrids, or Qwen3's mixtures of experts."""

    name: str
    config: dict[str, Any]
    """The checkpoint's config.json."""

    @property
    def is_hybrid(self) -> bool:
        return "layer_types" in self.config

    def has_attention(self, layer: int) -> bool:
        return not self.is_hybrid or self.config["layer_types"][layer] == "full_attention"

    def logits(self, weights: Weights, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """Return the logits after each token of each text."""
        config = self.config
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            own = _Layer(self, weights, f"model.layers.{layer}.")
            normed = own.norm("input_layernorm", x)
            x = x + (own.attention(normed) if self.has_attention(layer) else own.delta_net(normed))
            normed = own.norm("post_attention_layernorm", x)
            x = x + (own.dense(normed) if self.is_hybrid else own.mixture(normed))
        return _Layer(self, weights, "model.").norm("norm", x) @ weights["lm_head.weight"].T


@dataclass(frozen=True)
class _Layer:
    model: SmallModel
    weights: Weights
    prefix: str

    def weight(self, name: str) -> Array:
        return self.weights[f"{self.prefix}{name}"]

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weight(f"{name}.weight").T

    def norm(self, name: str, x: Array) -> Array:
        """RMSNorm (arXiv 1910.07467); Qwen3.5 stores its weights less one."""
        weight = self.weight(f"{name}.weight")
        return _unit_rms(x) * (1 + weight if self.model.is_hybrid else weight)

    def attention(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Causal attention with grouped heads, norms of queries and keys, and a gate in a hybrid."""
        config, (rows, count, _) = self.model.config, x.shape
        kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
        q = self.linear("self_attn.q_proj", x).reshape(rows, count, config["num_attention_heads"], -1)
        q, gate = q[..., :dim], q[..., dim:]
        k, v = (self.linear(f"self_attn.{name}_proj", x).reshape(rows, count, kv_heads, dim) for name in "kv")
        q, k = (self._rotated(self.norm(f"self_attn.{name}_norm", part)) for name, part in (("q", q), ("k", k)))
        grouped = q.reshape(rows, count, kv_heads, -1, dim)
        scores = _einsum("bikgh,bjkh->bkgij", grouped, k) * dim**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((count, count), bool)), scores, -jnp.inf)
        out = _einsum("bkgij,bjkh->bikgh", jax.nn.softmax(scores), v).reshape(rows, count, -1)
        if self.model.is_hybrid:
            out = out * jax.nn.sigmoid(gate.reshape(rows, count, -1))
        return self.linear("self_attn.o_proj", out)

    def _rotated(self, x: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """Rotate the first part of each head by its token's position (RoPE, arXiv 2104.09864)."""
        rope = self.model.config["rope_parameters"]
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1))
        angles = jnp.arange(x.shape[1])[:, None] * rope["rope_theta"] ** (-jnp.arange(0, size, 2) / size)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def delta_net(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The gated delta net (arXiv 2412.06464) as its recurrence over tokens."""
        config, (rows, count, _) = self.model.config, x.shape
        key_heads, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        taps = self.weight("linear_attn.conv1d.weight")[:, 0]  # (C, W)
        qkv = self.linear("linear_attn.in_proj_qkv", x)
        padded = jnp.pad(qkv, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
        mixed = jax.nn.silu(sum(padded[:, tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])))
        width = key_heads * key_dim
        q, k = (
            jnp.repeat(_unit(part.reshape(rows, count, key_heads, key_dim)), heads // key_heads, 2)
            for part in (mixed[..., :width], mixed[..., width : 2 * width])
        )
        v = mixed[..., 2 * width :].reshape(rows, count, heads, value_dim)
        rate = jax.nn.sigmoid(self.linear("linear_attn.in_proj_b", x))
        speed = jax.nn.softplus(self.linear("linear_attn.in_proj_a", x) + self.weight("linear_attn.dt_bias"))
        kept = jnp.exp(-jnp.exp(self.weight("linear_attn.A_log")) * speed)

        def one(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
            q, k, v, rate, kept = token
            state = state * kept[..., None, None]
            added = rate[..., None] * (v - _einsum("bnh,bnhv->bnv", k, state))
            state = state + k[..., None] * added[..., None, :]
            return state, _einsum("bnh,bnhv->bnv", q, state)

        tokens = [jnp.moveaxis(part, 1, 0) for part in (q * key_dim**-0.5, k, v, rate, kept)]
        _, out = jax.lax.scan(one, jnp.zeros((rows, heads, key_dim, value_dim)), tuple(tokens))
        gate = jax.nn.silu(self.linear("linear_attn.in_proj_z", x).reshape(rows, count, heads, value_dim))
        out = _unit_rms(jnp.moveaxis(out, 0, 1)) * self.weight("linear_attn.norm.weight") * gate
        return self.linear("linear_attn.out_proj", out.reshape(rows, count, -1))

    def dense(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """SwiGLU (arXiv 2002.05202)."""
        gated = jax.nn.silu(self.linear("mlp.gate_proj", x)) * self.linear("mlp.up_proj", x)
        return self.linear("mlp.down_proj", gated)

    def mixture(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The sum of the k likeliest experts, weighted by their probabilities, which are made to sum to one."""
        count, chosen = self.model.config["num_experts"], self.model.config["num_experts_per_tok"]
        found, places = jax.lax.top_k(jax.nn.softmax(self.linear("mlp.gate", x)), chosen)
        shares = found / found.sum(-1, keepdims=True)
        by_expert = _einsum("bsk,bske->bse", shares, jax.nn.one_hot(places, count))
        gate, up, down = (
            jnp.stack([self.weight(f"mlp.experts.{expert}.{name}_proj.weight") for expert in range(count)])
            for name in ("gate", "up", "down")
        )
        gated = jax.nn.silu(_einsum("bsd,efd->bsef", x, gate)) * _einsum("bsd,efd->bsef", x, up)
        return _einsum("bsef,edf,bse->bsd", gated, down, by_expert)


def _unit_rms(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
