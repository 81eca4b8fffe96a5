"""Tool calls and reasoning of Solar Open: an assistant's turn for each of reasoning, content and calls.

    <|think|>...<|end|><|begin|>assistant<|content|>...
    <|think|>...<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|>

The prompt ends with `<|begin|>assistant`, and the tokens that end a reply have no text.
"""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import ToolFormat, wrapped_syntax

_HEADER = re.compile(r"[^<]*<\|tool_call:name\|>\s*(?P<name>[^\s<]+)\s*(?:<\|tool_call:args\|>)?\s*")

_SECTION: Final = Section(
    wrapper="<|tool_calls|>",
    opener="<|tool_call:begin|>",
    body=HeaderBody(_HEADER),
    closer="<|tool_call:end|>",
    inner=("<|tool_call:name|>", "<|tool_call:args|>"),
)

SOLAR_OPEN_TOOLS: Final = ToolFormat(
    name="solar_open",
    sections=(_SECTION,),
    template_signs=("<|tool_call:begin|>",),
    syntaxes=(wrapped_syntax(_SECTION, "<|tool_call:args|>", before="{index}<|tool_call:name|>"),),
)
SOLAR_OPEN_REASONING: Final = ReasoningFormat(
    name="solar_open",
    opener="<|think|>",
    closer="<|end|>",
    answer_tags=("<|begin|>assistant", "<|content|>", "<|end|>"),
    template_signs=("<|think|>",),
    priority=1,
)
