"""Names and sizes of hyper-connections (`models.residual`)."""

from __future__ import annotations

from typing import Final

MAX_STREAMS: Final = 64
"""Residual streams, of which no published model has more than a few."""
HYPER_NAMES: Final = {
    "attn_hc.fn": "attn_hc.fn.weight",
    "ffn_hc.fn": "ffn_hc.fn.weight",
    "hc_head.hc_": "hc_head.",
    "hc_head.fn": "hc_head.fn.weight",
}
"""Our names of parts by transformers'."""
