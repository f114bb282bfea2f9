"""Anything that ranks hand in becomes an outcome without a traceback, and without lines of other files."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch

from cos598d.tools.check.claims.base import Claim
from cos598d.tools.check.evidence import BadEvidence, Evidence
from cos598d.tools.check.judge import judge, judge_claims
from cos598d.tools.check.spawn import DIED, RAISED, RETURNED, RankEnd, StackFrame, run_world
from cos598d.tools.check.verdict import CRASHED, FAILED

NONCE = 598


def handed_in(**values):
    evidence = Evidence(0, NONCE)
    for name, value in values.items():
        evidence.report("odd", name, value)
    return RankEnd(0, RETURNED, handed_in=evidence.to_bytes())


@Claim
def odd(on):
    """Something is reported."""


@odd.judgement
def _(world):
    (rows,) = world.reported("rows", list)
    rows[0]["calls"].append(1 / world.reported("count", int)[0])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "did not report rows"),
        ({"rows": []}, "IndexError"),
        ({"rows": [3]}, "TypeError"),
        ({"rows": [{}]}, "KeyError"),
        ({"rows": [{"calls": []}], "count": 0}, "ZeroDivisionError"),
    ],
)
def test_an_unexpected_report_fails_its_claim(values, says):
    (outcome,) = judge_claims([odd], [handed_in(**values)], NONCE, "", 5)
    assert outcome.status == FAILED
    assert says in outcome.reports[0]["message"]


@pytest.mark.parametrize("data", [b"\0" * 8, b"\xff" * 64, (8).to_bytes(8, "little") + b'{"a": 1}'])
def test_damaged_evidence_is_refused(data):
    with pytest.raises(BadEvidence, match="rank 0 handed in something that cannot be read"):
        Evidence.from_bytes(data, 0, NONCE)


def test_a_tensor_of_another_shape_or_dtype_is_refused():
    evidence = Evidence(0, NONCE)
    evidence.put("odd", "after", {"weight": torch.zeros(3, dtype=torch.int8)})
    found = Evidence.from_bytes(evidence.to_bytes(), 0, NONCE)
    with pytest.raises(BadEvidence, match=r"handed in weight as \(3,\) int8 where \(4,\) float32 belongs"):
        found.get("odd", "after", {"weight": torch.zeros(4)})


@pytest.mark.parametrize(("exit_code", "name"), [(-9, "SIGKILL"), (-40, "signal 40"), (3, "exit code 3")])
def test_a_crash_names_its_signal_or_exit_code(exit_code, name):
    status, reports = judge([RankEnd(0, DIED, exit_code=exit_code)], "", 5)
    assert status == CRASHED
    assert name in reports[0]["message"]


def test_only_lines_of_the_checked_file_and_libraries_are_shown(tmp_path):
    """A rank may hand in any place, and a grader can read files that a student must not."""
    private, own = tmp_path / "private.py", tmp_path / "own.py"
    private.write_text("the answer\n")
    own.write_text("gradient += 1\n")
    shown = []
    for file in (private, own, Path(os.__file__)):
        end = RankEnd(0, RAISED, type="KeyError", message="x", frames=(StackFrame(str(file), 1, "f"),))
        _, reports = judge([end], str(own), 5)
        shown.append(reports[0]["code"])
    assert shown[:2] == ["", "gradient += 1"]
    assert shown[2] == Path(os.__file__).read_text().splitlines()[0].strip()


def forge(comm, answer):
    (Path(tempfile.gettempdir()) / f"answer{comm.rank}.json").write_text(answer)
    os._exit(0)


FORGED = [
    "[]",
    '{"rank": 0}',
    '{"rank": 0, "how": "raised", "frames": []}',
    '{"rank": 0, "how": "raised", "frames": [["x.py", Infinity, "f"]]}',
    '{"rank": 0, "how": "raised", "frames": [["x.py", "one", "f"]]}',
    json.dumps("[" * 3),
]


@pytest.mark.parametrize("answer", FORGED)
def test_a_forged_answer_of_a_rank_is_refused(answer):
    (end,) = run_world(1, forge, answer, seconds=60)
    assert (end.how, end.message) == (DIED, "its answer cannot be read")
