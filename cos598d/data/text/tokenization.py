"""Text to vocabulary ids: the encoder of each model type, equal to pytorch-transformers' own tokenizer."""

import os
from collections.abc import Sequence
from pathlib import Path

from cos598d.data.text.byte_level import ByteLevelEncoder
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.layout import LAYOUTS
from cos598d.data.text.library_encoder import LibraryEncoder
from cos598d.data.text.vocabulary import has_added_tokens, wanted
from cos598d.data.text.wordpiece import WordPieceEncoder, load_wordpiece
from cos598d.errors import UserError


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
            raise UserError(f"A list of word pieces cannot be a vocabulary for {model_type}: give a folder.")
        return WordPieceEncoder(source, lower_case, layout)
    source = Path(source)
    if not source.exists():
        raise UserError(f"There is no vocabulary at {source}: give a folder that holds {wanted(model_type)}.")
    if model_type in ("xlm", "xlnet") or has_added_tokens(source):
        return LibraryEncoder(model_type, source, lower_case, layout)
    if model_type == "roberta":
        if not source.is_dir():
            raise UserError(f"{source} is one file: give the folder that holds {wanted(model_type)}.")
        return ByteLevelEncoder(source, layout)
    return load_wordpiece(source, lower_case, layout)
