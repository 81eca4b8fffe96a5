"""Reasoning of Qwen3 and many others: between `<think>` tags."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.reasoning import ReasoningFormat

QWEN3_REASONING: Final = ReasoningFormat(
    name="qwen3", opener="<think>", closer="</think>", template_signs=("<think>", "</think>")
)
