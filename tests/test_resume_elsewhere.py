"""A run goes on with other ranks and under other syncs; as another run it is refused, by what has changed."""

import json

import pytest
from lives import checkpoints_in, live
from worlds import RankFailure, run_ranks

from cos598d.tools.check.spawn import run_world

PLAIN = {"dropout": 0.0, "gradient_accumulation_steps": 1, "save_steps": 3}


def stages(folder, *starts):
    """Start a run over and over, each but the last killed 2 steps after a checkpoint; what the last came to."""
    for place, (ranks, values) in enumerate(starts[:-1], start=1):
        run_world(ranks, live, str(folder), values | {"resume": "auto"}, ("forward", 3 * place + 2, 0), seconds=90)
    ranks, values = starts[-1]
    return run_ranks(ranks, live, str(folder), values | {"resume": "auto"})


@pytest.mark.long
def test_with_4_2_3_and_4_ranks_the_losses_are_those_of_one_world(tmp_path):
    values = PLAIN | {"sync": "bucketed"}
    whole, *_ = run_ranks(4, live, str(tmp_path / "whole"), values)
    found, *_ = stages(tmp_path / "moved", *((ranks, values) for ranks in (4, 2, 3, 4)))
    assert found["from"] == 9
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-6)
    assert [epoch["iterations"] for epoch in found["epochs"]] == [7, 5]
    assert "with 4 ranks in place of 3" in " ".join(found["lines"])
    assert "dropout" not in " ".join(found["lines"])


@pytest.mark.long
def test_under_other_syncs_the_losses_are_those_of_one(tmp_path):
    whole, *_ = run_ranks(2, live, str(tmp_path / "whole"), PLAIN | {"sync": "ddp"})
    starts = [(2, PLAIN | {"sync": sync}) for sync in ("ddp", "zero3", "bucketed", "zero1")]
    found, *_ = stages(tmp_path / "moved", *starts)
    assert found["from"] == 9
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-6)


@pytest.mark.long
def test_what_cannot_be_carried_over_is_said_in_one_line(tmp_path):
    run_world(2, live, str(tmp_path), {"sync": "bucketed", "compress": "powersgd"}, ("forward", 6, 0), seconds=90)
    (found,) = run_ranks(1, live, str(tmp_path), {"sync": "none", "resume": "auto"})
    (line,) = [line for line in found["lines"] if line.startswith("resumes after iteration 4")]
    assert "with 1 rank in place of 2" in line
    assert "dropout masks differ" in line
    assert "powersgd's factors and what it has held back (its error feedback) is lost" in line
    assert len(found["losses"]) == 12


def test_replicas_that_part_go_on_elsewhere_from_their_average_and_say_so(tmp_path):
    values = {"sync": "local_sgd", "sync_every": 5, "max_steps": 6}
    run_world(2, live, str(tmp_path), values, ("forward", 6, 0), seconds=90)
    found = run_ranks(3, live, str(tmp_path), values | {"resume": "auto"})
    (line,) = [line for line in found[0]["lines"] if line.startswith("resumes after iteration 4")]
    assert "average, with rank 0's optimizer) is lost" in line
    assert len({json.dumps(one["weights"]) for one in found}) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seed": 7}, "--seed was 42 and is 7"),
        ({"learning_rate": 1e-4}, "--learning_rate was 0.001 and is 0.0001"),
        ({"total_train_batch_size": 16}, "--total_train_batch_size was 8 and is 16"),
        ({"max_steps": 24}, "--num_train_epochs or --max_steps, in steps, was 12 and is 24"),
        ({"max_train_examples": 48}, "--max_train_examples was 56 and is 48; the training data differ"),
        ({"lr_scheduler": "cosine"}, "--lr_scheduler was linear and is cosine"),
        ({"optimizer": "sgd"}, "--optimizer was adamw and is sgd"),
        ({"dropout": 0.2}, "--dropout was 0.1 and is 0.2"),
    ],
    ids=str,
)
def test_another_run_is_refused_by_what_has_changed(values, words, half_done, capfd):
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, live, half_done, {"sync": "none", "resume": "auto"} | values)
    (said,) = caught.value.texts.values()
    assert f"this differs from the run that was saved as {half_done}/checkpoints/step-00000004: " in said
    assert words in said
    assert "or add --resume_anyway." in said
    assert checkpoints_in(half_done) == [4]


@pytest.fixture(scope="module")
def half_done(tmp_path_factory):
    """A run's folder with a checkpoint after 4 steps."""
    folder = str(tmp_path_factory.mktemp("half_done"))
    run_world(1, live, folder, {"sync": "none"}, ("forward", 6, 0), seconds=90)
    return folder


def test_it_may_go_on_anyway_and_says_as_what(half_done, tmp_path):
    values = {"sync": "none", "resume": half_done, "resume_anyway": True, "max_steps": 6, "learning_rate": 1e-4}
    (found,) = run_ranks(1, live, str(tmp_path), values)
    assert len(found["losses"]) == 6
    assert any("--learning_rate was 0.001 and is 0.0001" in line for line in found["lines"])


def test_when_it_is_evaluated_saved_and_logged_may_change(half_done, tmp_path):
    values = {"sync": "none", "eval_steps": 5, "save_steps": 5, "keep": 9, "log_every": 1, "check_replicas": 3}
    (whole,) = run_ranks(1, live, str(tmp_path / "whole"), {"sync": "none"})
    (found,) = run_ranks(1, live, str(tmp_path / "found"), values | {"resume": half_done})
    assert found["losses"] == whole["losses"]
    assert found["weights"] == whole["weights"]
    assert {5, 10} <= set(checkpoints_in(tmp_path / "found"))
    rows = (tmp_path / "found" / "live" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == [5, 10]


def test_auto_begins_at_the_beginning_where_there_is_nothing(tmp_path):
    (found,) = run_ranks(1, live, str(tmp_path), {"sync": "none", "resume": "auto", "max_steps": 2})
    assert found["from"] == 0
    assert any("no checkpoint" in line and str(tmp_path) in line for line in found["lines"])


def test_a_folder_without_a_checkpoint_is_refused_by_name(tmp_path):
    for resume, words in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path, "this folder has no checkpoint"),
    ):
        with pytest.raises(RankFailure) as caught:
            run_ranks(2, live, str(tmp_path / "out"), {"sync": "all_reduce", "resume": str(resume)})
        assert len(caught.value.texts) == 2
        for text in caught.value.texts.values():
            assert f"--resume {resume}" in text
            assert words in text


def test_a_folder_in_which_no_checkpoint_can_be_kept_is_named_before_the_first_step(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, live, str(tmp_path), {"sync": "all_reduce", "resume": "auto"})
    for text in caught.value.texts.values():
        assert f"no checkpoint can be kept in {tmp_path}/checkpoints" in text
    assert not list((tmp_path / "live").glob("iterations*")), "it was told before the first step"
