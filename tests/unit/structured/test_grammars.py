"""A request's grammar as masks: the allowed tokens, and grammars that are rejected."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.ipc.call_grammar import CallGrammar, Json, Member, Members, Terminals
from jaxserve.ipc.messages import Grammar, Thinking, ThinkingBudget
from jaxserve.sampling.bits import pack_bits
from jaxserve.structured import masks as masks_module
from jaxserve.structured.check_process import checked, converted
from jaxserve.structured.compiling import Vocabulary, ll_tokenizer, matcher_error, new_matcher
from jaxserve.structured.masks import GrammarMasks, GrammarState
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

TOKENIZERS = Path(__file__).parents[2] / "fixtures" / "tokenizers"
CONFIG = StructuredConfig()
YES = Grammar("regex", "yes|no")


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(TOKENIZERS / request.param)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer)


def accepts(vocabulary: LLTokenizer, tokenizer: Tokenizer, grammar: Grammar, *reply: str | int) -> bool:
    """Return True if texts and control tokens are a whole reply."""
    matcher = new_matcher(grammar, vocabulary, CONFIG)
    parts = [[part] if isinstance(part, int) else Vocabulary(tokenizer)(part.encode()) for part in reply]
    ids = [token for part in parts for token in part]
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.mark.parametrize("text", ["a b", " a", "été <0x41>", '{"a":1}', "<|im_end|>x", "𝄞\n"])
def test_jump_forward_text_becomes_tokens_of_exactly_these_bytes(tokenizer: Tokenizer, text: str) -> None:
    vocabulary = Vocabulary(tokenizer)
    ids = vocabulary(text.encode())
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert not set(ids) & tokenizer.control_tokens.ids


def test_an_end_token_that_is_no_control_token_is_in_no_text(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TOKENIZERS / "byte_level", tmp_path / "model"))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"special":true', '"special":false'), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert (loaded.eos_token_ids, loaded.control_tokens.ids) == ((2,), frozenset())
    assert 2 not in Vocabulary(loaded)(b"<|im_end|>x")
    matcher = new_matcher(Grammar("regex", "[^x]+x"), ll_tokenizer(loaded), CONFIG)
    assert not matcher.consume_token(2)


@pytest.mark.parametrize(
    ("text", "is_open", "fits"),
    [
        ("hm, {yes} no</think>yes", True, True),
        ("</think>\n\nno", True, True),
        ("hm</think>perhaps", True, False),
        ("yes", True, False),
        ("<think>hm</think>\nyes", False, True),
        ("yes", False, True),
        ("hm</think>yes", False, False),
    ],
)
def test_grammar_begins_after_the_thinking(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, text: str, is_open: bool, fits: bool
) -> None:
    grammar = Grammar("regex", "yes|no", Thinking(("<think>",), ("</think>",), is_open))
    assert accepts(vocabulary, tokenizer, grammar, text) == fits


MARK = 1
"""A control token."""


def test_thinking_may_end_with_a_control_token(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "yes|no", Thinking(("<think>",), (MARK,), is_open=True))
    assert accepts(vocabulary, tokenizer, grammar, "hm, no", MARK, "\n\nyes")
    assert not accepts(vocabulary, tokenizer, grammar, "hm, no", MARK, "hm")
    assert not accepts(vocabulary, tokenizer, grammar, "yes")


def test_thinking_ends_when_its_budget_is_spent(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("%", add_special_tokens=False)[-1]
    for closer, token in (("%", end), (MARK, MARK)):
        thinking = Thinking(("<",), (closer,), is_open=True, budget=ThinkingBudget(3, token))
        grammar = Grammar("regex", "[a-z]+", thinking)
        assert accepts(vocabulary, tokenizer, grammar, token, "yes")
        assert accepts(vocabulary, tokenizer, grammar, "1", "2", token, "\nyes")
        assert accepts(vocabulary, tokenizer, grammar, "1", "2", "3", token, "yes")
        assert not accepts(vocabulary, tokenizer, grammar, "1", "2", "3", "4", token, "yes")
        assert not accepts(vocabulary, tokenizer, grammar, "1", "2", "3")
        assert not accepts(vocabulary, tokenizer, grammar, "1", "2", "3", "yes")


def calls(begin: Terminals, separator: Terminals | None, end: Terminals = (), *, allows_text: bool) -> Grammar:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    written = tuple((f"{name}:", Json(schema), ";") for name in "fg")
    return Grammar(
        "calls",
        msgspec.json.encode(
            CallGrammar(
                begin,
                written,
                separator,
                end,
                allows_text,
                is_bare=not begin,
                excludes_brackets=not begin,
                reasoning="<t>" if allows_text else "",
            )
        ).decode(),
    )


F, G = 'f:{"a":1};', "g:{};"


@pytest.mark.parametrize(
    ("begin", "separator", "end", "right", "wrong"),
    [
        (("<c>",), ("<c>",), (), [["<c>" + F], ["<c>" + F + "<c>" + G]], [["<c>" + F + G], ["x<c>" + F], ["<c>"], [F]]),
        (("<c>",), None, ("!",), [["<c>" + F + "!"]], [["<c>" + F], ["<c>" + F + "<c>" + G + "!"]]),
        ((), None, (), [[F]], [[F + G], ["h:{};"], ['f:{"b":1};'], ["text"]]),
        ((MARK, "["), (",",), ("]",), [[MARK, "[" + F + "]"], [MARK, "[" + F + "," + G + "]"]], [["[" + F + "]"], [MARK, F]]),
    ],
)  # fmt: skip
def test_a_reply_of_calls_is_nothing_else(
    vocabulary: LLTokenizer,
    tokenizer: Tokenizer,
    begin: Terminals,
    separator: Terminals | None,
    end: Terminals,
    right: list[list[str | int]],
    wrong: list[list[str | int]],
) -> None:
    grammar = calls(begin, separator, end, allows_text=False)
    assert all(accepts(vocabulary, tokenizer, grammar, *reply) for reply in right)
    assert not any(accepts(vocabulary, tokenizer, grammar, *reply) for reply in wrong)


@pytest.mark.parametrize(
    ("begin", "right", "wrong"),
    [
        (
            ("<c/>",),
            [[""], ["text <c"], ["<c/>" + F], ["a <c/>" + F + " b <c/>" + G + "\nc"], [F]],
            [["a <c/>"], ["<c/> " + F], ["<c/>h:{};"], ["<c/>" + F + "<c/>h"], ['<c/>f:{"b"'], [" <t>"], ["<t> <c/>" + F]],
        ),
        ((), [[""], ["text " + F], [" text {"], [F]], [[" {"], ["["], ['{"name"'], ["<t>x"]]),
        ((MARK,), [[""], ["a"], ["a", MARK, F, "b", MARK, G], [MARK, F, MARK, G]], [[MARK], [MARK, "h:{};"], ["a", MARK, "b"], ["<t>"]]),
    ],
)  # fmt: skip
def test_free_text_has_right_calls_in_it(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, begin: Terminals, right: Any, wrong: Any
) -> None:
    grammar = calls(begin, None, allows_text=True)
    assert [accepts(vocabulary, tokenizer, grammar, *reply) for reply in right] == [True] * len(right)
    assert not any(accepts(vocabulary, tokenizer, grammar, *reply) for reply in wrong)


@pytest.mark.parametrize("begin", [("<c>",), (MARK,)])
def test_a_reply_is_calls_or_the_answer_of_a_schema(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, begin: Terminals
) -> None:
    asked = msgspec.json.decode(calls(begin, begin, allows_text=True).text, type=CallGrammar)
    asked = msgspec.structs.replace(
        asked, answer='{"type":"object","properties":{"city":{"enum":["Paris"]}},"required":["city"]}'
    )
    grammar = Grammar("calls", msgspec.json.encode(asked).decode())
    right: list[Any] = [['{"city":"Paris"}'], [*begin, F], [*begin, F, *begin, G]]
    wrong: list[Any] = [
        [],
        ["text"],
        [F],
        ['{"city":"Rome"}'],
        ['{"city":"Paris"}', *begin, F],
        [*begin, F, '{"city":"Paris"}'],
    ]
    assert [accepts(vocabulary, tokenizer, grammar, *reply) for reply in right] == [True] * len(right)
    assert not any(accepts(vocabulary, tokenizer, grammar, *reply) for reply in wrong)


COUNTS: tuple[Literal["one", "optional", "any"], ...] = ("one", "optional", "any")
TIMES = {"one": "{1}", "optional": "?", "any": "*"}


@pytest.mark.parametrize("separator", ["", ","])
@pytest.mark.parametrize("counts", list(itertools.product(COUNTS, repeat=2)))
def test_members_are_in_their_order_with_separators_between_them(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, counts: tuple[Any, Any], separator: str
) -> None:
    encode = Vocabulary(tokenizer)
    tokens = {letter: encode(letter.encode())[0] for letter in "abc(),"}
    members = tuple(Member((name,), count) for name, count in zip("abc", (*counts, "optional"), strict=True))
    call = CallGrammar((), (("(", Members(members, (separator,) if separator else ()), ")"),), None, ())
    matcher = new_matcher(Grammar("calls", msgspec.json.encode(call).decode()), vocabulary, CONFIG)
    right = re.compile("".join(name + TIMES[count] for name, count in zip("abc", (*counts, "optional"), strict=True)))
    sequences = (names for size in range(5) for names in itertools.product("abc", repeat=size))
    texts = {f"({separator.join(names)})": bool(right.fullmatch("".join(names))) for names in sequences}
    for text, fits in (texts | {"(,c)": False, "(a,)": False, "(a,,c)": False}).items():
        assert (matcher.validate_tokens([tokens[letter] for letter in text]) == len(text)) == fits, text


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "object"}, '{"a":[1,{}]}', True),
        ({"type": "object"}, '{ "a":1}', False),
        ({"enum": [1, "<|im_end|>"]}, '"<|im_end|>"', True),
        ({"enum": [1, 2]}, "3", False),
    ],
)
def test_json_is_compact(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, schema: dict[str, Any], text: str, fits: bool
) -> None:
    assert accepts(vocabulary, tokenizer, Grammar("json_schema", json.dumps(schema)), text) == fits


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"not":{}}'),
        Grammar("json_schema", '{"type":"object","x-guidance":{"lenient":true},"not":{}}'),
        Grammar("json_schema", '{"$ref":"#"}'),
        Grammar("json_schema", '{"type":"integer","minimum":5,"maximum":3}'),
        Grammar("json_schema", '{"oneOf":[{"type":"string"},{"minLength":2}]}'),
        Grammar("json_schema", "[]"),
        Grammar("regex", "["),
        Grammar("lark", "start: nobody"),
    ],
)
def test_grammar_that_cannot_be_enforced_is_rejected(vocabulary: LLTokenizer, grammar: Grammar) -> None:
    assert checked(grammar, vocabulary, CONFIG).error
    assert checked(YES, vocabulary, CONFIG).error is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not supported in schemas: not. Remove such keys and check the reply"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "not supported in schemas: if, then. Remove"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported if no value can match two"),
        ({"$ref": "https://example.com/a"}, "a $ref to another document, https://example.com/a, is not followed"),
        ({"$ref": "b.json#/x"}, "a $ref to another document, b.json, is not followed"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_words_of_its_own(
    vocabulary: LLTokenizer, schema: dict[str, Any], reason: str
) -> None:
    error = checked(Grammar("json_schema", json.dumps(schema)), vocabulary, CONFIG).error
    assert error is not None
    assert error.startswith(reason)


def test_a_limit_of_the_parser_has_words_of_its_own(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    ambiguous = new_matcher(Grammar("lark", 'start: a\na: "x" | a a | a a a\n'), vocabulary, CONFIG)
    (letter,) = Vocabulary(tokenizer)(b"x")
    while ambiguous.consume_token(letter):
        pass
    assert re.fullmatch(
        r"too many of its alternatives may come next \(\d+ items; max is 500\)", str(matcher_error(ambiguous))
    )


def test_oneof_of_schemas_that_exclude_each_other_is_followed(vocabulary: LLTokenizer) -> None:
    schemas = [{"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"} for kind in "ab"]
    assert checked(Grammar("json_schema", json.dumps({"oneOf": schemas})), vocabulary, CONFIG).error is None


def test_states_of_a_lexer_are_bounded(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    """The twelfth letter from the end decides: a state for each of its 4,096 pasts."""
    grammar = Grammar("regex", "(a|b)*a(a|b){12}c")
    letters = [Vocabulary(tokenizer)(letter)[0] for letter in (b"a", b"b")]
    text = [letters[place.bit_count() % 2] for place in range(1000)]
    few, enough = (
        new_matcher(grammar, vocabulary, StructuredConfig(max_grammar_states=most)) for most in (100, 50_000)
    )

    def follows(matcher: LLMatcher) -> bool:
        return all(matcher.compute_bitmask() and matcher.consume_token(token) for token in text)

    assert follows(enough) and not follows(few)
    assert "too many states" in few.get_error()


def test_states_that_other_replies_made_count_for_none(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    """Replies with one grammar share its lexer's states: 250 suffice for each of these, and not for all."""
    grammar = Grammar("regex", "(a|b)*a(a|b){12}c")
    letters = [Vocabulary(tokenizer)(letter)[0] for letter in (b"a", b"b")]
    generator = np.random.default_rng(0)

    def reply(most: int, num_replies: int) -> GrammarState:
        """Return the state after the last of some replies."""
        masks = GrammarMasks(lambda: vocabulary, tokenizer.max_token_id + 1, StructuredConfig(max_grammar_states=most))
        for _ in range(num_replies):
            text = [letters[letter] for letter in generator.integers(2, size=60)]
            alone = new_matcher(grammar, vocabulary, CONFIG)
            state = masks.follow(grammar, [])
            for token in text:
                state.wait(60)
                state.advance(token)
                assert alone.consume_token(token)
            state.wait(60)
            if state.error is None:
                np.testing.assert_array_equal(state.mask, masks.mask_of(alone))
        masks.close()
        return state

    assert reply(250, 3).error is None
    assert "too many states" in (reply(50, 1).error or "")


def follow(
    vocabulary: LLTokenizer, vocab_size: int, allowed: list[int], grammar: Grammar = YES, *, jump_forward: bool = False
) -> tuple[GrammarMasks, GrammarState]:
    masks = GrammarMasks(lambda: vocabulary, vocab_size, CONFIG)
    state = masks.follow(grammar, allowed, jump_forward=jump_forward)
    state.wait(60)
    return masks, state


@pytest.mark.parametrize("more", [0, 100])
def test_masks_have_the_width_of_the_models_vocabulary(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, more: int
) -> None:
    """The model's vocabulary may have more rows than the tokenizer has tokens."""
    vocab_size = tokenizer.max_token_id + 1 + more
    masks, state = follow(vocabulary, vocab_size, [])
    expected = [i for i in range(vocab_size) if b"yes".startswith(tokenizer.token_bytes(i) or b"?")]
    expected += [i for i in range(vocab_size) if b"no".startswith(tokenizer.token_bytes(i) or b"?")]
    np.testing.assert_array_equal(state.mask, pack_bits(expected, vocab_size))
    for token in Vocabulary(tokenizer)(b"yes"):
        state.advance(token)
        state.wait(60)
    assert state.is_terminated
    assert state.error is None
    masks.close()


class Counted:
    """A matcher that supports weak references."""

    living: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.living.add(self)

    def deep_copy(self) -> Counted:
        return Counted(self._matcher.deep_copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_requests_that_wait_hold_no_matchers(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "new_matcher", lambda *words: Counted(new_matcher(*words)))
    monkeypatch.setattr(masks_module, "_NUM_KEPT", 2)
    masks = GrammarMasks(lambda: vocabulary, tokenizer.max_token_id + 1, CONFIG)
    states = [masks.follow(Grammar("regex", f"a{i}"), []) for i in range(8)]
    for state in states:
        state.wait(60)
    assert len(Counted.living) == 2
    a, one = Vocabulary(tokenizer)(b"a")[0], Vocabulary(tokenizer)(b"1")[0]
    states[1].advance(a)  # its start had to make room
    states[1].wait(60)
    np.testing.assert_array_equal(states[1].mask, pack_bits([one], tokenizer.max_token_id + 1))
    assert len(Counted.living) == 3
    masks.close()


def test_kept_matchers_have_bounded_memory(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "new_matcher", lambda *words: Counted(new_matcher(*words)))
    masks = GrammarMasks(lambda: vocabulary, tokenizer.max_token_id + 1, CONFIG)

    def num_kept(name: str, *sizes: int) -> int:
        for i, size in enumerate(sizes):
            masks.follow(Grammar("regex", f"{name}{i}", matcher_bytes=size), []).wait(60)
        return len(Counted.living)

    most = masks_module._MAX_KEPT_BYTES
    assert num_kept("a", most // 4, most // 4, most // 4, most // 4) == 4
    assert num_kept("b", most // 2) == 3, "two had to make room"
    assert num_kept("c", 2 * most) == 1
    assert num_kept("c", 2 * most) == 1, "the same one"
    assert num_kept("d", 5) == 1, "the large one made room"
    masks.close()


def test_kept_matchers_are_dropped_once_the_process_has_grown(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests add states to the matcher that they share, and it does not tell how large they are."""
    memory = [1 << 30]
    monkeypatch.setattr(masks_module, "new_matcher", lambda *words: Counted(new_matcher(*words)))
    monkeypatch.setattr(masks_module, "resident_bytes", lambda: memory[0])
    masks = GrammarMasks(lambda: vocabulary, tokenizer.max_token_id + 1, CONFIG)
    grammars = [Grammar("regex", f"a{i}") for i in range(3)]

    def num_kept(*growths: int) -> list[int]:
        found = []
        for growth in growths:
            memory[0] += growth
            for grammar in grammars:
                masks.follow(grammar, []).wait(60)
            found.append(len(Counted.living))
        return found

    most = masks_module._MAX_GROWTH_BYTES
    start = masks.start_of(grammars[0])
    assert num_kept(0, most, -most) == [3, 3, 3]
    memory[0] += most + 1
    assert masks.start_of(grammars[0]) is start, "the request that finds the growth still has it"
    del start
    assert len(Counted.living) == 0
    assert num_kept(0) == [3]
    masks.close()


WORDS = '"word" | ' + " | ".join(f'"word{i}"' for i in range(600))


@pytest.mark.parametrize(
    ("gbnf", "fits", "fails"),
    [
        ('root ::= name " is " name\nname ::= [a-zA-Z ]+ # greedy', "Bob is nice", "Bob is"),
        ('root ::= "(" root ")" | word "ax"\nword ::= [a-z]+', "(aaxbax)", "(ax)"),
        ('root ::= a b\na ::= "x"*\nb ::= "x" "y"', "xxxy", "xxx"),
        ('root ::= "\\u00e9\\x61b" [^\\u0000-\\u001F] [\\U0001F600-\\U0001F603]', "éabé\U0001f601", "\ue9abé\U0001f601"),
        ("root ::= [a&&b~~^/-]{5} [+--] [^]", "&~b-^,\n", "&~c-^,\n"),
        ('root ::= start (Start |\n a-b)? a_b "\\"" .\nstart ::= "1"\nStart ::= "2"\na-b ::= "3"\na_b ::= "4"', '134"\n', '13"\n'),
        ('root ::= ("a"{2} ("b"*)?){1,2} | "[" root{0,} "]" |', "[[]aabaa]", "[[]aabaaaa"),
        ('root ::= item (" " root)?\nitem ::= ' + WORDS, "word599 word1 word", "word600"),
        ('root ::= "[" str ("," str){0,50} "]" # counts multiply\nstr ::= ["] ([^"]{0,300} ("" | "ab" | "a" "c"?)) ["]', '["",".a"]', '["",.a"]'),
    ],
)  # fmt: skip
def test_a_gbnf_grammar_keeps_its_language(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, gbnf: str, fits: str, fails: str
) -> None:
    reply = checked(Grammar("gbnf", gbnf), vocabulary, CONFIG)
    assert reply.error is None and reply.lark is not None
    grammar = Grammar("lark", reply.lark)
    assert accepts(vocabulary, tokenizer, grammar, fits)
    assert not accepts(vocabulary, tokenizer, grammar, fails)


def test_a_gbnf_grammar_with_nested_counts_has_few_lexer_states(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    gbnf = 'root ::= "[" text ("," text){0,200} "]"\ntext ::= "\\"" [^"]{0,300} "\\""'
    grammar, error = converted(Grammar("gbnf", gbnf))
    assert error is None
    matcher = new_matcher(grammar, vocabulary, StructuredConfig(max_grammar_states=2000))
    reply = "[" + ",".join('"' + f"{i} bottles " * 8 + '"' for i in range(10)) + "]"
    for token in Vocabulary(tokenizer)(reply.encode()):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


def test_a_gbnf_grammar_may_count_words_that_can_be_divided(vocabulary: LLTokenizer, tokenizer: Tokenizer) -> None:
    grammar, error = converted(Grammar("gbnf", 'root ::= (word | " " | [.,]){1,1000}\nword ::= [a-zA-Z]+'))
    assert error is None
    assert accepts(vocabulary, tokenizer, grammar, "This is an answer, and it goes on. " * 20)


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("root ::= other", "rule 'other' not found"),
        ('other ::= "a"', "rule 'root' not found"),
        ('root ::= "a"\nother "b"', "line 2: expected ::=, found"),
        ('root ::= ("a"', "line 1: expected ), found the end"),
        ("root ::= [a", "line 1: expected a character, found the end"),
        ("root ::= []", "line 1: expected a character in the class before, found the end"),
        ('root ::= "\\d"', "line 1: expected an escape of GBNF after \\, found"),
        ('root ::= "\\ud83d"', "U+D83D is no character"),
        ('root ::= "a"{x}', "line 1: expected a number of repetitions, found"),
        ("root ::= <[5]>", "line 1: expected the end of the rule, found"),
        ("root ::= " + "(" * 5000, "the GBNF grammar is nested too deeply"),
    ],
)
def test_a_gbnf_grammar_that_cannot_be_read_is_refused(gbnf: str, reason: str) -> None:
    _, error = converted(Grammar("gbnf", gbnf))
    assert error is not None and reason in error


MEASURE = """
import sys
from jaxserve.config import StructuredConfig
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.check_process import checked
from jaxserve.structured.compiling import ll_tokenizer
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.unit.structured.test_grammars import TOKENIZERS

tokenizer = ll_tokenizer(load_tokenizer(TOKENIZERS / "byte_level"))
for text in sys.argv[1:]:
    print(checked(Grammar("lark", text), tokenizer, StructuredConfig()).matcher_bytes)
"""


def test_a_check_measures_the_memory_of_a_matcher() -> None:
    """It does so in a process whose allocator holds nothing that is free."""
    large = "start: " + " | ".join(json.dumps(f"word {i}") for i in range(4000))
    command = [sys.executable, "-c", MEASURE, large, large[:60] + '"']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes, few = map(int, done.stdout.split())
    assert 2 << 20 <= num_bytes < 256 << 20 and num_bytes % (1 << 20) == 0
    assert few <= 1 << 20


def test_a_token_that_does_not_fit_ends_the_request_and_not_the_engine(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    masks, state = follow(vocabulary, tokenizer.max_token_id + 1, [])
    state.advance(Vocabulary(tokenizer)(b"x")[0])
    state.wait(60)
    assert state.error
    masks.close()


def test_a_vocabulary_that_cannot_be_read_ends_the_request(tokenizer: Tokenizer) -> None:
    """The request must not continue without its grammar."""

    def broken() -> LLTokenizer:
        raise OSError("the file is gone")

    masks = GrammarMasks(broken, tokenizer.max_token_id + 1, CONFIG)
    state = masks.follow(YES, [])
    state.wait(60)
    assert state.error == "the file is gone"
    masks.close()


@pytest.mark.parametrize("jump_forward", [True, False])
def test_text_without_choice_is_jumped_over(vocabulary: LLTokenizer, tokenizer: Tokenizer, jump_forward: bool) -> None:
    grammar = Grammar("regex", "(a|b) very long word [0-9]")
    masks, state = follow(vocabulary, tokenizer.max_token_id + 1, [], grammar, jump_forward=jump_forward)
    state.advance(Vocabulary(tokenizer)(b"a")[0])
    state.wait(60)
    forced = b"".join(tokenizer.token_bytes(token) for token in state.take_jump_forward())
    assert state.take_jump_forward() == []
    if jump_forward:
        assert b" very long word ".startswith(forced)
        assert len(forced) >= len(b" very long word")
    else:
        assert forced == b""
    for token in Vocabulary(tokenizer)(b" very long word 7"[len(forced) :]):  # the mask is for the next token
        state.advance(token)
        state.wait(60)
        state.take_jump_forward()
        if state.is_terminated:
            break
    assert state.error is None
    masks.close()


def test_grammars_that_are_known_advance_while_a_new_one_is_compiled_once_for_all_choices(
    vocabulary: LLTokenizer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, compiled = Event(), []

    def slow(grammar: Grammar, *others: Any) -> LLMatcher:
        compiled.append(grammar)
        assert grammar == YES or may_end.wait(60)
        return new_matcher(grammar, *others)

    monkeypatch.setattr(masks_module, "new_matcher", slow)
    masks, state = follow(vocabulary, tokenizer.max_token_id + 1, [])
    new = Grammar("regex", "a|b")
    choices = [masks.follow(new, []) for _ in range(5)]
    try:
        state.advance(Vocabulary(tokenizer)(b"y")[0])
        state.wait(20)
        assert state.is_ready, "one that runs"
        known = masks.follow(YES, [])
        known.wait(20)
        assert known.is_ready, "one that starts"
        assert not any(choice.is_ready for choice in choices)
    finally:
        may_end.set()
    for choice in choices:
        choice.wait(60)
        assert choice.is_ready and choice.error is None
        np.testing.assert_array_equal(choice.mask, choices[0].mask)
    assert compiled == [YES, new]
    choices[0].advance(Vocabulary(tokenizer)(b"a")[0])
    choices[0].wait(60)
    assert choices[0].is_terminated
    masks.close()


def test_all_choices_get_the_error_of_a_grammar_that_cannot_be_compiled(
    vocabulary: LLTokenizer, tokenizer: Tokenizer
) -> None:
    masks = GrammarMasks(lambda: vocabulary, tokenizer.max_token_id + 1, CONFIG)
    choices = [masks.follow(Grammar("regex", "["), []) for _ in range(4)]
    for choice in choices:
        choice.wait(60)
        assert choice.is_ready and choice.error
    masks.close()
