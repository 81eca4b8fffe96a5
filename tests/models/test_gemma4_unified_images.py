"""Images of Gemma 4 without encoders (Gemma 4 12B): names of tensors, sizes of calls, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import ImagesConfig
from jaxserve.errors import CheckpointError
from jaxserve.model_config.images import BudgetSizes
from jaxserve.models.registry import open_model
from jaxserve.runner.images.encoder import encoder_bytes, image_shape
from jaxserve.runner.images.parts import divide
from tests.models.goldens import DATA
from tests.models.vision_files import vision_of
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL = DATA / "vision" / "gemma4_unified_vision_tiny"


def changed(folder: Path, text: dict[str, Any] | None = None, **vision: Any) -> Path:
    """Return a copy of the model with other values in its text and vision config."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= vision
    config["text_config"] |= text or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_patches_of_a_token_are_one_patch_of_a_tower_without_layers() -> None:
    config, vision = read_image_processor(MODEL), vision_of(MODEL)
    assert config is not None
    assert (config.sizes, config.patch_size, config.merge) == (BudgetSizes(70), 8, 1)
    assert (vision.num_layers, vision.patch_size, vision.patch_budget) == (0, 8, 70)


def test_a_call_is_never_divided_and_counts_no_scores_of_attention() -> None:
    vision = vision_of(MODEL)
    shape = image_shape(vision, ImagesConfig(), "cpu", 4)
    assert shape.buckets == (70,) and divide(vision, shape.buckets, 1) is None
    assert encoder_bytes(vision, 140, 4) == 2 * encoder_bytes(vision, 70, 4)


def test_names_may_be_those_that_transformers_gives_the_parts(tmp_path: Path) -> None:
    (file,) = map(open_safetensors, MODEL.glob("*.safetensors"))
    assert "model.vision_embedder.pos_embedding" in file.tensors
    own = "model.embed_vision."
    names = {name: name.replace(own, f"{own}multimodal_embedder.") for name in file.tensors}
    names = {name: new.replace("model.vision_embedder.", own) for name, new in names.items()}
    write_safetensors(tmp_path / "model.safetensors", {new: file.read(old) for old, new in names.items()})
    shutil.copy(MODEL / "config.json", tmp_path)
    found, expected = open_model(tmp_path), open_model(MODEL)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)


def test_images_are_seen_whole_in_layers_with_a_window_unless_the_config_says_null(tmp_path: Path) -> None:
    assert vision_of(MODEL).bidirectional_layers == "sliding"
    assert vision_of(changed(tmp_path, {"use_bidirectional_attention": None})).bidirectional_layers == "none"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mm_posemb_size": 69}, "vision_config.mm_posemb_size is 69; supported: at least 70"),
        ({"output_proj_dims": 48}, "vision_config.output_proj_dims is 48; supported: 40"),
        ({"patch_size": 8}, r"vision_config.patch_size is 8; supported: 8 / pooling_kernel_size \(2\)"),
        ({"text": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention is 'all'"),
    ],
)
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_of(changed(tmp_path, **keys))
