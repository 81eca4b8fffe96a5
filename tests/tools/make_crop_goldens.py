"""Write crops.npz of tests/models/data/vision/gemma3_vision_tiny: images with the crops of Gemma 3's pan and scan.

Run from the repository root where torch, torchvision and transformers are installed:
python tests/tools/make_crop_goldens.py
transformers' `Gemma3Processor` reads how to crop from the arguments of its call, and not from the checkpoint: so it gets the
checkpoint's values as arguments. Arrays, of pictures `CROPPED_SIZES` and the rule `PAN_AND_SCAN`:
    pixels_i, features_i: as in golden.npz, of the image and then of its crops;
    ids, logits, outputs: as ids_3, logits_3 and outputs_3 in golden.npz, of the prompt `TEXT` with the pictures `CHOSEN`;
    sizes (300, 2) int32 widths and heights, num_crops (300) int32 by the published rule, tiny_num_crops by `PAN_AND_SCAN`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_vision_goldens import (
    DATA,
    MIN_GAP,
    NUM_LOGITS,
    features,
    greedy,
    load,
    make_processor,
    patches,
    read_checkpoint,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.crops import CHOSEN, CROPPED_SIZES, PAN_AND_SCAN, PUBLISHED, TEXT
from tests.models.pictures import picture

NAME = "gemma3_vision_tiny"


def arguments(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the rule as arguments of the image processor's method."""
    return {key: value for key, value in rule.items() if key != "do_pan_and_scan"}


@torch.no_grad()
def golden() -> dict[str, np.ndarray]:
    """Return the arrays."""
    folder, tiny = DATA / NAME, read_checkpoint(NAME)
    model, processor = load(folder), make_processor(folder, tiny)
    pictures = [picture(*size, seed) for seed, size in enumerate(CROPPED_SIZES)]

    def inputs(text: str, images: list[Any]) -> dict[str, Any]:
        text = text.format(*[tiny.placeholder] * len(images))
        return dict(processor(text=[text], images=[images], return_tensors="pt", images_kwargs=PAN_AND_SCAN))

    arrays = {}
    for index, each in enumerate(pictures):
        given = inputs("{}", [each])
        arrays[f"pixels_{index}"] = patches(given, tiny.config, tiny.processor)
        arrays[f"features_{index}"] = features(model, given)
    given = inputs(TEXT, [pictures[index] for index in CHOSEN])
    outputs, scores = greedy(model, given)
    best = torch.topk(scores, 2).values
    assert (gap := float((best[:, 0] - best[:, 1]).min())) >= MIN_GAP, gap
    arrays |= {
        "ids": given["input_ids"][0].numpy().astype(np.int32),
        "logits": model(**given).logits[0, -NUM_LOGITS:].numpy(),
        "outputs": outputs,
    }
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(0, np.log(5000), (300, 2))).astype(np.int32)
    arrays["sizes"] = np.maximum(sizes, np.max(sizes, axis=1, keepdims=True) // 200)  # longer images are refused
    crop = processor.image_processor.pan_and_scan
    for key, rule in (("num_crops", PUBLISHED), ("tiny_num_crops", PAN_AND_SCAN)):
        empty = [np.empty((3, height, width), np.uint8) for width, height in arrays["sizes"]]
        crops = [crop(each, **arguments(rule)) for each in empty]
        arrays[key] = np.array([sum(0 not in part.shape for part in parts) for parts in crops], np.int32)
    return arrays


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    assert json.loads((DATA / NAME / "preprocessor_config.json").read_text())["do_pan_and_scan"] is None
    arrays = golden()
    np.savez_compressed(DATA / NAME / "crops.npz", **arrays)
    print({key: array.shape for key, array in arrays.items()}, np.bincount(arrays["num_crops"]))


if __name__ == "__main__":
    main()
