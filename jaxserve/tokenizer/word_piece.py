"""BERT's tokenizer from its `vocab.txt`: one token per line, whose number is its id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError

_CONTROL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_piece(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of a vocab.txt; config: tokenizer_config.json.

    Texts become `[CLS] text [SEP]`, pairs `[CLS] a [SEP] b [SEP]`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    vocab = {token: token_id for token_id, token in enumerate(lines)}
    missing = [token for token in _CONTROL if token not in vocab]
    if missing:
        raise CheckpointError(f"{path}: expected the tokens {', '.join(_CONTROL)}, found no {', '.join(missing)}")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=_switch(path, config, "do_lower_case", True),
        strip_accents=_switch(path, config, "strip_accents", None),
        handle_chinese_chars=_switch(path, config, "tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in _CONTROL])
    return backend


def _switch(path: Path, config: Mapping[str, Any], key: str, default: bool | None) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{path.parent / 'tokenizer_config.json'}: {key}: expected true or false, found {value!r}"
        )
    return value
