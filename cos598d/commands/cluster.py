"""`cos598d cluster`: run, up, exec, cut."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable

from cos598d.commands.flags import after, check_at_least_one
from cos598d.errors import UsageError
from cos598d.records.quantities import parse_delay, parse_rate
from cos598d.tools.cluster.hosts import environment, find, live_cluster, on_host, run_on_hosts
from cos598d.tools.cluster.network import run as run_command
from cos598d.tools.cluster.plan import DEFAULT_NAME, SWITCH, Cluster, port


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `cluster` to its parser."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)

    def add(words: str, what: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        name = what.__name__.removeprefix("_")
        command = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        called = f"the cluster's name (default: {DEFAULT_NAME})"
        command.add_argument("--name", default=DEFAULT_NAME, metavar="NAME", help=called)
        command.set_defaults(what=what)
        return command

    command = add("create hosts, run a program as a rank on each, then remove the hosts", _run)
    _add_links(command)
    words = "ranks on each host (default: 1)"
    command.add_argument("--ranks_per_host", type=int, default=1, metavar="N", help=words)
    words = "the program and its arguments, in which {rank}, {host}, {address}, {world_size}, {master_ip} and "
    words += "{master_port} are filled in"
    command.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help=words)
    _add_links(add("create hosts to work in by hand, until Ctrl-C", _up))
    command = _of_host(add("run a program on a host", _exec))
    words = "the program and its arguments"
    command.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help=words)
    command = _of_host(add("disconnect a host, even during a run", _cut))
    command.add_argument("--undo", action="store_true", help="connect it again")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand of `cluster`, and return the exit code."""
    return options.what(options)


def _of_host(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("host", type=int, metavar="HOST", help="number of the host, from 1")
    return parser


def _add_links(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a cluster; `_cluster` reads them."""
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="how many hosts (default: 4)")
    words = "bandwidth of each link in each direction, or none (default: 1gbit)"
    parser.add_argument("--rate", default="1gbit", metavar="RATE", help=words)
    words = "latency between two hosts, such as 10ms (default: 0)"
    parser.add_argument("--delay", default="0", metavar="DELAY", help=words)
    parser.add_argument("--show", action="store_true", help="print every ip and tc command before it runs")


def _cluster(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe. Raises UsageError for one that cannot be."""
    rate, delay = parse_rate(options.rate), parse_delay(options.delay)
    return Cluster(options.hosts, rate, delay, options.name)


def _words(options: argparse.Namespace, example: str) -> list[str]:
    """The program and its arguments, without the "--" that ends our own flags."""
    words = after(options.program, "--")
    if not words:
        raise UsageError(f"no program was given. {example}")
    if words[0] in ("python", "python3"):
        words = [sys.executable, *words[1:]]  # this Python, which has the packages, also under sudo
    if shutil.which(words[0]) is None:
        raise UsageError(f"there is no program {words[0]} on this machine. Give one of the PATH, or a path.")
    return words


def _run(options: argparse.Namespace) -> int:
    cluster = _cluster(options)
    check_at_least_one("--ranks_per_host", options.ranks_per_host)
    words = _words(options, "Write it after --, as in `cos598d cluster run -- python task2b/run_glue.py`.")
    with live_cluster(cluster, options.show):
        return run_on_hosts(cluster, words, options.ranks_per_host)


def _up(options: argparse.Namespace) -> int:
    cluster = _cluster(options)
    own = "" if cluster.name == DEFAULT_NAME else f" --name {cluster.name}"
    with live_cluster(cluster, options.show):
        print(f"In another terminal, run a program on a host: cos598d cluster exec{own} HOST PROGRAM")
        print("Ctrl-C ends the programs and removes the hosts.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def _exec(options: argparse.Namespace) -> int:
    cluster, inside = find(options.name)
    cluster.check_host(options.host)
    words = _words(options, "Write it after the host, as in `cos598d cluster exec 2 ip address`.")
    words = [*inside, *on_host(options.host, words)]
    sys.stdout.flush()
    os.execvpe(words[0], words, environment(cluster))


def _cut(options: argparse.Namespace) -> int:
    cluster, inside = find(options.name)
    cluster.check_host(options.host)
    run_command(*inside, "ip", "-n", SWITCH, "link", "set", port(options.host), "up" if options.undo else "down")
    print(f"host {options.host} of {options.name} is {'connected again' if options.undo else 'disconnected'}")
    return 0
