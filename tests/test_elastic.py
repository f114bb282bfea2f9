"""Ranks that torchrun or the starter of local ranks restarts: they meet again and end as one run."""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace

import psutil
import pytest
from meetings import exchange_works, identities
from programs import PATIENCE, ROOT, TINY_TRAINING, Program, free_port, script, wait_until
from torch.distributed import HashStore

from cos598d.commands.cli import main
from cos598d.errors import UserError
from cos598d.tools.cluster import network
from cos598d.tools.cluster.plan import Cluster, address
from cos598d.tools.report.load import load_run
from cos598d.world import endpoint, rendezvous

SIXTY = (script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", 60, "--dropout", "model")
SIXTY += ("--save_steps", 5, "--log_every", 1)


@pytest.fixture
def agents_store(monkeypatch):
    """What the store of torchrun's agent has, which outlives the ranks."""
    store = HashStore()
    monkeypatch.setattr(endpoint, "_agents_store", lambda identity: store)
    return store


def meet(pool, one, seconds=60):
    return pool.submit(rendezvous.meet, one, seconds, {})


def test_restarted_ranks_meet_although_an_earlier_run_still_answers(agents_store, servers):
    """Each host counts restarts for itself, and one may still be ending its ranks when another starts its own anew."""
    with ThreadPoolExecutor(4) as pool:
        first = [meet(pool, one) for one in identities(2, store_is_served=True)]
        first = [future.result(PATIENCE) for future in first]
        old = json.loads(agents_store.get("port"))
        again = identities(2, first[0].identity.master_port, store_is_served=True)
        late = meet(pool, replace(again[1], attempt="7"))
        wait_until(lambda: len(servers) == 1 and servers[0]._told)  # by the old rank 0, that it is too late
        assert not late.done()
        second = [meet(pool, again[0]).result(PATIENCE), late.result(PATIENCE)]
    assert json.loads(agents_store.get("port")) != old
    assert exchange_works(second)
    assert exchange_works(first), "the earlier ones were disturbed"


@pytest.mark.parametrize("what", ["nothing", "a program that is no rank", "a run with another secret"])
def test_whatever_listens_now_at_an_earlier_rank_0_s_port_is_ignored(what, agents_store, servers, monkeypatch):
    monkeypatch.setattr(endpoint, "GREETING_SECONDS", 1.0)  # how long a program may take to say who it is
    zero, one = identities(2, store_is_served=True)
    with socket.socket() as stranger, ThreadPoolExecutor(4) as pool:
        stranger.bind(("127.0.0.1", 0))
        port = stranger.getsockname()[1]
        greeted = threading.Event()
        if what == "a program that is no rank":
            stranger.listen()

            def greet():
                connection, _ = stranger.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    greeted.set()
                    with contextlib.suppress(ConnectionResetError):
                        connection.recv(4096)

            pool.submit(greet)
        elif what == "a run with another secret":
            port = free_port()
            other = [meet(pool, it) for it in identities(2, port, secret=b"another run's secret")]
            assert len([future.result(PATIENCE) for future in other]) == 2
        agents_store.set("port", json.dumps([port, endpoint._proof(one, port)]))
        late = meet(pool, one)
        if what == "a program that is no rank":
            assert greeted.wait(PATIENCE)
        with pytest.raises(NotYet):
            late.result(1)
        both = [meet(pool, zero).result(PATIENCE), late.result(PATIENCE)]
        assert exchange_works(both)


def test_an_earlier_rank_0_that_nobody_follows_is_an_error_in_the_end(agents_store, servers):
    with ThreadPoolExecutor(4) as pool:
        first = [meet(pool, one).result for one in identities(2, store_is_served=True)]
        first = [result(PATIENCE) for result in first]
        again = identities(2, first[0].identity.master_port, store_is_served=True)
        with pytest.raises(UserError, match="rank 1 was started twice for "):
            meet(pool, again[1], seconds=2).result(PATIENCE)


def ranks_below(program):
    """The ranks that a launcher has started: {rank: process}."""
    found = {}
    for process in psutil.Process(program.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, KeyError):
            kind, _, rank = process.name().partition(" ")  # a fork says it by its name
            found.setdefault(int(rank if kind == "rank" else process.environ()["RANK"]), process)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The losses of a run of two ranks that nothing stopped."""
    folder = tmp_path_factory.mktemp("finished")
    program = Program(folder, "whole", [str(word) for word in (*SIXTY, "--world_size", 2, "--output_dir", "whole")])
    assert program.wait() == 0, program.text
    return load_run(folder / "whole")["losses"]


@pytest.mark.long
def test_a_run_whose_ranks_are_killed_under_torchrun_ends_as_if_not(start, tmp_path, finished):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--max-restarts", 3]
    torchrun = start("torchrun", [*launcher, *SIXTY, "--output_dir", "again", "--resume", "auto"])
    for words in ("(?s)training starts from scratch.*iteration 11:", "(?s)restart 1.*resumes after.*iteration 3\\d:"):
        torchrun.wait_for(words)
        ranks_below(torchrun)[1].kill()
    assert torchrun.wait() == 0, torchrun.text
    assert torchrun.text.count("rank 0: lost connection to rank 1") == 2
    assert "restart 2: ranks 0-1 on" in torchrun.text
    assert load_run(tmp_path / "again")["losses"] == finished


@pytest.mark.long
def test_a_run_whose_local_ranks_are_killed_ends_as_if_not(start, tmp_path, finished):
    """At one port: what is left of the connections of ranks that were killed must not keep it from the next ones."""
    program = start("program", [*SIXTY, "--world_size", 2, "--master_port", free_port(), "--max_restarts", 2])
    # The checkpoint of iteration 5 is whole when that of 10 begins.
    for rank, words in enumerate(("iteration 12:", "(?s)restart 1 of 2.*resumes after.*iteration \\d+:")):
        program.wait_for(words)
        ranks_below(program)[rank].kill()
    assert program.wait() == 0, program.text
    assert program.text.count("resumes after iteration") == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert load_run(folder)["losses"] == finished


@pytest.mark.long
def test_ranks_end_when_torchruns_agent_is_killed(start):
    words = ["-m", "torch.distributed.run", "--nproc_per_node", 2, script("task2b/run_glue.py"), *TINY_TRAINING]
    torchrun = start("torchrun", [*words, "--max_steps", 100000, "--output_dir", "out"])
    torchrun.wait_for("iteration 2")
    ranks = ranks_below(torchrun).values()
    assert len(ranks) == 2
    torchrun.process.kill()
    assert not psutil.wait_procs(ranks, timeout=PATIENCE)[1]
    assert "the program that started this worker has ended. Repeat the command, with --resume auto" in torchrun.text


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


def test_each_attempt_has_its_own_secret_and_number(starter):
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
def test_ranks_that_finish_refuse_or_stop_to_resume_are_not_restarted(code, starter):
    program = starter(f"{code},all", 3)
    assert program.wait() == code, program.text
    assert list(told(program)) == ["0"]
    assert "restart" not in program.text


def test_nothing_is_restarted_after_a_signal_to_the_starter(starter):
    program = starter("wait", 3)
    program.wait_for("(?s)\\[.*\\[")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM, program.text
    assert list(told(program)) == ["0"]


@pytest.mark.parametrize("identity", [["--local_rank", "0", "--world_size", "2"], []])
def test_max_restarts_is_for_a_command_that_starts_the_ranks(identity, capsys):
    assert main(["train", *TINY_TRAINING, *identity, "--max_restarts", "1"]) == 2
    assert "--max_restarts 1 is for a command that starts the ranks itself" in capsys.readouterr().err
    assert main(["train", *TINY_TRAINING, "--world_size", "2", "--max_restarts", "-1"]) == 2
    assert "--max_restarts -1 is not valid. Give a number of at least 0" in capsys.readouterr().err


@pytest.fixture
def on_host(start):
    """Four emulated hosts: on_host(host, words) starts a program there, `on_host.name` is the cluster's."""
    name = f"t{os.getpid()}x{secrets.token_hex(4)}"

    def _on_host(host, words, environ):
        return start(f"host{host}", ["-m", "cos598d", "cluster", "exec", "--name", name, host, *words], environ)

    _on_host.name = name
    try:
        up = start("up", ["-m", "cos598d", "cluster", "up", "--name", name, "--hosts", 4])
        assert up.wait() == 0, up.text
        yield _on_host
    finally:
        network.Network(Cluster(name=name)).remove()


try:
    network.check_rights()
    MISSING = ""
except UserError as error:
    MISSING = str(error)


@pytest.mark.long
@pytest.mark.root
@pytest.mark.timeout(600)  # 110 s of processor, most of it for four hosts that load torch again and again
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_hosts_leave_and_join_an_elastic_run(on_host, start, tmp_path):
    """Three of at most four hosts; the third is cut off, and when the two others go on, the fourth comes.

    Until it has come the first host's link is slow, so that the run lasts, however long a program takes to start.
    """
    flags = [*TINY_TRAINING, "--max_steps", 300, "--save_steps", 10, "--log_every", 1]
    one = start("one", [script("task1/run_glue.py"), *flags, "--output_dir", "one"])
    # Without the first, hosts that join later never learn where they meet (torch 2.13).
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "COS598D_SECRET": secrets.token_hex(32)}
    timing = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"

    def agent(host):
        launcher = ["--nnodes", "2:4", "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        place = ["--rdzv-endpoint", f"{address(1)}:29400", "--local-addr", address(host)]
        conf = ["--rdzv-conf", f"{timing},is_host={int(host == 1)}"]
        words = [script("task3/run_glue.py"), *flags, "--output_dir", tmp_path / "many", "--resume", "auto"]
        program = [sys.executable, "-m", "torch.distributed.run", *launcher, *place, *conf, *words]
        return on_host(host, [*program, "--silence_seconds", 4], environ)

    first, second, third = agent(1), agent(2), agent(3)
    first.wait_for("(?s)ranks 0-2 on.*iteration 12:")

    def change(what, *words):
        program = start(what, ["-m", "cos598d", "cluster", what, "--name", on_host.name, *words])
        assert program.wait() == 0, program.text

    change("slow", 1, "--rate", "20mbit")
    change("cut", 3)
    first.wait_for("with 2 ranks in place of 3(?s:.)*iteration")
    fourth = agent(4)
    first.wait_for("with 3 ranks in place of 2")
    change("slow", 1, "--rate", "1gbit")
    assert [agent.wait() for agent in (first, second, fourth)] == [0, 0, 0], first.text
    third.stop()
    assert one.wait() == 0, one.text
    assert load_run(tmp_path / "many")["losses"] == pytest.approx(load_run(tmp_path / "one")["losses"], abs=1e-6)
