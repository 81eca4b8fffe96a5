"""LFM3-VL's tower: convolutions over the grid of each image, names of tensors, calls, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import ImagesConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model, read_decoder
from jaxserve.models.vision_conv import neighbours_of
from jaxserve.runner.images.encoder import image_shape
from jaxserve.runner.images.parts import divide
from tests.models.goldens import DATA
from tests.models.vision_files import changed, processor_of, vision_of
from tests.models.vision_model import process
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL = DATA / "vision" / "lfm3_vl_tiny"


def test_neighbours_are_the_patches_around_each_one_in_its_image() -> None:
    vision = vision_of(MODEL)
    items = [item for index in (0, 2) for item in process(MODEL, index).items]
    positions = np.concatenate([item.positions for item in items])
    sizes = np.concatenate([np.tile(item.grid, (len(item.positions), 1)) for item in items])
    found = neighbours_of(vision, jnp.asarray(positions), jnp.asarray(sizes))
    owners = np.repeat(np.arange(len(items)), [len(item.positions) for item in items])
    patches = list(zip(owners, *positions.T.tolist(), strict=True))
    places = {patch: place for place, patch in enumerate(patches)}
    for place, (owner, row, column) in enumerate(patches):
        around = [(owner, row + down, column + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        assert found.is_patch[place].tolist() == [each in places for each in around]
        assert found.places[place].tolist() == [places.get(each, 0) for each in around]


def test_by_default_the_first_two_layers_and_every_other_one_have_a_convolution(tmp_path: Path) -> None:
    layers = {"layer_types": None, "num_hidden_layers": 8}
    assert vision_of(changed(tmp_path, MODEL, vision_config=layers)).conv_layers == (0, 1, 3, 5, 7)


def test_a_call_is_never_divided() -> None:
    vision = vision_of(MODEL)
    assert divide(vision, image_shape(vision, ImagesConfig(), "cpu", 4).buckets, 1) is None


def test_names_may_be_those_of_published_checkpoints(tmp_path: Path) -> None:
    (file,) = map(open_safetensors, MODEL.glob("*.safetensors"))
    assert {"model.vision_tower.patchifier.weight", "model.vision_tower.layers.2.self_attn.q_layernorm.weight"} <= set(
        file.tensors
    )
    new = {"patchifier": "patch_embed", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    names = {name: name for name in file.tensors}
    for old, other in new.items():
        names = {name: ours.replace(old, other) if "vision_tower" in name else ours for name, ours in names.items()}
    write_safetensors(tmp_path / "model.safetensors", {ours: file.read(name) for name, ours in names.items()})
    shutil.copy(MODEL / "config.json", tmp_path)
    found, expected = open_model(tmp_path), open_model(MODEL)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lfm3_vl_tiny", "Lfm3VlImageProcessorFast"),
        ("lfm3_vl_tiny", None),
        ("lighton_ocr_tiny", "LightOnOCRImageProcessor"),
        ("qianfan_ocr_tiny", None),
        ("qwen2_5_vl_tiny", "Qwen2_5_VLImageProcessor"),
    ],
)
def test_processors_of_models_without_one_in_transformers_may_have_another_name(
    name: str, kind: str | None, tmp_path: Path
) -> None:
    shutil.copytree(DATA / "vision" / name, tmp_path, dirs_exist_ok=True)
    table = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    joint = {"image_processor": table | {"image_processor_type": kind}, "video_processor": {}}
    (tmp_path / "processor_config.json").write_text(json.dumps(joint))
    assert processor_of(tmp_path) == processor_of(DATA / "vision" / name)


def test_processors_of_other_models_must_have_a_known_name(tmp_path: Path) -> None:
    shutil.copytree(DATA / "vision" / "smolvlm_tiny", tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Siglip2ImageProcessor"}')
    with pytest.raises(
        CheckpointError, match=r"image_processor_type: expected one of .*, found 'Siglip2ImageProcessor'"
    ):
        processor_of(tmp_path)


def test_the_epsilon_of_the_text_part_may_have_the_name_of_other_families(tmp_path: Path) -> None:
    found = [
        read_decoder(changed(tmp_path, MODEL, text_config={"rms_norm_eps": value, "norm_eps": 1e-4}))[0].norm_eps
        for value in (1e-6, 1e-3)
    ]
    assert found == [1e-6, 1e-3]
