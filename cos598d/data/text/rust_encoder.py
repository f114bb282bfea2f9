"""Encoders whose words are cut in Python and whose pieces of words are found by the Rust library."""

import re
import sys
from abc import abstractmethod
from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers

from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.pieces import PIECE, pieces
from cos598d.errors import UserError


class RustEncoder(TextEncoder):
    """Words cut in Python, their pieces found by the Rust library; subclasses say how a text is cut."""

    _tokenizer: Tokenizer
    _specials: re.Pattern[str]
    _longest_word: int | None = None  # in characters; a longer one is [UNK], whatever it is

    def _prepare(self, specials: Sequence[str], vocabulary: dict[str, int], model: models.Model) -> None:
        unknown, separator, padding, classification, _ = specials
        for token in (unknown, separator, padding, classification):
            if token not in vocabulary:
                raise UserError(
                    f"The vocabulary of {len(vocabulary)} entries has no {token}: "
                    "give the one that belongs to the model (--tokenizer_name)."
                )
        self.cls_id, self.sep_id, self.pad_id = (vocabulary[t] for t in (classification, separator, padding))
        self.vocab_size = max(vocabulary.values()) + 1
        self._known = {token: token if token in vocabulary else unknown for token in specials}
        self._specials = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # Ids of special tokens stay those of the vocabulary; registered so that no model takes them apart.
        self._tokenizer.add_special_tokens(sorted(set(self._known.values())))

    @abstractmethod
    def _words(self, text: str) -> str:
        """The text cut into words, spaces between them."""

    def _cut(self, text: str) -> str:
        if self._specials.search(text) is None:
            return self._words(text)
        pieces = self._specials.split(text)  # text, special, text, special, ..., text
        return " ".join(self._known[piece] if odd % 2 else self._words(piece) for odd, piece in enumerate(pieces))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode_starts(texts, sys.maxsize)

    def encode_starts(self, texts: Sequence[str], most: int) -> list[list[int]]:
        cuts = [self._cut(text) for text in texts]
        # Short texts in one call, which works in parallel; a long one by pieces, since words are encoded one by one.
        short = [cut if len(cut) <= PIECE else "" for cut in cuts]
        found = [encoding.ids for encoding in self._tokenizer.encode_batch_fast(short, add_special_tokens=False)]
        for ids, cut in zip(found, cuts, strict=True):
            for _, _, piece in pieces(cut, self._longest_word) if len(cut) > PIECE else ():
                if len(ids) >= most:
                    break
                ids += self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        return found
