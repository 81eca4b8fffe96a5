"""Chat templates: messages to prompt text, in a sandbox.

The template comes with the checkpoint and is not trusted. Messages and variables come from a request and are data
only: they reach the template as variables, never as arguments of the render call.

Limits of a rendering:
- Access: jinja's immutable sandbox, no loader, plain JSON data only.
- Time: every loop iteration and every call (methods, macros, recursive loops) compares the clock with the
  deadline, so a render that loops ends. Between two such checks runs one filter, operator or method.
- Size: no operator (`+`, `*`, `**`, `~`), filter, call or `{% set %}` block may give a text or list over the
  output limit, nor may the output exceed it. Filters and methods are checked by their result: a single one
  (`replace`, `center`, ...) may build a large value before it is rejected, so its memory is not bounded.
Every violation, like every error inside the template, ends the request with 400, never the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import CheckpointError, InvalidRequestError

ContentFormat = Literal["string", "parts"]
Message = Mapping[str, Any]

DEFAULT_TIME_LIMIT_S = 5.0
DEFAULT_MAX_OUTPUT_CHARS = 32 * 2**20
_MAX_ERROR_CHARS = 300
_MAX_POWER_BITS = 4096

_TOOLS_VARIABLES = ("tools", "xml_tools")
"""Names of the tools in templates; SmolLM3 uses the second."""

# Not an identifier: no template can name it.
_BUDGET = "render budget"


class RenderLimitError(jinja2.TemplateRuntimeError):
    """A rendering exceeded its time or size limit."""


class _Budget:
    """Limits of one rendering."""

    def __init__(self, time_limit_s: float, max_chars: int) -> None:
        self._time_limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self._max_chars = max_chars

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise RenderLimitError(f"rendering takes longer than {self._time_limit_s:g} s")

    def check_size(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise RenderLimitError(f"a text of {num_chars} characters is over the limit of {self._max_chars}")


def _budget(context: Context) -> _Budget:
    budget = context.resolve(_BUDGET)
    assert isinstance(budget, _Budget), "every rendering carries its budget"
    return budget


@pass_context
def _bounded_loop(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for value in values:
        budget.check_time()
        yield value


@pass_context
def _bounded_size(context: Context, value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _budget(context).check_size(len(value))
    return value


class _GenerationTag(Extension):
    """Render `{% generation %}...{% endgeneration %}`, which marks assistant text for training, as its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox with the limits of `_Budget` at every call and at the operators that can grow a value."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call(self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget(__context).check_time()
        return _bounded_size(__context, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        left, right = (str(side) if isinstance(side, _JsonObject) else side for side in (left, right))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_POWER_BITS:
                raise RenderLimitError(f"a power of more than {_MAX_POWER_BITS} bits")
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _budget(context).check_size(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _budget(context).check_size(len(sequence) * count)
        return super().call_binop(context, operator, left, right)


class _JsonObject(dict[str, Any]):
    """Arguments of a call: an object for templates that encode them, its JSON for templates that print them."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@pass_context
def _bounded_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON of a value, measured first, or made part by part if what is between values may be large.

    jinja's own filter escapes <, >, & and ' for HTML; a prompt must not be escaped.
    """
    budget = _budget(context)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        _check_json(value, budget)
        return encoder.encode(value)
    budget.check_size(len(indent) if isinstance(indent, str) else indent or 0)
    parts, num_chars = list[str](), 0
    for part in encoder.iterencode(value):
        parts.append(part)
        num_chars += len(part)
        budget.check_size(num_chars)
    return "".join(parts)


def _check_json(value: Any, budget: _Budget) -> None:
    """Raise RenderLimitError for a value whose JSON would be over the limit. A small value may contain another one many times."""
    pending, num_chars = [value], 0
    while pending:
        item = pending.pop()
        num_chars += _num_json_chars(item)
        if isinstance(item, dict):
            num_chars += sum(map(_num_json_chars, item))
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        budget.check_size(num_chars + len(pending))


def _num_json_chars(item: Any) -> int:
    """Return about how many characters of JSON an item has, without those of the items in it."""
    if isinstance(item, str):
        return len(item)
    return 1 + item.bit_length() // 4 if isinstance(item, int) else 1


def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], cache_size=0
    )
    environment.filters["tojson"] = _bounded_json
    environment.filters["bounded_loop"] = _bounded_loop
    environment.filters["bounded_size"] = _bounded_size
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    del environment.globals["lipsum"]  # makes text of any length in one call
    return environment


def _filtered(node: nodes.Node | None, filter_name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, filter_name, [], [], None, None, lineno=line)


def _put_bounds(node: nodes.Node) -> None:
    """Insert the limits into every loop, filter, `~` and `{% set %}` block of a parsed template."""

    def bounded(value: Any) -> Any:
        if not isinstance(value, nodes.Node):
            return value
        _put_bounds(value)
        return (
            _filtered(value, "bounded_size", value.lineno) if isinstance(value, nodes.Concat | nodes.Filter) else value
        )

    for name, value in list(node.iter_fields()):
        setattr(node, name, [bounded(item) for item in value] if isinstance(value, list) else bounded(value))
    if isinstance(node, nodes.For):
        node.iter = _filtered(node.iter, "bounded_loop", node.lineno)
    elif isinstance(node, nodes.AssignBlock) and node.filter is None:
        node.filter = _filtered(None, "bounded_size", node.lineno)


def _content_format(tree: nodes.Template) -> tuple[ContentFormat, bool]:
    """Return "parts" if the template iterates over a message's content, and True if it also accepts strings."""
    names = {"content"}

    def is_content(node: nodes.Node | None) -> bool:
        match node:
            case nodes.Filter(node=inner) | nodes.Or(left=inner):
                return is_content(inner)
            case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
                return bool(name == "content")
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
                return True
            case nodes.Name(name=name):
                return name in names
        return False

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    has_parts = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests_string = any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test))
    return ("parts" if has_parts else "string"), tests_string


class ChatTemplate:
    """One compiled template. Rendering is thread-safe."""

    def __init__(
        self,
        source: str,
        origin: str,
        *,
        time_limit_s: float = DEFAULT_TIME_LIMIT_S,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
    ) -> None:
        """Compile `source`; raise CheckpointError naming `origin` and the line."""
        self.source = source
        self._time_limit_s = time_limit_s
        self._max_output_chars = max_output_chars
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.content_format, self._accepts_string = _content_format(tree)
            self.variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
            """Names that the template reads."""
            self._tools_variable = next((name for name in _TOOLS_VARIABLES if name in self.variables), None)
            self._knows_developer = any(const.value == "developer" for const in tree.find_all(nodes.Const))
            _put_bounds(tree)
            tree.set_environment(environment)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}: chat template, line {error.lineno}: {error.message}") from error
        except (SyntaxError, RecursionError) as error:  # of the Python code that jinja makes
            raise CheckpointError(f"{origin}: chat template: {error}") from error
        self.reserved_names = frozenset(environment.globals) | {"messages", "tools", "add_generation_prompt"}
        """Variables that a request may not set."""

    @property
    def takes_tools(self) -> bool:
        """True if the template reads tools."""
        return self._tools_variable is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt text. Raises InvalidRequestError (param "messages") for any error in the template."""
        budget = _Budget(self._time_limit_s, self._max_output_chars)
        names = {
            "documents": None,
            **variables,
            "messages": [self._message(message) for message in messages],
            "tools": None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: budget,
        }
        if tools:
            names[self._tools_variable or "tools"] = list(tools)
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(names):
                num_chars += len(piece)
                budget.check_size(num_chars)
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except Exception as error:  # the template's code may raise anything
            reason = str(error)[:_MAX_ERROR_CHARS] or type(error).__name__
            raise InvalidRequestError(
                f"The chat template does not accept these messages: {reason}", param="messages"
            ) from error
        return "".join(pieces)

    def _message(self, message: Message) -> dict[str, Any]:
        """Return the message in the template's format: no null fields, reasoning under all its names.

        The role developer becomes system if the template does not know it.
        """
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if "tool_calls" in plain:
            plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
        reasoning = plain.get("reasoning", plain.get("reasoning_content"))
        if reasoning is not None:
            plain |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), reasoning)
        content = plain.get("content")
        if content is not None and not isinstance(content, str):
            parts = _parts(content)
            # Of several texts, many templates show the first one of a system or an assistant only (Gemma 3, LLaVA-NeXT, Mistral 3), and
            # those of GLM-4.5 and Gemma 4 print the parts of a tool's or a system's message as objects.
            is_fused = plain.get("role") != "user" and not any(map(_is_shown, parts))
            if self.content_format == "string" or is_fused:
                content = "\n".join(map(_part_text, parts))
            else:
                plain["content"] = [part if _is_shown(part) else _text_part(part) for part in parts]
        if isinstance(content, str):
            is_wrapped = self.content_format == "parts" and not self._accepts_string
            plain["content"] = [{"type": "text", "text": content}] if is_wrapped else content
        return plain


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": _JsonObject(function["arguments"])}}


def _parts(content: Any) -> Sequence[Any]:
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages: content must be a string or a list of parts, found {type(content).__name__}", param="messages"
        )
    return content


def _is_shown(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "video")


def _text_part(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": _part_text(part)}


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequestError(
            f"messages: this model's chat template takes text only, found a content part of type {str(kind)[:64]!r}",
            param="messages",
        )
    return text
