"""An emulated cluster for the duration of a block, and the programs on its hosts, with labelled output."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import filelock

from cos598d.errors import UserError
from cos598d.records.quantities import delay_words, rate_words
from cos598d.records.schema import read
from cos598d.terminal.children import end_all, exit_code_of, wait_together
from cos598d.terminal.files import write_json
from cos598d.terminal.signals import exits_on_sigterm
from cos598d.terminal.words import number_of
from cos598d.tools.cluster.network import Network, check_rights
from cos598d.tools.cluster.plan import INTERFACE, SWITCH, Cluster, address, namespace, port
from cos598d.tools.cluster.switch import READY
from cos598d.world.identity import SECRET_VARIABLE
from cos598d.world.network import DEFAULT_PORT

NETWORK_FACTS = "COS598D_NETWORK"  # describes the hosts' links for the record of a run
FOLDER = Path("/run/cos598d")  # a file and a lock for each cluster that is up
# When one program has failed, the others notice it; how long they may take to report it.
GRACE_SECONDS = 15.0
STOP_SECONDS = 10.0  # how long one may take to stop


def environment(cluster: Cluster) -> dict[str, str]:
    """The environment of a program on a host: this process's, gloo's interface, and the links' description."""
    links = {"hosts": cluster.hosts, "rate": rate_words(cluster.rate), "delay": delay_words(cluster.delay)}
    own = {"GLOO_SOCKET_IFNAME": INTERFACE, NETWORK_FACTS: json.dumps(links), "PYTHONUNBUFFERED": "1"}
    # Otherwise torch warns on every rank that the hosts' addresses have no names.
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | dict(os.environ) | own


def rank_environment(cluster: Cluster, host: int, index: int, ranks_per_host: int) -> dict[str, str]:
    """The environment variables that give a rank its place, under torchrun's names.

    Ranks are numbered host by host. Every rank gets its share of this machine's cores, which its host does not really
    have to itself.
    """
    ranks = cluster.hosts * ranks_per_host
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {
        "RANK": str((host - 1) * ranks_per_host + index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": address(1),
        "MASTER_PORT": str(DEFAULT_PORT),  # free in every cluster: each has its own ports
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def on_host(host: int, words: Sequence[str]) -> list[str]:
    """The command that runs `words` in a host's namespace, by exec."""
    return ["ip", "netns", "exec", namespace(host), *words]


def run_on_hosts(cluster: Cluster, words: Sequence[str], ranks_per_host: int, output: IO[str] = sys.stdout) -> int:
    """Run `words` as every rank of the cluster, print their lines prefixed with the host, and return the exit code.

    In the words, {rank}, {host}, {address}, {world_size}, {master_ip} and {master_port} are replaced by their values.
    When one program fails, the others get some seconds to end by themselves. The exit code is the first failure's.
    """
    programs: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    # The same for all ranks, and not in any command line.
    secret = {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)}
    try:
        for host in cluster.numbers:
            for index in range(ranks_per_host):
                variables = rank_environment(cluster, host, index, ranks_per_host)
                program = subprocess.Popen(
                    on_host(host, [_filled(word, host, variables) for word in words]),
                    env=environment(cluster) | variables | secret,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                programs.append(program)
                prefix = f"host{host}" if ranks_per_host == 1 else f"host{host} rank{variables['RANK']}"
                reader = threading.Thread(target=_relay, args=(program.stdout, prefix, output, lock), daemon=True)
                reader.start()
                readers.append(reader)
        failed = wait_together(programs, lambda _: GRACE_SECONDS)
    finally:
        end_all(programs, STOP_SECONDS)
        for reader in readers:
            reader.join(2)
    return exit_code_of(failed[1]) if failed else 0


def _relay(lines: IO[str], prefix: str, output: IO[str], lock: Any) -> None:
    for line in lines:
        with lock:
            print(f"{prefix}| {line.rstrip()}", file=output, flush=True)


def _filled(word: str, host: int, variables: Mapping[str, str]) -> str:
    values = {"rank": "RANK", "world_size": "WORLD_SIZE", "master_ip": "MASTER_ADDR", "master_port": "MASTER_PORT"}
    for name, variable in values.items():  # not str.format: a word may contain other braces
        word = word.replace(f"{{{name}}}", variables[variable])
    return word.replace("{host}", str(host)).replace("{address}", address(host))


OWN_SWITCH = (
    "this kernel has no netem: a program of ours carries the packets with that delay, and takes processor time for it"
)
# Waits until its input ends, as it does with the process that holds the other end. Then it removes the two files of the
# cluster, and ends all on its hosts.
GUARD = 'read -r _; rm -f "$1" "$2"; shift 2; for space in "$@"; do ip netns pids "$space" | xargs -r kill -9; done'


@contextlib.contextmanager
def live_cluster(cluster: Cluster, show: bool = False) -> Iterator[Cluster]:
    """Create the cluster, and print that on standard error. What still runs on its hosts is killed at the block's end.

    The network ends with this process and those on the hosts, however they end. SIGTERM ends the block, too. Meanwhile
    `find` finds the cluster by its name. Raises UserError if the cluster cannot be created.
    """
    check_rights()
    FOLDER.mkdir(exist_ok=True)
    place, lock = _place(cluster.name)
    try:
        held = lock.acquire()
    except filelock.Timeout:
        raise UserError(f"a cluster named {cluster.name} is up already. End it, or choose another --name.") from None
    with held, exits_on_sigterm():
        network = Network(cluster, show)
        network.build()
        words = [str(place), lock.lock_file, *map(namespace, cluster.numbers), SWITCH]
        guard = subprocess.Popen(["sh", "-c", GUARD, "sh", *words], stdin=subprocess.PIPE, start_new_session=True)
        try:
            if network.needs_own_switch:
                start_switch(cluster)
            write_json(place, asdict(cluster) | {"process": os.getpid()})
            print(describe(cluster, network.needs_own_switch), file=sys.stderr, flush=True)
            yield cluster
        finally:
            guard.communicate()


def _place(name: str) -> tuple[Path, filelock.FileLock]:
    """The file that describes a cluster, and the lock that the cluster's process holds."""
    return FOLDER / f"{name}.json", filelock.FileLock(FOLDER / f"{name}.lock", timeout=0)


def start_switch(cluster: Cluster) -> None:
    """Start our own switch, and wait until it carries packets."""
    words = ["-m", "cos598d.tools.cluster.switch", str(cluster.delay), *map(port, cluster.numbers)]
    switch = subprocess.Popen(
        ["ip", "netns", "exec", SWITCH, sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert switch.stdout is not None  # a pipe, as asked for above
    with switch.stdout as output:
        if output.readline().strip() != READY:
            raise UserError("the switch that delays packets did not start. See its error above.")


def find(name: str) -> tuple[Cluster, list[str]]:
    """The cluster with that name, and the words before a command that is to run in its network. Raises UserError if
    there is none."""
    check_rights()
    FOLDER.mkdir(exist_ok=True)
    place, lock = _place(Cluster(name=name).name)
    try:
        with lock:
            Path(lock.lock_file).unlink()
            raise UserError(f"no cluster named {name} is up. Make one with `cos598d cluster up --name {name}`.")
    except filelock.Timeout:
        found = read(place, dict)
    process = str(found.pop("process"))
    return Cluster(**found), ["nsenter", "--target", process, "--mount", "--", "env", f"--chdir={os.getcwd()}"]


def describe(cluster: Cluster, own_switch: bool) -> str:
    """One line about the cluster; `own_switch`: our own program carries its packets."""
    rate = "links without a limit" if cluster.rate is None else f"links of {rate_words(cluster.rate)} each way"
    delay = f", {delay_words(cluster.delay)} from host to host" if cluster.delay else ""
    first = f"cluster {cluster.name}: {number_of(cluster.hosts, 'host')}"
    addresses = f"{address(1)} to {address(cluster.hosts)}"
    return f"{first}, {addresses}, {rate}{delay}" + (f"; {OWN_SWITCH}" if own_switch else "")
