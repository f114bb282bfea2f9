"""The starter of local ranks passes on what it is asked, and leaves as they do."""

import errno
import signal

import pytest
from programs import ROOT

from cos598d.errors import UserError
from cos598d.world import launch
from cos598d.world.launch import start_local_workers

# Its workers save for a while when they are asked to end, and obey the Ctrl-C after that; `words` say how they end.
SCRIPT = """
import os, signal, sys, time

kind, seconds, code = sys.argv[1:]
asked = []

def ask(number, _):
    if asked and number == signal.SIGINT:
        print(f"rank {os.environ['RANK']} leaves at once", flush=True)
        os._exit(130)
    asked.append(number)

def work():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, ask)
    is_fork = open("/proc/self/comm").read().strip() == f"rank {os.environ['RANK']}"
    print(f"rank {os.environ['RANK']}, {'a fork' if is_fork else 'fresh'}, trains")
    while not asked:
        time.sleep(0.01)
    print(f"rank {os.environ['RANK']} was asked by {signal.Signals(asked[0]).name}")
    until = time.monotonic() + float(seconds) * (1 + int(os.environ["RANK"]))
    while time.monotonic() < until:
        time.sleep(0.01)
    return int(code)

if "RANK" in os.environ:
    sys.exit(work())
from cos598d.world.launch import start_local_workers
sys.exit(start_local_workers(2, None, sys.argv[1:], be_rank=work if kind == "a fork" else None))
"""


@pytest.fixture(params=["fresh", "a fork"])
def starter(start, tmp_path, request):
    """Start two such workers, in fresh interpreters and as forks: starter(seconds of saving, their exit code)."""
    (tmp_path / "script.py").write_text(SCRIPT)

    def _starter(seconds, code):
        words = [tmp_path / "script.py", request.param, seconds, code]
        program = start("starter", words, {"PYTHONPATH": str(ROOT)})
        for rank in range(2):
            program.wait_for(f"rank {rank}, {request.param}, trains")
        return program

    return _starter


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGHUP, "SIGTERM"),
    ],
)
def test_a_request_is_passed_on_and_the_workers_have_time_to_save(starter, number, passed_on):
    program = starter(0.5, 75)
    program.process.send_signal(number)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by {passed_on}")
    for repeated in (signal.SIGTERM, signal.SIGUSR1):  # by a scheduler
        program.process.send_signal(repeated)
    assert program.wait() == 75, program.text
    assert "stopped by" not in program.text


def test_workers_that_end_by_it_any_other_way_were_ended_by_the_signal(starter):
    """Whoever of them is told of the other's end has exit code 1."""
    program = starter(0, 1)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM, program.text


def test_workers_that_were_done_anyway_are_done(starter):
    program = starter(0, 0)
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 0, program.text


def test_the_second_ctrl_c_ends_the_workers_at_once(starter):
    program = starter(600, 75)
    program.process.send_signal(signal.SIGINT)
    for rank in range(2):
        program.wait_for(f"rank {rank} was asked by SIGINT")
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130, program.text
    for rank in range(2):
        assert f"rank {rank} leaves at once" in program.text


def test_a_host_that_gives_no_more_processes_is_told_in_a_sentence(monkeypatch):
    def refused(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(launch.subprocess, "Popen", refused)
    with pytest.raises(UserError, match=r"rank 0 of 2 cannot be started on this host \(Resource temporarily unav"):
        start_local_workers(2, None, [])
