"""MiniCPM-V's images: slices after the whole image, windows within blocks, and numbers of images in a prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve.frontend.images.loader import numbered_texts
from jaxserve.frontend.images.processor import ProcessedImage, process_image
from jaxserve.frontend.images.protocol import PreparedImage
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of

MODEL = DATA / "vision" / "minicpm_v4_6_tiny"


def processed(folder: Path, width: int, height: int) -> ProcessedImage:
    return process_image(picture(width, height, 0), processor_of(folder))


def test_slices_follow_the_whole_image_row_by_row() -> None:
    image = processed(MODEL, 64, 60)
    tokens = [item.num_tokens * "<|image_pad|>" for item in image.items]
    first, second = ("".join(f"<slice>{each}</slice>" for each in row) for row in (tokens[1:3], tokens[3:]))
    assert image.text == f"<image>{tokens[0]}</image>{first}\n{second}"
    assert [item.grid for item in image.items] == 5 * [(8, 8)]


def test_windows_of_a_block_lie_side_by_side() -> None:
    (item,) = processed(MODEL, 30, 30).items
    places = item.positions.reshape(-1, 4, 4, 2)  # blocks, windows, patches
    assert (places // 2 == places[:, :, :1] // 2).all() and (places // 4 == places[:, :1, :1] // 4).all()
    assert sorted(map(tuple, item.positions)) == [(row, column) for row in range(8) for column in range(8)]
    assert places[0, :, 0].tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]


def test_images_of_a_prompt_are_numbered_unless_the_preprocessing_has_no_numbers(tmp_path: Path) -> None:
    for folder, start in ((MODEL, "<image_id>1</image_id>"), (changed(tmp_path, MODEL, {"use_image_id": False}), "")):
        images = [PreparedImage([], "a"), PreparedImage([], "b")]
        assert numbered_texts(images, processor_of(folder).markup.number)[1] == f"{start}b"


def test_images_that_are_not_cut_have_the_area_of_a_square(tmp_path: Path) -> None:
    (item,) = processed(changed(tmp_path, MODEL, {"slice_mode": False}), 200, 50).items
    assert item.grid == (4, 16) and np.prod(item.grid) * 4**2 == 32**2


def test_without_windows_their_layer_is_not_read(tmp_path: Path) -> None:
    folder = changed(tmp_path, MODEL, {"downsample_mode": "4x"}, downsample_mode="4x")
    vision = vision_of(folder)
    assert (vision.merger_layer, vision.merge, vision.unused_tensors) == (None, 2, ("vit_merger.",))
    assert vision_of(MODEL).merger_layer == 1
