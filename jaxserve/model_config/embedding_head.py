"""Head of a model that embeds, scores or classifies, as data: matmuls after the pooling of a text's token vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_config.activation import Activation
from jaxserve.types import LabelActivation, Pooling

HeadActivation = Activation | Literal["tanh", "none"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """One matmul of a head, then its activation, then perhaps a norm."""

    name: str
    """The module's name in checkpoints. One that ends in `/linear` is in a folder of that name beside the model (`2_Dense/linear`)."""
    in_dim: int
    out_dim: int
    has_bias: bool = True
    activation: HeadActivation = "none"
    norm: str | None = None
    """Name in checkpoints of a LayerNorm after the activation; None: there is none."""
    norm_eps: float = 1e-5
    norm_has_bias: bool = False
    token_ids: tuple[int, ...] = ()
    """Tokens whose rows of the output head are the weights of this layer: that of the first, minus that of the second if there are two.
    Empty: the layer has weights of its own."""


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """Layers that make a text's vector into another one, or into a logit for each label."""

    layers: tuple[HeadLayer, ...]
    pooling: Pooling | None = None
    """Pooling that a scoring head was trained with; None: as the checkpoint or the settings say."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels. A cross-encoder has one: its logit scores a pair of texts, or a text that holds both. Empty:
    the output is a vector."""
    activation: LabelActivation = "none"
    """Function that makes logits into scores or probabilities. The API process applies it."""

    @property
    def size(self) -> int:
        """Numbers of the last layer's output."""
        return self.layers[-1].out_dim
