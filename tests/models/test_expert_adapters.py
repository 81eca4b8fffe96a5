"""Adapters of experts compute what merged weights compute, on one device and on several."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.checkpoint.peft import Adapter
from jaxserve.errors import CheckpointError
from jaxserve.layers.linear import ExpertLowRank, ExpertRows
from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.rules import MeshShape
from tests.models.expert_adapters import RandomAdapter, merged, of_modules, of_parameters, opened, rounded
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint
from tests.models.mesh_model import Adapted, MeshModel

pytestmark = pytest.mark.slow

ALONE = MeshShape()
BY_MODULE = "qwen2_moe_tiny"
"""A dense layer first, then layers of experts and a shared expert."""


def some_modules(module: str) -> bool:
    """Choose experts with an even number, the shared expert, the dense layer, and queries."""
    own = module.split(".")
    if not own[-1].endswith("_proj"):
        return False
    return int(own[own.index("experts") + 1]) % 2 == 0 if "experts" in own else own[-1] not in ("k_proj", "v_proj")


def mixtral_experts(module: str) -> bool:
    """Choose one projection of each expert, another of its neighbour."""
    name, own = module.rpartition(".")[2], module.split(".")
    return "experts" in own and name == ("w1", "w2", "w3")[int(own[-2]) % 3]


def make(kind: str, seed: int = 0) -> tuple[GoldenCheckpoint, RandomAdapter]:
    """Return a checkpoint and a random adapter of it."""
    name, adapter = {
        "modules": lambda: (BY_MODULE, of_modules(BY_MODULE, seed, some_modules)),
        "mixtral": lambda: ("mixtral_tiny", of_modules("mixtral_tiny", seed, mixtral_experts)),
        "parameters": lambda: (BY_MODULE, of_parameters(BY_MODULE, seed, "0.21.2")),
        "exchanged": lambda: (BY_MODULE, of_parameters(BY_MODULE, seed, "0.18.1", exchanged=True)),
        "exchanged mixtral": lambda: ("mixtral_tiny", of_parameters("mixtral_tiny", seed, None, exchanged=True)),
        "inputs by outputs": lambda: ("llama4_tiny", of_parameters("llama4_tiny", seed, "0.17.1")),
    }[kind]()
    return golden_checkpoint(name), adapter


def row_logits(golden: GoldenCheckpoint, adapters: tuple[Adapter, ...], *numbers: int) -> np.ndarray:
    """Return (2, T, V), the logits of two rows with these adapters."""
    model = MeshModel(golden, ALONE, Adapted(adapters, numbers))  # type: ignore[arg-type]
    return model.logits(golden.prompt_ids)


@pytest.mark.parametrize(
    ("kind", "fused_for"),
    [
        pytest.param("modules", 0, marks=pytest.mark.exhaustive),
        ("modules", 1),
        *((kind, 0) for kind in ("parameters", "exchanged")),
        pytest.param("mixtral", 1, marks=pytest.mark.exhaustive),
        pytest.param("exchanged mixtral", 0, marks=pytest.mark.exhaustive),
        pytest.param("inputs by outputs", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_logits_are_those_of_merged_weights(tmp_path: Path, kind: str, fused_for: int) -> None:
    """Each kind of file once, and one with gates and inputs apart and joined."""
    golden, adapter = make(kind)
    adapted = Adapted((opened(golden, adapter.save(tmp_path / "adapter")),), (1, 0))
    found = MeshModel(golden, ALONE, adapted, fused_for=fused_for).logits(golden.prompt_ids)
    expected = MeshModel(merged(golden, adapter, tmp_path / "merged"), ALONE).logits(golden.prompt_ids)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(found[1][-8:], golden.logits, atol=1e-4, rtol=0)
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_adapters_of_one_step_do_not_change_each_other(tmp_path: Path) -> None:
    golden, first = make("modules")
    second = make("parameters", 1)[1]
    adapters = tuple(opened(golden, each.save(tmp_path / name)) for name, each in (("a", first), ("b", second)))
    both = row_logits(golden, adapters, 1, 2)
    for row, number in ((0, 1), (1, 2)):
        alone = row_logits(golden, (adapters[number - 1],), 1, 1)
        np.testing.assert_allclose(both[row], alone[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("shape", "exchange", "fused_for"),
    [
        pytest.param(MeshShape(2), "auto", 2, marks=pytest.mark.exhaustive),
        (MeshShape(2, expert=2), "all-reduce", 0),
        pytest.param(MeshShape(2, expert=2), "all-to-all", 2, marks=pytest.mark.exhaustive),
        (MeshShape(4, expert=2), "all-to-all", 0),
    ],
    ids=str,
)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_experts_are_split_with_their_adapters(tmp_path: Path, shape: MeshShape, exchange: str, fused_for: int) -> None:
    golden, first = make("modules")
    second = make("parameters", 1)[1]
    adapters = tuple(opened(golden, each.save(tmp_path / name)) for name, each in (("a", first), ("b", second)))
    adapted = Adapted(adapters, (2, 1))
    found = MeshModel(golden, shape, adapted, exchange=exchange, fused_for=fused_for).logits(golden.prompt_ids)
    for row, adapter in enumerate((second, first)):
        expected = MeshModel(merged(golden, adapter, tmp_path / str(row)), ALONE).logits(golden.prompt_ids)
        np.testing.assert_allclose(found[row], expected[row], atol=1e-4, rtol=0)


def test_adapters_of_quantised_experts_are_not_quantised(tmp_path: Path) -> None:
    """Weights are stored on the grid of int8, so that only a quantised adapter could make a difference."""
    golden, adapter = make("modules")
    golden = rounded(golden, tmp_path / "rounded")
    adapted = Adapted((opened(golden, adapter.save(tmp_path / "adapter")),), (1, 0))
    model = MeshModel(golden, ALONE, adapted, quant=QuantPolicy("int8-weight-only"))
    stored = {leaf.name: leaf.arrays[0].dtype for leaf in model.skeleton.leaves}
    assert stored["model.layers.1.mlp.experts.down_proj.weight"] == np.int8
    found = model.logits(golden.prompt_ids)
    expected = MeshModel(merged(golden, adapter, tmp_path / "merged"), ALONE).logits(golden.prompt_ids)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4, rtol=0)


def test_rows_without_an_adapter_get_zeros_whatever_the_matrices_hold() -> None:
    adapters = ExpertLowRank(6, 5, (None, None), plain(jnp.dtype("float32")), 4, num_experts=3)
    graph, state = nnx.split(adapters)
    broken = nnx.merge(graph, jax.tree.map(lambda each: jnp.full_like(each, jnp.nan), state))
    rows = ExpertRows(jnp.array([2, 0, 3]), jnp.zeros((7, 4), bool))
    assert not np.asarray(broken(jnp.ones((7, 5)), rows)).any()


def test_a_program_without_adapters_has_no_parameter_of_theirs() -> None:
    decoder = decoder_of(open_model(golden_checkpoint(BY_MODULE).path))
    assert isinstance(decoder, DecoderConfig)
    names = [name for leaf in make_skeleton(decoder, plain(jnp.dtype("float32"))).leaves for name in leaf.tensors]
    assert names and not any(".lora_" in name for name in names)


@pytest.mark.parametrize(
    ("tensors", "config", "complaint"),
    [
        (
            {"A": (24, 60), "B": (64, 24)},
            {},
            r"widths of the experts' matrices \(64 and 64 or 32 and 64 or 64 and 32\)",
        ),
        ({"A": (25, 64), "B": (64, 25)}, {}, "the first from 1 to 512 times 6 experts"),
        ({"A": (24, 64), "B": (64, 18)}, {}, "the second 24, found"),
        ({"A": (24, 64), "B": (64, 24)}, {}, "key 'peft_version': expected, since matrices of experts are square"),
    ],
)
def test_parameters_of_other_shapes_are_rejected(
    tmp_path: Path, tensors: dict[str, tuple[int, int]], config: dict[str, str], complaint: str
) -> None:
    module = "model.layers.1.mlp.experts"
    arrays = {f"{module}.lora_{side}.weight": np.ones(shape, np.float32) for side, shape in tensors.items()}
    folder = RandomAdapter(arrays, {}, config).save(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=complaint):
        opened(golden_checkpoint(BY_MODULE), folder)


def test_an_expert_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    golden, adapter = make("modules")
    tensors = {name.replace(".experts.4.", ".experts.9."): array for name, array in adapter.tensors.items()}
    folder = RandomAdapter(tensors, {}, {}).save(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"experts\.9\.\w+\.lora_A\.weight' is not expected"):
        row_logits(golden, (opened(golden, folder),), 1, 0)


def test_two_adapters_of_one_module_are_rejected(tmp_path: Path) -> None:
    both = of_parameters(BY_MODULE, 0, "0.21.2").tensors | of_modules(BY_MODULE, 0, some_modules).tensors
    folder = RandomAdapter(both, {}, {"peft_version": "0.21.2"}).save(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"one pair of matrices for each module, found two for .*experts\.0\."):
        opened(golden_checkpoint(BY_MODULE), folder)
