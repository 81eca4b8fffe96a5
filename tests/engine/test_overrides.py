"""An engine serves, and takes new weights, with the config.json that `--hf-overrides` makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.checkpoint.source import resolve_model
from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig, SchedulerConfig
from jaxserve.executor.local import LocalExecutor
from tests.engine.quick_sampler import quick_programs
from tests.models.goldens import golden_checkpoint

OVERRIDES = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "misspelt": 1}


@pytest.mark.slow
def test_an_engine_warns_of_unread_overrides_and_reads_new_weights_with_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(golden_checkpoint("llama2_tiny").path)
    config = Config(
        model=ModelConfig(
            model=model, max_model_len=32, hf_overrides=json.dumps(OVERRIDES), hf_overrides_dir=str(tmp_path)
        ),
        cache=CacheConfig(kv_cache_memory=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16),
        compile=CompileConfig(compile_cache="off"),
    )
    with quick_programs():
        executor = LocalExecutor.start(config, resolve_model(config.model), lambda *_: None)
    try:
        warnings = [record.getMessage() for record in caplog.records if "--hf-overrides" in record.getMessage()]
        assert warnings == ["--hf-overrides: misspelt: config.json has no such key, and the model does not read it"]
        assert executor.weights is not None
        executor.weights.load(model)()  # with another rope they would be refused
    finally:
        executor.close()
