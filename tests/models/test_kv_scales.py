"""Scales of an 8-bit KV cache: the logits of keys and values that are rounded as the checkpoint says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import write_and_attend
from jaxserve_kernels.rope import rotate

from jaxserve.errors import CheckpointError
from jaxserve.layers import attention
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.runner.kv_scales.measurement import NUM_TOKENS
from jaxserve.runner.kv_scales.step import MARGIN, measured_names
from tests.models.goldens import golden_checkpoint
from tests.models.kv_scale_files import ScaledModel, cache_logits, random_scales, scheme, write_scales
from tests.models.one_row import PAGE_SIZE, new_cache, step_context

LLAMA, GEMMA = ("llama3_tiny", 3, 2), ("gemma3n_tiny", 4, 2)
"""Models, their layers with keys and values of their own, and their KV heads. Two layers of Gemma 3n read those of others."""


def rounded(x: Any, scales: Any, kv: str) -> Any:
    """Return x as the numbers of a cache mean it, by the definition of the exporters."""
    scaled = x / scales[:, None]
    if kv == "int8":
        return jnp.clip(jnp.rint(scaled), -128, 127) * scales[:, None]
    return jnp.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scales[:, None]


def as_stated(kv: str, scales: np.ndarray) -> Callable[..., Any]:
    """Return attention that rounds keys and values, keeps them in float32 and scales nothing. scales: (L, 2, K)."""

    def attend(q: Any, k: Any, v: Any, *rest: Any, rotation: Any, **options: Any) -> Any:
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        k, v = (rounded(x, each, kv) for x, each in zip((k, v), jnp.asarray(scales)[rest[2]], strict=True))
        return write_and_attend(q, k, v, *rest, **(options | {"scales": None}))

    return attend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kv", "names", "has_heads"),
    [
        (LLAMA, "int8", ("k_scale", "v_scale"), True),
        (LLAMA, "fp8", ("k_proj.k_scale", "v_proj.v_scale"), False),
        pytest.param(LLAMA, "fp8-bits", ("k_scale", "v_scale"), True, marks=pytest.mark.exhaustive),
        (GEMMA, "int8", ("k_proj.output_scale", "v_proj.output_scale"), True),
    ],
    ids=["int8-heads", "fp8-modelopt", "fp8-bits", "shared-keys"],
)
def test_logits_are_those_of_keys_and_values_rounded_as_stated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: tuple[str, int, int],
    kv: str,
    names: tuple[str, str],
    has_heads: bool,
) -> None:
    """Four devices compute the same; they hold two copies of each KV head and of its scales."""
    name, num_layers, num_heads = model
    scales = random_scales(num_layers, num_heads, 127 if kv == "int8" else 448)
    if not has_heads:
        scales = scales[..., :1].astype(ml_dtypes.bfloat16).astype(np.float32)
    tensors = {
        f"model.layers.{layer}.self_attn.{own}": each.reshape(-1, 1, 1)
        if has_heads
        else each.astype(ml_dtypes.bfloat16)
        for layer, both in enumerate(scales)
        for own, each in zip(names, both, strict=True)
    }
    path = write_scales(tmp_path / "model", name, scheme("int" if kv == "int8" else "float"), tensors)
    stored = decoder_of(open_model(path)).stored
    assert stored is not None and stored.kv_scales == kv.removesuffix("-bits")
    found = [cache_logits(path, kv, decodes=model is LLAMA)]
    if model is LLAMA and has_heads:
        found.append(cache_logits(path, kv, num_devices=4))
    exact = cache_logits(path, None) if model is LLAMA else None
    monkeypatch.setattr(
        attention, "write_and_attend", as_stated(kv, np.broadcast_to(scales, (num_layers, 2, num_heads)))
    )
    wanted = cache_logits(path, None)
    spread = wanted.std()
    assert max(np.abs(each - wanted).mean() for each in found) < 5e-3 * spread, (
        "a sum in another order may round a number otherwise"
    )
    assert exact is None or 0.01 * spread < np.abs(wanted - exact).mean() < 0.15 * spread


def test_scales_that_are_no_positive_numbers_are_refused(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{half}_scale": np.full(1, -1.0, np.float32)
        for layer in range(3)
        for half in "kv"
    }
    path = write_scales(tmp_path / "model", "llama3_tiny", scheme(), tensors)
    with pytest.raises(CheckpointError, match=r"[kv]_scale': expected positive numbers, found others"):
        cache_logits(path, "fp8")


def test_a_layer_without_its_scale_is_refused(tmp_path: Path) -> None:
    tensors = {f"model.layers.{layer}.self_attn.k_scale": np.ones(1, np.float32) for layer in range(3)}
    path = write_scales(tmp_path / "model", "llama3_tiny", scheme(), tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.0.self_attn.v_scale' expected with shape \(2,\)"):
        cache_logits(path, "fp8")


def stored_random_tokens(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the keys and values of the tokens that are measured, by cache group."""
    model = ScaledModel(path, None)
    decoder, num_pages = model.decoder, NUM_TOKENS // PAGE_SIZE
    tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, NUM_TOKENS)
    tokens[0] = decoder.bos_token_id

    @jax.jit
    def run(params: tuple[jax.Array, ...], tokens: jax.Array) -> Any:
        cache = new_cache(decoder, num_pages, "float32", jnp.float32)
        step = step_context(decoder, num_pages, jnp.int32(0), NUM_TOKENS)
        return model.skeleton.build(params).hidden(tokens, cache, step)[1]

    return [(np.asarray(pool.k), np.asarray(pool.v)) for pool in run(model.params, jnp.asarray(tokens, jnp.int32))]


@pytest.mark.slow
def test_measured_scales_let_the_largest_key_and_value_through() -> None:
    """One for each number of a head; the logits then differ little from those of a float32 cache. Two devices measure the same."""
    path = golden_checkpoint(LLAMA[0]).path
    measured, by_two = (ScaledModel(path, "int8", num_devices, "numbers").scales for num_devices in (1, 2))
    ((keys, values),) = stored_random_tokens(path)
    for layer in range(3):
        for half, pages in (("k", keys), ("v", values)):
            name = f"model.layers.{layer}.self_attn.{half}_scale"
            np.testing.assert_allclose(measured[name] * 127, MARGIN * np.abs(pages[layer]).max((0, 2)), rtol=1e-5)
            np.testing.assert_allclose(by_two[name], measured[name], rtol=1e-5)
    exact = cache_logits(path, None)
    assert np.abs(cache_logits(path, "int8", kind="numbers") - exact).mean() < 0.05 * exact.std()


def test_layers_with_keys_and_values_of_their_own_are_measured() -> None:
    decoder = decoder_of(open_model(golden_checkpoint(GEMMA[0]).path))
    skeleton = make_skeleton(decoder, replace(plain(jnp.dtype("float32")), kv_scales="numbers"))
    names = [f"model.layers.{layer}.self_attn.{half}_scale" for layer in range(GEMMA[1]) for half in "kv"]
    assert list(measured_names(skeleton)) == sorted(leaf.name for leaf in skeleton.leaves if leaf.is_measured) == names
