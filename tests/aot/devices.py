"""The accelerators that programs are compiled for here: rows of the planner's table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from jaxserve.tools.planning.devices import ACCELERATORS, Device
from jaxserve.tools.planning.targets import COMPILERS, described_devices, missing_compiler


@dataclass(frozen=True)
class Target:
    """A kind of device, and the package that holds its compiler."""

    device: Device

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def compiler(self) -> str:
        return COMPILERS[self.device.platform][0]

    @property
    def has_compiler(self) -> bool:
        return missing_compiler(self.device, 1) is None

    def devices(self, count: int) -> list[jax.Device]:
        """The first of the devices of one host: up to four."""
        return described_devices(self.device, count)


A100 = Target(ACCELERATORS["a100"])
H100 = Target(ACCELERATORS["h100"])
H200 = Target(ACCELERATORS["h200"])
B200 = Target(ACCELERATORS["b200"])
T4 = Target(ACCELERATORS["t4"])
L40S = Target(ACCELERATORS["l40s"])
RTX4090 = Target(ACCELERATORS["rtx4090"])
RTX5090 = Target(ACCELERATORS["rtx5090"])
_ADA = RTX4090.device.cuda
assert _ADA is not None
SM_86 = Target(replace(RTX4090.device, name="sm_86", cuda=replace(_ADA, capability=(8, 6))))
"""RTX 30 and A10 for the compiler: no row of the planner's table."""
_BLACKWELL = B200.device.cuda
assert _BLACKWELL is not None
SM_103 = Target(replace(B200.device, name="sm_103", cuda=replace(_BLACKWELL, capability=(10, 3))))
"""B300 for the compiler: no row of the planner's table."""
V5E = Target(ACCELERATORS["v5e"])
V5P = Target(ACCELERATORS["v5p"])
V6E = Target(ACCELERATORS["v6e"])
V7X = Target(ACCELERATORS["v7x"])
