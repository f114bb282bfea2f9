"""Text to vocabulary ids, one encoder for each model type, equal to pytorch-transformers' own tokenizers."""

import hashlib
import os
import re
import sys
import tempfile
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from cos598d.data.text.characters import bert_word_sources, bert_words, combined_ends, visible_bytes
from cos598d.data.text.layout import LAYOUTS, Layout
from cos598d.data.text.pieces import PIECE, batches, pieces
from cos598d.errors import UserError
from cos598d.files import parse_json, read_json, write_json, write_whole

_FILES = {
    "bert": ("vocab.txt",),
    "distilbert": ("vocab.txt",),
    "roberta": ("vocab.json", "merges.txt"),
    "xlm": ("vocab.json", "merges.txt"),
    "xlnet": ("spiece.model",),
}
_EXTRA_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_BERT_SPECIALS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
_ROBERTA_SPECIALS = ("<unk>", "</s>", "<pad>", "<s>", "<mask>")
# How GPT-2 and RoBERTa cut text before merging bytes (Radford et al. 2019): a word takes the space before it along.
_BYTE_LEVEL_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Encoded(NamedTuple):
    """A text's ids, and of each the characters of the text it stands for: text[starts[i]:ends[i]]. int32, (tokens,)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class TextEncoder(ABC):
    """Turns texts into ids of one model's vocabulary.

    cls_id, sep_id, pad_id: the ids of the special tokens that a sequence needs.
    vocab_size: rows that the model's word embedding must have at least.
    fingerprint: hex digest over everything that the ids depend on.
    layout: how this model type arranges the special tokens.

    Special tokens written out in a text ("[SEP]") become that token's id. Text of nothing but white space
    gives no ids (there pytorch-transformers returns one special token, whichever its hash seed puts first).
    """

    cls_id: int
    sep_id: int
    pad_id: int
    vocab_size: int
    fingerprint: str
    layout: Layout

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it and without truncation."""

    def encode_starts(self, texts: Sequence[str], most: int) -> list[list[int]]:
        """As `encode_many`, but of each text at least the first `most` ids: a long one need not be read to its end."""
        return self.encode_many(texts)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode_many`, with each token's place in its text. Raises UserError where an encoder knows none."""
        raise UserError(
            "Only BERT's and DistilBERT's vocabularies without added tokens tell where in a text a token stands, "
            "which SQuAD needs: choose --model_type bert or distilbert."
        )

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files from which pytorch_transformers' tokenizer of this type loads, each whole or not at all."""


class _RustEncoder(TextEncoder):
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


class WordPieceEncoder(_RustEncoder):
    """BERT's and DistilBERT's: words, then greedily the longest word piece that the vocabulary has.

    pieces: the vocabulary, a piece's id being its place; of pieces listed twice the later place counts.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool, layout: Layout):
        vocabulary = {piece: place for place, piece in enumerate(pieces)}
        self._longest_word = 100
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=self._longest_word)
        self._prepare(_BERT_SPECIALS, vocabulary, model)
        self.vocab_size = len(pieces)
        self.layout = layout
        self.fingerprint = _digest("wordpiece", str(lower_case), repr(layout), *pieces)
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


class ByteLevelEncoder(_RustEncoder):
    """RoBERTa's: byte-pair merges of UTF-8 bytes. Text is stripped and gets one space in front."""

    def __init__(self, folder: Path, layout: Layout):
        import regex  # comes with pytorch-transformers, which cuts by it; `re` has no \p{L}

        self._pattern = regex.compile(_BYTE_LEVEL_WORDS)
        vocabulary_text, merges_text = (_read_text(folder / name) for name in _FILES["roberta"])
        vocabulary = _parse_vocabulary(folder / "vocab.json", vocabulary_text)
        merges = [tuple(line.split()) for line in merges_text.split("\n")[1:-1]]
        try:
            model = models.BPE(vocabulary, merges, unk_token="<unk>")
        except Exception as error:  # the library raises nothing more specific
            raise UserError(
                f"{folder / 'merges.txt'} does not fit vocab.json beside it ({error}): "
                "give a folder whose two files belong together."
            ) from error
        self._prepare(_ROBERTA_SPECIALS, vocabulary, model)
        self.layout = layout
        self.fingerprint = _digest("bytelevel", regex.__version__, repr(layout), vocabulary_text, merges_text)
        self._files = {"vocab.json": vocabulary_text, "merges.txt": merges_text}

    def _words(self, text: str) -> str:
        text = text.strip()
        return " ".join(map(visible_bytes, self._pattern.findall(f" {text}"))) if text else ""

    def save(self, folder: Path) -> None:
        for name, text in self._files.items():
            write_whole(folder / name, text)


class LibraryEncoder(TextEncoder):
    """pytorch-transformers' own tokenizer, for XLNet and XLM, and for vocabularies with added tokens."""

    def __init__(self, model_type: str, source: Path, lower_case: bool, layout: Layout):
        from cos598d.library import pytorch_transformers  # slow to import, and only these model types need it

        names = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "xlm": "XLM", "xlnet": "XLNet"}
        tokenizer_class = getattr(pytorch_transformers, f"{names[model_type]}Tokenizer")
        for name in _FILES[model_type] if source.is_dir() else ():
            _must_exist(source / name)
        try:
            # Resolved, so that no folder is taken for the name of a model to download.
            self._tokenizer = tokenizer_class.from_pretrained(str(source.resolve()), do_lower_case=lower_case)
        except Exception as error:  # whatever a damaged file makes json, sentencepiece or the class raise
            reason = " ".join(str(error).split())
            raise UserError(f"{source} holds no readable {model_type} vocabulary: {reason}.") from error
        tokens = (self._tokenizer.cls_token, self._tokenizer.sep_token, self._tokenizer.pad_token)
        self.cls_id, self.sep_id, self.pad_id = self._tokenizer.convert_tokens_to_ids(tokens)
        self.vocab_size = len(self._tokenizer)
        self.layout = layout
        folder, own = (source, _FILES[model_type]) if source.is_dir() else (source.parent, (source.name,))
        files = [folder / name for name in (*own, *_EXTRA_FILES)]
        contents = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists())
        self.fingerprint = _digest(model_type, str(lower_case), repr(layout), *contents)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        tokenize, ids = self._tokenizer.tokenize, self._tokenizer.convert_tokens_to_ids
        return [ids(tokenize(text)) if text.strip() else [] for text in texts]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer.") as beside:
            self._tokenizer.save_pretrained(beside)
            for file in sorted(Path(beside).iterdir()):
                os.replace(file, folder / file.name)


def load_encoder(model_type: str, source: Path | Sequence[str], lower_case: bool) -> TextEncoder:
    """The encoder of a model type ("bert", "distilbert", "roberta", "xlm", "xlnet").

    source: a folder with the files of that type, one vocab.txt file, or a list of word pieces (BERT, DistilBERT).
    lower_case: as the vocabulary wants it; RoBERTa and XLM decide for themselves.
    Raises UserError for an unknown type, a missing or unreadable file, or a vocabulary without the special tokens.
    """
    layout = LAYOUTS.get(model_type)
    if layout is None:
        raise UserError(f"Unknown model type {model_type!r}: choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(source, str | os.PathLike):
        if model_type not in ("bert", "distilbert"):
            raise UserError(f"A list of word pieces makes no {model_type} vocabulary: give a folder.")
        return WordPieceEncoder(source, lower_case, layout)
    source = Path(source)
    if not source.exists():
        raise UserError(f"There is no vocabulary at {source}: give a folder that holds {_wanted(model_type)}.")
    if model_type in ("xlm", "xlnet") or _has_added_tokens(source):
        return LibraryEncoder(model_type, source, lower_case, layout)
    if model_type == "roberta":
        if not source.is_dir():
            raise UserError(f"{source} is one file: give the folder that holds {_wanted(model_type)}.")
        return ByteLevelEncoder(source, layout)
    return load_wordpiece(source, lower_case, layout)


def load_wordpiece(source: Path, lower_case: bool, layout: Layout = LAYOUTS["bert"]) -> WordPieceEncoder:
    """BERT's encoder from a vocab.txt (one piece a line), given as the file or its folder; UserError if it is none."""
    file = source / "vocab.txt" if source.is_dir() else source
    pieces = _read_text(file).split("\n")
    if pieces[-1] == "":
        del pieces[-1]
    if not pieces:
        raise UserError(f"{file} is empty: it should hold one word piece a line.")
    return WordPieceEncoder(pieces, lower_case, layout)


def _wanted(model_type: str) -> str:
    return " and ".join(_FILES[model_type])


def _has_added_tokens(source: Path) -> bool:
    """Whether a saved tokenizer brings tokens beyond its vocabulary (pytorch-transformers writes {} for none)."""
    file = (source if source.is_dir() else source.parent) / "added_tokens.json"
    try:
        return bool(read_json(file))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): mend or remove it.") from error


def _must_exist(file: Path) -> None:
    if not file.is_file():
        raise UserError(f"There is no {file.name} in {file.parent}: give the folder of the model's vocabulary.")


def _read_text(file: Path) -> str:
    _must_exist(file)
    try:
        return file.read_text(encoding="utf-8")  # universal newlines, as pytorch-transformers reads it
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text ({error}): give a vocabulary file.") from error


def _parse_vocabulary(file: Path, text: str) -> dict[str, int]:
    try:
        vocabulary = parse_json(text)
        return {str(token): int(place) for token, place in vocabulary.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no vocabulary ({error}): it should map tokens to ids in JSON.") from error


def _digest(*parts: str) -> str:
    """One digest over strings and where they end, and over the Unicode version that classifies characters."""
    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for part in parts:
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
