"""Fixtures that the cost tests share with the tests of the server."""

from __future__ import annotations

import pytest

from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.running_api import TOKENIZERS


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZERS / "byte_level")
