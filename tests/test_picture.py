"""Pictures of what ranks did: lanes, sentences, frames and drawings, from events and messages that are made up here."""

import re
from xml.etree import ElementTree

import pytest

from cos598d.tools.learn.events import CALL, COMPUTE, RECEIVE, SEND, Event
from cos598d.tools.learn.picture.draw import draw, steps_of
from cos598d.tools.learn.picture.frames import at_first, chunks_of, frames, is_whole
from cos598d.tools.learn.picture.lanes import CALLING, MESSAGE, WAITING, computed_beside, timeline
from cos598d.tools.learn.picture.messages import Message, MessageEnd, join_ends
from cos598d.tools.learn.picture.text import ASCII, BLOCKS, in_colour, letters_for

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</text><script>alert(1)</script> & "x" \x1b[31m\u202e'


def compute(rank, start, end):
    return Event(rank, COMPUTE, "backward", start, end, 0, None, ())


def call(rank, name, start, end, size=4000):
    return Event(rank, CALL, name, start, end, size, None, (name,))


def late_rank():
    """Rank 1 computes for longer, so rank 0 waits for it in the first call."""
    return [
        *(compute(0, 0.0, 0.004), compute(1, 0.0, 0.008)),
        *(call(0, "all_reduce of a", 0.004, 0.012), call(1, "all_reduce of a", 0.008, 0.012)),
        *(call(0, "all_reduce of b", 0.012, 0.016), call(1, "all_reduce of b", 0.012, 0.016)),
    ]


def overlapped():
    """One call, which runs while both ranks compute."""
    return [
        *(compute(0, 0.0, 0.008), compute(1, 0.0, 0.008)),
        *(call(0, "all_reduce of bucket 0", 0.004, 0.010, 8000), call(1, "all_reduce of bucket 0", 0.004, 0.010, 8000)),
    ]


LATE = """\
yours: 2 ranks
# computes, . waits for another rank, = in a call that
all have entered
A rank's first row shows when it computes. The rows
below show its calls, one row for each that runs at the
same time. A gap means that it does none of this. The
number in a call is its number in the list. The picture
shows one step, once, and is not a measurement.
        0                             10.0 ms
rank 0  ############
                    .....1......=====1===========2======
rank 1  ########################
                                =====1===========2======
1 all_reduce of a, 4.00 kB: rank 1 came last, 4.00 ms
  after rank 0
2 all_reduce of b, 4.00 kB"""


def test_a_call_begins_when_its_last_rank_enters():
    rows = [lane.rows[0] for lane in timeline(late_rank()).lanes]
    assert [(bar.kind, round(1e3 * bar.start), round(1e3 * bar.end)) for bar in rows[0][:2]] == [
        (WAITING, 4, 8),
        (CALLING, 8, 12),
    ]
    assert [bar.kind for bar in rows[1]] == [CALLING, CALLING]


def test_the_picture_in_letters():
    text = draw(late_rank()).text(56, ASCII)
    assert text == LATE


def test_letters_for_an_encoding():
    assert letters_for("utf-8") == BLOCKS
    assert letters_for("ascii") == letters_for("latin-1") == letters_for(None) == letters_for("no such") == ASCII


def test_colours_change_no_letter_of_the_picture():
    picture = draw(late_rank())
    coloured = picture.text(60, in_colour(BLOCKS))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == picture.text(60, BLOCKS)


def test_no_line_is_wider_than_the_terminal():
    picture = draw(late_rank(), overlapped(), title="a title that is longer than any terminal is wide" * 3)
    for width in (40, 57, 80, 200):
        assert max(map(len, picture.text(width, BLOCKS).splitlines())) <= width


def test_the_sentence_names_how_two_records_differ():
    said = draw(late_rank(), overlapped()).sentence
    assert "In yours each rank makes 2 calls (in the reference 1 call)" in said
    assert "each rank computes while no call is running (in the reference calls are)" in said
    assert "to its calls" not in said  # both pass 8 kB
    assert "at once" not in said
    again = [call(rank, name, 0.0, 0.02) for rank in range(2) for name in ("all_reduce of a", "all_reduce of b")]
    assert (
        "In yours each rank has up to 1 call running at once (in both 2 calls)"
        in draw(late_rank(), again, reference_title="both").sentence
    )
    same = draw(late_rank(), late_rank()).sentence
    assert "the same number of calls with the same bytes" in same


def test_a_rank_that_never_makes_a_call_is_named():
    events = [compute(1, 0.0, 0.02), call(0, "all_reduce of a", 0.004, 0.02), call(2, "all_reduce of a", 0.005, 0.02)]
    picture = draw(events, overlapped())
    assert "In yours rank 1 never made the call all_reduce of a, in which ranks 0 and 2 waited." in picture.sentence
    assert {bar.kind for lane in picture.own.lanes for row in lane.rows for bar in row} == {WAITING}


def test_calls_in_different_orders_are_named():
    events = [
        *(call(0, "a", 0.0, 0.1), call(0, "b", 0.1, 0.2)),
        *(call(1, "b", 0.0, 0.1), call(1, "a", 0.1, 0.2)),
    ]
    assert "In yours not all ranks make their calls in the same order." in draw(events, overlapped()).sentence


def test_messages_are_arrows_from_send_to_receive():
    events = [
        Event(0, SEND, "send of a", 0.0, 0.004, 100, 1, ("a",)),
        Event(1, RECEIVE, "receive of b", 0.001, 0.005, 100, 0, ("b",)),
        Event(1, RECEIVE, "receive of c", 0.006, 0.007, 100, 0, ("c",)),
    ]
    line = timeline(events)
    assert [(arrow.sender, arrow.receiver, arrow.left, arrow.arrived) for arrow in line.arrows] == [(0, 1, 0.0, 0.005)]
    assert line.alone == 1
    bars = [[(bar.kind, bar.start, bar.end) for row in lane.rows for bar in row] for lane in line.lanes]
    assert bars[0] == [(WAITING, 0.0, 0.001), (MESSAGE, 0.001, 0.004)]
    assert bars[1][1] == (WAITING, 0.006, 0.007)  # nobody sent it
    assert "messages: 0->1 1 of 100 B; 1 end without the other" in draw(events).text(80, ASCII)


@pytest.mark.parametrize("reference", [(), overlapped()])
def test_a_drawing_has_no_scripts_and_escapes_names(reference):
    events = [call(rank, f"all_reduce of {HOSTILE}", 0.0, 0.01) for rank in range(4)]
    svg = draw(events, reference, title=HOSTILE, note=HOSTILE).svg()
    root = ElementTree.fromstring(svg)
    kinds = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert kinds.isdisjoint({"script", "a", "image", "foreignObject", "use", "iframe"})
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", svg)
    assert not any(key.startswith("on") or key.endswith("href") for element in root.iter() for key in element.attrib)
    assert "\x1b" not in svg
    assert "\u202e" not in svg
    assert any("<script>" in (element.text or "") for element in root.iter(f"{SVG}text"))
    assert "prefers-color-scheme:dark" in svg
    assert root.get("viewBox", "").split()[:3] == ["0", "0", "360"]
    assert root.find(f"{SVG}title") is not None


def test_hundreds_of_calls_make_a_drawing_of_bounded_size():
    events = [call(rank, f"call {k}", k * 1e-6, (k + 1) * 1e-6) for rank in range(4) for k in range(5_000)]
    picture = draw(events)
    assert len(picture.svg()) < 500_000
    assert "and 4,988 calls more" in picture.text(80, ASCII)


def test_a_call_that_is_waited_for_at_once_does_not_overlap_computing():
    """Its rank computes for a moment more; and the stretches of computing may overlap."""
    events = [compute(0, 0.0, 0.0041), compute(0, 0.001, 0.002), call(0, "a", 0.004, 0.008), compute(0, 0.008, 0.01)]
    assert computed_beside(timeline(events).lanes[0]) == 0
    assert computed_beside(timeline([*events, compute(0, 0.006, 0.007)]).lanes[0]) == 1


def test_the_last_row_shows_all_calls_beyond_eight():
    events = [call(rank, f"call {k}", k * 0.001, 1.0) for rank in range(2) for k in range(10)]
    picture = draw(events)
    rows = picture.own.lanes[0].rows
    assert [len(row) for row in rows] == [1] * 7 + [3]
    words = "a rank's last row shows everything beyond 8 at once"
    assert words in picture.text(80, ASCII)
    assert words in picture.svg().replace("&#39;", "'")
    assert "beyond" not in draw(events[:8]).text(80, ASCII)


def test_infinite_times_and_no_events_are_refused():
    with pytest.raises(ValueError, match="finite"):
        timeline([compute(0, float("-inf"), 0.0)])
    with pytest.raises(ValueError, match="no events"):
        draw([])


def message(sender, receiver, begin, end, adds, step):
    """One whose moments are those of a step in which every rank waits for its messages."""
    return Message("a", sender, receiver, begin, end, 4 * (end - begin), adds, step, step + 0.5, step, step + 0.5)


def ring_of_three():
    """A ring of three ranks over 8 elements, in parts of 3, 3 and 2."""
    edges = [(0, 3), (3, 6), (6, 8)]
    return [
        message(rank, (rank + 1) % 3, *edges[part % 3], step < 2, step)
        for step in range(4)
        for rank in range(3)
        for part in [rank - step if step < 2 else rank + 3 - step]
    ]


def test_a_ring_of_three_ranks_has_four_steps_and_ends_with_all_sums():
    found = frames(ring_of_three())
    assert chunks_of(ring_of_three()) == [(0, 3), (3, 6), (6, 8)]
    assert [len(frame.moves) for frame in found] == [3, 3, 3, 3]
    assert [all(move.adds for move in frame.moves) for frame in found] == [True, True, False, False]
    assert found[0].held[1] == ((1, 1, 0), (0, 1, 0), (0, 1, 0))
    assert all(is_whole(counts) for chunks in found[-1].held for counts in chunks)


def test_a_sum_that_has_a_rank_twice_is_shown_as_wrong():
    wrong = [message(0, 1, 0, 4, True, 0), message(1, 0, 0, 4, True, 1)]
    found = frames(wrong)
    assert found[-1].held[0] == ((2, 1),)
    steps = steps_of(wrong, "wrong")
    assert "1 cell is no complete sum. Rank 0 has in part 0 the gradients of rank 0 + 0 + 1" in steps.text(200, ASCII)
    assert 'class="wrong"' in steps.svg()


def test_messages_of_unrelated_ranks_are_one_step():
    """Ranks 2 and 3 come long after 0 and 1, with whom they have nothing to do: both messages are one step."""
    messages = [message(0, 1, 0, 4, True, 0), message(2, 3, 0, 4, True, 50)]
    assert len(frames(messages)) == 1


def test_messages_that_a_rank_receives_one_by_one_are_separate_steps():
    """As rank 0 of a tree, which adds up its children's: the last of them has been ready from the start."""
    times = {"sent": 0.0, "left": 9.0}
    messages = [
        Message("a", sender, 0, 0, 4, 16, True, expected=place, arrived=place + 1, **times)
        for place, sender in enumerate((1, 2, 4))
    ]
    assert [[move.sender for move in frame.moves] for frame in frames(messages)] == [[1], [2], [4]]


def test_steps_in_letters():
    assert steps_of(ring_of_three()[:3], "a ring").text(80, ASCII) == (
        "a ring\n"
        "  at first\n"
        "  rank 0 has 0 0 0\n"
        "  rank 1 has 1 1 1\n"
        "  rank 2 has 2 2 2\n"
        "step 1 of 1: 3 messages added, 32 B: 0->1 part 0, 1->2 part 1, 2->0 part 2\n"
        "  rank 0 has 0   0   0+2\n"
        "  rank 1 has 0+1 1   1\n"
        "  rank 2 has 2   1+2 2\n"
        "9 cells are no complete sum. Rank 0 has in part 0 the gradients of rank 0; a\n"
        "rank sent 8 B to 12 B."
    )


def test_a_film_shows_every_message_moving_and_every_frame_still():
    found = frames(ring_of_three())
    svg = steps_of(ring_of_three(), "a ring").svg("ring")
    root = ElementTree.fromstring(svg)
    assert "script" not in {element.tag.removeprefix(SVG) for element in root.iter()}
    for frame in found:
        moving = [element for element in root.iter(f"{SVG}g") if element.get("class") == f"when ring-m{frame.step}"]
        assert len(moving) == len(frame.moves)
        assert f"@keyframes ring-m{frame.step}" in svg
    arrows = [element for element in root.iter(f"{SVG}line") if element.get("marker-end")]
    assert len(arrows) == sum(len(frame.moves) for frame in found)
    animated = svg.partition("@media (prefers-reduced-motion:no-preference){")[2]
    assert svg.count("animation:") == animated.count("animation:") > 0


def test_too_many_pieces_or_ranks_are_refused():
    many = [message(0, 1, place, place + 1, True, place) for place in range(40)]
    with pytest.raises(ValueError, match="40 pieces are more than a picture of 32 can show"):
        frames(many)
    with pytest.raises(ValueError, match="10 ranks"):
        frames([message(0, 9, 0, 4, True, 0)])


def test_each_rank_begins_with_its_own_gradient():
    assert at_first(2, 1) == (((1, 0),), ((0, 1),))
    assert frames([]) == []


def end(rank, peer, is_sent, begin=0, elements=4, tag=0):
    return MessageEnd(rank, peer, "a", is_sent, begin, elements, 4 * elements, tag, 0.0, 1.0)


def test_ends_of_messages_are_joined_in_order_by_tag():
    ends = [
        end(0, 1, True, 0, tag=1),
        end(0, 1, True, 4, tag=2),
        end(1, 0, False, None, tag=2),
        end(1, 0, False, 0, tag=1),
    ]
    assert [(each.begin, each.adds) for each in join_ends(ends)] == [(0, False), (4, True)]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([end(0, 1, True)], "rank 0 sent 1 messages of a to rank 1, which received 0"),
        ([end(0, 1, True), end(1, 0, False, 4)], "not what is in that place"),
        ([end(0, 1, True), end(1, 0, False, 0, 2)], "not what is in that place"),
    ],
)
def test_ends_that_do_not_fit_are_refused(ends, words):
    with pytest.raises(ValueError, match=words):
        join_ends(ends)
