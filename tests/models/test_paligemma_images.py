"""Prompts of PaliGemma, which are seen whole: what is refused, pages of other prompts, and keys that configs leave out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.config import Config, ImagesConfig, ModelConfig, SchedulerConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.prompt_images import PromptImage
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder
from jaxserve.runner.images.encoder import image_settings
from jaxserve.runner.images.served import with_served_images
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.admission import Admission
from jaxserve.scheduler.images.request_images import images_of
from jaxserve.types import RequestId
from tests.models.goldens import DATA

MODEL, ODD = DATA / "vision" / "paligemma_tiny", DATA / "vision" / "paligemma_odd_tiny"
ROOT = Path(__file__).parents[2]
INFO = ImageInfo(
    max_patches=8, max_tokens=8, cache_rows=8, merge=1, patch_bytes=4, is_bidirectional=True, whole_prompt_tokens=6
)


def message(*tokens: int) -> AddRequest:
    return AddRequest(RequestId("a"), list(tokens), EngineSamplingParams(max_tokens=2))


def test_every_token_of_a_prompt_sees_all_of_it_and_generated_tokens_see_earlier_ones() -> None:
    prompt = images_of(message(5, 6, 7, 8), INFO)
    assert prompt is not None
    assert prompt.key_ends(0, 6).tolist() == [4, 4, 4, 4, 5, 6]
    assert prompt.key_ends(2, 3).tolist() == [4, 4, 5] and prompt.key_ends(5, 2).tolist() == [6, 7]
    assert [prompt.cut_by(end) for end in (0, 4, 6)] == [None] * 3
    assert [prompt.cut_by(end) for end in (1, 3)] == [(0, 4)] * 2


def test_pages_of_a_prompt_have_its_digest_since_their_keys_depend_on_later_tokens() -> None:
    prompts = [images_of(message(5, 6, 7, last), INFO) for last in (8, 8, 9)]
    spans = [prompt.spans for prompt in prompts if prompt is not None]
    assert spans[0] == spans[1] != spans[2] and spans[0][0][:2] == (0, 4)


def test_a_prompt_that_no_step_holds_is_refused() -> None:
    admission = Admission(max_model_len=64, vocab_size=9, num_usable_tokens=64, max_requests=4, images=INFO)
    assert admission.rejection(message(*[1] * 6), 0) is None
    assert "sees prompts whole, and one step computes up to 6" in str(admission.rejection(message(*[1] * 7), 0))


def test_log_probabilities_of_prompts_are_refused() -> None:
    admission = Admission(max_model_len=64, vocab_size=9, num_usable_tokens=64, max_requests=4, images=INFO)
    scored = msgspec.structs.replace(
        message(1, 1, 2), sampling=EngineSamplingParams(max_tokens=2, num_prompt_logprobs=0)
    )
    assert "sees prompts whole" in str(admission.rejection(scored, 0))


def test_a_step_and_a_window_hold_an_image_and_a_text() -> None:
    decoder = _served(MODEL)
    config = Config(model=ModelConfig(model="any"))
    small = replace(config, scheduler=SchedulerConfig(max_num_batched_tokens=23, max_num_seqs=1))
    with pytest.raises(ConfigError, match=r"an image of this model has up to 16 tokens.*; use 24"):
        image_settings(small, decoder, "cpu")
    narrow = replace(decoder, layers=(replace(decoder.layers[0], sliding_window=16), *decoder.layers[1:]))
    with pytest.raises(ConfigError, match="no more than the model's window of 16 tokens"):
        image_settings(config, narrow, "cpu")


def _served(path: Path) -> DecoderConfig:
    decoder, checkpoint = read_decoder(path)
    return with_served_images(ImagesConfig(), decoder, path, checkpoint)


def test_a_prompt_with_two_images_is_refused() -> None:
    admission = Admission(max_model_len=64, vocab_size=9, num_usable_tokens=64, max_requests=4, images=INFO)
    images = [PromptImage(start, 1, b"a", bytes(4), bytes(8)) for start in (0, 1)]
    two = msgspec.structs.replace(message(1, 1, 2), images=images)
    assert "the prompt has 2 images" in str(admission.rejection(two, 0))


def test_the_documented_chat_template_writes_prompts_as_transformers() -> None:
    source = re.search(r"```jinja\n(.*?)```", (ROOT / "docs" / "images.md").read_text(), re.DOTALL)
    assert source is not None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source[1].removesuffix("\n"))
    parts = [{"type": "text", "text": "caption en"}, {"type": "image"}]
    for content, expected in ((parts, "<image><bos>caption en\n"), ("answer", "<bos>answer\n")):
        messages = [{"role": "user", "content": content}]
        assert template.render(messages=messages, bos_token="<bos>", add_generation_prompt=True) == expected


def test_a_server_of_texts_alone_does_not_start() -> None:
    decoder, checkpoint = read_decoder(MODEL)
    assert decoder.has_whole_prompts
    with pytest.raises(CheckpointError, match="prompts of this model are seen whole"):
        with_served_images(ImagesConfig(limit_mm_per_prompt="image=0"), decoder, MODEL, checkpoint)


@pytest.mark.parametrize("value", [True, None])
def test_text_parts_may_say_that_they_attend_in_both_directions_and_omit_their_sizes(
    value: bool | None, tmp_path: Path
) -> None:
    text = {"model_type": "gemma", "use_bidirectional_attention": value}
    whole = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vision_config": {}}))
    config, _ = read_decoder(tmp_path)
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.vocab_size) == (2048, 18, 1, 257_152)
    assert config.has_whole_prompts and config.tied_embeddings


def test_other_models_that_attend_in_both_directions_are_refused(tmp_path: Path) -> None:
    for name in ("GemmaForCausalLM", "Gemma2ForCausalLM"):
        text = json.loads((ODD / "config.json").read_text())["text_config"]
        (tmp_path / "config.json").write_text(
            json.dumps({**text, "architectures": [name], "use_bidirectional_attention": True})
        )
        with pytest.raises(CheckpointError, match="use_bidirectional_attention is true"):
            read_decoder(tmp_path)
