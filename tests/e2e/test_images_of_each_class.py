"""A picture through a real server of a tiny model of each class that reads images: streams equal whole replies."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import ImageOps

from tests.e2e.http_server import Server
from tests.e2e.real_server import serving
from tests.e2e.test_images_real import OPTIONS, chat, data_url
from tests.engine.image_reader import IN_ENGINES, limits
from tests.engine.model_engine import KV_CACHE_MEMORY, MAX_IMAGE_PATCHES
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.unit.frontend.images.test_decode import file_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IN_CI = ("qwen3_vl_tiny", "gemma3_vision_tiny")
"""Images of any size, and images that are alike."""
NAMES = (
    *IN_CI,
    "idefics3_tiny",
    "qwen3_vl_moe_odd_tiny",
    "qwen3_omni_moe_odd_tiny",
    "qwen2_5_omni_odd_tiny",
    "cohere_compass_tiny",
    "mistral4_vision_odd_tiny",
    "muse_glimmer_vision_odd_tiny",
    "hyperclovax_vision_v2_tiny",
    "cosmos3_omni_odd_tiny",
    "cosmos3_edge_odd_tiny",
    "video_llama3_odd_tiny",
    "qwen2_vl_tiny",
    "mistral3_vision_odd_tiny",
    "pixtral_odd_tiny",
    "llava_tiny",
    "llava_next_tiny",
    "llava_onevision_tiny",
    "vipllava_tiny",
    "ovis2_tiny",
    "internvl_tiny",
    "glm4v_tiny",
    "aya_vision_tiny",
    "cohere2_vision_odd_tiny",
    "lfm2_vl_odd_tiny",
    "lfm3_vl_odd_tiny",
    "llama4_vision_odd_tiny",
    "glm_ocr_tiny",
    "paddleocr_vl_odd_tiny",
    "lighton_ocr_tiny",
    "qianfan_ocr_tiny",
    "granite_docling_odd_tiny",
    "qwen3_5_vision_tiny",
    "minicpm_v4_6_tiny",
    "gemma4_vision_tiny",
    "gemma4_vision_odd_tiny",
    "gemma4_unified_vision_odd_tiny",
)
"""SmolVLM is in test_images_real."""
INVERTED = "data:image/png;base64," + base64.b64encode(file_of(ImageOps.invert(picture(30, 45, 0)))).decode()


@pytest.fixture(
    scope="module",
    params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES],
)
def server(request: Any, programs: Path) -> Iterator[Server]:
    sizes = limits(request.param) | ({} if request.param in IN_ENGINES else {"max_num_seqs": 1})  # fewer programs
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    if request.param == "qwen3_vl_tiny":
        flags += [f"--max-image-patches={MAX_IMAGE_PATCHES}"]
    flags += [f"--kv-cache-memory={KV_CACHE_MEMORY}", "--dtype=float32", "--served-model-name=tiny"]
    with serving(str(DATA / "vision" / request.param), *flags, programs=programs) as running:
        yield running
        assert "Traceback" not in running.output, running.output


def scores(choice: Any) -> list[float]:
    """Return the log probabilities of a choice's tokens."""
    return [each.logprob for each in choice.logprobs.content] if choice.logprobs is not None else []


def test_a_stream_equals_the_whole_reply_and_another_picture_changes_it(server: Server) -> None:
    options: Any = {**OPTIONS, "logprobs": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        found = []
        for urls in ((data_url(0),), (data_url(1), data_url(0)), (INVERTED,)):
            whole = client.chat.completions.create(messages=chat(*urls), **options)
            stream = client.chat.completions.create(
                messages=chat(*urls), stream=True, stream_options={"include_usage": True}, **options
            )
            chunks = list(stream)
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
            assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
            assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
            assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
            streamed = [score for choice in choices for score in scores(choice)]
            assert streamed == pytest.approx(scores(whole.choices[0]), abs=1e-3)
            found.append(streamed)
    assert found[0] != pytest.approx(found[2], abs=1e-2)  # as many tokens, so only the picture differs
    assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0
