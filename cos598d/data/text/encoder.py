"""The interface of text encoders, from text to the ids of a model's vocabulary, and two kinds that split words."""

import hashlib
import itertools
import re
import sys
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cos598d.data.encoder import Encoder
from cos598d.data.text.layout import Layout
from cos598d.errors import UserError

# A vocabulary's files, by model type.
FILES = {
    "bert": ("vocab.txt",),
    "distilbert": ("vocab.txt",),
    "roberta": ("vocab.json", "merges.txt"),
    "xlm": ("vocab.json", "merges.txt"),
    "xlnet": ("spiece.model",),
}
LONGEST_WORD = 100  # characters; BERT treats a longer word as unknown
_MOST_WORDS = 1 << 16  # whose ids an encoder caches: some 12 MB


class Encoded(NamedTuple):
    """A text's ids, and the characters of the text that each covers: text[starts[i]:ends[i]]. int32, (tokens,)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class TextEncoder(Encoder):
    """Turns texts into ids of one model's vocabulary.

    cls_id, sep_id, pad_id: the ids of the special tokens that a sequence needs.
    vocab_size: the least number of rows of the model's word embedding.
    layout: how this model type arranges the special tokens.

    Special tokens that are written in a text ("[SEP]") become that token's id. Text of only white space gives no ids.
    (pytorch-transformers returns one special token there, chosen by its hash seed.) pytorch_transformers' tokenizer of
    this type can load the output of `save`.
    """

    cls_id: int
    sep_id: int
    pad_id: int
    vocab_size: int
    layout: Layout

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it and without truncation."""

    def encode_starts(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """As `encode_many`, but at least the first `most` ids of each text: a long one need not be read to its end."""
        return self.encode_many(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode_many`, with each token's characters in its text. Raises UserError if they are not known."""
        raise UserError(
            "SQuAD needs the positions of tokens in the text, which only BERT's and DistilBERT's vocabularies "
            "without added tokens give. Choose --model_type bert or distilbert."
        )


class WordEncoder(TextEncoder):
    """Splits a text into words, and finds the ids of each word only once.

    specials: the special tokens: for unknown words, between texts, for padding, for the class, and the masked one.
    find_ids: the ids of a new word. Raises UserError if the vocabulary lacks one of the first four.
    """

    def __init__(self, specials: Sequence[str], vocabulary: Mapping[str, int], find_ids: Callable[[str], list[int]]):
        unknown, separator, padding, classification, _ = specials
        for token in (unknown, separator, padding, classification):
            if token not in vocabulary:
                raise UserError(
                    f"The vocabulary of {len(vocabulary)} entries has no {token}. "
                    "Give the one that belongs to the model (--tokenizer_name)."
                )
        self.cls_id, self.sep_id, self.pad_id = (vocabulary[t] for t in (classification, separator, padding))
        self.vocab_size = max(vocabulary.values()) + 1
        self._special_ids = {token: vocabulary.get(token, vocabulary[unknown]) for token in specials}
        self._specials = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
        self._ids = _WordIds(find_ids)

    @abstractmethod
    def _words(self, text: str, most: int) -> list[str]:
        """The first `most` words of a text without special tokens; each has at least one id."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_starts(texts, sys.maxsize)

    def encode_starts(self, texts: Sequence[str], most: int) -> list[list[int]]:
        return [self._encode(text, most) for text in texts]

    def _encode(self, text: str, most: int) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(self._specials.split(text)):  # text, special, text, special, ..., text
            if len(ids) >= most:
                break
            if place % 2:
                ids.append(self._special_ids[part])
            else:
                ids += itertools.chain.from_iterable(map(self._ids.__getitem__, self._words(part, most)))
        return ids


class _WordIds(dict[str, list[int]]):
    """The ids of each word, found when it first occurs. Long words are not cached, nor more than _MOST_WORDS."""

    def __init__(self, find_ids: Callable[[str], list[int]]):
        super().__init__()
        self._find_ids = find_ids

    def __missing__(self, word: str) -> list[int]:
        ids = self._find_ids(word)
        if len(word) <= LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def digest_of(*parts: str) -> str:
    """One digest of strings and their boundaries, and of the Unicode version that classifies characters."""
    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def must_exist(file: Path) -> None:
    """Raise UserError unless the file exists."""
    if not file.is_file():
        raise UserError(f"There is no {file.name} in {file.parent}. Give the folder of the model's vocabulary.")


def read_text(file: Path) -> str:
    """A file's text. Raises UserError if it does not exist, or is not UTF-8."""
    must_exist(file)
    try:
        return file.read_text(encoding="utf-8")  # universal newlines, as pytorch-transformers reads it
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text ({error}). Give a vocabulary file.") from error
