"""Decisions of `make release` (`.ci/release.py`): its version, and the platform of its wheel."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import jaxserve

SCRIPT = Path(__file__).parents[2] / ".ci" / "release.py"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    specification = importlib.util.spec_from_file_location("release", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_changelog_begins_with_the_version_of_the_package(release: ModuleType) -> None:
    assert release.the_one_version() == jaxserve.__version__


def test_a_version_without_an_entry_in_the_changelog_is_refused(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve" / "__init__.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"begins with 0\.2\.0, but .* has 0\.3\.0"):
        release.the_one_version()


def test_kernels_are_compiled_against_the_oldest_supported_jax_only(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (oldest,) = release.OLDEST_JAX.findall((release.ROOT / "pyproject.toml").read_text("utf-8"))
    monkeypatch.setattr(release.importlib.metadata, "version", {"jax": oldest}.get)
    release.check_jax()
    monkeypatch.setattr(release.importlib.metadata, "version", {"jax": "0.99.0"}.get)
    with pytest.raises(SystemExit, match=rf"jax {re.escape(oldest)}, .* this is 0\.99\.0: .*PYTHON=python3\.11"):
        release.check_jax()


def test_a_release_with_another_jax_is_refused_before_anything_is_removed(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release, "committed_files", lambda folder: pytest.fail("the build begins"))
    monkeypatch.setattr(release.importlib.metadata, "version", {"jax": "0.99.0"}.get)
    with pytest.raises(SystemExit, match="native kernels"):
        release.main()
    assert tmp_path.exists()


def test_the_wheel_names_the_newest_c_library_that_a_kernel_asks_for(release: ModuleType) -> None:
    libraries = [b"\0GLIBC_2.17\0GLIBC_2.34\0", b"GLIBC_2.4\0"]
    assert release.platform_tag(libraries, "x86_64") == "manylinux_2_34_x86_64"
    assert release.platform_tag(libraries[1:], "aarch64") == "manylinux_2_4_aarch64"
