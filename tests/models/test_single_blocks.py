"""Nemotron-H: published names of tensors, and layers of one block."""

from __future__ import annotations

from jaxserve.checkpoint.protocol import CheckpointView
from jaxserve.checkpoint.renamed import renamed, with_our_names
from jaxserve.models.registry import decoder_of, families, open_model
from tests.models.goldens import golden_checkpoint


def test_published_prefix_and_letters_are_read_as_transformers_names() -> None:
    checkpoint = open_model(golden_checkpoint("nemotron_h_tiny").path)
    (family,) = [each for each in families() if each.architectures == ("NemotronHForCausalLM",)]
    published = renamed(
        CheckpointView(checkpoint, {"model.norm_f.weight": checkpoint.tensors["model.norm.weight"]}, {}),
        lambda name: name.replace("model.", "backbone."),
    )
    named = with_our_names(published, family.config_renames(checkpoint.config))
    assert list(named.tensors) == ["model.norm.weight"]
    kinds = [(layer.has_kv, layer.recurrent is not None, layer.has_mlp) for layer in decoder_of(checkpoint).layers]
    mamba, experts, attention, dense = (
        (False, True, False),
        (False, False, True),
        (True, False, False),
        (False, False, True),
    )
    assert kinds == [mamba, experts, attention, dense, mamba]
