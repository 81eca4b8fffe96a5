"""Converted models: the same bits on the devices as from the model itself, or no model at all."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.converted import MANIFEST_FILE, open_converted
from jaxserve.checkpoint.files import TIKTOKEN
from jaxserve.checkpoint.zarr_arrays import ZarrArrays
from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.errors import CheckpointError, ConfigError, StartupError
from jaxserve.executor.convert import _locked, convert
from jaxserve.executor.preparation import prepare
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.weights.loader import load_params
from tests.architecture.sources import ROOT
from tests.engine.killed_conversions import POINTS
from tests.engine.model_engine import MODEL_NAME, ModelEngine, request
from tests.models.goldens import DATA, golden_checkpoint
from tests.models.mxfp4_files import write_mxfp4
from tests.models.nvfp4_files import quantization as in_nvfp4
from tests.models.nvfp4_files import write_nvfp4
from tests.unit.checkpoint.fp8_files import E4M3, in_blocks, write_fp8

pytestmark = [pytest.mark.slow]
MODEL = DATA / MODEL_NAME


def config_of(quantization: str = "none", model: Path = MODEL, dtype: str = "float32", num_devices: int = 1) -> Config:
    settings = ModelConfig(model=str(model), quantization=quantization, dtype=dtype, max_model_len=128)  # type: ignore[arg-type]
    return Config(model=settings, parallel=ParallelConfig(tensor_parallel_size=num_devices))


def converted(config: Config, output: Path, model: Path = MODEL) -> Path:
    convert(config, model, output, lambda done, total, name: None)
    return output


def params(config: Config, path: Path) -> tuple[jax.Array, ...]:
    checkpoint = open_model(path)
    prepared = prepare(config, decoder_of(checkpoint))
    return load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda done, total, name: None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(config_of(), tmp_path_factory.mktemp("converted") / "plain")


@pytest.mark.parametrize(
    ("quantization", "dtype", "num_devices"),
    [("none", "bfloat16", 2), ("int8", "float32", 1), ("int4-weight-only", "float32", 2), ("fp8", "float32", 1)],
)
def test_restored_parameters_are_those_of_the_model_bit_by_bit(
    tmp_path: Path, quantization: str, dtype: str, num_devices: int
) -> None:
    config = config_of(quantization, dtype=dtype, num_devices=num_devices)
    path = converted(config, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    for mine, theirs in zip(params(config, path), params(config, MODEL), strict=True):
        assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_rows_in_the_order_of_devices_are_restored_bit_by_bit(tmp_path: Path) -> None:
    """Two devices share the heads of gated delta nets. An engine on one device needs another conversion."""
    model = DATA / "qwen3_5_tiny"
    config = config_of("int8", model, num_devices=2)
    path = converted(config, tmp_path / "out", model)
    for mine, theirs in zip(params(config, path), params(config, model), strict=True):
        assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    with pytest.raises(CheckpointError, match="converted for other settings"):
        params(config_of("int8", model), path)


@pytest.mark.parametrize("quantization", ["mxfp4-weight-only", "nvfp4-weight-only", "fp8-block-weight-only"])
def test_matrices_in_blocks_are_restored_bit_by_bit(tmp_path: Path, quantization: str) -> None:
    if quantization == "mxfp4-weight-only":
        write_mxfp4(tmp_path / "model")
    elif quantization == "nvfp4-weight-only":
        write_nvfp4(tmp_path / "model", golden_checkpoint("qwen3_moe_tiny").path, in_nvfp4())
    else:
        (tmp_path / "model").mkdir()
        write_fp8(tmp_path / "model", golden_checkpoint("qwen3_moe_tiny").path, in_blocks(40, 32))
    config = config_of("auto", tmp_path / "model", num_devices=2)
    path = converted(config, tmp_path / "out", tmp_path / "model")
    found = params(config, path)
    stored = E4M3 if quantization == "fp8-block-weight-only" else np.uint8
    assert any(array.dtype == stored and array.ndim == 3 for array in found)
    for mine, theirs in zip(found, params(config, tmp_path / "model"), strict=True):
        assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_a_converted_model_generates_the_tokens_of_the_model(plain: Path) -> None:
    golden = golden_checkpoint(MODEL.name)
    engine = ModelEngine(plain, max_num_seqs=16, max_num_batched_tokens=64)
    result = engine.run([request("a", golden.prompt_ids, max_tokens=24)])["a"]
    assert result.token_ids == golden.output_ids.tolist()[:24]
    engine.executor.weights.load(str(MODEL))()  # type: ignore[union-attr]
    engine.executor.weights.load(str(plain))()  # type: ignore[union-attr]
    engine.close()


def test_a_conversion_has_the_tokenizer_and_all_chat_templates_of_the_model(tmp_path: Path) -> None:
    model, template = tmp_path / "model", Path("additional_chat_templates", "tool_use.jinja")
    shutil.copytree(MODEL, model)
    (model / template.parent).mkdir()
    (model / template).write_text("for tools", encoding="utf-8")
    (model / "chat_template.json").write_text('{"chat_template": "of the processor"}', encoding="utf-8")
    (model / template.with_name("notes.txt")).write_text("not a template", encoding="utf-8")
    (model / TIKTOKEN).write_text("IQ== 0", encoding="utf-8")  # the only file of Kimi's vocabulary
    path = converted(config_of(), tmp_path / "out", model)
    assert (path / template).read_text(encoding="utf-8") == "for tools"
    assert {str(template), "chat_template.json", "tokenizer.json", TIKTOKEN} <= open_converted(
        path, ()
    ).manifest.files.keys()
    assert [file.name for file in (path / template.parent).iterdir()] == [template.name]


@pytest.mark.parametrize("damage", ["short", "missing", "manifest"])
def test_a_conversion_that_is_not_whole_is_no_model(plain: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(plain, folder)
    largest = max(
        (file for file in (folder / "arrays").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    match damage:
        case "short":
            largest.write_bytes(largest.read_bytes()[:-1])
        case "missing":
            largest.unlink()
        case "manifest":
            (folder / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError):
        open_model(folder)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "lm_head.weight.0/0.0" in OCDBT database')

    monkeypatch.setattr("orbax.checkpoint.PyTreeCheckpointer.save", fail)
    with pytest.raises(StartupError, match="No space left on device"):
        converted(config_of(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_space_for_the_parameters_is_named_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    monkeypatch.setattr("jaxserve.executor.convert.load_params", pytest.fail)
    with pytest.raises(ConfigError, match=r"parameters take 0\.\d MiB, and .* has 0\.0 MiB free"):
        converted(config_of(), tmp_path / "models" / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.partial-1").mkdir()
    with pytest.raises(ConfigError, match=r"MiB free"):
        converted(config_of(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "what a killed conversion has left is removed first"


def test_other_settings_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantization none, needed: int8"):
        params(config_of("int8"), plain)
    for config, model, output, text in (
        (config_of(), MODEL, plain, "exists already"),
        (config_of(), plain, tmp_path / "again", "is converted already"),
        (config_of(), plain / "config.json", tmp_path / "file", "only a Hugging Face directory"),
        (
            dataclasses.replace(config_of(), model=ModelConfig(model="any", lora_modules="a=b")),
            MODEL,
            tmp_path / "adapters",
            "adapters are not converted",
        ),
    ):
        with pytest.raises(StartupError, match=text):
            converted(config, output, model)


def test_a_killed_conversion_leaves_no_model_or_a_whole_one(tmp_path: Path, plain: Path) -> None:
    """SIGKILL at each step of the command; the next conversion to the same place removes what is left."""
    command = [sys.executable, "-m", "tests.engine.killed_conversions", str(MODEL), str(tmp_path), *POINTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.stdout.splitlines() == [f"{point} {-signal.SIGKILL}" for point in POINTS], done.stderr
    expected = params(config_of(), plain)
    for point in POINTS:
        output = tmp_path / point
        left = list(tmp_path.glob(f".{point}.partial-*"))
        assert output.exists() == (point == "renamed")
        assert len(left) == (point != "renamed")
        for folder in left if point not in ("renaming", "renamed") else []:
            with pytest.raises(CheckpointError):
                open_model(folder)
        if point != "renamed":
            converted(config_of(), output)
        for mine, theirs in zip(params(config_of(), output), expected, strict=True):
            assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(POINTS)


def test_a_conversion_leaves_the_folder_of_another_that_runs(tmp_path: Path) -> None:
    running = tmp_path / ".out.partial-1"
    running.mkdir()
    with _locked(running):
        converted(config_of(), tmp_path / "out")
    assert running.is_dir()


def test_a_restore_reads_at_most_one_shard_ahead(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of shards that are read, or being read, and not placed yet."""
    sizes: list[int] = []
    waiting = peak = 0

    def counted(self: ZarrArrays, store: Any) -> Any:
        nonlocal waiting, peak
        array, read = start(self, store)
        sizes.append(array.nbytes)
        waiting += array.nbytes
        peak = max(peak, waiting)
        return array, read

    def placed(num_bytes: int) -> None:
        nonlocal waiting
        waiting -= num_bytes

    start = ZarrArrays.start
    monkeypatch.setattr(ZarrArrays, "start", counted)
    checkpoint = open_model(plain)
    prepared = prepare(config_of(), decoder_of(checkpoint))
    load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda *_: None, placed)
    assert waiting == 0
    assert len(sizes) > 10
    assert peak <= max(a + b for a, b in itertools.pairwise(sizes)) < sum(sizes) / 3
