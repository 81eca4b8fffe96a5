"""Tool calls of Qwen3-Coder, one tag per parameter, of ZAYA1, and of Seed-OSS, with its reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tagged import TaggedBody
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_BODY: Final = TaggedBody(
    name_end=">", parameter="<parameter=", parameter_name_end=">", parameter_end="</parameter>", line="\n"
)

QWEN3_CODER_TOOLS: Final = ToolFormat(
    name="qwen3_coder",
    aliases=("iquest_coder", "mimo", "qwen3_xml", "step3p5"),
    sections=(
        Section(
            wrapper="<tool_call>", opener="<function=", body=_BODY, closer="</function>", wrapper_end="</tool_call>"
        ),
    ),
    template_signs=("<parameter=",),
    syntaxes=(
        CallSyntax(
            begin="<tool_call>",
            before="\n<function=",
            between=">\n",
            arguments=_BODY,
            after="</function>\n</tool_call>",
            separator="\n<tool_call>",
            is_name_quoted=False,
        ),
    ),
)
ZAYA_TOOLS: Final = replace(
    QWEN3_CODER_TOOLS,
    name="zaya_xml",
    aliases=(),
    sections=(replace(QWEN3_CODER_TOOLS.sections[0], wrapper="<zyphra_tool_call>", wrapper_end="</zyphra_tool_call>"),),
    template_signs=("<zyphra_tool_call>",),
    syntaxes=(
        replace(
            QWEN3_CODER_TOOLS.syntaxes[0],
            begin="<zyphra_tool_call>",
            after="</function>\n</zyphra_tool_call>",
            separator="\n<zyphra_tool_call>",
        ),
    ),
    priority=4,
)

_SEED_BODY: Final = TaggedBody(
    name_end=">", parameter="<parameter=", parameter_name_end=">", parameter_end="</parameter>", has_own_lines=False
)

SEED_OSS_TOOLS: Final = ToolFormat(
    name="seed_oss",
    sections=(
        replace(
            QWEN3_CODER_TOOLS.sections[0], wrapper="<seed:tool_call>", body=_SEED_BODY, wrapper_end="</seed:tool_call>"
        ),
    ),
    template_signs=("<seed:tool_call>",),
    syntaxes=(
        replace(
            QWEN3_CODER_TOOLS.syntaxes[0],
            begin="<seed:tool_call>",
            arguments=_SEED_BODY,
            after="</function>\n</seed:tool_call>",
            separator="\n<seed:tool_call>",
        ),
    ),
    priority=4,
)
SEED_OSS_REASONING: Final = ReasoningFormat(
    name="seed_oss",
    opener="<seed:think>",
    closer="</seed:think>",
    template_signs=("<seed:think>", "</seed:think>"),
    priority=1,
)
