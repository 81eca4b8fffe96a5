"""LLaVA's images: squares from the middle of any picture, layers whose features are read, and sizes that configs leave out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.frontend.images.processor import process_image
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model, read_decoder, with_vision
from jaxserve.models.skeleton import make_skeleton
from jaxserve.weights.loader import check_tensors
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of
from tests.unit.checkpoint.checkpoint_files import write_safetensors

MODEL = DATA / "vision" / "llava_tiny"


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "LlavaImageProcessor"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_squares_of_pictures_of_any_size_equal_those_of_transformers(
    name: str, is_padded: bool, tmp_path: Path
) -> None:
    if is_padded and name == "CLIPImageProcessor":
        pytest.skip("CLIP's preprocessing has no margins")
    transformers = pytest.importorskip("transformers")
    table = {"image_processor_type": name, "do_pad": is_padded}
    config = processor_of(changed(tmp_path, MODEL, processor=table))
    theirs = getattr(transformers, f"{name}Pil").from_pretrained(tmp_path)
    for seed, (width, height) in enumerate(((80, 50), (31, 90), (7, 5), (28, 28), (200, 33))):
        image = picture(width, height, seed)
        (item,) = process_image(image, config).items
        pixels = theirs(image, do_rescale=False, do_normalize=False)["pixel_values"][0]
        cut = np.asarray(pixels, np.uint8).reshape(3, 4, 7, 4, 7).transpose(1, 3, 0, 2, 4).reshape(16, -1)
        np.testing.assert_array_equal(item.patches[1:], cut)
        assert item.num_tokens == 16 and item.positions[0].tolist() == [0, -1]


def test_features_may_be_those_of_any_layer_and_later_layers_are_not_loaded(tmp_path: Path) -> None:
    assert json.loads((MODEL / "config.json").read_text())["vision_config"]["num_hidden_layers"] == 3
    for number, (layer, count) in enumerate(((-2, 2), (-1, 3), (1, 1), (3, 3))):
        vision = vision_of(changed(tmp_path / str(number), MODEL, vision_feature_layer=layer))
        assert vision.num_layers == count and ("layers.2." in vision.unused_tensors) == (count < 3)
    with pytest.raises(CheckpointError, match="vision_feature_layer is 0"):
        vision_of(changed(tmp_path / "none", MODEL, vision_feature_layer=0))


def test_a_tower_may_have_the_names_of_published_checkpoints_and_integers_that_nothing_reads(tmp_path: Path) -> None:
    (file,) = map(open_safetensors, MODEL.glob("*.safetensors"))
    tower = "vision_tower."
    published = {name.replace(tower, f"{tower}vision_model."): file.read(name) for name in file.tensors}
    assert "vision_tower.vision_model.pre_layrnorm.weight" in published
    published["vision_tower.vision_model.embeddings.position_ids"] = np.arange(17)[None]
    write_safetensors(tmp_path / "model.safetensors", published)
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    found, expected = open_model(tmp_path), open_model(MODEL)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(found.read(name), expected.read(name)) for name in expected.tensors)
    decoder = with_vision(decoder_of(found), tmp_path, found.config)
    check_tensors(found, make_skeleton(decoder, plain(np.dtype("float32"))))


@pytest.mark.parametrize(("kind", "width"), [("llama", 11_008), ("mistral", 14_336), ("qwen2", 22_016), (None, 11_008)])
def test_sizes_that_a_text_part_omits_are_those_of_transformers(kind: str | None, width: int, tmp_path: Path) -> None:
    text = {"vocab_size": 32_064} | ({} if kind is None else {"model_type": kind})
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, _ = read_decoder(tmp_path)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, width, 32)
    assert (config.vocab_size, config.num_heads) == (32_064, 32)


def test_an_image_whose_square_would_take_gigabytes_is_refused(tmp_path: Path) -> None:
    """A thin strip has few pixels, which decoding allows."""
    config = processor_of(changed(tmp_path, MODEL, processor={"do_pad": True}))
    with pytest.raises(InvalidRequestError, match=r"20000 x 100 pixels; this model pads .* at most 10000 pixels"):
        process_image(Image.new("RGB", (20_000, 100)), config)
    assert process_image(Image.new("RGB", (2_000, 10)), config).num_tokens > 0
