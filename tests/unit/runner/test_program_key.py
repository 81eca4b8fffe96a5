"""Every fact that a program depends on is in its key."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from jaxserve.runner import program_key as module
from jaxserve.runner.program_key import host_key_parts, program_key


def test_facts_are_the_same_when_nothing_changed() -> None:
    assert host_key_parts() == host_key_parts()
    assert program_key(host_key_parts(), "a", 1) == program_key(host_key_parts(), "a", 1)
    assert program_key(host_key_parts(), "a", 1) != program_key(host_key_parts(), "a", 2)


@pytest.mark.parametrize(
    "name", ["jaxserve", "jaxserve source", "jax", "jaxlib", "platform", "device kind", "runtime", "processor", "cores"]
)
def test_each_fact_of_the_host_is_in_the_key(name: str) -> None:
    facts = host_key_parts()
    assert facts[name]
    assert program_key(facts | {name: "another"}) != program_key(facts)


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_are_in_the_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_key(host_key_parts())
    monkeypatch.setenv(variable, os.environ.get(variable, "") + " --xla_dump_hlo_as_text=false")
    assert program_key(host_key_parts()) != before


@pytest.mark.parametrize(
    ("setting", "value"), [("jax_default_matmul_precision", "highest"), ("jax_numpy_dtype_promotion", "strict")]
)
def test_settings_of_jax_are_in_the_key(setting: str, value: str) -> None:
    before, old = program_key(host_key_parts()), jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert program_key(host_key_parts()) != before
    finally:
        jax.config.update(setting, old)


def test_another_processor_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_key_parts()
    monkeypatch.setattr(module, "_processor", lambda: "flags : fpu sse2")
    assert program_key(host_key_parts()) != program_key(before)


def test_the_source_of_what_is_traced_is_in_the_key_and_that_of_the_server_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("jaxserve/layers/linear.py", "jaxserve/http/app.py", "jaxserve_kernels/matmul/api.py"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("old")
    for package in ("jaxserve", "jaxserve_kernels"):
        (tmp_path / package / "__init__.py").write_text("")
        monkeypatch.setattr(getattr(module, package), "__file__", str(tmp_path / package / "__init__.py"))
    source_hash = module.source_hash.__wrapped__
    first = source_hash()
    (tmp_path / "jaxserve/http/app.py").write_text("new")
    assert source_hash() == first
    (tmp_path / "jaxserve/layers/linear.py").write_text("new")
    second = source_hash()
    assert second != first
    (tmp_path / "jaxserve_kernels/matmul/api.py").write_text("new")
    assert source_hash() not in (first, second)
