"""An evaluation: validation loss and scikit-learn's precision, recall and F1, in the record, TensorBoard and page."""

import contextlib
import json
import re

import numpy as np
import pytest
import torch
from report_records import edit, report, write_run
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from cos598d.comm.communicator import Communicator
from cos598d.commands.report import load_records
from cos598d.data import get_task
from cos598d.data.classes import MACRO, MOST_CONFUSED, class_scores
from cos598d.data.samples import vocabulary
from cos598d.data.tasks import TaskOptions
from cos598d.data.text.features import Features, build_features
from cos598d.data.text.layout import Layout
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError
from cos598d.evaluate import Evaluation, mean_loss, model_outputs
from cos598d.models.build import build_model, find_model
from cos598d.tools.report.load import load_run
from cos598d.tools.report.page import build_page


@pytest.mark.parametrize(("count", "examples"), [(2, 50), (5, 200), (10, 12), (25, 300), (3, 1)])
def test_the_scores_are_scikit_learns(count, examples):
    generator = np.random.default_rng(count)
    labels, predicted = generator.integers(0, count, examples), generator.integers(0, count, examples)
    found = class_scores(predicted, labels, [str(number) for number in range(count)])
    macro = precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)[:3]
    assert [found.macro[key] for key in MACRO] == pytest.approx(macro)
    columns = precision_recall_fscore_support(labels, predicted, labels=range(count), zero_division=0)
    for key, column in zip(("precision", "recall", "f1", "examples"), columns):
        assert [one[key] for one in found.by_class] == pytest.approx(list(column))
    wanted = confusion_matrix(labels, predicted, labels=range(count)).tolist()
    assert found.confusion == (wanted if count <= MOST_CONFUSED else None)


def test_a_class_that_is_neither_there_nor_predicted_counts_in_no_mean():
    found = class_scores(np.array([0, 1, 1]), np.array([0, 1, 0]), ["a", "b", "never"])
    assert found.macro["recall_macro"] == pytest.approx((1 / 2 + 1) / 2)
    assert found.by_class[2] == {"class": "never", "examples": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0}


def alone() -> Communicator:
    return Communicator(None, "gloo", torch.device("cpu"))


def test_an_evaluation_has_the_scores_of_the_model_s_predictions(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    task, source = get_task("digits"), find_model("vit-tiny", "vit", form=get_task("digits").image_form)
    features = task.load("dev", None, source.load_encoder(), limit=60)
    model = build_model(source, task.head, task.num_labels, 0.0, seed=1)
    found = Evaluation(task, {"dev": features}, model, alone(), 16, "fp32")()
    with torch.no_grad():
        predicted = model.eval()(features.collate(np.arange(60))["pixel_values"])[0].argmax(dim=1).numpy()
    wanted = class_scores(predicted, features.labels, task.classes)
    assert {key: found[key] for key in MACRO} == wanted.macro
    assert found["by_class"] == wanted.by_class
    assert found["confusion"] == wanted.confusion
    assert sum(map(sum, found["confusion"])) == 60
    assert [one["class"] for one in found["by_class"]] == list("0123456789")


def test_a_second_part_has_its_own_metrics_and_a_score_has_no_classes():
    source = find_model("tiny")
    encoder = load_encoder("bert", vocabulary(), True)
    model = build_model(source, "sequence_classification", 3, 0.0, seed=1)
    examples = [("a sentence", "another", {"labels": number % 3}) for number in range(6)]
    features = build_features(examples, encoder, 16, {"labels": np.int64})
    task = get_task("mnli")
    found = Evaluation(task, dict.fromkeys(task.evaluation_parts, features), model, alone(), 4, "fp32")()
    assert {*MACRO, *(f"{name}_mismatched" for name in MACRO)} <= found.keys()
    assert [one["class"] for one in found["by_class"]] == ["contradiction", "entailment", "neutral"]
    assert not any(key.startswith(("by_class_", "confusion_")) for key in found)
    assert not get_task("sts-b").tells_classes
    assert not get_task("squad").tells_classes


@pytest.mark.parametrize("name", ["rte", "squad"])
def test_the_validation_loss_is_the_mean_of_the_models_own_losses(name):
    """Over every example, once, however the batches are padded."""
    source = find_model("tiny")
    encoder = load_encoder(source.model_type, source.vocabulary, source.lower_case)
    task = get_task(name, TaskOptions(version_2_with_negative=True))
    features = task.load("dev", None, encoder, 96, limit=24)
    model = build_model(source, task.head, task.num_labels, 0.0, 1)
    widths = task.output_widths(features)
    outputs = model_outputs(model, features, widths, alone(), 5, contextlib.nullcontext())
    with torch.no_grad():
        losses = [model(**features.collate([number]))[0].item() for number in range(len(features))]
    assert np.std(losses) > 1e-4, "else the mean of some of them would do"
    assert mean_loss(outputs, widths, features) == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_validation_loss_of_scores_is_the_squared_error():
    lengths = np.full(3, 2)
    targets = {"labels": np.array([1.0, 2.0, 4.0], dtype=np.float32)}
    offsets = np.append(0, np.cumsum(lengths))
    features = Features(np.zeros(6, np.int32), offsets, lengths, targets, Layout(uses_segments=False), 0)
    assert mean_loss(np.array([[1.0], [1.0], [1.0]], np.float32), (1,), features) == pytest.approx((0 + 1 + 9) / 3)


def with_classes(folder, confusion):
    """A record whose epochs have scores of two classes."""
    scores = class_scores(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), ["a <cat>", "a dog"])
    of_epoch = {**scores.macro, "by_class": scores.by_class, "confusion": confusion or scores.confusion}
    return edit(write_run(folder) / "summary.json", lambda found: [epoch.update(of_epoch) for epoch in found["epochs"]])


def test_the_page_shows_each_class_and_the_confusions(tmp_path):
    text = report(tmp_path / "report.html", with_classes(tmp_path / "run", None)).read_text()
    words = ("Class by class", "a &lt;cat&gt;", "0.6667", "classified as the column", "f1_macro after each epoch")
    assert [word for word in words if word not in text] == []
    assert "a <cat>" not in text
    without = report(tmp_path / "without.html", write_run(tmp_path / "plain")).read_text()
    assert "Class by class" not in without


def test_the_page_has_each_epoch_s_seconds_and_speed_in_its_unit(tmp_path):
    run = write_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    for epoch, seconds in zip(summary["epochs"], (4.0, 2.0)):
        rates = {"examples_per_second_wall": 40 / seconds, "tokens": 800, "tokens_per_second_wall": 800 / seconds}
        epoch |= {"seconds_evaluation": 0.5, "training": {"examples": 40, "wall_seconds": seconds, **rates}}
    (run / "summary.json").write_text(json.dumps(summary))
    page = build_page(*load_records([run]))
    blocks = next(section.blocks for section in page.sections if section.title == "Seconds and speed by epoch")
    head, *rows = blocks[0].rows
    speeds = ["seconds of training", "seconds of evaluation", "examples per second", "tokens per second"]
    assert list(head) == ["run", "epoch", *speeds], "no images"
    assert rows == [["run", "1", "4.00", "0.500", "10.0", "200"], ["run", "2", "2.00", "0.500", "20.0", "400"]]
    assert [re.findall(r">([^<]*second[^<]*)</text>", figure.svg) for figure in blocks[1:]] == [[one] for one in speeds]


def test_a_record_whose_confusions_are_no_counts_is_refused(tmp_path):
    with pytest.raises(UserError, match="confusion"):
        load_run(with_classes(tmp_path / "run", [["many", 1], [0, 2]]))
