"""The model's tokens as llguidance knows them: their bytes, made from any kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer


class Vocabulary:
    """A tokenizer as `LLTokenizer` needs it. Control tokens have no text, so no grammar allows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.max_token_id + 1)]
        self.special_token_ids = sorted(tokenizer.control_tokens.ids)
        self.eos_token_id = tokenizer.eos_token_id or 0
        self.bos_token_id = tokenizer.bos_token_id
        special = set(self.special_token_ids)
        self._ids = {data: i for i, data in reversed(list(enumerate(self.tokens))) if data and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """Return tokens whose bytes are `data`: the tokenizer's if they are exact, otherwise the longest that fit.

        Called for jump-forward text. The tokenizer may add a leading space, or encode a control token.
        """
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return self._longest_tokens(data)
        is_exact = (
            all(self._ids.get(self.tokens[i]) == i for i in ids) and b"".join(self.tokens[i] for i in ids) == data
        )
        return ids if is_exact else self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the vocabulary for llguidance; takes about a fifth of a second for 50,000 tokens."""
    vocabulary = Vocabulary(tokenizer)
    eos = list(tokenizer.eos_token_ids) or [vocabulary.eos_token_id]
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=eos)


def load_ll_tokenizer(model_path: Path) -> LLTokenizer:
    """Return the vocabulary of a checkpoint. Raises CheckpointError in one line."""
    return ll_tokenizer(load_tokenizer(model_path))
