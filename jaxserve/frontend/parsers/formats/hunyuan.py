"""Tool calls and reasoning of Hunyuan 3 and Hy4: names, keys and values between tags.

Published checkpoints have a suffix in each tag, `<tool_call:opensource>` and `<tool_call:6124c78e>`; others have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.formats.think_tags import QWEN3_REASONING
from jaxserve.frontend.parsers.tagged import TaggedBody
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat, wrapped_syntax


def _body(suffix: str, *, has_separator: bool) -> TaggedBody:
    return TaggedBody(
        name_end=f"<tool_sep{suffix}>" if has_separator else "",
        parameter=f"<arg_key{suffix}>",
        parameter_name_end=f"</arg_key{suffix}>",
        value_start=f"<arg_value{suffix}>",
        parameter_end=f"</arg_value{suffix}>",
        has_own_lines=False,
    )


def _section(suffix: str, *, has_separator: bool) -> Section:
    return Section(
        wrapper=f"<tool_calls{suffix}>",
        opener=f"<tool_call{suffix}>",
        body=_body(suffix, has_separator=has_separator),
        closer=f"</tool_call{suffix}>",
        wrapper_end=f"</tool_calls{suffix}>",
        inner=tuple(f"<{end}arg_{part}{suffix}>" for end in ("", "/") for part in ("key", "value"))
        + ((f"<tool_sep{suffix}>",) if has_separator else ()),
    )


def _syntax(suffix: str, *, has_separator: bool) -> CallSyntax:
    between = f"<tool_sep{suffix}>\n" if has_separator else "\n"
    section = _section(suffix, has_separator=has_separator)
    syntax = wrapped_syntax(section, between, _body(suffix, has_separator=has_separator), line="\n")
    return replace(syntax, control_tokens=(section.wrapper,) if suffix else ())


HY_V3_TOOLS: Final = ToolFormat(
    name="hy_v3",
    sections=tuple(_section(suffix, has_separator=True) for suffix in (":opensource", "")),
    template_signs=("<tool_sep>", ":opensource"),
    syntaxes=tuple(_syntax(suffix, has_separator=True) for suffix in (":opensource", "")),
    priority=5,
)
HY_V4_TOOLS: Final = ToolFormat(
    name="hy_v4",
    sections=tuple(_section(suffix, has_separator=False) for suffix in (":6124c78e", "")),
    template_signs=(":6124c78e",),
    syntaxes=tuple(_syntax(suffix, has_separator=False) for suffix in (":6124c78e", "")),
    priority=5,
)
HY_V3_REASONING: Final = replace(
    QWEN3_REASONING,
    name="hy_v3",
    aliases=(),
    opener="<think:opensource>",
    closer="</think:opensource>",
    other_openers=("<think>",),
    other_closers=("</think>",),
    template_signs=(":opensource",),
    priority=1,
)
HY_V4_REASONING: Final = replace(
    HY_V3_REASONING,
    name="hy_v4",
    opener="<think:6124c78e>",
    closer="</think:6124c78e>",
    template_signs=(":6124c78e",),
)
