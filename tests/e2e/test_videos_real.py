"""Videos through the official client and a real server of a tiny random model: the tokens of transformers."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.http_server import Server
from tests.e2e.real_server import serving
from tests.e2e.test_images_real import data_url
from tests.engine.image_reader import limits
from tests.engine.model_engine import KV_CACHE_MEMORY
from tests.models.goldens import DATA
from tests.models.videos import FRAMES, video_file, with_videos

pytest.importorskip("av")
pytestmark = [pytest.mark.slow]

NAMES = [
    "qwen3_vl_tiny",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen2_5_vl_tiny", "internvl_tiny")),
]
OPTIONS: Any = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = with_videos(tmp_path_factory.mktemp("video"), name)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in limits(name).items()]
    flags += [f"--kv-cache-memory={KV_CACHE_MEMORY}", "--dtype=float32", "--served-model-name=tiny"]
    with serving(str(path), *flags, programs=programs) as running:
        yield running
        assert "Traceback" not in running.output, running.output


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": "data:video/webm;base64," + base64.b64encode(data).decode()}}


def chat(*parts: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "See "}, *parts, {"type": "text", "text": " here"}]}]


def test_a_video_gives_the_tokens_of_transformers_streamed_and_whole(
    name: str, server: Server, client: openai.OpenAI
) -> None:
    with np.load(DATA / "video" / f"{name}.npz", allow_pickle=False) as golden:
        outputs, prompt = golden["outputs"].tolist(), golden["ids"].tolist()
    whole = client.chat.completions.create(messages=chat(video_part(video_file())), **OPTIONS)
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    assert whole.choices[0].token_ids == outputs  # type: ignore[attr-defined]
    stream = client.chat.completions.create(messages=chat(video_part(video_file())), stream=True, **OPTIONS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    again = client.chat.completions.create(messages=chat(video_part(video_file())), **OPTIONS)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > len(prompt) // 2  # pages of the same frames
    assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0


def test_a_changed_frame_changes_the_reply_and_pictures_stand_beside_videos(client: openai.OpenAI) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": data_url(0)}}
    darker = [frame.point(lambda value: value // 4) for frame in FRAMES]
    found = [
        client.chat.completions.create(messages=chat(*parts), **OPTIONS).choices[0].token_ids  # type: ignore[attr-defined]
        for parts in (
            (video_part(video_file()),),
            (video_part(video_file(frames=darker)),),
            (picture, video_part(video_file())),
            (video_part(video_file()), picture),
        )
    ]
    assert len({tuple(each) for each in found}) == 4


def test_what_is_no_video_gets_400_with_its_place(server: Server, client: openai.OpenAI) -> None:
    video = video_part(video_file())
    for parts, place, reason in (
        ((video_part(b"hello"),), "video_url.url", "no video of a supported format"),
        ((video, video), "video_url.url", "at most 1 video (--limit-mm-per-prompt), got 2"),
        (({"type": "video_url"},), "video_url", "Missing required parameter"),
        (({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},), "video_url.url", "data: URL"),
        (({"type": "video_url", "video_url": {"url": ""}, "text": "a"},), "text", "has none"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=chat(*parts), **OPTIONS)
        assert caught.value.param == f"messages[0].content[{len(parts)}].{place}"
        assert reason in caught.value.message
    body = {"input": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}]}]}
    status, _, raw = server.request("POST", "/v1/responses", body)
    assert status == 400 and b"input[0].content[0].type" in raw
