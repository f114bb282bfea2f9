"""What an encoder is: text to the ids of one model's vocabulary."""

import hashlib
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cos598d.data.encoder import Encoder
from cos598d.data.text.layout import Layout
from cos598d.errors import UserError


class Encoded(NamedTuple):
    """A text's ids, and of each the characters of the text it stands for: text[starts[i]:ends[i]]. int32, (tokens,)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class TextEncoder(Encoder):
    """Turns texts into ids of one model's vocabulary.

    cls_id, sep_id, pad_id: the ids of the special tokens that a sequence needs.
    vocab_size: rows that the model's word embedding must have at least.
    layout: how this model type arranges the special tokens.

    Special tokens written out in a text ("[SEP]") become that token's id. Text of nothing but white space
    gives no ids (there pytorch-transformers returns one special token, whichever its hash seed puts first).
    What `save` writes, pytorch_transformers' tokenizer of this type loads.
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
        """As `encode_many`, but of each text at least the first `most` ids: a long one need not be read to its end."""
        return self.encode_many(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode_many`, with each token's place in its text. Raises UserError where an encoder does not know it."""
        raise UserError(
            "Only BERT's and DistilBERT's vocabularies without added tokens say where in a text a token stands, "
            "which SQuAD needs: choose --model_type bert or distilbert."
        )


def digest_of(*parts: str) -> str:
    """One digest over strings and where they end, and over the Unicode version that classifies characters."""
    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
