"""The inputs of an EAGLE-3 head, of a multi-token-prediction (MTP) layer and of a DFlash drafter, beside those of their decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TappedNorm = Literal["none", "all", "each"]
"""Norm of the model's hidden states before they are projected: of all layers side by side, or of each layer's."""
CausalLayers = Literal["none", "windows", "all"]
"""Layers of a DFlash drafter in which a token sees those before it only: none, those with a sliding window, or all."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-3 head (arXiv 2503.01840): the hidden states that it reads, and its norms. Letters: K tapped layers, D model."""

    vocab_size: int
    """Tokens of the model. The head's own may be fewer."""
    hidden_size: int
    """D of the model."""
    layers: tuple[int, ...] | None = None
    """Layers of the model whose inputs the head reads, counted from 0; the number of layers stands for the output of the last one.
    None: the usual three, see `tapped_layers`."""
    tapped_norm: TappedNorm = "none"
    norm_before_residual: bool = False
    """True if the residual stream begins with the normalised hidden state."""
    norm_output: bool = False
    """True if the head continues from its normalised output."""
    has_own_embedding: bool = False
    """False: the head reads the model's embeddings of tokens."""

    @property
    def num_tapped(self) -> int:  # K
        """Number of tapped layers."""
        return 3 if self.layers is None else len(self.layers)

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model with `num_layers` layers whose inputs the head reads; by default one near the first, the
        middle and the last, as all heads were trained that do not name any."""
        return (2, num_layers // 2, num_layers - 3) if self.layers is None else self.layers


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """An MTP layer: its inputs, and what its output passes."""

    hidden_first: bool = False
    """Order of the projection's input. True: the hidden state, then the embedding (MiMo); False: the embedding first."""
    reads_residual: bool = False
    """True if the layer begins from the residual stream after the model's last layer, and continues from its own (ERNIE 4.5, Step 3.5).
    False: from the output of the model's final norm, and of its own."""
    has_own_head: bool = False
    """True if it has an output head of its own (Step 3.5); False: the model's."""

    def tapped_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model with `num_layers` layers whose inputs the layer reads."""
        return (num_layers,) if self.reads_residual else ()


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A DFlash drafter (arXiv 2602.06036): the hidden states that it reads, and the block of tokens that it predicts at once."""

    vocab_size: int
    """Tokens of the model. The drafter's own may be fewer."""
    layers: tuple[int, ...]
    """Layers of the model whose inputs the drafter reads, counted from 0."""
    block_size: int
    """Tokens of a block: the newest one and those that are drafted."""
    mask_token_id: int
    """Token of the model whose embedding stands for a token to draft."""
    causal_layers: CausalLayers = "windows"
    embedding_scale: float | None = None
    """Factor on the model's table of embeddings; None: the embeddings as the model's first layer takes them."""
    logit_softcap: float | None = None
    """Soft cap on logits that the drafter was trained with, which must be the model's; None: the model's."""

    def is_causal(self, window: int | None) -> bool:
        """Return True for a layer in which tokens of a block see those before them only. window: of the layer."""
        return self.causal_layers == "all" or (self.causal_layers == "windows" and window is not None)
