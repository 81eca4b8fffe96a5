"""What compressed-tensors' formats share in `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxserve.checkpoint.refusal import refusal

T = TypeVar("T")


def only_scheme(found: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], T]) -> T:
    """What `read` makes of every one of `config_groups`, given where it stands. Raises CheckpointError where they differ."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise refusal(".config_groups", groups, "a table of groups with `weights`")
    if found.get("transform_config"):
        raise refusal(".transform_config", found["transform_config"], "none")
    schemes = {read(f".config_groups.{name}", group) for name, group in groups.items()}
    if len(schemes) > 1:
        raise refusal(".config_groups", sorted(groups), "groups that are quantised alike")
    return schemes.pop()
