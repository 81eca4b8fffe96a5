"""Only listed modules may run what they read, only listed ones may read the wall clock, and links stay here."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, Source, program

CODE_READERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "joblib"}
"""Modules that run code of what they load, or send it pickled."""
READ_OWN_PICKLES = {
    "jaxserve.runner.program_cache",  # programs in a folder that only this user or root can write to
    "jaxserve.flight.capture",  # in memory; only the process that wrote it reads it back
    "jaxserve.tools.planning.compiler",  # a job for its own child process
    "jaxserve.tools.planning.compile_process",  # the child
}
CODE_RUNNERS = {"eval", "exec", "__import__"}
CODE_RUNNING_METHODS = (".recv_pyobj", ".send_pyobj", ".unsafe_load", ".full_load", "torch.load")

READ_WALL_CLOCK = {
    "jaxserve.frontend.frontend": "`created` of a model",
    "jaxserve.apis.schema.common": "`created` of replies",
    "jaxserve.apis.openai.classify": "`created` of replies",
    "jaxserve.apis.openai.score": "`created` of replies",
    "jaxserve.apis.responses.endpoint": "`created_at` of responses",
    "jaxserve.apis.responses.reply": "`completed_at` of responses",
    "jaxserve.http.rejections": "shown beside refused requests",
    "jaxserve.http.tracing": "times of spans",
    "jaxserve.flight.dump": "time of a record",
    "jaxserve.metrics": "value of vLLM's lora_requests_info",
    "jaxserve.tokenizer.template": "`strftime_now` of chat templates",
}
"""Modules that may read it, and what for: it may jump, so nothing waits or measures by it."""
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today", "datetime.today"}


def code_that_runs_data(source: Source) -> Iterator[str]:
    """Yield each place where `source` may run what it reads."""
    for line, module in source.imports():
        if module.split(".")[0] in CODE_READERS and source.module not in READ_OWN_PICKLES:
            yield f"{source.place}:{line} imports {module}"
    for line, name in source.dotted_names():
        if name.endswith(CODE_RUNNING_METHODS):
            yield f"{source.place}:{line} {name}"
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODE_RUNNERS:
            yield f"{source.place}:{node.lineno} {node.func.id}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            yield from () if ast.unparse(node.value) == "False" else (f"{source.place}:{node.lineno} {node.arg}",)


def wall_clock_reads(source: Source) -> Iterator[str]:
    """Yield each place where `source` reads the wall clock."""
    return (f"{source.place}:{line} {name}" for line, name in source.dotted_names() if name in WALL_CLOCK)


def test_nothing_that_comes_from_outside_is_run() -> None:
    assert [place for source in program() for place in code_that_runs_data(source)] == []


def test_only_times_that_are_shown_are_those_of_the_wall_clock() -> None:
    readers = {source.module for source in program() if any(wall_clock_reads(source))}
    assert readers == set(READ_WALL_CLOCK)


@pytest.mark.parametrize(
    "code",
    [
        "def late():\n    import pickle\n",
        "from multiprocessing import Pipe\n",
        "message = socket.recv_pyobj()\n",
        "value = eval(text)\n",
        "array = np.load(file, allow_pickle=True)\n",
        "tokenizer = load(path, trust_remote_code=flag)\n",
    ],
)
def test_the_check_sees_what_would_run_data(code: str) -> None:
    assert len(list(code_that_runs_data(Source("jaxserve.http.example", Path(__file__), code)))) == 1


def test_the_check_sees_a_read_of_the_wall_clock() -> None:
    code = "deadline = time.time() + 5\n"
    assert len(list(wall_clock_reads(Source("jaxserve.http.example", Path(__file__), code)))) == 1


def test_links_stay_in_the_repository() -> None:
    """Other machines do not have what is outside of it."""
    command = ["git", "-C", str(ROOT), "ls-files", "--stage"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("this is no checkout of git")
    links = [line.partition("\t")[2] for line in found.stdout.splitlines() if line.startswith("120000")]
    assert [name for name in links if not (ROOT / name).resolve().is_relative_to(ROOT)] == []
