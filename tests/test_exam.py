"""The engine that runs a file on real ranks: what it says of files that hang, die, raise or call unlike. Imports the
engine, as every file of tests for it does."""

import os
import time

import numpy as np
import pytest
import torch
from programs import ROOT, children_of, is_alive, wait_until

from cos598d.tools.exam.ranks import Wrong, run
from cos598d.tools.exam.wire import pack, unpack


def work(comm, module):
    return module.work(comm)


@pytest.fixture
def tried(tmp_path):
    """Run a function's body on ranks: the values, or the mistake."""

    def tried(body, n=2, **options):
        file = tmp_path / "file.py"
        file.write_text("import os, sys, time\nimport torch\n\ndef work(comm):\n" + body)
        try:
            return run(n, work, file=file, **options).values
        except Wrong as wrong:
            return f"line {wrong.line}: {wrong.words}"

    return tried


def test_values_come_back_by_rank(tried):
    found = tried("    return {'rank': comm.rank, 'tensor': torch.full((2,), comm.rank), 'list': [None, True, 1.5]}\n")
    assert [each["rank"] for each in found] == [0, 1]
    assert found[1]["tensor"].tolist() == [1, 1]
    assert found[0]["list"] == [None, True, 1.5]


ONE = "comm.all_reduce of a (3 float32, file.py line {line})"
# What the file's function does from line 5 on, and what is said of it.
WRONG = {
    "    os._exit(3)\n": "line 4: rank 0 ended early (exit code 3)",
    "    raise ValueError('a bucket')\n": "line 5: rank 0 raised an exception, at `raise ValueError('a bucket')`: "
    "ValueError: a bucket",
    "    sys.exit('enough')\n": "line 5: rank 0 raised an exception, at `sys.exit('enough')`: SystemExit: enough",
    "    while comm.rank: pass\n    comm.all_reduce(torch.ones(3))\n": "line 5: rank 1 did not end, at",
    "    if comm.rank:\n        comm.all_reduce(torch.ones(3), 'a')\n": f"line 6: rank 1 waits in {ONE.format(line=6)}"
    ", and rank 0 never makes that call",
    "    comm.all_reduce(torch.ones(3 + comm.rank), 'a')\n": f"line 5: rank 0 is in {ONE.format(line=5)} while "
    "rank 1 is in comm.all_reduce of a (4 float32, file.py line 5): every rank must make the same calls in the same "
    "order",
    "    comm.send(torch.ones(3), 1 - comm.rank, 'a')\n    comm.recv(torch.ones(3), 1 - comm.rank)\n": "all send and "
    "none receives, so they wait forever",
    "    comm.all_reduce(torch.ones(3), 'a', async_op=True)\n": f"line 5: {ONE.format(line=5)} is never waited for: "
    "keep what it returns, and call its wait()",
    "    return object()\n": "Object of type object is not JSON serializable",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_file_that_goes_wrong_is_told_in_a_sentence_with_its_line(tried, body):
    found = tried(body, seconds=1 if "while" in body else 4)  # a loop takes a core until then
    assert isinstance(found, str)
    assert WRONG[body] in found


def test_ranks_that_wait_for_each_other_are_stopped_at_once(tried):
    tried("    return 0\n")  # the server runs
    began = time.monotonic()
    found = tried("    comm.send(torch.ones(3), 1 - comm.rank)\n", seconds=200)
    assert "all send and none receives" in found
    assert time.monotonic() - began < 60  # and not the time limit of 200 s and more


def test_each_rank_has_hashes_and_orders_of_its_own(tried):
    body = "    names = {f'layer {n}' for n in range(20)}\n    return [list(names), hash('a') != hash('b'), hash(7)]\n"
    (first, *_), (second, *_) = tried(body)
    assert sorted(first) == sorted(second)
    assert first != second


def test_values_are_no_pickles():
    value = {"a": [torch.arange(3), {"b": None}], "c": np.float64(0.5), "d": "x"}
    data = pack(value)
    found = unpack(data)
    assert found["a"][0].tolist() == [0, 1, 2]
    assert (found["a"][1], found["c"], found["d"]) == ({"b": None}, 0.5, "x")
    assert b"pickle" not in data
    with pytest.raises(Exception, match="."):
        unpack(b"\x80\x04N." * 10)


def test_nothing_is_left_when_the_one_who_asks_is_killed(start, tmp_path):
    (tmp_path / "file.py").write_text("import time\ndef work(comm):\n    time.sleep(600)\n")
    asks = (
        "from pathlib import Path\nfrom cos598d.tools.exam.ranks import run\nimport test_exam\n"
        "run(2, test_exam.work, file=Path('file.py'), seconds=500)\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), str(ROOT)])
    program = start("asks", ["-c", asks], {"PYTHONPATH": path})
    wait_until(lambda: len(children_of(program.process.pid)) >= 4)  # the server, two ranks, and the tracker
    started = children_of(program.process.pid)
    program.stop()
    wait_until(lambda: not any(map(is_alive, started)))
