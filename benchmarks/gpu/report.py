"""All findings of a run as JSON and as a Markdown page."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.records import Record, Value
from jaxserve.tools.markdown import markdown_table


def as_json(heading: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Everything, record by record."""
    parts = [
        {
            "part": outcome.part.name,
            "status": outcome.status,
            "is_right": outcome.is_right if outcome.part.is_check else None,
            "seconds": outcome.seconds,
            "records": [dataclasses.asdict(record) for record in outcome.records],
        }
        for outcome in outcomes
    ]
    return json.dumps({**heading, "parts": parts}, indent=1) + "\n"


def as_markdown(heading: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """A summary, then the tables of every part."""
    lines = [", ".join(f"{name} {value}" for name, value in heading.items()) + ".", _summary(outcomes)]
    for outcome in outcomes:
        lines.append(f"## {outcome.part.title}")
        lines += _checks(outcome.records)
        tables: dict[str, list[Mapping[str, Value]]] = {}
        for record in outcome.records:
            if record.kind == "figure":
                tables.setdefault(record.name, []).append(record.values)
        lines += [f"{name}:\n\n{_table(rows)}" for name, rows in tables.items()]
        notes = [f"- {record.text}" for record in outcome.records if record.kind == "note"]
        notes += [
            f"- **missing**: {record.name}: {record.text}" for record in outcome.records if record.kind == "problem"
        ]
        if notes:
            lines.append("\n".join(notes))
    return "\n\n".join(lines) + "\n"


def shown(value: Value) -> str:
    """Three digits are more than these measurements are good for."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    if digits > 6:
        return f"{value:.1e}"
    return f"{value:,.{max(0, digits)}f}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        checks = [record for record in outcome.records if record.kind == "check"]
        passed = f"{sum(bool(check.passed) for check in checks)} of {len(checks)}" if checks else "-"
        figures = sum(record.kind == "figure" for record in outcome.records)
        rows.append([outcome.part.name, outcome.status, f"{outcome.seconds:.0f}", passed, str(figures)])
    return markdown_table(("part", "status", "seconds", "checks passed", "figures"), rows)


def _checks(records: Sequence[Record]) -> list[str]:
    """Return the number of passed checks, and every failed one."""
    checks = [record for record in records if record.kind == "check"]
    if not checks:
        return []
    failed = [record for record in checks if not record.passed]
    lines = [f"{len(checks) - len(failed)} of {len(checks)} checks passed."]
    if failed:
        lines.append(_table([{"failed": record.name, **record.values} for record in failed]))
    return lines


def _table(rows: Sequence[Mapping[str, Value]]) -> str:
    """Columns in the order in which rows bring them up."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    body = [[shown(row.get(name)) for name in columns] for row in rows]
    return markdown_table([name.replace("_", " ") for name in columns], body)
