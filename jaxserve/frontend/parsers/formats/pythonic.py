"""Tool calls as Python calls: Llama 4, OLMo 3, LFM2 and LFM2.5."""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import PythonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import ToolFormat

PYTHONIC_TOOLS: Final = ToolFormat(
    name="pythonic",
    sections=(
        Section(body=PythonBody()),
        Section(opener="<function_calls>", body=PythonBody(), closer="</function_calls>"),
        Section(opener="<|python_start|>", body=PythonBody(), closer="<|python_end|>"),
        Section(opener="<|tool_call_start|>", body=PythonBody(), closer="<|tool_call_end|>"),
    ),
    template_signs=(
        "<function_calls>",
        "<|python_start|>",
        "[func_name1(",
        "<|tool_list_start|>",
        "<|tool_call_start|>",
        "List of tools: [",
    ),
    priority=2,
)
