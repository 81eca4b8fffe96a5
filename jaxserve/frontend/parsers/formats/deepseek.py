"""Tool calls of DeepSeek V3 and R1: a name in a header, then arguments as JSON."""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat

_HEADER = re.compile(r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<`]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*")

DEEPSEEK_TOOLS: Final = ToolFormat(
    name="deepseek",
    sections=(
        Section(
            wrapper="<｜tool▁calls▁begin｜>",
            opener="<｜tool▁call▁begin｜>",
            body=HeaderBody(_HEADER, trailer=re.compile(r"[\s`]*")),
            closer="<｜tool▁call▁end｜>",
            wrapper_end="<｜tool▁calls▁end｜>",
            inner=("<｜tool▁sep｜>",),
        ),
    ),
    template_signs=("<｜tool▁calls▁begin｜>",),
)
