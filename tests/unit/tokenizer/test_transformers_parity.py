"""Tokenizers equal those of transformers on the same files. Slow: importing it takes seconds."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.tokenizer.gguf_vocab import read_gguf_tokenizer
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
TEMPLATES = sorted((Path(__file__).parent / "data" / "templates").glob("*.jinja"))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter <jetzt> & "später"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [{"role": "user", "content": "  Hello é😀 \n"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
            {"role": "user", "content": "and?"},
        ]
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello", "reasoning_content": "because"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12 °C", "tool_call_id": "call_1"},
        ],
        "tools": TOOLS,
    },
    "variables": {
        "messages": [{"role": "user", "content": "Hi"}],
        "variables": {"enable_thinking": False, "date_string": "1 May"},
    },
    "roles out of order": {
        "messages": [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
    },
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        import transformers

        transformers.PreTrainedTokenizerFast  # noqa: B018  (modules load on first use)
    return transformers


def test_vocabularies_of_gemma_4_give_the_ids_of_transformers(transformers: Any) -> None:
    """Their files have merges, among them those of runs of newlines, and no pieces that begin a text."""
    data = Path(__file__).parent / "data"
    vocab = json.loads((data / "vocabs.json").read_text(encoding="utf-8"))["sentencepiece"]
    tokens = [*vocab["tokenizer.ggml.tokens"], "\n\n\n", "<turn|>"]
    known = set(tokens[3:])
    merges = [
        (token[:cut], token[cut:])
        for token in tokens[259:-1]
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= known
    ]
    ids = {token: index for index, token in enumerate(tokens)}
    theirs = transformers.GemmaTokenizer(vocab=ids, merges=merges, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    metadata = vocab | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [*vocab["tokenizer.ggml.token_type"], 1, 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    ours = Tokenizer(read_gguf_tokenizer(metadata, "tiny.gguf"))
    corpus = json.loads((data / "golden.json").read_text(encoding="utf-8"))["corpus"]
    texts = [*(text for text in corpus if "<s>" not in text), "a\n\n\n\nb  c", " 日本\n"]
    for text in texts:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == [1, *expected]
        assert ours.decode(expected) == text.replace("▁", " ")
    assert ids["<turn|>"] in ours.eos_token_ids


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_chats_render_as_in_transformers(transformers: Any, template: Path, chat: str) -> None:
    ours = load_tokenizer(FIXTURES / "byte_level", chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FIXTURES / "byte_level" / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=template.read_text(encoding="utf-8"),
    )
    messages, tools = CHATS[chat]["messages"], CHATS[chat].get("tools")
    variables = CHATS[chat].get("variables", {})
    for add_generation_prompt in (False, True):
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, **options, **variables)
            expected_ids = theirs.apply_chat_template(
                messages, tokenize=True, return_dict=False, **options, **variables
            )
        except Exception:  # whatever the template raised there, it is a refusal here
            with pytest.raises(InvalidRequestError):
                ours.chat_templates.render(messages, template_variables=variables, **options)
            continue
        assert ours.chat_templates.render(messages, template_variables=variables, **options) == expected
        assert ours.encode_chat(messages, template_variables=variables, **options) == expected_ids


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_ids_and_text_are_those_of_transformers(transformers: Any, name: str) -> None:
    ours = load_tokenizer(FIXTURES / name)
    theirs = transformers.AutoTokenizer.from_pretrained(str(FIXTURES / name))
    for text in ("", "Hello world 123", "  é€😀 \n", "x<|im_end|></s>y"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id


def test_a_directory_without_tokenizer_json_is_converted(transformers: Any, tmp_path: Path) -> None:
    """A GPT-2 style vocabulary: vocab.json and merges.txt."""
    model = json.loads((FIXTURES / "byte_level" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    text = "The quick brown fox é😀"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 2


def test_a_directory_without_any_tokenizer_is_rejected_in_one_line(transformers: Any, tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "byte_level" / "tokenizer_config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
