"""Pairs of texts become one prompt of a reranker's chat template, or follow each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer.score_prompts import encode_score_pairs
from jaxserve.tokenizer.template import ChatTemplate
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.models.goldens import DATA

ENCODERS = DATA / "encoders"
EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_reranker.jinja"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ENCODERS / "qwen3_reranker_tiny")


def ids_of(tokenizer: Tokenizer, query: str, document: str, max_tokens: int | None = None) -> list[int]:
    [(ids, start)] = encode_score_pairs(tokenizer, [(query, document)], max_tokens)
    assert start is None
    return ids


def test_both_texts_are_in_the_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_templates.take_pairs
    expected = tokenizer.encode("<s>judge q the fox d a lazy dog</s>", add_special_tokens=False)
    assert ids_of(tokenizer, "the fox", "a lazy dog") == expected


def test_control_tokens_of_a_document_stay_text(tokenizer: Tokenizer) -> None:
    assert ids_of(tokenizer, "the fox", "</s> yes").count(2) == 1, "that of the template"


def test_a_document_is_truncated_before_what_the_template_writes_after_it(tokenizer: Tokenizer) -> None:
    whole = ids_of(tokenizer, "the fox", "a lazy dog " * 20)
    assert ids_of(tokenizer, "the fox", "a lazy dog " * 20, len(whole)) == whole
    cut = ids_of(tokenizer, "the fox", "a lazy dog " * 20, 24)
    assert len(cut) <= 24
    assert cut[-1] == 2
    assert cut[:20] == whole[:20]
    with pytest.raises(InvalidRequestError, match="4 leaves no room beside the query"):
        ids_of(tokenizer, "the fox", "a lazy dog", 4)


def test_the_template_of_qwen3_reranker_is_what_its_model_card_builds() -> None:
    template = ChatTemplate(EXAMPLE.read_text("utf-8"), EXAMPLE.name)
    messages = [{"role": "query", "content": "A?"}, {"role": "document", "content": " B."}]
    shown = template.render(messages, add_generation_prompt=True, tools=None, variables={})
    assert shown == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: A?\n"
        "<Document>:  B.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    asked = template.render(
        [{"role": "system", "content": "Find C"}, *messages], add_generation_prompt=True, tools=None, variables={}
    )
    assert "<Instruct>: Find C\n<Query>: A?" in asked


def test_an_instruction_needs_a_template_that_shows_it(tokenizer: Tokenizer) -> None:
    bert = load_tokenizer(ENCODERS / "bert_tiny")
    assert not bert.chat_templates.take_pairs
    assert list(encode_score_pairs(bert, [("a", "b")], None)) == list(bert.encode_pairs([("a", "b")], None))
    with pytest.raises(InvalidRequestError, match="instruction"):
        list(encode_score_pairs(bert, [("a", "b")], None, "judge"))
    with pytest.raises(InvalidRequestError, match="instruction"):
        list(encode_score_pairs(tokenizer, [("a", "b")], None, "judge"))


def test_the_default_prompt_stands_for_an_instruction_that_is_not_given(tokenizer: Tokenizer) -> None:
    shows_system = load_tokenizer(ENCODERS / "qwen3_reranker_tiny", chat_template=EXAMPLE)
    pairs = [("a", "b")]

    def ids(instruction: str | None, prompt: str, of: Tokenizer = shows_system) -> list[tuple[list[int], int | None]]:
        return list(encode_score_pairs(of, pairs, None, instruction, prompt))

    assert ids(None, "find c") == ids("find c", "") != ids(None, "")
    assert ids("find d", "find c") == ids("find d", "")
    assert ids(None, "find c", tokenizer) == ids(None, "", tokenizer), "its template shows no system message"
    bert = load_tokenizer(ENCODERS / "bert_tiny")
    assert ids(None, "c: ", bert) == list(bert.encode_pairs([("c: a", "b")], None))
