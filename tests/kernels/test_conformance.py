"""Every implementation of paged attention against the dense answer, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import decode_attention, gpu, mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, TOLERANCES, Case, Operands, expected, operands

CASES_BY_SPEED = pytest.mark.parametrize(
    "case",
    [case if case.kv_dtype == "int8" else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)


def _check(case: Case, given: Operands, out: jax.Array) -> None:
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all()
    wanted = expected(case, given)
    np.testing.assert_allclose(found[: len(wanted)], wanted, atol=TOLERANCES[case.dtype], rtol=0)


def _run(case: Case, given: Operands, decode: Callable[..., jax.Array], mixed: Callable[..., jax.Array]) -> jax.Array:
    options = {"scoring": case.scoring, "sinks": None if given.sinks is None else jnp.asarray(given.sinks)}
    pool = map(jnp.asarray, (given.q, given.k_pages, given.v_pages, np.int32(LAYER), given.tables, given.lengths))
    if case.is_decode:
        return decode(*pool, **options)
    starts, num_decode = jnp.asarray(given.query_starts), jnp.int32(case.num_decode_rows)
    return mixed(*pool, (starts, num_decode, given.q.shape[0]), **options)


@CASES_BY_SPEED
def test_the_reference_equals_dense_softmax(case: Case) -> None:
    given = operands(case)

    def mixed(*arguments: jax.Array, **options: object) -> jax.Array:
        *pool, (starts, num_decode, num_tokens) = arguments
        return mixed_attention(*pool, ragged_layout(starts, num_decode, num_tokens=num_tokens), **options)

    _check(case, given, _run(case, given, decode_attention, mixed))


@contextmanager
def _gpu_interpreter() -> Iterator[Callable[[], bool]]:
    """Kernels for GPUs on the CPU; gives a function that says whether threads raced."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip(f"jax {jax.__version__} has no interpreter for Mosaic GPU (make kernels-check has one)")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield lambda: bool(gpu_callbacks.get_races().races_found)


@CASES_BY_SPEED
def test_the_kernels_for_hopper_equal_dense_softmax_without_a_race(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(case)
    pool_shape, dtype = given.k_pages.shape, given.q.dtype
    with _gpu_interpreter() as has_raced:
        assert gpu.unsupported(case.num_heads, pool_shape, dtype, given.k_pages.dtype) is None
        from jaxserve_kernels.paged_attention import tuning
        from jaxserve_kernels.paged_attention.gpu import attention

        known = tuning.load(attention._DEVICE)
        few = {name: sizes | {"programs": 2} for name, sizes in known.items()}  # each does several units
        few["decode"]["min_split"] = 64
        monkeypatch.setattr(tuning, "load", lambda device: few)

        def mixed(*arguments: jax.Array, **options: object) -> jax.Array:
            *pool, (starts, num_decode, num_tokens) = arguments
            ragged = ragged_layout(starts, num_decode, num_tokens=num_tokens, backend="mosaic_gpu")
            return attention.mixed_attention(*pool, ragged, is_emulated=True, **options)

        def decode(*arguments: jax.Array, **options: object) -> jax.Array:
            return attention.decode_attention(*arguments, is_emulated=True, **options)

        out = jax.block_until_ready(_run(case, given, decode, mixed))
        assert not has_raced()
    _check(case, given, out)
