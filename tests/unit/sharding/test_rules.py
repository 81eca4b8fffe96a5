"""The table from logical axes to mesh axes, and shapes that a model cannot have."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.recurrent import LightningConfig
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape, axis_rules

EXPERTS = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=64, is_normalized=True)
DENSE = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerConfig(),),
    max_position=64,
    norm_eps=1e-5,
    rope_theta=1e4,
)
MIXTURE = replace(DENSE, layers=(LayerConfig(experts=EXPERTS),))


def table(config: DecoderConfig, shape: MeshShape) -> dict[str, tuple[str, ...]]:
    return dict(axis_rules(config, shape).table)


def test_one_device_splits_nothing() -> None:
    assert table(DENSE, MeshShape()) == {}
    assert dict(MeshShape().sizes) == {"tensor": 1}


def test_tables_of_two_vocabularies_are_split_over_devices_that_divide_both() -> None:
    config = replace(DENSE, per_layer_dim=8, per_layer_vocab_size=300)
    assert table(config, MeshShape(4))["vocab"] == ("tensor",)
    assert table(config, MeshShape(4, data=2))["vocab"] == ("tensor",)
    assert "vocab" not in table(config, MeshShape(8))


def test_heads_of_lightning_attention_are_split() -> None:
    config = replace(DENSE, layers=(LayerConfig(recurrent=LightningConfig(8, 8, decay_scale=1.0)),))
    assert table(config, MeshShape(4))["delta_heads"] == ("tensor",)


def test_data_ranks_split_pages_and_feed_forward_but_no_heads() -> None:
    everything = ("data", "tensor")
    assert dict(MeshShape(2, data=4).sizes) == {"data": 4, "tensor": 2}
    assert table(DENSE, MeshShape(2, data=4)) == {
        "vocab": everything,
        "ffn": everything,
        "kv_heads": ("tensor",),
        "heads": ("tensor",),
        "pages": ("data",),
    }


def test_experts_are_split_over_data_and_expert_axes_and_their_width_over_the_rest() -> None:
    shape = MeshShape(4, expert=4, data=2)
    assert dict(shape.sizes) == {"data": 2, "expert": 2, "tensor": 2}
    rules = axis_rules(MIXTURE, shape)
    assert rules.mesh_axes("experts") == ("data", "expert")
    assert rules.mesh_axes("expert_ffn") == ("tensor",)
    assert (rules.count("experts"), rules.count("expert_ffn"), rules.count("ffn")) == (4, 2, 8)
    spec = rules.spec(("experts", "expert_ffn", "embed"))
    assert spec == PartitionSpec(("data", "expert"), "tensor", None)
    with pytest.raises(ValueError, match="two dimensions over the same mesh axis"):
        rules.spec(("experts", "ffn"))


def test_an_axis_that_does_not_divide_over_all_devices_is_split_over_one_ranks_devices_or_not_at_all() -> None:
    assert table(replace(DENSE, intermediate_size=6), MeshShape(2, data=4))["ffn"] == ("tensor",)
    assert "ffn" not in table(replace(DENSE, intermediate_size=7), MeshShape(2, data=4))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_devices", "copies"),
    [(8, 2, 1, 1), (8, 2, 2, 1), (8, 2, 4, 2), (8, 2, 8, 4), (8, 8, 8, 1), (6, 2, 4, 1), (8, 2, 3, 1), (28, 4, 8, 1)],
)
def test_kv_heads_are_copied_if_devices_are_a_multiple_and_divide_the_query_heads(
    heads: int, kv_heads: int, num_devices: int, copies: int
) -> None:
    config = replace(DENSE, num_heads=heads, num_kv_heads=kv_heads)
    served = config.for_devices(num_devices)
    assert (served.kv_copies, served.num_kv_heads, served.num_stored_kv_heads) == (copies, kv_heads * copies, kv_heads)
    assert served.for_devices(num_devices) == served
    assert served.for_devices(1) == config


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (DENSE, MeshShape(2, expert=2), "--expert-parallel-size 2: this model has no experts"),
        (replace(MIXTURE, layers=(LayerConfig(experts=replace(EXPERTS, num_experts=6)),)), MeshShape(4, expert=4), "6"),
        (DENSE, MeshShape(4, data=4), "needs 16 devices, found 8"),
    ],
)
def test_a_shape_that_a_model_cannot_have_is_refused_in_one_line(
    config: DecoderConfig, shape: MeshShape, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sharding(config, shape)


def test_the_mesh_takes_any_devices_in_their_order() -> None:
    devices = jax.devices()[::-1]
    sharding = make_sharding(DENSE, MeshShape(2, data=2), devices)
    assert sharding.devices == tuple(devices[:4])
    assert sharding.mesh.devices.shape == (2, 2)
    assert sharding.place((None, "pages", "kv_heads")).spec == PartitionSpec(None, "data", "tensor")


@pytest.mark.parametrize(("tensor", "expert", "data"), [(4, 3, 1), (2, 8, 2), (4, 2, 4)])
def test_sizes_that_do_not_fit_together_are_refused(tensor: int, expert: int, data: int) -> None:
    with pytest.raises(ConfigError, match=f"--expert-parallel-size {expert} must divide the {tensor * data} devices"):
        ParallelConfig(tensor_parallel_size=tensor, expert_parallel_size=expert, data_parallel_size=data)
