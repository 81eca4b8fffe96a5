"""Tool calls of Kimi K2 to K2.6: an id with the name, then arguments as JSON."""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat, wrapped_syntax

_HEADER = re.compile(
    r"\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*(?:<\|tool_call_argument_begin\|>)?\s*", re.ASCII
)

_SECTION: Final = Section(
    wrapper="<|tool_calls_section_begin|>",
    opener="<|tool_call_begin|>",
    body=HeaderBody(_HEADER),
    closer="<|tool_call_end|>",
    wrapper_end="<|tool_calls_section_end|>",
    inner=("<|tool_call_argument_begin|>",),
)

KIMI_K2_TOOLS: Final = ToolFormat(
    name="kimi_k2",
    sections=(_SECTION,),
    template_signs=("<|tool_calls_section_begin|>",),
    syntaxes=(wrapped_syntax(_SECTION, ":{index}<|tool_call_argument_begin|>", before="functions."),),
    prompt_id="functions.{name}:{index}",
)
