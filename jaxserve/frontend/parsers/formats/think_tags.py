"""Reasoning of Qwen3 and many others, between `<think>` tags, and of models that write the answer between tags, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.reasoning import ReasoningFormat

QWEN3_REASONING: Final = ReasoningFormat(
    name="qwen3",
    aliases=(
        "deepseek_v3",
        "deepseek_v4",
        "glm45",
        "glm47",
        "holo2",
        "kimi_k2",
        "mimo",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3p5",
    ),
    opener="<think>",
    closer="</think>",
    template_signs=("<think>", "</think>"),
)
ERNIE45_REASONING: Final = replace(
    QWEN3_REASONING,
    name="ernie45",
    aliases=(),
    answer_tags=("<response>", "</response>"),
    template_signs=("<response>",),
    priority=1,
)
"""ERNIE 4.5 and Granite 3.3."""
HUNYUAN_A13B_REASONING: Final = replace(
    QWEN3_REASONING,
    name="hunyuan_a13b",
    aliases=(),
    answer_tags=("<answer>", "</answer>"),
    template_signs=("<|extra_4|>",),
    priority=1,
)
DEEPSEEK_R1_REASONING: Final = ReasoningFormat(
    name="deepseek_r1", aliases=("step3",), opener="<think>", closer="</think>", starts_open=True
)
"""DeepSeek R1: a reply begins inside the reasoning, without an opening tag."""
