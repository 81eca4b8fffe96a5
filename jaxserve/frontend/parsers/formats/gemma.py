"""Tool calls and reasoning of Gemma: `call:f{...}` with strings between markers."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.gemma_calls import GemmaBody
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_SECTION: Final = Section(
    opener="<start_function_call>", body=GemmaBody("<escape>"), closer="<end_function_call>", inner=("<escape>",)
)
_SECTION4: Final = Section(opener="<|tool_call>", body=GemmaBody('<|"|>'), closer="<tool_call|>", inner=('<|"|>',))


def _syntax(section: Section, body: GemmaBody, control_tokens: tuple[str, ...] = ()) -> CallSyntax:
    return CallSyntax(
        begin=section.opener,
        before="call:",
        between="{",
        arguments=body,
        after="}" + section.closer,
        separator=section.opener,
        is_name_quoted=False,
        control_tokens=control_tokens,
    )


FUNCTIONGEMMA_TOOLS: Final = ToolFormat(
    name="functiongemma",
    sections=(_SECTION,),
    template_signs=("<start_function_call>",),
    syntaxes=(_syntax(_SECTION, GemmaBody("<escape>")),),
)
GEMMA4_TOOLS: Final = ToolFormat(
    name="gemma4",
    sections=(_SECTION4,),
    template_signs=("<|tool_call>",),
    syntaxes=(_syntax(_SECTION4, GemmaBody('<|"|>')),),
)
GEMMA_TOOLS: Final = ToolFormat(
    name="gemma",
    sections=(_SECTION, _SECTION4),
    template_signs=(),
    syntaxes=(
        _syntax(_SECTION4, GemmaBody('<|"|>'), (_SECTION4.opener, _SECTION4.closer)),
        *FUNCTIONGEMMA_TOOLS.syntaxes,
    ),
)
"""Both of them, for command lines that name the family only: the vocabulary shows which one a forced call has."""

GEMMA4_REASONING: Final = ReasoningFormat(
    name="gemma4", opener="<|channel>thought", closer="<channel|>", template_signs=("<|channel>thought",)
)
