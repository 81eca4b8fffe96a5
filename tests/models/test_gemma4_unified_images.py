"""Images of Gemma 4 without encoders (Gemma 4 12B): names of tensors, sizes of calls, and configs that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import ImagesConfig
from jaxserve.model_config.preprocessing.images import BudgetSizes
from jaxserve.models.registry import open_model
from jaxserve.runner.images.encoder import encoder_bytes, image_shape
from jaxserve.runner.images.parts import divide
from tests.models.goldens import DATA
from tests.models.vision_files import changed, processor_of, vision_of
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL = DATA / "vision" / "gemma4_unified_vision_tiny"


def test_patches_of_a_token_are_one_patch_of_a_tower_without_layers() -> None:
    config, vision = processor_of(MODEL), vision_of(MODEL)
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
    assert (
        vision_of(changed(tmp_path, MODEL, text_config={"use_bidirectional_attention": None})).bidirectional_layers
        == "none"
    )
