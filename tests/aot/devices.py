"""Accelerators that are only described: all that their compilers need (`jax.experimental.topologies`)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import jax
from jax.experimental import topologies

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Target:
    """A kind of device, and the package that holds its compiler."""

    name: str
    platform: Literal["cuda", "tpu"]

    @property
    def compiler(self) -> str:
        return {"cuda": "jax-cuda13-pjrt", "tpu": "libtpu"}[self.platform]

    @property
    def has_compiler(self) -> bool:
        try:
            metadata.version(self.compiler)
        except metadata.PackageNotFoundError:
            return False
        return True

    def devices(self, count: int) -> list[jax.Device]:
        """The first of the devices of one host: up to four."""
        if self.platform == "cuda":
            description = (FOLDER / f"{self.name}.txtpb").read_text(encoding="utf-8")
            topology = topologies.get_topology_desc(
                platform="cuda",
                target_config=description,
                topology=f"1x1x{count}",  # partitions, hosts, devices
            )
        else:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{self.name}:2x2")
        return topology.devices[:count]


H200 = Target("h200", "cuda")
V5E = Target("v5e", "tpu")
V6E = Target("v6e", "tpu")
