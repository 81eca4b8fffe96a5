"""Refusals of attention kernels, of every backend that has kernels."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jaxserve_kernels import latent_attention
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.paged_attention import Paging, Scoring, write_and_attend

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_gpu_mma", "mosaic_gpu_tcgen05", "mosaic_tpu"])
def test_no_kernel_takes_attention_in_chunks_for_a_window(backend: Backend) -> None:
    row = jnp.zeros(1, jnp.int32)
    paging = Paging(row[:, None], row, jnp.arange(2), row, row, None)
    q, pages = jnp.zeros((1, 2, 64), BFLOAT16), jnp.zeros((1, 2, 1, 16, 64), BFLOAT16)
    scoring = Scoring(0.1, sliding_window=32, is_chunked=True)
    with pytest.raises(ValueError, match="no kernel for attention in chunks"):
        write_and_attend(q, q[:, :1], q[:, :1], pages, pages, row[0], paging, scoring=scoring, backend=backend)


@pytest.mark.parametrize("backend", ["mosaic_gpu_mma", "mosaic_gpu_tcgen05", "mosaic_tpu"])
def test_latent_vectors_have_a_kernel_on_hopper_only(backend: Backend) -> None:
    reason = latent_attention.unsupported(backend, (1, 2, 1, 16, 576), 512, BFLOAT16, BFLOAT16)
    assert reason is not None
    assert reason.startswith("no kernel for latent attention (MLA)")
