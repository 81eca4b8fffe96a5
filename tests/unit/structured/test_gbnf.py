"""Terminals of grammars in llama.cpp's format: they keep the language, and make masks quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.config import StructuredConfig
from jaxserve.ipc.messages import Grammar
from jaxserve.structured import compiling, gbnf_automaton
from jaxserve.structured.check_process import checked, converted
from jaxserve.structured.compiling import Vocabulary, ll_tokenizer, new_matcher
from jaxserve.structured.gbnf import gbnf_to_lark
from jaxserve.tokenizer.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "fixtures" / "tokenizers" / "byte_level"
CONFIG = StructuredConfig()


@pytest.fixture(scope="module")
def encode() -> Vocabulary:
    return Vocabulary(load_tokenizer(TOKENIZER))


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return ll_tokenizer(load_tokenizer(TOKENIZER))


def follows(matcher: LLMatcher, encode: Callable[[bytes], list[int]], text: str) -> bool:
    """Return True if the text is a whole reply; every mask is computed."""
    tokens = encode(text.encode())
    return (
        all(matcher.compute_bitmask() and matcher.consume_token(token) for token in tokens) and matcher.is_accepting()
    )


class Wide:
    """A vocabulary of each byte and each three letters."""

    def __init__(self) -> None:
        words = (f"{a}{b}{c}".encode() for a in ascii_lowercase for b in ascii_lowercase for c in ascii_lowercase)
        self.tokens = [b"", *(bytes([byte]) for byte in range(256)), *words]
        self.special_token_ids = [0]
        self.eos_token_id = 0
        self.bos_token_id = None

    def __call__(self, data: bytes) -> list[int]:
        return [byte + 1 for byte in data]


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CODE = r"""
root ::= statement+
statement ::= type name ws "=" ws sum ";" | name ws "=" ws sum ";" | "return" ws sum ";" | "{" statement* "}" | comment
type ::= "int" ws | "char" ws
name ::= [a-z_] [a-z_0-9]*
sum ::= factor (("+" | "-") factor)*
factor ::= name | number | "(" ws sum ws ")" | name "(" sum ("," ws sum)* ")"
number ::= [0-9]+
comment ::= "//" [^\n]* "\n" | "/*" ([^*] | "*" [^/])* "*/"
ws ::= [ \t\n]+
"""
CALL = r"""
root ::= "{" space a-kv ("," space b-kv)? "}" space
a-kv ::= "\"a\"" space ":" space string
b-kv ::= "\"b\"" space ":" space value
value ::= object | string
object ::= "{" space (string ":" space value ("," space string ":" space value)*)? "}" space
string ::= "\"" [^"\\]* "\"" space
space ::= | " " | "\n" [ \t]{0,20}
"""
CALL_TEXT = '{"a": "the quick brown fox" , "b":{"some key" : "value"} }'
JSON_TEXT = '{"name": "Some long title \\u00e9","list": [1, 2.5e3, true, {"a":"b c"}],\n  "z":"the quick fox"}'
CODE_TEXT = "int   sum_1 = a+12;// it\nreturns  = f(x, 1);{return\n ( 1-b );/* * */}"


@pytest.mark.parametrize(("gbnf", "text"), [(JSON, JSON_TEXT), (CODE, CODE_TEXT)])
def test_names_strings_and_space_of_recursive_grammars_are_few_items_of_the_parser(
    gbnf: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place in each token is an item if terminals are single characters: more than 10,000 for 128,000 tokens."""
    wide = Wide()
    vocabulary = LLTokenizer(TokenizerWrapper(wide), n_vocab=len(wide.tokens), eos_token=[0])
    grammar, error = converted(Grammar("gbnf", gbnf))
    characters, _ = converted(Grammar("gbnf", gbnf), has_terminals=False)
    assert error is None
    monkeypatch.setattr(compiling, "_MAX_STEP_ITEMS", 100)
    assert follows(new_matcher(grammar, vocabulary, CONFIG), wide, text)
    assert not follows(new_matcher(characters, vocabulary, CONFIG), wide, text)


def test_a_string_beside_keys_is_a_terminal_without_the_space_after_it(
    vocabulary: LLTokenizer, encode: Vocabulary
) -> None:
    """A key ends where a string ends, and only the string of this grammar has the space after it."""
    lark = gbnf_to_lark(CALL)
    (string,) = [line for line in lark.splitlines() if "[^" in line]
    assert string.startswith("R") and "x{20}" not in string
    assert follows(new_matcher(Grammar("lark", lark), vocabulary, CONFIG), encode, CALL_TEXT)


DIVISIONS = {
    'root ::= "(" root ")" | [ab]* "ab" ","': ["aabab,", "(ab,)", "aba,"],
    'root ::= "(" root ")" | word word\nword ::= [a-z]+ [0-9]?': ["ab", "a1b2", "(a1b)", "a"],
    'root ::= "in" name | "(" root ")"\nname ::= [a-z]+ | "é"': ["inx", "in", "iné", "(ini)"],
    'root ::= "if" "(" root ")" | name ("." root)?\nname ::= [a-z]+': ["if(x)", "ifx.y", "if.if(if)", "if("],
    'root ::= [a-cé]+ "è" root? | "."': ["abéè", "è", "aèé.", "aè."],
    'root ::= item+ | "(" root ")"\nitem ::= "ab" | "abc" | "cd"': ["abcd", "abcdc", "abccd", "(ab)"],
    'root ::= ("a" | "b" root "b"){2,3} ("" | "ab")': ["aa", "baabaab", "aaab", "aaaa"],
    'root ::= ("" | "a" ""{3}){0} (("" | "x" y){2,5} ""){1,2} z\ny ::= ""\nz ::= root? | "-"': ["", "xxx", "x-", "--"],
    'root ::= "[" (text | root) ("," (text | root)){0,3} "]"\ntext ::= "\'" [^\']{0,3} "\'"': ["['a,b',[''],'']", "['abcd']", "[',']"],
    'root ::= "<" tag ">" (text | root)* "</" tag ">"\ntag ::= [a-z]+\ntext ::= [^<]+': ["<a>b c<b></b>d</a>", "<a><</a>", "<a></a"],
}  # fmt: skip


@pytest.mark.parametrize("gbnf", DIVISIONS)
def test_terminals_keep_the_language(vocabulary: LLTokenizer, encode: Vocabulary, gbnf: str) -> None:
    """Grammars of single characters allow each division of a text."""
    with_terminals, characters = (
        new_matcher(Grammar("lark", gbnf_to_lark(gbnf, has_terminals=which)), vocabulary, CONFIG)
        for which in (True, False)
    )
    found = []
    for text in DIVISIONS[gbnf]:
        found.append(follows(with_terminals.deep_copy(), encode, text))
        assert found[-1] == follows(characters.deep_copy(), encode, text), text
    assert True in found and False in found


def test_a_word_list_of_a_recursive_grammar_may_have_hundreds_of_first_characters(
    vocabulary: LLTokenizer, encode: Vocabulary
) -> None:
    words = " | ".join(f'"{chr(0x4E00 + number)}" "x"{{0,2}}' for number in range(600))
    reply = checked(Grammar("gbnf", f'root ::= "(" root ")" | word root?\nword ::= {words}'), vocabulary, CONFIG)
    assert reply.error is None and reply.lark is not None
    assert follows(new_matcher(Grammar("lark", reply.lark), vocabulary, CONFIG), encode, "(一xx丁七)")


def test_a_count_may_divide_a_long_text_in_many_ways(vocabulary: LLTokenizer, encode: Vocabulary) -> None:
    grammar, _ = converted(Grammar("gbnf", 'root ::= (word | " " | [.,!?]){1,3200}\nword ::= [a-zA-Z]+'))
    matcher = new_matcher(grammar, vocabulary, CONFIG)
    assert follows(matcher, encode, "This is an answer, and it goes on, until the end. " * 25), matcher.get_error()


def test_a_terminal_on_which_the_lexer_fails_is_followed_by_characters(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_STEP_FUEL", 10)
    gbnf = 'root ::= (("a" | "b"){1,40} "c"?){1,40}'
    assert checked(Grammar("lark", gbnf_to_lark(gbnf)), vocabulary, CONFIG).error
    reply = checked(Grammar("gbnf", gbnf), vocabulary, CONFIG)
    assert reply.lark == gbnf_to_lark(gbnf, has_terminals=False)


def test_empty_parts_in_counts_are_no_terminals(vocabulary: LLTokenizer) -> None:
    """llguidance's compiler panics at some of them, and refuses a count of 0."""
    gbnf = """root ::= ("" ((x | "" "ab" | ){1,40} | ("a" ("a" y "c" | "" "abc" x | y "c"){2} | ){3,} [a-c] "" | ( | ("")* ("c")?
      "b")+){1,40} "" | ( | (("" | "c" "ab" "" | "c" "" "ab"){2,5} x "abc" | x){2,5} [ab])? ("c" y){0})
x ::= ("")
y ::= ()"""
    assert checked(Grammar("gbnf", gbnf), vocabulary, CONFIG).error is None


def test_literals_that_begin_with_the_same_characters_are_one_terminal(vocabulary: LLTokenizer) -> None:
    """llguidance's compiler panics at `"aé" | "a" "é"`."""
    grammar, _ = converted(Grammar("gbnf", 'root ::= ("aé" | "c" | "a" "é")? "ab"'))
    assert checked(grammar, vocabulary, CONFIG).error is None


def test_a_grammar_whose_terminals_are_too_costly_to_choose_has_single_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gbnf_to_lark(JSON) != gbnf_to_lark(JSON, has_terminals=False)
    monkeypatch.setattr(gbnf_automaton, "_MAX_VISITS", 1000)
    assert gbnf_to_lark(JSON) == gbnf_to_lark(JSON, has_terminals=False)
