"""Where the ranks meet before anything is sent: who is here, who is missing, and do all of them want the same run."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cos598d.errors import UserError
from cos598d.launch import Identity, port_taken

POLL_SECONDS = 0.05
# A store that was reached greets in milliseconds; a busy host may take longer.
GREETING_SECONDS = 10.0


class Meeting:
    """The ranks of one run, met at a key-value store.

    `store` serves torch's process group, `hosts[r]` is the host name of rank r. Values are exchanged as JSON.
    """

    def __init__(self, identity: Identity, store: Store, hosts: list[str], seconds: float):
        self.identity, self.store, self.hosts, self.seconds = identity, store, hosts, seconds
        self._exchanges = 0

    @property
    def ranks_on_host(self) -> int:
        """How many ranks share this rank's host, itself included."""
        return self.hosts.count(self.hosts[self.identity.rank])

    @property
    def index_on_host(self) -> int:
        """This rank's place among the ranks of its host: 0 for the first."""
        return self.hosts[: self.identity.rank].count(self.hosts[self.identity.rank])

    def exchange(self, value: Any) -> list[Any]:
        """Give `value` (JSON) to every rank and return every rank's, in order of rank. Every rank must call it.

        Raises UserError naming the ranks that did not within the meeting's seconds.
        """
        self._exchanges += 1
        keys = [f"exchange/{self._exchanges}/{rank}" for rank in range(self.identity.world_size)]
        self.store.set(keys[self.identity.rank], json.dumps(value))
        missing = _wait_for(self.store, keys, self.seconds)
        if missing:
            raise UserError(f"no word from {_ranks(missing)} within {self.seconds:g} s.")
        return [json.loads(self.store.get(key)) for key in keys]


def meet(identity: Identity, seconds: float, facts: Mapping[str, Any]) -> Meeting:
    """Meet the other ranks within `seconds`, and make sure that `facts` (flag: JSON value) are the same on all.

    Raises UserError, the same sentence on every rank that came: the port is taken, ranks are missing (named), one
    rank came twice, or a rank was started with another world size or another flag than rank 0.
    """
    deadline = time.monotonic() + seconds
    store = PrefixStore(f"cos598d/{identity.attempt}", _open_store(identity, seconds, deadline))
    me = {"host": socket.gethostname(), "world_size": identity.world_size, "facts": dict(facts)}
    if store.add(f"claim/{identity.rank}", 1) > 1:
        sentence = f"rank {identity.rank} was started twice for {_place(identity)}, or another run meets there."
        if not store.check(["verdict"]):
            store.set("objection", sentence)
        raise UserError(sentence)
    store.set(f"arrived/{identity.rank}", json.dumps(me))
    if identity.rank == 0:
        sentence, hosts = _judge(identity, store, deadline, me, seconds)
        store.set("verdict", json.dumps([sentence, hosts]))
        if sentence:
            _wait_until_read(identity, store)
    else:
        # Rank 0 alone decides who is missing, so the others allow it a little longer than itself.
        if _wait_for(store, ["verdict"], seconds + 5):
            raise UserError(f"rank 0 left {_place(identity)} without a word.")
        sentence, hosts = json.loads(store.get("verdict"))
        store.set(f"read/{identity.rank}", "")
    if sentence:
        raise UserError(sentence)
    choose_interface(identity.master_ip)
    return Meeting(identity, store, hosts, seconds)


def _open_store(identity: Identity, seconds: float, deadline: float) -> Store:
    """Serve the store (rank 0, unless a launcher serves it already) or connect to it."""
    serves = identity.rank == 0 and not identity.store_is_served
    if not serves:
        _wait_for_server(identity, seconds, deadline)
    opened: list[Store] = []
    failed: list[DistError] = []

    def open_it() -> None:
        try:
            opened.append(
                TCPStore(
                    identity.master_ip,
                    identity.master_port,
                    is_master=serves,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=seconds),
                )
            )
        except DistError as error:
            failed.append(error)

    # torch waits without end for the greeting of a server that is no store, so it waits in a thread of its own.
    thread = threading.Thread(target=open_it, name="opening the store", daemon=True)
    thread.start()
    thread.join(GREETING_SECONDS)
    if opened:
        return opened[0]
    if serves and failed and ("EADDRINUSE" in str(failed[0]) or "address already in use" in str(failed[0])):
        raise port_taken(identity.master_port)
    raise UserError(
        f"what answers at {_place(identity)} is not rank 0 of this run: choose another --master_port, "
        f"the same on every rank."
    )


def _wait_for_server(identity: Identity, seconds: float, deadline: float) -> None:
    """Knock at rank 0's door until it opens. Done here and not by the store, which could not be interrupted."""
    started, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((identity.master_ip, identity.master_port), timeout=2).close()
            return
        except socket.gaierror:
            raise UserError(f"--master_ip {identity.master_ip} is not a host that this one knows.") from None
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise UserError(
                f"rank 0 is missing: nothing answered at {_place(identity)} within {seconds:g} s; start it there "
                f"(--local_rank 0) or correct --master_ip and --master_port."
            )
        if not said and time.monotonic() - started > 2:
            _say(identity, f"waiting for rank 0 at {_place(identity)} ...")
            said = True
        time.sleep(POLL_SECONDS)


def _judge(identity: Identity, store: Store, deadline: float, mine: dict, seconds: float) -> tuple[str, list[str]]:
    """Rank 0: wait for all and compare them with itself; return what is wrong ("" if nothing) and the hosts."""
    arrived = {0: mine}
    told = time.monotonic()
    while True:
        if store.check(["objection"]):
            return store.get("objection").decode(), []
        for rank in range(1, identity.world_size):
            if rank not in arrived and store.check([f"arrived/{rank}"]):
                arrived[rank] = json.loads(store.get(f"arrived/{rank}"))
                difference = _difference(rank, arrived[rank], mine)
                if difference:
                    return difference, []
        missing = [rank for rank in range(identity.world_size) if rank not in arrived]
        if not missing:
            return "", [arrived[rank]["host"] for rank in range(identity.world_size)]
        if time.monotonic() > deadline:
            return f"{_ranks(missing)} did not come to {_place(identity)} within {seconds:g} s (--timeout).", []
        if time.monotonic() - told > 2:
            _say(identity, f"waiting for {_ranks(missing)} at {_place(identity)} ...")
            told = deadline
        time.sleep(POLL_SECONDS)


def _difference(rank: int, theirs: dict, mine: dict) -> str:
    if theirs["world_size"] != mine["world_size"]:
        return (
            f"rank {rank} was started with --world_size {theirs['world_size']} and rank 0 with "
            f"{mine['world_size']}: every rank needs the same."
        )
    for flag in mine["facts"].keys() | theirs["facts"].keys():
        its, own = theirs["facts"].get(flag), mine["facts"].get(flag)
        if its != own:
            return f"rank {rank} was started with --{flag} {its} and rank 0 with {own}: every rank needs the same."
    return ""


def _wait_until_read(identity: Identity, store: Store) -> None:
    """Rank 0 serves the store, so it stays until those who came have read why the run ends."""
    came = [r for r in range(1, identity.world_size) if store.check([f"claim/{r}"])]
    _wait_for(store, [f"read/{rank}" for rank in came], 3)


def _wait_for(store: Store, keys: list[str], seconds: float) -> list[int]:
    """Wait for `keys`; return the positions of those that were not there in time.

    The store is polled: its own wait could not be interrupted, and would hide that its server is gone.
    """
    deadline = time.monotonic() + seconds
    missing = list(range(len(keys)))
    try:
        while missing := [i for i in missing if not store.check([keys[i]])]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    except DistError:
        raise UserError("rank 0, which serves the meeting point, is gone.") from None
    return missing


def choose_interface(master_ip: str) -> None:
    """Let gloo use the network interface that faces `master_ip`, where rank 0 is.

    Left alone gloo takes the host name's address, which on many Debian hosts is a loopback one: then the ranks
    of two hosts look for each other at 127.0.0.1. A GLOO_SOCKET_IFNAME set by the user stands.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master_ip, 9))  # sends nothing: only chooses the route
            address = probe.getsockname()[0]
    except OSError:  # an IPv6 meeting point: gloo's own choice stands
        return
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            return


def _place(identity: Identity) -> str:
    return f"{identity.master_ip}:{identity.master_port}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(identity: Identity, sentence: str) -> None:
    print(f"rank {identity.rank}: {sentence}", file=sys.stderr, flush=True)
