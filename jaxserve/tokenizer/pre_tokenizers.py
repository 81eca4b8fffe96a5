"""How byte-level BPE vocabularies cut text into words, by the name a GGUF file declares.

A name stands for a list of regular expressions (Oniguruma syntax). Each step cuts every piece left by the
step before into its matches and what lies between them. The expressions are those of the models' own
tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text."""

    steps: tuple[str, ...]
    ignores_merges: bool = False
    """A word that is a token stays whole even where the merges would not build it."""
    adds_bos: bool = False
    """BOS before a plain prompt unless the file says otherwise."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_SEED_CODER = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES

# A word is upper-case letters then lower-case ones; marks and letters without case belong to both.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_TEKKEN = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_SYMBOLS}"
_GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}{_SYMBOLS}"
)

_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
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
    PreTokenizer((_QWEN35,)): ("qwen35",),
    PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True): ("tekken",),
    PreTokenizer((_GPT4O,)): ("gpt-4o", "llama4", "kanana2"),
    PreTokenizer((_SEED_CODER,)): ("seed-coder",),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")): ("deepseek-coder",),
    PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: kind for kind, names in _KINDS.items() for name in names}
)
"""By the value of `tokenizer.ggml.pre`."""
