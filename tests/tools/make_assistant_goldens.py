"""Write the tiny drafters of tests/models/data/assistants, each for a Gemma 4 of tests/models/data, and what transformers drafts with them.

Run from the repository root where torch and transformers are installed: python tests/tools/make_assistant_goldens.py [NAME ...]
The config.json of a folder is written by hand. golden.npz, in float32 from exactly the stored weights:
    prompt_ids (T) int32, output_ids (6) int32: the model's greedy tokens after them,
    draft_ids (5, 3) int32: after 2 to 6 of the outputs, the tokens that transformers' candidate generator drafts with the keys
    and values of the tokens before the last one,
    draft_logits (5, 3, V) float32 that they were chosen by.
A seed is taken if no two best logits come close, float64 drafts the same, and each control (a window of another size, and the
position before) moves the logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import MAX_NOISE, MIN_GAP, load, random_weights, stored_buffers
from safetensors.torch import save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

DATA = Path(__file__).parents[1] / "models" / "data"
NUM_OUTPUTS, NUM_DRAFTS = 6, 3
MIN_CONTROL = 0.05


def share_keys(kind: Any) -> None:
    """Let all layers of a drafter read the keys and values of others, and the last layer of each type of a model without such
    layers lend its own. transformers 5.23 takes the first for an error, and forgets the second."""
    inner = kind.kv_sharing_modes

    def modes(self: Any) -> list[str | None]:
        count, types = self.num_hidden_layers, self.layer_types
        if self.num_kv_shared_layers == count:
            return ["reuse"] * count
        if self.num_kv_shared_layers == 0:
            return ["store" if types[i] not in types[i + 1 :] else None for i in range(count)]
        return inner.fget(self)

    kind.kv_sharing_modes = property(modes)


def save(drafter: Any, folder: Path, dtype: torch.dtype, seed: int) -> None:
    """Store a drafter with random weights, and a random order of its tokens."""
    random_weights(drafter, seed)
    drafter.model.embed_tokens.weight.data *= 0.2  # logits spread by about 2, as no cap bounds them
    state = {name: weight.detach().to(dtype).contiguous() for name, weight in drafter.named_parameters()}
    state |= {name: buffer.detach().to(dtype).clone() for name, buffer in stored_buffers(drafter).items()}
    if drafter.masked_embedding is not None:
        generator = torch.Generator().manual_seed(seed)
        state["masked_embedding.token_ordering"] = torch.randperm(drafter.vocab_size, generator=generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_drafter(folder: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= keys.pop("text_config", {})
    config |= keys
    kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(
        folder, config=kind.config_class.from_dict(config), dtype=dtype, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def golden(model: Any, drafter: Any, prompt_ids: list[int], shift: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays of golden.npz. shift: of positions, for a control."""
    known, output_ids, all_ids, all_logits = list(prompt_ids), [], [], []
    drafter.generation_config.num_assistant_tokens = NUM_DRAFTS
    run = drafter.forward
    if shift:
        drafter.forward = lambda position_ids, **rest: run(position_ids=position_ids + shift, **rest)
    for index in range(NUM_OUTPUTS):
        outputs = model(torch.tensor([known]), output_hidden_states=True, return_shared_kv_states=True)
        output_ids.append(int(outputs.logits[0, -1].argmax()))
        known.append(output_ids[-1])
        if index == 0:
            continue
        settings = transformers.GenerationConfig(max_length=1000)
        generator = SinglePositionMultiTokenCandidateGenerator(drafter, model.get_input_embeddings(), settings)
        generator.num_assistant_tokens = NUM_DRAFTS
        ids, logits = generator.get_candidates(
            torch.tensor([known]), {}, outputs, is_first_iteration=False, n_last_matches=0
        )
        all_ids.append(ids[0, len(known) :].tolist())
        all_logits.append(logits[0].float().numpy())
    drafter.forward = run
    return {
        "prompt_ids": np.array(prompt_ids, np.int32),
        "output_ids": np.array(output_ids, np.int32),
        "draft_ids": np.array(all_ids, np.int32),
        "draft_logits": np.array(all_logits, np.float32),
    }


def gap(logits: np.ndarray) -> float:
    best = np.sort(logits, -1)[..., -2:]
    return float((best[..., 1] - best[..., 0]).min())


def make(name: str) -> None:
    """Write the files of one folder."""
    folder = DATA / "assistants" / name
    hf = json.loads((folder / "config.json").read_text())
    with np.load(DATA / name / "golden.npz") as arrays:
        prompt_ids = arrays["prompt_ids"].tolist()
    model, wide = load(DATA / name), load(DATA / name, torch.float64)
    kind = getattr(transformers, hf["architectures"][0])
    for seed in range(100):
        config = kind.config_class.from_dict(hf)
        save(kind._from_config(config, dtype=torch.float32), folder, getattr(torch, hf["dtype"]), seed)
        arrays = golden(model, load_drafter(folder), prompt_ids)
        if gap(arrays["draft_logits"]) < MIN_GAP or len(np.unique(arrays["draft_ids"])) < 6:
            continue
        window = hf["text_config"]["sliding_window"]
        controls = [
            golden(model, load_drafter(folder, text_config={"sliding_window": window - 1}), prompt_ids),
            golden(model, load_drafter(folder), prompt_ids, shift=-1),
        ]
        moved = [float(np.abs(each["draft_logits"][:, 0] - arrays["draft_logits"][:, 0]).max()) for each in controls]
        exact = golden(wide, load_drafter(folder, torch.float64), prompt_ids)
        noise = float(np.abs(exact["draft_logits"] - arrays["draft_logits"]).max())
        if min(moved) >= MIN_CONTROL and noise <= MAX_NOISE and (exact["draft_ids"] == arrays["draft_ids"]).all():
            break
    else:
        raise SystemExit(f"{name}: no seed will do")
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"{name}: seed {seed}, drafts {arrays['draft_ids'].tolist()}, noise {noise:.1e}, controls {moved}, {size} bytes"
    )


def main() -> None:
    """Write the folders named on the command line, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for kind in (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig):
        share_keys(kind)
    for name in sys.argv[1:] or sorted(path.name for path in (DATA / "assistants").iterdir()):
        make(name)


if __name__ == "__main__":
    main()
