"""Text split into words as by BERT's first tokenization step, and bytes written as by RoBERTa's.

The Rust library's normalizers follow another version of Unicode than Python, and lower-case letter by letter. They
differ from pytorch-transformers in hundreds of assigned characters and in every Greek word that ends in sigma. So
characters are classified here, by Python's `unicodedata`, in tables for `str.translate` (a few nanoseconds each).
"""

import unicodedata
from collections.abc import Callable

import numpy as np

# The blocks whose characters BERT treats as separate words: CJK ideographs, not kana or hangul.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
_ASCII_SYMBOLS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class _Table(dict):
    """A table for `str.translate` whose entries are computed when a character first occurs."""

    def __init__(self, entry: Callable[[str], str | None]):
        super().__init__()
        self._entry = entry

    def __missing__(self, code: int) -> str | None:
        self[code] = self._entry(chr(code))
        return self[code]


def _clean(character: str) -> str | None:
    """Drop control characters, turn white space into spaces, put spaces around ideographs."""
    if character in "\t\n\r":
        return " "
    category = unicodedata.category(character)
    if category[0] == "C" or character == "\ufffd":
        return None
    if category == "Zs":
        return " "
    if character > "\u33ff" and any(low <= ord(character) <= high for low, high in _IDEOGRAPHS):
        return f" {character} "
    return character


def _split_punctuation(character: str) -> str:
    if character in _ASCII_SYMBOLS or unicodedata.category(character)[0] == "P":
        return f" {character} "
    return character


def _split_punctuation_and_strip_accents(character: str) -> str | None:
    return None if unicodedata.category(character) == "Mn" else _split_punctuation(character)


_CLEAN = _Table(_clean)
_SPLIT = _Table(_split_punctuation)
_SPLIT_AND_STRIP = _Table(_split_punctuation_and_strip_accents)
_STRETCH = 1024


def bert_words(text: str, lower_case: bool) -> str:
    """The text's words and punctuation marks, with white space between them.

    `lower_case` also lower-cases and removes accents, as the uncased models expect.
    """
    text = text.translate(_CLEAN)
    if lower_case:
        return _decomposed(text.lower()).translate(_SPLIT_AND_STRIP)
    return text.translate(_SPLIT)


def _decomposed(text: str) -> str:
    """NFD, one section at a time: Python's sort of a run of combining marks takes quadratic time.

    A section ends before a character across which no mark is sorted. Only in a run of marks longer than a section are
    some sorted less, and nearly all of those are dropped.
    """
    if len(text) <= _STRETCH or text.isascii():
        return unicodedata.normalize("NFD", text)
    stretches, begin = [], 0
    while begin < len(text):
        end = limit = begin + _STRETCH
        while end < min(len(text), limit + _STRETCH) and unicodedata.combining(text[end]):
            end += 1
        stretches.append(unicodedata.normalize("NFD", text[begin:end]))
        begin = end
    return "".join(stretches)


class _Widths(dict):
    """How many characters each character becomes in `bert_words`, computed when it first occurs."""

    def __init__(self, lower_case: bool):
        super().__init__()
        self._lower_case = lower_case

    def __missing__(self, character: str) -> int:
        self[character] = len(bert_words(character, self._lower_case))
        return self[character]


_WIDTHS = {lower_case: _Widths(lower_case) for lower_case in (False, True)}


def bert_word_sources(text: str, lower_case: bool) -> np.ndarray:
    """For each character of `bert_words(text, lower_case)`, the index in `text` of its source.

    int32. Every step maps single characters, except for the Greek final sigma and the order of combining marks, which
    change no lengths. So the lengths determine the result.
    """
    widths = np.fromiter(map(_WIDTHS[lower_case].__getitem__, text), np.int32, len(text))
    return np.repeat(np.arange(len(text), dtype=np.int32), widths)


def combined_ends(text: str) -> np.ndarray:
    """For each character, the end of its group: after the combining marks that follow it. int32."""
    ends = np.arange(1, len(text) + 1, dtype=np.int32)
    if not text.isascii():
        for place in range(len(text) - 1, 0, -1):
            if text[place] > "\u02ff" and unicodedata.category(text[place]) == "Mn":
                ends[place - 1] = ends[place]
    return ends


def _visible_bytes() -> dict[int, str]:
    """GPT-2's alphabet: a printable character for each byte, its own if Latin-1 has one, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


_VISIBLE_BYTES = _visible_bytes()


def visible_bytes(word: str) -> str:
    """The word's UTF-8 bytes, each written as one printable character (Radford et al. 2019, section 2.2)."""
    return word.encode("utf-8").decode("latin-1").translate(_VISIBLE_BYTES)
