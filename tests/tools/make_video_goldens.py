"""Write what transformers computes of a video with tiny checkpoints of tests/models/data/vision.

Run from the repository root where torch, torchvision and transformers are installed: python tests/tools/make_video_goldens.py
The frames of the video are `tests.models.videos.FRAMES`. An archive has, in float32 with eager attention:
    chosen (N) int64, the frames that the processor takes; pixels (P, F) uint8, patches of their groups; features (E, W) float32;
    ids (T) int32, a prompt as the model was trained with it: transformers 5.23 leaves the marks around a placeholder in the prompt, beside
    those of each group, earlier versions do not; logits (8, V) float32 of the last 8 positions; outputs (24) int32, greedy; positions (3, T)
    and delta.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_vision_goldens import DATA, NUM_LOGITS, greedy, load
from transformers.video_utils import VideoMetadata

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.models.videos import FRAMES, PROCESSOR, PROMPT, RATE, VIDEOS


def main() -> None:
    for name in VIDEOS:
        folder = DATA / name
        model, frames = load(folder), np.stack([np.asarray(frame) for frame in FRAMES])
        vision = model.config.vision_config
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        processor = transformers.Qwen3VLVideoProcessor(**(PROCESSOR | sizes))
        metadata = VideoMetadata(total_num_frames=len(FRAMES), fps=RATE)
        made = processor(videos=[frames], video_metadata=[metadata], return_tensors="pt", return_metadata=True)
        grid, chosen = made["video_grid_thw"], np.asarray(made["video_metadata"][0].frames_indices)
        count, height, width = grid[0].tolist()
        tokens = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        own = transformers.Qwen3VLProcessor(
            image_processor=transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
            tokenizer=tokens,
            video_processor=processor,
        )
        text = own.replace_video_token(made, 0)
        ids = torch.tensor([tokens.encode(PROMPT.format(text), add_special_tokens=False)])
        kinds = torch.where(ids == model.config.video_token_id, 2, 0)
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": kinds,
            "pixel_values_videos": made["pixel_values_videos"].float(),
            "video_grid_thw": grid,
        }
        with torch.no_grad():
            seen = model.model.get_video_features(given["pixel_values_videos"], grid, return_dict=True)
            main_features = seen.pooler_output
            main_features = torch.cat(list(main_features)) if isinstance(main_features, list | tuple) else main_features
            deep = [torch.cat(list(level)) for level in getattr(seen, "deepstack_features", None) or []]
            logits = model(**given).logits[0, -NUM_LOGITS:]
            outputs, _ = greedy(model, given)
            positions, delta = model.model.get_rope_index(
                ids, mm_token_type_ids=kinds, video_grid_thw=grid, attention_mask=given["attention_mask"]
            )
        means, deviations = (torch.tensor(PROCESSOR[key]).double()[:, None] for key in ("image_mean", "image_std"))
        values = given["pixel_values_videos"].double()
        pixels = ((values.reshape(len(values), 3, -1) * deviations + means) * 255).flatten(1)
        assert (pixels - pixels.round()).abs().max() < 1e-3
        arrays = {
            "chosen": chosen,
            "pixels": pixels.round().to(torch.uint8).numpy(),
            "features": torch.cat([main_features, *deep], dim=-1).numpy(),
            "ids": ids[0].numpy().astype(np.int32),
            "logits": logits.numpy(),
            "outputs": np.asarray(outputs, np.int32),
            "positions": positions[:, 0].numpy().astype(np.int32),
            "delta": np.int32(delta.item()),
            "grid": np.array([count, height, width], np.int32),
        }
        out = DATA.parent / "video"
        out.mkdir(exist_ok=True)
        np.savez_compressed(out / f"{name}.npz", **arrays)
        print(name, {key: value.shape for key, value in arrays.items()}, chosen, text[:200])


if __name__ == "__main__":
    main()
