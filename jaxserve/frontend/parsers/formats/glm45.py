"""Tool calls of GLM-4.5 to GLM-5 and of Ling 3.0: a name, then keys and values between tags."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import TaggedBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat

GLM45_TOOLS: Final = ToolFormat(
    name="glm45",
    sections=(
        Section(
            opener="<tool_call>",
            body=TaggedBody(
                parameter="<arg_key>",
                parameter_name_end="</arg_key>",
                value_start="<arg_value>",
                parameter_end="</arg_value>",
                has_own_lines=False,
            ),
            closer="</tool_call>",
        ),
    ),
    template_signs=("<arg_key>",),
)
