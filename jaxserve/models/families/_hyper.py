"""Names and sizes of hyper-connections (`models.blocks.residual`)."""

from __future__ import annotations

from typing import Final

MAX_STREAMS: Final = 64
"""Residual streams, of which no published model has more than a few."""
HYPER_NAMES: Final = {
    "attn_hc.fn": "attn_hc.fn.weight",
    "attn_hc.scale": "attn_hc.factors",
    "ffn_hc.fn": "ffn_hc.fn.weight",
    "ffn_hc.scale": "ffn_hc.factors",
    "hc_head.hc_": "hc_head.",
    "hc_head.fn": "hc_head.fn.weight",
    "hc_head.scale": "hc_head.factors",
}
"""Our names of parts by transformers'."""
