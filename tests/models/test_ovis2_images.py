"""Images of Ovis2: grids and texts of any picture, marks between tiles, and keys that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.positions import image_spans
from jaxserve.frontend.images.processor import process_image
from jaxserve.models.registry import read_decoder
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of

MODEL, ODD = DATA / "vision" / "ovis2_tiny", DATA / "vision" / "ovis2_odd_tiny"


@pytest.mark.parametrize(
    ("model", "side", "patch", "merge", "keys"),
    [(MODEL, 28, 7, 2, {}), (MODEL, 28, 7, 2, {"max_patches": 9}), (ODD, 20, 5, 1, {"min_patches": 2})],
)
def test_tiles_and_texts_of_pictures_of_any_size_equal_those_of_transformers(
    model: Path, side: int, patch: int, merge: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = changed(tmp_path, model, processor=keys)
    theirs, config = transformers.Ovis2ImageProcessorPil.from_pretrained(folder), processor_of(folder)
    processor = transformers.Ovis2Processor.__new__(transformers.Ovis2Processor)
    processor.image_seq_length = (side // patch // merge) ** 2
    count = side // patch
    for seed, (width, height) in enumerate(((80, 50), (31, 90), (7, 5), (28, 28), (200, 33), (1, 60), (64, 64))):
        image = picture(width, height, seed)
        processed = process_image(image, config)
        made = theirs([image], do_rescale=False, do_normalize=False, return_tensors="np")
        tiles = np.asarray(made["pixel_values"], np.uint8)
        rows = (len(tiles), 3, count // merge, merge, patch, count // merge, merge, patch)
        cut = tiles.reshape(rows).transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(tiles) * count**2, -1)
        np.testing.assert_array_equal(np.concatenate([item.patches for item in processed.items]), cut)
        assert processed.text == processor.replace_image_token({"grids": made["grids"]}, 0)


def test_marks_are_tokens_of_the_tile_beside_them() -> None:
    (small,) = process_image(picture(20, 22, 0), processor_of(MODEL)).items
    assert small.sources is not None
    assert small.sources[:, 0].tolist() == [4, 0, 1, 2, 3, 5, 8]
    ids = np.array([20, 5, 4, 4, 4, 4, 6, 9, 21])
    (span,) = image_spans(ids, 4, [7], None, processor_of(MODEL).mark_token_ids)
    assert (span.start, span.length) == (1, 7)


@pytest.mark.parametrize(
    ("key", "value"), [("tokenize_function", "gumbel_argmax"), ("qkv_bias", True), ("num_visual_indicator_tokens", 6)]
)
def test_a_tower_that_is_not_computed_is_refused_with_its_key(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"vision_config.{key} is"):
        vision_of(changed(tmp_path, MODEL, vision_config={key: value}))


def test_the_head_is_tied_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    folder = changed(tmp_path, MODEL)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"unused": 0'))
    assert read_decoder(folder)[0].tied_embeddings
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    assert not read_decoder(folder)[0].tied_embeddings
