"""The transformers side of `benchmarks.images`: makes the checkpoint, and measures on request.

`python benchmarks/images_oracle.py make|serve DIR` in an environment with torch and transformers. `serve` reads lines of JSON from
stdin and answers each with one line: {"tower": N} encodes N images, {"first_token": [FILES]} goes from files to a token.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessor

VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Shapes of SmolVLM-256M; the vocabulary is that of the tiny tokenizer."""
SIZE = 512
IMAGE_TOKENS, TEXT_TOKENS = 64, 16
"""Tokens of an image, and about those of the chat's template."""


def make(folder: Path, tokenizer: Path) -> None:
    """Write a random checkpoint with the tokenizer of a tiny one; an image is one tile."""
    torch.manual_seed(0)
    tiny = json.loads((tokenizer / "config.json").read_text())
    vocab = tiny["text_config"]["vocab_size"]
    config = SmolVLMConfig(
        text_config={**TEXT, "vocab_size": vocab},
        vision_config=VISION,
        image_token_id=tiny["image_token_id"],
        scale_factor=4,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["text_config"]["rope_theta"] = 10000.0
    (folder / "config.json").write_text(json.dumps(saved))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    processor = json.loads((tokenizer / "preprocessor_config.json").read_text())
    sizes = {"do_image_splitting": False, "max_image_size": {"longest_edge": SIZE}, "size": {"longest_edge": SIZE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | sizes))


class Oracle:
    """The model in eager mode with PyTorch's attention, as `from_pretrained` gives it."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.images = SmolVLMImageProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def tower(self, count: int) -> None:
        """Encode random pixels of `count` images."""
        pixels = torch.rand(1, count, 3, SIZE, SIZE) * 2 - 1
        self.model.get_image_features(pixels)

    @torch.inference_mode()
    def first_token(self, files: list[str]) -> None:
        """Read and process the images, and generate one token after them and a few tokens of text."""
        images = self.images([[Image.open(file).convert("RGB") for file in files]], return_tensors="pt")
        ids = [self.model.config.image_token_id] * IMAGE_TOKENS * len(files) + [20] * TEXT_TOKENS
        self.model.generate(input_ids=torch.tensor([ids]), **images, max_new_tokens=1, do_sample=False)


def serve(folder: Path) -> None:
    """Answer each line with the wall-clock and the processor seconds that its work took."""
    oracle = Oracle(folder)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        started = time.perf_counter(), time.process_time()
        getattr(oracle, name)(argument)
        print(json.dumps([time.perf_counter() - started[0], time.process_time() - started[1]]), flush=True)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "serve": serve}[command](*map(Path, paths))
