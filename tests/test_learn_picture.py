"""Pictures of real ranks: of a sync, next to the ledger of its run, and of a student's own file."""

from pathlib import Path

import pytest
from lesson_cases.lesson5 import RIGHT, WRONG

from cos598d.commands.cli import main
from cos598d.tools.learn import session
from cos598d.tools.learn.events import CALL, COMPUTE
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.picture.curves import Curves
from cos598d.tools.learn.picture.draw import steps_of
from cos598d.tools.learn.picture.frames import frames, is_whole
from cos598d.tools.learn.picture.messages import MEMORY
from cos598d.tools.learn.picture.probe import messages_of
from cos598d.tools.learn.picture.text import ASCII
from cos598d.tools.learn.picture.trial import draw_sync, run_trial

RANKS = 4


def ends_whole(found):
    """Whether every rank holds the complete sums after the last frame."""
    return bool(found) and all(is_whole(counts) for chunks in found[-1].held for counts in chunks)


# Of each the steps on four ranks, and whether all that a rank sends are these messages.
MADE_OF_MESSAGES = {
    "ring": (6, True),
    "tree": (4, True),
    "halving_doubling": (4, True),
    "zero1": (2, False),
    "zero3": (2, False),
}


@pytest.mark.parametrize("name", MADE_OF_MESSAGES)
def test_frames_show_every_message_once_and_end_with_complete_sums(name):
    trial = run_trial(name, RANKS)
    steps, has_all = MADE_OF_MESSAGES[name]
    found = frames(trial.messages)
    assert len(found) == steps
    moves = [(move.sender, move.receiver, move.bytes, move.adds) for frame in found for move in frame.moves]
    assert sorted(moves) == sorted((m.sender, m.receiver, m.bytes, m.adds) for m in trial.messages)
    assert ends_whole(found)
    sent = [sum(move[2] for move in moves if move[0] == rank) for rank in range(RANKS)]
    if has_all:
        assert sent == trial.sent
    else:  # these are of the tensor that moves most
        assert all(0 < some <= whole for some, whole in zip(sent, trial.sent, strict=True))


def test_frames_of_shared_memory_show_what_ranks_read():
    trial = run_trial("shared_memory", RANKS)
    assert trial.sent == [0] * RANKS
    assert {message.medium for message in trial.messages} == {MEMORY}
    found = frames(trial.messages)
    assert [len(frame.moves) for frame in found] == [12, 12]
    assert ends_whole(found)
    assert "Nothing is sent" in steps_of(trial.messages, "shared_memory").svg()


def test_lanes_show_computing_and_calls_of_each_rank():
    trial = run_trial("all_reduce", 2)
    assert not trial.messages
    kinds = [[event.kind for event in trial.events if event.rank == rank] for rank in range(2)]
    assert [kind.count(CALL) for kind in kinds] == [12, 12]  # a weight and a bias for each of six layers
    assert all(kind.count(COMPUTE) == 3 for kind in kinds)
    assert not any(meeting.missing for meeting in draw_sync("all_reduce", 2)[0].own.meetings)


def test_a_picture_next_to_another_names_the_difference():
    picture, steps = draw_sync("all_reduce", 2, beside="ring")
    assert steps is None
    assert "In all_reduce each rank makes 12 calls (in ring 1 call)" in picture.sentence
    assert "ring: 2 ranks" in picture.text(80, ASCII)


OWN = """
from cos598d.sync.base import GradientSync


class Mine(GradientSync):
    def average(self, name, gradient):
        {line}
"""


def test_your_own_sync_is_drawn_and_its_error_is_shown_with_its_line(tmp_path, run_here):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(
        OWN.format(line="self.comm.all_reduce(gradient, name).wait() or gradient.div_(self.comm.world_size)")
    )
    bad.write_text(OWN.format(line="raise KeyError(name)"))
    words = ["picture", "--world_size", 2, "--sync"]
    code, said = run_here("cos598d/__main__.py", [*words, f"{good}:Mine", "-o", "own.svg"])
    assert code == 0
    assert "all_reduce of 0.weight" in (tmp_path / "own.svg").read_text()
    assert "Mine: 2 ranks" in said
    code, said = run_here("cos598d/__main__.py", [*words, f"{bad}:Mine"])
    assert code == 1
    assert "bad.py line 7" in said
    assert "Traceback" not in said


def steps_of_ring(folder, code, size=4):
    """Of a file's own messages: how many steps, whether they end with the whole sum, and why there are none."""
    path = folder / "lesson5.py"
    path.write_text(code)
    recorded = session.record_file(get_lesson(5), path, size)
    found = frames(recorded.messages)
    return len(found), ends_whole(found), recorded.unsaid


def test_the_film_of_a_students_ring_shows_what_its_messages_did(tmp_path):
    """Also where what comes in is put in its place by hand, and where sums are wrong."""
    assert steps_of_ring(tmp_path, get_lesson(5).answer()) == (6, True, "")
    for code in RIGHT.values():
        assert steps_of_ring(tmp_path, code, 3)[1:] == (True, "")
    steps, is_right, _ = steps_of_ring(tmp_path, WRONG["adds in the second half"][0], 3)
    assert steps == 4
    assert not is_right
    assert "is not what is in that place there" in steps_of_ring(tmp_path, WRONG["the whole tensor each time"][0], 3)[2]


def test_a_film_is_written_next_to_the_lanes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "warm_up", lambda _: None)
    Path("lesson5.py").write_text(get_lesson(5).answer())
    assert main(["learn", "5", "--picture", "own.svg"]) == 0
    assert "lesson5.py on 4 ranks, step by step" in capsys.readouterr().out
    for name in ("own.svg", "own-steps.svg"):
        assert Path(name).read_text().startswith(("<svg", "<?xml"))


@pytest.mark.parametrize(
    "notes", [[3], [{}], [{"ends": [{}], "looks": []}], [{"ends": [], "looks": [[1.0]]}], [{"ends": 3, "looks": 3}]]
)
def test_forged_notes_of_messages_are_refused(notes):
    with pytest.raises(ValueError, match="reported something other than its messages"):
        messages_of(notes)


def test_curves_are_drawn_and_forged_ones_are_refused(tmp_path):
    path = tmp_path / "lesson15.py"
    path.write_text(get_lesson(15).answer())
    picture, steps = session.picture_of(get_lesson(15), path)
    assert steps is None
    assert max(y for _, y in picture.lines["with your checkpoint"]) < max(
        y for _, y in picture.lines["without checkpoints"]
    )
    assert picture.text(60, ASCII).count("#") > 60
    assert picture.svg().count("<polyline") == 2
    good = {"x": "<a>", "y": "b", "lines": {"<c>": [[0, 1], [2, 3]]}}
    assert "<c>" not in Curves.from_json(good, "title").svg()
    for bad in (
        {},
        good | {"lines": {}},
        good | {"lines": 3},
        good | {"lines": {"c": [[0, 1]]}},
        good | {"lines": {"c": [[0, float("nan")], [1, 1]]}},
        good | {"lines": {"c": [[0, -1], [1, 1]]}},
        good | {"lines": {"c": [[0, "x"], [1, 1]]}},
    ):
        with pytest.raises(ValueError, match="other than its curves"):
            Curves.from_json(bad, "title")
