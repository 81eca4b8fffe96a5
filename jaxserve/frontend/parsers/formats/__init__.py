"""Registry of output formats: every file of this folder declares how one model family writes calls or reasoning.

A file declares any number of `ToolFormat`, `ReasoningFormat` and `ChannelFormat` values. Nothing else lists them: the
choices of `--tool-call-parser` and `--reasoning-parser`, the detection from a chat template and the tests use this registry.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from jaxserve.errors import ConfigError
from jaxserve.frontend.parsers.channels import ChannelFormat
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import ToolFormat


class _Declared(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int: ...


F = TypeVar("F", bound=_Declared)


def _declared(kind: type[F]) -> Mapping[str, F]:
    """Return the formats of one kind by name, in the order in which templates are matched."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, kind)]
    found.sort(key=lambda format_: (-format_.priority, format_.name))
    return MappingProxyType({format_.name: format_ for format_ in found})


TOOL_FORMATS: Final = _declared(ToolFormat)
REASONING_FORMATS: Final = _declared(ReasoningFormat)
CHANNEL_FORMATS: Final = _declared(ChannelFormat)


TOOL_PARSERS: Final[Mapping[str, str]] = MappingProxyType(
    {name: name for name in ("auto", "none", *TOOL_FORMATS, *CHANNEL_FORMATS)}
    | {alias: one.name for one in TOOL_FORMATS.values() for alias in one.aliases}
    | {alias: one.name for one in CHANNEL_FORMATS.values() for alias in one.tool_aliases}
)
"""The format of each choice of `--tool-call-parser`: its name, or that of vLLM."""
REASONING_PARSERS: Final[Mapping[str, str]] = MappingProxyType(
    {name: name for name in ("auto", "none", *REASONING_FORMATS, *CHANNEL_FORMATS)}
    | {alias: one.name for one in REASONING_FORMATS.values() for alias in one.aliases}
    | {alias: one.name for one in CHANNEL_FORMATS.values() for alias in one.reasoning_aliases}
)
"""The format of each choice of `--reasoning-parser`: its name, or that of vLLM."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError if only one of them names a format of channels, which has calls and reasoning in one."""
    flags = {TOOL_PARSERS[tool_call_parser], REASONING_PARSERS[reasoning_parser]}
    for name in flags & CHANNEL_FORMATS.keys():
        if not flags <= {name, "auto"}:
            raise ConfigError(
                f"--tool-call-parser {tool_call_parser} with --reasoning-parser {reasoning_parser}: {name} is a format of "
                f"both, so both must be {name} or auto"
            )


def tool_call_parsers() -> list[str]:
    """Return the choices of `--tool-call-parser` besides `auto`."""
    return ["none", *sorted(TOOL_PARSERS.keys() - {"auto", "none"})]


def reasoning_parsers() -> list[str]:
    """Return the choices of `--reasoning-parser` besides `auto`."""
    return ["none", *sorted(REASONING_PARSERS.keys() - {"auto", "none"})]
