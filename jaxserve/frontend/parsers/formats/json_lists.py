"""Tool calls as JSON between other markers: Jamba, Nemotron, Hunyuan, InternLM, LongCat, Granite 20B, xLAM and Apertus."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody, KeyedBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

JAMBA_TOOLS: Final = ToolFormat(
    name="jamba",
    aliases=("minimax",),
    sections=(Section(opener="<tool_calls>", body=JsonBody(), closer="</tool_calls>"),),
    template_signs=("<tool_calls>",),
    foreign_signs=("<tool_call>", "<tool_sep>", "<invoke"),
    syntaxes=(CallSyntax(begin="<tool_calls>[\n", separator=",\n", end="\n]</tool_calls>"),),
    priority=0,
)
NEMOTRON_JSON_TOOLS: Final = ToolFormat(
    name="nemotron_json",
    sections=(Section(opener="<TOOLCALL>", body=JsonBody(), closer="</TOOLCALL>"),),
    template_signs=("<TOOLCALL>",),
    syntaxes=(CallSyntax(begin="<TOOLCALL>[", separator=", ", end="]</TOOLCALL>"),),
)
HUNYUAN_A13B_TOOLS: Final = replace(
    JAMBA_TOOLS,
    name="hunyuan_a13b",
    aliases=(),
    template_signs=('<tool_calls>[{"name": "func_name1"',),
    foreign_signs=(),
    syntaxes=(CallSyntax(begin="<tool_calls>[", separator=", ", end="]</tool_calls>"),),
    priority=4,
)
INTERNLM_TOOLS: Final = ToolFormat(
    name="internlm",
    sections=(Section(opener="<|action_start|><|plugin|>", body=JsonBody(), closer="<|action_end|>"),),
    template_signs=("<|action_start|><|plugin|>",),
    syntaxes=(CallSyntax(begin="<|action_start|><|plugin|>\n", between=', "parameters": ', after="}<|action_end|>"),),
)
LONGCAT_TOOLS: Final = ToolFormat(
    name="longcat",
    sections=(Section(opener="<longcat_tool_call>", body=JsonBody(), closer="</longcat_tool_call>"),),
    template_signs=("<longcat_tool_call>",),
    syntaxes=(
        CallSyntax(
            begin="<longcat_tool_call>",
            before='\n{"name": ',
            after="}\n</longcat_tool_call>",
            separator="\n<longcat_tool_call>",
        ),
    ),
)
GRANITE_20B_TOOLS: Final = ToolFormat(
    name="granite-20b-fc",
    sections=(Section(opener="<function_call>", body=JsonBody()),),
    template_signs=("<function_call>",),
    syntaxes=(CallSyntax(begin="<function_call>", before=' {"name": ', separator="\n<function_call>"),),
)
XLAM_TOOLS: Final = ToolFormat(
    name="xlam",
    sections=(Section(body=JsonBody()),),
    template_signs=("make calls in a single JSON array",),
    syntaxes=(CallSyntax(begin="[", is_bare=True, separator=", ", end="]"),),
)
APERTUS_TOOLS: Final = ToolFormat(
    name="apertus",
    sections=(Section(opener="<|tools_prefix|>", body=KeyedBody(), closer="<|tools_suffix|>"),),
    template_signs=("<|tools_prefix|>",),
    syntaxes=(
        CallSyntax(
            begin="<|tools_prefix|>[",
            before="{",
            between=": ",
            after="}",
            separator=", ",
            end="]<|tools_suffix|>",
        ),
    ),
)
