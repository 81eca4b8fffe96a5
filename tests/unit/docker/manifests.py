"""The documents of docker/kubernetes, and the pods that they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docker" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod template, with its place in the files."""

    place: str
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """The container of the server."""
        (container,) = self.spec["containers"]
        found: dict[str, Any] = container
        return found

    @property
    def serves_http(self) -> bool:
        return "readinessProbe" in self.container

    def limit(self, resource: str) -> int:
        """Return the number of devices that the pod asks for."""
        return int(self.container["resources"]["limits"].get(resource, 0))


def documents(file: Path) -> list[dict[str, Any]]:
    """Return the documents of a file."""
    return list(yaml.load_all(file.read_text(encoding="utf-8"), _LOADER))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod template inside a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("template", "leaderTemplate", "workerTemplate"):
                yield inner
            else:
                yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def pods() -> list[Pod]:
    """Return the pods of all files."""
    return [
        Pod(f"{file.stem}-{document['kind']}-{number}", template)
        for file in FILES
        for document in documents(file)
        for number, template in enumerate(templates(document))
    ]
