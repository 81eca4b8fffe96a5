"""The progress bar of a call with many prompts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress


def has_terminal() -> bool:
    """Return True if stderr is a terminal; it is None in a program that was started with a closed one."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress(total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr if it is a terminal; yields the callback for each finished prompt."""
    if not (is_wanted and has_terminal()):
        yield lambda: None
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield partial(bar.advance, task)
