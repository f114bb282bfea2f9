"""RoBERTa's encoder: byte-pair merges of UTF-8 bytes."""

from pathlib import Path

from tokenizers import models

from cos598d.data.text.characters import visible_bytes
from cos598d.data.text.encoder import FILES, WordEncoder, digest_of, read_text
from cos598d.data.text.layout import Layout
from cos598d.errors import UserError
from cos598d.terminal.files import write_whole
from cos598d.terminal.reading import parse_json

_SPECIALS = ("<unk>", "</s>", "<pad>", "<s>", "<mask>")
# How GPT-2 and RoBERTa split text before merging bytes (Radford et al. 2019): a word includes the space before it.
_WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class ByteLevelEncoder(WordEncoder):
    """RoBERTa's: words of UTF-8 bytes, then merges of pairs. Text is stripped, and a space is put in front."""

    def __init__(self, folder: Path, layout: Layout):
        import regex  # comes with pytorch-transformers, which splits with it; `re` has no \p{L}

        self._pattern = regex.compile(_WORDS)
        vocabulary_text, merges_text = (read_text(folder / name) for name in FILES["roberta"])
        try:
            vocabulary = {str(token): int(place) for token, place in parse_json(vocabulary_text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            file = folder / "vocab.json"
            raise UserError(
                f"{file} is not a vocabulary ({error}). Give a JSON file that maps tokens to ids."
            ) from error
        try:
            merges = [(first, second) for first, second in map(str.split, merges_text.split("\n")[1:-1])]
            model = models.BPE(vocabulary, merges, unk_token="<unk>")
        except Exception as error:  # the library raises nothing more specific
            raise UserError(
                f"{folder / 'merges.txt'} does not fit the vocab.json next to it ({error}). "
                "Give a folder whose two files belong together."
            ) from error
        super().__init__(
            _SPECIALS, vocabulary, lambda word: [token.id for token in model.tokenize(visible_bytes(word))]
        )
        self.layout = layout
        self.fingerprint = digest_of("bytelevel", regex.__version__, repr(layout), vocabulary_text, merges_text)
        self._files = {"vocab.json": vocabulary_text, "merges.txt": merges_text}

    def _words(self, text: str, most: int) -> list[str]:
        text = text.strip()
        return self._pattern.findall(f" {text}")[:most] if text else []

    def save(self, folder: Path) -> None:
        for name, text in self._files.items():
            write_whole(folder / name, text)
