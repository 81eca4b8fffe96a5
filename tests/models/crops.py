"""Pictures and rules of crops.npz: images with the crops of Gemma 3's pan and scan. See tests/tools/make_crop_goldens.py."""

from __future__ import annotations

from typing import Any

CROPPED_SIZES = ((80, 50), (30, 45), (20, 22), (90, 20))
"""Widths and heights: two crops, two of different sizes, none, and the most that are allowed."""
TEXT, CHOSEN = "{} and {}, then{}?\n\nHow are you", (0, 2, 1)
"""A prompt with places for pictures, and the pictures."""
PAN_AND_SCAN: dict[str, Any] = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PUBLISHED = PAN_AND_SCAN | {"pan_and_scan_min_crop_size": 256}
"""The defaults of transformers' `Gemma3Processor`, except that images are cropped."""
