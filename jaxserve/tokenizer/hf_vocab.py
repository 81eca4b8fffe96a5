"""A tokenizer from a Hugging Face directory. Only JSON and templates are read; no code of the checkpoint runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.checkpoint.files import (
    TIKTOKEN,
    code_error,
    expect_model_folder,
    expect_tokenizer_files,
    has_known_ranks,
    is_tokenizer_code,
)
from jaxserve.errors import CheckpointError
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.tiktoken_vocab import read_tiktoken

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BERT_CLASSES: Final = (
    "BertTokenizer",
    "ConvBertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "MobileBertTokenizer",
    "PreTrainedTokenizer",
    "TokenizersBackend",
)
"""Tokenizers of transformers whose vocab.txt is BERT's, without "Fast", and those that any checkpoint may name."""
_BERT_SETTINGS: Final = {
    "word_tokenizer_type": "basic",
    "subword_tokenizer_type": "wordpiece",
    "do_basic_tokenize": True,
}
_WITH_FLAGS: Final = ("CodeLlamaTokenizer", "CohereTokenizer", "GemmaTokenizer", "LlamaTokenizer")
"""Tokenizers of transformers, without "Fast", whose `add_bos_token` and `add_eos_token` counted before version 5, whatever
tokenizer.json adds: that of e5-mistral has no EOS, that of DeepSeek-R1 no BOS."""
_CONTROL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_hf_tokenizer(directory: Path) -> TokenizerSource:
    """Read the tokenizer of `directory`; raise CheckpointError naming the file.

    Without `tokenizer.json`, `vocab.txt` or Kimi's `tiktoken.model`, transformers converts the files that are there, which takes seconds.
    """
    config = _read_json(directory / "tokenizer_config.json")
    backend = _backend(directory, config)
    special_tokens = _special_tokens(directory, config)
    ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
    _set_ends(directory, config, backend, ids)
    return TokenizerSource(
        origin=str(directory),
        backend=backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=_eos_token_ids(directory, ids.get("eos_token")),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(directory, config),
    )


def read_hf_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the `eos_token_ids` of the tokenizer of `directory`; raise CheckpointError as `read_hf_tokenizer`.

    The vocabulary is read only if the EOS is none of the added tokens, which takes up to a second.
    """
    config = _read_json(directory / "tokenizer_config.json")
    text = _special_tokens(directory, config).get("eos_token")
    eos = None if text is None else _added_token_ids(directory, config).get(text)
    if text is not None and eos is None:
        eos = _backend(directory, config).token_to_id(text)
    return _eos_token_ids(directory, eos)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of `tokenizer.json` that is read without the vocabulary."""

    added_tokens: list[_AddedToken] = []


def _added_token_ids(directory: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of added tokens by text; none if they cannot be read.

    config: tokenizer_config.json, which has them as well and counts if there is no tokenizer.json.
    """
    path = directory / "tokenizer.json"
    try:
        if path.is_file():
            read = msgspec.json.decode(path.read_bytes(), type=_AddedTokens)
            return {token.content: token.id for token in read.added_tokens}
        decoder = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, Any], strict=False)
        return {text: token_id for token_id, token in decoder.items() if (text := _text(token)) is not None}
    except (OSError, msgspec.DecodeError):  # the vocabulary's reader says it in words of its own
        return {}


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional file; {} if there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, found: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _backend(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        if has_known_ranks(directory, config):
            return read_tiktoken(directory / TIKTOKEN, config)
        vocab = directory / "vocab.txt"
        if not vocab.is_file():
            return _converted_backend(directory, config)
        _expect_bert(directory, config)
        return _word_piece(vocab, config)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise CheckpointError(f"{path}: not a usable tokenizer: {' '.join(str(error).split())}") from error


def _expect_bert(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the vocab.txt is that of a tokenizer that divides texts in another way than BERT's."""
    name = config.get("tokenizer_class") or _read_json(directory / "config.json").get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in _BERT_CLASSES:
        raise CheckpointError(f"{directory}: expected the tokenizer.json of {name}: its vocab.txt is not enough")
    for key, expected in _BERT_SETTINGS.items():
        if config.get(key) not in (None, expected):
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: {key}: expected {json.dumps(expected)} without a tokenizer.json, "
                f"found {config[key]!r}"
            )


def _word_piece(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer from its vocab.txt, which has one token per line in the order of ids.

    config: tokenizer_config.json. Texts become `[CLS] text [SEP]`, pairs `[CLS] a [SEP] b [SEP]`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    lines = text.removesuffix("\n").split("\n")  # a token may be U+2028, where `splitlines` would cut
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


def _set_ends(
    directory: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer, ids: Mapping[str, int | None]
) -> None:
    """Let texts begin with BOS and end with EOS as tokenizer_config.json says, if it is one of `_WITH_FLAGS` and says anything of them.

    If it asks for a token that no file names, texts keep what tokenizer.json adds.
    """
    name, flags = str(config.get("tokenizer_class")).removesuffix("Fast"), {"bos": True, "eos": False}
    if name not in _WITH_FLAGS or all(config.get(f"add_{end}_token") is None for end in flags):
        return
    path = directory / "tokenizer.json"
    wanted = {end for end, default in flags.items() if _switch(path, config, f"add_{end}_token", default)}
    found = {end: token_id for end in flags if end in wanted and (token_id := ids.get(f"{end}_token")) is not None}
    if len(found) < len(wanted):
        return
    first, second = (
        [f"{part}:{place}" for part in ("bos", text, "eos") if part == text or part in found]
        for place, text in enumerate(("$A", "$B"))
    )
    backend.post_processor = processors.TemplateProcessing(
        single=first, pair=[*first, *second], special_tokens=list(found.items())
    )


def _switch(path: Path, config: Mapping[str, Any], key: str, default: bool | None) -> Any:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"{path.parent / 'tokenizer_config.json'}: {key}: expected true or false, found {value!r}"
        )
    return value


def _converted_backend(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if not (directory / "tokenizer_config.json").is_file():  # with it, a tokenizer may have a folder of its own
        expect_model_folder(directory)
    expect_tokenizer_files(directory, str(directory))
    log = logging.getLogger("transformers")
    log.addFilter(_is_error)  # it says that PyTorch is missing, which no tokenizer needs
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = converted.backend_tokenizer
    except Exception as error:  # any error of a converter
        if is_tokenizer_code(config):
            raise code_error(str(directory)) from error
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{directory}: no tokenizer.json, and transformers cannot convert what is there: {reason}"
        ) from error
    finally:
        log.removeFilter(_is_error)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(f"{directory}: no tokenizer.json, and this kind of tokenizer cannot be converted to one")
    return backend


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is stored as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    declared = _read_json(directory / "special_tokens_map.json") | {
        name: config[name] for name in _SPECIAL_NAMES if config.get(name) is not None
    }
    texts = {name: _text(declared.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def _eos_token_ids(directory: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Return the tokenizer's EOS, then those of generation_config.json and config.json: some models name it in only one of them."""
    found = [] if tokenizer_eos is None else [tokenizer_eos]
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(directory / name).get("eos_token_id")
        if declared is None:
            continue
        token_ids = declared if isinstance(declared, list) else [declared]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in token_ids):
            raise CheckpointError(f"{directory / name}: eos_token_id: expected token ids, found {declared!r}")
        found += token_ids
    return tuple(dict.fromkeys(found))


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name. Jinja files win over those of a processor, which win over tokenizer_config.json."""
    templates = _declared_templates(directory / "tokenizer_config.json", config)
    for name in ("chat_template.json", "processor_config.json"):
        templates |= _declared_templates(directory / name, _read_json(directory / name))
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = directory / "chat_template.jinja"
    for name, path in files.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: chat template cannot be read: {error}") from error
    return templates


def _declared_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name of a JSON file, which holds one template or a list of them."""
    declared = config.get("chat_template")
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": declared}
    if not isinstance(declared, list):
        raise CheckpointError(f"{path}: chat_template: expected text or a list, found {type(declared).__name__}")
    templates = {}
    for entry in declared:
        if not (
            isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        ):
            raise CheckpointError(
                f'{path}: chat_template: expected a list of {{"name", "template"}} objects, found {str(entry)[:80]}'
            )
        templates[entry["name"]] = entry["template"]
    return templates
