"""Compare a `config.json` with the keys that families read: that of an architecture that is not served, or one with overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, TypeVar

from jaxserve.checkpoint.family import Family
from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig

_MAX_KEYS: Final = 128
"""Keys of a config that are compared: a config may hold any number."""
_MAX_NAMED: Final = 8
"""Keys of each kind that an error names."""
_MIN_PREFIX: Final = 5
"""Letters that names of different words must share to count as alike."""
_PLAINEST: Final = "LlamaForCausalLM"
_SUFFIX: Final = re.compile(r"(for_?causal_?lm|for_?conditional_?generation|lm_?head_?model|_)", re.IGNORECASE)
_REJECTED: Final = re.compile(r"model config: (\w+)[\w.]* is ")
_ABSENT: Final = re.compile(r"model config: the key (\w+)[\w.]* is missing")
_INERT: Final = frozenset(
    "architectures attention_dropout auto_map bos_token_id classifier_dropout dropout dtype embd_pdrop eos_token_id "
    "hidden_dropout initializer_range max_window_layers model_type output_attentions output_hidden_states "
    "output_router_logits pad_token_id pretraining_tp quantization_config resid_pdrop router_aux_loss_coef torch_dtype "
    "transformers_version use_cache _attn_implementation _name_or_path aux_loss_alpha seq_aux num_nextn_predict_layers "
    "router_jitter_noise".split()
)
"""Keys that no family computes with, or that are read elsewhere."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Differences:
    """Keys of a `config.json` of another architecture that a family cannot take."""

    unread: tuple[str, ...] = ()
    """Keys that have a value and that the family does not read."""
    rejected: tuple[str, ...] = ()
    """Keys whose values the family rejects."""
    absent: tuple[str, ...] = ()
    """Keys that the family needs."""
    is_complete: bool = True
    """False if the family's reader stopped early, so that it might know some of the unread keys."""

    def __str__(self) -> str:
        unread = self.unread if self.is_complete else ()
        kinds = {"keys it does not know": unread, "values it rejects": self.rejected, "keys it needs": self.absent}
        return "; ".join(f"{kind}: {_listed(keys)}" for kind, keys in kinds.items() if keys)


def nearest_family(name: str, hf: Mapping[str, Any], families: Iterable[Family]) -> Family:
    """Return the family whose name begins most like `name` or the config's `model_type`; else any.

    Of several, the one that takes most of the config's keys, then Llama, then the first in alphabetical order.
    """
    names = (name, hf.get("model_type"))
    plain = [_plain(each[:_MAX_KEYS]) for each in names if isinstance(each, str)]
    likeness = {
        family.architectures[0]: max(_likeness(one, _plain(other)) for one in plain for other in family.architectures)
        for family in families
    }
    best = max(likeness.values())
    candidates = {each.architectures[0]: each for each in families if likeness[each.architectures[0]] == best}
    if len(candidates) == 1:
        return next(iter(candidates.values()))

    def order(candidate: str) -> tuple[int, bool, str]:
        found = differences(hf, candidates[candidate])
        return len(found.unread) + len(found.rejected), candidate != _PLAINEST, candidate

    return candidates[min(candidates, key=order)]


def differences(hf: Mapping[str, Any], family: Family) -> Differences:
    """Return the keys of `hf` that the reader of `family` rejects, lacks or does not know.

    A key is read if the reader's result changes with its value.
    """
    text = hf.get("text_config")
    source = text if isinstance(text, dict) else hf
    keys = {key: source[key] for key in list(source)[:_MAX_KEYS] if key not in _INERT}
    accepted, rejected, absent = dict(keys), list[str](), list[str]()
    result = _read(family, accepted)
    while isinstance(result, str):
        missing, wrong = _ABSENT.match(result), _REJECTED.match(result)
        if missing and missing[1] not in absent:
            accepted[missing[1]] = 1 if missing[1].startswith("num_") else 64
            absent.append(missing[1])
        elif wrong and wrong[1] in keys and wrong[1] not in rejected:
            accepted.pop(wrong[1])
            rejected.append(wrong[1])
        else:
            break
        result = _read(family, accepted)
    unread = [
        key
        for key, value in keys.items()
        if key not in rejected
        and value not in (None, False, [], {})
        and _read(family, {**accepted, key: "?"}) == result
    ]
    needed = tuple(key for key in absent if key not in rejected)
    return Differences(tuple(unread), tuple(rejected), needed, is_complete=not isinstance(result, str))


def unread_overrides(
    overrides: Mapping[str, Any],
    original: Mapping[str, Any],
    hf: Mapping[str, Any],
    read: Callable[[dict[str, Any]], object],
) -> tuple[str, ...]:
    """Return the names of overrides that are not in the model's `config.json`, and that its reader does not read either.

    original: that file. hf: the config of the text model, with the overrides. read: its reader. Tables of other parts, such as
    `vision_config`, are not checked, nor are keys that are read elsewhere.
    """

    def is_read(names: tuple[str, ...], value: object) -> bool:
        table: Any = hf
        for name in names[:-1]:
            table = table.get(name) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            return len(names) > 1  # of another part
        return table.get(names[-1]) == value and _result(read, _with(hf, names, "?")) != _result(read, hf)

    found = []
    for names, value in _leaves(overrides, original):
        is_inside = names[0] == "text_config" and "text_config" not in hf
        inner = names[1:] if is_inside else names
        if inner[0] not in _INERT and not is_read(inner, value):
            found.append(".".join(names))
    return tuple(found)


def _leaves(table: Mapping[str, Any], present: Any) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values in `table` and its inner tables that `present` has not, by the names of their keys."""
    for key, value in table.items():
        own = present.get(key) if isinstance(present, dict) else None
        if isinstance(value, dict):
            yield from (((key, *names), leaf) for names, leaf in _leaves(value, own))
        elif not isinstance(present, dict) or key not in present:
            yield (key,), value


def _with(table: Mapping[str, Any], names: tuple[str, ...], value: object) -> dict[str, Any]:
    """Return a copy of `table` with another value in an inner table."""
    first, *rest = names
    return {**table, first: _with(table[first], tuple(rest), value) if rest else value}


def _read(family: Family, keys: Mapping[str, Any]) -> DecoderConfig | str:
    """Return what the family's reader makes of `keys`, or its error."""
    return _result(family.decoder_config, {**keys, "architectures": [family.architectures[0]]})


def _result(read: Callable[[dict[str, Any]], T], keys: Mapping[str, Any]) -> T | str:
    """Return what a reader makes of `keys`, or its error."""
    try:
        return read(dict(keys))
    except CheckpointError as error:
        return str(error)


def _likeness(name: str, other: str) -> int:
    """Return the letters that both names begin with; 0 if they share neither a first word nor `_MIN_PREFIX` letters."""
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))))
    words = [re.split("[^a-z]", each)[0] for each in (name, other)]
    return shared if shared >= _MIN_PREFIX or words[0] == words[1] else 0


def _plain(name: str) -> str:
    return _SUFFIX.sub("", name).lower()


def _listed(keys: Collection[str]) -> str:
    """Return the first keys as text of one line."""
    names = [key if key.isidentifier() else repr(key) for key in list(keys)[:_MAX_NAMED]]
    more = len(keys) - len(names)
    return ", ".join(name[:40] for name in names) + (f" and {more} more" if more else "")
