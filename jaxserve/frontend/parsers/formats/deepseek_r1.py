"""Reasoning of DeepSeek R1: a reply begins inside it, without an opening tag."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.reasoning import ReasoningFormat

DEEPSEEK_R1_REASONING: Final = ReasoningFormat(
    name="deepseek_r1", opener="<think>", closer="</think>", starts_open=True
)
