"""Pictures of real ranks: the frames of a collective against the ledger of the run that they are made from."""

import pytest

from cos598d.tools.learn.events import CALL, COMPUTE
from cos598d.tools.learn.picture.draw import steps_of
from cos598d.tools.learn.picture.frames import frames, is_whole
from cos598d.tools.learn.picture.messages import MEMORY
from cos598d.tools.learn.picture.text import ASCII
from cos598d.tools.learn.picture.trial import draw_sync, run_trial

RANKS = 4
# Of each the steps on four ranks, and whether all that a rank sends are these messages.
MADE_OF_MESSAGES = {
    "ring": (6, True),
    "tree": (4, True),
    "halving_doubling": (4, True),
    "zero1": (2, False),
    "zero3": (2, False),
}


@pytest.mark.parametrize("name", MADE_OF_MESSAGES)
def test_the_frames_have_every_message_of_the_run_once_and_end_with_all_sums(name):
    trial = run_trial(name, RANKS)
    steps, has_all = MADE_OF_MESSAGES[name]
    found = frames(trial.messages)
    assert len(found) == steps
    moves = [(move.sender, move.receiver, move.bytes, move.adds) for frame in found for move in frame.moves]
    assert sorted(moves) == sorted((m.sender, m.receiver, m.bytes, m.adds) for m in trial.messages)
    assert all(is_whole(counts) for chunks in found[-1].held for counts in chunks)
    sent = [sum(move[2] for move in moves if move[0] == rank) for rank in range(RANKS)]
    if has_all:
        assert sent == trial.sent
    else:  # these are of the tensor that moves most
        assert all(0 < some <= whole for some, whole in zip(sent, trial.sent, strict=True))


def test_shared_memory_sends_nothing_and_its_frames_are_what_ranks_read():
    trial = run_trial("shared_memory", RANKS)
    assert trial.sent == [0] * RANKS
    assert {message.medium for message in trial.messages} == {MEMORY}
    found = frames(trial.messages)
    assert [len(frame.moves) for frame in found] == [12, 12]
    assert all(is_whole(counts) for chunks in found[-1].held for counts in chunks)
    assert "Nothing is sent" in steps_of(trial.messages, "shared_memory").svg()


def test_the_lanes_have_each_rank_s_computing_and_calls():
    trial = run_trial("all_reduce", 2)
    assert not trial.messages
    kinds = [[event.kind for event in trial.events if event.rank == rank] for rank in range(2)]
    assert [kind.count(CALL) for kind in kinds] == [12, 12]  # a weight and a bias for each of six layers
    assert all(kind.count(COMPUTE) == 3 for kind in kinds)
    assert not any(meeting.missing for meeting in draw_sync("all_reduce", 2)[0].own.meetings)


def test_a_picture_beside_another_says_what_differs():
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


def test_your_own_sync_is_drawn_and_what_it_raises_is_told_with_its_line(tmp_path, run_here):
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
