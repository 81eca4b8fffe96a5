"""Values of YAML files: plain ones are read as the text that the file has, and parsed by the kind that they must have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import yaml

_SWITCH_WORDS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


def yaml_loader() -> type[yaml.SafeLoader]:
    """Return a loader that keeps every plain value but null as the text that the file has."""
    import yaml  # 30 ms that `--help` and a start without a file do not pay

    class Loader(yaml.SafeLoader):
        pass

    # YAML 1.1 reads `off` as false, `010` as 8, `1.10` as 1.1 and `12:30` as 750; a setting knows its own kind.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def integer(raw: object) -> int:
    """Return the integer that `raw` is or spells. Raises ValueError."""
    if isinstance(raw, int | str) and not isinstance(raw, bool):
        return int(raw)
    raise ValueError


def switch(raw: object) -> bool:
    """Return the boolean that `raw` is or spells. Raises ValueError."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _SWITCH_WORDS:
        return _SWITCH_WORDS[raw.lower()]
    raise ValueError
