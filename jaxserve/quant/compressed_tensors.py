"""`quantization_config` of compressed-tensors, as far as its formats share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxserve.errors import CheckpointError
from jaxserve.quant.unsupported import unsupported

T = TypeVar("T")


def only_scheme(found: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], T]) -> T:
    """Return read(key, group) of `config_groups`, which must be the same for every group. Raises CheckpointError."""
    groups = _groups(found)
    if found.get("transform_config"):
        raise unsupported(".transform_config", found["transform_config"], "none")
    schemes = {read(f".config_groups.{name}", group) for name, group in groups.items()}
    if len(schemes) > 1:
        raise unsupported(".config_groups", sorted(groups), "groups that are quantised alike")
    return schemes.pop()


def unsupported_weights(found: Mapping[str, Any], supported: str) -> CheckpointError:
    """Return the error for groups that no format reads."""
    name, group = next(iter(_groups(found).items()))
    return unsupported(f".config_groups.{name}.weights", group.get("weights"), supported)


def _groups(found: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise unsupported(".config_groups", groups, "a table of groups with `weights`")
    return groups
