"""The table of models and settings agrees with the families and with the checks at the start."""

from __future__ import annotations

import pytest

from jaxserve.models.registry import architectures
from tests.models.served_table import PAGE, page

pytestmark = pytest.mark.slow


def test_the_page_of_models_is_fresh_and_has_every_architecture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "run `make docs`"
    text += PAGE.with_name("embeddings.md").read_text(encoding="utf-8")
    assert [name for name in architectures() if f"`{name}`" not in text] == []
