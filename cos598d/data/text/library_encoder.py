"""pytorch-transformers' own tokenizers as encoders."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cos598d.data.text.encoder import TextEncoder, digest_of
from cos598d.data.text.layout import Layout
from cos598d.data.text.vocabulary import FILES, must_exist
from cos598d.errors import UserError

EXTRA_FILES = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")


class LibraryEncoder(TextEncoder):
    """pytorch-transformers' own tokenizer, for XLNet and XLM, and for vocabularies with added tokens."""

    def __init__(self, model_type: str, source: Path, lower_case: bool, layout: Layout):
        from cos598d.data.library import pytorch_transformers  # slow to import, and only these model types need it

        names = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "xlm": "XLM", "xlnet": "XLNet"}
        tokenizer_class = getattr(pytorch_transformers, f"{names[model_type]}Tokenizer")
        for name in FILES[model_type] if source.is_dir() else ():
            must_exist(source / name)
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
        folder, own = (source, FILES[model_type]) if source.is_dir() else (source.parent, (source.name,))
        files = [folder / name for name in (*own, *EXTRA_FILES)]
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
