"""Token ids of pairs of texts for models that score them: side by side, or in a chat template with the roles `query` and `document`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxserve.errors import invalid
from jaxserve.tokenizer.template import Message
from jaxserve.tokenizer.tokenizer import Tokenizer


def encode_score_pairs(
    tokenizer: Tokenizer,
    pairs: Iterable[tuple[str, str]],
    max_tokens: int | None,
    instruction: str | None = None,
    prompt: str = "",
) -> Iterator[tuple[list[int], int | None]]:
    """Yield the ids of pairs of a query and a document, and the start of the document if the model has token types.

    A chat template that shows both roles writes the text around them; `instruction` is its system message. Otherwise the texts
    follow each other. max_tokens: the document, or without a template the longer text, is truncated at its end. prompt: the checkpoint's
    default prompt, which stands for `instruction`, or without a template before each query. Raises InvalidRequestError.
    """
    templates = tokenizer.chat_templates
    if instruction is not None and not (templates.take_pairs and templates.take_system):
        raise invalid(
            "instruction", "this model has no chat template that shows a system message, a query and a document"
        )
    if templates.take_pairs:
        if prompt and templates.take_system and instruction is None:
            instruction = prompt
        for query, document in pairs:
            yield _in_template(tokenizer, query, document, max_tokens, instruction), None
        return
    yield from tokenizer.encode_pairs(((prompt + query, document) for query, document in pairs), max_tokens)


def _in_template(
    tokenizer: Tokenizer, query: str, document: str, max_tokens: int | None, instruction: str | None
) -> list[int]:
    def ids_with(document: str) -> list[int]:
        messages: list[Message] = [] if instruction is None else [{"role": "system", "content": instruction}]
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return tokenizer.encode_chat(messages)

    if max_tokens is None:
        return ids_with(document)
    tokens = tokenizer.encode_cut(document, max_tokens, add_special_tokens=False)
    is_whole, keep = len(tokens) < max_tokens, len(tokens)
    while True:
        text = document if is_whole else tokenizer.decode(tokens[:keep], skip_special_tokens=False)
        ids = ids_with(text)
        if len(ids) <= max_tokens:
            return ids
        is_whole, keep = False, keep - (len(ids) - max_tokens)
        if keep < 1:
            raise invalid(
                "truncate_prompt_tokens", f"{max_tokens} leaves no room beside the query and the chat template"
            )
