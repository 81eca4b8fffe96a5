"""The fields that all chunks and the reply of one OpenAI request begin with."""

from __future__ import annotations

import time
import uuid
from typing import Any

from jaxserve import __version__
from jaxserve.frontend.frontend import Frontend
from jaxserve.ipc.messages import ModelInfo


def heading(prefix: str, frontend: Frontend, model_info: ModelInfo, model: str | None) -> dict[str, Any]:
    """Return id (with `prefix`), time, model and fingerprint of a reply to a request for `model`."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": frontend.shown_name(model),
        # Changes when weights, precision, mesh or versions do.
        "system_fingerprint": f"jaxserve-{__version__}-{model_info.fingerprint}",
    }
