"""A tokenizer from the metadata of a GGUF file.

Three vocabulary models: "gpt2" (byte-level BPE, text cut as `tokenizer.ggml.pre` names), "llama"
(SentencePiece BPE: the merges follow from the scores, unknown characters become byte tokens) and "gemma4" (the same with the
file's merges).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from jaxserve.errors import CheckpointError
from jaxserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from jaxserve.tokenizer.source import TokenizerSource

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MESSAGE_END = "<|end|>"
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    _MESSAGE_END,
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
"""Added tokens that end a turn or a text in every model that has them, as in llama.cpp: older files declare one EOS only."""
_REPLIES_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""The end tokens of gpt-oss and of Solar Open, whose replies have several messages: `<|end|>` ends one message only."""

_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's SentencePiece control tokens that do not strip the white space after them; no key marks them."""

_TEMPLATE_VARIABLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # as the format writes it
    "mask_token": "mask_token_id",
}

_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {"llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}}
"""Ids of special tokens that a file does not declare, by its vocabulary model."""


def read_gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> TokenizerSource:
    """Build the tokenizer that `metadata` describes; raise CheckpointError naming `origin` and the key."""
    return _Reader(metadata, origin).read()


def read_gguf_eos_token_ids(metadata: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    """Return the `eos_token_ids` of the tokenizer without building it; raise CheckpointError as `read_gguf_tokenizer`."""
    keys = _Metadata(metadata, origin)
    tokens = keys.tokens()
    return keys.eos_token_ids(tokens, keys.types(tokens))


class _Metadata:
    """The values of the keys `tokenizer.ggml.*`, checked. Methods raise CheckpointError naming the key."""

    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self._metadata = metadata
        self._origin = origin

    def error(self, key: str, expected: str, found: str) -> CheckpointError:
        return CheckpointError(f"{self._origin}: tokenizer.ggml.{key}: expected {expected}, found {found}")

    def get(self, key: str, kind: type, *, required: bool = False) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None and not required:
            return None
        if not isinstance(value, kind):
            raise self.error(key, f"a {kind.__name__}", "nothing" if value is None else f"a {type(value).__name__}")
        return value

    def items(self, key: str, item_kinds: type | tuple[type, ...], length: int | None = None) -> list[Any] | None:
        values = self.get(key, list)
        if values is None:
            return None
        if length is not None and len(values) != length:
            raise self.error(key, f"{length} entries, one per token", str(len(values)))
        for index, value in enumerate(values):
            if not isinstance(value, item_kinds):
                kinds = item_kinds if isinstance(item_kinds, tuple) else (item_kinds,)
                names = " or ".join(kind.__name__ for kind in kinds)
                raise self.error(key, f"{names} at index {index}", type(value).__name__)
        return list(values)

    def token_id(self, key: str, num_tokens: int, default: int | None = None) -> int | None:
        token_id = self.get(key, int)
        if token_id is None:
            return default if default is not None and default < num_tokens else None
        if not 0 <= token_id < num_tokens:
            raise self.error(key, f"an id below {num_tokens}", str(token_id))
        return int(token_id)

    def special_id(self, key: str, tokens: list[str]) -> int | None:
        defaults = _DEFAULT_IDS.get(self.get("model", str, required=True), {})
        return self.token_id(key, len(tokens), defaults.get(key))

    def tokens(self) -> list[str]:
        tokens = self.items("tokens", str)
        if not tokens:
            raise self.error("tokens", "a list of tokens", "nothing")
        named = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        first: dict[str, int] = {}
        for index, token in enumerate(named):
            if first.setdefault(token, index) != index:
                raise self.error("tokens", "every token once", f"{token[:40]!r} at index {first[token]} and {index}")
        return named

    def types(self, tokens: list[str]) -> list[int]:
        return self.items("token_type", int, len(tokens)) or [_NORMAL] * len(tokens)

    def eos_token_ids(self, tokens: list[str], types: list[int]) -> tuple[int, ...]:
        """Return the declared end tokens, the EOS first, then those known by their text."""
        declared = [self.special_id(key, tokens) for key in _END_KEYS]
        by_text = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) and token in _END_TEXTS
        }
        if any(ends <= by_text.keys() for ends in _REPLIES_OF_MESSAGES):
            by_text.pop(_MESSAGE_END, None)
        found = [token_id for token_id in [*declared, *by_text.values()] if token_id is not None]
        return tuple(dict.fromkeys(found))


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self._metadata = metadata
        self._origin = origin
        self._keys = _Metadata(metadata, origin)

    def read(self) -> TokenizerSource:
        model = self._keys.get("model", str, required=True)
        tokens = self._keys.tokens()
        types = self._keys.types(tokens)
        if model == "gpt2":
            pre_tokenizer = self._pre_tokenizer()
            vocab = {token: index for index, token in enumerate(tokens)}
            backend = pre_tokenizer.byte_level(vocab, self._merges(tokens))
            adds_bos = pre_tokenizer.adds_bos
        elif model == "gemma4":
            backend = self._sentencepiece_backend(tokens, self._merges(tokens), has_prefix=False)
            adds_bos = True
        elif model == "llama":
            backend = self._sentencepiece_backend(tokens, self._merges_of_pieces(tokens, types), has_prefix=True)
            adds_bos = True
        else:
            raise self._keys.error("model", "gpt2, llama or gemma4", repr(model))
        ids = {key: self._keys.special_id(key, tokens) for key in _TEMPLATE_VARIABLES.values()}
        self._add_tokens(backend, tokens, types)
        self._add_post_processor(backend, ids, adds_bos)
        named = {name: ids[key] for name, key in _TEMPLATE_VARIABLES.items()}
        return TokenizerSource(
            origin=self._origin,
            backend=backend,
            bos_token_id=ids["bos_token_id"],
            eos_token_ids=self._keys.eos_token_ids(tokens, types),
            special_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
            chat_templates=_chat_templates(self._metadata),
        )

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._keys.get("pre", str) or "default"
        pre_tokenizer = PRE_TOKENIZERS.get(name)
        if pre_tokenizer is None:
            raise self._keys.error("pre", f"one of {', '.join(sorted(PRE_TOKENIZERS))}", repr(name[:64]))
        return pre_tokenizer

    def _merges(self, tokens: list[str]) -> list[tuple[str, str]]:
        merges, vocab, stored = [], set(tokens), self._keys.items("merges", str)
        if stored is None:
            raise self._keys.error("merges", "a list of pairs", "nothing")
        for index, merge in enumerate(stored):
            # A token may begin with a space that is not the separator.
            left, _, right = merge[1:].partition(" ")
            pair = (merge[:1] + left, right)
            if pair[0] not in vocab or pair[1] not in vocab or pair[0] + pair[1] not in vocab:
                raise self._keys.error("merges", "two tokens that join to a token", f"{merge[:80]!r} at index {index}")
            merges.append(pair)
        return merges

    def _merges_of_pieces(self, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
        scores = self._keys.items("scores", (float, int), len(tokens))
        if scores is None:
            raise self._keys.error("scores", "one score per token", "nothing")
        if not all(map(math.isfinite, scores)):
            raise self._keys.error("scores", "finite numbers", "NaN or infinity")
        pieces = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_NORMAL, _USER_DEFINED)
        }
        return _merges_by_score(pieces, scores)

    def _sentencepiece_backend(
        self, tokens: list[str], merges: list[tuple[str, str]], *, has_prefix: bool
    ) -> tokenizers.Tokenizer:
        """Return a tokenizer of text whose spaces are characters of their own. has_prefix: True if a text begins with one unless the
        file says otherwise."""
        vocab = {token: index for index, token in enumerate(tokens)}
        unknown = self._keys.token_id("unknown_token_id", len(tokens), 0)
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab,
                merges,
                unk_token=None if unknown is None else tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        to_space: list[Any] = [normalizers.Replace(" ", _SPACE)]
        declared = self._keys.get("add_space_prefix", bool)
        if has_prefix if declared is None else declared:
            to_space.insert(0, normalizers.Prepend(_SPACE))
            steps.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(to_space)
        backend.decoder = decoders.Sequence(steps)
        return backend

    def _add_tokens(self, backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
        """Add tokens that are matched before pre-tokenization: control tokens, and user-defined ones, which are text."""
        added = {
            token: kind in (_CONTROL, _UNKNOWN)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        }
        is_phi3 = self._metadata.get("general.architecture") == "phi3" and self._keys.get("model", str) == "llama"
        backend.add_tokens(
            [
                AddedToken(
                    token, normalized=False, special=is_control, rstrip=is_phi3 and token not in _PHI3_KEEPS_SPACES
                )
                for token, is_control in added.items()
            ]
        )

    def _add_post_processor(self, backend: tokenizers.Tokenizer, ids: Mapping[str, int | None], adds_bos: bool) -> None:
        declared = self._keys.get("add_bos_token", bool)
        is_added = {"bos": adds_bos if declared is None else declared, "eos": self._keys.get("add_eos_token", bool)}
        special = []
        for name in (name for name in is_added if is_added[name]):
            token_id = ids[f"{name}_token_id"]
            if token_id is None:
                raise self._keys.error(f"{name}_token_id", f"a token id, because of add_{name}_token", "nothing")
            special.append((name, token_id))
        if special:
            parts = [name for name in ("bos", "$A", "eos") if is_added.get(name, True)]
            backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates


def _merges_by_score(pieces: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs that merge into a piece, the best-scored piece first, as SentencePiece merges."""
    merges = []
    for token in pieces:
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in splits if left in pieces and right in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges += [(scores[pieces[token]], pair) for pair in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1][0]), len(merge[1][1])), reverse=True)
    return [pair for _, pair in merges]
