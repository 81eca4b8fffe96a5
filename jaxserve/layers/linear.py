"""Matmuls with weights stored output-major `[out, in]`, as checkpoints have them.

Output-major is also the faster layout for XLA:CPU's matmuls of few rows, and the tied head needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.low_rank.api import add_low_rank, has_kernel
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.param import FusedLayout, matrix_parameter, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.quant.array import QuantArray
from jaxserve.quant.formats._transposed import TRANSPOSED
from jaxserve.sharding.rules import Axes
from jaxserve.sharding.shard_map import all_reduce, has_mesh, sharded


class Tokens(NamedTuple):
    """Number and adapters of the rows of a matmul."""

    num_real: Int[Array, ""]
    """Rows that are tokens; those after them are padding."""
    adapters: Bool[Array, "T A"] | None = None
    """True for the ranks of each token's adapter, among the ranks of all adapters; None: there are no adapters."""
    ids: Int[Array, "T"] | None = None
    """The tokens, for routers that choose experts by them; None: there are no such routers."""

    def at(self, places: Int[Array, "R"], count: Int[Array, ""]) -> Tokens:
        """Return the rows at these places, of which the first `count` are tokens."""
        return Tokens(count, *(None if array is None else array[places] for array in self[1:]))


class ExpertRows(NamedTuple):
    """Experts and adapters of rows that are sorted by expert."""

    group_sizes: Int[Array, "E"]
    """Rows of each expert; the rows after those of all experts are padding."""
    adapters: Bool[Array, "R A"] | None = None
    """True for the ranks of the adapter of each row's token, as in `Tokens`; None: there are no adapters."""


class Matrix(nnx.Module):
    """An `[out, in]` weight as its format stores it.

    num_experts: experts that each have one; None: there is one. layout: row order of the matrices that the checkpoint's tensor
    has one after the other; None: that of the checkpoint.
    """

    def __init__(
        self,
        out_dim: int,
        in_dim: int,
        axes: Axes,
        policy: DtypePolicy,
        *,
        num_experts: int | None = None,
        layout: FusedLayout | None = None,
    ) -> None:
        self.spec = policy.matrix(out_dim, in_dim, axes, num_experts)
        self.policy, self.layout = policy, layout
        self.weight = matrix_parameter(policy.quant.format.declare(self.spec))

    def keep_blocks(self, kind: str | None) -> None:
        """Declare the weight in the blocks that the checkpoint has, by ggml's name; None: it has none of one type."""
        self.spec = replace(self.spec, stored_kind=kind)
        self.weight = matrix_parameter(self.policy.quant.format.declare(self.spec))

    def keep_plain(self) -> None:
        """Declare the weight without quantisation."""
        self.weight = matrix_parameter(self.policy.unquantized.quant.format.declare(self.spec))

    def keep_transposed(self) -> None:
        """Declare the weight without quantisation, as `[in, out]`."""
        self.weight = matrix_parameter(TRANSPOSED.declare(self.spec))

    def multiply(
        self, x: Float[Array, "T I"], num_rows: Int[Array, ""], *, is_rounded: bool = False
    ) -> Float[Array, "T O"]:
        """Return x @ weight.T in float32, or rounded to the dtype of x; rows after `num_rows` are padding.

        Where devices split the inputs, each quantises its own share of x, and their sums are added in the dtype of x.
        """
        rules = self.policy.rules
        out_axis, in_axis = self.spec.axes
        summed = rules.mesh_axes(in_axis) if has_mesh() else ()
        weight: QuantArray[Array] = self.weight.get_value()

        def compute(x: Float[Array, "T I"], num_rows: Int[Array, ""], *arrays: Array) -> Float[Array, "T O"]:
            shard = weight.with_arrays(arrays)
            dtype = x.dtype if is_rounded else jnp.float32
            made = weight.format.matmuls(x, [shard], num_rows, self.policy.backend, dtype)[0]
            return all_reduce(made, x.dtype, summed) if summed else made

        operands = zip(weight.arrays, self.weight.get_metadata()["axes"].arrays, strict=True)
        return sharded(compute, [(x, (None, in_axis)), (num_rows, ()), *operands], (None, out_axis), rules)

    def multiply_groups(self, x: Float[Array, "R I"], group_sizes: Int[Array, "E"]) -> Float[Array, "R O"]:
        """Return x @ weight.T of each row's expert, in float32, from this device's part of the weight."""
        weight: QuantArray[Array] = self.weight.get_value()
        y: Array = weight.format.grouped_matmul(x, weight, group_sizes, self.policy.backend)
        return y


class Embedding(Matrix):
    """A `[V, D]` table: looked up by token, or multiplied with to get logits. 4-bit formats store it in 8 bits."""

    def __init__(self, vocab_size: int, dim: int, policy: DtypePolicy, *, has_logit_bias: bool = False) -> None:
        super().__init__(vocab_size, dim, ("vocab", "embed"), policy.for_tables)
        self.bias = parameter((vocab_size,), ("vocab",), policy.vectors) if has_logit_bias else None

    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        table, axes = self.weight.get_value(), self.weight.get_metadata()["axes"].arrays
        if has_mesh() and axes[0][-1] == "vocab":
            return self._look_up_shares(token_ids, table, axes)
        rows: Array = table.format.lookup(table, token_ids, self.policy.activations, self.policy.backend)
        return rows

    def _look_up_shares(
        self, token_ids: Int[Array, "T"], table: QuantArray[Array], axes: tuple[Axes, ...]
    ) -> Float[Array, "T D"]:
        """Look up rows that are columns of the stored array: each device those of its own share, as XLA would copy all columns."""
        rules, dtype = self.policy.rules, self.policy.activations
        split = rules.mesh_axes("vocab")
        num_own = self.spec.out_dim // rules.count("vocab")

        def compute(token_ids: Int[Array, "T"], *arrays: Array) -> Float[Array, "T D"]:
            first = jax.lax.axis_index(split) * num_own if split else 0
            own = token_ids - first
            known = jnp.clip(own, 0, num_own - 1)
            rows: Array = table.format.lookup(table.with_arrays(arrays), known, dtype, self.policy.backend)
            if not split:
                return rows
            is_own = (own >= 0) & (own < num_own)
            return all_reduce(jnp.where(is_own[:, None], rows, 0), dtype, split)

        return sharded(compute, [(token_ids, ()), *zip(table.arrays, axes, strict=True)], (None, "embed"), rules)

    def logits(self, x: Float[Array, "B D"], num_rows: Int[Array, ""]) -> Float[Array, "B V"]:
        """Return float32 logits of the vocabulary; rows after `num_rows` are padding."""
        logits = self.multiply(x, num_rows)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


class LowRank(nnx.Module):
    """Adapters of a matmul: up(down(x)), each token with its own adapter (LoRA, Hu et al., arXiv 2106.09685).

    Two matrices hold the ranks of all adapters side by side; ranks of other adapters are masked between the two. So
    requests of any adapters, and of none, share a step of one shape. The native kernels read the ranks that rows have.
    """

    def __init__(
        self,
        out_dim: int,
        in_dim: int,
        axes: Axes,
        policy: DtypePolicy,
        num_ranks: int,
        layout: FusedLayout | None = None,
    ) -> None:
        self.lora_A = Matrix(num_ranks, in_dim, (None, axes[1]), policy.unquantized)
        self.lora_B = Matrix(out_dim, num_ranks, (axes[0], None), policy.unquantized, layout=layout)
        self.lora_B.keep_transposed()

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        """Return what is added to the matmul, in float32."""
        assert tokens.adapters is not None, "a model with adapters needs every token's adapter"
        ranks = self.lora_A.multiply(x, tokens.num_real)  # (T, A)
        return self.lora_B.multiply(jnp.where(tokens.adapters, ranks, 0).astype(x.dtype), tokens.num_real)

    def has_kernel(self, x: Float[Array, "T I"]) -> bool:
        """Return True if a native kernel adds to the matmul of x."""
        return not has_mesh() and has_kernel(x, *self.matrices, self.lora_A.policy.backend)

    @property
    def matrices(self) -> tuple[Float[Array, "A I"], Float[Array, "A O"]]:
        """The arrays of both matrices."""
        return self.lora_A.weight.get_value().arrays[0], self.lora_B.weight.get_value().arrays[0]

    def added_to(self, y: Float[Array, "T O"], x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        """Return the sum of a matmul and what its adapters add, in float32."""
        return add_adapters([self], [y], x, tokens)[0]


def add_adapters(
    adapters: Sequence[LowRank | None], ys: Sequence[Float[Array, "T _"]], x: Float[Array, "T I"], tokens: Tokens
) -> list[Float[Array, "T _"]]:
    """Return the sum of each matmul of x and what its adapters add, in float32. A native kernel adds them together."""
    made = list(ys)
    together = [(i, own) for i, own in enumerate(adapters) if own is not None and own.has_kernel(x)]
    for i, own in enumerate(adapters):
        if own is not None and not own.has_kernel(x):
            made[i] += own(x, tokens)
    if together:
        assert tokens.adapters is not None, "a model with adapters needs every token's adapter"
        downs, ups = zip(*(own.matrices for _, own in together), strict=True)
        before = [made[i] for i, _ in together]
        backend = together[0][1].lora_A.policy.backend
        sums = add_low_rank(before, x, downs, ups, tokens.adapters, tokens.num_real, backend=backend)
        for (i, _), y in zip(together, sums, strict=True):
            made[i] = y
    return made


class ExpertLowRank(nnx.Module):
    """Adapters of the matmuls of all experts: as `LowRank`, with two matrices for each expert.

    A step in which no row has an adapter gives both matmuls no rows, so kernels read none of their weights.
    """

    def __init__(
        self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, num_ranks: int, *, num_experts: int
    ) -> None:
        plain = policy.unquantized
        self.lora_A = Matrix(num_ranks, in_dim, (None, axes[1]), plain, num_experts=num_experts)
        self.lora_B = Matrix(out_dim, num_ranks, (axes[0], None), plain, num_experts=num_experts)

    def __call__(self, x: Float[Array, "R I"], rows: ExpertRows) -> Float[Array, "R O"]:
        """Return what is added to the matmul, in float32: zeros for rows without an adapter.

        Where devices split the inputs, the results are parts of sums.
        """
        assert rows.adapters is not None, "a model with adapters needs every row's adapter"
        group_sizes = jnp.where(rows.adapters.any(), rows.group_sizes, 0)
        ranks = self.lora_A.multiply_groups(x, group_sizes)  # (R, A)
        y = self.lora_B.multiply_groups(jnp.where(rows.adapters, ranks, 0).astype(x.dtype), group_sizes)
        return jnp.where(rows.adapters.any(1, keepdims=True), y, 0)


class LocalLinear(NamedTuple):
    """The arrays of a `Linear` without its bias, for code that runs on each device; every device has all of them."""

    weight: QuantArray[Array]
    adapters: tuple[QuantArray[Array], QuantArray[Array]] | None

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens, backend: Backend) -> Float[Array, "T O"]:
        """Return the matmul and what its adapters add, in float32."""

        def multiply(x: Array, weight: QuantArray[Array]) -> Array:
            made: Array = weight.format.matmuls(x, [weight], tokens.num_real, backend, jnp.dtype(jnp.float32))[0]
            return made

        y = multiply(x, self.weight)
        if self.adapters is None:
            return y
        assert tokens.adapters is not None, "a model with adapters needs every token's adapter"
        down, up = self.adapters
        ranks = jnp.where(tokens.adapters, multiply(x, down), 0).astype(x.dtype)
        return y + multiply(ranks, up)


class Linear(Matrix):
    """`[out, in]` weight and an optional bias."""

    def __init__(
        self,
        out_dim: int,
        in_dim: int,
        axes: Axes,
        policy: DtypePolicy,
        *,
        bias: bool = False,
        layout: FusedLayout | None = None,
    ) -> None:
        super().__init__(out_dim, in_dim, axes, policy, layout=layout)
        self.bias = parameter((out_dim,), axes[:1], policy.vectors) if bias else None
        self.adapters: LowRank | None = None

    def adapt(self, num_ranks: int) -> None:
        """Declare the adapters of this matmul."""
        spec = self.spec
        own = LowRank(spec.out_dim, spec.in_dim, spec.axes, self.policy, num_ranks, self.layout)
        self.adapters = nnx.data(own)

    def low_rank(self, out_dim: int, num_ranks: int) -> LowRank:
        """Declare adapters of a part of the outputs."""
        return LowRank(out_dim, self.spec.in_dim, self.spec.axes, self.policy, num_ranks)

    def with_outputs(self, out_dim: int) -> Linear:
        """Return a matmul like this one with another number of outputs, in the checkpoint's order."""
        return Linear(out_dim, self.spec.in_dim, self.spec.axes, self.policy, bias=self.bias is not None)

    @property
    def local(self) -> LocalLinear:
        """The arrays for code that runs on each device."""
        own = self.adapters
        adapters = None if own is None else (own.lora_A.weight.get_value(), own.lora_B.weight.get_value())
        return LocalLinear(self.weight.get_value(), adapters)

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        y = self.multiply(x, tokens.num_real, is_rounded=self.adapters is None)
        return self.finish(y if self.adapters is None else self.adapters.added_to(y, x, tokens), x.dtype)

    def finish(self, y: Float[Array, "T O"], dtype: jnp.dtype) -> Float[Array, "T O"]:
        """Return the output in `dtype` of a matmul to which adapters were added."""
        y = y.astype(dtype)
        return y if self.bias is None else y + self.bias[...]


def apply_together(linears: Sequence[Linear], x: Float[Array, "T I"], tokens: Tokens) -> list[Float[Array, "T _"]]:
    """Return the output of each module. Native kernels compute matmuls of one format together, and what adapters add."""
    backend = linears[0].policy.backend
    is_known = all(type(linear) is Linear for linear in linears)  # a subclass may change inputs or outputs
    if backend not in NATIVE or has_mesh() or not is_known:
        return [linear(x, tokens) for linear in linears]
    weights: list[QuantArray[Array]] = [each.weight.get_value() for each in linears]
    made: dict[int, Array] = {}
    for form in dict.fromkeys(weight.format for weight in weights):
        own = [i for i, weight in enumerate(weights) if weight.format is form]
        matmuls = form.matmuls(x, [weights[i] for i in own], tokens.num_real, backend)
        made |= zip(own, matmuls, strict=True)
    ys = add_adapters([each.adapters for each in linears], [made[i] for i in range(len(linears))], x, tokens)
    return [linear.finish(y, x.dtype) for linear, y in zip(linears, ys, strict=True)]
