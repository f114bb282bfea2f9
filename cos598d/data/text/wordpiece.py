"""BERT's and DistilBERT's encoder: words, then greedily the longest word piece that the vocabulary has."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import models

from cos598d.data.text.characters import bert_word_sources, bert_words, combined_ends
from cos598d.data.text.encoder import Encoded, digest_of
from cos598d.data.text.layout import LAYOUTS, Layout
from cos598d.data.text.pieces import batches, pieces
from cos598d.data.text.rust_encoder import RustEncoder
from cos598d.data.text.vocabulary import read_text
from cos598d.errors import UserError
from cos598d.terminal.files import write_json, write_whole

SPECIALS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")


class WordPieceEncoder(RustEncoder):
    """BERT's and DistilBERT's: words, then greedily the longest word piece that the vocabulary has.

    pieces: the vocabulary, a piece's id being its place; of pieces listed twice the later place counts.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool, layout: Layout):
        vocabulary = {piece: place for place, piece in enumerate(pieces)}
        self._longest_word = 100
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=self._longest_word)
        self._prepare(SPECIALS, vocabulary, model)
        self.vocab_size = len(pieces)
        self.layout = layout
        self.fingerprint = digest_of("wordpiece", str(lower_case), repr(layout), *pieces)
        self._pieces, self._lower_case = list(pieces), lower_case

    def _words(self, text: str) -> str:
        return bert_words(text, self._lower_case)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        cuts = [self._cut(text) for text in texts]
        ids: list[list[np.ndarray]] = [[np.empty(0, dtype=np.int32)] for _ in cuts]
        spans: list[list[np.ndarray]] = [[np.empty((0, 2), dtype=np.int32)] for _ in cuts]
        parts = ((number, *piece) for number, cut in enumerate(cuts) for piece in pieces(cut, self._longest_word))
        for batch in batches(parts, len(cuts), lambda part: len(part[-1])):
            encodings = self._tokenizer.encode_batch([part[-1] for part in batch], add_special_tokens=False)
            for (number, begin, end, piece), encoding in zip(batch, encodings, strict=True):
                found = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + np.int32(begin)
                if len(piece) < end - begin:
                    found[-1, 1] = end  # the one word that was cut off
                ids[number].append(np.array(encoding.ids, dtype=np.int32))
                spans[number].append(found)
        joined = zip(texts, cuts, map(np.concatenate, ids), map(np.concatenate, spans), strict=True)
        return [self._locate(*item) for item in joined]

    def _locate(self, text: str, cut: str, ids: np.ndarray, spans: np.ndarray) -> Encoded:
        sources = self._sources(text)
        if len(sources) != len(cut):
            raise AssertionError(f"{len(cut)} characters come from {len(sources)}: {text!r}")
        lasts = sources[spans[:, 1] - 1]
        # Accents that lower-casing removes still belong to what the token stands for.
        ends = combined_ends(text)[lasts] if self._lower_case else lasts + 1
        return Encoded(ids, sources[spans[:, 0]], ends)

    def _sources(self, text: str) -> np.ndarray:
        """For each character of `_cut(text)`, the place in `text` that it comes from."""
        if self._specials.search(text) is None:
            return bert_word_sources(text, self._lower_case)
        places, begin = [], 0
        for odd, piece in enumerate(self._specials.split(text)):
            if odd:
                places.append(np.zeros(1, dtype=np.int32))  # the space that joins
            if odd % 2:
                # A special token is written in full, or as [UNK]: every character stands for all of it.
                known = len(self._known[piece])
                inner = np.minimum(np.arange(known, dtype=np.int32), len(piece) - 1)
                inner[-1] = len(piece) - 1
            else:
                inner = bert_word_sources(piece, self._lower_case)
            places.append(inner + np.int32(begin))
            begin += len(piece)
        return np.concatenate(places)

    def save(self, folder: Path) -> None:
        write_whole(folder / "vocab.txt", "".join(f"{piece}\n" for piece in self._pieces))
        # Without it pytorch_transformers would lower-case whatever the vocabulary.
        write_json(folder / "tokenizer_config.json", {"do_lower_case": self._lower_case, "init_inputs": []})


def load_wordpiece(source: Path, lower_case: bool, layout: Layout = LAYOUTS["bert"]) -> WordPieceEncoder:
    """BERT's encoder from a vocab.txt (one piece a line), given as the file or its folder.

    Raises UserError where it is missing, empty or not UTF-8.
    """
    file = source / "vocab.txt" if source.is_dir() else source
    pieces = read_text(file).split("\n")
    if pieces[-1] == "":
        del pieces[-1]
    if not pieces:
        raise UserError(f"{file} is empty: it should hold one word piece a line.")
    return WordPieceEncoder(pieces, lower_case, layout)
