"""Indices and counts of long rows are exact, and rows without any True have a result of their own."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sampling.rows import count, entries, first_where, last_where


@pytest.mark.parametrize("size", [1, 17, 262_144])
def test_places_and_numbers_of_true_entries(size: int) -> None:
    random = np.random.default_rng(size)
    mask = random.random((4, size)) < np.array([[0.0], [3 / size], [0.5], [1.0]])
    mask[2, -1] = True
    places = [np.flatnonzero(row) for row in mask]
    assert first_where(mask).tolist() == [row[0] if len(row) else size for row in places]
    assert last_where(mask).tolist() == [row[-1] if len(row) else 0 for row in places]
    assert count(mask).tolist() == [len(row) for row in places]


def test_entries_are_those_of_their_row() -> None:
    x, indices = np.arange(24).reshape(2, 3, 4), np.array([[2, 0], [1, 1]])
    assert entries(x, indices[..., None]).tolist() == np.take_along_axis(x, indices[..., None], 1).tolist()
