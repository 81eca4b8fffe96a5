"""Images of requests at the engine's door: their places in the prompt, their patches and their lines."""

from __future__ import annotations

import pytest

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.prompt_images import PromptImage, RopePositions
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.admission import Admission
from jaxserve.types import RequestId

INFO = ImageInfo(max_patches=8, max_tokens=8, cache_rows=8, merge=1, patch_bytes=4)
ADMISSION = Admission(max_model_len=64, vocab_size=9, num_usable_tokens=64, max_requests=4, images=INFO)


def image(start: int, count: int, line: int = 0) -> PromptImage:
    return PromptImage(start, count, b"a", bytes(4 * count), bytes(8 * count), line)


def rejection(*images: PromptImage, rope: RopePositions | None = None) -> str | None:
    sampling = EngineSamplingParams(max_tokens=2)
    message = AddRequest(RequestId("a"), list(range(1, 9)), sampling, images=list(images), rope_positions=rope)
    error = ADMISSION.rejection(message, 0)
    return None if error is None else error.message


@pytest.mark.parametrize("images", [[image(1, 6)], [image(1, 2), image(3, 5)], [image(1, 6, 3)], [image(0, 4, 2)]])
def test_images_in_the_prompt_are_admitted(images: list[PromptImage]) -> None:
    assert rejection(*images) is None


@pytest.mark.parametrize(
    "images", [[image(1, 5, 3)], [image(1, 6, -1)], [image(1, 0)], [image(0, 3), image(2, 2)], [image(0, 9)]]
)
def test_images_that_do_not_fit_their_places_are_refused(images: list[PromptImage]) -> None:
    assert "does not fit its place" in str(rejection(*images))


def test_line_breaks_count_for_the_end_of_an_image() -> None:
    assert image(2, 6, 2).length == 8
    assert rejection(image(2, 6)) is None
    assert rejection(image(2, 6, 2)) == "images and positions do not fit the prompt"


@pytest.mark.parametrize(("delta", "is_admitted"), [(-3, True), (1 << 20, True), (1 << 33, False), (-(1 << 33), False)])
def test_rotary_positions_of_generated_tokens_are_integers_of_32_bits(delta: int, is_admitted: bool) -> None:
    """A step with larger ones would end the engine."""
    found = rejection(image(1, 6), rope=RopePositions(bytes(12 * 8), delta))
    assert found == (None if is_admitted else "images and positions do not fit the prompt")
