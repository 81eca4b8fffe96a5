"""Pre-tokenizers of byte-level BPE vocabularies, by the name in a GGUF file.

A pre-tokenizer is a list of regular expressions (Oniguruma syntax). Each splits every piece of the step before into
its matches and the text between them. The expressions are those of the models' tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules that split a text into words."""

    steps: tuple[str, ...]
    ignores_merges: bool = False
    """True if a word that is a token stays whole even if merges do not build it."""
    adds_bos: bool = False
    """True if a prompt begins with BOS unless the file says otherwise."""

    def byte_level(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
        """Return a tokenizer of byte-level BPE, without added tokens."""
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=self.ignores_merges))
        splits = [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in self.steps]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES

# A word is upper-case letters then lower-case ones; marks and caseless letters belong to both.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_TEKKEN = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_SYMBOLS}"
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}{_SYMBOLS}"
)

# Letters with case, as code points: the ranges hold characters that editors normalise to others.
_CASED_RANGES = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_CASED = "".join("-".join(chr(int(code, 16)) for code in span.split("-")) for span in _CASED_RANGES.split())
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
)

_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_DIGITS_FROM_THE_END = r"\d{1,3}(?=(?:\d{3})*\b)"
_ALL_DIGITS_FROM_THE_END = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
_AFMOE = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _LINES
)
_EXAONE_MOE = (
    _CONTRACTION
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_HAN_OR_KANA}"
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER_NOT_HAN, _LOWER_NOT_HAN = (letters[:-1] + r"&&[^\p{Han}]]" for letters in (_UPPER, _LOWER))
_KIMI_K2 = (
    rf"\p{{Han}}+|{_BEFORE_WORD}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTION}?"
    rf"|{_BEFORE_WORD}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
) + _LINES
_JAIS2 = _LLAMA3.removesuffix(_LINES) + (
    r"|\s*[\r\n]+|" + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
)

_KINDS: Mapping[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_GPT2,)): (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "modern-bert",
        "mellum",
        "gigachat",
        "a.x-4.0",
    ),
    # Digits one by one.
    PreTokenizer((r"\p{N}", _GPT2)): (
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ),
    PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
    ),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer((_LLAMA3,), ignores_merges=True): ("glm4", "glm5"),
    PreTokenizer((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"),
    PreTokenizer(("[^\n]+|[\n]+", _QWEN2)): ("laguna",),
    PreTokenizer((_QWEN35,)): ("qwen35",),
    PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    PreTokenizer((_SEED_CODER,)): ("seed-coder",),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
            r"(?<!\s)\s+$",  # the lookbehind changes no match but avoids a quadratic search
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")): ("deepseek-coder",),
    PreTokenizer((r"\p{N}{1,3}", _HAN_OR_KANA, _DEEPSEEK_V3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer((_ALL_DIGITS_FROM_THE_END, _AFMOE_SCRIPTS, _AFMOE)): ("afmoe",),
    PreTokenizer((_EXAONE_MOE,)): ("exaone-moe",),
    PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignores_merges=True): ("youtu",),
    PreTokenizer((_KIMI_K2,)): ("kimi-k2",),
    PreTokenizer((_JAIS2,)): ("jais-2",),
    PreTokenizer((_DIGITS_FROM_THE_END, _GPT4O)): ("tiny_aya", "cohere2moe"),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: kind for kind, names in _KINDS.items() for name in names}
)
"""Pre-tokenizers by the value of `tokenizer.ggml.pre`."""
