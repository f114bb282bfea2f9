"""The emulated cluster: what its hosts see, what limits their links, and that nothing of it stays behind."""

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

from cos598d.commands.cli import main
from cos598d.errors import UsageError, UserError
from cos598d.records.quantities import delay_words, parse_delay, parse_rate, rate_words
from cos598d.tools.cluster import network
from cos598d.tools.cluster.hosts import describe
from cos598d.tools.cluster.plan import Cluster
from cos598d.tools.report.traffic_table import HEADER_BYTES

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
        return start(
            f"cluster-{what}-{time.monotonic_ns()}", ["-m", "cos598d", "cluster", what, "--name", name, *words]
        )

    return _cluster


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
def test_a_word_that_no_cluster_can_have_is_refused_before_anything_is_made(wrong, capsys):
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
def test_where_no_cluster_can_be_made_one_sentence_says_why(attribute, value, words, monkeypatch, capsys):
    if attribute != "sys.platform":
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(attribute, value)
    assert main(["cluster", "up"]) == 1
    assert words in capsys.readouterr().err


def test_the_program_that_carries_packets_says_that_it_takes_processor_time():
    assert "processor time" in describe(Cluster(delay=0.01), own_switch=True)


@needs_cluster
def test_every_host_gets_its_rank_address_interface_and_place_of_meeting(cluster):
    words = (
        "echo $RANK of $WORLD_SIZE at $MASTER_ADDR by $GLOO_SOCKET_IFNAME, {address} {rank} $(ip -br address show eth0)"
    )
    run = cluster("run", "--hosts", "3", "--", "sh", "-c", words)
    assert run.wait() == 0
    for host in (1, 2, 3):
        here = f"10.10.1.{host} {host - 1}"
        assert f"host{host}| {host - 1} of 3 at 10.10.1.1 by eth0, {here} eth0@if" in run.text
        assert f"10.10.1.{host}/24" in run.text


@needs_cluster
def test_the_ranks_of_a_cluster_s_run_share_a_new_secret_that_stands_in_no_arguments(cluster):
    run = cluster(
        "run", "--hosts", "2", "--", "sh", "-c", "echo secret $COS598D_SECRET; tr '\\0' ' ' < /proc/$$/cmdline"
    )
    assert run.wait() == 0
    secrets = re.findall(r"secret (\w{64})$", run.text, re.MULTILINE)
    assert len(secrets) == 2
    assert run.text.count(secrets[0]) == 2


@needs_cluster
def test_several_ranks_may_share_a_host(cluster):
    run = cluster("run", "--hosts", "2", "--ranks_per_host", "2", "--", "sh", "-c", "echo $RANK $LOCAL_RANK {address}")
    assert run.wait() == 0
    for line in ("host1 rank0| 0 0 10.10.1.1", "host1 rank1| 1 1 10.10.1.1", "host2 rank3| 3 1 10.10.1.2"):
        assert line in run.text


@needs_cluster
def test_a_run_ends_with_the_code_of_the_program_that_failed_and_leaves_nothing(cluster, name):
    run = cluster("run", "--hosts", "2", "--", "sh", "-c", "[ {rank} = 0 ] || exit 7")
    assert run.wait() == 7
    assert not network.named_namespaces(name)


@needs_cluster
def test_a_second_cluster_of_the_same_name_is_refused_and_the_first_stays(cluster, name):
    assert cluster("up", "--hosts", "1").wait() == 0
    second = cluster("up", "--hosts", "2")
    assert second.wait() == 1
    assert "is up already" in second.text
    assert network.load(name).hosts == 1


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_stopped_removes_its_hosts_and_ends_its_programs(cluster, name, number):
    run = cluster("run", "--hosts", "2", "--", "sh", "-c", "echo up; sleep 300")
    run.wait_for("host1. up")
    run.wait_for("host2. up")
    ids = [process for space in network.named_namespaces(name) for process in network.processes(space)]
    assert ids
    run.process.send_signal(number)
    assert run.wait() == 128 + number
    assert not network.named_namespaces(name)
    assert not any(network._runs(process) for process in ids)


@needs_cluster
def test_after_a_killed_run_down_removes_its_hosts_and_no_others(cluster, name):
    other = f"{name}other"
    subprocess.run(("ip", "netns", "add", other), check=True)
    try:
        run = cluster("run", "--hosts", "2", "--delay", "1ms", "--", "sh", "-c", "echo up; sleep 300")
        run.wait_for("host2. up")
        ids = [process for space in network.named_namespaces(name) for process in network.processes(space)]
        run.process.kill()
        run.wait()
        assert len(network.named_namespaces(name)) == 3  # nobody was there to remove them
        down = cluster("down")
        assert down.wait() == 0
        assert "removed 3 namespaces" in down.text
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
def test_a_cluster_that_cannot_be_made_removes_and_ends_nothing_of_others(cluster, name, stranger):
    program = stranger(2)
    up = cluster("up", "--hosts", "3")
    assert up.wait() == 1
    assert f"there is a network namespace {name}-host2 that no cluster of ours made" in up.text
    assert network.named_namespaces(name) == [f"{name}-host2"]
    assert program.poll() is None


@needs_cluster
def test_a_cluster_that_fails_half_way_removes_what_it_made_and_no_more(name, stranger, monkeypatch):
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
def test_down_leaves_what_no_cluster_made_and_says_so(cluster, name, stranger):
    assert cluster("up", "--hosts", "1").wait() == 0
    program = stranger(7)
    down = cluster("down")
    assert down.wait() == 0
    assert "removed 2 namespaces" in down.text
    assert f"warning: not removed, because cos598d did not create them: {name}-host7" in down.text
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
def test_to_ask_for_netem_touches_no_namespace_that_has_a_name():
    probe = f"cos598d-probe{os.getpid()}"
    subprocess.run(("ip", "netns", "add", probe), check=True)
    try:
        network.has_netem()
        assert probe in network.namespaces()
    finally:
        subprocess.run(("ip", "netns", "delete", probe), check=False)


@needs_cluster
def test_slow_and_cut_change_a_link_that_is_in_use(cluster, name):
    assert cluster("up", "--hosts", "2", "--rate", "1gbit").wait() == 0
    up = network.Network(network.load(name))
    assert [up.facts(host)["rate"] for host in (1, 2)] == ["1gbit", "1gbit"]
    assert cluster("slow", "2", "--rate", "100mbit").wait() == 0
    assert [up.facts(host)["rate"] for host in (1, 2)] == ["1gbit", "100mbit"]
    port = subprocess.run(
        ("tc", "-n", f"{name}-switch", "qdisc", "show", "dev", "port2"), capture_output=True, text=True, check=True
    )
    assert "rate 100Mbit" in port.stdout  # what comes to the host is limited too
    assert cluster("cut", "2").wait() == 0
    assert [up.facts(host)["connected"] for host in (1, 2)] == [True, False]
    shown = cluster("ps")
    assert shown.wait() == 0
    assert "100mbit    cut" in shown.text
    still = cluster("slow", "2", "--rate", "10mbit")
    assert still.wait() == 0
    assert "10mbit each way, but it is disconnected" in still.text
    assert cluster("cut", "2", "--undo").wait() == 0
    assert up.facts(2)["connected"]
    absent = cluster("cut", "3")
    assert absent.wait() == 2
    assert "host 3 is not in this cluster" in absent.text


@pytest.mark.long
@needs_cluster
def test_a_link_is_slowed_in_its_place_and_loses_nothing_that_waits_in_it(cluster, name):
    assert cluster("up", "--hosts", "2", "--rate", "8mbit").wait() == 0
    up = network.Network(network.load(name))
    # 4 MB at 1 MB/s: most of it still waits when the rate changes.
    send = "import socket; s = socket.create_connection(('10.10.1.1', 6000)); s.sendall(bytes(4_000_000)); s.close()"
    take = "import socket; s = socket.create_server(('10.10.1.1', 6000)); print('up', flush=True); c = s.accept()[0]\n"
    take += "print('took', sum(iter(lambda: len(c.recv(65536)), 0)))"
    taker = cluster("exec", "1", "python3", "-c", take)
    taker.wait_for("up")
    sender = cluster("exec", "2", "python3", "-c", send)
    while up.facts(2)["bytes_sent"] < 500_000:
        time.sleep(0.05)
    assert cluster("slow", "2", "--rate", "100mbit").wait() == 0
    assert (sender.wait(), taker.wait()) == (0, 0)
    assert "took 4000000" in taker.text
    found = subprocess.run(("tc", "-n", f"{name}-host2", "-s", "-j", "qdisc"), capture_output=True, check=True)
    (bucket,) = (row for row in json.loads(found.stdout) if row.get("kind") == "tbf")
    assert bucket["bytes"] > 4_000_000, "the bucket has counted since the link was made"


@needs_cluster
def test_exec_runs_on_the_host_it_names(cluster, name):
    assert cluster("up", "--hosts", "2").wait() == 0
    there = cluster("exec", "2", "sh", "-c", "ip -br address show eth0; echo $GLOO_SOCKET_IFNAME; exit 5")
    assert there.wait() == 5
    assert "10.10.1.2/24" in there.text
    # Behind the host a cluster's name is taken for what it is too: no program is called so.
    behind = cluster("exec", "2", "--name", name, "true")
    assert behind.wait() == 0, behind.text
    missing = cluster("exec", "2", "nosuchprogram")
    assert missing.wait() == 2
    assert "there is no program nosuchprogram on this machine. Give" in missing.text


@needs_cluster
def test_without_a_cluster_each_command_says_how_to_make_one(cluster):
    for words in (("ps",), ("exec", "1", "true"), ("slow", "1", "--rate", "1mbit"), ("cut", "1")):
        program = cluster(*words)
        assert program.wait() == 1
        assert "is up. Make one with" in program.text


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


def _measured(text):
    line = next(line for line in text.splitlines() if "| packets" in line).split()
    return int(line[2]), float(line[-1])


@needs_cluster
def test_no_packet_is_early_and_without_offload_each_holds_at_most_1500_bytes(cluster, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    words = ("--", "python", str(tmp_path / "echo.py"))
    cut = cluster("run", "--hosts", "2", "--offload", "off", *words)
    assert cut.wait() == 0, cut.text
    assert _measured(cut.text)[0] > 1300  # 2,000,000 / 1,448, but for those that came before the first look
    whole = cluster("run", "--hosts", "2", "--delay", "20ms", *words)
    assert whole.wait() == 0, whole.text
    packets, seconds = _measured(whole.text)
    assert packets < 700
    assert seconds >= 0.04


@needs_cluster
def test_a_training_on_hosts_has_the_losses_of_one_on_loopback(cluster, start, tmp_path):
    words = [script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", "2"]
    there = cluster("run", "--hosts", "2", "--", sys.executable, *words, "--output_dir", str(tmp_path / "there"))
    assert there.wait() == 0, there.text
    here = start("here", [*words, "--world_size", "2", "--output_dir", tmp_path / "here"])
    assert here.wait() == 0, here.text
    losses = [
        (tmp_path / where / "summary.json").read_text().partition('"losses"')[2][:80] for where in ("there", "here")
    ]
    assert losses[0] == losses[1]
    links = json.loads((tmp_path / "there" / "environment.json").read_text())["network"]
    assert links == {"hosts": 2, "rate": "1gbit", "delay": "0", "offload": "on"}


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
def test_what_the_hosts_counted_is_what_the_ledger_says_and_headers(cluster, tmp_path):
    """Of averages that are under way for steps, of sums in trees, and of weights that are gathered, on 3 hosts."""
    syncs = {"diloco": "--sync_every 2 --fragments 2", "local_sgd": "--sync_every 3", "tree": "", "zero3": ""}
    train = f"{' '.join(TINY_TRAINING)} --do_eval --max_eval_examples 8 --max_steps 5 --eval_steps 2 --save_steps 3"
    words = [f"{train} --sync {sync} {flags} --output_dir {tmp_path}/{sync}" for sync, flags in syncs.items()]
    (tmp_path / "all.py").write_text(ONE_AFTER_THE_OTHER.format(root=str(ROOT), script=script("task2b/run_glue.py")))
    run = cluster("run", "--hosts", "3", "--", sys.executable, str(tmp_path / "all.py"), *words)
    assert run.wait() == 0, run.text
    for sync in syncs:
        packets = json.loads((tmp_path / sync / "summary.json").read_text())["wire"]["packets_sent_per_iteration"]
        for rank in range(3):
            lines = (tmp_path / sync / f"iterations.rank{rank}.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            predicted, counted = (sum(row[f"{how}_bytes_sent"] for row in rows) for how in ("predicted", "counted"))
            headers = HEADER_BYTES * packets[rank] * len(rows)
            # What the ranks tell each other beside the calls, by rank 0's store, is some kB a step.
            assert 0 < counted - predicted < 2 * headers + 10_000 * len(rows), (sync, rank, predicted, counted)


@pytest.mark.long
@needs_cluster
def test_a_name_that_means_loopback_on_rank_0_s_host_still_brings_the_hosts_together(cluster, tmp_path):
    """As Debian's /etc/hosts has it, and srun gives it. Rank 1 is on rank 0's host, and knows it by loopback only."""
    for rank, known_as in enumerate(["127.0.1.1", "127.0.1.1", "10.10.1.1", "10.10.1.1"]):
        (tmp_path / f"hosts{rank}").write_text(f"127.0.0.1 localhost\n{known_as} first.test\n")
    place = "--master_ip first.test --master_port {master_port} --world_size 4 --local_rank {rank}"
    flags = f"{' '.join(TINY_TRAINING)} --max_steps 2 --timeout 60 --output_dir {tmp_path}/out {place}"
    # `ip netns exec` gives each program mounts of its own.
    words = (
        f"mount --bind {tmp_path}/hosts{{rank}} /etc/hosts && exec env -u GLOO_SOCKET_IFNAME -u RANK {sys.executable}"
    )
    shell = ("sh", "-c", f"{words} {script('task2b/run_glue.py')} {flags}")
    run = cluster("run", "--hosts", "2", "--ranks_per_host", "2", "--", *shell)
    assert run.wait() == 0, run.text
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["interface"] == "eth0"


@pytest.mark.long
@needs_cluster
@pytest.mark.parametrize("lost", [0, 2])
def test_when_a_host_is_cut_off_every_rank_ends_within_seconds_and_names_the_same_one(lost, cluster):
    words = [sys.executable, script("task2b/run_glue.py"), *TINY_TRAINING, "--max_steps", "100000"]
    run = cluster("run", "--hosts", "3", "--", *words)
    run.wait_for("host1.*iteration 3")
    assert cluster("cut", str(lost + 1)).wait() == 0
    assert run.wait() == 1
    for rank in {0, 1, 2} - {lost}:
        assert (
            f"host{rank + 1}| error: rank {rank}: lost connection to rank {lost}: it was killed, or its host is down"
            in run.text
        )
    assert (
        f"host{lost + 1}| error: rank {lost}: lost connection to this rank, {lost}: its network interface eth0 has no"
        in run.text
    )


def test_only_these_names_are_a_clusters(monkeypatch):
    mine = ["mine-host1", "mine-host64", "mine-switch"]
    others = [
        "7",
        "host1",
        "mine",
        "mine-host",
        "mine-host65",
        "mine-hostile",
        "minetoo-host1",
        "xmine-host1",
        "switch",
    ]
    monkeypatch.setattr(network, "namespaces", lambda: [*others, *reversed(mine)])
    assert network.named_namespaces("mine") == mine


def test_a_cluster_knows_its_hosts():
    Cluster(hosts=3).check_host(3)
    with pytest.raises(UsageError, match="1 to 3"):
        Cluster(hosts=3).check_host(4)
