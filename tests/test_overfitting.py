"""The page compares training and validation loss, and names the epoch where the second turns."""

import json
import re

import pytest
from recorded import rows_of
from report_records import edit, report, write_rows, write_run

from cos598d.tools.report.load import load_run_as
from cos598d.tools.report.overfitting import courses

SECONDS = [1.0 + place / 100 for place in range(12)]


def with_validation(folder, validation, losses=None, within=()):
    """A run of 12 iterations in as many epochs as there are validation losses; `within`: evaluations by iteration."""
    losses = losses or [1.0 - 0.05 * place for place in range(12)]
    folder = write_run(folder, ranks=1, sync="none", seconds=SECONDS, losses=losses)
    each = 12 // len(validation)
    epochs = [
        {"epoch": place + 1, "iterations": each, "last_iteration": each * (place + 1), "loss": 0.5}
        | ({} if loss is None else {"validation_loss": loss})
        for place, loss in enumerate(validation)
    ]
    evaluations = [
        {"iteration": iteration, "epoch": (iteration - 1) // each + 1, "validation_loss": loss}
        for iteration, loss in within
    ]
    return edit(folder / "summary.json", lambda summary: summary.update(epochs=epochs, evaluations=evaluations))


def cut_short(summary, is_old):
    """Make the last epoch one of a single step, which older records tell only by its length."""
    for place, epoch in enumerate(summary["epochs"], start=1):
        epoch["training"] = {"examples": 64, "wall_seconds": 2.0}
        if place == len(summary["epochs"]):
            epoch |= {"iterations": 1, "last_iteration": 9, "loss": 0.1}
            epoch["training"] = {"examples": 1, "wall_seconds": 0.01}
            epoch |= {} if is_old else {"is_cut": True}


def drawn(figure, name):
    """How many points its line has."""
    (line,) = re.findall(rf'<g id="{name}-line2d_\d+">\s*<path d="([^"]*)" clip-path', figure.svg)[-1:]
    return line.count("M") + line.count("L")


def said(folder):
    (course,) = courses([load_run_as(folder, "run")])
    return course.verdict


@pytest.mark.parametrize(
    ("validation", "losses", "words"),
    [
        ([0.7, 0.6, 0.65, 0.8], None, "turns after epoch 2, while the training loss falls: from there on it overfits"),
        ([0.693701, 0.693704, 0.6937], None, "hardly changes (less than 1 % counts as noise)"),
        ([0.6933, 0.6938, 0.6984], None, "hardly changes (less than 1 % counts as noise)"),
        ([0.7, 0.6, 0.5], None, "is lowest at the end, after epoch 3: no overfitting is seen"),
        ([0.6, 0.7], [0.5] * 6 + [0.75] * 6, "turns after epoch 1; the training loss rises meanwhile"),
        ([0.6, 0.7], [0.5] * 6 + [0.499] * 6, "turns after epoch 1; the training loss hardly falls meanwhile"),
        (
            [0.7, 0.69, 0.690002],
            None,
            "is lowest after epoch 2 and rises by no more than noise: no overfitting is shown",
        ),
        (
            [0.7, 0.75, 0.6, 0.64],
            None,
            "is lowest after epoch 3 and rises by no more than noise: no overfitting is shown",
        ),
    ],
)
def test_the_epoch_where_validation_turns_is_named(validation, losses, words, tmp_path):
    assert said(with_validation(tmp_path / "run", validation, losses)) == f"the validation loss {words}"


def test_an_evaluation_within_an_epoch_may_be_where_it_turns(tmp_path):
    folder = with_validation(tmp_path / "run", [0.7, 0.6, 0.8], within=[(10, 0.55), (8, 0.99)])
    (course,) = courses([load_run_as(folder, "run")])
    assert [point.iteration for point in course.points] == [4, 8, 10, 12]
    assert [point.validation for point in course.points] == [0.7, 0.6, 0.55, 0.8]
    assert course.best.when == "after iteration 10 (epoch 3)"
    assert course.points[2].training == pytest.approx((0.6 + 0.55) / 2), "of the iterations since the evaluation before"


def test_the_training_loss_is_the_mean_over_examples_and_not_over_iterations(tmp_path):
    folder = with_validation(tmp_path / "run", [0.7, 0.6])
    path = folder / "iterations.rank0.jsonl"
    rows = rows_of(path)
    sizes = [2 if row["iteration"] % 6 == 0 else 8 for row in rows]
    write_rows(path, [row | {"examples": size} for row, size in zip(rows, sizes)])
    (course,) = courses([load_run_as(folder, "run")])
    mean = sum(row["loss"] * size for row, size in zip(rows[:6], sizes)) / sum(sizes[:6])
    assert course.points[0].training == pytest.approx(mean)


@pytest.mark.parametrize("is_old", [False, True])
def test_an_epoch_that_was_cut_is_marked_and_in_no_figure(tmp_path, is_old):
    """40 steps of 39 an epoch: the second epoch has one step, and a loss and seconds of one step."""
    pytest.importorskip("matplotlib")
    from cos598d.tools.report.epochs import epoch_seconds, last_loss
    from cos598d.tools.report.learning import metrics_blocks, speed_blocks

    folder = with_validation(tmp_path / "run", [0.7, 0.6, 0.8])
    edit(folder / "summary.json", lambda summary: cut_short(summary, is_old))
    run = load_run_as(folder, "run")
    assert [point.iteration for point in courses([run])[0].points] == [4, 8]
    assert "lowest at the end, after epoch 2" in said(folder)
    assert (epoch_seconds(run), last_loss(run)) == (2.0, 0.5)
    table, figure = metrics_blocks([run])
    assert (table.rows[1:], "Cut: " in table.caption) == ([["run", "0.7000", "0.6000", "0.8000 (cut)"]], True)
    assert drawn(figure, "metric0") == 2
    table, *others = speed_blocks([run])
    assert [row[1] for row in table.rows] == ["epoch", "1", "2", "3 (cut)"]
    assert drawn(others[0], "speed0") == 2


def test_an_evaluation_by_steps_counts_where_early_stopping_cut_the_epoch(tmp_path):
    folder = with_validation(tmp_path / "run", [0.9], within=[(4, 0.6), (8, 0.7)])
    (folder / "config.json").write_text(json.dumps({"eval_steps": 4}))
    edit(folder / "summary.json", lambda summary: summary["epochs"][0].update(is_cut=True))
    assert [point.when for point in courses([load_run_as(folder, "run")])[0].points] == [
        f"after iteration {iteration} (epoch 1)" for iteration in (4, 8, 12)
    ]


@pytest.mark.parametrize("validation", [[None, None], [0.7, None], [0.7]])
def test_a_run_with_fewer_than_two_validations_has_no_plot(validation, tmp_path):
    assert courses([load_run_as(with_validation(tmp_path / "run", validation), "run")]) == []


def test_epochs_without_a_last_iteration_end_by_their_lengths(tmp_path):
    folder = with_validation(tmp_path / "run", [0.7, 0.6, 0.8])
    edit(folder / "summary.json", lambda summary: [epoch.pop("last_iteration") for epoch in summary["epochs"]])
    (course,) = courses([load_run_as(folder, "run")])
    assert [point.iteration for point in course.points] == [4, 8, 12]


def test_the_page_has_both_losses_in_one_plot_and_the_learning_rate(tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    folder = with_validation(tmp_path / "run", [0.7, 0.6, 0.8])
    text = report(tmp_path / "page.html", folder).read_text()
    (section,) = (part for part in text.split("<section")[1:] if ">Training and validation loss</h2>" in part)
    assert 'aria-label="training loss and validation loss of run"' in section
    assert "lowest after epoch 2" in section
    assert "the validation loss turns after epoch 2" in section
    assert "learning rate against iteration" in text
    old = write_run(tmp_path / "old", ranks=1, sync="none")
    rows = rows_of(old / "iterations.rank0.jsonl")
    for row in rows:
        del row["learning_rate"]
    write_rows(old / "iterations.rank0.jsonl", rows)
    text = report(tmp_path / "old.html", old).read_text()
    assert "learning rate against iteration" not in text
    assert "Training and validation loss" not in text
