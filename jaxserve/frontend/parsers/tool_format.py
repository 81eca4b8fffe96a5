"""The declaration of how a model family writes tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.frontend.parsers.arguments import ArgumentSyntax, JsonArguments
from jaxserve.frontend.parsers.calls import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Texts around the name and the arguments of a call, as the model writes them: a grammar for calls is built from it.

    By default a call is a JSON object with a name and arguments.
    """

    begin: str = ""
    """Text before the first call."""
    is_bare: bool = False
    """True if `begin` is no marker that only calls begin with: the calls are the whole reply."""
    before: str = '{"name": '
    """Text before a name; {index} stands for a number, {name} for the name."""
    between: str = ', "arguments": '
    """Text between name and arguments; {index} stands for a number."""
    arguments: ArgumentSyntax = field(default_factory=JsonArguments)
    """The way in which arguments are written."""
    after: str = "}"
    """Text after the arguments."""
    separator: str | None = None
    """Text between two calls. None: a reply has at most one call."""
    end: str = ""
    """Text after the last call."""
    is_name_quoted: bool = True
    """True if the name is a JSON string."""
    control_tokens: tuple[str, ...] = ()
    """Control tokens that the vocabulary must have for this syntax."""


def wrapped_syntax(
    section: Section,
    between: str,
    arguments: ArgumentSyntax | None = None,
    *,
    before: str = "",
    line: str = "",
) -> CallSyntax:
    """Return the syntax of calls between all markers of a section, with a name that is no JSON string.

    between: text after a name. arguments: None for JSON. before: text before a name, after the section's opener. line: line
    break before each opener and before the end.
    """
    return CallSyntax(
        begin=section.wrapper,
        before=f"{line}{section.opener}{before}",
        between=between,
        arguments=arguments or JsonArguments(),
        after=section.closer,
        separator="",
        end=f"{line}{section.wrapper_end}",
        is_name_quoted=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Tool calls of a model family."""

    name: str
    """Its name as a choice of `--tool-call-parser`."""
    aliases: tuple[str, ...] = ()
    """Names that vLLM has for it, which are choices as well."""
    sections: tuple[Section, ...]
    template_signs: tuple[str, ...]
    """Texts that show in a chat template that the model uses this format; one is enough."""
    foreign_signs: tuple[str, ...] = ()
    """Texts that show that the template only looks like it: an unsupported format that uses the same marker."""
    num_id_characters: int | None = None
    """Length of call ids, letters and digits, if the template requires one. None: any id."""
    prompt_id: str | None = None
    """Id of a call in prompts, from its {name} and its {index} among the calls of a conversation, if the model reads the name from
    it. None: the request's id."""
    syntaxes: tuple[CallSyntax, ...]
    """Syntaxes for a grammar; the first one whose control tokens exist is used."""
    is_explained: bool = False
    """True if the system message explains the format, instead of the chat template."""
    priority: int = 3
    """Formats with a higher priority are matched against templates first. Lower: its signs also occur in other formats."""
