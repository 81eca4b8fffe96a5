"""Models start without any setting, for texts if their images cannot be served; images that were asked for are an error."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import (
    CompileConfig,
    Config,
    ImagesConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TierConfig,
)
from jaxserve.config.devices import HostsConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder
from jaxserve.runner.images.encoder import check_images, image_settings
from jaxserve.runner.images.served import with_served_images
from tests.models.goldens import DATA

MODEL = DATA / "vision" / "qwen3_vl_tiny"


def served(path: Path, limit: str | None = None) -> DecoderConfig:
    decoder, checkpoint = read_decoder(path)
    return with_served_images(ImagesConfig(limit_mm_per_prompt=limit), decoder, path, checkpoint)


def changed(folder: Path, file: str, **values: Any) -> Path:
    """Return a copy of the model with other values in one of its files."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    return folder


def test_images_are_served_unless_the_limit_is_0() -> None:
    assert served(MODEL).vision is not None and served(MODEL, "image=3").vision is not None
    assert served(MODEL, "image=0").vision is None


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("preprocessor_config.json", {"image_processor_type": "OtherImageProcessor"}),
        ("preprocessor_config.json", {"patch_size": 7}),
        ("config.json", {"vision_config": {"hidden_size": 24, "hidden_act": "unknown", "out_hidden_size": 48}}),
    ],
)
def test_what_cannot_be_served_is_left_out_with_a_warning_unless_it_was_asked_for(
    file: str, values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path, file, **values)
    with caplog.at_level(logging.WARNING):
        assert served(path).vision is None
    assert "images are not served, texts are" in caplog.text
    with pytest.raises(CheckpointError, match=r"--limit-mm-per-prompt image=2: .*; use image=0"):
        served(path, "image=2")
    assert served(path, "image=0").vision is None


def test_a_model_without_a_tower_needs_no_warning_and_refuses_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert served(DATA / "qwen3_tiny").vision is None
    assert not caplog.text
    with pytest.raises(CheckpointError, match="the model reads no images"):
        served(DATA / "qwen3_tiny", "image=1")


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        (
            "--num-hosts 2",
            {
                "hosts": HostsConfig(num_hosts=2, host_rank=0, coordinator="127.0.0.1:1"),
                "parallel": ParallelConfig(tensor_parallel_size=2),
            },
        ),
        ("--data-parallel-size 2", {"parallel": ParallelConfig(data_parallel_size=2)}),
        ("--deterministic", {"compile": CompileConfig(deterministic=True)}),
        ("--kv-offload-memory", {"tiers": TierConfig(kv_offload_memory=1 << 20)}),
    ],
)
def test_settings_that_do_not_work_with_images_name_the_way_out(flag: str, settings: dict[str, Any]) -> None:
    plain = Config(model=ModelConfig(model=str(MODEL)))
    with pytest.raises(ConfigError, match=f"^{flag}.*use --limit-mm-per-prompt image=0"):
        check_images(replace(plain, **settings), served(MODEL))
    check_images(replace(plain, **settings), served(MODEL, "image=0"))
    check_images(plain, served(MODEL))
    for drafts in ({}, {"speculative_model": "draft"}, {"speculative_method": "mtp"}):
        scheduler = SchedulerConfig(num_speculative_tokens=3, **drafts)  # type: ignore[arg-type]
        check_images(replace(plain, scheduler=scheduler), served(MODEL))


def test_a_step_holds_an_image_that_is_seen_whole_and_a_token_of_every_other_request() -> None:
    plain = Config(model=ModelConfig(model="model"))
    decoder = served(DATA / "vision" / "gemma3_vision_tiny")
    assert decoder.vision is not None
    tokens = decoder.vision.image_patches // decoder.vision.block  # type: ignore[operator]
    assert image_settings(plain, decoder, "cpu") is plain  # 9 tokens
    large = replace(decoder, vision=replace(decoder.vision, image_patches=256 * decoder.vision.block))
    assert image_settings(plain, large, "cpu").scheduler.max_num_batched_tokens == 256 + 31
    small = replace(plain, scheduler=SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=33))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 40: .*; use 41, or --limit-mm-per-prompt image=0"):
        image_settings(small, decoder, "cpu")
    assert tokens == 9 and image_settings(small, served(MODEL), "cpu") is small


def test_kv_heads_that_the_heads_of_a_tower_do_not_share_are_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "vision" / "exaone4_5_odd_tiny", tmp_path, dirs_exist_ok=True)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["vision_config"]["num_key_value_heads"] = 4
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        (CheckpointError, ConfigError), match=r"num_key_value_heads is 4; supported: a divisor of num_heads \(6\)"
    ):
        served(tmp_path, "image=1")
