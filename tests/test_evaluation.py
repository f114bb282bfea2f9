"""Shares of batches, evaluation on any ranks, and metrics, which are scikit-learn's. Imports: parts of a run that its
records show only together."""

import numpy as np
import pytest
from worlds import run_ranks

from cos598d.comm.group import close_group, open_group
from cos598d.data import get_task
from cos598d.data.metrics import MACRO, by_class
from cos598d.data.sampler import global_batches, micro_batches, steps_per_epoch
from cos598d.evaluate import Evaluation
from cos598d.models.build import build_model, find_model


@pytest.mark.parametrize("size", [1, 5, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 3])
def test_each_example_of_a_batch_counts_the_same(size, ranks, steps):
    batch = np.arange(100, 100 + size)
    shares = [micro_batches(batch, rank, ranks, steps) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "as many passes on every rank"
    weights: dict[int, float] = dict.fromkeys(batch.tolist(), 0.0)
    for part in (one for share in shares for one in share):
        assert len(part.indices)
        for index in part.indices.tolist():
            weights[index] += part.weight / len(part.indices)
    assert list(weights.values()) == pytest.approx([1 / size] * size)
    together = [sum(len(part.indices) for part in share if part.weight) for share in shares]
    assert max(together) - min(together) <= steps


def test_every_epoch_has_each_example_once_in_another_order():
    first, second = (list(global_batches(10, 4, 42, epoch)) for epoch in (0, 1))
    assert [len(batch) for batch in first] == [4, 4, 2]
    assert steps_per_epoch(10, 4) == 3
    assert sorted(np.concatenate(first)) == sorted(np.concatenate(second)) == list(range(10))
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


@pytest.mark.parametrize("classes", [2, 5, 21])
def test_scores_by_class_are_scikit_learns(classes):
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    drawn = np.random.default_rng(classes)
    preds, labels = drawn.integers(0, classes, 60), drawn.integers(0, max(1, classes - 1), 60)
    names = [f"class {number}" for number in range(classes)]
    found = by_class(preds, labels, names)
    ids = range(classes)
    *columns, counts = precision_recall_fscore_support(labels, preds, labels=ids, zero_division=0)
    for name, values in zip(("precision", "recall", "f1"), columns, strict=True):
        assert [row[name] for row in found["by_class"]] == pytest.approx(values.tolist())
    assert [(row["class"], row["examples"]) for row in found["by_class"]] == list(zip(names, counts, strict=True))
    occurs = np.isin(ids, np.union1d(preds, labels))
    assert [found[name] for name in MACRO] == pytest.approx([values[occurs].mean() for values in columns])
    assert found.get("confusion") == (confusion_matrix(labels, preds, labels=ids).tolist() if classes <= 20 else None)


def test_glues_metrics_are_scikit_learns_and_scipys():
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import f1_score, matthews_corrcoef

    preds, labels = np.array([0, 1, 1, 0, 1]), np.array([0, 1, 0, 0, 1])
    assert get_task("mrpc").metric.compute(preds, labels)["f1"] == f1_score(labels, preds)
    assert get_task("cola").metric.compute(preds, labels) == {"mcc": matthews_corrcoef(labels, preds)}
    found = get_task("sts-b").metric.compute(np.array([1.0, 2, 3]), np.array([1.0, 3, 2.5]))
    assert found["pearson"] == pytest.approx(pearsonr([1, 2, 3], [1, 3, 2.5])[0])
    assert found["spearmanr"] == pytest.approx(spearmanr([1, 2, 3], [1, 3, 2.5])[0])
    assert get_task("sts-b").metric.compute(np.ones(3), np.arange(3))["corr"] == 0.0


def evaluated(comm):
    """An evaluation of each task that this rank sees, without its seconds."""
    found = []
    for name, limit in (("rte", 21), ("squad", 7), ("digits", 30)):
        task = get_task(name)
        task.find(None)
        source = find_model("vit-tiny" if name == "digits" else "tiny", task.image_form)
        model = build_model(source, task.head, task.num_labels, 0.0, 3)
        parts = {part: task.load(part, source.encoder, 160, limit) for part in task.parts[1:]}
        evaluation = Evaluation(task, parts, model, comm, 4, "fp32")
        result = evaluation()
        result.pop("seconds_evaluation")
        assert evaluation(lambda: comm.rank == comm.world_size - 1) is None, "one rank was asked to end"
        assert model.training
        found.append([result, evaluation.files])
    return found


def task_metrics(found):
    return [name for name, value in found.items() if isinstance(value, float)]


def test_any_number_of_ranks_evaluates_each_example_once():
    alone = run_ranks(1, evaluated)[0]
    for rank, found in enumerate(run_ranks(2, evaluated)):
        for (result, files), (wanted, of_one) in zip(found, alone, strict=True):
            assert result.keys() == wanted.keys()
            for name in task_metrics(wanted):
                assert result[name] == pytest.approx(wanted[name], abs=1e-6), name
            assert result.get("confusion") == wanted.get("confusion")
            assert files == ({} if rank else of_one)


def test_the_validation_loss_is_the_models_own():
    ranks = open_group(None)
    try:
        for name in ("rte", "squad"):
            task = get_task(name)
            task.find(None)
            source = find_model("tiny")
            model = build_model(source, task.head, task.num_labels, 0.0, 3)
            examples = task.load("dev", source.encoder, 160, 10)
            loss = model.eval()(**examples.collate(range(len(examples))))[0].item()
            found = Evaluation(task, {"dev": examples}, model, ranks, 3, "fp32")()
            assert found["validation_loss"] == pytest.approx(loss)
    finally:
        close_group()
