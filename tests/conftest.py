"""Before jax starts: the CPU as four devices, so that tensor parallelism runs here."""

from __future__ import annotations

import os

import jax

os.environ.setdefault("HF_HUB_OFFLINE", "1")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
