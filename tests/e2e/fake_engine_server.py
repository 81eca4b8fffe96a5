"""Runs `jaxserve serve` with the fake executor: arguments are the config of each model and fake options as JSON.

A third argument, an Upgrade as JSON, makes it `jaxserve upgrade`.
"""

from __future__ import annotations

import sys

import msgspec

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.runtime.server import Upgrade, run_serve


class HowToReplace(msgspec.Struct):
    after_drain: bool = False


def main() -> int:
    config, *others = msgspec.json.decode(sys.argv[1], type=list[Config])
    fake = msgspec.json.decode(sys.argv[2], type=FakeOptions)
    upgrade = msgspec.json.decode(sys.argv[3], type=HowToReplace) if len(sys.argv) > 3 else None
    try:
        return run_serve(
            config, others, executor="fake", fake=fake, upgrade=upgrade and Upgrade(after_drain=upgrade.after_drain)
        )
    except StartupError as error:
        print(f"jaxserve: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
