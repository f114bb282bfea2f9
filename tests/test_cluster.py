"""The emulated cluster: what its hosts see, what limits their links, and that it leaves nothing."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time

import pytest
from programs import ROOT, TINY_TRAINING, script
from report_records import read

from cos598d.commands.cli import main
from cos598d.errors import UsageError, UserError
from cos598d.records.quantities import delay_words, parse_delay, parse_rate, rate_words
from cos598d.tools.cluster import network
from cos598d.tools.cluster.hosts import describe
from cos598d.tools.cluster.plan import Cluster

try:
    network.check_rights()
    MISSING = None
except UserError as error:
    MISSING = str(error)
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def name():
    """A cluster's name of this test's own; what is left of it goes with the test."""
    mine = f"t{os.getpid()}x{secrets.token_hex(4)}"
    yield mine
    network.Network(Cluster(name=mine)).remove()


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


def programs_of(name):
    """The processes on this cluster's hosts."""
    return [process for space in network.named_namespaces(name) for process in network.processes(space)]


@pytest.mark.parametrize(
    ("words", "bits"), [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3), ("none", None)]
)
def test_a_rate_is_read_as_tc_reads_it_and_written_the_same(words, bits):
    assert parse_rate(words) == bits
    assert rate_words(bits) == words


@pytest.mark.parametrize(("words", "seconds"), [("10ms", 0.01), ("500us", 0.0005), ("1s", 1), ("0", 0)])
def test_a_delay_is_read_with_its_unit_and_written_the_same(words, seconds):
    assert parse_delay(words) == pytest.approx(seconds)
    assert delay_words(seconds) == words


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


def test_the_program_that_carries_packets_is_said_to_take_processor_time():
    assert "processor time" in describe(Cluster(delay=0.01), own_switch=True)


@needs_cluster
def test_each_rank_has_its_place_address_and_interface_and_a_shared_secret_in_no_arguments(done, name, tmp_path):
    """A run ends with the code of the program that failed, once all have printed, and leaves nothing."""
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
    assert not network.named_namespaces(name)


@needs_cluster
def test_a_second_cluster_of_the_same_name_is_refused_and_the_first_stays(done, name):
    done(0, "up", "--hosts", "1")
    assert "is up already" in done(1, "up", "--hosts", "2")
    assert network.load(name).hosts == 1


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_stopped_removes_its_hosts_and_ends_its_programs(cluster, name, number):
    run = cluster("run", "--hosts", "2", "--", "sh", "-c", "echo up; sleep 300")
    run.wait_for("host1. up")
    run.wait_for("host2. up")
    ids = programs_of(name)
    assert ids
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    assert not network.named_namespaces(name)
    assert not any(network._runs(process) for process in ids)


@needs_cluster
def test_after_a_killed_run_down_removes_its_hosts_and_no_others(cluster, done, name):
    other = f"{name}other"
    subprocess.run(("ip", "netns", "add", other), check=True)
    try:
        run = cluster("run", "--hosts", "2", "--delay", "1ms", "--", "sh", "-c", "echo up; sleep 300")
        run.wait_for("host2. up")
        ids = programs_of(name)
        run.process.kill()
        run.wait()
        assert len(network.named_namespaces(name)) == 3  # nobody was there to remove them
        assert "removed 3 namespaces" in done(0, "down")
        assert not network.named_namespaces(name)
        assert not any(network._runs(process) for process in ids)
        assert other in network.namespaces()
    finally:
        subprocess.run(("ip", "netns", "delete", other), check=True)


@pytest.fixture
def stranger(name):
    """Make a namespace called as a host of this test's cluster, with a program in it: stranger(host) -> Popen."""
    made = {}

    def _stranger(host):
        space = f"{name}-host{host}"
        subprocess.run(("ip", "netns", "add", space), check=True)
        made[space] = subprocess.Popen(("ip", "netns", "exec", space, "sleep", "300"))
        while not network.processes(space):
            time.sleep(0.02)
        return made[space]

    yield _stranger
    for space, program in made.items():
        program.kill()
        program.wait()
        subprocess.run(("ip", "netns", "delete", space), check=False)


@needs_cluster
def test_a_cluster_that_cannot_be_made_removes_and_ends_nothing_of_others(done, name, stranger):
    program = stranger(2)
    assert f"there is a network namespace {name}-host2 that no cluster of ours made" in done(1, "up", "--hosts", "3")
    assert network.named_namespaces(name) == [f"{name}-host2"]
    assert program.poll() is None


@needs_cluster
def test_a_cluster_that_fails_half_way_removes_only_what_it_made(name, stranger, monkeypatch):
    found = {}
    shape = network.Network.set_rate

    def set_rate(self, host, rate):
        if host == 2:  # somebody takes a name that was free when we looked
            found["program"] = stranger(3)
        shape(self, host, rate)

    monkeypatch.setattr(network.Network, "set_rate", set_rate)
    with pytest.raises(UserError, match=f"{name}-host3 that no cluster of ours made"):
        network.Network(Cluster(hosts=4, name=name)).build()
    assert network.named_namespaces(name) == [f"{name}-host3"]
    assert found["program"].poll() is None


@needs_cluster
def test_down_leaves_and_names_what_no_cluster_made(done, name, stranger):
    done(0, "up", "--hosts", "1")
    program = stranger(7)
    text = done(0, "down")
    assert "removed 2 namespaces" in text
    (warning,) = [line for line in text.splitlines() if line.startswith("warning: not removed")]
    assert f"{name}-host7" in warning
    assert network.named_namespaces(name) == [f"{name}-host7"]
    assert program.poll() is None


@needs_cluster
def test_a_cluster_that_ends_leaves_a_newer_one_of_its_name(name):
    first, second = (network.Network(Cluster(hosts=1, name=name)) for _ in range(2))
    first.build()
    network.Network(Cluster(name=name)).remove()
    second.build()
    assert first.remove() == 0
    assert network.load(name).hosts == 1
    assert second.remove() == 2


@needs_cluster
def test_looking_for_netem_touches_no_other_namespace():
    probe = f"cos598d-probe{os.getpid()}"
    subprocess.run(("ip", "netns", "add", probe), check=True)
    try:
        network.has_netem()
        assert probe in network.namespaces()
    finally:
        subprocess.run(("ip", "netns", "delete", probe), check=False)


@needs_cluster
def test_slow_and_cut_change_a_link_that_is_in_use(done, name):
    done(0, "up", "--hosts", "2", "--rate", "1gbit")
    up = network.Network(network.load(name))
    assert [up.facts(host)["rate"] for host in (1, 2)] == ["1gbit", "1gbit"]
    done(0, "slow", "2", "--rate", "100mbit")
    assert [up.facts(host)["rate"] for host in (1, 2)] == ["1gbit", "100mbit"]
    words = ("tc", "-n", f"{name}-switch", "qdisc", "show", "dev", "port2")
    # What comes to the host is limited too.
    assert "rate 100Mbit" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    done(0, "cut", "2")
    assert [up.facts(host)["connected"] for host in (1, 2)] == [True, False]
    assert "100mbit    cut" in done(0, "ps")
    assert "but it is disconnected" in done(0, "slow", "2", "--rate", "10mbit")
    done(0, "cut", "2", "--undo")
    assert up.facts(2)["connected"]
    assert "host 3 is not in this cluster" in done(2, "cut", "3")


@pytest.mark.long
@needs_cluster
def test_a_link_that_is_slowed_loses_no_packet_in_its_queue(cluster, done, name):
    done(0, "up", "--hosts", "2", "--rate", "8mbit")
    up = network.Network(network.load(name))
    # 4 MB at 1 MB/s: most of it is still in the queue when the rate changes.
    send = "import socket; s = socket.create_connection(('10.10.1.1', 6000)); s.sendall(bytes(4_000_000)); s.close()"
    take = "import socket; s = socket.create_server(('10.10.1.1', 6000)); print('up', flush=True); c = s.accept()[0]\n"
    take += "print('took', sum(iter(lambda: len(c.recv(65536)), 0)))"
    taker = cluster("exec", "1", "python3", "-c", take)
    taker.wait_for("up")
    sender = cluster("exec", "2", "python3", "-c", send)
    while up.facts(2)["bytes_sent"] < 500_000:
        time.sleep(0.05)
    done(0, "slow", "2", "--rate", "100mbit")
    assert (sender.wait(), taker.wait()) == (0, 0)
    assert "took 4000000" in taker.text
    found = subprocess.run(("tc", "-n", f"{name}-host2", "-s", "-j", "qdisc"), capture_output=True, check=True)
    (bucket,) = (row for row in json.loads(found.stdout) if row.get("kind") == "tbf")
    assert bucket["bytes"] > 4_000_000, "the bucket has counted since the link was made"


@needs_cluster
def test_exec_runs_on_the_host_it_names(done, name):
    done(0, "up", "--hosts", "2")
    text = done(5, "exec", "2", "sh", "-c", "ip -br address show eth0; exit 5")
    assert "10.10.1.2/24" in text
    # After the host, --name is still the cluster's and no part of the program.
    done(0, "exec", "2", "--name", name, "true")
    assert "there is no program nosuchprogram on this machine. Give" in done(2, "exec", "2", "nosuchprogram")


@needs_cluster
@pytest.mark.parametrize("words", [("ps",), ("exec", "1", "true"), ("slow", "1", "--rate", "1mbit"), ("cut", "1")])
def test_without_a_cluster_each_command_says_how_to_make_one(words, name, capsys):
    assert main(["cluster", words[0], "--name", name, *words[1:]]) == 1
    assert "is up. Make one with" in capsys.readouterr().err


ECHO = """
import os, socket, sys, time

def received():
    line = next(line for line in open("/proc/net/dev") if "eth0" in line)
    return int(line.split(":")[1].split()[1])

if os.environ["RANK"] == "0":
    with socket.create_server(("10.10.1.1", 7000)) as server:
        line, _ = server.accept()
        before = received()
        got = 0
        while got < 2_000_000:
            got += len(line.recv(1 << 20))
        packets = received() - before
        begin = time.monotonic()
        line.sendall(b"x")
        line.recv(1)
        print("packets", packets, "there and back", time.monotonic() - begin)
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


def measured(text):
    line = next(line for line in text.splitlines() if "| packets" in line).split()
    return int(line[2]), float(line[-1])


@needs_cluster
def test_no_packet_is_early_and_without_offload_each_holds_at_most_1500_bytes(done, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    words = ("--", "python", str(tmp_path / "echo.py"))
    # 2,000,000 / 1,448, except those that came before the first look.
    assert measured(done(0, "run", "--hosts", "2", "--offload", "off", *words))[0] > 1300
    packets, seconds = measured(done(0, "run", "--hosts", "2", "--delay", "20ms", *words))
    assert packets < 700
    assert seconds >= 0.04


@needs_cluster
def test_a_training_on_hosts_has_the_losses_of_one_on_loopback(done, start, tmp_path):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", "2"]
    done(0, "run", "--hosts", "2", "--", sys.executable, *words, "--output_dir", str(tmp_path / "there"))
    here = start("here", [*words, "--world_size", "2", "--output_dir", tmp_path / "here"])
    assert here.wait() == 0, here.text
    there, here = (read(tmp_path / where / "summary.json")["losses"] for where in ("there", "here"))
    assert there == here
    network_there = read(tmp_path / "there" / "environment.json")["network"]
    assert network_there == {"hosts": 2, "rate": "1gbit", "delay": "0", "offload": "on"}


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
        {"diloco": "--sync_every 2 --fragments 2", "local_sgd": "--sync_every 3", "tree": "", "zero3": ""},
        dict.fromkeys(("all_reduce", "gather_scatter", "reduce_broadcast", "ring"), ""),
    ],
    ids=" ".join,
)
def test_the_kernel_counts_the_ledger_s_bytes_and_headers(syncs, done, tmp_path):
    """Of averages that take several steps, of messages, and of each collective of the library, on 3 hosts."""
    train = f"{' '.join(TINY_TRAINING)} --do_eval --max_eval_examples 8 --max_steps 5 --eval_steps 2 --save_steps 3"
    words = [f"{train} --sync {sync} {flags} --output_dir {tmp_path}/{sync}" for sync, flags in syncs.items()]
    (tmp_path / "all.py").write_text(ONE_AFTER_THE_OTHER.format(root=str(ROOT), script=script("task2b/run_glue.py")))
    done(0, "run", "--hosts", "3", "--", sys.executable, str(tmp_path / "all.py"), *words)
    for sync in syncs:
        for rank in range(3):
            rows = read(tmp_path / sync / f"iterations.rank{rank}.jsonl")
            predicted, counted = (sum(row[f"{how}_bytes_sent"] for row in rows) for how in ("predicted", "counted"))
            # Headers of packets, acknowledgements too, of messages of some kB; and those through rank 0's store.
            assert predicted < counted < 1.3 * predicted + 10_000 * len(rows), (sync, rank, predicted, counted)


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
    assert f"lost connection to this rank, {lost}: its network interface eth0" in own
    assert len(errors) == 2
    words = f"lost connection to rank {lost}: it was killed, or its host is down"
    assert all(words in line for line in errors.values())


def test_only_the_names_of_hosts_and_switch_are_a_cluster_s(monkeypatch):
    mine = ["mine-host1", "mine-host64", "mine-switch"]
    others = ["7", "host1", "mine", "mine-host", "mine-host65", "mine-hostile"]
    others += ["minetoo-host1", "xmine-host1", "switch"]
    monkeypatch.setattr(network, "namespaces", lambda: [*others, *reversed(mine)])
    assert network.named_namespaces("mine") == mine


def test_a_host_that_is_not_in_the_cluster_is_refused():
    Cluster(hosts=3).check_host(3)
    with pytest.raises(UsageError, match="1 to 3"):
        Cluster(hosts=3).check_host(4)
