"""Tool calls of DeepSeek: V3, R1 and V3.1 write a name in a header, then JSON; V3.2 and V4 tags with the mark DSML.

Those tags say which values are strings.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tagged import TaggedBody, TypeFlags
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

_DSML_BODY: Final = TaggedBody(
    name_end='">',
    parameter='<｜DSML｜parameter name="',
    parameter_name_end='"',
    flags=TypeFlags(string=' string="true">', json=' string="false">', unknown=">"),
    parameter_end="</｜DSML｜parameter>",
    has_own_lines=False,
)

_DSML_SECTION: Final = Section(
    wrapper="<｜DSML｜function_calls>",
    opener='<｜DSML｜invoke name="',
    body=_DSML_BODY,
    closer="</｜DSML｜invoke>",
    wrapper_end="</｜DSML｜function_calls>",
    inner=("｜DSML｜",),
)
_DSML_SECTION4: Final = replace(_DSML_SECTION, wrapper="<｜DSML｜tool_calls>", wrapper_end="</｜DSML｜tool_calls>")

DEEPSEEK_V32_TOOLS: Final = ToolFormat(
    name="deepseek_v32",
    sections=(_DSML_SECTION,),
    template_signs=("<｜DSML｜function_calls>", "{{ dsml_token }}function_calls"),
    syntaxes=(wrapped_syntax(_DSML_SECTION, '">\n', _DSML_BODY, line="\n"),),
    priority=4,
)
DEEPSEEK_V4_TOOLS: Final = replace(
    DEEPSEEK_V32_TOOLS,
    name="deepseek_v4",
    sections=(_DSML_SECTION4,),
    template_signs=("<｜DSML｜tool_calls>", "{{ dsml_token }}tool_calls"),
    syntaxes=(wrapped_syntax(_DSML_SECTION4, '">\n', _DSML_BODY, line="\n"),),
)
