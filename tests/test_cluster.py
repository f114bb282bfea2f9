"""The emulated cluster: what its hosts see, what limits their links, and that it leaves nothing."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import ROOT, TINY_TRAINING, script
from report_records import read

from cos598d.commands.cli import main
from cos598d.errors import UserError
from cos598d.records.quantities import delay_words, parse_delay, parse_rate, rate_words
from cos598d.tools.cluster import network
from cos598d.tools.cluster.hosts import FOLDER

try:
    network.check_rights()
    MISSING = None
except UserError as error:
    MISSING = str(error)
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def name():
    return f"t{os.getpid()}x{secrets.token_hex(4)}"


@pytest.fixture
def cluster(start, name):
    """Start `cos598d cluster WHAT --name ... WORDS`: cluster(what, *words) -> Program."""

    def _cluster(what, *words):
        label = f"cluster-{what}-{time.monotonic_ns()}"
        return start(label, ["-m", "cos598d", "cluster", what, "--name", name, *words])

    return _cluster


@pytest.fixture
def done(cluster):
    """done(exit_code, what, *words): a command's output, once it has ended with this code."""

    def _done(exit_code, what, *words):
        program = cluster(what, *words)
        assert program.wait() == exit_code, program.text
        return program.text

    return _done


def is_left(words):
    """Whether a process runs with these words in its arguments."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words.encode() in place.read_bytes():
                return True
    return False


@pytest.mark.parametrize(
    ("parse", "show", "words", "value"),
    [
        *((parse_rate, rate_words, *pair) for pair in (("1gbit", 1e9), ("2.5gbit", 2.5e9), ("64kbit", 64e3))),
        (parse_rate, rate_words, "none", None),
        *((parse_delay, delay_words, *pair) for pair in (("10ms", 0.01), ("500us", 0.0005), ("1s", 1), ("0", 0))),
    ],
)
def test_a_rate_and_a_delay_are_read_with_their_units_and_written_the_same(parse, show, words, value):
    assert parse(words) == (value and pytest.approx(value))
    assert show(value) == words


@pytest.mark.parametrize(
    "wrong", ["--rate=1gb", "--rate=0mbit", "--delay=10", "--delay=1h", "--hosts=0", "--hosts=65", "--name=a/b"]
)
def test_a_wrong_argument_is_refused_before_anything_is_made(wrong, capsys):
    assert main(["cluster", "up", wrong]) == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("sys.platform", "darwin", "needs Linux"),
        ("os.geteuid", lambda: 1000, "needs root"),
        ("shutil.which", lambda tool: None, "the command ip. Install iproute2"),
    ],
)
def test_a_machine_without_what_a_cluster_needs_is_one_sentence(attribute, value, words, monkeypatch, capsys):
    if attribute != "sys.platform":
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(attribute, value)
    assert main(["cluster", "up"]) == 1
    assert words in capsys.readouterr().err


@needs_cluster
def test_each_rank_has_its_place_address_and_interface_and_a_shared_secret_in_no_arguments(done, tmp_path):
    """A run ends with the code of the program that failed, once all have printed."""
    words = "echo $RANK/$LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR by $GLOO_SOCKET_IFNAME, {address} {rank}, "
    words += "$(ip -br address show eth0); echo secret $COS598D_SECRET; tr '\\0' ' ' < /proc/$$/cmdline; "
    words += f"touch {tmp_path}/printed{{rank}}; [ {{rank}} = 3 ] || exit 0; "
    words += f"while [ $(ls {tmp_path} | grep -c printed) -lt 4 ]; do sleep 0.02; done; exit 7"
    text = done(7, "run", "--hosts", "2", "--ranks_per_host", "2", "--", "sh", "-c", words)
    for rank, place in enumerate(("host1 rank0| 0/0", "host1 rank1| 1/1", "host2 rank2| 2/0", "host2 rank3| 3/1")):
        (line,) = [line for line in text.splitlines() if line.startswith(f"{place} of 4")]
        address = f"10.10.1.{1 + rank // 2}"
        assert f"at 10.10.1.1 by eth0, {address} {rank}, eth0@if" in line
        assert f"{address}/24" in line
    secrets = re.findall(r"secret (\w{64})$", text, re.MULTILINE)
    assert len(secrets) == 4
    assert text.count(secrets[0]) == 4


ENDINGS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: -signal.SIGHUP, signal.SIGKILL: -signal.SIGKILL}


@needs_cluster
@pytest.mark.parametrize("number", ENDINGS)
def test_however_a_run_ends_nothing_of_it_is_left(cluster, done, name, number):
    """A child of a program ends too, and one in a session of its own. Nobody else's network is touched."""
    subprocess.run(("ip", "netns", "add", name), check=True)
    try:
        words = f"setsid sleep 300.{name} & echo up; sleep 300.{name}"
        run = cluster("run", "--hosts", "2", "--delay", "1ms", "--", "sh", "-c", words.replace(name, str(os.getpid())))
        run.wait_for("host1. up")
        run.wait_for("host2. up")
        assert is_left(f"300.{os.getpid()}")
        run.process.send_signal(number)
        assert run.wait() == ENDINGS[number]
        deadline = time.monotonic() + 10
        while is_left(f"300.{os.getpid()}") or is_left("cos598d.tools.cluster.switch"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "is up. Make one with" in done(1, "cut", "1")
        assert not list(FOLDER.glob(f"{name}*"))
        assert name in subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run(("ip", "netns", "delete", name), check=True)


@needs_cluster
def test_a_cluster_by_hand_has_a_name_of_its_own_until_ctrl_c(cluster, done):
    up = cluster("up", "--hosts", "2", "--rate", "100mbit")
    up.wait_for("Ctrl-C ends")
    assert "is up already" in done(1, "up")
    shaped = "tc qdisc show dev eth0; ip -br address show eth0; exit 5"
    text = done(5, "exec", "2", "sh", "-c", shaped)
    assert "rate 100Mbit" in text
    assert "10.10.1.2/24" in text
    assert "there is no program nosuchprogram on this machine. Give" in done(2, "exec", "2", "nosuchprogram")
    done(0, "cut", "2")
    assert " DOWN " in done(0, "exec", "2", "ip", "-br", "link", "show", "eth0")
    done(0, "cut", "2", "--undo")
    assert " UP " in done(0, "exec", "2", "ip", "-br", "link", "show", "eth0")
    assert "host 3 is not in this cluster" in done(2, "cut", "3")
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 0
    assert "is up. Make one with" in done(1, "exec", "1", "true")


ECHO = """
import os, socket, time

if os.environ["RANK"] == "0":
    with socket.create_server(("10.10.1.1", 7000)) as server:
        line, _ = server.accept()
        got = len(line.recv(1 << 20))
        begin = time.monotonic()
        while got < 2_000_000:
            got += len(line.recv(1 << 20))
        took = time.monotonic() - begin
        begin = time.monotonic()
        line.sendall(b"x")
        line.recv(1)
        print("sent in", took, "there and back", time.monotonic() - begin)
else:
    for _ in range(100):
        try:
            line = socket.create_connection(("10.10.1.1", 7000))
            break
        except OSError:
            time.sleep(0.05)
    line.sendall(bytes(2_000_000))
    line.recv(1)
    line.sendall(b"y")
    line.recv(1)
"""


@needs_cluster
def test_no_packet_is_early(done, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    words = ("--", "python", str(tmp_path / "echo.py"))
    text = done(0, "run", "--hosts", "2", "--delay", "20ms", "--rate", "100mbit", *words)
    line = next(line for line in text.splitlines() if "| sent" in line).split()
    assert float(line[3]) > 0.75 * 2_000_000 * 8 / 100e6, "the rest may be in buckets and queues"
    assert float(line[-1]) >= 0.04


@needs_cluster
def test_a_training_on_hosts_has_the_losses_of_one_on_loopback(done, start, tmp_path):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", "2"]
    done(0, "run", "--hosts", "2", "--", sys.executable, *words, "--output_dir", str(tmp_path / "there"))
    here = start("here", [*words, "--world_size", "2", "--output_dir", tmp_path / "here"])
    assert here.wait() == 0, here.text
    there, here = (read(tmp_path / where / "summary.json")["losses"] for where in ("there", "here"))
    assert there == here
    network_there = read(tmp_path / "there" / "environment.json")["network"]
    assert network_there == {"hosts": 2, "rate": "1gbit", "delay": "0"}


# A script's runs with these words, each in a fork of this process: torch is loaded once.
ONE_AFTER_THE_OTHER = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import cos598d.run

for words in sys.argv[1:]:
    if os.fork() == 0:
        sys.argv = [{script!r}, *words.split()]
        runpy.run_path({script!r}, run_name="__main__")
    if os.wait()[1] != 0:
        sys.exit(1)
"""


@pytest.mark.long
@needs_cluster
@pytest.mark.parametrize(
    "syncs",
    [
        {"diloco": "--sync_every 2", "local_sgd": "--sync_every 3", "tree": "", "zero3": ""},
        dict.fromkeys(("all_reduce", "gather_scatter", "reduce_broadcast", "ring"), ""),
    ],
    ids=" ".join,
)
def test_the_kernel_counts_the_ledger_s_bytes(syncs, done, tmp_path):
    """Of averages that take several steps, of messages, and of each collective of the library, on 3 hosts."""
    train = f"{' '.join(TINY_TRAINING)} --do_eval --max_eval_examples 8 --max_steps 5 --eval_steps 2 --save_steps 3"
    words = [f"{train} --sync {sync} {flags} --output_dir {tmp_path}/{sync}" for sync, flags in syncs.items()]
    (tmp_path / "all.py").write_text(ONE_AFTER_THE_OTHER.format(root=str(ROOT), script=script("task2b/run_glue.py")))
    done(0, "run", "--hosts", "3", "--", sys.executable, str(tmp_path / "all.py"), *words)
    for sync in syncs:
        for rank in range(3):
            rows = read(tmp_path / sync / f"iterations.rank{rank}.jsonl")
            predicted, counted = (sum(row[f"{how}_bytes_sent"] for row in rows) for how in ("predicted", "counted"))
            calls = sum(each[0] for row in rows for each in row["by_purpose"].values())
            # gloo's own words with each call, and messages through rank 0's store of some kB per step.
            most = 2_000 * calls + 10_000 * len(rows)
            assert 0 <= counted - predicted < most, (sync, rank, predicted, counted)


@pytest.mark.long
@needs_cluster
def test_hosts_meet_although_rank_0_s_name_means_loopback_on_its_host(done, tmp_path):
    """As Debian's /etc/hosts has it, and srun gives it. Rank 1 is on rank 0's host, and has only loopback for it."""
    for rank, known_as in enumerate(["127.0.1.1", "127.0.1.1", "10.10.1.1", "10.10.1.1"]):
        (tmp_path / f"hosts{rank}").write_text(f"127.0.0.1 localhost\n{known_as} first.test\n")
    place = "--master_ip first.test --master_port {master_port} --world_size 4 --local_rank {rank}"
    flags = f"{' '.join(TINY_TRAINING)} --max_steps 2 --timeout 60 --output_dir {tmp_path}/out {place}"
    # `ip netns exec` gives each program mounts of its own.
    mount = f"mount --bind {tmp_path}/hosts{{rank}} /etc/hosts"
    words = f"{mount} && exec env -u GLOO_SOCKET_IFNAME -u RANK {sys.executable} {script('task2b/run_glue.py')} {flags}"
    done(0, "run", "--hosts", "2", "--ranks_per_host", "2", "--", "sh", "-c", words)
    assert read(tmp_path / "out" / "environment.json")["interface"] == "eth0"


@pytest.mark.long
@needs_cluster
@pytest.mark.parametrize("lost", [0, 2])
def test_when_a_host_is_cut_off_every_rank_ends_and_names_it(lost, cluster, done):
    words = [sys.executable, script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", "100000"]
    run = cluster("run", "--hosts", "3", "--", *words)
    run.wait_for("host1.*iteration 3")
    done(0, "cut", str(lost + 1))
    assert run.wait() == 1
    errors = {line.partition("| error: rank ")[0]: line for line in run.text.splitlines() if "| error: rank " in line}
    assert all(f"{host}| error: rank {int(host[4:]) - 1}: " in line for host, line in errors.items())
    own = errors.pop(f"host{lost + 1}")
    assert "lost connection to rank" in own or "the rank itself was cut off" in own
    assert len(errors) == 2
    words = f"lost connection to rank {lost}: it was killed, or its host is down"
    assert all(words in line for line in errors.values())
