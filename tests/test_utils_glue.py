"""The course's `utils_glue`: a script written for it and pytorch-transformers runs on ours unchanged."""

import inspect
import os
import sys

import numpy as np
import pytest
from data_files import MNLI_DEV
from programs import ROOT

sys.path.insert(0, str(ROOT))  # where the course's scripts find it: next to them

import utils_glue  # noqa: E402
from cos598d.data import get_task  # noqa: E402
from cos598d.errors import UserError  # noqa: E402

TASKS = ["cola", "mnli", "mnli-mm", "mrpc", "qnli", "qqp", "rte", "sst-2", "sts-b", "wnli"]


class Toy:
    """A tokenizer of letters: "a" is 10, "b" 11; [CLS] is 1, [SEP] 2."""

    def tokenize(self, text):
        return text.split()

    def convert_tokens_to_ids(self, tokens):
        return [{"[CLS]": 1, "[SEP]": 2}.get(token) or ord(token) - 87 for token in tokens]


def convert(text_a, text_b, **options):
    example = utils_glue.InputExample("x", text_a, text_b, "1")
    (feature,) = utils_glue.convert_examples_to_features([example], ["0", "1"], 8, Toy(), "classification", **options)
    assert feature.label_id == 1
    return feature.input_ids, feature.input_mask, feature.segment_ids


def write(folder, name, *rows):
    (folder / name).write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def test_utils_glue_has_every_name_of_the_course_and_no_code():
    names = ["Cola", "Sst2", "Mrpc", "Stsb", "Qqp", "Mnli", "MnliMismatched", "Qnli", "Rte", "Wnli"]
    for name in [f"{name}Processor" for name in names] + ["DataProcessor", "InputExample", "InputFeatures"]:
        assert inspect.isclass(getattr(utils_glue, name))
    assert sorted(utils_glue.processors) == sorted(utils_glue.output_modes) == TASKS
    assert sorted(utils_glue.GLUE_TASKS_NUM_LABELS) == [name for name in TASKS if name != "mnli-mm"]
    assert utils_glue.GLUE_TASKS_NUM_LABELS["mnli"] == 3
    assert utils_glue.GLUE_TASKS_NUM_LABELS["sts-b"] == 1
    assert {name for name, mode in utils_glue.output_modes.items() if mode == "regression"} == {"sts-b"}
    source = inspect.getsource(utils_glue)
    assert not [word for word in ("def ", "class ", "for ", "if ", "lambda") if f"\n{word}" in source]


def test_labels_have_the_course_s_order_in_a_new_list():
    entailment = ["entailment", "not_entailment"]
    expected = dict.fromkeys(TASKS, ["0", "1"]) | {"rte": entailment, "qnli": entailment, "sts-b": [None]}
    expected |= dict.fromkeys(("mnli", "mnli-mm"), ["contradiction", "entailment", "neutral"])
    for name, processor in utils_glue.processors.items():
        labels = processor().get_labels()
        assert labels == expected[name]
        labels[:] = []  # scripts swap RoBERTa's MNLI labels in place
        assert processor().get_labels() == expected[name]


def test_bert_layout_with_the_course_s_default_and_its_scripts_segment():
    assert convert("a b", "c") == ([1, 10, 11, 2, 12, 2, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0])
    assert convert("a b", "c", cls_token_segment_id=0)[2] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert convert("a b", None) == ([1, 10, 11, 2, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0])


def test_xlnet_layout():
    options = {"cls_token_at_end": True, "cls_token_segment_id": 2, "pad_on_left": True, "pad_token_segment_id": 4}
    assert convert("a b", "c", pad_token=5, **options) == (
        [5, 5, 10, 11, 2, 12, 2, 1],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [4, 4, 0, 0, 0, 1, 1, 2],
    )


def test_roberta_layout_mask_and_segment_options():
    assert convert("a", "b", sep_token_extra=True, cls_token_segment_id=0, pad_token=9) == (
        [1, 10, 2, 2, 11, 2, 9, 9],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
    )
    _, mask, segments = convert(
        "a", "b", mask_padding_with_zero=False, sequence_a_segment_id=6, sequence_b_segment_id=7
    )
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1]
    assert segments == [1, 6, 6, 7, 7, 0, 0, 0]
    assert convert("a", "b", cls_token="x", sep_token="y")[0][:3] == [33, 10, 34]


def test_processors_give_the_course_s_guids(tmp_path):
    write(tmp_path, "train.tsv", ["index", "sentence1", "sentence2", "label"], ["7", 'a "b', "c", "entailment"])
    (example,) = utils_glue.RteProcessor().get_train_examples(str(tmp_path))
    assert vars(example) == {"guid": "train-7", "text_a": 'a "b', "text_b": "c", "label": "entailment"}
    write(tmp_path, "train.tsv", ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["1", "8", "9", "a", "b"])
    (example,) = utils_glue.MrpcProcessor().get_train_examples(str(tmp_path))
    assert vars(example) == {"guid": "train-1", "text_a": "a", "text_b": "b", "label": "1"}
    write(tmp_path, "dev.tsv", ["gj04", "0", "*", "a"], ["gj04", "1", "", "b"])
    examples = utils_glue.ColaProcessor().get_dev_examples(str(tmp_path))
    assert [(e.guid, e.text_a, e.text_b, e.label) for e in examples] == [
        ("dev-0", "a", None, "0"),
        ("dev-1", "b", None, "1"),
    ]
    for part, label in (("dev_matched", "neutral"), ("dev_mismatched", "entailment")):
        write(tmp_path, f"{part}.tsv", MNLI_DEV.split(), [str(n) for n in range(15)] + [label])
    for name, label in (("mnli", "neutral"), ("mnli-mm", "entailment")):
        (example,) = utils_glue.processors[name]().get_dev_examples(str(tmp_path))
        assert (example.text_a, example.text_b, example.label) == ("8", "9", label)


def test_your_own_processor_can_use_read_tsv(tmp_path):
    class Own(utils_glue.DataProcessor):
        def get_train_examples(self, data_dir):
            lines = self._read_tsv(os.path.join(data_dir, "own.tsv"), quotechar='"')
            return [utils_glue.InputExample(guid=str(n), text_a=line[0]) for n, line in enumerate(lines)]

    (tmp_path / "own.tsv").write_bytes(b'\xef\xbb\xbf"a\tb"\tc\r\nd\te\r\n')
    assert [example.text_a for example in Own().get_train_examples(str(tmp_path))] == ["a\tb", "d"]
    assert utils_glue.DataProcessor._read_tsv(str(tmp_path / "own.tsv")) == [['"a', 'b"', "c"], ["d", "e"]]
    with pytest.raises(NotImplementedError):
        Own().get_dev_examples(str(tmp_path))
    lines = [["id"] * 6, ["1", "2", "3", "a", "b", "0"], ["torn", "line", "1"]]
    (example,) = utils_glue.QqpProcessor()._create_examples(lines, "dev")  # the course too passes QQP's torn lines over
    assert (example.guid, example.text_b) == ("dev-1", "b")
    with pytest.raises(UserError, match="Row 3 of RTE has 3 columns. Give it 4"):
        utils_glue.RteProcessor()._create_examples([["header"], ["1", "a", "b", "entailment"], ["2", "a", "b"]], "dev")


def test_labels_that_cannot_be_converted_are_named():
    bad = [utils_glue.InputExample("dev-3", "a", None, "maybe")]
    with pytest.raises(UserError, match="Example dev-3 has the unknown label 'maybe'"):
        utils_glue.convert_examples_to_features(bad, ["0", "1"], 8, Toy(), "classification")
    with pytest.raises(UserError, match="Example dev-3 has the score 'maybe'"):
        utils_glue.convert_examples_to_features(bad, [None], 8, Toy(), "regression")
    with pytest.raises(KeyError):
        utils_glue.convert_examples_to_features(bad, [None], 8, Toy(), "ranking")


def test_metrics_have_the_course_s_keys():
    keys = dict.fromkeys(TASKS, ["acc"]) | {"cola": ["mcc"], "sts-b": ["pearson", "spearmanr", "corr"]}
    keys |= dict.fromkeys(("mrpc", "qqp"), ["acc", "f1", "acc_and_f1"])
    first = {"cola": "mcc", "mrpc": "acc_and_f1", "qqp": "acc_and_f1", "sts-b": "corr"}
    for name in TASKS:
        assert list(utils_glue.compute_metrics(name, np.array([0, 1, 1]), np.array([0, 1, 0]))) == keys[name]
        metrics = get_task(name.removesuffix("-mm")).metrics
        assert sorted(metrics) == sorted(keys[name])
        assert metrics[0] == first.get(name, "acc"), "the main one comes first"
    with pytest.raises(KeyError):
        utils_glue.compute_metrics("boolq", np.array([0]), np.array([0]))
    assert utils_glue.simple_accuracy(np.array([0, 1]), np.array([0, 0])) == 0.5
    assert utils_glue.acc_and_f1(np.array([1, 1]), np.array([1, 1]))["f1"] == 1.0
    assert utils_glue.pearson_and_spearman(np.array([1.0, 2.0]), np.array([2.0, 4.0]))["corr"] == pytest.approx(1.0)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset
from pytorch_transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from utils_glue import compute_metrics, convert_examples_to_features, output_modes, processors

data_dir, vocabulary, task = sys.argv[1], sys.argv[2], "rte"
processor, output_mode = processors[task](), output_modes[task]
label_list = processor.get_labels()
tokenizer = BertTokenizer.from_pretrained(vocabulary, do_lower_case=True)
examples = processor.get_dev_examples(data_dir)
features = convert_examples_to_features(examples, label_list, 32, tokenizer, output_mode,
    cls_token_at_end=False, cls_token=tokenizer.cls_token, cls_token_segment_id=0, sep_token=tokenizer.sep_token,
    sep_token_extra=False, pad_on_left=False,
    pad_token=tokenizer.convert_tokens_to_ids([tokenizer.pad_token])[0], pad_token_segment_id=0)
dataset = TensorDataset(torch.tensor([f.input_ids for f in features], dtype=torch.long),
    torch.tensor([f.input_mask for f in features], dtype=torch.long),
    torch.tensor([f.segment_ids for f in features], dtype=torch.long),
    torch.tensor([f.label_id for f in features], dtype=torch.long))
config = BertConfig(vocab_size_or_config_json_file=len(tokenizer), hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(config).eval()
preds = []
for ids, mask, segments, labels in DataLoader(dataset, sampler=SequentialSampler(dataset), batch_size=2):
    loss, logits = model(input_ids=ids, attention_mask=mask, token_type_ids=segments, labels=labels)[:2]
    preds += logits.argmax(1).tolist()
print(sorted(compute_metrics(task, torch.tensor(preds).numpy(), dataset.tensors[3].numpy())), ids.shape[1])
"""


def test_a_student_s_script_runs_unchanged(tmp_path, start):
    pytest.importorskip("pytorch_transformers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    rows = [[str(n), "A b a", "b", label] for n, label in enumerate(["entailment", "not_entailment", "entailment"])]
    write(tmp_path, "dev.tsv", ["index", "sentence1", "sentence2", "label"], *rows)
    program = start("student", ["-c", SCRIPT, tmp_path, tmp_path / "vocab.txt"], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    assert program.text == "['acc'] 32\n"
