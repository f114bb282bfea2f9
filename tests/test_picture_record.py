"""`cos598d picture` draws a run's record, and refuses flags and records that it cannot draw."""

import pytest
from recorded import rows_of
from report_records import write_rows, write_run

from cos598d.records.conventions import PHASES
from cos598d.tools.learn.events import CALL, COMPUTE
from cos598d.tools.learn.picture.record import events_of_run

COMMAND = "cos598d/__main__.py"


def test_a_picture_has_every_rank_s_phases_and_calls(tmp_path, run_here):
    run = write_run(tmp_path / "all", ranks=3)
    events, note = events_of_run(run)
    assert note.startswith("This is iteration 5.")
    for rank in range(3):
        mine = [event for event in events if event.rank == rank]
        # The rest of `sync`, next to its calls, is waiting for them.
        assert [event.name for event in mine if event.kind == COMPUTE] == [each for each in PHASES if each != "sync"]
        assert [event.tensors for event in mine if event.kind == CALL] == [("bucket 0",), ("bucket 1",)]
    code, said = run_here(COMMAND, ["picture", run, "-o", "run.svg"])
    assert code == 0
    assert "all: 3 ranks" in said
    assert "1 all_reduce of bucket 0, 1.00 MB" in said
    assert (tmp_path / "run.svg").read_text().startswith("<svg ")


def test_calls_without_times_are_counted_not_drawn(tmp_path):
    events, note = events_of_run(write_run(tmp_path / "ddp", sync="ddp"))
    assert not any(event.kind == CALL for event in events)
    assert "On each rank a library made 2 calls whose times are not known." in note


def test_a_picture_has_at_most_16_ranks(tmp_path):
    assert {event.rank for event in events_of_run(write_run(tmp_path / "alone", ranks=1, sync="none"))[0]} == {0}
    events, note = events_of_run(write_run(tmp_path / "many", ranks=20))
    assert {event.rank for event in events} == set(range(16))
    assert "4 more ranks not drawn." in note


def test_a_record_without_times_or_of_two_runs_is_refused(tmp_path, run_here):
    code, said = run_here(COMMAND, ["picture", write_run(tmp_path / "old", old=True)])
    assert (code, said.count("\n")) == (1, 1)
    assert "does not have the times at which phases began" in said
    mixed = write_run(tmp_path / "mixed")
    path = mixed / "iterations.rank1.jsonl"
    write_rows(path, rows_of(path)[:2])
    code, said = run_here(COMMAND, ["picture", mixed])
    assert (code, said.count("\n")) == (1, 1)
    assert "iterations.rank1.jsonl has no iteration 5, which rank 0 has" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "picture draws a run or a sync. Give a run's folder, or --sync NAME"),
        (["run", "--sync", "ring"], "picture draws a run or a sync"),
        (["run", "--beside", "ring"], "--beside ring needs --sync"),
        (["--sync", "ring", "-o", "ring.png"], "-o ring.png is a file of another kind. Give a name that ends in .svg."),
        (["--sync", "ring", "-o", "nowhere/ring.svg"], "there is no folder nowhere"),
        (["--sync", "ring", "--world_size", "1"], "--world_size 1 cannot be drawn. Give 2 to 8 ranks."),
        (["--sync", "horovod"], "--sync horovod cannot be drawn. Give one of none, gather_scatter"),
        (["--sync", "auto"], "--sync auto cannot be drawn. Give one of"),
        (["--sync", "no_such"], "--sync no_such cannot be drawn. Give one of"),
        (["--sync", "none.py:Mine"], "none.py"),
    ],
)
def test_flags_that_cannot_work_are_refused(words, sentence, run_here):
    code, said = run_here(COMMAND, ["picture", *words])
    assert code == 2
    assert sentence in said
    assert said.count("\n") == 1
