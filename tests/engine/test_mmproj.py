"""Engines of GGUF text models with the image encoder of an mmproj file: tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.config import ImagesConfig
from tests.engine.image_reader import ORDER, SIZES, Reader, limits
from tests.engine.model_engine import ModelEngine
from tests.models.mmproj_files import CHANGES, CONVERSIONS, write_pair
from tests.models.pictures import picture

IN_CI = ("gemma3_vision_tiny",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in CONVERSIONS
        if name not in CHANGES
    ],
)
def test_tokens_after_images_equal_transformers(name: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, name)
    processor = read_image_processor(pair.text, pair.mmproj)
    assert processor is not None
    engine = ModelEngine(pair.text, images=ImagesConfig(mmproj=str(pair.mmproj)), **limits(name))
    reader = Reader(engine, name)
    for count in ORDER:
        images = [picture(*SIZES[index], index) for index in ORDER[count]]
        engine.restart()
        message = reader.request_of("a", reader.golden[f"ids_{count}"].tolist(), images, processor)
        assert engine.run([message])["a"].token_ids == reader.expected(count)
    engine.close()
