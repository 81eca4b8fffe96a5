"""Everything that a program depends on is in its key."""

from __future__ import annotations

import os

import jax
import pytest

from jaxserve.runner import program_key as module
from jaxserve.runner.program_key import host_key_parts, program_key


def test_the_key_is_the_same_when_nothing_changed() -> None:
    assert host_key_parts() == host_key_parts()
    assert program_key(host_key_parts(), "a", 1) == program_key(host_key_parts(), "a", 1)
    assert program_key(host_key_parts(), "a", 1) != program_key(host_key_parts(), "a", 2)


@pytest.mark.parametrize(
    "name", ["jaxserve", "jaxserve source", "jax", "jaxlib", "platform", "device kind", "runtime", "processor", "cores"]
)
def test_each_part_of_the_host_is_in_the_key(name: str) -> None:
    parts = host_key_parts()
    assert parts[name]
    assert program_key(parts | {name: "another"}) != program_key(parts)


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_are_in_the_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_key(host_key_parts())
    monkeypatch.setenv(variable, os.environ.get(variable, "") + " --xla_dump_hlo_as_text=false")
    assert program_key(host_key_parts()) != before


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_memory_fitting_level", "O3"),
        ("jax_memory_fitting_effort", 0.5),
        ("jax_compiler_enable_remat_pass", False),
    ],
)
def test_settings_of_jax_are_in_the_key(setting: str, value: str) -> None:
    if setting not in jax.config.values:
        pytest.skip("this jax has no such setting")
    before, old = program_key(host_key_parts()), jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert program_key(host_key_parts()) != before
    finally:
        jax.config.update(setting, old)


def test_options_of_the_compiler_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_key(host_key_parts())
    monkeypatch.setattr(module, "PROGRAM_OPTIONS", {jax.devices()[0].platform: {"xla_disable_hlo_passes": "dce"}})
    assert program_key(host_key_parts()) != before


def test_another_processor_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_key_parts()
    monkeypatch.setattr(module, "_processor", lambda: "flags : fpu sse2")
    assert program_key(host_key_parts()) != program_key(before)
