"""Output on a terminal and into a pipe."""

from __future__ import annotations

import io

from jaxserve.tools.client import OutputDelta
from jaxserve.tools.terminal.reply import DIM, PLAIN, Screen

PIECES = (
    OutputDelta(0, reasoning="let me "),
    OutputDelta(0, reasoning="think"),
    OutputDelta(0, text="Par"),
    OutputDelta(0, text="is"),
)


def shown(*deltas: OutputDelta, is_terminal: bool) -> str:
    output = io.StringIO()
    output.isatty = lambda: is_terminal  # type: ignore[method-assign]
    screen = Screen(output)
    for delta in deltas:
        screen.show(delta)
    screen.end()
    screen.remark("a remark")
    return output.getvalue()


def test_reasoning_and_remarks_are_dim_on_a_terminal() -> None:
    expected = f"{DIM}let me think{PLAIN}\n\nParis\n{DIM}a remark{PLAIN}\n"
    assert shown(*PIECES, is_terminal=True) == expected


def test_pipes_get_the_text_alone() -> None:
    assert shown(*PIECES, is_terminal=False) == "Paris\n"


def test_reasoning_that_is_stopped_leaves_no_dim_terminal() -> None:
    assert shown(*PIECES[:2], is_terminal=True).startswith(f"{DIM}let me think{PLAIN}\n")


def test_a_reply_cannot_control_the_terminal() -> None:
    text = "a\x1b]0;title\x07b\x9b2Jc\rd\te\nf\n"
    assert shown(OutputDelta(0, text=text), is_terminal=False) == "a]0;titleb2Jcd\te\nf\n"
