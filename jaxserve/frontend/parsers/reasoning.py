"""Reasoning before the reply, between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.frontend.parsers.scanner import SPACE, Reading, Scanner, show_but_trailing_space, stops


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning of a model family, before its answer."""

    name: str
    """Its name as a choice of `--reasoning-parser`."""
    aliases: tuple[str, ...] = ()
    """Names that vLLM has for it, which are choices as well."""
    opener: str
    closer: str
    other_openers: tuple[str, ...] = ()
    """Openers that a model writes by mistake."""
    other_closers: tuple[str, ...] = ()
    answer_tags: tuple[str, ...] = ()
    """Tags around the answer, which are no part of it."""
    starts_open: bool = False
    """True if a reply begins inside the reasoning unless its prompt ended it."""
    template_signs: tuple[str, ...] = ()
    """Texts that show in a chat template that the model uses this format; one is enough."""
    priority: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that a parser needs to see even if they are control tokens."""
        return (self.opener, self.closer, *self.other_openers, *self.other_closers, *self.answer_tags)

    def prefill(self, prompt_end: str) -> str:
        """Return the markers that the prompt has already written, as if the reply began with them.

        prompt_end: end of the prompt's text, control tokens included.
        """
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith((self.closer, *self.other_closers)):
            return self.opener + self.closer
        return self.opener if self.starts_open or prompt_end.endswith((self.opener, *self.other_openers)) else ""


def read_reasoning(scanner: Scanner, markers: ReasoningFormat) -> Reading[None]:
    """Read the reasoning that a reply may begin with, and drop white space beside its markers."""
    yield from scanner.run(SPACE)
    if not (yield from scanner.accept(markers.opener, *markers.other_openers)):
        return
    scanner.is_reasoning = True
    yield from scanner.run(SPACE)
    scanner.emit("syntax")
    ends = stops(markers.closer, *markers.other_closers)
    closer = yield from scanner.until(ends, show_but_trailing_space(scanner, "reasoning"))
    if not closer:
        scanner.emit("reasoning")
        return
    scanner.take(len(closer))
    scanner.is_reasoning = False
    yield from scanner.run(SPACE)
    scanner.emit("syntax")
