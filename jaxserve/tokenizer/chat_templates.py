"""The chat templates of one checkpoint, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.template import ChatTemplate, Message

_PROBE: Final = "a system message"
_PAIR: Final = ("query", "document")


class ChatTemplates:
    """A default template and perhaps one for chats with tools."""

    def __init__(self, source: TokenizerSource) -> None:
        self.named_tokens = dict(source.special_tokens)
        """Token text by role, as templates know it: `{"bos_token": "<s>", ...}`."""
        self._templates = {
            name: ChatTemplate(text, f"{source.origin} ({name})") for name, text in source.chat_templates.items()
        }

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def sources(self) -> tuple[str, ...]:
        """Text of every template."""
        return tuple(template.source for template in self._templates.values())

    @property
    def default_source(self) -> str | None:
        """Text of the template for chats without tools."""
        template = self._find(has_tools=False)
        return None if template is None else template.source

    @property
    def take_tools(self) -> bool:
        """True if a template reads tools."""
        template = self._find(has_tools=True)
        return template is not None and template.takes_tools

    @cached_property
    def take_system(self) -> bool:
        """True if the template shows a system message."""
        probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        try:
            return _PROBE in self.render(probe)
        except InvalidRequestError:
            return False

    @cached_property
    def take_pairs(self) -> bool:
        """True if the template names the roles `query` and `document` and shows their messages, as those of rerankers do."""
        if not all(role in (self.default_source or "") for role in _PAIR):  # others show messages of any role
            return False
        probe = [{"role": role, "content": f"{_PROBE} {role}"} for role in _PAIR]
        try:
            shown = self.render(probe)
        except InvalidRequestError:
            return False
        return all(f"{_PROBE} {role}" in shown for role in _PAIR)

    def read(self, variable: str, *, has_tools: bool = False) -> bool:
        """Return True if the template of such a chat reads a variable; False without a template."""
        template = self._find(has_tools=has_tools)
        return template is not None and variable in template.variables

    def read_parts(self, *, has_tools: bool = False) -> bool:
        """Return True if the template of such a chat reads parts of a message, not its text only; False without a template."""
        template = self._find(has_tools=has_tools)
        return template is not None and template.content_format == "parts"

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a chat.

        `template_variables` (a request's `chat_template_kwargs`) are variables that the template may read; names that
        it already has are rejected. Raises InvalidRequestError.
        """
        template = self._find(has_tools=bool(tools))
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        variables = dict(template_variables or {})
        for name in variables:
            if name in template.reserved_names or name in self.named_tokens or not name.isidentifier():
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name[:64]!r} is not a variable that a request may set",
                    param="chat_template_kwargs",
                )
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=self.named_tokens | variables
        )

    def _find(self, *, has_tools: bool) -> ChatTemplate | None:
        return self._templates.get("tool_use" if has_tools and "tool_use" in self._templates else "default")
