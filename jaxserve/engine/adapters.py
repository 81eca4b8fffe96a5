"""The LoRA adapters that an engine has loaded, and the places for them."""

from __future__ import annotations

from collections.abc import Mapping, Set

from jaxserve.errors import InvalidRequestError, ModelNotFoundError, UnavailableError, shown
from jaxserve.ipc.messages import LoadedAdapter
from jaxserve.types import ADAPTER_PLACES, place_of


class AdapterPlaces:
    """Adapters by name. A number is used once, so cached pages of an earlier adapter of the same place are never found."""

    def __init__(self, modules: Mapping[str, str], count: int) -> None:
        """modules: names and sources of the adapters of the start, which have the first places. count: of all places."""
        self._loaded = {
            name: LoadedAdapter(name, source, number) for number, (name, source) in enumerate(modules.items(), start=1)
        }
        self._next_numbers = [
            place if place > len(modules) else place + ADAPTER_PLACES for place in range(1, count + 1)
        ]

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._loaded.values())

    def has(self, number: int) -> bool:
        """Return True if requests may use the adapter of this number; 0: none."""
        return number == 0 or any(adapter.number == number for adapter in self._loaded.values())

    def choose(self, name: str, source: str, used: Set[int]) -> LoadedAdapter:
        """Return an adapter with a free place. Raises InvalidRequestError, and UnavailableError if it may be free soon.

        used: places of requests under way, which may have adapters that were unloaded.
        """
        if name in self._loaded:
            raise InvalidRequestError(f"The adapter {shown(name)} is loaded already.", param="lora_name")
        taken = {place_of(adapter.number) for adapter in self._loaded.values()}
        free = [number for number in self._next_numbers if place_of(number) not in taken]
        if not free:
            raise InvalidRequestError(
                f"No place is free for the adapter {shown(name)}: all {len(self._next_numbers)} are taken (--max-loras).",
                param="lora_name",
            )
        unused = [number for number in free if place_of(number) not in used]
        if not unused:
            raise UnavailableError("Requests under way still use the adapter that was unloaded. Please retry later.")
        return LoadedAdapter(name, source, unused[0])

    def add(self, adapter: LoadedAdapter) -> None:
        """Let requests use an adapter that `choose` has returned."""
        self._next_numbers[place_of(adapter.number) - 1] += ADAPTER_PLACES
        self._loaded[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Let no further request use an adapter. Raises ModelNotFoundError."""
        if self._loaded.pop(name, None) is None:
            raise ModelNotFoundError(f"The adapter {shown(name)} is not loaded.", param="lora_name")
