"""Bounds of tokenizer.json, which comes from a folder of others: how much a text may grow, and how long it may take.

The library of tokenizers ends the process if memory fails, and nothing interrupts it. So its parts are bounded when
they are loaded, by the longest replacements that they name. Regular expressions that repeat a repetition are tried in
the process of models/templates.py.
"""

import base64
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.templates import RENDERER
from utils.settings.errors import UserError

MAX_TEXT = 2 * 10**7  # characters that a text may become
MAX_TOKEN = 2048  # characters of a token: published ones have up to 512
MAX_SPREAD = 8  # characters that decoders may make of one
PROBE = 2000  # characters of a probe
FACTORS = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 4}
CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.DOTALL)  # what stands for one character
REPEATED = re.compile(r"\)(?:[*+]|\{\d*,\d*\}|\{\d\d+\})")  # a group
TokenizerPart = Mapping[str, Any]  # part of tokenizer.json


def parts_of(value: object) -> list[TokenizerPart]:
    """Returns the parts in a part, and in its sequences."""
    parts, rest = [], [value]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            parts.append(value)
            rest += [value.get(name) for name in ("normalizers", "pretokenizers", "decoders")]
    return parts


def growth(parts: Iterable[TokenizerPart]) -> float:
    """Returns how many characters one may become at most by normalizers or decoders, one after the other."""
    return math.prod(growth_of(part) for part in parts)


def growth_of(part: TokenizerPart) -> float:
    """Returns how many characters one may become by a part; what it puts before the first one counts, too."""
    kind, pattern = part.get("type"), part.get("pattern")
    if kind == "Prepend":
        return 1.0 + len(str(part.get("prepend", "")))
    if kind == "Precompiled":
        return longest_segment(str(part.get("precompiled_charsmap") or ""))
    if kind != "Replace":
        return FACTORS.get(kind, 1.0)
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    content = len(str(part.get("content", "")))
    return max(1.0, content / len(replaced)) if isinstance(replaced, str) and replaced else 1.0 + content


def longest_segment(charsmap: str) -> float:
    """Returns the bytes of the longest replacement of a SentencePiece map: behind its trie they end in zero bytes."""
    try:
        content = base64.b64decode(charsmap)
    except ValueError:  # such a map cannot be loaded, either
        return 1.0
    size = int.from_bytes(content[:4], "little")
    return max(1.0, *map(len, content[4 + size :].split(b"\0")))


def slow_patterns(parts: Iterable[TokenizerPart]) -> list[str]:
    """Returns the regular expressions that repeat a group: their time may grow exponentially with the text."""
    patterns = [part.get("pattern") for part in parts]
    patterns = [str(pattern["Regex"]) for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern]
    return [pattern for pattern in patterns if REPEATED.search(CLASS.sub("x", pattern))]


def probes(patterns: Iterable[str]) -> list[str]:
    """Returns texts at which regular expressions take long, if any: runs of what they name, and of common signs.

    A run ends in another sign, so that what matches only a whole one is tried in all ways.
    """
    signs = {*"a1 .\n\u00e9", "ab ", "a1", *"".join(patterns)}
    return [sign * (PROBE // len(sign)) + "\x01" for sign in sorted(signs)]


def longest_token(content: TokenizerPart) -> str:
    """Returns the longest text among the tokens of a tokenizer.json."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens = [*vocabulary] if isinstance(vocabulary, dict | list) else []
    tokens = [token[0] if isinstance(token, list) and token else token for token in tokens]
    tokens += [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((token for token in tokens if isinstance(token, str)), key=len, default="")


def check_growth(file: Path, content: TokenizerPart) -> float:
    """Returns how many characters one may become before it is a token.

    `content` is that of tokenizer.json. Raises: UserError that names the part that may take too much time or memory.
    """
    names = ("normalizer", "pre_tokenizer", "decoder")
    normalizers, pretokenizers, decoders = (parts_of(content.get(name)) for name in names)
    spread = growth(decoders)
    if spread > MAX_SPREAD:
        raise UserError(
            f"{file}: its decoder may make {spread:,.0f} characters of one, more than {MAX_SPREAD}: choose another "
            "tokenizer"
        )
    longest = longest_token(content)
    if len(longest) > MAX_TOKEN:
        size = f"{len(longest):,} characters, more than {MAX_TOKEN:,}"
        raise UserError(f"{file}: the token {reprlib.repr(longest)} has {size}: choose another tokenizer")
    patterns = slow_patterns([*normalizers, *pretokenizers, *decoders])
    problem = RENDERER.try_tokenizer(file.absolute(), probes(patterns)) if patterns else ""
    if problem:
        raise UserError(
            f"{file}: a text makes {reprlib.repr(patterns[0])} fail or take too long ({problem}): choose another "
            "tokenizer"
        )
    return growth(normalizers)
