"""A vocabulary's files: which there are for each model type, and how they are read."""

from pathlib import Path

from cos598d.errors import UserError

FILES = {
    "bert": ("vocab.txt",),
    "distilbert": ("vocab.txt",),
    "roberta": ("vocab.json", "merges.txt"),
    "xlm": ("vocab.json", "merges.txt"),
    "xlnet": ("spiece.model",),
}


def must_exist(file: Path) -> None:
    """Raise UserError unless there is such a file."""
    if not file.is_file():
        raise UserError(f"There is no {file.name} in {file.parent}: give the folder of the model's vocabulary.")


def read_text(file: Path) -> str:
    """A file's text. Raises UserError where there is none, or it is not UTF-8."""
    must_exist(file)
    try:
        return file.read_text(encoding="utf-8")  # universal newlines, as pytorch-transformers reads it
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text ({error}): give a vocabulary file.") from error
