"""A command starts its ranks here, passes on what it is asked, and ends with the code of the first that failed.

Its caller is a program of each test, whose ranks only wait for a signal.
"""

import re
import signal

import pytest
from programs import ROOT

# Two ranks that save for a while when they are asked to end; `words` say how long, and with which code they end.
ASKED = """
import os, signal, sys, time
from cos598d.world.launch import start_local_workers

def work():
    asked = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} trains, in session {os.getsid(0)}", flush=True)
    while not asked:
        time.sleep(0.01)
    print(f"rank {os.environ['RANK']} was asked by {signal.Signals(asked[0]).name}", flush=True)
    until = time.monotonic() + float(sys.argv[1]) * (1 + int(os.environ["RANK"]))
    while time.monotonic() < until:
        time.sleep(0.01)
    return int(sys.argv[2])

if __name__ == "__main__":
    print("the starter's own line", end=" ")  # in its buffer while it forks
    sys.exit(start_local_workers(2, None, work))
"""


@pytest.fixture
def starter(start, tmp_path):
    """Start two such ranks: starter(seconds of saving, their exit code)."""
    (tmp_path / "script.py").write_text(ASKED)

    def _starter(seconds, code):
        program = start("starter", [tmp_path / "script.py", seconds, code], {"PYTHONPATH": str(ROOT)})
        for rank in range(2):
            program.wait_for(f"rank {rank} of 2 trains")
        return program

    return _starter


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_is_passed_on_and_all_may_save(starter, number):
    program = starter(0.5, 75)
    program.process.send_signal(number)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by {number.name}")
    for repeated in (signal.SIGTERM, signal.SIGUSR1):  # by a scheduler
        program.process.send_signal(repeated)
    assert program.wait() == 75, program.text


@pytest.mark.parametrize(("code", "expected"), [(1, 128 + signal.SIGTERM), (0, 0)])
def test_ranks_that_are_done_end_well_and_others_by_the_signal(starter, code, expected):
    program = starter(0, code)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == expected, program.text
    assert program.text.count("the starter's own line") == 1, "a fork repeats its starter's output"
    assert len(set(re.findall(r"in session (\d+)", program.text))) == 2, "a Ctrl-C would reach all at once"


def test_the_second_ctrl_c_ends_all_at_once(starter):
    program = starter(600, 75)
    program.process.send_signal(signal.SIGINT)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by SIGINT")
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130, program.text
