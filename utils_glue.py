"""The course's `utils_glue`: GLUE's examples as objects, and as padded lists of ids, for scripts that import it.

Scripts keep their features with `torch.save`, and `torch.load` them in their next run and on other ranks. Since torch
2.6 that refuses classes that nobody has named safe, so ours are registered below.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cos598d.data.metrics import acc_and_f1, pearson_and_spearman, simple_accuracy  # noqa: F401 - for scripts
from cos598d.data.tables import GLUE, TABLES, Table
from cos598d.errors import UserError


@dataclass
class InputExample:
    """One example as text: `text_b` for pairs, `label` as in the file (a string, also for scores)."""

    guid: str
    text_a: str
    text_b: str | None = None
    label: str | None = None


@dataclass
class InputFeatures:
    """One example as padded lists of ids; `label_id` is a class id, or a float for regression."""

    input_ids: list[int]
    input_mask: list[int]
    segment_ids: list[int]
    label_id: int | float


torch.serialization.add_safe_globals([InputExample, InputFeatures])


class DataProcessor:
    """The base of a task of your own, with get_train_examples(data_dir), get_dev_examples(data_dir), get_labels()."""

    @classmethod
    def _read_tsv(cls, input_file: str, quotechar: str | None = None) -> list[list[str]]:
        """The rows of a tab-separated file, with the header. Quotes count only if `quotechar` is given."""
        quoting = csv.QUOTE_MINIMAL if quotechar else csv.QUOTE_NONE
        with open(input_file, encoding="utf-8-sig", newline="") as lines:
            return list(csv.reader(lines, delimiter="\t", quotechar=quotechar, quoting=quoting))


class _GlueProcessor(DataProcessor):
    """A GLUE task's examples. Its labels are in the order of their ids; [None] for scores."""

    table: Table
    dev_part: str

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        return self._create_examples(self._read_tsv(f"{data_dir}/train.tsv"), "train")

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        return self._create_examples(self._read_tsv(f"{data_dir}/{self.dev_part}.tsv"), self.dev_part)

    def get_labels(self) -> list[str | None]:
        return list(self.table.labels or ()) or [None]  # a fresh list: scripts reorder it in place

    def _create_examples(self, lines: Sequence[Sequence[str]], set_type: str) -> list[InputExample]:
        """The examples in the rows of `_read_tsv`; their guids begin with `set_type`."""
        names, rows = (self.table.columns, lines) if self.table.columns else (lines[0], lines[1:])
        wanted = [list(names).index(name) for name in (*self.table.texts, self.table.label)]
        whole = [cells for cells in rows if len(cells) > max(wanted) or not self.table.skips]
        found = []
        for number, cells in enumerate(whole):
            first, *second, label = [cells[place] for place in wanted]
            found.append(InputExample(f"{set_type}-{number}", first, second[0] if second else None, label))
        return found


def _processor(prefix: str, task: str, dev_part: str) -> type[_GlueProcessor]:
    members = {"table": TABLES[task], "dev_part": dev_part, "__doc__": f"{task}'s examples.", "__module__": __name__}
    return type(f"{prefix}Processor", (_GlueProcessor,), members)


_PREFIXES = ("Cola", "Sst2", "Mrpc", "Stsb", "Qqp", "Mnli", "Qnli", "Rte", "Wnli")
_KINDS = [_processor(prefix, task, TABLES[task].dev[0]) for prefix, task in zip(_PREFIXES, GLUE, strict=True)]
ColaProcessor, Sst2Processor, MrpcProcessor, StsbProcessor, QqpProcessor, *_OTHERS = _KINDS
MnliProcessor, QnliProcessor, RteProcessor, WnliProcessor = _OTHERS
MnliMismatchedProcessor = _processor("MnliMismatched", "mnli", "dev_mismatched")
processors = dict(zip(GLUE, _KINDS, strict=True)) | {"mnli-mm": MnliMismatchedProcessor}
output_modes = {name: "classification" if one.table.labels else "regression" for name, one in processors.items()}
# The assignment leaves the mismatched set out: it is evaluated with MNLI's model.
GLUE_TASKS_NUM_LABELS = {name: len(TABLES[name].labels or ()) or 1 for name in GLUE}


def compute_metrics(task_name: str, preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The official metrics of a GLUE task ("mnli-mm" for MNLI's mismatched set). Both arrays are (examples,)."""
    assert len(preds) == len(labels) > 0, f"{len(preds)} predictions for {len(labels)} labels"
    return TABLES[task_name.removesuffix("-mm")].metric.compute(np.asarray(preds), np.asarray(labels))


def convert_examples_to_features(
    examples: Sequence[InputExample],
    label_list: Sequence[str | None],
    max_seq_length: int,
    tokenizer: Any,
    output_mode: str,
    cls_token_at_end: bool = False,
    cls_token: str = "[CLS]",
    cls_token_segment_id: int = 1,
    sep_token: str = "[SEP]",
    sep_token_extra: bool = False,
    pad_on_left: bool = False,
    pad_token: int = 0,
    pad_token_segment_id: int = 0,
    sequence_a_segment_id: int = 0,
    sequence_b_segment_id: int = 1,
    mask_padding_with_zero: bool = True,
) -> list[InputFeatures]:
    """Examples as padded lists of `max_seq_length` ids, made by a tokenizer such as pytorch_transformers'.

    The defaults are the assignment's. Raises UserError for a label that is not in the list, or is not a number.
    """
    features = []
    for example in examples:
        first = tokenizer.tokenize(example.text_a)
        second = tokenizer.tokenize(example.text_b) if example.text_b else []
        room = max_seq_length - (3 if example.text_b else 2) - sep_token_extra
        while len(first) + len(second) > room:  # the longer one is cut; of equal ones, the second
            (first if len(first) > len(second) else second).pop()
        tokens = [*first, sep_token, *([sep_token] if sep_token_extra else [])]
        segments = [sequence_a_segment_id] * len(tokens)
        if second:
            tokens, segments = [*tokens, *second, sep_token], segments + [sequence_b_segment_id] * (len(second) + 1)
        place, real = (len(tokens) if cls_token_at_end else 0), int(mask_padding_with_zero)
        tokens.insert(place, cls_token)
        segments.insert(place, cls_token_segment_id)
        rows = tokenizer.convert_tokens_to_ids(tokens), [real] * len(tokens), segments
        padded = []
        for row, filler in zip(rows, (pad_token, 1 - real, pad_token_segment_id), strict=True):
            padding = [filler] * (max_seq_length - len(row))
            padded.append(padding + row if pad_on_left else row + padding)
        try:
            label_id = {"classification": list(label_list).index, "regression": float}[output_mode](example.label)
        except (ValueError, TypeError) as error:
            known = f"one of {label_list}" if output_mode == "classification" else "a number"
            raise UserError(f"Example {example.guid} has the label {example.label!r}. Use {known}.") from error
        features.append(InputFeatures(*padded, label_id))
    return features
