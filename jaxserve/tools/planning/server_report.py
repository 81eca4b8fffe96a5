"""Prints the plan of several models: one verdict, a row for each model, then each model's own tables."""

from __future__ import annotations

from rich.text import Text

from jaxserve.tools.planning.fit import gib
from jaxserve.tools.planning.plan import Plan
from jaxserve.tools.planning.report import make_console, make_table, print_plan, show_table
from jaxserve.tools.planning.server_plan import ServerPlan


def print_server_plan(plan: ServerPlan) -> None:
    """Print `plan`: the verdict and what to change first, each model's tables after it."""
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
        table.add_row(name, *_row(one))
    shared = plan.sharing == "memory"
    title = "Memory, which the models share" if shared else "Memory of each device; each model has its own"
    show_table(table, title, console)
    for name, one in plan.models.items():
        console.print()
        print_plan(one, console, name)


def _row(plan: Plan) -> tuple[str, ...]:
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
