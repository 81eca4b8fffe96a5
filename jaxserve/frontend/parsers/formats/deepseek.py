"""Tool calls of DeepSeek V3, R1 and V3.1: a name in a header, then arguments as JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat, wrapped_syntax

_HEADER = re.compile(r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<`]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*")

_SECTION: Final = Section(
    wrapper="<｜tool▁calls▁begin｜>",
    opener="<｜tool▁call▁begin｜>",
    body=HeaderBody(_HEADER, trailer=re.compile(r"[\s`]*")),
    closer="<｜tool▁call▁end｜>",
    wrapper_end="<｜tool▁calls▁end｜>",
    inner=("<｜tool▁sep｜>",),
)

DEEPSEEK_V31_TOOLS: Final = ToolFormat(
    name="deepseek_v31",
    sections=(_SECTION,),
    template_signs=("<｜tool▁calls▁begin｜>",),
    syntaxes=(wrapped_syntax(_SECTION, "<｜tool▁sep｜>"),),
)
DEEPSEEK_TOOLS: Final = replace(
    DEEPSEEK_V31_TOOLS,
    name="deepseek",
    aliases=("deepseek_v3",),
    template_signs=("tool['type'] + '<｜tool▁sep｜>'", "function<｜tool▁sep｜>"),
    syntaxes=(
        replace(
            DEEPSEEK_V31_TOOLS.syntaxes[0],
            before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            between="\n```json\n",
            after="\n```<｜tool▁call▁end｜>",
            separator="\n",
        ),
    ),
    priority=4,
)
