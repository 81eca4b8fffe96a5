"""Tool calls as Python calls: Llama 4, OLMo 3, LFM2 and LFM2.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.bodies import PythonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

_LIST: Final = CallSyntax(
    begin="[",
    is_bare=True,
    before="",
    between="(",
    arguments=PythonBody(),
    after=")",
    separator=", ",
    end="]",
    is_name_quoted=False,
)
_BARE: Final = Section(body=PythonBody())
_LLAMA: Final = Section(opener="<|python_start|>", body=PythonBody(), closer="<|python_end|>")
_OLMO: Final = Section(opener="<function_calls>", body=PythonBody(), closer="</function_calls>")
_LFM: Final = Section(opener="<|tool_call_start|>", body=PythonBody(), closer="<|tool_call_end|>")

OLMO3_TOOLS: Final = ToolFormat(
    name="olmo3",
    sections=(_BARE, _OLMO),
    template_signs=("<function_calls>",),
    syntaxes=(
        replace(
            _LIST,
            begin="<function_calls>",
            is_bare=False,
            before="\n",
            separator="",
            end="\n</function_calls>",
        ),
    ),
    priority=2,
)
LFM2_TOOLS: Final = ToolFormat(
    name="lfm2",
    sections=(_BARE, _LFM),
    template_signs=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
    syntaxes=(replace(_LIST, begin="<|tool_call_start|>[", is_bare=False, end="]<|tool_call_end|>"),),
    priority=2,
)
PYTHONIC_TOOLS: Final = ToolFormat(
    name="pythonic",
    aliases=("llama4_pythonic",),
    sections=(_BARE, _LLAMA, _OLMO, _LFM),
    template_signs=("<|python_start|>", "[func_name1("),
    syntaxes=(
        replace(LFM2_TOOLS.syntaxes[0], control_tokens=(_LFM.opener, _LFM.closer)),
        replace(OLMO3_TOOLS.syntaxes[0], control_tokens=(_OLMO.opener, _OLMO.closer)),
        _LIST,
    ),
    priority=2,
)
"""Every way: the vocabulary shows which one a forced call has."""
