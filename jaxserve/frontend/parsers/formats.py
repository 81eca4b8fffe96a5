"""Every family's way to write tool calls and reasoning, as data.

A new family is a new row: markers, a body, and what its chat templates contain. Rows are tried in order, so
the more special sign stands first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from jaxserve.frontend.parsers.bodies import GemmaBody, HeaderBody, JsonBody, PythonBody, TaggedBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.reasoning import ReasoningFormat

HARMONY: Final = "harmony"
HARMONY_SIGN: Final = "<|channel|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a grammar spells calls: a name, and arguments as JSON, between these texts."""

    begin: str = ""
    """In front of all calls; where it is missing, they are the whole reply."""
    before: str
    between: str
    behind: str
    separator: str | None = None
    """Between two calls; None: there is no way to write two."""
    end: str = ""
    is_name_quoted: bool = True
    """Whether the name is a JSON string."""
    control_tokens: tuple[str, ...] = ()
    """Only where these are control tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family calls tools."""

    name: str
    sections: tuple[Section, ...]
    template_signs: tuple[str, ...]
    """A chat template with one of these is of this family."""
    foreign_signs: tuple[str, ...] = ()
    """But not with one of these: a family that nothing here reads uses the same marker."""
    num_id_characters: int | None = None
    """Its templates take ids of exactly so many letters and digits; None: any."""
    spellings: tuple[CallSyntax, ...] = ()
    """How a grammar spells its calls, the first that the vocabulary has the tokens for. None: nothing can hold them."""


_DEEPSEEK_HEADER = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<`]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"
)
_MISTRAL_HEADER = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*")

_TOOL_FORMATS = (
    ToolFormat(
        name="gemma",
        sections=(
            Section(
                opener="<start_function_call>",
                body=GemmaBody(),
                closer="<end_function_call>",
                inner=("<escape>",),
            ),
            Section(opener="<|tool_call>", body=GemmaBody(), closer="<tool_call|>", inner=('<|"|>',)),
        ),
        template_signs=("<start_function_call>", "<|tool_call>"),
    ),
    ToolFormat(
        name="deepseek",
        sections=(
            Section(
                wrapper="<｜tool▁calls▁begin｜>",
                opener="<｜tool▁call▁begin｜>",
                body=HeaderBody(_DEEPSEEK_HEADER, trailer=re.compile(r"[\s`]*")),
                closer="<｜tool▁call▁end｜>",
                wrapper_end="<｜tool▁calls▁end｜>",
                inner=("<｜tool▁sep｜>",),
            ),
        ),
        template_signs=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        name="mistral",
        sections=(Section(opener="[TOOL_CALLS]", body=HeaderBody(_MISTRAL_HEADER), inner=("[ARGS]", "[CALL_ID]")),),
        template_signs=("[TOOL_CALLS]",),
        num_id_characters=9,
        spellings=(
            CallSyntax(
                begin="[TOOL_CALLS]",
                before="",
                between="[ARGS]",
                behind="",
                separator="[TOOL_CALLS]",
                is_name_quoted=False,
                control_tokens=("[TOOL_CALLS]", "[ARGS]"),
            ),
            CallSyntax(
                begin="[TOOL_CALLS] [",
                before='{"name": ',
                between=', "arguments": ',
                behind="}",
                separator=", ",
                end="]",
            ),
        ),
    ),
    ToolFormat(
        name="qwen3_coder",
        sections=(
            Section(
                wrapper="<tool_call>",
                opener="<function=",
                body=TaggedBody(
                    name_end=">", parameter="<parameter=", parameter_name_end=">", parameter_end="</parameter>"
                ),
                closer="</function>",
                wrapper_end="</tool_call>",
            ),
        ),
        template_signs=("<parameter=",),
        foreign_signs=("<seed:tool_call>",),
    ),
    ToolFormat(
        name="pythonic",
        sections=(
            Section(body=PythonBody()),
            Section(opener="<function_calls>", body=PythonBody(), closer="</function_calls>"),
            Section(opener="<|python_start|>", body=PythonBody(), closer="<|python_end|>"),
        ),
        template_signs=("<function_calls>", "<|python_start|>", "[func_name1("),
    ),
    ToolFormat(
        name="hermes",
        sections=(Section(opener="<tool_call>", body=JsonBody(), closer="</tool_call>"),),
        template_signs=("<tool_call>",),
        foreign_signs=("<arg_key>", "<tool_calls>", "<invoke"),
        spellings=(
            CallSyntax(
                begin="<tool_call>",
                before='\n{"name": ',
                between=', "arguments": ',
                behind="}\n</tool_call>",
                separator="\n<tool_call>",
            ),
        ),
    ),
    ToolFormat(
        name="llama3_json",
        sections=(Section(body=JsonBody()), Section(opener="<|python_tag|>", body=JsonBody())),
        template_signs=("<|python_tag|>", '"parameters": dictionary'),
        foreign_signs=("<function=",),
        spellings=(CallSyntax(before='{"name": ', between=', "parameters": ', behind="}"),),
    ),
)

_REASONING_FORMATS = (
    ReasoningFormat(
        name="gemma4", opener="<|channel>thought", closer="<channel|>", template_signs=("<|channel>thought",)
    ),
    ReasoningFormat(name="mistral", opener="[THINK]", closer="[/THINK]", template_signs=("[THINK]",)),
    ReasoningFormat(name="qwen3", opener="<think>", closer="</think>", template_signs=("<think>", "</think>")),
    ReasoningFormat(name="deepseek_r1", opener="<think>", closer="</think>", starts_open=True),
)

TOOL_FORMATS: Final = MappingProxyType({row.name: row for row in _TOOL_FORMATS})
REASONING_FORMATS: Final = MappingProxyType({row.name: row for row in _REASONING_FORMATS})
