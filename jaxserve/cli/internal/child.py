"""`python -m jaxserve.cli.internal.child`: the `jaxserve` command, which gets SIGTERM when its parent process dies."""

from __future__ import annotations

import signal

from jaxserve.cli.main import main
from jaxserve.parent import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    raise SystemExit(main())
