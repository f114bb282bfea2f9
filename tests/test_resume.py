"""A run that is killed, asked to end or moved continues as the same run, and another run is refused.

Dropout is on, a step has two parts, and checkpoints are made within an epoch: after 4, 7 (the best), 8 and 12.
"""

import errno
import json
import os

import pytest
from lives import OF_A_SAVE, PHASES, all_whole, checkpoints_in, kept, live, rows_of
from worlds import run_ranks

from cos598d.checkpoints import writer
from cos598d.errors import UserError
from cos598d.tools.check.spawn import DIED, run_world

# Ranks and flags, by name; with "1" one checkpoint is kept, not two.
RUNS = {
    "none": (1, {"sync": "none"}),
    "all_reduce": (2, {"sync": "all_reduce"}),
    "bucketed": (3, {"sync": "bucketed"}),
    "bucketed topk": (2, {"sync": "bucketed", "compress": "topk"}),
    "bucketed powersgd": (2, {"sync": "bucketed", "compress": "powersgd"}),
    "sparse_rows": (2, {"sync": "sparse_rows"}),
    "local_sgd": (2, {"sync": "local_sgd", "sync_every": 3}),
    "diloco": (2, {"sync": "diloco", "fragments": 2, "sync_every": 2}),
    "ddp": (3, {"sync": "ddp"}),
    "shared_memory": (2, {"sync": "shared_memory"}),
    "zero1": (3, {"sync": "zero1"}),
    "sparse_zero1": (3, {"sync": "sparse_zero1"}),
    "zero2": (3, {"sync": "zero2"}),
    "zero3": (3, {"sync": "zero3"}),
    "shared_weights": (2, {"sync": "shared_weights"}),
}
KILLED_IN_6 = [(name, "forward", 6, 0) for name in RUNS]
RUNS |= {f"{name} 1": (2, {**RUNS[name][1], "keep": 1}) for name in ("bucketed", "zero1", "diloco", "sparse_zero1")}
RUNS["shared_weights 1"] = (2, {"sync": "shared_weights", "keep": 1})
IN_A_STEP = [("bucketed 1", point, 6, 0) for point in PHASES]
IN_A_STEP += [("bucketed 1", "backward", 6, 1), ("zero1 1", "step", 6, 1)]
# These two share memory, or send weights, from one phase to the next.
IN_A_STEP += [
    (name, point, 6, 1) for name in ("shared_weights 1", "sparse_zero1 1") for point in ("backward", "sync", "step")
]
# A fragment set out after step 4, and is in its checkpoint; it should arrive after step 6.
IN_A_STEP += [("diloco 1", point, 6, 1) for point in ("forward", "step")]
IN_A_SAVE = [("bucketed 1", point, 8, 0) for point in OF_A_SAVE]
IN_A_SAVE += [("zero1 1", point, 8, rank) for point in ("copy", "write") for rank in (0, 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(ranks, values): what each rank of the run comes to, and its folder; computed once."""
    found = {}

    def _uninterrupted(ranks, values):
        name = json.dumps([ranks, values], sort_keys=True)
        if name not in found:
            folder = tmp_path_factory.mktemp("whole")
            found[name] = run_ranks(ranks, live, str(folder), values), folder
        return found[name]

    return _uninterrupted


@pytest.mark.long(one_in=10)
@pytest.mark.parametrize(("name", "point", "iteration", "rank"), KILLED_IN_6 + IN_A_STEP + IN_A_SAVE)
def test_a_killed_run_loses_at_most_an_interval_and_ends_bit_for_bit_the_same(
    name, point, iteration, rank, uninterrupted, tmp_path
):
    ranks, values = RUNS[name]
    ends = run_world(ranks, live, str(tmp_path), values, (point, iteration, rank), seconds=90)
    assert ends[rank].how == DIED, [(end.how, end.traceback, end.output) for end in ends]
    assert all_whole(tmp_path)
    found = run_ranks(ranks, live, str(tmp_path), values | {"resume": "auto"})
    expected, whole = uninterrupted(ranks, values)
    begun = {one["from"] for one in found}
    assert begun <= ({4} if iteration == 6 else {7, 8} if point in ("renamed", "prune") else {4, 7}), begun
    assert len(set(expected[0]["losses"])) == 12
    assert found[0]["epochs"] == expected[0]["epochs"]  # rank 0 reads them back
    for one, other in zip(found, expected):
        for part in ("losses", "weights", "totals"):
            assert one[part] == other[part], part
        assert one["calls"] | {"0": None} == other["calls"] | {"0": None}
    assert all_whole(tmp_path)
    assert checkpoints_in(tmp_path) == checkpoints_in(whole)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        path.name for path in (whole / "checkpoints").iterdir()
    }, "and nothing else"
    assert kept(tmp_path, 12) == kept(whole, 12)


@pytest.fixture
def same_end(uninterrupted, tmp_path):
    """same_end(values, fate, age): start a run of 2 ranks that is asked to end, and resume it; both results, by rank.

    Both are compared with the run that was not asked.
    """

    def _same_end(values, fate, age=0.0):
        whole, _ = uninterrupted(2, values)
        stopped = run_ranks(2, live, str(tmp_path), values, fate, age)
        found = run_ranks(2, live, str(tmp_path), values | {"resume": "auto"})
        assert found[0]["epochs"] == whole[0]["epochs"]
        for one, other in zip(found, whole):
            for part in ("losses", "weights", "sent"):
                assert one[part] == other[part], part
            assert without_state(one) == without_state(other)
            assert one["disagree"] == other["disagree"] == []
        assert all_whole(tmp_path)
        return stopped, found

    return _same_end


def without_state(found):
    """What travelled by purpose, except for checkpoints: the two runs do not have the same ones."""
    return {purpose: sums for purpose, sums in found["totals"]["by_purpose"].items() if purpose != "state"}


@pytest.mark.long(one_in=6)
@pytest.mark.parametrize(
    ("point", "iteration", "rank", "values"),
    [
        ("asked", 5, 0, {"sync": "bucketed"}),
        ("asked", 5, 1, {"sync": "bucketed"}),
        ("asked", 5, 0, {"sync": "zero3"}),
        ("asked", 5, 1, {"sync": "local_sgd", "sync_every": 3}),
        ("asked", 5, 0, {"sync": "diloco"}),
        ("asked", 7, 1, {"sync": "zero3"}),
        ("asked", 7, 1, {"sync": "bucketed"}),
        ("asked", 7, 1, {"sync": "diloco", "sync_every": 2, "fragments": 2, "compress": "bf16"}),
        ("asked", 12, 1, {"sync": "local_sgd", "sync_every": 3}),
        ("asked in the evaluation", 7, 1, {"sync": "local_sgd", "sync_every": 3}),
        ("asked in the evaluation", 12, 1, {"sync": "bucketed"}),
    ],
)
def test_all_ranks_end_after_the_step_in_which_one_was_asked(point, iteration, rank, values, same_end):
    """A checkpoint is made although none was asked for. An evaluation that is due is made when the run resumes."""
    stopped, found = same_end({"save_steps": None} | values, (point, iteration, rank))
    for one in stopped:
        assert (one["stopped"], one["saved"], len(one["losses"])) == ("stopped by SIGTERM", iteration, iteration)
        assert len(one["epochs"]) == (iteration - 1) // 7
    assert {(one["from"], one["stopped"]) for one in found} == {(iteration, None)}


@pytest.mark.long
def test_when_the_time_is_up_the_run_saves_and_leaves(same_end):
    stopped, found = same_end({"sync": "bucketed", "max_seconds": 3600.0}, None, age=3600.0)
    assert {(one["stopped"], one["saved"]) for one in stopped} == {("--max_seconds 3600 have passed", 1)}
    assert {one["from"] for one in found} == {1}


@pytest.mark.long
def test_early_stopping_ends_with_the_best_model_also_in_a_resumed_run(same_end):
    """By the accuracy, which the first evaluation has as well as all others: a model that has learned nothing."""
    values = {"sync": "bucketed", "eval_steps": 3, "early_stopping": "2:acc", "learning_rate": 1e-9}
    stopped, found = same_end(values, ("asked", 5, 1))
    for one in (*stopped, *found):
        assert one["stopped"] == ("stopped by SIGTERM" if one in stopped else None)
    for one in found:
        assert len(one["losses"]) == 7
        assert (one["best"]["iteration"], one["best"]["metric"]) == (3, "acc")
        assert one["best"]["evaluated"]["acc"] == one["best"]["value"]
    assert any(line.startswith("stopped early: 2 evaluations in a row") for line in found[0]["lines"])
    (last,) = [one for one in found[0]["epochs"] if one["epoch"] == 1]
    assert last["iterations"] == 7


def test_save_seconds_makes_a_checkpoint_when_they_have_passed(tmp_path):
    values = {"sync": "bucketed", "save_steps": None, "save_seconds": 1e-6, "keep": 99, "max_steps": 5}
    run_ranks(2, live, str(tmp_path), values)
    assert checkpoints_in(tmp_path) == [1, 2, 3, 4, 5]


def with_a_full_disk(comm, folder, values, fate):
    """A run whose disk is full for every checkpoint after that of iteration 4."""
    write = writer.write_tensors

    def full(path, *arguments):
        if "step-00000004" not in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *arguments)

    writer.write_tensors = full
    return live(comm, folder, values, fate)


@pytest.mark.long
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(uninterrupted, tmp_path):
    values = {"sync": "bucketed"}
    whole, _ = uninterrupted(2, values)
    found = run_ranks(2, with_a_full_disk, str(tmp_path / "whole"), values, None)
    assert [one["losses"] for one in found] == [one["losses"] for one in whole]
    assert {one["saved"] for one in found} == {4}
    assert checkpoints_in(tmp_path / "whole") == [4]
    said = [line for line in found[0]["lines"] if "No space left on device" in line]
    assert said[0].startswith("the checkpoint of iteration 7 cannot be written to ")
    assert all("that of iteration 4 is complete" in line for line in said)
    stopped = run_ranks(2, with_a_full_disk, str(tmp_path / "asked"), values, ("asked", 6, 0))
    assert {(one["stopped"], one["saved"]) for one in stopped} == {("stopped by SIGTERM", 4)}
    found = run_ranks(2, live, str(tmp_path / "asked"), values | {"resume": "auto"})
    assert {one["from"] for one in found} == {4}


PLAIN = {"dropout": 0.0, "gradient_accumulation_steps": 1, "save_steps": 3}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "syncs"), [((4, 2, 3, 4), ["bucketed"] * 4), ([2] * 4, ("ddp", "zero3", "bucketed", "zero1"))]
)
def test_with_other_ranks_and_syncs_the_losses_are_those_of_one_world(ranks, syncs, uninterrupted, tmp_path):
    """Each start except the last is killed 2 steps after a checkpoint."""
    (whole, *_), _ = uninterrupted(ranks[0], PLAIN | {"sync": syncs[0]})
    for place, (size, sync) in enumerate(zip(ranks, syncs), start=1):
        start = (size, live, str(tmp_path), PLAIN | {"sync": sync, "resume": "auto"})
        if place < len(ranks):
            run_world(*start, ("forward", 3 * place + 2, 0), seconds=90)
    found, *_ = run_ranks(*start)
    assert found["from"] == 9
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    assert [epoch["iterations"] for epoch in found["epochs"]] == [7, 5]
    lines = " ".join(found["lines"])
    assert ("with 4 ranks in place of 3" in lines) == (ranks[-1] == 4)
    assert "dropout" not in lines


@pytest.mark.parametrize(
    ("before", "ranks", "after", "words"),
    [
        pytest.param(
            {"sync": "bucketed", "compress": "powersgd"},
            1,
            {"sync": "none"},
            ["1 rank in place of 2", "dropout masks differ", "factors and what it has held back (its error feedback)"],
            marks=pytest.mark.long,
        ),
        ({"sync": "local_sgd", "sync_every": 5, "max_steps": 6}, 3, {}, ["average, with rank 0's optimizer)"]),
    ],
)
def test_a_line_names_what_is_lost_on_other_ranks(before, ranks, after, words, tmp_path):
    run_world(2, live, str(tmp_path), before, ("forward", 6, 0), seconds=90)
    found = run_ranks(ranks, live, str(tmp_path), (after or before) | {"resume": "auto"})
    (line,) = [line for line in found[0]["lines"] if line.startswith("resumes after iteration 4")]
    assert [word for word in (*words, " is lost") if word not in line] == []
    assert len(found[0]["losses"]) == before.get("max_steps", 12)
    assert len({json.dumps(one["weights"]) for one in found}) == 1


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run's folder with a checkpoint after 4 steps."""
    folder = str(tmp_path_factory.mktemp("half_done"))
    run_world(1, live, folder, {"sync": "none"}, ("forward", 6, 0), seconds=90)
    return folder


def refusals(comm, starts):
    """The errors of all `starts`, which are folders and values."""
    said = []
    for folder, values in starts:
        with pytest.raises(UserError) as error:
            live(comm, folder, values)
        said.append(str(error.value))
    return said


OTHER_RUNS = [
    ({"seed": 7}, "--seed was 42 and is 7"),
    ({"learning_rate": 1e-4}, "--learning_rate was 0.001 and is 0.0001"),
    ({"total_train_batch_size": 16}, "--total_train_batch_size was 8 and is 16"),
    ({"max_steps": 24}, "--num_train_epochs or --max_steps, in steps, was 12 and is 24"),
    ({"max_train_examples": 48}, "--max_train_examples was 56 and is 48; the training data differ"),
    ({"lr_scheduler": "cosine"}, "--lr_scheduler was linear and is cosine"),
    ({"optimizer": "sgd"}, "--optimizer was adamw and is sgd"),
    ({"dropout": 0.2}, "--dropout was 0.1 and is 0.2"),
]


def test_another_run_is_refused_by_what_has_changed(half_done):
    starts = [(half_done, {"sync": "none", "resume": "auto"} | values) for values, _ in OTHER_RUNS]
    (found,) = run_ranks(1, refusals, starts)
    for said, (_, words) in zip(found, OTHER_RUNS, strict=True):
        assert f"this differs from the run that was saved as {half_done}/checkpoints/step-00000004: " in said
        assert words in said
        assert "or add --resume_anyway." in said
    assert checkpoints_in(half_done) == [4]


def test_resume_anyway_continues_as_another_run_and_names_what_changed(half_done, tmp_path):
    values = {"sync": "none", "resume": half_done, "resume_anyway": True, "max_steps": 6, "learning_rate": 1e-4}
    (found,) = run_ranks(1, live, str(tmp_path), values)
    assert len(found["losses"]) == 6
    assert any("--learning_rate was 0.001 and is 0.0001" in line for line in found["lines"])


def test_a_resumed_run_may_evaluate_save_and_log_at_other_steps(half_done, uninterrupted, tmp_path):
    values = {"sync": "none", "eval_steps": 5, "save_steps": 5, "keep": 9, "log_every": 1, "check_replicas": 3}
    (whole,), _ = uninterrupted(1, {"sync": "none"})
    (found,) = run_ranks(1, live, str(tmp_path), values | {"resume": half_done})
    assert (found["losses"], found["weights"]) == (whole["losses"], whole["weights"])
    assert {5, 10} <= set(checkpoints_in(tmp_path))
    assert [row["iteration"] for row in rows_of(tmp_path / "live" / "evaluations.jsonl")] == [5, 10]


def test_auto_starts_from_scratch_where_there_is_no_checkpoint(tmp_path):
    (found,) = run_ranks(1, live, str(tmp_path), {"sync": "none", "resume": "auto", "max_steps": 2})
    assert found["from"] == 0
    assert any("no checkpoint" in line and str(tmp_path) in line for line in found["lines"])


def test_every_rank_names_a_folder_without_a_checkpoint_or_room_for_one(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    out, run = str(tmp_path / "out"), str(tmp_path)
    given = [(out, f"{run}/nowhere"), (out, run), (run, "auto")]
    starts = [(folder, {"sync": "all_reduce", "resume": resume}) for folder, resume in given]
    for nowhere, empty, no_room in run_ranks(2, refusals, starts):
        assert f"--resume {run}/nowhere" in nowhere
        assert "there is no such folder" in nowhere
        assert f"--resume {run}: this folder has no checkpoint" in empty
        assert no_room.startswith(f"no checkpoint can be kept in {run}/checkpoints (")
        assert no_room.endswith("). Choose another --output_dir.")
    assert not list((tmp_path / "live").glob("iterations*")), "it was refused before the first step"
