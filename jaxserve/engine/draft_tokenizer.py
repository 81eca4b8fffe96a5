"""Checks that a draft model speaks of the same tokens as the model that it drafts for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxserve.checkpoint.drafters.form import drafter_form
from jaxserve.checkpoint.source import resolve
from jaxserve.config import Config
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer


def with_draft_path(config: Config, model_path: Path) -> Config:
    """Return `config` with the local path of its draft model, if it has one.

    Raises ConfigError if the draft model has another tokenizer, CheckpointError if it has none or cannot be found.
    """
    name = config.scheduler.speculative_model
    if name is None:
        return config
    path = resolve(name, progress=False, needs_tokenizer=False)
    drafting = replace(config, scheduler=replace(config.scheduler, speculative_model=str(path)))
    if drafter_form(path) is not None:  # its tokens are numbers of the model's
        return drafting
    try:
        own = load_tokenizer(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"--speculative-model {name}: {error}; without a tokenizer EAGLE-3 heads, DFlash drafters and drafters of Gemma 4 are served"
        ) from error
    different = first_difference(load_tokenizer(model_path), own)
    if different is not None:
        raise ConfigError(
            f"--speculative-model {name}: token {different} is another one than in {model_path}; a draft model needs the "
            "same tokenizer"
        )
    return drafting


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """Return the first token whose bytes or role differ; None if all are the same. Vocabularies may have unused tokens."""
    for token_id in range(max(one.max_token_id, other.max_token_id) + 1):
        if one.token_bytes(token_id) != other.token_bytes(token_id):
            return token_id
    controls = one.control_tokens.ids ^ other.control_tokens.ids
    return min(controls, default=None)
