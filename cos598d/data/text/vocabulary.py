"""A vocabulary's files: which there are for each model type, and how they are read."""

from pathlib import Path

from cos598d.errors import UserError
from cos598d.terminal.reading import parse_json, read_json

FILES = {
    "bert": ("vocab.txt",),
    "distilbert": ("vocab.txt",),
    "roberta": ("vocab.json", "merges.txt"),
    "xlm": ("vocab.json", "merges.txt"),
    "xlnet": ("spiece.model",),
}


def wanted(model_type: str) -> str:
    """The names of a model type's files, for sentences."""
    return " and ".join(FILES[model_type])


def has_added_tokens(source: Path) -> bool:
    """Whether a saved tokenizer brings tokens beyond its vocabulary (pytorch-transformers writes {} for none)."""
    file = (source if source.is_dir() else source.parent) / "added_tokens.json"
    try:
        return bool(read_json(file))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): correct or remove it.") from error


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


def parse_vocabulary(file: Path, text: str) -> dict[str, int]:
    """Ids by token, from the JSON `text` of `file`, which is named where the text raises UserError."""
    try:
        vocabulary = parse_json(text)
        return {str(token): int(place) for token, place in vocabulary.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a vocabulary ({error}): it should map tokens to ids in JSON.") from error
