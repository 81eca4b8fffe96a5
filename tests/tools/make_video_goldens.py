"""Write what transformers computes of a video with tiny checkpoints of tests/models/data/vision.

Run from the repository root where torch, torchvision and transformers are installed: python tests/tools/make_video_goldens.py [NAME ...]
The frames of the video are `tests.models.videos.FRAMES`. An archive has, in float32 with eager attention:
    chosen (N) int64, the frames that the processor takes; pixels (P, F) uint8, patches of their groups; features (E, W) float32;
    ids (T) int32, a prompt as the model was trained with it: transformers 5.23 leaves the marks around a placeholder in the prompt, beside
    those of each group, earlier versions do not; logits (8, V) float32 of the last 8 positions; outputs (24) int32, greedy; positions (3, T)
    and delta of models with three positions for each token. After a video of Qwen2-VL or Qwen2.5-VL the text goes on after the last
    position of the video, as the models were trained: transformers 5.23 counts its rows and columns alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_vision_goldens import DATA, NUM_LOGITS, greedy, in_blocks, in_lines, load
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.videos import FRAMES, PROMPT, QWEN, RATE, VIDEOS, preprocessing


def main() -> None:
    for name in sys.argv[1:] or VIDEOS:
        folder = DATA / name
        model, frames = load(folder), np.stack([np.asarray(frame) for frame in FRAMES])
        values = dict(preprocessing(name))
        kind = values.pop("video_processor_type")
        processor = getattr(transformers, kind)(**values)
        metadata = VideoMetadata(total_num_frames=len(FRAMES), fps=RATE, duration=len(FRAMES) / RATE)
        made = processor(videos=[frames], video_metadata=[metadata], return_tensors="pt", return_metadata=True)
        tokens = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        own = getattr(transformers, kind.replace("Video", "")).__new__(getattr(transformers, kind.replace("Video", "")))
        own.video_processor = processor
        names = {"boi_token": "<|image>", "eoi_token": "<image|>", "video_token": "<|video|>"}
        if kind.startswith("Qwen"):
            names = {"vision_start_token": QWEN[:16], "vision_end_token": QWEN[-14:], "video_token": QWEN[16:-14]}
        elif kind.startswith("Glm"):
            names = {"image_token": "<|image|>"}
        elif kind.startswith("Intern"):
            names = {"image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"}
            names["image_seq_length"] = model.config.image_seq_length
        vars(own).update(names)
        text = own.replace_video_token(made, 0)
        if kind == "Qwen2VLVideoProcessor":
            text = QWEN[:16] + text + QWEN[-14:]
            go_on_after_videos(model, model.config.video_token_id)
        ids = torch.tensor([tokens.encode(PROMPT.format(text), add_special_tokens=False)])
        is_image = kind.startswith(("Glm", "Intern"))
        token_id = model.config.image_token_id if is_image else model.config.video_token_id
        kinds = torch.where(ids == token_id, 2, 0)
        pixels = made["pixel_values_videos"].float()
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind.startswith("Intern"):  # frames are images
            pixels = pixels[0]
            given["pixel_values"] = pixels
        else:
            given |= {"mm_token_type_ids": kinds, "pixel_values_videos": pixels}
        parts = {
            key: made[key] for key in ("video_grid_thw", "video_position_ids", "num_frames_per_video") if key in made
        }
        timed = dict(parts)
        if model.config.model_type == "qwen2_5_vl":
            rate = made["video_metadata"][0].sampled_fps
            timed["second_per_grid_ts"] = torch.tensor([values["temporal_patch_size"] / rate])
        with torch.no_grad():
            read = model.model.get_image_features if "pixel_values" in given else model.model.get_video_features
            seen = read(pixels, *parts.values(), return_dict=True)
            features = seen.pooler_output
            features = features.flatten(0, -2) if "pixel_values" in given else features
            features = torch.cat(list(features)) if isinstance(features, list | tuple) else features
            deep = [torch.cat(list(level)) for level in getattr(seen, "deepstack_features", None) or []]
            logits = model(**given, **timed).logits[0, -NUM_LOGITS:]
            outputs, _ = greedy(model, given | timed)
        arrays = {
            "chosen": np.asarray(made["video_metadata"][0].frames_indices),
            "features": torch.cat([features, *deep], dim=-1).numpy(),
            "ids": ids[0].numpy().astype(np.int32),
            "logits": logits.numpy(),
            "outputs": np.asarray(outputs, np.int32),
        }
        if "video_grid_thw" in parts:
            means, deviations = (torch.tensor(values[key]).double()[:, None] for key in ("image_mean", "image_std"))
            positions, delta = model.model.get_rope_index(
                ids, mm_token_type_ids=kinds, attention_mask=given["attention_mask"], **timed
            )
            arrays |= {"positions": positions[:, 0].numpy().astype(np.int32), "delta": np.int32(delta.item())}
            arrays["pixels"] = eight_bits(pixels.reshape(len(pixels), 3, -1).double() * deviations + means)
        elif "pixel_values" in given:
            means, deviations = (
                torch.tensor(values[key]).double()[:, None, None] for key in ("image_mean", "image_std")
            )
            merge, (size, _) = round(1 / model.config.downsample_ratio), model.config.vision_config.patch_size
            shades = [in_lines(frame.double() * deviations + means, size, merge) for frame in pixels]
            arrays["pixels"] = eight_bits(torch.cat(shades))
        else:
            places = made["video_position_ids"]
            cut = [
                in_blocks(*pair, values["pooling_kernel_size"]) for pair in zip(pixels.double(), places, strict=True)
            ]
            arrays["pixels"] = eight_bits(torch.cat(cut))
        out = DATA.parent / "video"
        out.mkdir(exist_ok=True)
        np.savez_compressed(out / f"{name}.npz", **arrays)
        print(name, {key: value.shape for key, value in arrays.items()}, arrays["chosen"], text[:60])


def go_on_after_videos(model: Any, video_token_id: int) -> None:
    """Let the text after the only video of a prompt go on after the last of the video's positions."""
    plain = model.model.get_rope_index

    def positions(input_ids: torch.Tensor, *others: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found, _ = plain(input_ids, *others, **named)
        places = torch.nonzero(input_ids[0] == video_token_id)[:, 0]
        after = int(places[-1]) + 1
        found[:, 0, after:] += found[:, 0, places].max() + 1 - found[:, 0, after].max()
        return found, found[:, :, -1].amax(0)[:, None] + 1 - input_ids.shape[1]

    model.model.get_rope_index = positions


def eight_bits(values: torch.Tensor) -> np.ndarray:
    """Return numbers from 0 to 1 as 8-bit shades, (P, F)."""
    shades = values * 255
    assert (shades - shades.round()).abs().max() < 1e-3
    return shades.round().to(torch.uint8).flatten(1).numpy()


if __name__ == "__main__":
    main()
