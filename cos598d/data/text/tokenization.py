"""Text to vocabulary ids: the encoder of each model type, equal to pytorch-transformers' own tokenizer."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cos598d.data.text.byte_level import ByteLevelEncoder
from cos598d.data.text.encoder import FILES, TextEncoder, digest_of, must_exist, read_text
from cos598d.data.text.layout import LAYOUTS, Layout
from cos598d.data.text.wordpiece import WordPieceEncoder
from cos598d.errors import UserError
from cos598d.terminal.reading import read_json

_EXTRA_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")


def load_encoder(model_type: str, source: Path | Sequence[str], lower_case: bool) -> TextEncoder:
    """The encoder of a model type ("bert", "distilbert", "roberta", "xlm", "xlnet").

    source: a folder with the files of that type, one vocab.txt file, or a list of word pieces (BERT, DistilBERT).
    lower_case: as the vocabulary needs it; RoBERTa and XLM ignore it. Raises UserError for an unknown type, a missing
        or unreadable file, or a vocabulary without the special tokens.
    """
    layout = LAYOUTS.get(model_type)
    if layout is None:
        raise UserError(f"Unknown model type {model_type!r}. Choose one of {', '.join(LAYOUTS)}.")
    if not isinstance(source, str | os.PathLike):
        if model_type not in ("bert", "distilbert"):
            raise UserError(f"A list of word pieces cannot be a vocabulary for {model_type}. Give a folder.")
        return WordPieceEncoder(source, lower_case, layout)
    source, wanted = Path(source), " and ".join(FILES[model_type])
    if not source.exists():
        raise UserError(f"There is no vocabulary at {source}. Give a folder that has {wanted}.")
    if model_type in ("xlm", "xlnet") or _has_added_tokens(source):
        return LibraryEncoder(model_type, source, lower_case, layout)
    if model_type == "roberta":
        if not source.is_dir():
            raise UserError(f"{source} is one file. Give the folder that has {wanted}.")
        return ByteLevelEncoder(source, layout)
    file = source / "vocab.txt" if source.is_dir() else source
    pieces = read_text(file).removesuffix("\n").split("\n")
    if pieces == [""]:
        raise UserError(f"{file} is empty. Give a file with one word piece per line.")
    return WordPieceEncoder(pieces, lower_case, layout)


def _has_added_tokens(source: Path) -> bool:
    """Whether a saved tokenizer has tokens in addition to its vocabulary (pytorch-transformers writes {} for none)."""
    file = (source if source.is_dir() else source.parent) / "added_tokens.json"
    try:
        return bool(read_json(file))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}). Correct or remove it.") from error


class LibraryEncoder(TextEncoder):
    """pytorch-transformers' own tokenizer, for XLNet and XLM, and for vocabularies with added tokens."""

    def __init__(self, model_type: str, source: Path, lower_case: bool, layout: Layout):
        from cos598d.data.library import pytorch_transformers  # slow to import, and only these model types need it

        names = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "xlm": "XLM", "xlnet": "XLNet"}
        tokenizer_class = getattr(pytorch_transformers, f"{names[model_type]}Tokenizer")
        for name in FILES[model_type] if source.is_dir() else ():
            must_exist(source / name)
        try:
            # Resolved, so that a folder is not taken for the name of a model to download.
            self._tokenizer = tokenizer_class.from_pretrained(str(source.resolve()), do_lower_case=lower_case)
        except Exception as error:  # a damaged file may make json, sentencepiece or the class raise anything
            reason = " ".join(str(error).split())
            raise UserError(
                f"{source} has no readable {model_type} vocabulary ({reason}). Give a folder that has one."
            ) from error
        tokens = (self._tokenizer.cls_token, self._tokenizer.sep_token, self._tokenizer.pad_token)
        self.cls_id, self.sep_id, self.pad_id = self._tokenizer.convert_tokens_to_ids(tokens)
        self.vocab_size = len(self._tokenizer)
        self.layout = layout
        folder, own = (source, FILES[model_type]) if source.is_dir() else (source.parent, (source.name,))
        files = [folder / name for name in (*own, *_EXTRA_FILES)]
        contents = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists())
        self.fingerprint = digest_of(model_type, str(lower_case), repr(layout), *contents)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        tokenize, ids = self._tokenizer.tokenize, self._tokenizer.convert_tokens_to_ids
        return [ids(tokenize(text)) if text.strip() else [] for text in texts]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer.") as beside:
            self._tokenizer.save_pretrained(beside)
            for file in sorted(Path(beside).iterdir()):
                os.replace(file, folder / file.name)
