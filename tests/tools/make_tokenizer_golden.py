"""Makes tests/unit/tokenizer/data/: token ids of llama.cpp, which our GGUF tokenizers must reproduce.

    PYTHONPATH=. python tests/tools/make_tokenizer_golden.py SMOLLM2_GGUF

Runs where xllamacpp (llama.cpp), gguf, sentencepiece and tokenizers are installed. Writes
- vocabs.json: two small vocabularies as GGUF metadata. The byte-level one is trained without cutting words,
  so that its merges cross every border a pre-tokenizer draws and each of them gives ids of its own.
- golden.json: the corpus, and llama.cpp's ids of it for SmolLM2, for every pre-tokenizer name we know and
  for the SentencePiece vocabulary with and without its options.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import xllamacpp
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS

OUT = Path(__file__).parents[1] / "unit" / "tokenizer" / "data"

CORPUS = [
    "",
    " ",
    "Hello world",
    " Hello  world ",
    "The quick brown fox jumps over 13 lazy dogs, doesn't it? They'll say it's OK; I'D agree.",
    "12 1234567890 3.14159 -273.15 1,000,000 v1.2.3 0xFF 2e10",
    "year2024month12",
    "²³¼ Ⅷ ٣٤٥ १२३ 五十",
    "def fib(n: int) -> int:\n    if n < 2:\n        return n\n    return fib(n-1) + fib(n - 2)\n",
    '\tfor (i=0;i<10;++i){\r\n\t\tprintf("%d\\n", i);\r\n\t}\r\n',
    "a\n\nb\n\n\nc\n \n d",
    "   three   spaces   ",
    "tabs\t\tand\u00a0nbsp\u2003em\u3000ideographic",
    "\n",
    "\r\n",
    " \n",
    "end with spaces   ",
    "café naïve Ångström ŒUVRE straße ÇA",
    "cafe\u0301 a\u0308o\u0308 x\u0332y",
    "日本語のテキスト、漢字かな交じり文。",
    "中文文本,没有空格。数字123混合",
    "한국어 문장입니다",
    "مرحبا بالعالم، كيف الحال؟",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀🎉👩‍👩‍👧‍👦🇩🇪 ok👍🏽",
    "🇫",
    "Привет МИР, как дела",
    "ΑΒΓ αβγ Ǆ ǅ ʰ",
    "camelCaseWord PascalCase SCREAMING_CASE HTTPServer iOS",
    "don't DON'T can't've 'tis 'S 's we'Ve",
    "http://example.com/a/b?c=d&e=f#g user@mail.com",
    "$100 + €50 = £x ~ ^ | ` <tag/> {a: [1, 2]} \\n",
    "!!!???...--==//**",
    "“quotes” ‘single’ – — … • «guillemets»",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x<|im_end|>y <|im_end|> z",
    "<s>[INST] hi [/INST]</s> <unk> <0x0A>",
    "\u0000\u0001\u007f\ufeff\u200b\ufffd",
    "▁under ▁▁score",
    "a" * 40,
    "=" * 33 + "\n" + " " * 17 + "x",
]

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_vocab() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1400, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False, max_token_length=6
    )
    # Overlapping pieces, so that merges begin and end everywhere. (llama.cpp takes any "</s>" for a control token.)
    pieces = [text[start : start + 6] for text in CORPUS for start in range(len(text)) if "</s>" not in text]
    tokenizer.train_from_iterator(pieces, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in CONTROL else 1 for token in tokens]
    # No merges lead to this word: only pre-tokenizers that look whole words up first find it.
    tokens += ["user defined", "  ", "Ġspaces"]
    types += [4, 4, 1]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_vocab() -> tuple[dict[str, Any], bytes]:
    stored = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in CORPUS for _ in range(3) if text),
        model_writer=stored,
        model_type="bpe",
        vocab_size=620,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(stored.getvalue())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }, stored.getvalue()


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """The vocabulary with the smallest model llama.cpp loads."""
    writer = gguf.GGUFWriter(path, "llama")
    width, num_tokens = 32, len(metadata["tokenizer.ggml.tokens"])
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    squares = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (width, width) for name in squares}
    shapes |= {"token_embd.weight": (num_tokens, width), "output.weight": (num_tokens, width)}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: Path) -> list[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.n_parallel = 1
    params.port = 0
    params.warmup = False
    params.fit_params = False
    server = xllamacpp.Server(params)
    ids = []
    for text in CORPUS:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            server.listening_address + "/tokenize", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            ids.append(json.loads(reply.read())["tokens"])
    del server
    return ids


def ids_of_metadata(metadata: dict[str, Any]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vocab.gguf"
        write_gguf(path, metadata)
        return llama_cpp_ids(path)


def main() -> None:
    byte_level = byte_level_vocab()
    groups: dict[str, dict[str, Any]] = {}
    for name in sorted(PRE_TOKENIZERS):
        ids = ids_of_metadata(byte_level | {"tokenizer.ggml.pre": name})
        groups.setdefault(json.dumps(ids), {"names": [], "ids": ids})["names"].append(name)
    spm, spm_model = sentencepiece_vocab()
    variants = [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    ]
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm_model)
    golden = {
        "corpus": CORPUS,
        "smollm2": llama_cpp_ids(Path(sys.argv[1])),
        "pre": list(groups.values()),
        "sentencepiece": [{"options": options, "ids": ids_of_metadata(spm | options)} for options in variants],
        "sentencepiece_package": processor.encode(CORPUS),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    vocabs = {"byte_level": byte_level, "sentencepiece": spm}
    (OUT / "vocabs.json").write_text(json.dumps(vocabs, ensure_ascii=False, separators=(",", ":")) + "\n")
    (OUT / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
