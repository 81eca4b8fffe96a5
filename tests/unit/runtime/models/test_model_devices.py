"""Devices and their memory are divided among the models of a server."""

from __future__ import annotations

import pytest

from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.runtime.devices import ALL_DEVICES
from jaxserve.runtime.models.model_devices import ModelShare, divide_among_models
from jaxserve.types import GPU_SHARE

GPUS = ["null", "nvidia0", "nvidia1", "nvidia2", "nvidiactl"]
CHIPS = ["vfio/vfio", *(f"vfio/{number}" for number in range(4))]
POOL = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def config(name: str, num_devices: int = 1, **cache: float) -> Config:
    return Config(
        model=ModelConfig(model=name, served_model_name=name),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
    )


def test_kv_caches_of_replicas_on_a_cpu_that_may_not_fit_together_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are not refused: a cache is no larger than full requests could use, however much was asked for."""
    settings = Config(
        model=ModelConfig(model="m"),
        parallel=ParallelConfig(replicas=3),
        cache=CacheConfig(kv_cache_memory=2 << 30),
    )

    def shares(free: int, **environ: str) -> list[ModelShare]:
        names = ["nvidia0", "nvidia1", "nvidia2"]
        return divide_among_models([settings], environ, lambda: names, lambda: range(8), lambda: free)

    assert len(shares(6 << 30, JAX_PLATFORMS="cpu")[0].devices) == 3
    assert len(shares(1 << 30)[0].devices) == 3, "GPUs have memory of their own"
    assert not caplog.messages
    assert len(shares((6 << 30) - 1, JAX_PLATFORMS="cpu")[0].devices) == 3
    (found,) = caplog.messages
    assert found.startswith("--kv-cache-memory with --replicas 3: up to 2.00 GiB for each are 6.00 GiB, and 6.00 GiB")


def divide(configs: list[Config], names: list[str], **environ: str) -> list[ModelShare]:
    return divide_among_models(configs, environ, lambda: names, lambda: range(8))


def variables(shares: list[ModelShare]) -> list[dict[str, str]]:
    return [dict(share.devices[0].variables) for share in shares]


def used_fractions(shares: list[ModelShare]) -> list[float]:
    """Return the fraction of the GPU that weights and KV cache of each model may take."""
    pools = [float(own[POOL]) for own in variables(shares)]
    return [pool * share.config.cache.memory_fraction for pool, share in zip(pools, shares, strict=True)]


def test_each_model_has_its_own_gpus_if_there_are_enough() -> None:
    shares = divide([config("a", 2), config("b")], GPUS)
    assert variables(shares) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    assert [share.config.cache.memory_fraction for share in shares] == [0.9, 0.9], "of a whole GPU each"


def test_models_that_share_a_gpu_divide_its_memory_evenly() -> None:
    shares = divide([config("a"), config("b")], ["nvidia0"])
    assert [own["CUDA_VISIBLE_DEVICES"] for own in variables(shares)] == ["0", "0"]
    assert [float(own[POOL]) for own in variables(shares)] == pytest.approx([GPU_SHARE / 2] * 2, abs=1e-4)
    assert used_fractions(shares) == pytest.approx([0.45, 0.45], abs=1e-4), (
        "weights and KV cache: together what one model would have"
    )


def test_a_model_with_a_fraction_keeps_it_and_the_others_divide_the_rest() -> None:
    shares = divide([config("a", memory_fraction=0.6), config("b"), config("c")], ["nvidia0"])
    assert used_fractions(shares) == pytest.approx([0.6, 0.15, 0.15], abs=1e-4)


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (0.895, 0.9)], ids=str)
def test_fractions_that_are_too_much_together_are_one_line(fractions: tuple[float, float]) -> None:
    models = [config(name, memory_fraction=one) for name, one in zip("ab", fractions, strict=True)]
    with pytest.raises(DoesNotFitError, match=r"^--memory-fraction: a 0.\d+.*may have 0.9 together"):
        divide(models, ["nvidia0"])


def test_a_model_with_more_devices_than_there_are_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^b: --tensor-parallel-size 4: this machine has 3 GPUs$"):
        divide([config("a"), config("b", 4)], GPUS)


def test_tpu_chips_are_never_shared() -> None:
    shares = divide([config("a", 2), config("b")], CHIPS)
    assert [own["TPU_VISIBLE_CHIPS"] for own in variables(shares)] == ["0,1", "2"]
    with pytest.raises(ConfigError, match="2 models need 8 TPU chips, this machine has 4: a chip belongs to one model"):
        divide([config("a", 4), config("b", 4)], CHIPS)


def test_models_share_the_cores_of_a_cpu() -> None:
    shares = divide([config("a"), config("b")], GPUS, JAX_PLATFORMS="cpu")
    assert [share.devices for share in shares] == [[ALL_DEVICES], [ALL_DEVICES]]
