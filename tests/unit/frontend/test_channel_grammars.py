"""Grammars of replies in channels: reasoning, then calls, an answer or text, each in its channel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxserve.config import StructuredConfig
from jaxserve.errors import UnsupportedParameterError
from jaxserve.frontend.constraints import Constraint
from jaxserve.frontend.grammar import after_thinking, constraint_grammar
from jaxserve.frontend.grammars.calls import call_grammar
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice
from jaxserve.frontend.parsers.formats import CHANNEL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat, ParserSpec
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.compiling import Vocabulary, ll_tokenizer, new_matcher
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.frontend.parsers.reading import output_format, read
from tests.unit.running_api import TOKENIZERS

HARMONY = CHANNEL_FORMATS["harmony"]
MUSE = output_format("muse_glimmer")
FORMAT = OutputFormat(channels=HARMONY)
PROMPT = "<|start|>assistant"
NOTE = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
FINAL = "<|channel|>final<|message|>"
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def channeled(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that has the markers of harmony as control tokens."""
    folder = tmp_path_factory.mktemp("channeled")
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "byte_level" / "tokenizer.json"))
    backend.add_special_tokens(sorted({*HARMONY.markers, *CHANNEL_FORMATS["muse_glimmer"].markers}))
    backend.save(str(folder / "tokenizer.json"))
    config = (TOKENIZERS / "byte_level" / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return load_tokenizer(Path(folder))


def grammar(
    tokenizer: Tokenizer,
    *,
    choice: Any = "auto",
    answer: bool = False,
    prompt_end: str = PROMPT,
    form: OutputFormat = FORMAT,
) -> Grammar:
    """Return the grammar of a request with a strict function, that may ask for JSON too; choice None: without functions."""
    functions = [] if choice is None else [FunctionDefinition(name="f", parameters=A, strict=True)]
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Hi")],
        functions=functions,
        tool_choice=ToolChoice.read(choice or "none"),
    )
    asked = constraint_grammar(Constraint("json", {"enum": [{"b": 2}]}, "response_format"), 9) if answer else None
    named = call_grammar(conversation, tokenizer, form, 9, asked) or asked
    found = after_thinking(conversation, tokenizer, ParserSpec(output_format=form, prompt_end=prompt_end), named)
    assert found is not None
    return found.grammar


def admits(tokenizer: Tokenizer, wanted: Grammar, reply: str) -> bool:
    matcher = new_matcher(wanted, ll_tokenizer(tokenizer), StructuredConfig())
    parts = tokenizer.control_tokens.split(reply)
    encode = Vocabulary(tokenizer)
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else encode(part.encode()))]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({"choice": "required"}, [CALL, NOTE + CALL, NOTE + NOTE + CALL], [FINAL + "Hi", NOTE, CALL.replace("1", '"x"'), ""]),
        ({"choice": "auto"}, [CALL, NOTE + CALL, FINAL + "Hi {", NOTE + FINAL], ["Hi", CALL.replace("f ", "g ")]),
        ({"choice": "auto", "answer": True}, [CALL, NOTE + FINAL + '{"b":2}'], [FINAL + "Hi", FINAL + '{"b":3}']),
        ({"choice": None, "answer": True}, [FINAL + '{"b":2}', NOTE + FINAL + '{"b":2}'], [CALL, '{"b":2}']),
    ],
)  # fmt: skip
def test_each_part_of_a_reply_is_in_its_channel(
    channeled: Tokenizer, options: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    wanted = grammar(channeled, **options)
    assert [admits(channeled, wanted, reply) for reply in right] == [True] * len(right)
    assert [admits(channeled, wanted, reply) for reply in wrong] == [False] * len(wrong)


def test_a_reply_of_the_grammar_is_read_as_a_call() -> None:
    reply = read(FORMAT, NOTE + CALL, PROMPT, tools={"f": A})
    assert (reply.reasoning, [(name, json.loads(text)) for name, text in reply.calls]) == ("Hm {", [("f", {"a": 1})])


def test_a_prompt_without_the_begin_of_a_reply_is_refused(channeled: Tokenizer) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"does not end with <\|start\|>assistant"):
        grammar(channeled, choice="required", prompt_end="assistant")


def test_calls_of_muse_glimmer_are_in_messages_to_their_function(channeled: Tokenizer) -> None:
    call = (
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    note = " to=self<|message|>Hm<|eom|><|start|>assistant"
    wanted = grammar(channeled, choice="required", form=MUSE)
    assert admits(channeled, wanted, call) and admits(channeled, wanted, note + call)
    assert not admits(channeled, wanted, " to=user<|message|>Hi")
    assert not admits(channeled, wanted, call.replace(">1<", ">x<"))
    reply = read(MUSE, note + call, PROMPT, tools={"f": A})
    assert (reply.reasoning, reply.calls) == ("Hm", [("f", '{"a": 1}')])
