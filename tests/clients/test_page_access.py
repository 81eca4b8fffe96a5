"""The page at `/` by the rules of axe-core in a real browser: both views, both colour schemes, a wide and a narrow window."""

from __future__ import annotations

import json

import pytest

from tests.clients.lane import require_lane
from tests.clients.node_scripts import FOLDER, requires
from tests.e2e.chromium import BROWSER, Tab, tab
from tests.e2e.http_server import running

require_lane()

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium"),
    *requires("axe-core"),
]
AXE = FOLDER / "node_modules" / "axe-core" / "axe.min.js"
BROKEN_RULES = """axe.run(document, {resultTypes: ['violations']}).then(result => JSON.stringify(
    result.violations.map(rule => [rule.id, rule.nodes.map(node => node.html.slice(0, 200))])))"""
SIZES = {"wide": (1280, 860), "narrow": (360, 700)}


async def broken_rules(page: Tab) -> list[str]:
    """Return the rules that the page breaks, with their elements, in any size and colour scheme."""
    found = []
    for size, (width, height) in SIZES.items():
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "narrow"}
        await page.call("Emulation.setDeviceMetricsOverride", **metrics)
        for scheme in ("light", "dark"):
            await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            found += [f"{size} {scheme} {rule}" for rule in json.loads(await page.run(BROKEN_RULES))]
    return found


async def test_both_views_keep_the_rules_of_axe() -> None:
    with running({"device_seconds": 0.01}) as server:
        async with tab() as page:
            await page.open(f"{server.url}/")
            await page.until("document.getElementById('status').textContent === 'ready'")
            await page.run(f"{AXE.read_text(encoding='utf-8')};1")
            await page.run("document.getElementById('max_completion_tokens').value = '8'")
            await page.run("document.getElementById('prompt').value = 'Hello'")
            await page.run("document.getElementById('send').click()")
            await page.until(
                "document.querySelector('.message.assistant .tail span')?.textContent.includes('8 tokens')"
            )
            await page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
            assert await broken_rules(page) == []
            await page.run("document.getElementById('tab-engine').click()")
            await page.until("document.querySelector('#programs tbody')?.textContent.includes('decode')")
            assert await broken_rules(page) == []
            await page.run("document.querySelector('main').replaceWith(...document.querySelector('main').children)")
            assert any("landmark-one-main" in rule for rule in await broken_rules(page)), "a fault would be found"
