"""Models with recurrent layers: prompts in several steps, and greedy texts, against transformers."""

from __future__ import annotations

import pytest
from jaxserve_kernels.segments import CHUNK

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kv.states import UNIT_TOKENS
from jaxserve.models.registry import decoder_config
from jaxserve.runner.limits import check_cache
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel

HYBRIDS = (
    "qwen3_next_tiny",
    "qwen3_5_odd_tiny",
    "qwen3_5_moe_tiny",
    "lfm2_odd_tiny",
    "granitemoehybrid_tiny",
    "falcon_h1_odd_tiny",
)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_in_steps_gives_the_greedy_text_of_transformers(name: str) -> None:
    """The prompt of 40 tokens is cut within a chunk of the recurrent kernels."""
    golden = golden_checkpoint(name)
    assert TinyModel(golden.path).greedy(golden.prompt_ids, 64, chunk=20) == golden.output_ids.tolist()


def test_snapshots_are_at_borders_of_chunks() -> None:
    assert UNIT_TOKENS % CHUNK == 0


LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv", "conv"]}, "at least one layer of full_attention"),
        ({"layer_types": ["conv", "sliding_attention"]}, "conv and full_attention only"),
        ({"layer_types": ["conv"]}, "a list with one entry for each of the 2 layers"),
        ({"conv_L_cache": 1}, "an integer from 2 to 64"),
    ],
)
def test_layers_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**LFM2, **keys})


@pytest.mark.parametrize("settings", [ModelConfig(model="m", lora_modules="a=b"), ModelConfig(model="m", max_loras=2)])
def test_adapters_are_refused(settings: ModelConfig) -> None:
    config = Config(model=settings)
    with pytest.raises(ConfigError, match="--lora-modules, --max-loras: not with a model with recurrent states"):
        check_cache(config, decoder_config({**LFM2, "layer_types": ["conv", "full_attention"]}))
