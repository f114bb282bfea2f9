"""The course's `utils_glue`: a script written for it and pytorch-transformers runs on ours unchanged, twice."""

import sys

import numpy as np
import pytest
from data_files import FILES, write_task
from programs import ROOT, Program, free_port

sys.path.insert(0, str(ROOT))  # where the course's scripts find it: next to them

import utils_glue  # noqa: E402
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


def test_utils_glue_has_every_name_of_the_course():
    names = ["Cola", "Sst2", "Mrpc", "Stsb", "Qqp", "Mnli", "MnliMismatched", "Qnli", "Rte", "Wnli"]
    for name in [f"{name}Processor" for name in names] + ["DataProcessor", "InputExample", "InputFeatures"]:
        assert isinstance(getattr(utils_glue, name), type)
    assert sorted(utils_glue.processors) == sorted(utils_glue.output_modes) == TASKS
    assert sorted(utils_glue.GLUE_TASKS_NUM_LABELS) == [name for name in TASKS if name != "mnli-mm"]
    assert utils_glue.GLUE_TASKS_NUM_LABELS["mnli"] == 3
    assert [name for name, mode in utils_glue.output_modes.items() if mode == "regression"] == ["sts-b"]
    entailment = ["entailment", "not_entailment"]
    expected = dict.fromkeys(TASKS, ["0", "1"]) | {"rte": entailment, "qnli": entailment, "sts-b": [None]}
    expected |= dict.fromkeys(("mnli", "mnli-mm"), ["contradiction", "entailment", "neutral"])
    for name, processor in utils_glue.processors.items():
        labels = processor().get_labels()
        assert labels == expected[name]
        labels.reverse()  # the course's scripts do that
        assert processor().get_labels() == expected[name]


def test_layouts_of_the_course():
    assert convert("a b", "c") == ([1, 10, 11, 2, 12, 2, 0, 0], [1] * 6 + [0, 0], [1, 0, 0, 0, 1, 1, 0, 0])
    assert convert("a b c d", "c d e f", cls_token_segment_id=0)[0] == [1, 10, 11, 12, 2, 12, 13, 2], "cut in turn"
    at_end = {"cls_token_at_end": True, "pad_on_left": True, "cls_token_segment_id": 2, "pad_token_segment_id": 4}
    assert convert("a", None, **at_end) == ([0] * 5 + [10, 2, 1], [0] * 5 + [1] * 3, [4] * 5 + [0, 0, 2])
    more = {"sep_token_extra": True, "mask_padding_with_zero": False, "pad_token": 9}
    assert convert("a", "b", **more)[:2] == ([1, 10, 2, 2, 11, 2, 9, 9], [0] * 6 + [1, 1])


@pytest.mark.parametrize("name", FILES)
def test_processors_read_the_files_that_training_reads(name, tmp_path):
    write_task(tmp_path, name)
    processor = utils_glue.processors[name]()
    train, dev = processor.get_train_examples(str(tmp_path)), processor.get_dev_examples(str(tmp_path))
    assert len(train) == 2
    assert {one.text_b is None for one in train} == {name in ("cola", "sst-2")}
    assert train[0].text_a in ("one", "one two")
    assert dev[0].guid.startswith("dev")
    assert dev[0].label in (*processor.get_labels(), "0.000")


def test_labels_that_cannot_be_converted_are_named():
    example = utils_glue.InputExample("dev-3", "a", None, "x")
    for mode, words in (("classification", "Use one of"), ("regression", "Use a number")):
        with pytest.raises(UserError, match=f"dev-3 has the label 'x'. {words}"):
            utils_glue.convert_examples_to_features([example], ["0"], 8, Toy(), mode)


def test_metrics_have_the_courses_keys():
    preds, labels = np.array([0, 1, 1, 1]), np.array([0, 1, 0, 1])
    keys = {"rte": {"acc"}, "mnli-mm": {"acc"}, "mrpc": {"acc", "f1", "acc_and_f1"}, "cola": {"mcc"}}
    keys["sts-b"] = {"pearson", "spearmanr", "corr"}
    assert {name: set(utils_glue.compute_metrics(name, preds, labels)) for name in keys} == keys
    with pytest.raises(AssertionError, match="3 predictions for 4 labels"):
        utils_glue.compute_metrics("rte", preds[:3], labels)


STUDENT = """
import os, sys, torch, torch.distributed as dist
from pytorch_transformers import BertConfig, BertForSequenceClassification, BertTokenizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from utils_glue import compute_metrics, convert_examples_to_features, output_modes, processors

data_dir, rank, world_size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    if rank != 0:
        dist.barrier()  # rank 0 makes the features first, as in the course's script
processor = processors["rte"]()
label_list = processor.get_labels()
cached = os.path.join(data_dir, "cached_train_rte")
if os.path.exists(cached):
    features = torch.load(cached)
    print("loaded", flush=True)
else:
    tokenizer = BertTokenizer.from_pretrained(data_dir, do_lower_case=True)
    examples = processor.get_train_examples(data_dir)
    features = convert_examples_to_features(examples, label_list, 64, tokenizer, output_modes["rte"])
    torch.save(features, cached)
    print("made", flush=True)
if world_size > 1 and rank == 0:
    dist.barrier()
names = ("input_ids", "input_mask", "segment_ids", "label_id")
columns = [torch.tensor([getattr(f, name) for f in features]) for name in names]
dataset = TensorDataset(*columns)
sampler = DistributedSampler(dataset, world_size, rank, shuffle=False) if world_size > 1 else None
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
model = BertForSequenceClassification(BertConfig(int(sys.argv[5]), num_labels=2, **sizes))
for ids, mask, segments, labels in DataLoader(dataset, batch_size=8, sampler=sampler):
    loss, logits = model(ids, attention_mask=mask, token_type_ids=segments, labels=labels)[:2]
    loss.backward()
    print("loss", loss.item(), compute_metrics("rte", logits.argmax(1).numpy(), labels.numpy()), flush=True)
    break
"""


def test_a_students_script_runs_unchanged_twice_and_on_two_ranks(tmp_path):
    from cos598d.data.samples import vocabulary, write_rte_sample

    write_rte_sample(tmp_path)
    pieces = vocabulary()
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    (tmp_path / "run_glue.py").write_text(STUDENT)
    environ = {"PYTHONPATH": str(ROOT)}

    def run(ranks, name):
        port = str(free_port())
        words = [["run_glue.py", str(tmp_path), str(rank), str(ranks), port, str(len(pieces))] for rank in range(ranks)]
        programs = [Program(tmp_path, f"{name}{rank}", each, environ) for rank, each in enumerate(words)]
        assert [program.wait() for program in programs] == [0] * ranks, programs[-1].text
        return [program.text.splitlines() for program in programs]

    first, second = run(1, "first")[0], run(1, "second")[0]
    assert (first[0], second[0]) == ("made", "loaded")
    assert first[1] == second[1]
    (tmp_path / "cached_train_rte").unlink()
    ranks = run(2, "ranks")
    assert [lines[0] for lines in ranks] == ["made", "loaded"]
    assert all("loss" in lines[1] for lines in ranks)
