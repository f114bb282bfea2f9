"""`cos598d cluster`: up, run, ps, exec, slow, cut, down."""

import argparse
import os
import shutil
import sys
from typing import Any

from cos598d.commands.flags import after
from cos598d.errors import UsageError
from cos598d.records.quantities import parse_delay, parse_rate, rate_words
from cos598d.tools.cluster.hosts import describe, environment, live_cluster, on_host, run_on_hosts, start_switch
from cos598d.tools.cluster.network import Network, check_rights, load, named_namespaces
from cos598d.tools.cluster.plan import DEFAULT_NAME, Cluster


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `cluster` to its parser."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)

    def add(name: str, words: str, function: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        add_name_flags(command)
        command.set_defaults(what=function)
        return command

    for name, words, function in (
        ("run", "create hosts, run a program as a rank on each, then remove the hosts", _run),
        ("up", "create hosts to work in by hand", _up),
    ):
        command = add(name, words, function)
        add_link_flags(command)
        if function is _run:
            command.add_argument(
                "--ranks_per_host", type=int, default=1, metavar="N", help="ranks on each host (default: 1)"
            )
            command.add_argument(
                "program",
                nargs=argparse.REMAINDER,
                metavar="-- PROGRAM",
                help="the program and its arguments, in which {rank}, {host}, {address}, {world_size}, {master_ip} and "
                "{master_port} are filled in",
            )
    add("ps", "list the hosts, their links and their processes", _ps)
    command = add("exec", "run a program on a host", _exec)
    command.add_argument("host", type=int, metavar="HOST", help="number of the host, from 1")
    command.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments")
    command = add("slow", "change the rate of a host's link, even during a run", _slow)
    command.add_argument("host", type=int, metavar="HOST", help="number of the host, from 1")
    command.add_argument("--rate", required=True, metavar="RATE", help="the new bandwidth, such as 100mbit, or none")
    command = add("cut", "disconnect a host, even during a run", _cut)
    command.add_argument("host", type=int, metavar="HOST", help="number of the host, from 1")
    command.add_argument("--undo", action="store_true", help="connect it again")
    add("down", "end a cluster's programs and remove its hosts", _down)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand of `cluster`, and return the exit code."""
    return options.what(options)


def add_link_flags(parser: Any) -> None:
    """Add the flags that describe a cluster; `cluster_from` reads them."""
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="how many hosts (default: 4)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        metavar="RATE",
        help="bandwidth of each link in each direction, or none (default: 1gbit)",
    )
    parser.add_argument(
        "--delay", default="0", metavar="DELAY", help="latency between two hosts, such as 10ms (default: 0)"
    )
    parser.add_argument(
        "--offload",
        choices=("on", "off"),
        default="on",
        help="off: send packets of at most 1500 bytes, as on a real link",
    )


def add_name_flags(parser: Any) -> None:
    """Add the cluster's name, and whether its commands are shown."""
    parser.add_argument(
        "--name", default=DEFAULT_NAME, metavar="NAME", help=f"the cluster's name (default: {DEFAULT_NAME})"
    )
    parser.add_argument("--show", action="store_true", help="print every ip and tc command before it runs")


def cluster_from(options: argparse.Namespace) -> Cluster:
    """The cluster that the flags describe. Raises UsageError for one that cannot be."""
    return Cluster(
        options.hosts, parse_rate(options.rate), parse_delay(options.delay), options.offload == "on", options.name
    )


def _words(options: argparse.Namespace, example: str) -> list[str]:
    """The program and its arguments, without the "--" that ends our own flags."""
    words = after(options.program, "--")
    if not words:
        raise UsageError(f"no program was given. {example}")
    if words[0] in ("python", "python3"):
        words = [sys.executable, *words[1:]]  # this Python, which has the packages, also under sudo
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"there is no program {words[0]} on this machine. Give the name of one in the PATH, or a path."
        )
    return words


def _run(options: argparse.Namespace) -> int:
    cluster = cluster_from(options)
    if options.ranks_per_host < 1:
        raise UsageError(
            f"--ranks_per_host {options.ranks_per_host} is not valid: a host has at least 1 rank. Give 1 or more."
        )
    words = _words(options, "Write it after --, as in `cos598d cluster run -- python task2b/run_glue.py`.")
    with live_cluster(cluster, options.show):
        return run_on_hosts(cluster, words, options.ranks_per_host)


def _up(options: argparse.Namespace) -> int:
    cluster = cluster_from(options)
    network = Network(cluster, options.show)
    network.build()
    try:
        switch = start_switch(network, stays=True)
    except BaseException:
        network.remove()
        raise
    print(describe(cluster, bool(switch)))
    own = "" if cluster.name == DEFAULT_NAME else f" --name {cluster.name}"
    print(f"Run a program on a host: cos598d cluster exec{own} HOST PROGRAM")
    print(f"Remove the hosts: cos598d cluster down{own}")
    return 0


def _ps(options: argparse.Namespace) -> int:
    cluster = load(options.name)
    network = Network(cluster, options.show)
    print(f"{'host':>4}  {'address':12}  {'rate':9}  {'link':4}  {'MB sent':>10}  {'MB received':>11}  processes")
    for host in cluster.numbers:
        facts = network.facts(host)
        print(
            f"{host:4}  {facts['address']:12}  {facts['rate']:9}  {'up' if facts['connected'] else 'cut':4}  "
            f"{facts['bytes_sent'] / 1e6:10.3f}  {facts['bytes_received'] / 1e6:11.3f}  "
            f"{' '.join(map(str, facts['processes'])) or '-'}"
        )
    return 0


def _exec(options: argparse.Namespace) -> int:
    if options.program[:1] == ["--name"] and options.program[2:]:  # our own flag, written after the host
        options.name, options.program = options.program[1], options.program[2:]
    cluster = load(options.name)
    cluster.check_host(options.host)
    words = on_host(
        cluster, options.host, _words(options, "Write it after the host, as in `cos598d cluster exec 2 ip address`.")
    )
    sys.stdout.flush()
    os.execvpe(words[0], words, environment(cluster))


def _slow(options: argparse.Namespace) -> int:
    rate = parse_rate(options.rate)
    cluster = load(options.name)
    cluster.check_host(options.host)
    network = Network(cluster, options.show)
    network.set_rate(options.host, rate)
    cut = "" if network.facts(options.host)["connected"] else ", but it is disconnected"
    print(f"host {options.host} of {cluster.name}: {rate_words(rate)} each way{cut}")
    return 0


def _cut(options: argparse.Namespace) -> int:
    cluster = load(options.name)
    cluster.check_host(options.host)
    Network(cluster, options.show).set_connected(options.host, options.undo)
    print(f"host {options.host} of {cluster.name} is {'connected again' if options.undo else 'disconnected'}")
    return 0


def _down(options: argparse.Namespace) -> int:
    check_rights()
    cluster = Cluster(name=options.name)  # for its check of the name
    count = Network(cluster, options.show).remove()
    print(f"removed {count} namespaces of {options.name}" if count else f"no cluster named {options.name} is up")
    if strangers := named_namespaces(options.name):
        print(f"warning: not removed, because cos598d did not create them: {', '.join(strangers)}", file=sys.stderr)
    return 0
