"""Spans of images in a prompt, and M-RoPE positions computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.frontend.images.positions import ImageSpan, image_spans, mrope_positions

IMAGE = 9


def test_spans_are_found_in_order() -> None:
    tokens = np.array([1, IMAGE, IMAGE, 2, IMAGE, 3])
    assert image_spans(tokens, IMAGE, [2, 1]) == [ImageSpan(1, 2), ImageSpan(4, 1)]


def test_images_side_by_side_have_spans_of_their_own() -> None:
    assert image_spans(np.array([IMAGE] * 3), IMAGE, [1, 2]) == [ImageSpan(0, 1), ImageSpan(1, 2)]


@pytest.mark.parametrize("counts", [[2], [4], [1, 1], []])
def test_a_prompt_of_another_number_of_image_tokens_is_rejected(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="3 image tokens"):
        image_spans(np.array([1, IMAGE, IMAGE, 2, IMAGE]), IMAGE, counts)


def test_an_image_whose_tokens_are_apart_is_rejected() -> None:
    with pytest.raises(ValueError, match="not side by side"):
        image_spans(np.array([IMAGE, 1, IMAGE]), IMAGE, [2])


def test_rows_and_columns_count_from_the_image_and_text_goes_on_after_the_longer_side() -> None:
    # one token, an image of 2 x 3 blocks, two tokens
    positions, delta = mrope_positions(9, [ImageSpan(1, 6)], [(4, 6)], 2)
    time, rows, columns = positions.tolist()
    assert time == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert rows == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert columns == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert delta == -3  # the next token, number 9, has position 6


def test_texts_have_three_equal_positions() -> None:
    positions, delta = mrope_positions(4, [], [], 2)
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert delta == 0


def test_rows_of_an_image_may_have_a_line_break_between_them() -> None:
    tokens = np.array([1, IMAGE, IMAGE, 5, IMAGE, IMAGE, 6, IMAGE, 2])
    assert image_spans(tokens, IMAGE, [4, 1], [2, 1]) == [ImageSpan(1, 5), ImageSpan(7, 1)]
    with pytest.raises(ValueError, match="the 4 tokens of an image are not side by side"):
        image_spans(tokens, IMAGE, [4, 1], [3, 1])
    with pytest.raises(ValueError, match="the 4 tokens of an image are not side by side"):
        image_spans(tokens, IMAGE, [4, 1])
