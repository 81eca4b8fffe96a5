"""Tool calls of models whose chat template has no place for tools: the system message explains this format to them.

It is that of Hermes. The reply may be a bare JSON object as well, since weak models leave out the tags.
"""

from __future__ import annotations

from typing import Final

from jaxserve.frontend.parsers.bodies import JsonBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.formats.hermes import HERMES_TOOLS
from jaxserve.frontend.parsers.tool_format import ToolFormat

GENERIC_TOOLS: Final = ToolFormat(
    name="generic",
    sections=(Section(body=JsonBody()), *HERMES_TOOLS.sections),
    template_signs=(),
    syntaxes=HERMES_TOOLS.syntaxes,
    is_explained=True,
)
