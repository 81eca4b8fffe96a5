"""--deterministic: a reply has the bits that it has alone, in any mix of requests and any division into steps."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.config import CacheConfig, CompileConfig, Config, CpuKernels, KVCacheDtype, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.adapters import padded_rank
from jaxserve.executor.preparation import prepare
from jaxserve.ipc.messages import AddRequest
from jaxserve.layers.policy import DtypePolicy, plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.cache_sizes import with_cache_groups
from jaxserve.runner.determinism import check_deterministic
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.sampling.sampler import score
from tests.engine.model_engine import MODEL_NAME, Generated, ModelEngine, request
from tests.models.expert_adapters import of_modules
from tests.models.goldens import DATA, adapter_goldens

_LENGTHS = (1, 5, 17, 33, 60, 80)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    made = [[rng.randrange(3, 300) for _ in range(rng.choice(_LENGTHS))] for _ in range(6)]
    return [*made, made[3][:20] + made[1], made[4] + made[4][:9]]


PROMPTS = prompts()


NUM_TOKENS = 20
NUM_MIXES = 32  # of each format
RANKS = {"narrow": 4, "other": 24, "wide": 40, "last": 8}
"""Ranks of adapters by their names."""

Case = tuple[int, str]
"""A prompt's index, and the name of an adapter; "": none."""


@dataclass(frozen=True)
class Alone:
    """Tokens and bits of a request that ran alone."""

    token_ids: list[int]
    bits: object


@dataclass(frozen=True)
class Served:
    """An engine and the adapters that it has, in their order."""

    engine: ModelEngine
    adapters: tuple[str, ...] = ()

    def number(self, adapter: str) -> int:
        return 1 + self.adapters.index(adapter) if adapter else 0

    def message(self, name: str, case: Case) -> AddRequest:
        """Return a request for a few tokens; every second one is sampled with its own seed."""
        index, adapter = case
        options: dict[str, Any] = {"temperature": (0.0, 0.8)[index % 2], "seed": index, "num_top_logprobs": 2}
        options |= {"top_p": 0.9} if index % 4 == 3 and self.engine.has_all_options else {}
        return request(name, PROMPTS[index], adapter=self.number(adapter), max_tokens=NUM_TOKENS, **options)

    def replay(self, name: str, case: Case, token_ids: list[int]) -> AddRequest:
        """Return a request that scores the prompt and the tokens that it got."""
        index, adapter = case
        options: dict[str, Any] = {"num_prompt_logprobs": 2, "max_tokens": 1}
        return request(name, PROMPTS[index] + token_ids, adapter=self.number(adapter), **options)


def bits(index: int, result: Generated, *, is_replay: bool = False) -> object:
    """Return the generated tokens' log-probabilities, or those that a replay found for the same tokens."""
    scored = result.prompt_logprobs[len(PROMPTS[index]) - 1 :] if is_replay else result.logprobs
    assert len(scored) == NUM_TOKENS
    return [(token.logprob, token.top_token_ids, token.top_logprobs) for token in scored]


def start(
    quantization: str,
    adapters: Mapping[str, Path] | None = None,
    model: str = MODEL_NAME,
    kv_cache_dtype: KVCacheDtype = "auto",
    *,
    has_all_buckets: bool = True,
    has_all_options: bool = True,
    cpu_kernels: CpuKernels = "native",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
) -> Served:
    adapters = adapters or {}
    modules = ",".join(f"{name}={path}" for name, path in adapters.items()) or None
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "lora_modules": modules}
    kinds = {"cpu_kernels": cpu_kernels, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    programs = {"has_all_buckets": has_all_buckets, "has_all_options": has_all_options}
    engine = ModelEngine(DATA / model, **programs, **kinds, **sizes)  # type: ignore[arg-type]
    return Served(engine, tuple(adapters))


def run_alone(served: Served, adapter: str = "") -> dict[Case, Alone]:
    """Return what each prompt gets with an adapter, one after the other."""
    found = {}
    for index in range(len(PROMPTS)):
        served.engine.restart()
        result = served.engine.run([served.message("alone", (index, adapter))])["alone"]
        found[index, adapter] = Alone(result.token_ids, bits(index, result))
    return found


@dataclass(frozen=True)
class Load:
    """The mixes of a test are drawn from these choices."""

    num_requests: range = range(2, 9)
    num_blocks: tuple[int | None, ...] = (None, 10, 12)
    chunk_tokens: tuple[int | None, ...] = (None, 9, 16, 33)


def check_mixes(
    starts: Sequence[Callable[[], Served]], alone: Mapping[Case, Alone], num_mixes: int, load: Load | None = None
) -> None:
    """Run mixes in several engines, one after the other, and compare each request with what it got alone.

    Mixes differ in neighbours, chunks, prefix hits, preemptions and overlap.
    """
    rng, num_cached, num_preemptions, num_replays, most_rows = random.Random(1), 0, 0, 0, 0
    load = load or Load()
    for begin in starts:
        served = begin()
        engine = served.engine
        for number in range(num_mixes // len(starts)):
            if number % 2 == 0:  # every second mix finds pages of the one before
                engine.restart(
                    rng.choice(load.num_blocks),
                    enable_prefix_caching=rng.random() < 0.7,
                    max_num_batched_tokens=rng.choice(load.chunk_tokens),
                    overlap=rng.random() < 0.5,
                )
            mix: dict[str, tuple[Case, AddRequest]] = {}
            for copy in range(rng.choice(load.num_requests)):
                case = rng.choice(list(alone))
                name = f"{copy}-replay" if rng.random() < 0.3 else f"{copy}"
                is_replay = name.endswith("replay")
                made = served.replay(name, case, alone[case].token_ids) if is_replay else served.message(name, case)
                mix[name] = case, made
            before = engine.num_preemptions
            for name, result in engine.run([each for _, each in mix.values()]).items():
                (index, adapter), is_replay = mix[name][0], name.endswith("replay")
                assert is_replay or result.token_ids == alone[index, adapter].token_ids
                assert bits(index, result, is_replay=is_replay) == alone[index, adapter].bits
                num_cached += result.num_cached_tokens
                num_replays += is_replay
            num_preemptions += engine.num_preemptions - before
            most_rows = max(most_rows, engine.most_outputs)
        engine.close()
    assert min(num_cached, num_preemptions, num_replays) > 0
    assert most_rows >= load.num_requests.start


@pytest.fixture
def kernels() -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"),
    [("none", "auto"), ("int8", "int8"), pytest.param("none", "fp8", marks=pytest.mark.exhaustive)],
)
def test_replies_and_replays_have_the_same_bits_in_any_mix(quantization: str, kv_cache_dtype: KVCacheDtype) -> None:
    """Half of the mixes run in another engine, which measures the scales of an int8 cache again."""
    begin = partial(start, quantization, kv_cache_dtype=kv_cache_dtype, has_all_options=kv_cache_dtype == "auto")
    served = begin()
    alone = run_alone(served)
    served.engine.close()
    check_mixes([begin] * 2, alone, NUM_MIXES)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cpu_kernels", ["vector", pytest.param("matrix", marks=pytest.mark.exhaustive)])
def test_replies_among_64_rows_and_more_have_the_bits_that_they_have_alone(cpu_kernels: CpuKernels) -> None:
    """XLA adds up arrays of 4,096 numbers and more in another order, and AMX takes more than 96 rows in another loop."""
    assert native.register() is not None
    if cpu_kernels == "matrix" and not native.has_amx():
        pytest.skip("no AMX")
    begin = partial(start, "none", cpu_kernels=cpu_kernels, max_num_seqs=112, max_num_batched_tokens=256)
    served = begin()
    alone = run_alone(served)
    served.engine.close()
    check_mixes([begin], alone, 8, Load(range(64, 113), (None, 100, 140), (None, 96, 160)))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.versions
@pytest.mark.parametrize("vocab_size", [pytest.param(320, marks=pytest.mark.exhaustive), 5000])
def test_a_log_probability_has_the_same_bits_among_any_number_of_rows(vocab_size: int) -> None:
    """XLA computes exponentials beside a sum by another kernel in arrays of 4,096 numbers and more."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 1.5, (1024, vocab_size)).astype(np.float32)
    tokens = random.integers(0, vocab_size, 1024, np.int32)
    find = jax.jit(lambda logits, tokens: score(logits, tokens, jnp.int32(0))[0])
    together = np.asarray(find(logits, tokens))
    for count in (1, 8, 16, 64):
        parts = [find(logits[i : i + count], tokens[i : i + count]) for i in range(0, len(logits), count)]
        assert np.concatenate(parts).tobytes() == together.tobytes()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("kernels")
def test_adapters_of_others_and_their_places_change_no_bit(tmp_path: Path) -> None:
    """Requests run alone in an engine without adapters, or with their own only, by its largest programs; mixes run in an engine
    with four adapters. The ranks fill no whole tile of AMX. Adapters are float32 over weights of any format."""
    quantization = "nvfp4-weight-only"
    folders = {
        name: of_modules(MODEL_NAME, rank, lambda module: module.endswith("_proj"), rank).save(tmp_path / name)
        for name, rank in RANKS.items()
    }
    alone: dict[Case, Alone] = {}
    for name in ("", "wide", "narrow"):
        served = start(quantization, {name: folders[name]} if name else {}, has_all_buckets=False)
        alone |= run_alone(served, name)
        served.engine.close()
    assert len({str(each.token_ids) for each in alone.values()}) == len(alone)
    check_mixes([partial(start, quantization, dict(reversed(folders.items())))], alone, NUM_MIXES)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rank", [1, 16, 17, 24, 40, 64, 80])
@pytest.mark.parametrize("backend", ["native", "native_matrix"])
def test_the_place_of_an_adapter_changes_no_bit_of_its_sums(backend: Backend, rank: int) -> None:
    """Kernels add up an adapter's ranks in one order, wherever they are among those of other adapters, which are zeros."""
    assert native.register() is not None
    if backend == "native_matrix" and not native.has_amx():
        pytest.skip("no AMX")
    rng, width, num_places = np.random.default_rng(rank), padded_rank(rank), 5
    x, matrix = (rng.standard_normal((count, rank), np.float32) for count in (7, 48))

    def compute(place: int, num_places: int) -> np.ndarray:
        ranks = np.zeros((7, num_places * width), np.float32)
        matrices = rng.standard_normal((48, num_places * width), np.float32)
        own = slice(place * width, place * width + rank)
        ranks[:, own], matrices[:, own] = x, matrix
        return np.asarray(jax.jit(lambda x, weight: matmul(x, weight, backend=backend))(ranks, matrices))

    alone = compute(0, 1)
    np.testing.assert_allclose(alone, x @ matrix.T, atol=1e-4, rtol=0)
    for place in range(num_places):
        np.testing.assert_array_equal(compute(place, num_places), alone)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("kernels")
def test_adapters_of_experts_change_no_bit_of_other_requests() -> None:
    model = "qwen3_moe_tiny"
    goldens = adapter_goldens(model)
    folders = {name: goldens[name].path for name in ("experts", "down")}
    alone: dict[Case, Alone] = {}
    for name in ("", *folders):
        served = start("int8", {name: folders[name]} if name else {}, model, has_all_buckets=False)
        alone |= run_alone(served, name)
        served.engine.close()
    check_mixes([partial(start, "int8", folders, model)], alone, NUM_MIXES)


@pytest.mark.usefixtures("kernels")
def test_the_flag_changes_no_program() -> None:
    """The keys of programs in the cache cover their sources, shapes and settings."""
    plain = CompileConfig(cpu_kernels="native")
    config = Config(model=ModelConfig(model="any", quantization="none"), compile=plain)
    model = decoder_of(open_model(DATA / MODEL_NAME))

    def keys(settings: CompileConfig) -> list[str]:
        cache, prepared = mock.create_autospec(ProgramCache), prepare(replace(config, compile=settings), model)
        prepared.cached_programs(cache, prepared.programs)
        asked = [call.args[0] for call in cache.num_bytes.call_args_list]
        assert len(asked) == len(prepared.programs)
        return [*asked, str(prepared.state_shapes), str(prepared.key_parts())]

    assert keys(replace(plain, deterministic=True)) == keys(plain)
    assert not set(keys(replace(plain, cpu_kernels="xla"))) & set(keys(plain))


@pytest.mark.usefixtures("kernels")
def test_what_may_round_a_row_by_its_neighbours_is_refused() -> None:
    model = decoder_of(open_model(DATA / MODEL_NAME))
    config = Config(model=ModelConfig(model="any"), compile=CompileConfig(deterministic=True))
    exact = DtypePolicy(jnp.dtype("float32"), jnp.dtype("float32"), backend="native")
    for name in ("none", "mxfp4-weight-only", "nvfp4-weight-only"):
        check_deterministic(config, make_skeleton(model, replace(exact, quant=QuantPolicy(name))))
    xla = make_skeleton(model, plain(jnp.dtype("float32")))
    check_deterministic(Config(model=ModelConfig(model="any")), xla)
    fp8 = make_skeleton(
        model, DtypePolicy(exact.weights, exact.activations, plain(exact.weights, "fp8").quant, "native")
    )
    for skeleton, text in (xla, "only with the native kernels"), (fp8, "fp8"):
        with pytest.raises(ConfigError, match=text):
            check_deterministic(config, skeleton)


@pytest.mark.parametrize(
    ("name", "quantization", "block_size", "text"),
    [
        ("gemma2_tiny", "none", None, "not with attention_softcap"),
        ("mistral_sliding_tiny", "none", 8, "pages of 8 tokens"),
        ("dots1_tiny", "none", None, "the 56 inputs of model.layers.0.mlp.down_proj.weight"),
        ("gemma3n_tiny", "none", None, "the 40 inputs of .*: the native matmul kernels take multiples of 16"),
        ("qwen3_moe_tiny", "int8", None, "the 32 inputs of .*: the native matmul kernels take multiples of 64"),
        ("qwen3_moe_tiny", "none", None, None),
    ],
)
def test_shapes_that_native_kernels_leave_to_xla_are_refused(
    name: str, quantization: str, block_size: int | None, text: str | None
) -> None:
    config = Config(
        model=ModelConfig(model="any"),
        cache=CacheConfig(block_size=block_size),
        compile=CompileConfig(deterministic=True),
    )
    model, float32 = decoder_of(open_model(DATA / name)), jnp.dtype("float32")
    policy = DtypePolicy(float32, float32, QuantPolicy(quantization, platform="cpu"), backend="native")
    skeleton = make_skeleton(with_cache_groups(config, model), policy)
    with contextlib.nullcontext() if text is None else pytest.raises(ConfigError, match=text):
        check_deterministic(config, skeleton)
