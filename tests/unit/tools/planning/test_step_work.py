"""Work of a step, counted by hand for small shapes, and shown by the metrics."""

from __future__ import annotations

import jax.numpy as jnp
import msgspec
import pytest

from jaxserve.ipc.report import ModelWork
from jaxserve.layers.policy import plain
from jaxserve.metrics import Metrics, exposition
from jaxserve.models.registry import decoder_config
from jaxserve.models.skeleton import make_skeleton
from jaxserve.models.step_work import StepWork, step_work
from tests.unit.running_api import MODEL_INFO
from tests.unit.tools.planning.configs import LLAMA_8B, QWEN3_30B_A3B

D, F, V, N, K, H = 32, 48, 100, 4, 2, 8
DENSE = {
    "hidden_size": D,
    "intermediate_size": F,
    "vocab_size": V,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "num_hidden_layers": 3,
}
ATTENTION = D * (N + 2 * K) * H + N * H * D


@pytest.mark.parametrize("is_tied", [False, True])
def test_each_matrix_of_a_dense_decoder_multiplies_each_token(is_tied: bool) -> None:
    config = decoder_config(LLAMA_8B | DENSE | {"tie_word_embeddings": is_tied})
    work = step_work(make_skeleton(config, plain(jnp.dtype("float32"))))
    layers, head = 3 * (ATTENTION + 3 * D * F), D * V
    assert work == StepWork(layers, head, 4 * (layers + head), 0), "embeddings are read by rows, norms are no matrices"


def test_a_token_is_multiplied_by_the_experts_that_it_selects() -> None:
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": F}
    config = decoder_config(QWEN3_30B_A3B | DENSE | mixture | {"tie_word_embeddings": False})
    work = step_work(make_skeleton(config, plain(jnp.dtype("float32"))))
    expert, router = 3 * D * F, D * 6
    assert work.num_layer_weights == 3 * (ATTENTION + router + 2 * expert)
    assert work.expert_bytes == 4 * 3 * 6 * expert
    assert work.read_bytes == 4 * (3 * (ATTENTION + router + 6 * expert) + D * V)


def test_metrics_show_the_work_of_a_model_that_is_ready() -> None:
    metrics = Metrics("tiny")

    def shown() -> list[str]:
        lines = exposition(metrics.snapshot()).decode().splitlines()
        return [line for line in lines if line.startswith(("jaxserve:model_token", "jaxserve:model_step"))]

    metrics.record_ready(msgspec.structs.replace(MODEL_INFO, work=ModelWork(600, 40, 1234)))
    label = 'engine="0",model_name="tiny"'
    assert shown() == [
        f'jaxserve:model_token_flops{{{label},part="layers"}} 600.0',
        f'jaxserve:model_token_flops{{{label},part="head"}} 40.0',
        f"jaxserve:model_step_read_bytes{{{label}}} 1234.0",
    ]
    metrics.forget_engine()
    assert shown() == []
