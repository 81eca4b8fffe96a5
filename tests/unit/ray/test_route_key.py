"""Pages that the ingress computes are those that an engine caches."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.ray.route_key import RouteKeys
from jaxserve.ray.settings import read_arguments
from jaxserve.routing.request import page_hashes
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER


async def test_pages_of_texts_tokens_and_conversations() -> None:
    config = read_arguments({"model": str(TOKENIZER)}).config
    tokenizer = load_tokenizer(TOKENIZER)
    text, messages = "A text of several pages. " * 4, [{"role": "user", "content": "Hello! " * 9}]
    chat = tokenizer.encode_chat(messages, add_generation_prompt=True, tools=[], template_variables={})
    expected = {
        "/v1/completions": ({"prompt": text, "max_tokens": 5, "cache_salt": "s"}, tokenizer.encode(text, True), "s"),
        "/v1/chat/completions": ({"messages": messages, "model": "m"}, chat, None),
    }
    with ThreadPoolExecutor(1) as threads:
        keys = RouteKeys.load(config, TOKENIZER, Tokenization(threads))
        for path, (body, token_ids, salt) in expected.items():
            key = await keys.of(path, json.dumps(body).encode(), 16)
            pages = page_hashes(np.array(token_ids, np.int32), 16, salt)
            assert key.pages == tuple(page[:PAGE_KEY_BYTES] for page in pages) != ()
            assert key.num_prompt_tokens == len(token_ids)
        for path, body in (
            ("/v1/models", {}),
            ("/v1/completions", {"prompt": 7}),
            ("/v1/completions", {"prompt": [-1]}),
        ):
            key = await keys.of(path, json.dumps(body).encode(), 16)
            assert key.pages == ()
