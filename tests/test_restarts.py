"""The starter of local ranks starts those that failed again: how often, after what, and with what of their own."""

import json
import signal

import pytest
from programs import ROOT, TINY_TRAINING, free_port, script
from test_elastic import ranks_below

from cos598d.commands.cli import main
from cos598d.tools.report.load import load_run

# Two workers, of which the second ends as the word for its attempt says; each tells where it stands.
SCRIPT = """
import json, os, signal, sys, time

ends, restarts = sys.argv[1].split(","), int(sys.argv[2])
if "RANK" not in os.environ:
    from cos598d.world.launch import start_local_workers
    sys.exit(start_local_workers(2, None, sys.argv[1:3], restarts, lambda: ["again"]))

names = ("RANK", "TORCHELASTIC_RESTART_COUNT", "COS598D_SECRET", "MASTER_PORT")
line = json.dumps([os.environ[name] for name in names] + sys.argv[3:])
os.write(1, f"{line}\\n".encode())  # whole: two workers write
end = ends[int(os.environ["TORCHELASTIC_RESTART_COUNT"])] if os.environ["RANK"] == "1" or "all" in ends else "wait"
if end == "wait":
    time.sleep(600)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.2)
sys.exit(int(end) if end != "all" else 0)
"""


@pytest.fixture
def starter(start, tmp_path):
    """Start two such workers: starter(how the second ends each time, --max_restarts)."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return lambda ends, restarts: start("starter", [tmp_path / "script.py", ends, restarts], {"PYTHONPATH": str(ROOT)})


def told(program):
    """What the workers told, attempt by attempt: {rank: the rest}."""
    attempts = {}
    for line in program.text.splitlines():
        if line.startswith("["):
            rank, attempt, *rest = json.loads(line)
            attempts.setdefault(attempt, {})[rank] = rest
    return attempts


def test_each_start_has_a_secret_a_port_and_a_number_of_its_own(starter):
    program = starter("7,killed,3", 2)
    assert program.wait() == 3, program.text
    attempts = told(program)
    assert list(attempts) == ["0", "1", "2"]
    secrets = set()
    for attempt, ranks in attempts.items():
        assert ranks["0"] == ranks["1"]
        secret, _, *words = ranks["0"]
        secrets.add(secret)
        assert words == ([] if attempt == "0" else ["again"])
    assert len(secrets) == 3
    assert "the ranks ended with exit code 7: restart 1 of 2." in program.text
    assert "rank 1 was ended by SIGKILL.\nthe ranks ended with exit code 137: restart 2 of 2." in program.text


@pytest.mark.parametrize("code", [0, 2, 75])
def test_ranks_that_are_done_that_refuse_a_word_or_that_go_on_later_are_not_started_again(code, starter):
    program = starter(f"{code},all", 3)
    assert program.wait() == code, program.text
    assert list(told(program)) == ["0"]
    assert "restart" not in program.text


def test_nothing_is_started_again_after_a_signal_to_the_starter(starter):
    program = starter("wait", 3)
    program.wait_for("(?s)\\[.*\\[")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM, program.text
    assert list(told(program)) == ["0"]


@pytest.mark.long
def test_a_training_whose_ranks_are_killed_comes_to_the_same_end(start, tmp_path):
    """At one port: what is left of the connections of ranks that were killed must not keep it from the next ones."""
    flags = [*TINY_TRAINING, "--max_steps", 60, "--dropout", "model", "--save_steps", 5, "--log_every", 1]
    flags += ["--world_size", 2]
    whole = start("whole", [script("task2b/run_glue.py"), *flags, "--output_dir", "whole"])
    assert whole.wait() == 0, whole.text
    again = ["--master_port", free_port(), "--max_restarts", 2]
    program = start("program", [script("task2b/run_glue.py"), *flags, *again])
    # The checkpoint of iteration 5 is whole when that of 10 begins.
    for rank, words in enumerate(("iteration 12:", "(?s)restart 1 of 2.*resumes after.*iteration \\d+:")):
        program.wait_for(words)
        ranks_below(program)[rank].kill()
    assert program.wait() == 0, program.text
    assert program.text.count("resumes after iteration") == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert load_run(folder)["losses"] == load_run(tmp_path / "whole")["losses"]


@pytest.mark.parametrize("identity", [["--local_rank", "0", "--world_size", "2"], []])
def test_who_does_not_start_the_ranks_does_not_start_them_again(identity, capsys):
    assert main(["train", *TINY_TRAINING, *identity, "--max_restarts", "1"]) == 2
    assert "--max_restarts 1 is for a command that starts the ranks itself" in capsys.readouterr().err
    assert main(["train", *TINY_TRAINING, "--world_size", "2", "--max_restarts", "-1"]) == 2
    assert "--max_restarts -1 is not valid. Give a number of at least 0" in capsys.readouterr().err
