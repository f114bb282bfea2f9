"""The original assignment's `utils_glue`, on our readers and layouts: examples and features as objects."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cos598d.data.glue import metrics
from cos598d.data.glue.read import FORMATS, Format, GlueRow, read_lines, read_rows
from cos598d.data.text.layout import Layout
from cos598d.errors import UserError


def compute_metrics(task_name: str, preds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The official metrics of a GLUE task ("mnli-mm" for MNLI's mismatched set).

    preds, labels: (examples,), class ids, or scores for "sts-b".
    Raises KeyError for an unknown task, ValueError if the two differ in length or are empty.
    """
    return metrics.score(FORMATS[task_name.removesuffix("-mm")].metric, preds, labels)


@dataclass
class InputExample:
    """One example as text: `text_b` for pairs, `label` as in the file (a string, also for scores)."""

    guid: str
    text_a: str
    text_b: str | None = None
    label: str | None = None


@dataclass
class InputFeatures:
    """One example as ids, each list padded to the same length; `label_id` a class id, or a float for regression."""

    input_ids: list[int]
    input_mask: list[int]
    segment_ids: list[int]
    label_id: int | float


class DataProcessor:
    """Reads a task's examples; your own task overrides the three methods."""

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        """The examples to train on, from the files in `data_dir`."""
        raise NotImplementedError

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        """The examples to evaluate on, from the files in `data_dir`."""
        raise NotImplementedError

    def get_labels(self) -> list[str | None]:
        """The labels in the order of their ids."""
        raise NotImplementedError

    @classmethod
    def _read_tsv(cls, input_file: str, quotechar: str | None = None) -> list[list[str]]:
        """The rows of a tab-separated file, with the header. Quotes count only if `quotechar` is given."""
        texts = (text for _, text in read_lines(input_file))
        if quotechar is None:
            return [text.split("\t") for text in texts]
        return list(csv.reader((f"{text}\n" for text in texts), delimiter="\t", quotechar=quotechar))


class _GlueProcessor(DataProcessor):
    """A GLUE task's examples, read by our own loader."""

    form: Format
    dev_part = "dev"

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        return self._examples(data_dir, "train")

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        return self._examples(data_dir, self.dev_part)

    def get_labels(self) -> list[str | None]:
        return list(self.form.labels) or [None]  # a fresh list: scripts reorder it in place

    def _examples(self, data_dir: str, part: str) -> list[InputExample]:
        rows = read_rows(os.path.join(data_dir, f"{part}.tsv"), self.form)
        return [_example(row, part) for row in rows]

    def _create_examples(self, lines: Sequence[Sequence[str]], set_type: str) -> list[InputExample]:
        """The examples in the rows of `_read_tsv`; their guids begin with `set_type`."""
        first = 1 if self.form.has_header else 0
        examples = []
        for line, cells in enumerate(lines[first:], start=first + 1):
            row = self.form.row(cells, line)
            if row is not None:
                examples.append(_example(row, set_type))
            elif not self.form.broken_lines:
                raise UserError(
                    f"Row {line} of {self.form.folder} has {len(cells)} columns. Give it {self.form.width}."
                )
        return examples


def _example(row: GlueRow, set_type: str) -> InputExample:
    return InputExample(f"{set_type}-{row.identity}", row.text_a, row.text_b, row.label)


def _processor(
    name: str, task: str, dev_part: str = "dev", base: type[_GlueProcessor] = _GlueProcessor
) -> type[_GlueProcessor]:
    form = FORMATS[task]
    members = {"form": form, "dev_part": dev_part, "__doc__": f"{form.folder}'s examples.", "__module__": __name__}
    return type(name, (base,), members)


ColaProcessor = _processor("ColaProcessor", "cola")
Sst2Processor = _processor("Sst2Processor", "sst-2")
MrpcProcessor = _processor("MrpcProcessor", "mrpc")
StsbProcessor = _processor("StsbProcessor", "sts-b")
QqpProcessor = _processor("QqpProcessor", "qqp")
MnliProcessor = _processor("MnliProcessor", "mnli", "dev_matched")
MnliMismatchedProcessor = _processor("MnliMismatchedProcessor", "mnli", "dev_mismatched", MnliProcessor)
QnliProcessor = _processor("QnliProcessor", "qnli")
RteProcessor = _processor("RteProcessor", "rte")
WnliProcessor = _processor("WnliProcessor", "wnli")

processors: dict[str, type[_GlueProcessor]] = {
    "cola": ColaProcessor,
    "mnli": MnliProcessor,
    "mnli-mm": MnliMismatchedProcessor,
    "mrpc": MrpcProcessor,
    "sst-2": Sst2Processor,
    "sts-b": StsbProcessor,
    "qqp": QqpProcessor,
    "qnli": QnliProcessor,
    "rte": RteProcessor,
    "wnli": WnliProcessor,
}
output_modes = {
    name: "classification" if processor.form.labels else "regression" for name, processor in processors.items()
}
# The assignment leaves the mismatched set out: it is evaluated with MNLI's model.
GLUE_TASKS_NUM_LABELS = {name: len(form.labels) or 1 for name, form in FORMATS.items()}


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
    """Examples as padded lists of `max_seq_length` ids, in the examples' order.

    tokenizer: anything with `tokenize(text)` and `convert_tokens_to_ids(tokens)`, such as pytorch_transformers'.
    output_mode: "classification" (labels by their index in `label_list`) or "regression" (labels as floats).
    pad_token: an id; cls_token and sep_token are tokens. The other arguments describe how the model type arranges
        sequences. The defaults are the assignment's (its scripts pass BERT's `cls_token_segment_id` of 0 themselves).
        Raises KeyError for another output mode, UserError for a label that is not in the list or is not a number.
    """
    label_id = {"classification": _class_id, "regression": _score}[output_mode]
    layout = Layout(
        cls_at_end=cls_token_at_end,
        extra_sep=sep_token_extra,
        pad_on_left=pad_on_left,
        cls_segment=cls_token_segment_id,
        first_segment=sequence_a_segment_id,
        second_segment=sequence_b_segment_id,
        pad_segment=pad_token_segment_id,
    )
    real, padding = (1, 0) if mask_padding_with_zero else (0, 1)
    features = []
    for example in examples:
        first = tokenizer.tokenize(example.text_a)
        second = tokenizer.tokenize(example.text_b) if example.text_b else None
        tokens, split = layout.arrange(first, second, cls_token, sep_token, max_seq_length)
        ids, segments = tokenizer.convert_tokens_to_ids(tokens), layout.segments(split, len(tokens))
        features.append(
            InputFeatures(
                input_ids=layout.pad([ids], max_seq_length, pad_token)[0].tolist(),
                input_mask=layout.pad([[real] * len(tokens)], max_seq_length, padding)[0].tolist(),
                segment_ids=layout.pad([segments], max_seq_length, pad_token_segment_id)[0].tolist(),
                label_id=label_id(example, label_list),
            )
        )
    return features


def _class_id(example: InputExample, label_list: Sequence[str | None]) -> int:
    if example.label not in label_list:
        raise UserError(f"Example {example.guid} has the unknown label {example.label!r}. Use one of {label_list}.")
    return list(label_list).index(example.label)


def _score(example: InputExample, label_list: Sequence[str | None]) -> float:
    try:
        return float(example.label or "")
    except ValueError as error:
        raise UserError(
            f"Example {example.guid} has the score {example.label!r}, which is not a number. Give a number."
        ) from error
