"""MaxText checkpoints: the parameters and logits are those of the Hugging Face model they were made from."""

from __future__ import annotations

import json
import shutil
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.maxtext.checkpoint import stored_path
from jaxserve.checkpoint.maxtext.folder import OrbaxArrays, StoredArray
from jaxserve.checkpoint.safetensors_file import open_safetensors, write_safetensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.executor.convert import convert
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model, read_decoder
from tests.models.goldens import DATA, golden_checkpoint
from tests.models.loading import load
from tests.models.test_decoder import prompt_logits
from tests.tools.maxtext_checkpoints import nested, save_run, write_maxtext

pytestmark = pytest.mark.slow

FLOAT32 = plain(jnp.dtype("float32"))
NUM_GEMMA3_LAYERS = 8
"""MaxText stacks Gemma 3 in blocks of six layers, and leaves the others alone."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face directories by model: those of the goldens, an untied Llama 3.1 and a Gemma 3 of eight layers."""
    root = tmp_path_factory.mktemp("models")
    found = {name: DATA / f"{name}_tiny" for name in ("llama2", "gemma2", "qwen2", "qwen3")}
    untied = root / "llama3"
    shutil.copytree(DATA / "llama3_tiny", untied)
    change_config(untied, tie_word_embeddings=False)
    tensors = read_tensors(untied)
    write_tensors(untied, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    longer = root / "gemma3"
    shutil.copytree(DATA / "gemma3_tiny", longer)
    change_config(longer, num_hidden_layers=NUM_GEMMA3_LAYERS, sliding_window_pattern=6)
    tensors = read_tensors(longer)
    for layer in range(4, NUM_GEMMA3_LAYERS):
        prefix = f"model.layers.{layer - 4}."
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        tensors |= {f"model.layers.{layer}.{name.removeprefix(prefix)}": -tensor for name, tensor in own.items()}
    write_tensors(longer, tensors)
    return found | {"llama3": untied, "gemma3": longer}


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    file = open_safetensors(folder / "model.safetensors")
    return {name: np.array(file.read(name)) for name in file.tensors}


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)


@pytest.fixture(scope="module")
def llama_run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "llama3"
    write_maxtext(models["llama3"], run)
    return run


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama2", {"is_scanned": False}),
        ("llama3", {"uses_ocdbt": False, "uses_zarr3": False}),
        ("gemma2", {"vocab_padding": 64}),
        ("gemma3", {}),
        ("gemma3", {"is_scanned": False, "uses_zarr3": False}),
        ("qwen3", {}),
        pytest.param("gemma2", {"is_scanned": False}, marks=pytest.mark.exhaustive),
        pytest.param("qwen2", {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_parameters_are_those_of_the_hugging_face_model(
    models: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    write_maxtext(models[name], tmp_path / "run", **options)
    found, expected = load(tmp_path / "run", FLOAT32), load(models[name], FLOAT32)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=5e-7, atol=3e-7, err_msg=key)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["llama3_tiny", "gemma2_tiny"])
def test_logits_equal_those_of_transformers(
    models: dict[str, Path], llama_run: Path, tmp_path: Path, name: str
) -> None:
    golden, run = golden_checkpoint(name), llama_run
    if name == "gemma2_tiny":
        run = tmp_path / "run"
        write_maxtext(golden.path, run)
    found = prompt_logits(replace(golden, path=run), "float32")
    np.testing.assert_allclose(found, golden.logits, atol=1e-4, rtol=0)


def test_opening_a_checkpoint_computes_no_parameters(models: dict[str, Path], tmp_path: Path) -> None:
    """Shapes of arrays that are scaled when they are read are found without the memory of the arrays."""
    num_rows = 1 << 16
    write_maxtext(models["gemma2"], tmp_path / "run", vocab_padding=num_rows)
    change_config(tmp_path / "run", vocab_size=num_rows)
    open_model(tmp_path / "run")  # reads modules
    tracemalloc.start()
    try:
        [width] = {info.shape[1] for name, info in open_model(tmp_path / "run").tensors.items() if "embed" in name}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_rows * width


def test_each_stacked_array_is_read_once_and_none_is_kept(llama_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    owners: set[int] = set()
    readers: list[OrbaxArrays] = []
    fetch = OrbaxArrays._fetch

    def counted(self: OrbaxArrays, array: StoredArray, index: tuple[Any, ...]) -> np.ndarray:
        reads[array.path] += 1
        if id(self) not in owners:
            owners.add(id(self))
            readers.append(self)
        assert len(self._held) < 3
        assert not self._held or not array.path.endswith(("layers.mlp.wo.kernel", "layers.self_attention.out.kernel"))
        return fetch(self, array, index)

    monkeypatch.setattr(OrbaxArrays, "_fetch", counted)
    load(llama_run, FLOAT32)
    (reader,) = readers
    assert dict(reads) == dict.fromkeys((array.path for array in reader.arrays.values()), 1)
    assert reader._held == {}


def test_threads_that_read_together_keep_no_more_arrays_than_one(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose layers are not stacked is read by all threads at once."""
    write_maxtext(models["llama2"], tmp_path / "run", is_scanned=False)
    arrays, num_threads = OrbaxArrays(tmp_path / "run"), 8
    barrier, fetch = threading.Barrier(num_threads), OrbaxArrays._fetch

    def together(self: OrbaxArrays, array: StoredArray, index: tuple[Any, ...]) -> np.ndarray:
        barrier.wait(60)
        return fetch(self, array, index)

    monkeypatch.setattr(OrbaxArrays, "_fetch", together)
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(lambda array: arrays.read(array, None), [*arrays.arrays.values()][:num_threads]):
            pass
    assert len(arrays._held) == 3


def test_layers_in_chunks_of_their_own_are_read_alone(tmp_path: Path) -> None:
    import tensorstore

    run, shape = tmp_path / "run", (8, 3, 4)
    save_run(
        run,
        0,
        {"decoder": {"layers": {"x": np.arange(96, dtype=np.float32).reshape(shape)}}},
        uses_ocdbt=False,
        uses_zarr3=False,
    )
    folder = run / "0" / "items" / "params.params.decoder.layers.x"
    shutil.rmtree(folder)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}, "metadata": {"chunks": [8, 1, 4]}}
    store = tensorstore.open(spec, create=True, dtype="float32", shape=shape).result()
    store[...] = np.arange(96, dtype=np.float32).reshape(shape)
    arrays = OrbaxArrays(run)
    found = arrays.read(arrays.arrays["decoder.layers.x"], 2)
    np.testing.assert_array_equal(found, np.arange(96).reshape(shape)[:, 2])
    assert arrays._held == {}


def test_the_newest_whole_step_is_read_and_steps_find_the_config_of_their_run(llama_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(llama_run, run)
    shutil.copytree(run / "0", run / "20")
    (run / "100" / "items").mkdir(parents=True)  # has no _METADATA: not whole
    shutil.copytree(run / "0", run / "300.orbax-checkpoint-tmp")
    found = open_model(run)
    newest = {str(info.file) for info in found.tensors.values()}
    assert newest == {str(run / "20" / "items" / "manifest.ocdbt")}
    shutil.copytree(run / "0", run / "21")
    again = open_model(stored_path(found))
    assert {str(info.file) for info in again.tensors.values()} == newest, "the same step as before"
    decoder, checkpoint = read_decoder(run)
    assert checkpoint is not None
    for path in (run / "0", run / "0" / "items"):
        assert decoder_of(open_model(path)) == decoder


def test_a_conversion_of_a_maxtext_checkpoint_has_its_parameters(llama_run: Path, tmp_path: Path) -> None:
    config = Config(model=ModelConfig(model=str(llama_run), dtype="float32", max_model_len=64))
    convert(config, llama_run, tmp_path / "out", lambda done, total, name: None)
    assert (tmp_path / "out" / "config.json").read_bytes() == (llama_run / "config.json").read_bytes()
    assert open_model(tmp_path / "out").tensors.keys() == open_model(llama_run).tensors.keys()


def refusal(run: Path) -> str:
    with pytest.raises(CheckpointError) as found:
        load(run, FLOAT32)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_checkpoint_without_a_config_says_what_to_copy(llama_run: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_run / "0", tmp_path / "a" / "b" / "run" / "0")
    assert "copy config.json and the tokenizer's files" in refusal(tmp_path / "a" / "b" / "run")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MaxText checkpoints are read for Gemma2ForCausalLM"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected false"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type: expected one of default, linear, llama3",
        ),
        ({"num_hidden_layers": 2}, "expected 4 axes, the second of 2 layers, found shape (64, 3, 4, 16)"),
        ({"vocab_size": 321}, "shape (321, 64) expected"),
        ({"num_attention_heads": 2}, "expected 2 heads, found 4"),
        ({"num_key_value_heads": 4}, "k_proj"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_do_not_fit_are_refused(llama_run: Path, tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    shutil.copytree(llama_run, tmp_path / "run")
    change_config(tmp_path / "run", **keys)
    assert text in refusal(tmp_path / "run")


def test_arrays_that_belong_to_no_tensor_or_are_no_floats_are_refused(llama_run: Path, tmp_path: Path) -> None:
    for name, array, text in (
        ("decoder.layers.self_attention.query.kernel_lora_a", np.zeros((64, 3, 8), np.float32), "is not expected"),
        ("token_embedder.embedding", np.zeros((320, 64), np.int8), "expected float32, bfloat16, float16"),
        ("decoder.layers.mlp.wo.kernel", np.zeros((96, 64), np.float32), "expected 3 axes"),
    ):
        run = tmp_path / name
        save_run(run, 0, nested({name: array}))
        shutil.copyfile(llama_run / "config.json", run / "config.json")
        assert text in refusal(run)


def test_a_damaged_checkpoint_is_refused(llama_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(llama_run, run)
    data = [file for file in (run / "0" / "items").rglob("d/*") if file.is_file()]
    for file in data:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot be read" in refusal(run)
    shutil.rmtree(run / "0")
    save_run(run, 0, {})
    assert "expected parameters" in refusal(run)


def test_metadata_that_is_no_tree_or_leads_elsewhere_is_refused(llama_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "with 100% odd #names"
    shutil.copytree(llama_run, run)
    load(run, FLOAT32)
    path = run / "0" / "items" / "_METADATA"
    whole = json.loads(path.read_text())
    entry = {
        "key_metadata": [{"key": "params"}, {"key": "../../0/items/x"}],
        "value_metadata": {"skip_deserialize": False},
    }
    for tree, text in (
        (None, "expected tree_metadata"),
        ({"a": {"key_metadata": [1]}}, "expected keys"),
        ({"a": entry}, "without slashes"),
    ):
        path.write_text(json.dumps(whole | {"tree_metadata": tree}))
        assert text in refusal(run)
