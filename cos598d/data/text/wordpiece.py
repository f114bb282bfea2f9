"""BERT's and DistilBERT's encoder: words, then greedily the longest word piece that the vocabulary has."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import models

from cos598d.data.text.characters import bert_word_sources, bert_words, combined_ends
from cos598d.data.text.encoder import LONGEST_WORD, Encoded, WordEncoder, digest_of
from cos598d.data.text.layout import Layout
from cos598d.terminal.files import write_json, write_whole

_SPECIALS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
_WORD = re.compile(r"\S+")


class WordPieceEncoder(WordEncoder):
    """BERT's and DistilBERT's: words, then greedily the longest word piece in the vocabulary.

    pieces: the vocabulary; a piece's id is its index, or its last index if it is listed twice.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool, layout: Layout):
        vocabulary = {piece: place for place, piece in enumerate(pieces)}
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
        super().__init__(_SPECIALS, vocabulary, lambda word: [token.id for token in model.tokenize(word)])
        self.vocab_size = len(pieces)
        self.layout = layout
        self.fingerprint = digest_of("wordpiece", str(lower_case), repr(layout), *pieces)
        self._pieces, self._lower_case = list(pieces), lower_case

    def _words(self, text: str, most: int) -> list[str]:
        return bert_words(text, self._lower_case).split(None, most)[:most]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        return [self._encode_with_offsets(text) for text in texts]

    def _encode_with_offsets(self, text: str) -> Encoded:
        ids: list[int] = []
        firsts, lasts, begin = [], [], 0  # for each token the index in `text` of its first and its last character
        for place, part in enumerate(self._specials.split(text)):
            if place % 2:
                ids.append(self._special_ids[part])
                firsts.append([begin])
                lasts.append([begin + len(part) - 1])
            else:
                found, starts, ends = self._cut(bert_words(part, self._lower_case))
                sources = bert_word_sources(part, self._lower_case) + np.int32(begin)
                ids += found
                firsts.append(sources[starts])
                lasts.append(sources[ends - 1])
            begin += len(part)
        first, last = (np.concatenate(places).astype(np.int32) for places in (firsts, lasts))
        # Accents that lower-casing removes still belong to the characters that a token covers.
        return Encoded(np.array(ids, np.int32), first, combined_ends(text)[last] if self._lower_case else last + 1)

    def _cut(self, words: str) -> tuple[list[int], np.ndarray, np.ndarray]:
        """The ids of words that spaces separate, and where in `words` the characters of each begin and end."""
        ids: list[int] = []
        starts, ends = [], []
        for match in _WORD.finditer(words):
            found = self._ids[match[0]]
            ids += found
            place = match.start()
            for piece in found[:-1]:
                starts.append(place)
                # A word's first piece is written unchanged, the others with ## in front.
                place += len(self._pieces[piece]) - 2 * (place > match.start())
                ends.append(place)
            starts.append(place)
            ends.append(match.end())  # a single token is the whole word, also if it is [UNK]
        return ids, np.array(starts, np.int64), np.array(ends, np.int64)

    def save(self, folder: Path) -> None:
        write_whole(folder / "vocab.txt", "".join(f"{piece}\n" for piece in self._pieces))
        # Without it pytorch_transformers would always lower-case.
        write_json(folder / "tokenizer_config.json", {"do_lower_case": self._lower_case, "init_inputs": []})
