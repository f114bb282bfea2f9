"""A student's own ring, message by message: its film shows what the messages did, not what the code says of them."""

from pathlib import Path

import pytest
from lesson_cases.lesson5 import RIGHT, WRONG

from cos598d.commands.cli import main
from cos598d.tools.learn import session
from cos598d.tools.learn.lessons import get_lesson
from cos598d.tools.learn.picture.curves import Curves
from cos598d.tools.learn.picture.frames import frames, is_whole
from cos598d.tools.learn.picture.probe import messages_of
from cos598d.tools.learn.picture.text import ASCII


def steps_of_ring(folder, code, size=4):
    """Of a file's own messages: how many steps, whether they end with the whole sum, and why there are none."""
    path = folder / "lesson5.py"
    path.write_text(code)
    recorded = session.record_file(get_lesson(5), path, size)
    found = frames(recorded.messages)
    is_right = bool(found) and all(is_whole(counts) for chunks in found[-1].held for counts in chunks)
    return len(found), is_right, recorded.unsaid


def test_the_film_of_a_ring_of_one_s_own_shows_what_its_messages_did(tmp_path):
    """Also where what comes in is put in its place by hand, and where sums are wrong."""
    assert steps_of_ring(tmp_path, get_lesson(5).answer()) == (6, True, "")
    for code in RIGHT.values():
        assert steps_of_ring(tmp_path, code, 3)[1:] == (True, "")
    steps, is_right, _ = steps_of_ring(tmp_path, WRONG["adds in the second half"][0], 3)
    assert steps == 4
    assert not is_right
    assert "is not what is in that place there" in steps_of_ring(tmp_path, WRONG["the whole tensor each time"][0], 3)[2]


def test_a_film_is_written_beside_the_lanes(tmp_path, monkeypatch, capsys):
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
def test_what_is_no_note_of_messages_is_none(notes):
    with pytest.raises(ValueError, match="reported something other than its messages"):
        messages_of(notes)


def test_curves_of_a_step_are_drawn_and_forged_ones_are_refused(tmp_path):
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
