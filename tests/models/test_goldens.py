"""The committed references are varied, without ties and small."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.models.goldens import DATA, golden_checkpoint, golden_names, smollm2_goldens

TIE = 1e-4
"""Distance of the two best logits below which another greedy token is accepted."""

MAX_FILE_BYTES = 450_000


@pytest.mark.parametrize("name", golden_names())
def test_tiny_references_are_varied_and_without_ties(name: str) -> None:
    golden = golden_checkpoint(name)
    assert (golden.prompt_ids.shape, golden.output_ids.shape) == ((40,), (64,))
    assert np.unique(golden.output_ids).size >= 24
    assert golden.gaps.min() > 10 * TIE
    assert 1.0 < golden.logits.std() < 4.0


@pytest.mark.parametrize("name", golden_names())
def test_tiny_checkpoints_stay_tiny(name: str) -> None:
    assert sum(file.stat().st_size for file in (DATA / name).iterdir()) < MAX_FILE_BYTES


@pytest.mark.parametrize(("rows", "folder"), [("controls.json", "."), ("processors.json", "vision")])
def test_every_tiny_checkpoint_can_be_made_again(rows: str, folder: str) -> None:
    assert set(json.loads((DATA / rows).read_text())) == {
        path.parent.name for path in DATA.glob(f"{folder}/*/golden.npz")
    }


def test_smollm2_references_cover_what_is_promised_without_ties() -> None:
    goldens = smollm2_goldens()
    assert len({golden.name for golden in goldens}) == 20
    assert min(len(golden.prompt_ids) for golden in goldens) == 1
    assert max(len(golden.prompt_ids) for golden in goldens) >= 1500
    assert max(len(golden.messages) for golden in goldens) >= 5
    assert any(not golden.text.isascii() for golden in goldens if golden.text)
    for golden in goldens:
        assert (golden.text is None) == bool(golden.messages)
        assert len(golden.output_ids) == len(golden.gaps) == 64
        assert min(golden.gaps) > TIE
