"""Notes of a plan about the drafts of an engine."""

from __future__ import annotations

from jaxserve.config import Config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.tools.planning.devices import Device
from jaxserve.tools.planning.fit import planned_draft


def drafter_notes(config: Config, decoder: DecoderConfig, device: Device) -> tuple[str, ...]:
    """Return a note for an engine with a drafter. Raises StartupError."""
    draft = planned_draft(config, decoder, device)
    if draft is None:
        return ()
    drafter = "draft model" if config.scheduler.speculative_method == "auto" else "MTP layer"
    keys = f"; the KV cache has the {drafter}'s keys as well" if draft.skeleton.config.cache.groups else ""
    return (f"the speeds are those of steps without drafts{keys}",)
