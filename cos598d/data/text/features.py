"""One part of a task as integers: ragged arrays from which batches are padded, built once and cached in a file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from cos598d.data.cache import Arrays, cached_arrays, checksum
from cos598d.data.examples import Draw, Examples, spread
from cos598d.data.text.encoder import TextEncoder
from cos598d.data.text.layout import Layout

if TYPE_CHECKING:  # imported where it is used: importing torch takes seconds
    import torch

FORMAT = 3  # increased when the meaning of cached data changes, so that old files are no longer found
_BLOCK = 1024  # examples tokenized at a time
_BATCH_CHARACTERS = 1 << 20
_ARRAYS = ("tokens", "offsets", "splits")

Item = TypeVar("Item")
Example = tuple[str, str | None, Mapping[str, int | float]]  # first text, second text or None, targets by name


class Features(Examples):
    """Texts as tokens, in the order of the data file.

    tokens: int32 (all tokens of all examples), with special tokens, truncated, not padded.
    offsets: int64 (examples + 1); example i is tokens[offsets[i]:offsets[i + 1]].
    splits: int32 (examples), where each example's second segment begins (see `Layout.arrange`).
    targets: what the model's head is trained on, each (examples,); for GLUE "labels".
    extra: a task's own arrays, of any shapes.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        splits: np.ndarray,
        targets: Mapping[str, np.ndarray],
        layout: Layout,
        pad_id: int,
        extra: Mapping[str, np.ndarray] | None = None,
    ):
        self.tokens, self.offsets, self.splits, self.targets = tokens, offsets, splits, dict(targets)
        self.extra = dict(extra or {})
        self.layout, self.pad_id = layout, pad_id
        self.lengths = np.diff(offsets).astype(np.int32)

    def take(self, indices: np.ndarray) -> "Features":
        """Only the examples at `indices`, in that order. For features without `extra`."""
        rows = [self.tokens[self.offsets[index] : self.offsets[index + 1]] for index in indices]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)])
        targets = {name: values[indices] for name, values in self.targets.items()}
        return Features(np.concatenate(rows), offsets, self.splits[indices], targets, self.layout, self.pad_id)

    def digest(self) -> str:
        return checksum(_arrays(self))

    def collate(self, indices: Sequence[int] | np.ndarray, draw: Draw | None = None) -> dict[str, "torch.Tensor"]:
        """A batch of the examples at `indices`, in that order, padded to the longest of them.

        input_ids, attention_mask and, where the model type has segments, token_type_ids: int64 (batch, sequence);
        the targets under their names, (batch,): labels int64, or float32 for regression.
        """
        import torch

        chosen = np.asarray(indices, dtype=np.int64)
        rows = [self.tokens[self.offsets[index] : self.offsets[index + 1]] for index in chosen]
        lengths = [len(row) for row in rows]
        width = max(lengths)
        arrays = {
            "input_ids": self.layout.pad(rows, width, self.pad_id),
            "attention_mask": self.layout.pad([np.ones(length) for length in lengths], width, 0),
        }
        if self.layout.uses_segments:
            segments = [self.layout.segments(*pair) for pair in zip(self.splits[chosen].tolist(), lengths, strict=True)]
            arrays["token_type_ids"] = self.layout.pad(segments, width, self.layout.pad_segment)
        arrays |= {name: values[chosen] for name, values in self.targets.items()}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batches(items: Iterable[Item], most: int, characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in lists of at most `most`, fewer if their `characters` are many, so that they take little memory."""
    batch: list[Item] = []
    together = 0
    for item in items:
        batch.append(item)
        together += characters(item)
        if len(batch) == most or together >= _BATCH_CHARACTERS:
            yield batch
            batch, together = [], 0
    if batch:
        yield batch


def build_features(
    examples: Iterable[Example], encoder: TextEncoder, max_seq_length: int, target_types: Mapping[str, type]
) -> Features:
    """Tokenize and arrange examples, a block at a time; they take four bytes of memory per token.

    target_types: each target's name and numpy type. Raises whatever iterating over `examples` raises, and UserError if
    `max_seq_length` leaves no room for text.
    """
    layout, specials = encoder.layout, (encoder.cls_id, encoder.sep_id)
    tokens, splits, lengths = [], [], []  # lists of arrays, one per block
    targets: dict[str, list[np.ndarray]] = {name: [] for name in target_types}
    for block in batches(examples, _BLOCK, lambda example: len(example[0]) + len(example[1] or "")):
        # At most `max_seq_length` tokens of a text can stay, whatever the other text is.
        firsts = encoder.encode_starts([first for first, _, _ in block], max_seq_length)
        # The assignment's rule: an empty second text counts as none, but one of white space makes a pair.
        seconds = iter(encoder.encode_starts([second for _, second, _ in block if second], max_seq_length))
        arranged = [
            layout.arrange(first, next(seconds) if second else None, *specials, max_seq_length)
            for first, (_, second, _) in zip(firsts, block, strict=True)
        ]
        tokens.append(np.fromiter((token for sequence, _ in arranged for token in sequence), np.int32))
        splits.append(np.fromiter((split for _, split in arranged), np.int32))
        lengths.append(np.fromiter((len(sequence) for sequence, _ in arranged), np.int64))
        for name, values in targets.items():
            values.append(np.array([target[name] for _, _, target in block], dtype=target_types[name]))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(lengths))])
    columns = {name: np.concatenate(values) for name, values in targets.items()}
    return Features(np.concatenate(tokens), offsets, np.concatenate(splits), columns, layout, encoder.pad_id)


def load_texts(
    task: str,
    part: str,
    key: Sequence[str],
    examples: Callable[[], Iterable[Example]],
    encoder: TextEncoder,
    max_seq_length: int,
    overwrite: bool,
    limit: int | None,
    label_type: type = np.int64,
    count: int | None = None,
) -> Features:
    """The features of a part of a task of texts, from the cache or from its `examples()`; `limit` as in Task.load.

    key: what the part's contents depend on; count: the number of examples, for the bar. Only a terminal shows the bar,
    and only for slow files.
    """

    def build() -> Features:
        from tqdm import tqdm

        rows = tqdm(examples(), f"{task} {part}: features", count, unit=" rows", delay=2, disable=None, leave=False)
        return build_features(rows, encoder, max_seq_length, {"labels": label_type})

    whole_key = (task, part, *key, str(max_seq_length))
    features = cached_features(f"{task}-{part}", whole_key, build, encoder, overwrite)
    return features if limit is None or limit >= len(features) else features.take(spread(len(features), limit))


def cached_features(
    name: str, key: Sequence[str], build: Callable[[], Features], encoder: TextEncoder, overwrite: bool = False
) -> Features:
    """The features in the cache folder under `name` and `key`, their content key; otherwise built and cached.

    See `cached_arrays` for which process builds, what `overwrite` means, and what is raised.
    """
    arrays = cached_arrays(
        "features", name, (str(FORMAT), encoder.fingerprint, *key), lambda: _arrays(build()), overwrite
    )
    targets, extra = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in ("target.", "extra.")
    )
    tokens, offsets, splits = (arrays[name] for name in _ARRAYS)
    return Features(tokens, offsets, splits, targets, encoder.layout, encoder.pad_id, extra)


def _arrays(features: Features) -> Arrays:
    arrays = {name: getattr(features, name) for name in _ARRAYS}
    arrays |= {f"target.{name}": values for name, values in features.targets.items()}
    return arrays | {f"extra.{name}": values for name, values in features.extra.items()}
