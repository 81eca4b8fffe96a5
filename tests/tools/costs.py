"""A pytest plugin that says which tests compute and which wait: `pytest -p tests.tools.costs --costs FILE`.

FILE gets a line of JSON for each test: the seconds of its set-up, call and tear-down together, and the processor seconds of
this process and of the children that ended meanwhile. Workers of xdist append to the same file. Sum it up with
`python -m tests.tools.costs FILE`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

NUM_SHOWN = 60


class Cost(NamedTuple):
    """Seconds of a test or of a file."""

    name: str
    processor: float
    wall: float

    def computing(self) -> float:
        return self.processor

    def waiting(self) -> float:
        return self.wall - self.processor


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", help="file to which each test's seconds and processor seconds are appended")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    start, busy = time.monotonic(), processor_seconds()
    result = yield
    if name := item.config.getoption("--costs"):
        line = {"test": item.nodeid, "wall": time.monotonic() - start, "processor": processor_seconds() - busy}
        with Path(name).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return result


def processor_seconds() -> float:
    """Return those of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(path: str) -> None:
    tests = [
        Cost(each["test"], each["processor"], each["wall"])
        for each in map(json.loads, Path(path).read_text().splitlines())
    ]
    files: dict[str, Cost] = {}
    for test in tests:
        name = test.name.split("::")[0]
        found = files.get(name, Cost(name, 0.0, 0.0))
        files[name] = Cost(name, found.processor + test.processor, found.wall + test.wall)
    print(
        f"all: {sum(each.processor for each in tests):.1f} processor seconds of {sum(each.wall for each in tests):.1f}"
    )
    for kind, costs in ("files", list(files.values())), ("tests", tests):
        for title, rank in ("compute", Cost.computing), ("wait", Cost.waiting):
            print(f"\n{kind} that {title} longest\nprocessor   wait")
            for cost in sorted(costs, key=rank, reverse=True)[:NUM_SHOWN]:
                print(f"{cost.processor:9.2f} {cost.waiting():6.2f}  {cost.name}")


if __name__ == "__main__":
    main(sys.argv[1])
