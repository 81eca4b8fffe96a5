"""Prints the plan of one model, or of several of one server, as short tables with units."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxserve.tools.planning.fit import gib
from jaxserve.tools.planning.plan import MemoryPart, Plan
from jaxserve.tools.planning.roofline import DecodeBound
from jaxserve.tools.planning.server_plan import ServerPlan

_BOUNDS = {"weights": "reading weights", "arithmetic": "arithmetic", "kv": "reading KV", "exchange": "collectives"}
_LEAST_WIDTH = 100
_PROGRAM_COLUMNS = ("arguments", "output", "aliased", "temporary", "code", "peak")
_SHORT_BOUNDS = {"weights": "weights", "arithmetic": "arithmetic", "kv": "KV", "exchange": "exchange"}


def make_console() -> Console:
    """Return the console that plans are printed on."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    return console


def print_plan(plan: Plan, console: Console | None = None, name: str | None = None) -> None:
    """Print `plan`: the verdict first, the advice last. name: of the model; None for that of its path."""
    console = console or make_console()
    _print_head(plan, console, name)
    _print_memory(plan, console)
    _print_programs(plan, console)
    if plan.fits:
        _print_steps(plan, console)
        _print_exchanges(plan, console)
        _print_speed(plan, console)
    if plan.notes:
        console.print()
    for note in plan.notes:
        console.print(f"note: {note}", style="dim")
    _print_advice(plan, console)


def print_server_plan(plan: ServerPlan) -> None:
    """Print `plan`: the verdict and what to change first, a row for each model, then each model's own tables."""
    console = make_console()
    verdict = Text("fit together", "bold green") if plan.fits else Text("do not fit together", "bold red")
    console.print(Text.assemble((" + ".join(plan.models), "bold"), f" on {plan.device}: ", verdict))
    if plan.reason:
        console.print(plan.reason)
    for change in plan.advice:
        console.print(f"what to change: {change}")
    if not plan.fits and not plan.advice:
        console.print("what to change: see the table of each model that does not fit")
    table = make_table("model", ">limit", ">weights", ">KV cache", ">workspace", ">free", "")
    for name, one in plan.models.items():
        table.add_row(name, *_server_row(one))
    shared = plan.sharing == "memory"
    title = "Memory, which the models share" if shared else "Memory of each device; each model has its own"
    show_table(table, title, console)
    for name, one in plan.models.items():
        console.print()
        print_plan(one, console, name)


def _server_row(plan: Plan) -> tuple[str, ...]:
    memory, limit = plan.memory, gib(plan.device.limit_bytes)
    verdict = "fits" if plan.fits else "does not fit"
    if memory is None:
        return (limit, gib(plan.weights_bytes), "-", "-", "-", verdict)
    return (
        limit,
        gib(memory.weights_bytes + memory.draft_bytes),
        gib(memory.kv_bytes + memory.image_bytes) if plan.task == "generate" or memory.kv_bytes else "-",
        gib(memory.workspace_bytes),
        gib(memory.free_bytes) if plan.fits else "-",
        verdict,
    )


def _print_head(plan: Plan, console: Console, name: str | None) -> None:
    device = plan.device
    title = device.title if device.count == 1 else f"{device.count} x {device.title}"
    if device.num_hosts > 1:
        title += f" of {device.num_hosts} hosts"
    verdict = Text("fits", "bold green") if plan.fits else Text("does not fit", "bold red")
    shown = Path(plan.model.path).name if name is None else f"{name} ({Path(plan.model.path).name})"
    console.print(Text.assemble((shown, "bold"), f" on {title}: ", verdict))
    if plan.reason:
        console.print(plan.reason)
    if device.count > 1:
        sizes = {
            "tensor": device.tensor_parallel_size,
            "data": device.data_parallel_size,
            "expert": device.expert_parallel_size,
        }
        console.print(" ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1))


def _print_memory(plan: Plan, console: Console) -> None:
    each = " of each device" if plan.device.count > 1 and plan.device.name != "cpu" else ""
    table = make_table("", ">", "")
    memory, weights = plan.memory, plan.weights_bytes
    table.add_row("limit", gib(plan.device.limit_bytes), _limit_text(plan))
    table.add_row("weights", gib(weights if memory is None else memory.weights_bytes), _weights_text(plan))
    if memory is not None and memory.draft_bytes:
        table.add_row(
            "drafts", gib(memory.draft_bytes), "weights of the draft model, EAGLE-3 head, MTP layer or drafter"
        )
    if memory is None:
        table.add_row("KV cache", "-", f"{gib(plan.kv_bytes_per_token)} a token")
    elif plan.cache is None:
        if memory.kv_bytes:
            table.add_row("KV pages", gib(memory.kv_bytes), "keys and values of the texts of one step")
    else:
        cache = plan.cache
        pages = f"{cache.num_blocks:,} pages of {cache.block_size}, {cache.num_tokens:,} tokens"
        pages += "".join(f"; {count:,} pages for windows of {window:,} tokens" for window, count in cache.windows)
        if cache.num_state_slots:
            pages += f"; {cache.num_state_slots:,} states of {gib(cache.state_slot_bytes)}"
        table.add_row("KV cache", gib(memory.kv_bytes), f"{cache.dtype}, {gib(cache.bytes_per_token)} a token: {pages}")
        if memory.image_bytes:
            table.add_row(
                "images",
                gib(memory.image_bytes),
                "embeddings that are kept (--image-cache-memory), and activations between parts of a call",
            )
    if memory is not None:
        table.add_row("workspace", gib(memory.workspace_bytes), _workspace_text(plan, memory))
        if plan.fits:
            table.add_row("free", gib(memory.free_bytes), "")
    show_table(table, f"Memory{each}", console)


def _limit_text(plan: Plan) -> str:
    device = plan.device
    if device.limit_bytes == device.memory_bytes:
        return "free memory" if device.name == "cpu" else "what the runtime hands out"
    return f"{device.limit_bytes / device.memory_bytes:.0%} of {gib(device.memory_bytes)}"


def _weights_text(plan: Plan) -> str:
    model, stored = plan.model, ""
    if model.stored_bytes is not None:
        stored = f"; stored as {', '.join(model.stored_dtypes)}: {gib(model.stored_bytes)}"
    return f"{plan.weights_stored_as}, {model.num_parameters:,} parameters{stored}"


def _workspace_text(plan: Plan, memory: MemoryPart) -> str:
    if memory.workspace_is == "estimated":
        return "estimated from shapes"
    return f"as compiled: {max(plan.programs, key=lambda program: program.peak_bytes).name}"


def _print_programs(plan: Plan, console: Console) -> None:
    if not plan.programs:
        return
    table = make_table("program", *(f">{name}" for name in _PROGRAM_COLUMNS))
    for program in plan.programs:
        name, *sizes = astuple(program)[: len(_PROGRAM_COLUMNS) + 1]
        table.add_row(name, *map(gib, sizes))
    show_table(table, "Programs, by the device's compiler", console)


def _print_steps(plan: Plan, console: Console) -> None:
    step = plan.step
    if step is None:
        return
    if plan.task == "embed":
        texts = f"{' '.join(map(str, step.mixed_tokens))} tokens, of up to {step.max_num_seqs:,} texts"
        table = make_table("", "")
        table.add_row("embed", texts)
        table.add_row("a text", f"up to {step.max_model_len:,} tokens")
        show_table(table, "Step shapes", console)
        return
    table = make_table("", "")
    table.add_row("decode", f"{' '.join(map(str, step.decode_rows))} rows")
    table.add_row("mixed", f"{' '.join(map(str, step.mixed_tokens))} tokens")
    show_table(table, "Step shapes", console)
    table = make_table(">length", ">requests", "limited by")
    for row in plan.concurrency:
        limit = "KV cache" if row.limited_by == "kv" else f"--max-num-seqs {step.max_num_seqs}"
        table.add_row(f"{row.length:,}", f"{row.num_requests:,}", limit)
    show_table(table, "Requests at once", console)


def _print_exchanges(plan: Plan, console: Console) -> None:
    if not plan.exchanges:
        return
    table = make_table("step", "", "collective", ">number", ">devices", ">array", ">sent by a device")
    for step in plan.exchanges:
        name = step.step
        for each in step.collectives:
            sizes = (f"{each.count:,}", str(each.num_devices), gib(each.array_bytes), gib(each.sent_bytes))
            table.add_row(name, each.name, each.kind, *sizes)
            name = ""
        total = sum(each.sent_bytes for each in step.collectives)
        table.add_row("", "", f"at least {_time(step.seconds)}", "", "", "", gib(total))
    show_table(table, "Collectives of a step", console)


def _print_speed(plan: Plan, console: Console) -> None:
    rates = plan.device.rates
    if not plan.decode or rates is None:
        return
    lengths = list(dict.fromkeys(bound.context for bound in plan.decode))
    table = make_table(">requests", *(f">{length:,} tokens   " for length in lengths))
    for batch in dict.fromkeys(bound.num_requests for bound in plan.decode):
        row = [bound for bound in plan.decode if bound.num_requests == batch]
        if any(bound.fits for bound in row):
            table.add_row(str(batch), *map(_decode_cell, row))
    show_table(table, "Decode at best: tok/s, and what limits it, by length of the requests", console)
    table = make_table(">tokens", ">time", ">tok/s", "limited by")
    for prompt in plan.prefill:
        bound = _BOUNDS[prompt.limited_by]
        table.add_row(f"{prompt.num_tokens:,}", _time(prompt.seconds), _rate(prompt.tokens_per_s), bound)
    show_table(table, "Prefill at best, one prompt", console)
    flops = rates.of(plan.arithmetic)
    console.print(
        f"at {rates.bytes_per_s / 1e9:,.0f} GB/s and {flops / 1e12:,.4g} TFLOP/s {plan.arithmetic} "
        f"({rates.source}); launches, sampling and latencies of collectives not counted",
        style="dim",
    )


def _decode_cell(bound: DecodeBound) -> str:
    return f"{_rate(bound.tokens_per_s)} {_SHORT_BOUNDS[bound.limited_by]:<10}" if bound.fits else f"{'-':<12}"


def _print_advice(plan: Plan, console: Console) -> None:
    if plan.fits:
        return
    if not plan.advice:
        console.print("\nNo change that was tried makes it fit.")
        return
    table = make_table("change", ">context", ">KV cache, tokens")
    for advice in plan.advice:
        table.add_row(advice.change, f"{advice.max_model_len:,}", f"{advice.num_kv_tokens:,}")
    show_table(table, "What would fit", console)


def show_table(table: Table, title: str, console: Console) -> None:
    """Print a table below its title."""
    console.print(f"\n{title}", style="bold")  # a table's own title is wrapped to the table's width
    console.print(table)


def make_table(*columns: str) -> Table:
    """Return a table with these headers; a leading `>` aligns a column to the right."""
    table = Table(
        box=None,
        show_header=any(column.strip(">") for column in columns),
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        is_right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if is_right else "left", no_wrap=is_right)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"
