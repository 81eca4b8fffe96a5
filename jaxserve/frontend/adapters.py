"""The LoRA adapters that requests may name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from jaxserve.ipc.messages import LoadedAdapter


class AdapterNames(Mapping[str, str]):
    """Sources of adapters by name: those of --lora-modules, then those that the engine reports."""

    def __init__(self, modules: Mapping[str, str] | None = None) -> None:
        self._loaded: dict[str, LoadedAdapter] = {}
        named = enumerate((modules or {}).items(), start=1)
        self.replace(LoadedAdapter(name, source, number) for number, (name, source) in named)

    def __getitem__(self, name: str) -> str:
        return self._loaded[name].source

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def number(self, name: str) -> int:
        """Return the number by which the engine knows an adapter."""
        return self._loaded[name].number

    def replace(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Take the adapters that the engine has loaded now."""
        self._loaded = {adapter.name: adapter for adapter in adapters}
