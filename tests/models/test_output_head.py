"""A checkpoint's output head is the one that it stores, whether or not its config says that the embedding matrix is the head."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.converted import FORMAT, ConversionManifest, ConvertedCheckpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.executor.preparation import prepare
from jaxserve.executor.served_weights import ServedWeights
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.weights.loader import check_tensors, load_params
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

SOURCE = golden_checkpoint("smollm3_tiny").path
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied(folder: Path, head: np.ndarray, *, has_embedding: bool = True) -> Checkpoint:
    """Return the checkpoint, whose config says that the head is tied, with a stored head."""
    stored = open_safetensors(SOURCE / "model.safetensors")
    names = [name for name in stored.tensors if has_embedding or name != EMBEDDING]
    write_safetensors(folder / "model.safetensors", {name: stored.read(name) for name in names} | {HEAD: head})
    shutil.copy(SOURCE / "config.json", folder)
    shutil.copy(SOURCE / "generation_config.json", folder)
    return open_model(folder)


def embedding() -> np.ndarray:
    return np.asarray(open_safetensors(SOURCE / "model.safetensors").read(EMBEDDING))


def check(checkpoint: Checkpoint) -> None:
    check_tensors(checkpoint, make_skeleton(decoder_of(checkpoint), plain(jnp.dtype("float32"))))


@pytest.mark.parametrize("rows", [slice(None), slice(-1, None)])
def test_a_head_with_other_numbers_is_not_tied(tmp_path: Path, rows: slice) -> None:
    head = embedding().copy()
    head[rows] = -head[rows]
    found = tied(tmp_path, head)
    assert decoder_of(open_model(SOURCE)).tied_embeddings
    assert not decoder_of(found).tied_embeddings
    assert np.array_equal(found.read(HEAD), head)
    check(found)


def test_a_head_with_the_numbers_of_the_embedding_takes_no_memory(tmp_path: Path) -> None:
    found = tied(tmp_path, embedding())
    assert decoder_of(found) == decoder_of(open_model(SOURCE))
    check(found)


def test_a_head_without_an_embedding_is_both(tmp_path: Path) -> None:
    found, original = tied(tmp_path, embedding(), has_embedding=False), open_model(SOURCE)
    assert found.tensors.keys() == original.tensors.keys()
    assert np.array_equal(found.read(EMBEDDING), original.read(EMBEDDING))
    assert decoder_of(found) == decoder_of(original)


def test_the_error_of_a_model_without_a_head_names_the_task_embed(tmp_path: Path) -> None:
    source = golden_checkpoint("llama2_tiny").path
    stored = open_safetensors(source / "model.safetensors")
    write_safetensors(
        tmp_path / "model.safetensors", {name: stored.read(name) for name in stored.tensors if name != HEAD}
    )
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' expected .* served with --task embed$"):
        check(open_model(tmp_path))


def test_a_conversion_with_a_head_has_its_own(tmp_path: Path) -> None:
    source = tied(tmp_path, -embedding())
    manifest = ConversionManifest(FORMAT, "digest", {}, [], {})
    converted = ConvertedCheckpoint(tmp_path, source.config, {}, source.tensors, manifest)
    assert not decoder_of(converted).tied_embeddings


def served(checkpoint: Checkpoint) -> ServedWeights:
    """Return the weights of an engine without programs."""
    config, model = Config(model=ModelConfig(model="any", max_model_len=128)), decoder_of(checkpoint)
    prepared = prepare(config, model)
    runner = SimpleNamespace(params=load_params(checkpoint, prepared.skeleton, prepared.sharding, lambda *_: None))
    return ServedWeights(config, prepared, checkpoint, model, (), runner, None)  # type: ignore[arg-type]


def test_an_update_compares_the_head_of_the_new_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        tied(tmp_path / name, embedding())
    weights, reads, read = served(open_model(tmp_path / "old")), Counter[tuple[str, str]](), SafetensorsFile.read

    def counted(self: SafetensorsFile, name: str) -> np.ndarray:
        reads[self.path.parent.name, name] += 1
        return read(self, name)

    monkeypatch.setattr(SafetensorsFile, "read", counted)
    weights.load(str(tmp_path / "new"))()
    assert {folder for folder, _ in reads} == {"new"}
    assert reads["new", HEAD] == 1


def test_an_update_does_not_drop_a_head_that_differs(tmp_path: Path) -> None:
    """Programs of a tied model have no place for it."""
    weights, matrix = served(open_model(SOURCE)), embedding()
    tied(tmp_path, -matrix)
    with pytest.raises(CheckpointError, match="tied_embeddings is 'False' and, in the model that is served, 'True'"):
        weights.load(str(tmp_path))
    file = write_safetensors(tmp_path / "some", {EMBEDDING: matrix, HEAD: -matrix})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight must equal model\.embed_tokens\.weight"):
        weights.load_tensors(str(file))
    weights.load_tensors(str(write_safetensors(tmp_path / "some", {EMBEDDING: -matrix, HEAD: -matrix})))()


def test_a_head_may_come_in_a_later_file_than_its_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, matrix = served(open_model(SOURCE)), embedding()
    weights.load_tensors(str(write_safetensors(tmp_path / "first", {EMBEDDING: -matrix})))()
    weights.load_tensors(str(write_safetensors(tmp_path / "last", {"model.norm.weight": matrix[0], HEAD: -matrix})))()
    assert "lm_head.weight is not read" in caplog.text
