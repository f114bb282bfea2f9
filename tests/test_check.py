"""`check`, `new` and `--sync FILE.py:CLASS`: a student's sync is tried, and trained with."""

import ast
import json
from pathlib import Path

import pytest
from programs import ROOT, TINY_TRAINING
from worlds import run_ranks

from cos598d.commands.cli import main
from cos598d.errors import UsageError
from cos598d.sync import get_sync
from cos598d.tools.check.card import claim as card_of
from cos598d.tools.check.card import measures
from cos598d.tools.check.claims import CLAIMS
from cos598d.tools.check.ranks import compare, cost_of_step, is_cost

TOOLS = ROOT / "cos598d" / "tools"
OPENING = """
import os, sys, time
from pathlib import Path
import torch
from cos598d.sync.all_reduce import AllReduce
"""
# Each goes wrong in averages_gradients, and none of them in refuses_different_models.
BAD = (
    OPENING
    + """
class Loops(AllReduce):
    def finish(self):
        while self.comm.rank == 1:
            time.sleep(0.01)
        super().finish()

class Raises(AllReduce):
    def average(self, name, gradient):
        if self.comm.rank == 1:
            raise ValueError("a bucket is lost")
        super().average(name, gradient)

class Leaves(AllReduce):
    def average(self, name, gradient):
        print("my last words")
        os._exit(3)

class Exits(AllReduce):
    def finish(self):
        sys.exit("enough")
"""
)
# Not a GradientSync, and it knows of no options: the four methods are enough.
DUCK = (
    OPENING
    + """
class Duck:
    def __init__(self, comm, find_unused_parameters=True):
        self.inner = AllReduce(comm, find_unused_parameters)
    def attach(self, model):
        return self.inner.attach(model)
    def finish(self):
        self.inner.finish()
    def no_sync(self):
        return self.inner.no_sync()
    def detach(self):
        self.inner.detach()
"""
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of the test's own, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(capsys, *words):
    """The exit code and the card of `check` on 2 ranks."""
    code = main(["check", *words, "--world_sizes", "2"])
    return code, capsys.readouterr().out


STATES = """
from cos598d.sync.all_reduce import AllReduce
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall

class Inherits(AllReduce): pass

class States(AllReduce):
    @classmethod
    def calls(cls, step):
        return [CollectiveCall(ALL_REDUCE, [tensor]) for tensor in step.tensors][1:]
"""


def test_cost_is_compared_with_stated_calls_or_else_with_the_nearest_formula(here):
    Path("mine.py").write_text(STATES)
    for name, nearest in (("Inherits", "all_reduce"), ("States", "mine.py:States")):
        answers = run_ranks(2, cost_of_step, f"{Path('mine.py').resolve()}:{name}")
        assert all(is_cost(each) for each in answers)
        found = compare(f"mine.py:{name}", answers)
        assert (found["nearest"], found["is_equal"]) == (nearest, name == "Inherits")
        calls = [(each["made"]["calls"], each["formula"]["calls"]) for each in found["ranks"]]
        assert calls == [(16, 16 - (name == "States"))] * 2


def test_registered_sync_passes_and_the_json_agrees_with_the_card(here, capsys):
    code, text = check(capsys, "all_reduce", "--json", "card.json", "--seconds", "60")
    facts = json.loads(Path("card.json").read_text())
    assert code == 0
    assert f"{len(CLAIMS)} of {len(CLAIMS)} tests passed." in text
    assert facts["passed"]
    assert [claim["claim"] for claim in facts["claims"]] == [claim.name for claim in CLAIMS]
    assert [name for name in (claim.name for claim in CLAIMS) if f"passed       {name}\n" not in text] == []
    assert facts["cost"]["nearest"] == "all_reduce"
    assert facts["cost"]["is_equal"]
    made = facts["cost"]["ranks"][1]["made"]
    # 2(n-1)/n S with n = 2 is S.
    assert made == {"calls": 16, "bytes_sent": facts["cost"]["gradient_bytes"], "bytes_received": made["bytes_sent"]}
    assert len(facts["speed"]["samples_seconds"]["ddp"]) == facts["speed"]["rounds"]
    assert f"{facts['speed']['ratio_to']['ddp']['median']:.2f}" in text


def test_card_names_a_fault_whatever_the_class_says_of_itself(here, capsys):
    body = "    exact = False\n    claims = ()\n"
    body += "    def average(self, name, gradient): self.comm.all_reduce(gradient, name)\n"
    Path("mine.py").write_text(f"{OPENING}\nclass Mine(AllReduce):\n{body}")
    code, text = check(capsys, "mine.py:Mine", "--no_speed", "--claims", "averages_gradients,lets_go")
    assert code == 1
    assert "FAILED       averages_gradients (failed on 2)" in text
    assert "gradient is off the mean over ranks by" in " ".join(text.split())
    assert "1 of 2 tests passed." in text
    assert "1. summed and not averaged" in text


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("Loops", "did not end", "rank 1 of 2: still running after 5 s - bad.py line 10, in finish: time.sleep(0.01)"),
        ("Raises", "failed", "rank 1 of 2: ValueError: a bucket is lost - bad.py line 16, in average: raise Value"),
        ("Leaves", "crashed", 'the process ended with exit code 3; it printed "my last words"'),
        ("Exits", "failed", "SystemExit: enough - bad.py line 26, in finish: sys.exit("),
    ],
)
def test_failure_ends_only_its_own_claim(here, capsys, name, status, says):
    Path("bad.py").write_text(BAD)
    claims = "averages_gradients,refuses_different_models"
    words = (f"bad.py:{name}", "--no_speed", "--claims", claims, "--seconds", "5", "--json", "-")
    code, text = check(capsys, *words)
    facts = json.loads(text)
    assert code == 1
    assert [claim["status"] for claim in facts["claims"]] == [status, "passed"]
    assert says in " ".join(card_of(facts["claims"][0], str(here / "bad.py")).split())


ANSWER = "folder.joinpath(f'answer{rank}.json')"
RETURNED = "{'rank': rank, 'how': 'returned', 'value': 'passed'}"
FORGED = {
    "an answer and no work": f"{ANSWER}.write_text(json.dumps({RETURNED}))",
    "the word passed": f"{ANSWER}.write_text(json.dumps({RETURNED})); (folder / f'handed_in{{rank}}').touch()",
    "garbage": f"{ANSWER}.write_bytes(b'\\xff{{' * 1000)",
    "a list": f"{ANSWER}.write_text('[1, 2]')",
    "deep": f"{ANSWER}.write_text('[' * 100_000)",
    "other kinds": f"{ANSWER}.write_text(json.dumps({{'rank': 'x', 'how': 7, 'frames': 3}}))",
    "a folder": f"{ANSWER}.mkdir()",
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_answer_passes_no_claim(here, capsys, forgery):
    source = (
        f"import json, os, tempfile\n{OPENING}\nclass Mine(AllReduce):\n"
        "    def __init__(self, comm, find_unused_parameters=True):\n"
        "        rank, folder = comm.rank, Path(tempfile.gettempdir())\n"
        f"        {FORGED[forgery]}\n        os._exit(0)\n"
    )
    Path("mine.py").write_text(source)
    code, text = check(capsys, "mine.py:Mine", "--no_speed", "--claims", "averages_gradients", "--seconds", "20")
    assert code == 1
    assert "0 of 1 tests passed." in text


def test_judges_use_no_assert_and_no_debug_flag():
    """`python -O` would leave these out."""
    judges = [path for name in ("check", "learn", "grade", "audit") for path in (TOOLS / name).rglob("*.py")]
    assert len(judges) > 50
    for path in judges:
        for node in ast.walk(ast.parse(path.read_text())):
            is_left_out = isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__")
            assert not is_left_out, f"{path}, line {node.lineno}"


def test_new_writes_a_file_that_passes_once_it_is_filled_in(here, capsys):
    assert main(["new", "my_sync.py"]) == 0
    assert "check my_sync.py:MySync" in capsys.readouterr().out
    words = ("my_sync.py:MySync", "--no_speed", "--claims", "averages_gradients,accumulates", "--seconds", "60")
    code, text = check(capsys, *words)
    assert code == 1
    assert "NotImplementedError: average() is still to be written" in " ".join(text.split())
    template = Path("my_sync.py").read_text()
    start = template.index("        raise NotImplementedError")
    filled = "        self.comm.all_reduce(gradient, name)\n        gradient /= self.comm.world_size\n"
    Path("my_sync.py").write_text(template[:start] + filled)
    assert check(capsys, *words)[0] == 0
    assert main(["new", "my_sync.py"]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert Path("my_sync.py").read_text() == template[:start] + filled


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        (None, "mine.py:Mine", r"mine\.py: no such file"),
        ("x = 1", "mine.txt:Mine", r"mine\.txt is not a Python file"),
        ("x = 1\nclass Mine(:\n", "mine.py:Mine", r"is not Python \(.*, line 2: class Mine\(:\)"),
        ("\0", "mine.py:Mine", r"mine\.py is not Python \(.*null bytes"),
        ("\nimport nosuch_module", "mine.py:Mine", "raises ModuleNotFoundError while being imported, at line 2"),
        (OPENING + "class Other(AllReduce): pass", "mine.py:Mine", "has no class Mine. Choose Other"),
        (OPENING + "class Other(AllReduce): pass", "mine.py", r"mine\.py names no class\. Give mine\.py:Other"),
        ("Mine = 3", "mine.py:Mine", "is a int, not a class"),
        ("class Mine:\n    def attach(self): pass", "mine.py:Mine", "lacks finish and no_sync and detach"),
        (
            OPENING + "class Mine(AllReduce):\n    def __init__(self, comm): pass",
            "mine.py:Mine",
            "cannot be constructed with .*find_unused_parameters",
        ),
    ],
)
def test_file_that_cannot_be_used_is_refused(here, source, name, says):
    if source is not None:
        Path(name.partition(":")[0]).write_text(source)
    with pytest.raises(UsageError, match=says) as refusal:
        get_sync(name)
    assert "\n" not in str(refusal.value)


def test_wrong_flags_and_a_file_that_never_loads_exit_with_2(here, capsys):
    Path("slow.py").write_text("import time\nwhile True: time.sleep(0.01)\n")
    for words, says in (
        (["slow.py:Mine", "--seconds", "1"], "slow.py cannot be imported: still running after 1 s - slow.py line 2"),
        (["nosuch"], "unknown sync nosuch"),
        (["ddp", "--world_sizes", "2,zwei"], "--world_sizes 2,zwei is not valid. Give numbers from 1 to 16"),
        (["ddp", "--claims", "is_fast"], "--claims is_fast: there is no such test"),
    ):
        assert main(["check", *words]) == 2
        assert says in capsys.readouterr().err


def test_claim_that_a_sync_does_not_make_fails_when_asked_for(here, capsys):
    code, text = check(capsys, "local_sgd", "--no_speed", "--claims", "averages_gradients")
    assert code == 1
    assert "0 of 1 tests passed." in text
    assert "LocalSGD declares that it is not exact, so this test does not apply to it" in " ".join(text.split())


def test_train_takes_a_class_of_four_methods_from_a_file(start, tmp_path):
    (tmp_path / "syncs").mkdir()
    (tmp_path / "syncs" / "duck.py").write_text(DUCK)
    words = ["-m", "cos598d", "train", "--sync", "syncs/duck.py:Duck", "--world_size", "2", "--max_steps", "2"]
    program = start("train", [*words, *TINY_TRAINING], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-rte-Duck-n2-")
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 2
    assert [path.name for path in (tmp_path / "syncs").iterdir()] == ["duck.py"]


@pytest.mark.parametrize(
    ("made", "formula", "says"),
    [
        ((4, 900, 900), (1, 900, 900), "The nearest formula, with the same bytes, is that of ring:"),
        ((1, 1000, 1000), (1, 900, 900), "The nearest formula, up to 10.0% off, is that of ring:"),
        ((1, 1000, 0), (1, 900, 100), "The nearest formula, up to 100.0% off, is that of ring:"),
        ((1, 900, 900), (1, 900, 900), "Its cost is exactly that of the formula of ring:"),
    ],
)
def test_card_says_how_far_off_the_nearest_formula_is(made, formula, says):
    made, formula = (dict(zip(("calls", "bytes_sent", "bytes_received"), one, strict=True)) for one in (made, formula))
    cost = {"ranks": [{"rank": 0, "made": made, "formula": formula}], "nearest": "ring", "is_equal": made == formula}
    cost |= {"tensors": 3, "gradient_bytes": 1000, "world_size": 2}
    text = measures({"cost": cost, "speed": None, "not_measured": "--no_speed"})
    assert says in " ".join(text.split())
