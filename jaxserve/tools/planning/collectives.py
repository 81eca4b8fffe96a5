"""Collectives of one step: counted from the model's shapes, and found in the text of a compiled program.

Bytes are those that each device sends, by the ring algorithms: 2 (n - 1) / n of an array for an all-reduce of n devices,
(n - 1) / n for an all-gather of the whole array and for an all-to-all of a device's own. Over hosts, devices of one host
first share the work, and each exchanges its part with the same device of the other hosts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from jaxserve.layers.expert_parallel import uses_all_to_all
from jaxserve.model_config.decoder import head_counts
from jaxserve.sharding.rules import MeshAxes
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.sizes import Sizes

Kind = Literal["all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute"]


@dataclass(frozen=True, slots=True)
class Collective:
    """Equal collectives of one step."""

    name: str
    kind: Kind
    count: int
    num_devices: int
    """Devices of one group."""
    array_bytes: int
    """Bytes of the array on each device: of the sum, of the gathered array, or of the rows that are sent."""
    num_hosts: int = 1
    """Hosts of one group."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all of them."""
        return self._sent(self.num_devices, self.array_bytes)

    def sent_between_hosts(self) -> float:
        """Bytes that a device sends to other hosts in all of them."""
        part = (
            self.array_bytes if "all-to-all" in self.kind else self.array_bytes / (self.num_devices // self.num_hosts)
        )
        return self._sent(self.num_hosts, part)

    def _sent(self, num_parts: int, array_bytes: float) -> float:
        return self.count * (2 if self.kind == "all-reduce" else 1) * array_bytes * (num_parts - 1) / num_parts


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth between the devices of one engine, each way, of one device; 0: they share memory."""

    bytes_per_s: float
    host_bytes_per_s: float
    """Bandwidth to devices of other hosts."""

    @classmethod
    def of(cls, device: Device) -> Links:
        """Return the links of a device."""
        return cls(device.link_bytes_per_s, device.host_link_bytes_per_s or device.link_bytes_per_s)

    def seconds(self, collectives: Iterable[Collective]) -> float:
        """Return the shortest time of these collectives, one after the other: that of the links that take longest."""
        if not self.bytes_per_s:
            return 0.0
        return sum(
            max(each.sent_bytes / self.bytes_per_s, each.sent_between_hosts() / self.host_bytes_per_s)
            for each in collectives
        )


def step_collectives(sizes: Sizes, num_tokens: int, num_rows: int, num_hosts: int = 1) -> tuple[Collective, ...]:
    """Return the collectives of one step of `num_tokens` tokens that samples `num_rows`, those of one device left out."""
    found = _all(sizes, num_tokens, num_rows, _Groups(dict(sizes.rules.sizes), sizes.num_devices // num_hosts))
    return tuple(each for each in found if each.num_devices > 1 and each.count)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of devices along mesh axes."""

    sizes: dict[str, int]
    devices_per_host: int

    def count(self, axes: MeshAxes) -> int:
        """Return the devices of one group."""
        return math.prod(self.sizes[axis] for axis in axes)

    def hosts(self, axes: MeshAxes) -> int:
        """Return the hosts of one group; hosts have neighbours of the mesh, whose last axis is the fastest."""
        ranges = [range(size) if axis in axes else range(1) for axis, size in self.sizes.items()]
        places: tuple[int, ...] = (0,)
        for size, coordinates in zip(self.sizes.values(), ranges, strict=True):
            places = tuple(place * size + coordinate for place, coordinate in itertools.product(places, coordinates))
        return len({place // self.devices_per_host for place in places})


def _all(sizes: Sizes, num_tokens: int, num_rows: int, groups: _Groups) -> Iterator[Collective]:
    decoder, rules, itemsize = sizes.decoder, sizes.rules, sizes.activation_itemsize
    residual = num_tokens * decoder.hidden_size * itemsize

    def over(axes: MeshAxes, name: str, kind: Kind, count: int, array_bytes: int) -> Collective:
        return Collective(name, kind, count, groups.count(axes), array_bytes, groups.hosts(axes))

    layers, pages, vocab = decoder.num_layers, rules.mesh_axes("pages"), rules.mesh_axes("vocab")
    width = decoder.head_dim if decoder.latent is None else decoder.latent.value_dim
    width = width if decoder.compressed is None else decoder.compressed.dim
    heads = num_tokens * max(head_counts(decoder)) // rules.count("heads") * width * itemsize
    yield over(vocab, "embedding", "all-reduce", 1, residual)
    yield over(pages, "rows of data ranks", "all-reduce", layers, heads)
    yield over(rules.mesh_axes("heads"), "attention output", "all-reduce", layers, residual)
    dense = sum(layer.experts is None for layer in decoder.layers)
    yield over(rules.mesh_axes("ffn"), "feed-forward output", "all-reduce", dense, residual)
    if (experts := decoder.experts) is not None:
        count, own, widths = layers - dense, rules.mesh_axes("experts"), rules.mesh_axes("expert_ffn")
        if experts.shared_intermediate_size is not None:
            yield over(rules.mesh_axes("shared_ffn"), "shared experts", "all-reduce", count, residual)
        if own and uses_all_to_all(sizes.exchange, num_tokens, experts.num_per_token, groups.count(own)):
            share = residual // groups.count(own)
            rows = share * experts.num_per_token
            yield over(own, "rows to experts and back", "ragged-all-to-all", 2 * count, rows)
            yield over(widths, "parts of experts", "all-reduce", count, share)
            yield over(own, "tokens after experts", "all-gather", count, residual)
        else:
            yield over(own + widths, "experts", "all-reduce", count, residual)
    if num_rows % sizes.num_devices == 0:
        logits = num_rows * decoder.vocab_size * 4 // sizes.num_devices
        yield over(vocab, "logits, columns for rows", "all-to-all", 1, logits)


_FOUND: Final = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|"
    r"collective-permute)(?P<start>-start)?\("
)
_ARRAY: Final = re.compile(r"((?:bf|f|s|u)\d+\w*)\[([\d,]*)\]")
_GROUPS: Final = re.compile(
    r"replica_groups=(?:\{\{(?P<list>[\d,]+)\}|\[\d+,(?P<size>\d+)\]|mesh\[(?P<mesh>.*?)\] ?\{(?P<axes>.*?)\})"
)
_MESH_AXIS: Final = re.compile(r"'(\w+)'=(\d+)")


def compiled_collectives(text: str) -> tuple[Collective, ...]:
    """Return the collectives in a compiled program's text, equal ones of any layer as one.

    array_bytes is that of the result, of several arrays their sum; a ragged all-to-all's has room for more rows than are
    sent. It does not distinguish hosts.
    """
    found: Counter[tuple[Kind, int, int]] = Counter()
    for line in text.splitlines():
        match = _FOUND.search(re.sub(r"/\*.*?\*/", "", line))
        if match is None:
            continue
        kind: Kind = match["kind"]  # type: ignore[assignment]
        shape = match["shape"]
        # (operands, result, ...); a started all-reduce without its operands is a tuple of results
        if match["start"] and shape.startswith("((" if kind == "all-reduce" else "("):
            shape = _parts(shape)[1]
        arrays = [_array_bytes(*array) for array in _ARRAY.findall(shape)]
        found[kind, _group_size(line), sum(arrays)] += 1
    return tuple(Collective("", kind, count, size, total) for (kind, size, total), count in sorted(found.items()))


def _group_size(line: str) -> int:
    """Return the devices of one group of a collective; XLA writes them as lists, as a shape, or as axes of a mesh."""
    groups = _GROUPS.search(line)
    if groups is None:
        raise ValueError(f"no replica groups in {line.strip()[:200]}")
    if groups["list"]:
        return len(groups["list"].split(","))
    if groups["size"]:
        return int(groups["size"])
    sizes = dict(_MESH_AXIS.findall(groups["mesh"]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", groups["axes"]))


def _parts(shape: str) -> list[str]:
    """Return the elements of a tuple's shape."""
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _array_bytes(dtype: str, shape: str) -> int:
    return math.prod(map(int, filter(None, shape.split(",")))) * int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8
