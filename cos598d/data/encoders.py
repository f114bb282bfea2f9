"""Encoders turn a task's texts or images into the inputs of one model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer, normalizers, processors
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from cos598d.errors import UserError, first_line
from cos598d.terminal.files import write_json
from cos598d.terminal.reading import read_json

_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of red, green and blue (ITU-R BT.601), as in Pillow's "L"
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.txt",), ("vocab.json", "merges.txt"))
Text = tuple[str, str | None]  # one text, or a pair


class Encoder(ABC):
    """What turns texts or images into inputs, next to the model that reads them."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files from which the encoder can be made again."""


class TextEncoder(Encoder):
    """A tokenizer of the `tokenizers` library, which knows the special tokens of its model.

    vocab_size: the least number of rows of the model's word embedding. has_segments: whether the model reads
    token_type_ids, which only BERT does.
    """

    def __init__(self, tokenizer: Tokenizer, has_segments: bool = True):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self.has_segments = tokenizer, has_segments
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.pad_id, self.cls_id, self.sep_id = map(self._special, ("[PAD] <pad>", "[CLS] <s>", "[SEP] </s>"))

    def _special(self, names: str) -> int:
        found = [self._tokenizer.token_to_id(name) for name in names.split()]
        known = next((number for number in found if number is not None), None)
        if known is None:
            raise UserError(
                f"the vocabulary has no {names.split(maxsplit=1)[0]}. Give the one that belongs to the model."
            )
        return known

    def encode(self, texts: Sequence[Text], most: int) -> list[Encoding]:
        """Each text or pair with its special tokens, cut at the end of the longer one to `most` tokens."""
        self._tokenizer.enable_truncation(most)
        found: list[Encoding] = self._tokenizer.encode_batch([(a, b) if b else a for a, b in texts])
        self._tokenizer.no_truncation()
        return found

    def pieces(self, texts: Sequence[str]) -> list[Encoding]:
        """Each text alone, whole and without special tokens, with the characters that each token covers (`offsets`)."""
        found: list[Encoding] = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return found

    def save(self, folder: Path) -> None:
        """tokenizer.json for `tokenizers` and transformers, and the files that pytorch-transformers reads."""
        self._tokenizer.save(str(folder / "tokenizer.json"))
        self._tokenizer.model.save(str(folder))
        lowers = bool(getattr(self._tokenizer.normalizer, "lowercase", False))
        write_json(folder / "tokenizer_config.json", {"do_lower_case": lowers, "init_inputs": []})


def load_encoder(folder: Path, has_segments: bool, lower_case: bool = False, name: str = "") -> TextEncoder:
    """The tokenizer in a model's folder: tokenizer.json, or vocab.txt, or vocab.json and merges.txt.

    vocab.txt does not say whether its text is lower-cased: tokenizer_config.json does, or an "uncased" in the model's
    `name`. `lower_case` does in any case. Raises UserError.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif (folder / "vocab.txt").is_file():
            tokenizer = word_pieces((folder / "vocab.txt").read_text("utf-8").split("\n"), _lowers(folder, name))
        else:
            tokenizer = _byte_pairs(folder)
        if lower_case and isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
            tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        return TextEncoder(tokenizer, has_segments)
    except UserError:
        raise
    except Exception as error:  # the library raises nothing more specific
        wanted = ", or ".join(" and ".join(files) for files in TOKENIZER_FILES)
        raise UserError(f"{folder} has no tokenizer that can be read ({first_line(error)}). Give {wanted}.") from error


def word_pieces(pieces: Sequence[str], lower_case: bool) -> Tokenizer:
    """BERT's tokenizer of a vocabulary, whose pieces are in the order of their ids."""
    known = {piece: number for number, piece in enumerate(pieces) if piece}
    return BertWordPieceTokenizer(known, lowercase=lower_case)._tokenizer


def _byte_pairs(folder: Path) -> Tokenizer:
    """RoBERTa's tokenizer, which puts a space in front of a text."""
    known = ByteLevelBPETokenizer.from_file(
        str(folder / "vocab.json"), str(folder / "merges.txt"), add_prefix_space=True, trim_offsets=True
    )
    ends, begins = (known.token_to_id(token) for token in ("</s>", "<s>"))
    tokenizer: Tokenizer = known._tokenizer
    tokenizer.add_special_tokens([token for token in ("<s>", "<pad>", "</s>", "<unk>") if known.token_to_id(token)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", ends), ("<s>", begins), add_prefix_space=True)
    return tokenizer


def _lowers(folder: Path, name: str) -> bool:
    try:
        stated = read_json(folder / "tokenizer_config.json").get("do_lower_case")
    except (OSError, ValueError, AttributeError):
        stated = None  # missing or not understood: the name decides
    return stated if isinstance(stated, bool) else "uncased" in Path(name.partition("@")[0]).name.lower()


@dataclass(frozen=True)
class ImageForm:
    """The properties of a task's images that matter to a model.

    size: a suitable width and height in pixels; channels: 3, or 1 for grey; is_asked_for: the user gave the size.
    """

    size: int
    channels: int
    is_asked_for: bool = False


class ImageEncoder(Encoder):
    """Scales images to size x size pixels, of 3 channels or 1 (grey), and their values from 0...255 to -1...1.

    An image that is not square is stretched, as by transformers' ViTImageProcessor.
    """

    def __init__(self, size: int, channels: int):
        self.size, self.channels = size, channels

    def fit(self, pixels: np.ndarray) -> np.ndarray:
        """Images of one size, uint8 (images, height, width, 1 or 3), as uint8 (images, size, size, channels)."""
        if pixels.shape[3] < self.channels:
            pixels = np.repeat(pixels, self.channels, axis=3)
        elif pixels.shape[3] > self.channels:
            pixels = np.rint(pixels @ _GREY)[..., None].astype(np.uint8)
        if pixels.shape[1:3] == (self.size, self.size):
            return pixels
        planes = torch.tensor(pixels).permute(0, 3, 1, 2).float()
        resized = torch.nn.functional.interpolate(planes, (self.size, self.size), mode="bilinear", antialias=True)
        return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()

    def scale(self, pixels: np.ndarray) -> torch.Tensor:
        """uint8 (images, size, size, channels) as the model's input, float32 (images, channels, size, size)."""
        values = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
        return torch.from_numpy(np.ascontiguousarray(values.transpose(0, 3, 1, 2)))

    def save(self, folder: Path) -> None:
        """transformers' preprocessor_config.json."""
        size, half = {"height": self.size, "width": self.size}, [0.5] * self.channels
        settings = {"image_processor_type": "ViTImageProcessor", "size": size, "image_mean": half, "image_std": half}
        write_json(folder / "preprocessor_config.json", settings)
