"""`jaxserve replay`: run the scheduler again over a flight record."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from jaxserve import __version__
from jaxserve.flight.record import FlightRecord, read_record
from jaxserve.flight.replay import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and what is printed of it."""
    parser.add_argument("file", metavar="FILE", type=Path, help="record that an engine has written (*.flight)")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print the last N calls of the scheduler as well, one per line"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print whether the plans are equal; returns 0 if they are, else 1. Raises RecordError."""
    record = read_record(arguments.file)
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.time))
    last = record.first_step + record.num_steps - 1
    print(f"{record.model}, jaxserve {record.version}, written {written} ({record.reason})")
    print(f"{record.num_steps} steps, {record.first_step} to {last}, and {len(record.calls)} calls of the scheduler")
    if record.version != __version__:
        print(f"this is jaxserve {__version__}: a difference may be a change of its scheduler")
    if arguments.show > 0:
        print("\n".join(list(call_lines(record))[-arguments.show :]))
    difference = replay(record)
    print("first step that differs: 0, all are equal" if difference is None else f"first difference: {difference}")
    return 0 if difference is None else 1


def call_lines(record: FlightRecord) -> Iterator[str]:
    """Yield a line for each call, with the number of the step that is planned next."""
    step = record.first_step
    for call in record.calls:
        value, text = call.value, ""
        match call.kind:
            case "add":
                text = f"{value['request_id']}, {value['num_prompt_tokens']} tokens"
                text += f", at most {value['sampling']['max_tokens']} to generate"
            case "schedule" if value["plan"] is not None:
                plan = value["plan"]
                tokens = zip(plan["request_ids"], plan["num_scheduled_tokens"], strict=True)
                rows = " ".join(f"{key}:{count}" for key, count in tokens)
                text = f"{plan['kind']}/{plan['bucket']} x{plan['num_steps']}  {rows}"
            case "schedule":
                text = "nothing"
            case "update":
                text = f"{1000 * value['device_seconds']:.1f} ms"
            case "poll_grammars":
                text = f"{len(value.get('ready', ()))} masks ready"
            case _:
                text = str(value.get("argument"))
        yield f"{step:>8} {call.kind:<18} {text}" + (f"  raised {call.error}" if call.error else "")
        step += call.kind == "schedule" and value["plan"] is not None
