"""Tool calls and reasoning of Seed-OSS: the calls of Qwen3-Coder between other tags."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.formats.qwen3_coder import QWEN3_CODER_TOOLS
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import ToolFormat

SEED_OSS_TOOLS: Final = ToolFormat(
    name="seed_oss",
    sections=(replace(QWEN3_CODER_TOOLS.sections[0], wrapper="<seed:tool_call>", wrapper_end="</seed:tool_call>"),),
    template_signs=("<seed:tool_call>",),
    priority=4,
)
SEED_OSS_REASONING: Final = ReasoningFormat(
    name="seed_oss",
    opener="<seed:think>",
    closer="</seed:think>",
    template_signs=("<seed:think>", "</seed:think>"),
    priority=1,
)
