"""A setting is one field of its section in config/, an output format one file: nothing else changes, and users find them everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.additions.overlay import Overlay, unnamed
from tests.e2e.http_server import TOKENIZER, await_ready, fake_server_command, launched

pytestmark = pytest.mark.slow

SHOUT = '''"""Tool calls of a family that shouts: `CALL f {...} END`."""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import HeaderBody
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.tool_format import CallSyntax, ToolFormat

SHOUT_TOOLS: Final = ToolFormat(
    name="shout",
    sections=(Section(opener="CALL", body=HeaderBody(re.compile(r"\\\\s*(?P<name>\\\\w+)\\\\s*")), closer="END"),),
    template_signs=("CALL name",),
    syntaxes=(CallSyntax(begin="CALL", before=" ", between=" ", after=" END", is_name_quoted=False),),
)
'''.replace("\\\\", "\\")
REPLY = 'One moment. CALL get_weather {"city": "Paris"} END'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Write CALL name {...} END {% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def test_a_setting_is_one_field(overlay: Overlay) -> None:
    field = '    patience: int = option(7, ge=1, le=99, help="steps to wait for nothing in particular")'
    overlay.insert("jaxserve/config/scheduler.py", field, before="max_num_seqs: int | None = option(")
    assert unnamed(overlay, "a setting") == set()
    usage = overlay.run("-m", "jaxserve.cli.main", "serve", "--help")
    assert "--patience" in usage
    assert "steps to wait for nothing in particular" in " ".join(usage.split())
    overlay.run("-m", "jaxserve.cli.internal.reference", "docs/reference")
    page = (overlay.root / "docs" / "reference" / "config.md").read_text("utf-8")
    assert "| `--patience` | `patience` | `JAXSERVE_PATIENCE` | `7` |" in page


def test_an_output_format_is_one_file(overlay: Overlay, tmp_path: Path) -> None:
    overlay.add("jaxserve/frontend/parsers/formats/shout.py", SHOUT)
    assert unnamed(overlay, "a tool-call or reasoning parser") == set()
    assert "shout" in overlay.run("-m", "jaxserve.cli.main", "serve", "--help")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    end, start = 2, 1
    script = [*load_tokenizer(folder).encode(f"assistant\n{REPLY}", add_special_tokens=False), end]
    fake = {"vocab_size": 397, "num_blocks": 2048, "script": {"cue": start, "token_ids": script}}
    command = fake_server_command(
        {
            "model": {"model": str(folder), "served_model_name": "tiny", "chat_template": str(template)},
            "server": {"port": 0, "uds_dir": str(tmp_path)},
        },
        fake,
    )
    with launched(command, overlay.root, overlay.python_path) as server:
        await_ready(server)
        assert "output format: tool calls shout" in server.output
        body = {"model": "tiny", "messages": [{"role": "user", "content": "The weather?"}], "tools": [TOOL]}
        status, _, reply = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, reply
    [choice] = json.loads(reply)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert choice["message"]["content"] == "One moment."
