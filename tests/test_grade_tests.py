"""`grade` on students' tests: they must accept right syncs and reject wrong ones; nothing else gives points."""

import importlib
import os
import re

import pytest
from grading import graded
from programs import ROOT

from cos598d.errors import UsageError
from cos598d.tools.check import ranks
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.check.judge import judge_claims
from cos598d.tools.check.spawn import RETURNED, RankEnd, run_world
from cos598d.tools.check.verdict import CRASHED, DID_NOT_END, FAILED, PASSED
from cos598d.tools.grade.assignment import KINDS
from cos598d.tools.grade.kinds import tests
from cos598d.tools.grade.kinds.tests import read_tests
from cos598d.tools.grade.table import TomlTable
from cos598d.tools.grade.under_test import MENDED, RIGHT, SUBJECTS, WRONG, run_tests
from cos598d.tools.learn import marking
from cos598d.tools.learn.lessons import get_lesson

NONCE = 598
# What finds all that is wrong with any of them: uneven numbers of elements, other data on each rank and in each step.
GOOD = """
import torch
from torch import nn

ELEMENTS = 1001


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(ELEMENTS, 1)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Parameter(torch.zeros(5))

    def forward(self, inputs):
        return self.used(inputs).sum() + (self.last * inputs[0, :5]).sum()


def batch(rank, step):
    inputs = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(100 * step + rank))
    return inputs, 1.0 + rank + step


def backward(module, rank, step):
    inputs, scale = batch(rank, step)
    (module(inputs) * scale).backward()


def hold_to_the_mean(model, steps, world_size):
    right = {"used.weight": 0, "used.bias": 0, "last": 0}
    for rank in range(world_size):
        for inputs, scale in (batch(rank, step) for step in steps):
            right["used.weight"] += inputs * scale / world_size
            right["used.bias"] += torch.tensor([scale]) / world_size
            right["last"] += inputs[0, :5] * scale / world_size
    for name, parameter in model.named_parameters():
        if name in right:
            torch.testing.assert_close(parameter.grad, right[name], rtol=1e-5, atol=1e-5)
        else:
            assert parameter.grad is None, name


def test_every_step_gives_the_mean_and_leaves_the_weights(sync, rank, world_size):
    model = Net()
    module = sync.attach(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        model.zero_grad()
        backward(module, rank, step)
        sync.finish()
        hold_to_the_mean(model, [step], world_size)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))


def test_two_passes_are_averaged_together(sync, rank, world_size):
    model = Net()
    module = sync.attach(model)
    with sync.no_sync():
        backward(module, rank, 0)
    backward(module, rank, 1)
    sync.finish()
    hold_to_the_mean(model, [0, 1], world_size)
    sync.detach()


def test_all_begin_with_the_weights_of_rank_0(sync, rank):
    torch.manual_seed(0)
    right = Net()
    torch.manual_seed(rank)
    model = Net()
    sync.attach(model)
    assert all(torch.equal(*pair) for pair in zip(right.parameters(), model.parameters()))
"""
# None of these tells right from wrong, or none by a test; what they claim of themselves counts for nothing.
BAD = {
    "accepts_everything": "def test_it_can_be_attached(sync):\n    assert sync.attach is not None\n",
    "rejects_everything": "def test_nothing_is_good_enough(sync):\n    assert False, 'wrong'\n",
    "leaves": "import os\n\ndef test_it(sync):\n    os._exit(0)\n",
    "hangs": "import time\n\ndef test_it(sync):\n    time.sleep(60)\n",
    "exits": "import sys\nsys.exit(0)\n\ndef test_it(sync):\n    pass\n",
    # The wrong ones by their names, modules and ancestors, and not by what they do.
    "recognises": """
RIGHT = ("FromTheLast", "DividesFirst", "NewGradients", "ReduceScatterAllGather")

def test_it(sync):
    own = [each.__name__ for each in type(sync._sync).__mro__ if each.__module__.endswith("under_test.syncs")]
    assert set(own) <= set(RIGHT), "recognised"
""",
    # An answer, results and a table of its own; pytest, the judge and what it is given replaced; six good words first.
    "forges": """
import json, os, sys, tempfile, types
from pathlib import Path
import cos598d.tools.check.judge, cos598d.tools.grade.kinds.tests
from cos598d.tools.grade import under_test

sys.modules["pytest"] = types.ModuleType("pytest")
cos598d.tools.check.judge.judge = lambda *_: ("passed", [])
cos598d.tools.grade.kinds.tests.TestRunEnd.is_rejected = cos598d.tools.grade.kinds.tests.TestRunEnd.is_accepted = True
under_test.run_tests = lambda *_: None

def test_it(sync, rank):
    print(json.dumps({"name": "sums", "passed": True, "words": "", "over": True}))
    for place in ("results.json", "../results.json", "../../grades.csv"):
        try:
            Path(place).write_text(json.dumps({"score": 1000, "tests": []}))
        except OSError:
            pass
    seen = Path(f"seen{rank}")
    count = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (count + 1))
    how = "returned" if count < 6 else "raised"
    answer = {"rank": rank, "how": how, "type": "AssertionError", "message": "", "frames": [[__file__, 1, "test_it"]]}
    (Path(tempfile.gettempdir()) / f"answer{rank}.json").write_text(json.dumps(answer))
    os._exit(0)
""",
}
FEW = """
kind = "tests"
world_sizes = [2]
seconds = 8
[points]
default = 0
accepts_right_syncs = 2
sums = 1
stale = 1
half_precision = 1
"""


def kind_of(**keys):
    source = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return KINDS["tests"].read(TomlTable.of_text("lab.toml", source))


@pytest.mark.long
def test_good_tests_accept_every_right_sync_and_reject_every_wrong_one(start, tmp_path, scratch):
    assignment = 'kind = "tests"\nseconds = 60\n'
    code, text, rows = graded(start, tmp_path, scratch, {"good": GOOD}, assignment, "test_sync.py")
    assert code == 0, text
    lost = [name for name in ("accepts_right_syncs", *WRONG) if rows["good"][name] != "1"]
    assert lost == [], rows["good"]["words"]


@pytest.mark.long
def test_tests_that_cannot_tell_right_from_wrong_get_nothing(start, tmp_path, scratch):
    page = (ROOT / "docs" / "teaching.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def test_" in block)
    code, text, rows = graded(start, tmp_path, scratch, BAD | {"example": example}, FEW, "test_sync.py")
    assert code == 0, text
    points = {name: row["score"] for name, row in rows.items()}
    assert points == {**dict.fromkeys(BAD, "0"), "example": "4"}, text
    says = {
        "accepts_everything": "no test fails on any sync, correct or wrong, on 2 ranks",
        "rejects_everything": "AssertionError: wrong - test_sync.py line 2, in test_nothing_is_good_enough",
        "leaves": "the process ended with exit code 0",
        "hangs": " s - test_sync.py line 4, in test_it: time.sleep(60)",
        "exits": "test_sync.py raises SystemExit while being imported, at line 2",
        "recognises": "the tests do not pass on a correct sync",
        "forges": "the tests do not pass on a correct sync",
        "example": "half_precision: no test fails on a sync that sends gradients as float16",
    }
    for name, words in says.items():
        assert words in rows[name]["words"], (name, rows[name]["words"])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, subject in RIGHT.items() if subject.own])
def test_unusual_right_syncs_keep_every_claim(name):
    names = [claim.name for claim in CLAIMS]
    ends = run_world(3, observe_subject, name, names, seconds=120)
    assert [outcome.status for outcome in judge_claims(CLAIMS, ends, NONCE, "", 120)] == [PASSED] * len(CLAIMS)


@pytest.mark.parametrize("name", WRONG)
def test_repaired_sync_has_a_wrong_syncs_name_and_a_right_syncs_methods(name):
    wrong, found = WRONG[name].sync, MENDED[f"mended_{name}"].sync
    right = wrong.__mro__[1]
    changed = [each for each, value in vars(wrong).items() if callable(value)]
    assert changed
    assert all(getattr(found, each) is getattr(right, each) is not getattr(wrong, each) for each in changed)
    assert (found.__name__, found.__module__, found.__bases__) == (wrong.__name__, wrong.__module__, (wrong,))


def observe_subject(comm, name, claims):
    """On a rank: what a check does, for a sync under test."""
    ranks.observe(comm, SUBJECTS[name].sync, claims, NONCE)


def judged(kind, monkeypatch, folder, end_of):
    """What becomes of the claims where the tests end on each sync as `end_of(subject)` says, and the order of syncs."""
    (folder / "test_sync.py").write_text("def test_it(sync):\n    pass\n")
    order = []

    def end(_, path, found, subject):
        order.append(subject.name)
        return tests.TestRunEnd(end_of(subject), "on 2 ranks, words")

    monkeypatch.setattr(tests.TestsKind, "_end", end)
    monkeypatch.setattr(tests, "preload", lambda _: None)
    found = {each.name: each for each in kind.judge(folder, list(kind.claims()))}
    return {name: each.passed for name, each in found.items()}, found, order


@pytest.mark.parametrize(("load", "times"), [(0.3, 1), (6.0, 3), (90.0, 4)])
@pytest.mark.parametrize("name", ["lesson", "tests"])
def test_submission_gets_more_time_on_a_busy_machine(monkeypatch, tmp_path, name, load, times):
    given = []

    def world(size, *_, seconds, **__):
        given.append(seconds)
        return [RankEnd(rank, RETURNED) for rank in range(size)]

    kind = KINDS[name].read(TomlTable.of_text("lab.toml", "seconds = 5\n"))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for module in (importlib.import_module(f"cos598d.tools.grade.kinds.{name}"), marking):
        monkeypatch.setattr(module, "run_world", world, raising=False)
        for loads in ("warm_up", "preload"):
            monkeypatch.setattr(module, loads, lambda *_: None, raising=False)
    (tmp_path / "test_sync.py").write_text(GOOD)
    (tmp_path / "lesson0.py").write_text(get_lesson(0).answer())
    list(kind.judge(tmp_path, list(kind.claims())))
    assert given
    assert set(given) == {5.0 * times}


def test_right_and_wrong_syncs_come_in_a_random_order(monkeypatch, tmp_path):
    kind = kind_of()

    def perfect(subject):
        return FAILED if subject.name in WRONG else PASSED

    passed, _, order = judged(kind, monkeypatch, tmp_path, perfect)
    assert passed == dict.fromkeys(("accepts_right_syncs", *WRONG), True)
    drawn = [name for name in order if name in MENDED]
    assert len(drawn) == tests.DRAWN
    assert sorted(order) == sorted([*RIGHT, *WRONG, *drawn])
    assert judged(kind, monkeypatch, tmp_path, perfect)[2] != order


def test_only_an_exception_rejects(monkeypatch, tmp_path):
    kind = kind_of()
    ends = {"sums": FAILED, "stale": DID_NOT_END, "clips_first": CRASHED}
    passed, found, _ = judged(kind, monkeypatch, tmp_path, lambda subject: ends.get(subject.name, PASSED))
    assert [name for name, holds in passed.items() if holds] == ["accepts_right_syncs", "sums"]
    assert found["stale"].words.endswith("on 2 ranks, words; a test fails by raising an exception")
    for end in (FAILED, DID_NOT_END, CRASHED):
        passed, *_ = judged(kind, monkeypatch, tmp_path, lambda one, end=end: PASSED if one.name == "ring" else end)
        assert not any(passed.values())
    passed, found, _ = judged(kind, monkeypatch, tmp_path, lambda subject: PASSED)
    assert not any(passed.values())
    assert "tests that reject nothing accept nothing" in found["accepts_right_syncs"].words


def test_few_ranks_leave_out_syncs_that_only_fail_on_more():
    assert set(kind_of().claims()) - set(kind_of(world_sizes=[2]).claims()) == {"divides_by_2"}
    with pytest.raises(UsageError, match="its .0. is 1, where a number of ranks from 2 to 16"):
        kind_of(world_sizes=[1])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def check(sync):\n    pass\n", "test_sync.py has no test. Write functions whose names begin with test_"),
        ("class TestIt:\n    def check_a(self, sync):\n        pass\n", "has no test"),
        ("def test_a(sync):\n    pass\n\ndef test_a(rank):\n    pass\n", "line 4: the test test_a of line 1 would"),
        ("x = 1\ndef test_a(sync, comm):\n    pass\n", "line 2: test_a asks for comm. A test can ask for sync, rank"),
        ("def test_a(sync, *, n):\n    pass\n", "line 1: test_a asks for n"),
        ("def test_a(sync, /):\n    pass\n", "line 1: test_a asks for what is before /"),
        (
            "def test_a(sync):\n    pass\n\nclass TestIt:\n    def test_b(self, sync):\n        pass\n",
            "line 5: test_b would never run in a class",
        ),
        ("async def test_a(sync):\n    pass\n", "line 1: test_a would never run. Write it without async"),
        ("def test_a(sync):\n    if sync:\n        yield\n", "line 1: test_a would never run"),
        (
            "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(sync, n):\n    pass\n",
            "line 3: test_a is marked pytest.mark.parametrize('n', [1, 2]), which the grader does not support",
        ),
        ("def test_a(:\n", "test_sync.py is not valid Python (invalid syntax, line 1)"),
        ("x = '\0'\n", "test_sync.py is not valid Python"),
    ],
)
def test_file_that_cannot_run_as_tests_is_refused(tmp_path, source, says):
    (tmp_path / "test_sync.py").write_text(source)
    with pytest.raises(UsageError) as refusal:
        read_tests(tmp_path / "test_sync.py")
    assert says in str(refusal.value)
    assert str(refusal.value).endswith(".")


@pytest.mark.parametrize("name", ["unittest.SkipTest", "pytest.skip.Exception"])
def test_skipped_test_counts_as_passed(tmp_path, name):
    package = name.partition(".")[0]
    (tmp_path / "test_sync.py").write_text(f"import {package}\ndef test_a(sync):\n    raise {name}('not here')\n")
    ends = run_world(2, run_tests, str(tmp_path / "test_sync.py"), [("test_a", ["sync"])], "sums", seconds=60)
    assert [end.how for end in ends] == [RETURNED] * 2, ends


def test_arguments_of_a_test_are_read_from_its_names(tmp_path):
    source = "def test_a(): pass\ndef test_b(world_size, sync, tolerance=1e-6): pass\ndef test_c(*, rank): pass\n"
    (tmp_path / "test_sync.py").write_text(source)
    found = [(test.name, test.arguments, test.line) for test in read_tests(tmp_path / "test_sync.py")]
    assert found == [("test_a", (), 1), ("test_b", ("world_size", "sync"), 2), ("test_c", ("rank",), 3)]
