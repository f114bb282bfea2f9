"""A task of your own, from a file: `--task_name FILE.py:CLASS`."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cos598d.data.glue.metrics import ACCURACY, CORRELATIONS
from cos598d.data.glue.metrics import score as standard_score
from cos598d.data.task import Scores, Task
from cos598d.errors import UsageError, UserError
from cos598d.terminal.own_code import load_class, raised
from cos598d.terminal.printable import printable

if TYPE_CHECKING:
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import Example, Features

PARTS = ("train", "dev", "test")
MOST_CLASSES = 1000
_FORM = "Give (text, label) or (text, second text, label)"
_SHOWN = 100  # most characters of a value in an error

Row = tuple[str, str | None, Any]  # the first text, the second or None, the label


class OwnTask(Task):
    """Texts, or pairs of them, with a class or a number each, from your class:

        class MyTask:
            classes = ("no", "yes")  # the labels; None: labels are numbers

            def examples(self, part, data_dir):
                yield text, label  # or text, second text, label

    `part` is "train", "dev" or "test"; labels of "test" are not read. `data_dir` is the flag's value, or None.
    `examples` is called several times on every rank, and must give the same each time. The metrics are the accuracy, or
    correlations for numbers. Your class may define others: `metrics`, a tuple of names, and
    `score(predictions, labels)`, which returns a dict of them. Both arguments are arrays (examples,) of indices into
    `classes`, or of numbers.
    """

    head = "sequence_classification"
    evaluation_parts = ("dev",)

    def __init__(self, named: str):
        """`named` is FILE.py:CLASS. Raises UsageError for a file or a class that cannot be used."""
        own = load_class(named, ("examples",), "task", "Write what is missing")
        self.name, self._named = own.__name__, named
        self._file = str(Path(named.rpartition(":")[0]).resolve())
        try:
            self._own: Any = own()
        except Exception as error:
            raise UsageError(
                f"{named} cannot be constructed: {self._why(error)}. Let its __init__ take no arguments."
            ) from error
        self.classes = self._read_classes()
        self.num_labels = len(self.classes) or 1
        self._metric = ACCURACY if self.classes else CORRELATIONS
        has_own_score = callable(getattr(own, "score", None))
        self.metrics = self._read_metrics() if has_own_score else self._metric.names
        self._has_own_score = has_own_score

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str | None, str]:
        return data_dir, self._named + (f" on {data_dir}" if data_dir else "")

    def check(self, location: str | None, parts: Sequence[str] | None = None) -> None:
        for part in ("train", *self.evaluation_parts) if parts is None else parts:
            self._label(next(self._rows(part, location))[2], part)

    def load(
        self,
        part: str,
        location: str | None,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> "Features":
        from cos598d.data.text.features import load_texts

        digest, count = hashlib.sha256(repr(self.classes).encode()), 0
        for row in self._rows(part, location):
            digest.update(repr(row).encode(errors="surrogatepass"))
            count += 1

        def examples() -> Iterator["Example"]:
            for number, (text, second, label) in enumerate(self._rows(part, location)):
                yield text, second, {"labels": self._label(label, part, number)}

        kind, key = np.int64 if self.classes else np.float32, (digest.hexdigest(),)
        return load_texts(self.name, part, key, examples, encoder, max_seq_length, overwrite_cache, limit, kind, count)

    def test_sets(self, location: str | None) -> dict[str, str | None]:
        return {"": location}

    def unlabelled(self, source: str | Path | None) -> Iterator[tuple[str, tuple[str, ...]]]:
        data_dir = None if source is None else str(source)
        for number, (text, second, _) in enumerate(self._rows("test", data_dir)):
            yield str(number), (text,) if second is None else (text, second)

    def score(self, part: str, outputs: np.ndarray, features: "Features") -> Scores:
        predictions = outputs.argmax(axis=1) if self.classes else outputs.reshape(-1)
        if not self._has_own_score:
            return Scores(standard_score(self._metric, predictions, features.labels))
        try:
            found = self._own.score(predictions, features.labels)
        except Exception as error:
            raise UserError(f"{self._named}: score() {self._why(error)}. Fix that file.") from error
        is_right = isinstance(found, Mapping) and set(found) == set(self.metrics)
        if not is_right or not all(_is_finite(value) for value in found.values()):
            raise UserError(
                f"{self._named}: score() returned {_shown(found)}. Return a dict with a finite number for "
                f"{' and '.join(self.metrics)}."
            )
        return Scores({name: float(found[name]) for name in self.metrics})

    def _read_classes(self) -> tuple[str, ...]:
        """The labels; () if labels are numbers. Raises UsageError unless they are a tuple of names."""
        found = getattr(self._own, "classes", ())
        if found is None:
            return ()
        is_list = isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found)
        if not is_list or not 2 <= len(set(found)) == len(found) <= MOST_CLASSES:
            raise UsageError(
                f"{self._named} has classes = {_shown(found)}. Give a tuple of 2 to {MOST_CLASSES} different names, or "
                "None if labels are numbers."
            )
        return tuple(found)

    def _read_metrics(self) -> tuple[str, ...]:
        found = getattr(self._own, "metrics", ())
        if not isinstance(found, (list, tuple)) or not found or not all(isinstance(one, str) for one in found):
            raise UsageError(
                f"{self._named} has score() and metrics = {_shown(found)}. Give a tuple of the names that score() "
                'returns, such as metrics = ("f1",).'
            )
        return tuple(found)

    def _rows(self, part: str, data_dir: str | None) -> Iterator[Row]:
        """The rows that `examples` gives for a part. Raises UserError with the call and the example."""
        if part not in PARTS:
            raise ValueError(f"{self.name} has the parts {', '.join(PARTS)}, not {part!r}.")
        call = f"{self._named}: examples({part!r}, {data_dir!r})"
        number = -1
        try:
            found = self._own.examples(part, data_dir)
            if not hasattr(found, "__iter__"):
                raise UserError(f"{call} returned {_shown(found)}. Yield examples, or return a list of them.")
            for number, row in enumerate(found):
                if not isinstance(row, (list, tuple)) or len(row) not in (2, 3):
                    raise UserError(f"{call}, example {number}, is {_shown(row)}. {_FORM}.")
                texts = row[:-1]
                if not all(isinstance(text, str) for text in texts):
                    raise UserError(f"{call}, example {number}, is {_shown(row)}. {_FORM}, where texts are str.")
                yield texts[0], texts[1] if len(texts) == 2 else None, row[-1]
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{call} {self._why(error)}. Fix that file.") from error
        if number < 0:
            raise UserError(f"{call} gave no example. Give at least one.")

    def _label(self, label: Any, part: str, number: int = 0) -> int | float:
        """A label as the model is trained on it. Raises UserError if it is not a class, or not a number."""
        if isinstance(label, str) and label in self.classes:
            return self.classes.index(label)
        if not self.classes and _is_finite(label):
            return float(label)
        known = f"one of the classes {', '.join(self.classes)}" if self.classes else "a finite number"
        raise UserError(
            f"{self._named}: the label of example {number} of {part!r} is {_shown(label)}. Give "
            f"{printable(known, _SHOWN)}."
        )

    def _why(self, error: Exception) -> str:
        return raised(error, self._file)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return printable(repr(value), _SHOWN)
