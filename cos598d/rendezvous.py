"""Where the ranks meet before anything is sent: who is here, who is missing, and do all of them want the same run."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from cos598d.errors import UserError
from cos598d.interfaces import choose_interface
from cos598d.launch import Identity, check_address, check_port

POLL_SECONDS = 0.05
# A store that was reached greets in milliseconds; a busy host may take longer.
GREETING_SECONDS = 10.0
# How long rank 0 stays so that the others can read why the run ends.
LINGER_SECONDS = 3.0


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
    rank came twice, a rank failed before it came, or was started with another world size or flag than rank 0.
    """
    deadline = time.monotonic() + seconds
    store = _open_store(identity, seconds, deadline)
    me = {"host": _host(), "world_size": identity.world_size, "facts": dict(facts)}
    if store.add(f"claim/{identity.rank}", 1) > 1:
        raise _object(
            store,
            f"rank {identity.rank} was started twice for {_place(identity)}, or an earlier try of it died there: "
            f"start all ranks anew.",
        )
    try:
        store.set(f"arrived/{identity.rank}", json.dumps(me))
        hosts = (
            _judge(identity, store, deadline, me, seconds)
            if identity.rank == 0
            else _follow(identity, store, me, seconds)
        )
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(DistError):  # started again, this rank is no second one
            store.delete_key(f"arrived/{identity.rank}")
            store.delete_key(f"claim/{identity.rank}")
        raise
    choose_interface(identity.master_ip)
    return Meeting(identity, store, hosts, seconds)


def tell_failure(identity: Identity, sentence: str) -> None:
    """For a rank that fails before the meeting: tell those who wait there, if they are there already.

    Rank 0 serves the meeting point for a moment, so that ranks which are on their way hear it too.
    """
    sentence = f"rank {identity.rank} could not start: {sentence}"
    with contextlib.suppress(UserError, DistError):
        store = _open_store(identity, LINGER_SECONDS, time.monotonic() + LINGER_SECONDS, quiet=True)
        if identity.rank == 0:
            _give_verdict(identity, store, sentence, [], LINGER_SECONDS, expected=range(1, identity.world_size))
        else:
            _object(store, sentence)


def _object(store: Store, sentence: str) -> UserError:
    """Put down why the run cannot begin, for rank 0 to read unless it has begun; return it as an error to raise."""
    if not store.check(["verdict"]):
        store.set("objection", sentence)
    return UserError(sentence)


def _follow(identity: Identity, store: Store, mine: dict, seconds: float) -> list[str]:
    """Any rank but 0: compare with rank 0, then wait for its verdict; return the hosts."""
    # Rank 0 alone decides who is missing, so the others allow it a little longer than itself.
    if _wait_for(store, ["arrived/0"], seconds + 5):
        raise UserError(f"rank 0 left {_place(identity)} without a word.")
    difference = _difference(identity.rank, mine, json.loads(store.get("arrived/0")))
    if difference:
        raise _object(store, difference)
    if _wait_for(store, ["verdict"], seconds + 5):
        raise UserError(f"rank 0 left {_place(identity)} without a word.")
    sentence, hosts = json.loads(store.get("verdict"))
    store.set(f"read/{identity.rank}", "")
    if sentence:
        raise UserError(sentence)
    return hosts


def _judge(identity: Identity, store: Store, deadline: float, mine: dict, seconds: float) -> list[str]:
    """Rank 0: wait until all are here or something is wrong, give the verdict, and return the hosts."""
    arrived = {0: mine}
    told = time.monotonic()
    sentence = ""
    while not sentence:
        for rank in range(1, identity.world_size):
            if rank not in arrived and store.check([f"arrived/{rank}"]):
                arrived[rank] = json.loads(store.get(f"arrived/{rank}"))
        missing = [rank for rank in range(identity.world_size) if rank not in arrived]
        if store.check(["objection"]):
            sentence = store.get("objection").decode()
        elif not missing:
            break
        elif time.monotonic() > deadline:
            sentence = f"{_ranks(missing)} did not come to {_place(identity)} within {seconds:g} s (--timeout)."
        elif time.monotonic() - told > 2:
            _say(identity, f"waiting for {_ranks(missing)} at {_place(identity)} ...")
            told = deadline
        time.sleep(POLL_SECONDS)
    hosts = [] if sentence else [arrived[rank]["host"] for rank in range(identity.world_size)]
    # Those who have not come may be on their way, unless they were waited for in vain.
    in_vain = missing if time.monotonic() > deadline else []
    expected = [rank for rank in range(1, identity.world_size) if rank not in in_vain]
    _give_verdict(identity, store, sentence, hosts, LINGER_SECONDS, expected)
    if sentence:
        raise UserError(sentence)
    return hosts


def _give_verdict(
    identity: Identity, store: Store, sentence: str, hosts: list[str], seconds: float, expected: Sequence[int]
) -> None:
    """Rank 0: let all read the verdict. It serves the store, so where the run ends here it waits for the readers."""
    store.set("verdict", json.dumps([sentence, hosts]))
    if not hosts:
        store.set("arrived/0", store.get("arrived/0") if store.check(["arrived/0"]) else json.dumps({}))
    if sentence:
        _wait_for(store, [f"read/{rank}" for rank in expected], seconds)


def _open_store(identity: Identity, seconds: float, deadline: float, quiet: bool = False) -> Store:
    """Serve the store (rank 0, unless a launcher serves it already) or connect to it."""
    serves = identity.rank == 0 and not identity.store_is_served
    if serves:
        check_address(identity.master_ip)
        check_port(identity.master_port)
    else:
        _wait_for_server(identity, seconds, deadline, quiet)
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
        return PrefixStore(f"cos598d/{identity.attempt}", opened[0])
    if serves:
        raise UserError(f"rank 0 cannot open the meeting point {_place(identity)}: {failed or 'no answer in time'}.")
    raise UserError(
        f"what answers at {_place(identity)} is not rank 0 of this run: choose another --master_port, "
        f"the same on every rank."
    )


def _wait_for_server(identity: Identity, seconds: float, deadline: float, quiet: bool) -> None:
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
        if not quiet and not said and time.monotonic() - started > 2:
            _say(identity, f"waiting for rank 0 at {_place(identity)} ...")
            said = True
        time.sleep(POLL_SECONDS)


def _difference(rank: int, theirs: dict, mine: dict) -> str:
    """What rank `rank` (`theirs`) was started with and rank 0 (`mine`) not; "" where they agree, or rank 0 failed."""
    if not mine:
        return ""
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


def _host() -> str:
    """This host's name, made unlike that of another machine of the same name."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:  # not Linux
        return socket.gethostname()


def _place(identity: Identity) -> str:
    return f"{identity.master_ip}:{identity.master_port}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _say(identity: Identity, sentence: str) -> None:
    print(f"rank {identity.rank}: {sentence}", file=sys.stderr, flush=True)
