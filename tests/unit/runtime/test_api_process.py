"""The names under which a server answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.api_process import model_names


def test_names_are_separated_by_commas_and_a_models_path_is_not() -> None:
    model = ModelConfig(model="/models/a,b.gguf")
    assert model_names(Config(model=model)) == ("/models/a,b.gguf",)
    named = Config(model=replace(model, served_model_name=" one, two,one, "))
    assert model_names(named) == ("one", "two")
    with pytest.raises(ConfigError, match="--served-model-name ' , ': expected names"):
        model_names(Config(model=replace(model, served_model_name=" , ")))
