"""Ids of tokens by their text, as a checkpoint's tokenizer.json has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve.checkpoint.files import read_object
from jaxserve.errors import ConfigError, shown


def token_ids(directory: Path, tokens: Sequence[str]) -> tuple[int, ...]:
    """Return the id of each token, which is named as the vocabulary has it. Raises ConfigError for one that is not in it."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"--classifier-from-token: {directory} has no tokenizer.json, in which the tokens are looked up"
        )
    tokenizer = read_object(path)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    known = vocab if isinstance(vocab, dict) else {}
    pairs = [(each.get("content"), each.get("id")) for each in added or () if isinstance(each, dict)]
    ids = {**known, **dict(pairs)}
    for token in tokens:
        if type(ids.get(token)) is not int:
            raise ConfigError(f"--classifier-from-token: {shown(token)} is no token of {path}")
    return tuple(ids[token] for token in tokens)
