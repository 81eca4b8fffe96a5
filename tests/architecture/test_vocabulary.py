"""Texts follow the writing rules: docstrings are full statements, and words that the field does not use stay away."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.vocabulary import pages, python_files, refused_names, refused_openings, refused_words


def test_docstrings_are_full_statements() -> None:
    assert [fault for path in python_files() for fault in refused_openings(path)] == []


def test_docstrings_and_comments_use_the_words_of_the_field() -> None:
    assert [fault for path in python_files() for fault in refused_words(path)] == []


def test_names_use_the_words_of_the_field() -> None:
    assert [fault for path in python_files() for fault in refused_names(path)] == []


def test_pages_use_the_words_of_the_field() -> None:
    assert [fault for path in pages() for fault in refused_words(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a request: its tokens."""',
        'X = 1\n"""The same for prompts."""',
        'def f():\n    """Whether it ends."""',
        'class A:\n    """A."""\n\n    x: int\n    """What it holds."""',
    ],
)
def test_the_checks_see_a_refused_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("tests.architecture.vocabulary.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text)
    assert len(refused_openings(tmp_path / "a.py")) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Tell nobody."""'),
        ("a.py", "x = 1  # nobody reads it"),
        ("a.py", 'option(help="what nobody reads")'),
        ("a.md", "A line.\n\nWhat nobody reads.\n"),
    ],
)
def test_the_checks_see_a_refused_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr("tests.architecture.vocabulary.ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert len(refused_words(tmp_path / name)) == 1


@pytest.mark.parametrize(
    "text", ["def nobody_reads():\n    pass\n", "class ToldSeats:\n    pass\n", "ALL_NEWS = 1\n", "products = 1\n"]
)
def test_the_checks_see_a_refused_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("tests.architecture.vocabulary.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text + "behind_proxy = retold = newsletter = itertools.product\n")
    assert refused_names(tmp_path / "a.py") != []
    (tmp_path / "a.py").write_text("behind_proxy = retold = newsletter = itertools.product\n")
    assert refused_names(tmp_path / "a.py") == []
