"""The course: answers pass, the first lines name what is wrong in a file, and bad input is refused in one line."""

import importlib
import json
import os
import re
from pathlib import Path

import pytest
from test_docs import wrong_in

from cos598d.commands.cli import main
from cos598d.errors import UsageError, UserError
from cos598d.tools.check.claims.base import World
from cos598d.tools.check.evidence import Evidence
from cos598d.tools.learn import progress, session, told
from cos598d.tools.learn.events import Event, from_rows, to_rows
from cos598d.tools.learn.lessons import NUMBERS, all_lessons, get_lesson
from cos598d.tools.learn.lessons import golf as golf_module
from cos598d.tools.learn.lessons.lesson12 import checks as lesson12
from cos598d.tools.learn.lessons.lesson12.checks import RIGHT, simulate
from cos598d.tools.learn.marking import SECONDS, Marking
from cos598d.tools.learn.student import BLANK, MARKER

CASES = {number: importlib.import_module(f"lesson_cases.lesson{number}") for number in NUMBERS}
NONCE = 20260101


def mark_file(path, lesson, sizes=None, seconds=SECONDS):
    """The result of a lesson's check of a file."""
    marking = Marking(lesson, path, path.read_bytes(), NONCE, seconds)
    marking.run(lambda _: None, sizes)
    return marking.result()


def mark(folder, number, code, sizes=None, seconds=SECONDS):
    """The result of a lesson's check of `code`, and the first lines that a student reads."""
    lesson = get_lesson(number)
    result = mark_file(write(folder, number, code), lesson, sizes, seconds)
    return result, " ".join(told.verdict(result, lesson).partition("\n\n")[0].split())


def write(folder, number, code=None):
    """The path of a file of the lesson, with its answer or other code."""
    path = folder / get_lesson(number).file_name
    path.write_text(get_lesson(number).answer() if code is None else code)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which commands run. The tests' server is warm already, and other tests share it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "warm_up", lambda _: None)
    return tmp_path


@pytest.mark.parametrize("nonce", [42, 72, 78])
def test_lesson_12_compares_the_end_with_the_formula_at_the_same_nonce(nonce):
    """At these the right answer ends above the middle between ranks that talk in every step and ranks that never do."""
    found = {}
    for every in (lesson12.LONG_EVERY, 1):
        last = simulate(nonce, 2, every, lesson12.LONG_STEPS, lesson12.SETTINGS[lesson12.MOMENTUM], RIGHT)[-1]
        evidence = [Evidence(rank, nonce) for rank in range(2)]
        for each, weights in zip(evidence, last, strict=True):
            each.put(lesson12.trains.name, "after training", weights)
        world = World(lesson12.trains.name, nonce, evidence)
        lesson12.trains.judge(world)
        found[every] = [finding.message for finding in world.findings]
    assert found[lesson12.LONG_EVERY] == []
    assert "and the formula's is" in found[1][0]


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("number", NUMBERS)
def test_the_answer_passes_and_the_page_fails(number, tmp_path):
    lesson = get_lesson(number)
    result, _ = mark(tmp_path, number, lesson.answer())
    assert result["passed"], result
    result, first = mark(tmp_path, number, lesson.page())
    assert not result["passed"]
    line = next((i for i, text in enumerate(lesson.page().splitlines(), 1) if BLANK.search(text)), 0)
    # Without a blank it is a file to be mended.
    words = f"line {line}: nothing is filled in yet: write your code" if line else "line "
    assert first.startswith(f"lesson{number}.py {words}")


@pytest.mark.long(one_in=8)
@pytest.mark.parametrize(("number", "name"), [(n, name) for n in NUMBERS for name in CASES[n].RIGHT])
def test_a_right_file_unlike_the_answer_passes(number, name, tmp_path):
    result, first = mark(tmp_path, number, CASES[number].RIGHT[name])
    assert result["passed"], first


@pytest.mark.long(one_in=16)
@pytest.mark.parametrize(("number", "name"), [(n, name) for n in NUMBERS for name in CASES[n].WRONG])
def test_a_wrong_file_is_named_in_the_first_lines(number, name, tmp_path):
    code, says, *sizes = CASES[number].WRONG[name]
    sizes = sizes[0] if sizes else get_lesson(number).load_checks().sizes[:1]
    result, first = mark(tmp_path, number, code, sizes, seconds=8)  # some never end
    assert not result["passed"]
    assert says in first
    assert f"lesson{number}.py" in first
    marked = [place for place, line in enumerate(code.splitlines(), 1) if line.endswith("#!")]
    assert not marked or f"line {marked[0]}:" in first


def test_pages_agree_with_their_lessons():
    for lesson in all_lessons():
        first, *_ = lesson.page().splitlines()
        assert first == f"# cos598d lesson {lesson.number}: {lesson.title}"
        assert int(MARKER.search(lesson.answer().encode())[1]) == lesson.number
        assert len(lesson.hints) == 3
        assert len([line for line in lesson.page().splitlines() if line.startswith("#")]) < 70
        for name in lesson.contract:
            assert re.search(rf"^(def|class) {name}\b", lesson.page(), flags=re.MULTILINE), name
        for file in re.findall(r"[\w/]+/\w+\.py", f"{lesson.read} {lesson.measure}"):
            assert (Path(__file__).parents[1] / file).exists(), file
        assert wrong_in(lesson.measure) == []


AVERAGE = "import os, sys, time, torch\n\ndef average(comm, gradient, name):\n"
BAD = {
    "no Python": ("def average(comm, gradient, name)\n    pass\n", "line 1: this is not valid Python", "not tried"),
    "no function": (
        "def mean(comm, gradient, name):\n    pass\n",
        "does not define average. The lesson asks for",
        "failed",
    ),
    "no such import": ("import torhc\n", "line 1: ", "failed"),
    "raises": (
        AVERAGE + "    if comm.rank == 1:\n        raise KeyError(name)\n    comm.all_reduce(gradient)\n",
        "line 5: rank 1",
        "failed",
    ),
    "endless loop": (AVERAGE + "    while comm.rank == 0:\n        time.sleep(0.01)\n", "line", "did not end"),
    "leaves": (AVERAGE + "    os._exit(0)\n", "exit code 0", "crashed"),
    "exits well": (AVERAGE + "    sys.exit(0)\n", "line 4: rank 0 raised an exception", "failed"),
    "another signature": (
        "def average(gradient, comm):\n    comm.all_reduce(gradient)\n",
        "raised an exception: TypeError",
        "failed",
    ),
    "no text": (AVERAGE + "    pass\0\n", "this is not valid Python", "not tried"),
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_run_is_named_with_its_line(name, tmp_path):
    code, says, status = BAD[name]
    result, _ = mark(tmp_path, 3, code, (2,), seconds=4)
    assert not result["passed"]
    assert says in result["diagnosis"][0]["cause"]
    assert result["claims"][0]["status"] == status


def test_ranks_in_different_calls_are_both_named_with_their_lines(tmp_path):
    code = AVERAGE + (
        "    if comm.rank == 0:\n        comm.all_reduce(gradient, name)\n"
        "    else:\n        comm.gather(gradient, name)\n"
    )
    words = mark(tmp_path, 3, code, (2,), seconds=4)[0]["diagnosis"][0]["cause"]
    assert "lesson3.py line 5) while rank 1 is in comm.gather" in words
    assert "lesson3.py line 7)" in words


def test_a_file_that_prints_its_own_grade_fails(tmp_path):
    """It claims in every way to have passed: only the gradients count."""
    code = (
        "import cos598d.tools.learn.marking, cos598d.tools.check.judge, cos598d.tools.learn.ranks\n"
        "from cos598d.tools.check.claims.base import World\n"
        "World.compare = lambda *_: None\n"
        "cos598d.tools.learn.marking.Marking.result = lambda self: {'passed': True}\n"
        "print('all 2 checks passed')\n"
        "def average(comm, gradient, name):\n"
        "    print('passed\\n' * 10_000)\n"
        "    comm.all_reduce(gradient, name)\n"
    )
    result, first = mark(tmp_path, 3, code, (2,))
    assert not result["passed"]
    assert "is the sum over 2 ranks" in first
    assert 0 < len(result["printed"]) <= 10


@pytest.mark.parametrize(
    "read",
    [
        "from cos598d.tools.learn.lessons import get_lesson\nexec(get_lesson(3).answer())\n",
        "import subprocess\nfrom pathlib import Path\nimport cos598d.tools.learn.lessons as lessons\n"
        "path = Path(lessons.__file__).parent / 'lesson3' / 'answer' / 'lesson3.py.txt'\n"
        "exec(subprocess.run(['cat', path], capture_output=True, text=True).stdout)\n",
    ],
)
def test_a_file_that_reads_the_answer_is_refused(read, tmp_path):
    result, first = mark(tmp_path, 3, read, (2,))
    assert not result["passed"]
    assert " closed while a file is checked" in first


def test_check_takes_an_answer_in_its_place_and_a_file_of_that_name(tmp_path):
    lesson = get_lesson(3)
    own = tmp_path / "lesson3.py.txt"
    own.write_text(lesson.answer())
    for path in (own, Path(importlib.import_module(lesson.checks_module).__file__).parent / "answer" / own.name):
        assert mark_file(path, lesson, (2,))["passed"], path


def test_lost_examples_are_diagnosed_once(tmp_path):
    result, first = mark(tmp_path, 1, CASES[1].WRONG["the remainder is dropped"][0], (2,))
    assert [claim["status"] for claim in result["claims"]] == ["passed", "failed", "failed"]
    assert len(result["diagnosis"]) == 1, first  # and not that a weight of 0.9091 should be 0.9091


def test_an_unexpected_report_is_a_failed_check_without_a_traceback(tmp_path):
    code = get_lesson(0).answer() + (
        "\n\nfrom cos598d.tools.check.evidence import Evidence\n\nkeep = Evidence.report\n"
        "Evidence.report = lambda self, claim, name, value: keep(self, claim, name, [None] if value else value)\n"
    )
    result, first = mark(tmp_path, 0, code)
    assert not result["passed"]
    assert result["claims"][0]["status"] == "failed"
    assert "what the ranks handed in cannot be judged (TypeError: " in first


def test_learn_lists_lessons_writes_a_file_once_and_counts_hints(here, capsys):
    def printed(*words):
        assert main(["learn", *words]) == 0
        return capsys.readouterr().out

    assert "Next: cos598d learn 0" in printed()
    assert "wrote lesson3.py" in printed("3")
    Path("lesson3.py").write_text("# mine\n")
    assert "exists already and was not changed" in printed("3")
    assert Path("lesson3.py").read_text() == "# mine\n"
    for number in (1, 2, 3, 3):
        assert f"Hint {number} of 3" in printed("3", "--hint")
    assert "Hint 1 of 3" in printed("3", "--hint", "1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("99", "there is no lesson 99"),
        ("3 --hint 4", "a number from 1 to 3"),
        ("3 --check nowhere.py", "nowhere.py: no such file"),
        ("--check", "Give its number"),
        ("3 --json x", "Give both"),
        ("3 --hint --check", "a command of their own"),
        ("3 --hint --picture", "a command of their own"),
        ("3 --golf", "Lessons 5, 6, 7, 9 and 11 have one"),
        ("--golf", "Give its number"),
        ("5 --golf --check", "in another command"),
        ("5 --golf nowhere.py", "nowhere.py: no such file"),
        ("0 --picture", "cannot draw lesson 0, which has no picture. Lessons 2, 3,"),
        ("3 --picture own.png", "ends in .svg"),
    ],
)
def test_bad_arguments_are_refused_with_the_fix(words, says, here, capsys):
    for number in (0, 3):
        write(here, number)
    assert main(["learn", *words.split()]) == 2
    said = capsys.readouterr().err
    assert says in said


def test_a_file_of_another_lesson_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is a file of lesson 2, not of lesson 3"):
        session.check_file(get_lesson(3), write(tmp_path, 2), print)


def test_check_takes_a_lesson_s_file_and_notes_that_it_passed(here, capsys):
    Path("mine.py").write_text(get_lesson(1).answer())
    assert main(["check", "mine.py", "--json", "card.json"]) == 0
    assert "all 3 checks passed" in capsys.readouterr().out
    card = json.loads(Path("card.json").read_text())
    assert card["passed"]
    assert [claim["status"] for claim in card["claims"]] == ["passed"] * 3
    assert main(["check", "mine.py", "--no_speed"]) == 2
    assert "--no_speed is only for gradient syncs, and mine.py is of lesson 1" in capsys.readouterr().err
    lesson = get_lesson(1)
    assert progress.status(here, lesson) == progress.PASSED
    Path("mine.py").write_text("# another\n")
    assert progress.status(here, lesson) == progress.CHANGED
    os.remove("mine.py")
    assert progress.status(here, lesson) == progress.PASSED


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"1": 3}', '{"1": {"file": 3, "sha256": []}}', '{"1": {"hints": "x"}}', "\udcff"]
)
def test_damaged_progress_counts_as_none(text, tmp_path):
    place = tmp_path / progress.PLACE
    place.parent.mkdir()
    place.write_bytes(text.encode(errors="surrogateescape"))
    lesson = get_lesson(1)
    assert progress.status(tmp_path, lesson) == progress.NOT_BEGUN
    assert progress.hints_told(tmp_path, lesson) == 0
    progress.keep_hint(tmp_path, lesson, 2)
    assert progress.hints_told(tmp_path, lesson) == 2


def test_events_survive_json_and_forged_ones_are_refused():
    events = [Event(0, "call", "all_reduce of a", 1.0, 2.0, 8, None, ("a",)), Event(1, "wait", "w", 0.5, 0.5, 0, 0, ())]
    rows = json.loads(json.dumps(to_rows(events)))
    assert from_rows(rows) == sorted(events, key=lambda event: event.start)
    good = rows[0]
    for bad in (
        None,
        [3],
        [good | {"kind": "nap"}],
        [good | {"start": 3.0}],
        [good | {"end": float("nan")}],
        [good | {"bytes": -1}],
        [good | {"tensors": "a"}],
        [good | {"peer": True}],
        [good | {"more": 1}],
    ):
        with pytest.raises(ValueError, match="no rows of events"):
            from_rows(bad)


@pytest.mark.parametrize("number", [3, 6])
def test_a_record_has_the_events_of_every_rank(number, tmp_path):
    events = session.record_file(get_lesson(number), write(tmp_path, number), 2).events
    assert {event.rank for event in events} == {0, 1}
    for rank in (0, 1):
        own = [event for event in events if event.rank == rank]
        calls = [event for event in own if event.kind == "call"]
        assert len(calls) == 8  # a gradient each
        assert sum(event.kind == "compute" for event in own) > 1
        assert ("wait" in {event.kind for event in own}) == (number == 6)


def test_a_picture_shows_the_file_next_to_the_answer(here, capsys):
    Path("lesson3.py").write_text(CASES[3].RIGHT["divides first"])
    assert main(["learn", "3", "--picture", "own.svg"]) == 0
    said = capsys.readouterr().out
    assert "lesson3.py" in said
    assert "the answer" in said
    assert Path("own.svg").read_text().startswith(("<svg", "<?xml"))
    Path("lesson3.py").write_text(AVERAGE + "    raise KeyError\n")
    assert main(["learn", "3", "--picture"]) == 1
    assert "cannot be drawn" in capsys.readouterr().err


def test_checks_of_a_page_with_blanks_are_not_tried(tmp_path):
    page = get_lesson(5).page()
    result, first = mark(tmp_path, 5, page)
    assert "nothing is filled in yet: write your code instead of `...`; 3 blanks are left" in first
    assert {claim["status"] for claim in result["claims"]} == {"not tried"}
    begun = page.replace("...  # your turn: n parts of the tensor", "tensor.tensor_split(n)")
    result, first = mark(tmp_path, 5, begun)
    assert "this blank is still to be filled in: write your code instead of `...`; 2 blanks are left" in first
    assert "nothing was tried." in told.verdict(result, get_lesson(5))


def test_the_line_of_a_world_size_counts_checks_on_others():
    assert told.world(1, 1, 2, {}) == "1 rank: 1 of 2 checks passed"
    assert told.world(2, 3, 3, {}) == "2 ranks: 3 of 3 checks passed"
    assert told.world(2, 0, 1, {}) == "2 ranks: 0 of 1 check passed"
    said = told.world(3, 1, 1, {"one_ring_each": (4, 2), "again": (2, 4), "alone": (1,)})
    others = "2 more checks run only on 2 and 4 ranks; 1 more check runs only on 1 rank"
    assert said == f"3 ranks: 1 of 1 check passed ({others})"


def test_a_check_prints_its_world_sizes_before_it_loads_anything(tmp_path, monkeypatch):
    """Before anything is loaded, and with the numbers of ranks that the checks have."""

    class Begun(Exception):
        pass

    def stop(_):
        raise Begun

    monkeypatch.setattr(session, "warm_up", stop)
    for lesson in all_lessons():
        assert lesson.ranks == tuple(lesson.load_checks().sizes)
        path = write(tmp_path, lesson.number)
        said: list[str] = []
        with pytest.raises(Begun):
            session.check_file(lesson, path, said.append)
        words = told.begins(path.name, lesson.ranks)
        assert said == [words]
        on = words.partition(" checking ")[2]
        assert f"--check      checks this file{',' if on == 'in one process' else ''} {on}\n" in lesson.page()
    assert told.begins("lesson3.py", (2, 3, 4)) == "lesson3.py: checking on 2, 3 and 4 ranks"


def test_only_lessons_with_a_picture_name_one():
    for lesson in all_lessons():
        has_picture = lesson.load_checks().record is not None
        assert lesson.has_picture == has_picture
        assert (f"learn {lesson.number} --picture" in session.question(lesson)) == has_picture


# A rank sums its own part from messages: two thirds of the bytes of an all-reduce of everything.
SCATTERED = """        comm, n = ctx.comm, ctx.comm.world_size
        parts = [cut_at(gradient, rank, n) for rank in range(n)]
        others = [rank for rank in range(n) if rank != comm.rank]
        landing = [torch.empty_like(parts[0]) for _ in others]
        calls = [comm.irecv(tensor, rank) for tensor, rank in zip(landing, others)]
        calls += [comm.isend(parts[rank], rank) for rank in others]
        for call in calls:
            call.wait()
        return (parts[comm.rank] + sum(landing)) / n, None


def cut_at(flat, rank, n):
    elements = -(-flat.numel() // n)
    padded = torch.zeros(elements * n)
    padded[: flat.numel()] = flat
    return padded.view(n, elements)[rank].clone()
"""
ALL_REDUCED = """        gradient = gradient.clone()
        ctx.comm.all_reduce(gradient, "gradient")
        part = cut(gradient, ctx.comm) / ctx.comm.world_size
        return part, None
"""
# All of the second half through files: every check of lesson 5 counts its messages, and golf draws a longer tensor.
ELSEWHERE = """import glob, os, tempfile, time


def all_reduce(comm, tensor):
    if tensor.numel() < 5000:
        return in_a_ring(comm, tensor)
    all_reduce.calls += 1
    place = f"{PLACE}/{all_reduce.calls}-"
    torch.save(tensor, f"{place}{comm.rank}.part")
    os.rename(f"{place}{comm.rank}.part", f"{place}{comm.rank}.pt")
    while len(glob.glob(place + "*.pt")) < comm.world_size:
        time.sleep(0.001)
    tensor.copy_(sum(torch.load(f"{place}{rank}.pt") for rank in range(comm.world_size)))


all_reduce.calls = 0


def in_a_ring(comm, tensor):"""


def golf_once(folder, number, code=None):
    return session.stroke(get_lesson(number), write(folder, number, code))


def test_lessons_have_a_board_if_their_checks_measure():
    assert [lesson.number for lesson in all_lessons() if lesson.golf] == [5, 6, 7, 9, 11]
    for lesson in all_lessons():
        checks = lesson.load_checks()
        assert (checks.golf is not None) == lesson.golf
        if checks.golf:
            assert set(checks.golf.check.sizes) <= set(checks.sizes)
            assert checks.golf.what
            assert checks.least == checks.golf.least


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("number", [5, 6, 7, 9, 11])
def test_golf_counts_the_answers_bytes(number, tmp_path):
    lesson = get_lesson(number)
    stroke = golf_once(tmp_path, number)
    least = lesson.load_checks().least
    assert stroke.seconds > 0
    assert len(stroke.host) == lesson.load_checks().golf.ranks
    if number == 11:  # its all-reduce sends twice what a part needs
        assert 4 / 3 * least < stroke.bytes < 1.4 * least
    else:
        assert stroke.bytes == least


def test_golf_counts_the_fewer_bytes_of_a_better_file(tmp_path):
    code = get_lesson(11).answer()
    assert code.count(ALL_REDUCED) == 1
    stroke = golf_once(tmp_path, 11, code.replace(ALL_REDUCED, SCATTERED))
    assert stroke.bytes < 1.05 * get_lesson(11).load_checks().least


FIRST = "    n = comm.world_size\n"
LATER = "    if tensor.numel() > 5000:\n"
LEDGER = "    from cos598d.comm.ledger import Ledger\n    comm.ledger = Ledger()\n"
DIRECT = f"{LATER}        torch.distributed.all_reduce(tensor)\n        return\n"
OTHER = f"{LATER}        tensor += 1\n"
NOT_IN_GOLF = {
    "past the counters": ("def all_reduce(comm, tensor):", ELSEWHERE, "0 bytes are counted in a step"),
    "another sum": (FIRST, OTHER + FIRST, "is wrong in step 0"),
    "without comm": (FIRST, DIRECT + FIRST, "torch.distributed is called directly"),
    "by one call": (FIRST, f"{LATER}        return comm.all_reduce(tensor)\n{FIRST}", "has to be made of messages"),
    "a ledger of its own": (FIRST, LEDGER + FIRST, "0 bytes are counted in a step"),
    "the counting itself": (
        "import torch\n",
        "import torch\nimport cos598d.tools.learn.lessons.golf\n",
        "closed while a file is checked",
    ),
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", NOT_IN_GOLF)
def test_a_file_that_cheats_in_golf_has_no_score(name, tmp_path):
    old, new, says = NOT_IN_GOLF[name]
    (tmp_path / "shared").mkdir()
    code = get_lesson(5).answer()
    assert code.count(old) == 1
    with pytest.raises(UserError, match="but not a round of golf: ") as caught:
        golf_once(tmp_path, 5, code.replace(old, new.replace("{PLACE}", str(tmp_path / "shared"))))
    assert says in str(caught.value)


def score(sent=0, sha256="", **more):
    return progress.GolfScore("lesson9.py", sha256, sent, 2.0, 1.0, 3.0, 1.5, **more)


def test_golf_keeps_scores_and_marks_those_of_other_files(here, monkeypatch, capsys):
    monkeypatch.setattr(session, "ROUNDS", 2)
    write(here, 9)
    lines = []
    for _ in range(2):
        assert main(["learn", "9", "--golf"]) == 0
        lines.append(capsys.readouterr().out)
        Path("lesson9.py").write_text(get_lesson(9).answer() + "\n# another\n")
    for said in lines:
        assert "10 calls of step_seconds, in one process" in said
        assert re.search(r"^this file, now +0 ", said, flags=re.MULTILINE)
        assert re.search(r"^the answer, now +0 .* 1\.00$", said, flags=re.MULTILINE)
    assert "before" not in lines[0].partition("Bytes:")[0]
    assert "other files, before" in lines[1]
    kept = json.loads(Path(progress.BOARD).read_text())["9"]
    assert len({each["sha256"] for each in kept}) == len(kept) == 2
    # A file that does not pass is not measured.
    Path("lesson9.py").write_text(get_lesson(9).page())
    assert main(["learn", "9", "--golf"]) == 1
    assert "nothing is filled in yet" in capsys.readouterr().out
    assert json.loads(Path(progress.BOARD).read_text())["9"] == kept


def test_a_changed_or_stopped_file_has_no_score(here, monkeypatch):
    lesson, path = get_lesson(9), write(here, 9)
    stroke = session.stroke(lesson, path)

    def changes(*_):
        path.write_text(lesson.answer() + "\n# changed\n")
        return stroke

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "stroke", changes)
    with pytest.raises(UserError, match="has changed while it was measured"):
        session.golf(lesson, path, lambda _: None)
    monkeypatch.setattr(session, "stroke", stopped)
    with pytest.raises(KeyboardInterrupt):
        session.golf(lesson, path, lambda _: None)
    assert not (here / progress.BOARD).exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"5": 3}', '{"5": [{"file": "a"}]}', '{"5": [null]}', '{"5": NaN}', "\udcff",
        *(json.dumps({"5": [vars(score(800_000)) | change]}) for change in (
            {"bytes": 12}, {"bytes": -1}, {"bytes": 1.5}, {"bytes": "1"}, {"seconds": 0}, {"most": "x"}, {"sha256": 3},
        )),
    ],
)  # fmt: skip
def test_a_damaged_board_is_refused_and_not_changed(text, tmp_path):
    place = tmp_path / progress.BOARD
    place.parent.mkdir()
    place.write_bytes(text.encode(errors="surrogateescape"))
    lesson = get_lesson(5)
    with (
        pytest.raises(UserError, match=r"golf.json is no board, or was damaged .* Delete it"),
        progress.golf_scores(tmp_path, lesson, lesson.load_checks().least),
    ):
        pass
    assert place.read_bytes() == text.encode(errors="surrogateescape")


def test_a_board_in_use_is_refused_and_keeps_other_lessons_scores(tmp_path):
    five, nine = get_lesson(5), get_lesson(9)
    with progress.golf_scores(tmp_path, five, 10) as scores:
        scores.append(score(10))
        with pytest.raises(UserError, match="another --golf is at work"), progress.golf_scores(tmp_path, nine, 0):
            pass
    with progress.golf_scores(tmp_path, nine, 0) as scores:
        assert scores == []
        scores += [score()] * (progress.MOST_KEPT + 3)
    kept = json.loads((tmp_path / progress.BOARD).read_text())
    assert {number: len(every) for number, every in kept.items()} == {"5": 1, "9": progress.MOST_KEPT}


def test_the_board_warns_of_a_busy_machine_and_leaves_its_seconds_out():
    lesson = get_lesson(5)
    golf = lesson.load_checks().golf
    own, busy = score(golf.least, "a"), score(golf.least + 5, "b", is_busy=True)
    quiet = told.golf_board(lesson, golf, own, own, [own, busy], 0.0)
    assert re.search(r"^other files, before +786,437 +- +- +- +-$", quiet, flags=re.MULTILINE)
    assert re.search(r"^this file, before +786,432 +2 +- +- +1\.50$", quiet, flags=re.MULTILINE)
    assert "Warning" not in quiet
    assert "other programs took 40% of the processors" in told.golf_board(lesson, golf, own, own, [], 0.4)
    host = [{"seconds": 0.1, "host_cpu_percent": 100.0, "process_cpu_seconds": 0.01}] * 4
    strokes = [golf_module.Stroke(1, 1.0, host)] * 4
    assert session._taken_by_others(strokes, 4) > 0.15
    assert session._taken_by_others(strokes[:1], 4) == 0  # too short to measure


def test_hints_are_noted_in_the_file_and_a_changed_note_is_detected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lesson, path = get_lesson(3), Path("lesson3.py")
    assert main(["learn", "3"]) == 0
    assert path.read_text().startswith(lesson.page().rstrip())
    assert progress.hints_in(path.read_bytes(), lesson) == 0
    code = path.read_text().replace("...  # your turn", "pass\r")
    path.write_bytes(code.encode())
    assert main(["learn", "3", "--hint", "2"]) == 0
    assert "noted in lesson3.py" in capsys.readouterr().out
    assert main(["learn", "3", "--hint", "1"]) == 0
    source = path.read_bytes()
    assert progress.hints_in(source, lesson) == 2
    assert source.rpartition(b"# cos598d")[0].rstrip() == code.encode().rpartition(b"# cos598d")[0].rstrip()
    assert source.count(b"hints shown") == 1
    assert progress.hints_in(source.replace(b"shown: 2", b"shown: 0"), lesson) is None
    assert progress.hints_in(source.partition(b"# cos598d hints")[0], lesson) is None
    both = source + progress.hint_line(lesson, 0).encode() + b"\n"
    assert progress.hints_in(both, lesson) == 2
    assert progress.hints_in(source, get_lesson(4)) is None
    # A new file of the lesson begins with what was shown in this folder; so does the next hint in one without a line.
    path.unlink()
    assert main(["learn", "3"]) == 0
    assert progress.hints_in(path.read_bytes(), lesson) == 2
    path.write_text("# mine")
    assert main(["learn", "3", "--hint"]) == 0
    assert progress.hints_in(path.read_bytes(), lesson) == 3
