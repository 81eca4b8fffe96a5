"""The page at `/` in a real browser: it asks for the key, streams, stops, and draws the engine, without a complaint."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.chromium import BROWSER, Tab, tab
from tests.e2e.http_server import Server, running
from tests.e2e.path_prefix import below

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium"),
]
_NAMELESS = """[...document.querySelectorAll('button, input, select, textarea, a, [role=tabpanel], [role=log]')]
    .filter(one => one.checkVisibility() && !one.ariaLabel && !one.getAttribute('aria-labelledby')
        && !(one.labels && one.labels.length) && !one.textContent.trim()).map(one => one.outerHTML)"""
_CONTRAST = """(() => {
    const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
        .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
    const back = (one) => { const color = getComputedStyle(one).backgroundColor;
        return color === 'rgba(0, 0, 0, 0)' && one.parentElement ? back(one.parentElement) : color; };
    const ink = (one) => getComputedStyle(one)[one instanceof SVGElement ? 'fill' : 'color'];
    return [...document.querySelectorAll('button, a, label, summary, .hint, .pill, .who, .card span, svg text')]
        .filter(one => one.checkVisibility() && one.textContent.trim() && !one.disabled).map(one => {
            const [a, b] = [light(ink(one)), light(back(one))];
            return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), one.outerHTML]; })
        .filter(([ratio]) => ratio < 4.5); })()"""


async def check_access(page: Tab) -> None:
    """Every control has a name, and text stands out from its background in both schemes."""
    assert await page.run(_NAMELESS) == []
    assert await page.run("document.documentElement.scrollHeight <= innerHeight"), "two scroll bars beside each other"
    for scheme in ("light", "dark"):
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert await page.run(_CONTRAST) == []


async def stop_a_reply(page: Tab, server: Server) -> None:
    """Stop ends a reply at the server; what was written stays."""
    await page.run("document.getElementById('max_completion_tokens').value = '400'")
    await page.run("document.getElementById('prompt').value = 'Go on'")
    await page.run("document.getElementById('send').click()")
    await page.until("[...document.querySelectorAll('.message.assistant .body')].at(-1).textContent.length > 3")
    await page.run("document.getElementById('stop').click()")
    await page.until(
        "[...document.querySelectorAll('.message.assistant .tail span')].at(-1)?.textContent === 'stopped'"
    )
    server.api_key = "secret"
    await asyncio.to_thread(server.await_metric, "client_disconnects_total", 1)
    await asyncio.to_thread(server.await_metric, "num_requests_running", 0)


async def check_history(page: Tab, url: str) -> None:
    """The conversation is there when the page is opened again."""
    await page.open(url)
    await page.until("document.getElementById('status').textContent === 'ready'")
    await page.run("document.querySelector('#conversations li button').click()")
    texts = "[...document.querySelectorAll('.message.user .body')].map(one => one.textContent)"
    assert await page.run(texts) == ["Hello", "Go on"]


async def test_a_new_user_chats_and_watches_the_engine() -> None:
    with running({"device_seconds": 0.01}, server={"api_key": "secret"}) as server:
        async with tab() as page, below("/models/chat/", server.url) as url:
            await page.open(url)
            await page.until("document.getElementById('key-dialog').open")
            await page.run("document.getElementById('key').value = 'secret'")
            await page.run("document.querySelector('#key-dialog button[value=ok]').click()")
            await page.until("document.getElementById('status').textContent === 'ready'")
            assert page.complaints == [
                "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
            ]
            assert await page.run("sessionStorage.length") == 1
            await page.run("document.getElementById('max_completion_tokens').value = '8'")
            await page.run("document.getElementById('prompt').value = 'Hello'")
            await page.run("document.getElementById('send').click()")
            await page.until(
                "document.querySelector('.message.assistant .tail span')?.textContent.includes('8 tokens')"
            )
            assert await page.run("document.querySelector('.message.user .body').textContent") == "Hello"
            assert await page.run("document.querySelectorAll('#conversations li').length") == 1
            await check_access(page)
            await stop_a_reply(page, server)
            await check_history(page, url)
            await page.run("document.getElementById('tab-engine').click()")
            await page.until("document.querySelector('#batches svg') && document.querySelector('#startup svg')")
            await page.until("document.querySelector('#programs tbody').textContent.includes('decode')")
            await check_access(page)
            assert len(await page.screenshot()) > 10_000
            assert len(page.complaints) == 1, page.complaints


_DROP = """(() => { const data = new DataTransfer();
    data.items.add(new File([new Uint8Array([1, 2, 3])], 'cat.png', { type: 'image/png' }));
    document.getElementById('messages').dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true }));
})()"""


async def test_two_tabs_keep_each_others_conversations() -> None:
    with running() as server:
        async with tab() as page:
            await page.open(f"{server.url}/")
            await page.until("document.getElementById('status').textContent === 'ready'")
            await page.run("""localStorage.setItem('jaxserve-chats',
                JSON.stringify([{ id: 'other', messages: [{ role: 'user', content: 'of the other tab' }] }]))""")
            await page.run("dispatchEvent(new StorageEvent('storage', { key: 'jaxserve-chats' }))")
            await page.run("document.getElementById('prompt').value = 'of this tab'")
            await page.run("document.getElementById('send').click()")
            stored = "JSON.parse(localStorage.getItem('jaxserve-chats')).map(one => one.messages[0].content)"
            assert await page.run(stored) == ["of this tab", "of the other tab"]


async def test_regenerate_within_a_reply_shows_the_new_one_as_it_comes() -> None:
    with running({"device_seconds": 0.01}) as server:
        async with tab() as page:
            await page.open(f"{server.url}/")
            await page.until("document.getElementById('status').textContent === 'ready'")
            await page.run("document.getElementById('max_completion_tokens').value = '400'")
            await page.run("document.getElementById('prompt').value = 'Hello'")
            await page.run("document.getElementById('send').click()")
            text = "[...document.querySelectorAll('.message.assistant .body')].at(-1).textContent"
            await page.until(f"{text}.length > 3")
            await page.run("document.getElementById('again').click()")
            await page.until(f"!document.getElementById('stop').hidden && {text}.length > 3")


async def test_a_dropped_picture_is_shown_and_sent_and_not_kept() -> None:
    with running() as server:
        async with tab() as page:
            await page.open(f"{server.url}/")
            await page.until("document.getElementById('status').textContent === 'ready'")
            await page.run(_DROP)
            await page.until("document.querySelectorAll('#pictures img').length === 1")
            await check_access(page)
            await page.run("document.getElementById('prompt').value = 'What is it?'")
            await page.run("document.getElementById('send').click()")
            await page.until("document.getElementById('notice').textContent.includes('image_url')")
            notice = await page.run("document.getElementById('notice').textContent")
            assert "messages[0].content[0].image_url.url' is an image" in notice, "the fake engine reads text only"
            assert await page.run("document.querySelectorAll('.message.user img').length") == 1
            assert await page.run("document.querySelectorAll('#pictures img').length") == 0
            assert "data:" not in await page.run("localStorage.getItem('jaxserve-chats')")


async def test_the_chosen_model_answers_and_is_the_one_in_the_picture() -> None:
    with running(others=["other"]) as server:
        async with tab() as page:
            await page.open(f"{server.url}/")
            await page.until("document.getElementById('status').textContent === 'ready'")
            assert await page.run("[...document.getElementById('model').options].map(one => one.value)") == [
                "tiny",
                "other",
            ]
            await page.run("document.getElementById('model').value = 'other'")
            await page.run("document.getElementById('max_completion_tokens').value = '8'")
            await page.run("document.getElementById('prompt').value = 'Hello'")
            await page.run("document.getElementById('send').click()")
            await page.until(
                "document.querySelector('.message.assistant .tail span')?.textContent.includes('8 tokens')"
            )
            assert server.metric('generation_tokens_total{engine="0",model_name="other"}') == 8
            await page.run("document.getElementById('tab-engine').click()")
            await page.until("document.querySelector('#programs tbody')?.textContent.includes('decode')")
            await page.run("document.getElementById('model').value = 'tiny'")
            await page.until("document.getElementById('programs').textContent.includes('no step yet')")
            assert page.complaints == []
