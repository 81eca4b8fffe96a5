"""Questions that several clients ask the default model, and its answers."""

from __future__ import annotations

from typing import Any, Literal

from tests.clients.lane import library

pydantic = library("pydantic")

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


class City(pydantic.BaseModel):
    """A parsed reply."""

    name: str
    continent: Literal["Africa", "America", "Asia", "Europe"]
    is_capital: bool


class Capital(pydantic.BaseModel):
    """A reply of which the default model is sure."""

    city: Literal["Berlin", "Paris", "Rome"]


PARIS = Capital(city="Paris")
