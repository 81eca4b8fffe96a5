"""Write tests/models/data/smollm2/golden.json: greedy tokens of SmolLM2-135M-Instruct as transformers computes them.

Run from the repository root where torch, transformers, gguf, tokenizers and xllamacpp are installed:
    python tests/tools/make_smollm2_golden.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf
The GGUF is dequantised to float32 and llama.cpp's permutation of the q and k rows undone, so that the reference and
jaxserve hold the same numbers. Prompt ids come from two independent tokenizers, which must agree: llama.cpp's, and
one put together here from the vocabulary and merges with SmolLM's published pre-tokenizer. The greedy text must be the
one llama.cpp writes from the same float32 weights (from the quantised file it differs: llama.cpp then rounds activations).

golden.json is a list of {name, text or messages, prompt_ids, output_ids (64, not stopping at end tokens),
gaps (64, between the two best logits), output_text}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import tokenizers
import torch
import transformers
import xllamacpp
from smollm2_prompts import CHATS, TEXTS, Message, long_text

OUTPUT = Path(__file__).parents[1] / "models" / "data" / "smollm2" / "golden.json"
NUM_TOKENS = 64

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def metadata(reader: gguf.GGUFReader, key: str) -> Any:
    """One value of the GGUF header."""
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"


def unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp interleaves the two halves of each head's rows; this puts them back."""
    rows, width = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def load_model(reader: gguf.GGUFReader) -> transformers.LlamaForCausalLM:
    """The dequantised weights in transformers' Llama."""
    heads = {"attn_q": metadata(reader, "llama.attention.head_count")}
    heads["attn_k"] = metadata(reader, "llama.attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=metadata(reader, "llama.vocab_size"),
        hidden_size=metadata(reader, "llama.embedding_length"),
        intermediate_size=metadata(reader, "llama.feed_forward_length"),
        num_hidden_layers=metadata(reader, "llama.block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=metadata(reader, "llama.context_length"),
        rms_norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
        dtype=torch.float32,
    )
    state = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            weight = unpermuted(weight, heads[part])
        state[hugging_face_name(tensor.name)] = torch.from_numpy(weight)
    model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.eval()


def second_tokenizer(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
    """SmolLM2's tokenizer as published: digits one by one, then GPT-2's byte-level BPE."""
    names = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    model = tokenizers.models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    kinds = metadata(reader, "tokenizer.ggml.token_type")
    control = [name for name, kind in zip(names, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in control])
    return tokenizer


def write_float32(reader: gguf.GGUFReader, path: Path) -> None:
    """Write the GGUF with every tensor in float32."""
    writer = gguf.GGUFWriter(path, metadata(reader, "general.architecture"))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp's server in this process: the second opinion on token ids, chat text and greedy text."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 4096
        params.n_parallel = 1
        params.cpuparams.n_threads = 2
        params.port = 0
        self._server = xllamacpp.Server(params)

    def token_ids(self, text: str) -> list[int]:
        """The text as tokens, control tokens recognised."""
        found: list[int] = self._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})[
            "tokens"
        ]
        return found

    def chat_text(self, messages: list[dict[str, str]]) -> str:
        """The chat as its own template engine writes it."""
        found: str = self._post("/apply-template", {"messages": messages})["prompt"]
        return found

    def greedy(self, prompt_ids: list[int]) -> list[int]:
        """Up to 64 tokens, stopping at an end token."""
        body = {"prompt": prompt_ids, "n_predict": NUM_TOKENS, "temperature": 0, "samplers": ["temperature"]}
        found: list[int] = self._post("/completion", {**body, "return_tokens": True, "cache_prompt": False})["tokens"]
        return found

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._server.listening_address}{route}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)


def render(reader: gguf.GGUFReader, messages: list[dict[str, str]]) -> str:
    """The chat as the GGUF's own template writes it, ready for the answer."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(metadata(reader, "tokenizer.chat_template"))
    return template.render(messages=messages, add_generation_prompt=True)


def greedy(model: transformers.LlamaForCausalLM, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """64 tokens, not stopping at end tokens, and the distance of the two best logits at each."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_two = torch.topk(torch.cat(out.logits), 2).values
    gaps = (best_two[:, 0] - best_two[:, 1]).tolist()
    return out.sequences[0, len(prompt_ids) :].tolist(), [round(gap, 6) for gap in gaps]


def make_entry(
    name: str,
    prompt: str | list[Message],
    reader: gguf.GGUFReader,
    model: transformers.LlamaForCausalLM,
    oracles: tuple[tokenizers.Tokenizer, LlamaCpp],
) -> dict[str, Any]:
    """One entry of the file, every part of it computed twice."""
    tokenizer, llama_cpp = oracles
    text = prompt if isinstance(prompt, str) else render(reader, prompt)
    assert isinstance(prompt, str) or llama_cpp.chat_text(prompt) == text, name
    prompt_ids = llama_cpp.token_ids(text)
    assert prompt_ids == tokenizer.encode(text, add_special_tokens=False).ids, name
    output_ids, gaps = greedy(model, prompt_ids)
    theirs = llama_cpp.greedy(prompt_ids)
    assert theirs == output_ids[: len(theirs)], (name, theirs, output_ids)
    output_text = tokenizer.decode(output_ids, skip_special_tokens=False)
    print(f"{name}: {len(prompt_ids)} prompt tokens, least gap {min(gaps):.6f}, {len(theirs)} tokens compared")
    print("    ", repr(output_text[:240]), flush=True)
    source = {"text": prompt} if isinstance(prompt, str) else {"messages": prompt}
    results = {"prompt_ids": prompt_ids, "output_ids": output_ids, "gaps": gaps, "output_text": output_text}
    return {"name": name, **source, **results}


def main() -> None:
    """Write the file and print what there is to judge by eye."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    reader = gguf.GGUFReader(parser.parse_args().gguf)
    torch.set_num_threads(2)
    prompts: list[tuple[str, str | list[Message]]] = [*TEXTS.items(), ("long", long_text()), *CHATS.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float32.gguf"
        write_float32(reader, path)
        oracles = second_tokenizer(reader), LlamaCpp(path)
        model = load_model(reader)
        entries = [make_entry(name, prompt, reader, model, oracles) for name, prompt in prompts]
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    OUTPUT.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
