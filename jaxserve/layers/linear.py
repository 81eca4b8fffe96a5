"""Matrix products with weights stored output-major `[out, in]`, as checkpoints have them.

Output-major is also the faster layout for XLA:CPU's skinny products, and the tied head needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.matmul import matmul, offset_product
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.sharding.shard_map import Axes, all_reduce, num_shards, sharded


class Tokens(NamedTuple):
    """What products have to know of the tokens that they are given."""

    num_real: Int[Array, ""]
    """Those behind are padding."""
    adapters: Bool[Array, "T A"] | None = None
    """Which of all adapters' ranks are those of each token's own one; None: there are no adapters."""


class Matrix(nnx.Module):
    """An `[out, in]` weight as `policy` stores it: in its type, or in 8 bits with a scale per output, or in 4 with
    scales `[groups of inputs, out]`, and offsets where a checkpoint has them. Where no group divides the inputs, 4 bits become 8.

    num_experts: of all of which it has one; they come first in every shape.
    """

    def __init__(
        self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, *, num_experts: int | None = None
    ) -> None:
        group = policy.group_of(in_dim, is_split=axes[1] in policy.split_axes)
        if group is None:
            policy = policy.by_outputs
        self.num_experts = num_experts
        self.weight = self._declared((out_dim, in_dim), axes, policy.matrices)
        scale: nnx.Param[Array] | None = None
        offset: nnx.Param[Array] | None = None
        if group is not None:
            scale = self._declared((in_dim // group, out_dim), axes[::-1], policy.vectors)
            if policy.has_offsets:
                offset = self._declared((in_dim // group, out_dim), axes[::-1], jnp.dtype(jnp.float32))
        elif policy.is_quantized:
            scale = self._declared((out_dim,), axes[:1], jnp.dtype(jnp.float32))
        self.weight_scale, self.weight_offset = scale, offset
        self.policy = policy

    def _declared(self, shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param[Array]:
        experts = () if self.num_experts is None else (self.num_experts,)
        return parameter((*experts, *shape), (*(None for _ in experts), *axes), dtype)

    def keep_plain(self) -> None:
        """Declare the weight as it is where nothing is quantised."""
        self.weight = parameter(self.weight.shape, self.weight.get_metadata()["axes"], self.policy.weights)
        self.weight_scale = self.weight_offset = None

    def multiply(self, x: Float[Array, "T I"], num_rows: Int[Array, ""]) -> Float[Array, "T O"]:
        """x @ weight.T in float32; rows behind `num_rows` are padding.

        Where devices share the inputs, each rounds by the largest value of its own, and their sums are added up in the
        type of x.
        """
        split_axes = self.policy.split_axes
        out_axis, in_axis = self.weight.get_metadata()["axes"]
        is_sum = num_shards(in_axis, split_axes) > 1

        def product(x: Float[Array, "T I"], num_rows: Int[Array, ""], *params: Array) -> Float[Array, "T O"]:
            made = self._multiply_shard(x, num_rows, *params)
            return all_reduce(made, x.dtype) if is_sum else made

        params = [each for each in (self.weight, self.weight_scale, self.weight_offset) if each is not None]
        operands = [(each[...], each.get_metadata()["axes"]) for each in params]
        return sharded(product, [(x, (None, in_axis)), (num_rows, ()), *operands], (None, out_axis), split_axes)

    def _multiply_shard(
        self,
        x: Float[Array, "T I"],
        num_rows: Int[Array, ""],
        weight: Array,
        scale: Array | None = None,
        offset: Array | None = None,
    ) -> Float[Array, "T O"]:
        product = matmul(x, weight, scale, num_rows, dynamic=self.policy.is_dynamic, backend=self.policy.backend)
        return product if offset is None else product + offset_product(x, offset)


class LowRank(nnx.Module):
    """What adapters add to a product: up(down(x)), each token by its own adapter (LoRA, Hu et al., arXiv 2106.09685).

    The ranks of all adapters lie beside each other in two matrices, and what is not a token's own is taken out between
    the two: requests of any adapters, and of none, share a step, whose shape says nothing of who is in it.
    """

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, num_ranks: int) -> None:
        plain = replace(policy, quantization="none")
        self.lora_A = Matrix(num_ranks, in_dim, (None, axes[1]), plain)
        self.lora_B = Matrix(out_dim, num_ranks, (axes[0], None), plain)

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        """In float32."""
        assert tokens.adapters is not None, "a model with room for adapters is told whose tokens these are"
        ranks = self.lora_A.multiply(x, tokens.num_real)  # (T, A)
        return self.lora_B.multiply(jnp.where(tokens.adapters, ranks, 0).astype(x.dtype), tokens.num_real)


class Linear(Matrix):
    """`[out, in]` weight and an optional bias."""

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, *, bias: bool = False) -> None:
        super().__init__(out_dim, in_dim, axes, policy)
        self.bias = parameter((out_dim,), axes[:1], policy.vectors) if bias else None
        self.adapters: LowRank | None = None

    def adapt(self, num_ranks: int) -> None:
        """Declare what adapters add."""
        out_dim, in_dim = self.weight.shape
        self.adapters = nnx.data(LowRank(out_dim, in_dim, self.weight.get_metadata()["axes"], self.policy, num_ranks))

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        y = self.multiply(x, tokens.num_real)
        if self.adapters is not None:
            y = y + self.adapters(x, tokens)
        y = y.astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]
