"""`python llama_convert.py SOURCES FOLDER FILE`: make the float32 GGUF file of a checkpoint by llama.cpp's own converter.

SOURCES: the folder of llama.cpp. The converter knows tokenizers by what they make of a text and refuses others; here an unknown one
is named GPT-2, which has the same vocabulary of bytes, so models with random weights can be converted. Layers for drafts are left
out. Runs with torch and transformers, without jaxserve.
"""

from __future__ import annotations

import sys


def main() -> None:
    sources = sys.argv.pop(1)
    sys.path.insert(0, sources)
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    known = TextModel.get_vocab_base_pre

    def known_or_bytes(model: object, tokenizer: object) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = known_or_bytes
    folder, file = sys.argv[1:]
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", "f32", "--no-mtp"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
